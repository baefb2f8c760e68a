"""Products by Triton's kernels, on NVIDIA's GPUs with Triton there: splits and additions cost no pass of their own.

Each kernel is checked against float64 when a device first asks for it, and left aside if it is wrong there.
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_shampoo.apart import cached_apart
from dash_shampoo.kernels.device import has_tensor_cores
from dash_shampoo.kernels.formats import ROUNDOFF

PRECISIONS = ("fp16", "fp16x3", "tf32")

INNER, STAGES = 32, 3
_LEAST_TILE = 16  # what tensor cores multiply at a time


class Launch(NamedTuple):
    """How a kernel is compiled: the side of a tile, and the warps that work on one."""

    tile: int
    warps: int


def launch(precision: str, size: int, major: int) -> Launch:
    """What compiles without spilling registers, by the major compute capability (tests/kernels/test_ahead.py)."""
    tile = 64 if precision == "fp16x3" and major != 9 else 128
    while tile // 2 >= max(size, _LEAST_TILE):
        tile //= 2
    return Launch(tile, 8 if tile == 128 else 4)


def serves(kind: str, precision: str, *stacks: Tensor) -> bool:
    """Whether there is a kernel of a ``kind`` for these stacks that works on their device.

    Args:
        kind: "mirrored" or "full" for `product`, "accumulate" for `accumulate`.
        precision: of the product.
        stacks: its factors.
    """
    first = stacks[0]
    return (
        precision in PRECISIONS
        and first.numel() > 0
        and all(stack.dtype == torch.float32 for stack in stacks)
        and has_tensor_cores(first.device)
        and not torch.compiler.is_compiling()
        and _works(kind, precision, first.device)
    )


def product(
    a: Tensor,
    b: Tensor,
    *,
    precision: str,
    mirrored: bool,
    add: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    shift: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """alpha a b + beta add + shift I, (n, b, b) each and float32, as `dash_shampoo.kernels.matmul` says.

    ``mirrored`` takes the product and ``add`` for symmetric, and returns what is symmetric to the bit.
    """
    out = torch.empty_like(a, memory_format=torch.contiguous_format) if out is None else out
    n, size, _ = a.shape
    tile, warps = launch(precision, size, _major(a.device))
    across = -(-size // tile)
    tiles = across * (across + 1) // 2 if mirrored else across * across
    added = out if add is None else add
    strides = [stride for stack in (a, b, added, out) for stride in stack.stride()]
    with _on(a.device):
        _jit().product_kernel[(n * tiles,)](
            *(a, b, added, out, size, *strides, float(alpha), float(beta), float(shift)),
            PRECISION=precision,
            MIRRORED=mirrored,
            ADD=add is not None,
            TILE=tile,
            INNER=INNER,
            num_warps=warps,
            num_stages=STAGES,
            enable_fp_fusion=True,
        )
    return out


def accumulate(own: Tensor, half: Tensor, keep: Tensor, *, precision: str) -> None:
    """own <- keep own + half half^T on and below the diagonals of ``own`` (n, b, b), in place.

    Args:
        own: (n, b, b), with columns next to each other. What is above its diagonals is neither read nor written.
        half: (n, b, m).
        keep: (n, 1, 1).
        precision: one of `PRECISIONS`.
    """
    n, size, depth = half.shape
    tile, warps = launch(precision, size, _major(half.device))
    across = -(-size // tile)
    with _on(half.device):
        _jit().accumulate_kernel[(n * across * (across + 1) // 2,)](
            *(half, keep, own, size, depth, *half.stride(), keep.expand(n, 1, 1).stride(0), *own.stride()[:2]),
            PRECISION=precision,
            TILE=tile,
            INNER=INNER,
            num_warps=warps,
            num_stages=STAGES,
            enable_fp_fusion=True,
        )


def _jit() -> Any:
    """The module with the kernels; raises ImportError without Triton."""
    from dash_shampoo.kernels import jit

    return jit


@cache
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cached_apart()
def _works(kind: str, precision: str, device: torch.device) -> bool:
    """Whether a kernel compiles for a device and is right there; one warning if not, none where Triton is not there."""
    try:
        error = check(kind, precision, device)
        problem = f"it is off by {error:.1e} of the factors' product" if error > allowed(precision) else ""
    except ImportError:
        return False
    except Exception as exception:  # a compiler's or a driver's, of whatever type
        problem = f"{type(exception).__name__}: {' '.join(str(exception).split())[:200]}"
    if problem:
        message = f"dash_shampoo leaves its {kind} kernel in {precision} aside on {device}, and uses torch: {problem}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return not problem


def allowed(precision: str) -> float:
    """The largest error of a product that is right, relative to that of its factors' absolute values."""
    return 4 * ROUNDOFF[precision] + 32 * ROUNDOFF["fp32"]


def check(kind: str, precision: str, device: torch.device, size: int = 150) -> float:
    """The largest error of a kernel on random stacks, relative to the product of absolute values, against float64.

    It is infinite if the kernel leaves something out, writes where it should not, or is not symmetric to the bit.
    """
    a = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    if kind == "accumulate":
        return _error_of_accumulate(a, precision)
    if kind == "mirrored":
        a = a + a.mT
        square = a @ a / size
        return _error_of_product(a, (square + square.mT) / 2, precision, mirrored=True)
    return _error_of_product(a, a.flip(1).mT, precision, mirrored=False)


def _error_of_product(a: Tensor, b: Tensor, precision: str, *, mirrored: bool) -> float:
    out = torch.full_like(a, torch.nan)
    options: dict[str, Any] = {"add": a, "alpha": 0.5, "beta": -2.0, "shift": 3.0, "out": out}
    product(a, b, precision=precision, mirrored=mirrored, **options)
    eye = torch.eye(a.shape[-1], dtype=torch.float64, device=a.device)
    expected = 0.5 * a.double() @ b.double() - 2 * a.double() + 3 * eye
    scale = 0.5 * a.double().abs() @ b.double().abs() + 2 * a.double().abs() + 3 * eye
    whole = not mirrored or torch.equal(out, out.mT)
    return _largest((out - expected) / scale) if whole else math.inf


def _error_of_accumulate(half: Tensor, precision: str) -> float:
    n, size, _ = half.shape
    packed = half.new_full((n, size + 1, size), torch.nan)
    own = packed[:, 1:]
    lower = torch.ones(size, size, dtype=torch.bool, device=half.device).tril()
    own.masked_fill_(lower, 1)
    keep = half.new_tensor([0.5, 0.75]).view(2, 1, 1)
    accumulate(own, half, keep, precision=precision)
    expected = half.double() @ half.double().mT + keep
    scale = half.double().abs() @ half.double().abs().mT + keep
    written = ~packed.isnan()
    whole = not written[:, :1].any() and torch.equal(written[:, 1:], lower.expand(n, -1, -1))
    return _largest(torch.where(lower, (own - expected) / scale, 0)) if whole else math.inf


def _largest(error: Tensor) -> float:
    return float(error.abs().max().nan_to_num(math.inf))
