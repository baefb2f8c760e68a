"""How several processes hold the model: every one whole (ddp), each a part (fsdp), or parts with replicas (hsdp).

Whatever the strategy, a checkpoint holds what a single process would have saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dash_shampoo import Dash
from dash_shampoo.parallel.boxes import is_distributed
from dash_shampoo.train.llama import Llama
from dash_shampoo.train.processes import Processes
from dash_shampoo.train.settings import Settings


class Alone:
    """The model on a single process.

    Attributes:
        model: what has the parameters.
        module: what training calls, with tokens (batch, time); it sees to the gradients' mean over the processes.
    """

    def __init__(self, model: Llama) -> None:
        self.model = model
        self.module: nn.Module = model

    def reducing(self, last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of a batch: gradients travel at the ``last`` of those that make a step."""
        return nullcontext()

    def evaluated(self) -> None:
        """To be called after forwards without backward."""

    def model_state(self) -> Mapping[str, Any]:
        """The whole model's state at rank 0. Collective."""
        return self.model.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """The whole state of an optimizer at rank 0. Collective."""
        return optimizer.state_dict()

    def load_model(self, state: Mapping[str, Any]) -> None:
        """Loads a whole state."""
        self.model.load_state_dict(state)

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Loads a whole state."""
        optimizer.load_state_dict(state)


class Replicated(Alone):
    """A replica on every process, as DistributedDataParallel has it."""

    def __init__(self, model: Llama, device: torch.device) -> None:
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(model)
        known = signature(DistributedDataParallel).parameters
        # Its older name is deprecated in torch 2.13. The only buffer is the same everywhere and never changes.
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {"device_ids": None if device.type == "cpu" else [device.index], buffers: False}
        self._wrapped = DistributedDataParallel(model, **options)
        self.module = self._wrapped
        # The first backward decides how gradients are bundled, and with it the order of their sums: one for nothing
        # makes the first step of a resumed run the same as any other, to the bit.
        self.module(torch.zeros(1, 1, dtype=torch.int64, device=device)).sum().backward()
        model.zero_grad(set_to_none=True)

    def reducing(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._wrapped.no_sync()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        return optimizer.full_state_dict() if isinstance(optimizer, Dash) else optimizer.state_dict()


class Sharded(Alone):
    """A part on every process, as `fully_shard` has it: each layer is whole only while it computes.

    Args:
        model: on the CPU; only this process's parts of it go to the device.
        device: of this process.
        processes: that share the model.
        replicas: copies of the model, each cut over as many processes; 1 for a single one.
        timeout: how long a process waits for the others.
    """

    def __init__(
        self, model: Llama, device: torch.device, processes: Processes, replicas: int, timeout: timedelta
    ) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__(model)
        mesh = _mesh(device.type, processes, replicas, timeout)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        self._root = fully_shard(model, mesh=mesh)
        self._leads = processes.leads

    def reducing(self, last: bool) -> AbstractContextManager[None]:
        self._root.set_requires_gradient_sync(last)
        return nullcontext()

    def evaluated(self) -> None:
        self._root.reshard()  # or it would be kept whole for a backward that does not come

    def model_state(self) -> Mapping[str, Any]:
        return whole(dict(self.model.state_dict()), self._leads)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any] | None:
        if isinstance(optimizer, Dash):
            return optimizer.full_state_dict()
        return whole(optimizer.state_dict(), self._leads)

    def load_model(self, state: Mapping[str, Any]) -> None:
        own = self.model.state_dict()
        self.model.load_state_dict({name: cut(value, own.get(name)) for name, value in state.items()})

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if not isinstance(optimizer, Dash):  # which takes its part itself
            ids = chain.from_iterable(group["params"] for group in state["param_groups"])
            parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            places = dict(zip(ids, parameters, strict=True))
            states = {
                i: {name: cut(value, places[i]) for name, value in own.items()} for i, own in state["state"].items()
            }
            state = {**state, "state": states}
        optimizer.load_state_dict(state)


def _mesh(device: str, processes: Processes, replicas: int, timeout: timedelta) -> Any:
    """The processes as (all) or (replicas, parts). DeviceMesh itself would make groups with torch's own time-out."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    everyone = dist.group.WORLD
    assert everyone is not None
    if replicas == 1:
        return DeviceMesh.from_group(everyone, device)
    ranks = torch.arange(processes.size).view(replicas, -1)
    copies, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)
    parts, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
    return DeviceMesh.from_group([copies, parts], device, mesh=ranks, mesh_dim_names=("copy", "part"))


def hold(model: Llama, settings: Settings, device: torch.device, processes: Processes) -> Alone:
    """The model as the settings' strategy holds it, on ``device``. Collective."""
    if processes.size == 1:
        return Alone(model.to(device))
    if settings.strategy == "ddp":
        return Replicated(model.to(device), device)
    return Sharded(model, device, processes, settings.replicas or 1, timedelta(seconds=settings.timeout))


def whole(tree: Any, keep: bool) -> Any:
    """Dicts and lists with each DTensor in them made whole: on the CPU, or ``None`` unless ``keep``. Collective.

    Goes tensor by tensor, so that no process but the one that keeps them holds more than one of them.
    """
    if isinstance(tree, dict):
        return {key: whole(value, keep) for key, value in tree.items()}
    if isinstance(tree, list):
        return [whole(value, keep) for value in tree]
    if is_distributed(tree):
        full = tree.full_tensor()
        return full.cpu() if keep else None
    return tree


def cut(value: Any, like: Any) -> Any:
    """A whole tensor cut over the processes as the DTensor ``like`` of its shape is; any other value as it is."""
    if not isinstance(value, Tensor) or not is_distributed(like) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # Cloned, or else this process's part would keep the whole in memory.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).clone()
