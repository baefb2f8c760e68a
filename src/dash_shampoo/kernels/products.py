"""Products of stacks of matrices, in a precision that is a property of the product.

The formats narrower than float32 round the factors, and add up in float32; the split formats write each factor as the
sum of two narrow ones and multiply three times. float64 stacks are always multiplied in float64.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from dash_shampoo.kernels import fused
from dash_shampoo.kernels.flags import quick_products, tf32_products
from dash_shampoo.kernels.formats import LOW_SCALE, ROUNDOFF

PRECISIONS = (*ROUNDOFF, "mixed")

# Smallest eigenvalue, relative to the largest, that each precision of "mixed" leaves within this: measured, p = 1 to 8.
_MIXED_ERROR = 1e-2
_LOWEST = {"fp16": 0.1, "fp16x3": 1e-6}

# Size from which a symmetric product in strips costs less than the whole, on a CPU: for 512 it saves a sixth, for 1024
# a quarter; for 256 nothing.
_SMALLEST_STRIPED, _STRIPS = 512, 4


class Product(Protocol):
    """A product of two stacks, as `matmul` with its precision fixed."""

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        *,
        low: float = 0.0,
        symmetric: bool = False,
        add: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        shift: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor: ...


def unit_roundoff(precision: str, dtype: torch.dtype = torch.float32) -> float:
    """The relative error with which ``precision`` represents a factor of ``dtype``."""
    if dtype == torch.float64:
        return 2.0**-53
    return ROUNDOFF[precision if precision != "mixed" else "fp16x3"]


def promised_error(precision: str, dtype: torch.dtype = torch.float32) -> float:
    """The relative error of small eigenvalues that a ``precision`` which changes on the way takes into account."""
    return _MIXED_ERROR if precision == "mixed" and dtype != torch.float64 else 0.0


def temporaries(precision: str) -> int:
    """How many stacks as large as a factor a product makes beside its result, at most."""
    return {"fp32": 0, "tf32": 4}.get(precision, 6)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """The products (n, r, c) of two stacks (n, r, k) and (n, k, c) that make no root: see `quick_products`."""
    with quick_products(a.device):
        return torch.bmm(a, b)


def accumulate(own: Tensor, half: Tensor, keep: Tensor, lower: Tensor) -> None:
    """own <- keep own + half half^T on and below the diagonals, in place; what is above them stays.

    Tensor cores round the factors: what they compute is the product of a slightly moved ``half`` with itself, still
    positive semidefinite.

    Args:
        own: (n, b, b), with columns next to each other.
        half: (n, b, m).
        keep: (n, 1, 1).
        lower: (b, b) bool, true on and below the diagonal.
    """
    if fused.serves("accumulate", "tf32", half, own):
        fused.accumulate(own, half, keep, precision="tf32")
        return
    product = bmm(half, half.mT).addcmul_(own, keep)
    torch.where(lower, product, own, out=own)


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    precision: str = "fp32",
    low: float = 0.0,
    symmetric: bool = False,
    add: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    shift: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """The products of two stacks of matrices: alpha a b + beta add + shift I.

    Args:
        a: (n, r, k), float32 or float64.
        b: (n, k, c), of the same dtype.
        precision: one of `PRECISIONS`; float64 ignores it. "fp32" is true float32 inside `strict_products`, whatever
            the global flags say; outside, torch's flags decide what float32 means.
        low: smallest eigenvalue that matters, relative to the largest: "mixed" takes the coarsest of float16, split
            float16 and float32 that keeps it.
        symmetric: whether the products are known to be symmetric, as those of commuting symmetric matrices are. Where
            it pays, only half of each is computed and mirrored; ``add`` must be symmetric then.
        add: (n, r, c), added to the product.
        alpha: factor of the product.
        beta: factor of ``add``.
        shift: added to the diagonal.
        out: (n, r, c), takes the result; it must overlap neither factor.

    Returns:
        (n, r, c), of the same dtype.

    Raises:
        ValueError: the precision is unknown.
    """
    if precision == "mixed":
        precision = coarsest(low)
    if precision not in ROUNDOFF:
        raise ValueError(f"unknown precision {precision!r}: it may be {', '.join(PRECISIONS)}")
    if a.dtype == torch.float64:
        precision = "fp32"
    if a.shape == b.shape and fused.serves("mirrored" if symmetric else "full", precision, a, b):
        options: dict[str, Any] = {"add": add, "alpha": alpha, "beta": beta, "shift": shift, "out": out}
        return fused.product(a, b, precision=precision, mirrored=symmetric, **options)
    value = _product(a, b, precision, symmetric, add, alpha, beta, out)
    if shift:
        value.diagonal(dim1=1, dim2=2).add_(shift)
    return value


def _product(
    a: Tensor,
    b: Tensor,
    precision: str,
    symmetric: bool,
    add: Tensor | None,
    alpha: float,
    beta: float,
    out: Tensor | None,
) -> Tensor:
    """alpha a b + beta add in torch's own products."""
    if precision == "tf32":
        a, b = _round_tf32(a), _round_tf32(b)
        if a.device.type == "cuda":
            with tf32_products():
                return _accumulate(a, b, add, alpha, beta, out)
    if precision in ("fp32", "tf32"):
        if symmetric and a.shape == b.shape and a.device.type == "cpu" and a.shape[-1] >= _SMALLEST_STRIPED:
            return _symmetric(a, b, add, alpha, beta, _rows_like(a) if out is None else out)
        return _accumulate(a, b, add, alpha, beta, out)
    value = _narrow(a, b, precision)
    if alpha != 1:
        value.mul_(alpha)
    if add is not None:
        value.add_(add, alpha=beta)
    return value if out is None else out.copy_(value)


def coarsest(low: float) -> str:
    """The coarsest precision that leaves an eigenvalue ``low``, relative to the largest, within 1 %."""
    return next((name for name, lowest in _LOWEST.items() if low >= lowest * (1 - 1e-4)), "fp32")


def _accumulate(a: Tensor, b: Tensor, add: Tensor | None, alpha: float, beta: float, out: Tensor | None) -> Tensor:
    if out is not None and out.stride(-1) != 1:
        # For a result in columns oneDNN has only a reference kernel, a thousand times slower.
        return out.copy_(_accumulate(a, b, add, alpha, beta, None))
    if add is None:
        value = torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
        return value if alpha == 1 else value.mul_(alpha)
    if out is None:
        return torch.baddbmm(add, a, b, beta=beta, alpha=alpha)
    return torch.baddbmm(add, a, b, beta=beta, alpha=alpha, out=out)


def _rows_like(matrix: Tensor) -> Tensor:
    return torch.empty_like(matrix, memory_format=torch.contiguous_format)


def _symmetric(a: Tensor, b: Tensor, add: Tensor | None, alpha: float, beta: float, out: Tensor) -> Tensor:
    """Each strip of rows from its diagonal block on, mirrored: 5/8 of the full product's work with four strips."""
    size = a.shape[-1]
    height = -(-size // _STRIPS)
    for i in range(0, size, height):
        strip = slice(i, i + height)
        added = None if add is None else add[:, strip, i:]
        _accumulate(a[:, strip], b[:, :, i:], added, alpha, beta, out[:, strip, i:])
        out[:, i + height :, strip].copy_(out[:, strip, i + height :].mT)
    return out


def _narrow(a: Tensor, b: Tensor, precision: str) -> Tensor:
    """The product in float16 or bfloat16, or with each factor as the sum of two such numbers."""
    narrow = torch.float16 if precision.startswith("fp16") else torch.bfloat16
    if not precision.endswith("x3"):
        return _narrow_product(a.to(narrow), b.to(narrow))
    scale = LOW_SCALE if narrow == torch.float16 else 1.0
    (a_high, a_low), (b_high, b_low) = _split(a, narrow, scale), _split(b, narrow, scale)
    cross = _narrow_product(a_high, b_low) + _narrow_product(a_low, b_high)
    return _narrow_product(a_high, b_high).add_(cross, alpha=1 / scale)


def _split(matrix: Tensor, narrow: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
    """``matrix`` as high + low / ``scale``, both in the ``narrow`` dtype."""
    high = matrix.to(narrow)
    return high, ((matrix - high.float()) * scale).to(narrow)


def _narrow_product(a: Tensor, b: Tensor) -> Tensor:
    """The float32 product of two stacks in a narrow dtype: what tensor cores compute."""
    if a.device.type == "cuda":
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _round_tf32(matrix: Tensor) -> Tensor:
    """Rounds to nearest in TF32, which has 10 explicit bits; tensor cores then have nothing left to round.

    What is not finite stays as it is: rounding would carry the NaN of all ones, CUDA's own, into the sign, to zero.
    """
    bits = matrix.contiguous().view(torch.int32)
    rounded = bits.add(1 << 12).bitwise_and_(-(1 << 13)).view(torch.float32)
    return torch.where(torch.isfinite(matrix), rounded, matrix)
