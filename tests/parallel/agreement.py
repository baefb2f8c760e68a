"""Jobs in which processes differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dash_shampoo import Dash
from tests.parallel import jobs


def outcome(step: Callable[[int], None], steps: int = 5) -> tuple[str, int]:
    """What a step raises, and which; all of them if none does."""
    for i in range(steps):
        try:
            step(i)
        except RuntimeError as error:
            return str(error), i
    return "went on", steps


def own_data(synchronised: bool) -> tuple[str, int]:
    """Training under DDP from equal starts, each process on data of its own, that forgets to average if it is told."""
    model = DistributedDataParallel(jobs.make_perceptron())
    optimizer = Dash(model.module.named_parameters(), **jobs.OPTIONS)

    def step(i: int) -> None:
        x, y = jobs.real_batch(10 * i + dist.get_rank())
        optimizer.zero_grad()
        with nullcontext() if synchronised else model.no_sync():
            (model(x) - y).square().mean().backward()
        optimizer.step()

    return outcome(step)


def gradients(disturb: str, dtype: torch.dtype, strategy: str = "replicated") -> tuple[str, int]:
    """Steps with equal gradients, but for what is done to them on some processes."""
    model = jobs.prepare(jobs.make_model(dtype), strategy)
    optimizer = Dash(model.named_parameters(), **jobs.OPTIONS)
    random = torch.Generator().manual_seed(dist.get_rank())

    def step(i: int) -> None:
        jobs.give(model, i)
        own = {name: jobs.local(parameter.grad) for name, parameter in model.named_parameters()}
        DISTURBANCES[disturb](own, random)
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return outcome(step)


def _one_is_not_averaged(own: dict[str, Tensor], random: torch.Generator) -> None:
    own["wide.weight"].mul_(1 + dist.get_rank())


def _rounding(own: dict[str, Tensor], random: torch.Generator) -> None:
    for gradient in own.values():
        noise = torch.rand(gradient.shape, generator=random, dtype=torch.float64).mul(2).sub(1)
        gradient.copy_(gradient.double() * (1 + noise * torch.finfo(gradient.dtype).eps))


def _noise_for_zero(own: dict[str, Tensor], random: torch.Generator) -> None:
    own["convolution.bias"].copy_(1e-6 * torch.randn(5, generator=random))  # as before a normalisation


def _zero(own: dict[str, Tensor], random: torch.Generator) -> None:
    for name in ("wide.weight", "norm.weight"):
        own[name].zero_()


def _all_zero(own: dict[str, Tensor], random: torch.Generator) -> None:
    for gradient in own.values():
        gradient.zero_()


def _scaled(own: dict[str, Tensor], random: torch.Generator) -> None:
    for gradient in own.values():
        gradient.mul_(2.0**14 if gradient.dtype == torch.float16 else 2.0**60)


def _tiny(own: dict[str, Tensor], random: torch.Generator) -> None:
    _rounding(own, random)
    for gradient in own.values():
        gradient.mul_(2.0**-14 if gradient.dtype == torch.float16 else 2.0**-70)


def _not_finite(own: dict[str, Tensor], random: torch.Generator) -> None:
    if dist.get_rank() == 1:
        for gradient in own.values():
            gradient[...] = torch.inf


def _one_not_a_number(own: dict[str, Tensor], random: torch.Generator) -> None:
    if dist.get_rank() == 1:
        own["wide.bias"][0] = torch.nan


DISTURBANCES: dict[str, Callable[[dict[str, Tensor], torch.Generator], None]] = {
    "one is not averaged": _one_is_not_averaged,
    "rounding": _rounding,
    "noise for zero": _noise_for_zero,
    "zero": _zero,
    "all zero": _all_zero,
    "scaled": _scaled,
    "tiny": _tiny,
    "not finite": _not_finite,
    "one not a number": _one_not_a_number,
}


def other_options(name: str, value: Any, when: int, strategy: str) -> tuple[str, int]:
    """Steps where the first process has an option of its own, from a step on or when the optimizer is made."""
    model = jobs.prepare(jobs.make_model(), strategy)
    first = dist.get_rank() == 0
    own = {name: value} if first and when < 0 else {}
    groups = [{"params": list(model.named_parameters())}]
    optimizer = Dash(groups, **{**jobs.OPTIONS, "lr": torch.tensor(0.05), **own})

    def step(i: int) -> None:
        if i == when and first:
            if name == "lr in place":
                optimizer.param_groups[0]["lr"].fill_(value)
            elif name == "state":
                optimizer.load_state_dict(optimizer.state_dict())
            else:
                optimizer.param_groups[0][name] = value
        jobs.give(model, i)
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return outcome(step)


def schedule() -> tuple[str, int]:
    """Options that change on all processes at once, those that decide the stacks too, and a loaded state."""
    model = jobs.make_model()
    optimizer = Dash(model.named_parameters(), **jobs.OPTIONS)

    def step(i: int) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.param_groups[0]["damping"] = 1e-3 * (1 + i // 2)
        if i == 3:
            optimizer.load_state_dict(optimizer.state_dict())
        jobs.give(model, i)
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return outcome(step)


def zero_redundancy(advised: bool) -> tuple[str, list[Tensor]]:
    """What Dash says inside ZeroRedundancyOptimizer; and the parameters after steps in the way that it advises."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 9), nn.Linear(9, 4))
    kind = partial(Dash, process_group=None) if advised else Dash
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **jobs.OPTIONS)

    def step(i: int) -> None:
        jobs.give(model, i)
        optimizer.step()

    message, _ = outcome(step)
    return message, [parameter.detach().clone() for parameter in model.parameters()]
