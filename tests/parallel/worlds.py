"""Jobs about the groups in which processes talk."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dash_shampoo import Dash
from tests.parallel import jobs


def groups_of_its_own() -> dict[str, Any]:
    """The groups of two optimizers under DDP, of one on a part of a mesh, and the time-outs of the latter two."""
    found = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "shard"))
    models = [make_ddp(), make_ddp(), fully_shard(jobs.make_perceptron(), mesh=mesh["shard"])]
    for model in models:
        optimizer = Dash(model.parameters(), **jobs.OPTIONS)
        jobs.give(model, 0)
        optimizer.step()
        (bank,) = optimizer._banks
        found.append(bank.world._group)
    backends = [group._get_backend(torch.device("cpu")) for group in found]
    return {
        "shared": found[0] is found[1],
        "own": dist.group.WORLD not in found and mesh["shard"].get_group() not in found,
        "ranks": [dist.get_process_group_ranks(group) for group in found],
        "timeouts": [backend.options._timeout for backend in backends],
    }


def make_ddp() -> DistributedDataParallel:
    return DistributedDataParallel(jobs.make_perceptron())


def uneven(how: str) -> str:
    """What ends the training of processes of which the first has fewer batches, or leaves out a step."""
    model = make_ddp()
    optimizer = Dash(model.parameters(), **jobs.OPTIONS)
    joined = {"join": {}, "throw": {"throw_on_early_termination": True}}
    try:
        with model.join(**joined[how]) if how in joined else nullcontext():
            for step in range(1 if how in joined and dist.get_rank() == 0 else 3):
                inputs, targets = jobs.real_batch(step)
                optimizer.zero_grad()
                (model(inputs) - targets).square().mean().backward()
                if not (how == "leaves out" and step == 1 and dist.get_rank() == 0):
                    optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "went on"


def copied(way: str) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters after a copied optimizer, with a process group given to it, has gone on; and without the copy."""
    model = jobs.make_model(torch.float64)
    pair = [model, Dash(model.parameters(), **jobs.OPTIONS, process_group=dist.group.WORLD)]
    advance(*pair, 0, 3)
    if way == "pickle":
        file = io.BytesIO()
        torch.save(pair, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(pair)
    for each in (pair, other):
        advance(*each, 3, 6)
    first, second = ([jobs.whole(parameter) for parameter in each[0].parameters()] for each in (pair, other))
    return first, second


def advance(model: nn.Module, optimizer: Dash, first: int, stop: int) -> None:
    for step in range(first, stop):
        jobs.give(model, step)
        optimizer.step()


def experts(together: bool) -> dict[str, Tensor]:
    """Replicas, experts that every second process holds, and a parameter of each process, in one optimizer."""
    rank = dist.get_rank()
    pairs = [dist.new_group([i, i + 2]) for i in range(2)] if together else [None]
    kinds = {"replica": (0, "auto"), "expert": (rank % 2, pairs[rank % len(pairs)]), "own": (rank, None)}
    parameters = {kind: nn.Parameter(torch.full((12, 9), 0.5 + seed)) for kind, (seed, _) in kinds.items()}
    groups = []
    for kind, (_, process_group) in kinds.items():
        own = {} if process_group == "auto" else {"process_group": process_group}
        groups.append({"params": [(kind, parameters[kind])], **(own if together else {})})
    optimizer = Dash(groups, **jobs.OPTIONS, **({} if together else {"process_group": None}))
    for step in range(4):
        for place, (kind, (seed, _)) in enumerate(kinds.items()):
            generator = torch.Generator().manual_seed(100 * step + 10 * place + seed)
            parameters[kind].grad = torch.randn(12, 9, generator=generator)
        optimizer.step()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    assert not any("process_group" in group for group in optimizer.state_dict()["param_groups"])
    return {kind: parameter.detach().clone() for kind, parameter in parameters.items()}


TIMEOUT = timedelta(seconds=77)
