"""The optimizer's step on Llama shapes: seconds, dispatched operations, state and workspace."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from dash_shampoo import Dash
from dash_shampoo.bench.timing import interleaved
from dash_shampoo.train.llama import Llama, config_for


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: what was measured.
        seconds: per step, the median.
        operations: dispatched torch operations per step.
        matrices: inverse roots per renewal.
        state: bytes of state over bytes of float32 parameters.
    """

    name: str
    seconds: float
    operations: int
    matrices: int
    state: float


class _Count(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def parameters_with_gradients(model: str, layers: int | None, device: torch.device) -> list[nn.Parameter]:
    """The parameters of a model, with gradients of decaying spectrum as training has them."""
    torch.manual_seed(0)
    own = list(Llama(config_for(model, layers=layers)).to(device).parameters())
    for parameter in own:
        parameter.grad = decaying_gradient(parameter.shape, device)
    return own


def decaying_gradient(shape: torch.Size, device: torch.device) -> Tensor:
    """A random gradient; that of a matrix has a decaying spectrum, as training has them."""
    gradient = torch.randn(shape, device=device) * 1e-2
    if len(shape) == 2:
        gradient *= torch.logspace(0, -3, shape[1], device=device)
    return gradient


def measure(
    cases: dict[str, dict[str, Any]], model: str, layers: int | None, repeats: int, device: torch.device
) -> list[Row]:
    """A row for each set of options of Dash, the steps taken in turn; "adamw" and "muon" are torch's own."""
    optimizers: dict[str, Optimizer] = {}
    for name, options in cases.items():
        own = parameters_with_gradients(model, layers, device)
        if name == "adamw":
            optimizers[name] = torch.optim.AdamW(own, lr=1e-3)
        elif name == "muon":
            optimizers[name] = torch.optim.Muon([p for p in own if p.ndim == 2], lr=1e-3)
        else:
            optimizers[name] = Dash(own, lr=1e-3, **options)
    times = interleaved({name: partial(_step, each) for name, each in optimizers.items()}, repeats, device)
    return [_row(name, optimizer, times[name]) for name, optimizer in optimizers.items()]


def _step(optimizer: Optimizer) -> None:
    optimizer.step()


def _row(name: str, optimizer: Optimizer, seconds: float) -> Row:
    with _Count() as count:  # type: ignore[no-untyped-call]
        optimizer.step()
    held = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
    size = sum(4 * parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    matrices = int(optimizer.diagnostics()["roots"]) if isinstance(optimizer, Dash) else 0
    return Row(name, seconds, count.operations, matrices, held / size)


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows as plain values."""
    return [asdict(row) for row in rows]
