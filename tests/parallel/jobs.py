"""What the processes of the tests do, and models and gradients that are the same in each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dash_shampoo import Dash, param_groups

OPTIONS: dict[str, Any] = {"lr": 0.05, "block_size": 8, "update_every": 2, "weight_decay": 0.1, "damping": 1e-3}


class Model(nn.Module):
    """Matrices with remainders, a convolution, vectors, an embedding and parameters smaller than the world."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 12)
        self.wide = nn.Linear(12, 36)
        self.convolution = nn.Conv1d(3, 5, 3)
        self.norm = nn.LayerNorm(60)
        self.narrow = nn.Linear(60, 2)
        self.scale = nn.Parameter(torch.ones(1))
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.wide(self.embedding(tokens))).unflatten(-1, (3, 12))  # (batch, 3, 12)
        x = self.convolution(x)  # (batch, 5, 10)
        x = x.reshape(len(tokens), -1)
        out: Tensor = self.narrow(self.norm(torch.cat([x, x[:, :10]], dim=1))) * self.scale
        return out


def make_model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(7)
    return Model(dtype)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(19, (24,), generator=generator), torch.randn(24, 2, generator=generator)


def gradients(step: int, model: nn.Module) -> list[Tensor]:
    """A gradient for each parameter, whole, the same in every process."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def give(model: nn.Module, step: int, missing: Callable[[int, int], bool] = lambda *_: False) -> None:
    """Gives each parameter its part of the step's gradient, but those that ``missing(step, index)`` names."""
    for i, (parameter, gradient) in enumerate(zip(model.parameters(), gradients(step, model), strict=True)):
        if missing(step, i):
            parameter.grad = None
        elif isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        else:
            parameter.grad = gradient


def prepare(model: nn.Module, strategy: str) -> nn.Module:
    """The model as a strategy holds it: "alone", "replicated", "fsdp", "hsdp" or "mixed"."""
    if strategy == "fsdp":
        return fully_shard(model)
    if strategy == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard")))
    if strategy == "mixed":
        for module in (model.wide, model.convolution):
            fully_shard(module)
    return model


def steps(
    strategy: str,
    count: int,
    options: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    missing: Callable[[int, int], bool] = lambda *_: False,
) -> list[Tensor]:
    """The parameters after some steps with given gradients."""
    model = prepare(make_model(dtype), strategy)
    optimizer = Dash(param_groups(model), **{**OPTIONS, **(options or {})})
    for step in range(count):
        give(model, step, missing)
        optimizer.step()
    return [whole(parameter) for parameter in model.parameters()]


def train_ddp(count: int) -> list[Tensor]:
    """The parameters after training with DistributedDataParallel on shards of the batches."""
    model = DistributedDataParallel(make_model())
    optimizer = Dash(model.parameters(), **OPTIONS)
    for step in range(count):
        tokens, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch(step))
        optimizer.zero_grad()
        (model(tokens) - targets).square().mean().backward()
        optimizer.step()
    return [whole(parameter) for parameter in model.parameters()]
