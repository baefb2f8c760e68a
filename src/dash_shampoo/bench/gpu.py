"""What one of eight GPUs does in the paper's step, piece by piece, and whether it does it right.

First every kernel is compared with float64, then rates are measured that nothing can exceed, then each solver and
precision on the very stacks of factors, then the stages of whole steps. On other devices the same runs with small
stacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from dash_shampoo import Dash, shampoo
from dash_shampoo.bench.roots import SOLVERS, decaying_stack, directional_error
from dash_shampoo.bench.step import decaying_gradient
from dash_shampoo.bench.timing import interleaved, milliseconds
from dash_shampoo.factors import Factors
from dash_shampoo.kernels import fused, has_tensor_cores
from dash_shampoo.roots import inverse_root, products
from dash_shampoo.stacks import Bank

Rows = Iterator[dict[str, Any]]

DAMPING = 1e-4
KINDS = ("mirrored", "full", "accumulate")
PRECISIONS = ("fp32", "tf32", "fp16x3", "mixed")


class Load(NamedTuple):
    """What a device has to do.

    Attributes:
        stacks: number of factors, by their size.
        at_once: bytes of factors that are made roots of at a time.
        ceiling: side of the matrices that measure the peak of products.
    """

    stacks: dict[int, int]
    at_once: int
    ceiling: int


# What one of eight processes owns of Llama-953M: factors of both sides with blocks of up to 1024, and of up to 2048.
PAPER = Load({1024: 184, 512: 48, 2048: 46, 1536: 6}, 1 << 30, 8192)
SMALL = Load({64: 8, 128: 4}, 1 << 20, 512)


def load_for(device: torch.device) -> Load:
    """The paper's load for a GPU, a small one for other devices."""
    return PAPER if device.type == "cuda" else SMALL


def measure(load: Load, p: int, repeats: int, minutes: float, device: torch.device) -> Rows:
    """Rows of all measurements, those that are begun within ``minutes``."""
    end = time.monotonic() + 60 * minutes
    tables = (kernels(device), ceilings(load, repeats, device), roots(load, p, repeats, device), steps(load, p, device))
    for table in tables:
        for row in table:
            yield row
            if time.monotonic() > end:
                yield {"table": "end", "what": f"out of time after {minutes:g} minutes"}
                return


def kernels(device: torch.device) -> Rows:
    """The largest error of every kernel against float64, on sizes that fit its tiles and that do not."""
    for kind in KINDS:
        for precision in fused.PRECISIONS if has_tensor_cores(device) else ():
            for size in (64, 150, 1024):
                error = fused.check(kind, precision, device, size)
                right = error <= fused.allowed(precision)
                yield {"table": "kernels", "what": f"{kind} {precision} {size}", "error": error, "right": right}


def ceilings(load: Load, repeats: int, device: torch.device) -> Rows:
    """The rates of torch's own products of large matrices, in TFLOP/s, and of a copy, in GB/s."""
    n = load.ceiling
    for dtype in (torch.float32, torch.float16) if device.type == "cuda" else (torch.float32,):
        a = torch.randn(n, n, device=device).to(dtype)
        seconds = interleaved({"product": partial(torch.mm, a, a)}, repeats, device)["product"]
        name = str(dtype).removeprefix("torch.")
        yield {"table": "ceilings", "what": f"product {name}", "tflops": 2 * n**3 / seconds / 1e12}
    source = torch.randn(4 * n * n, device=device)
    target = torch.empty_like(source)
    seconds = interleaved({"copy": partial(target.copy_, source)}, repeats, device)["copy"]
    yield {"table": "ceilings", "what": "copy", "gbytes": 2 * source.nbytes / seconds / 1e9}


def roots(load: Load, p: int, repeats: int, device: torch.device) -> Rows:
    """Each solver and precision on the stacks: time, rate, error and memory."""
    for size, count in load.stacks.items():
        sample = decaying_stack(2, size, device)
        stack = sample[torch.arange(count, device=device) % 2]
        for solver in SOLVERS:
            for precision in PRECISIONS if solver != "eigh" and has_tensor_cores(device) else ("fp32",):
                yield _root_row(stack, sample, p, solver, precision, load, repeats, device)


def _root_row(
    stack: Tensor, sample: Tensor, p: int, solver: str, precision: str, load: Load, repeats: int, device: torch.device
) -> dict[str, Any]:
    count, size, _ = stack.shape
    row: dict[str, Any] = {"table": "roots", "what": f"{solver} {precision} {count} x {size}"}
    options: dict[str, Any] = {"solver": solver, "damping": DAMPING, "precision": precision}
    options["max_workspace"] = load.at_once
    try:
        root = inverse_root(sample, p, **options)
    except ValueError as refusal:  # not safe at this damping
        return {**row, "refused": str(refusal)}
    _reset_peak(device)
    work = {"root": partial(inverse_root, stack, p, **options)}
    few = 1 if solver == "eigh" else repeats
    seconds = interleaved(work, few, device)["root"]
    rate = 2 * products(p, solver=solver, damping=DAMPING) * size**3 * count / seconds / 1e12
    error = directional_error(root.value, sample, p, DAMPING)
    return row | {
        "ms": seconds * 1e3,
        "tflops": None if solver == "eigh" else rate,
        "error": error,
        "ok": bool(root.ok.all()),
        "peak_mb": _peak(device),
    }


def steps(load: Load, p: int, device: torch.device) -> Rows:
    """The stages of a step that renews all roots, in milliseconds, with the default solver and the paper's."""
    for size, count in load.stacks.items():
        for solver in ("minimax", "newton-db-paper"):
            parameters = [nn.Parameter(torch.randn(size, size, device=device)) for _ in range(count // 2)]
            for parameter in parameters:
                parameter.grad = decaying_gradient(parameter.shape, device)
            damping, epsilon = (DAMPING, 0.0) if solver == "minimax" else (0.0, 1e-10)
            options: dict[str, Any] = {"solver": solver, "damping": damping, "epsilon": epsilon}
            optimizer = Dash(parameters, block_size=size, root=p, update_every=1, **options)
            optimizer.step()
            times = [_stages(optimizer, device) for _ in range(3)]
            middle = {name: sorted(each[name] for each in times)[1] for name in times[0]}
            yield {"table": "steps", "what": f"{solver} {count // 2} blocks of {size}", **middle}


def _stages(optimizer: Dash, device: torch.device) -> dict[str, float]:
    """Milliseconds of the stages of a step, and of all of it."""
    stages = {"survey": (Bank, "survey"), "accumulate": (shampoo, "accumulate")}
    stages |= {"roots": (Factors, "update_roots"), "move": (shampoo, "move")}
    spent = dict.fromkeys((*stages, "step"), 0.0)
    with ExitStack() as stack:
        for name, (owner, function) in stages.items():
            stack.enter_context(_timed(owner, function, partial(_add, spent, name), device))
        spent["step"] = milliseconds(optimizer.step, device)
    return {f"{name}_ms": each for name, each in spent.items()}


def _add(spent: dict[str, float], name: str, duration: float) -> None:
    spent[name] += duration


@contextmanager
def _timed(owner: Any, name: str, note: Callable[[float], None], device: torch.device) -> Iterator[None]:
    """Notes how long each call of a function takes meanwhile."""
    original = getattr(owner, name)

    def call(*args: Any) -> Any:
        found: list[Any] = []
        note(milliseconds(lambda: found.append(original(*args)), device))
        return found[0]

    with mock.patch.object(owner, name, call):
        yield


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 1e6 if device.type == "cuda" else None
