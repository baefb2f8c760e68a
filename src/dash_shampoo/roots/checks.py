"""What `inverse_root` refuses, each with a message that says what would do. Nothing here reads a tensor's values."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from dash_shampoo.kernels import PRECISIONS
from dash_shampoo.roots.scaling import SCALINGS
from dash_shampoo.roots.solver import Solver

# An eigenvalue's rounding error is the products' unit roundoff times a small constant; below, it may turn negative.
LEAST_DAMPING = {"fp32": 1e-6, "mixed": 1e-6, "fp16x3": 1e-6, "bf16x3": 1e-4, "tf32": 1e-2, "fp16": 1e-2, "bf16": 1e-1}
LEAST_ODD_DAMPING = 2e-5  # of minimax, where no two-sided form keeps the chain of products symmetric

# Half of what float16 can hold: a root's largest entry is damping^(-1/p).
_LARGEST_FLOAT16 = 2.0**15


def check_options(p: Any, damping: Any, epsilon: Any, scaling: Any, precision: Any, max_workspace: Any) -> None:
    """Raises ValueError for options that mean nothing."""
    if not isinstance(p, Integral) or isinstance(p, bool) or p < 1:
        raise ValueError(f"the root p must be a positive integer, not {p!r}")
    for option, value in (("damping", damping), ("epsilon", epsilon)):
        if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
            raise ValueError(f"{option} must be a non-negative number, not {value!r}")
    if scaling not in SCALINGS:
        raise ValueError(f"unknown scaling {scaling!r}: it may be {', '.join(SCALINGS)}")
    if precision not in (*PRECISIONS, "auto"):
        raise ValueError(f"unknown precision {precision!r}: it may be {', '.join(PRECISIONS)} or auto")
    if max_workspace is not None and (not isinstance(max_workspace, Integral) or max_workspace < 0):
        raise ValueError(f"max_workspace must be a number of bytes, or None, not {max_workspace!r}")


def check_tensors(A: Any, previous: Any, out: Any) -> None:
    """Raises TypeError or ValueError for stacks of another kind or shape."""
    if not isinstance(A, Tensor):
        raise TypeError(f"inverse_root takes a tensor (n, b, b), not a {type(A).__name__}")
    if A.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"inverse roots are computed in float32 or float64, not {A.dtype}: convert the stack first")
    if A.ndim != 3 or A.shape[1] != A.shape[2]:
        raise ValueError(f"inverse_root takes a stack of shape (n, b, b), not {tuple(A.shape)}")
    for name, other in (("previous", previous), ("out", out)):
        if other is not None and (other.shape, other.dtype, other.device) != (A.shape, A.dtype, A.device):
            raise ValueError(
                f"{name} must be like the stack, {tuple(A.shape)} {A.dtype} on {A.device}, "
                f"not {tuple(other.shape)} {other.dtype} on {other.device}"
            )
    if out is not None and A.numel() and out.data_ptr() == A.data_ptr():
        raise ValueError("out must not be the stack itself, which is not changed")


def check_precision(solver: Solver, p: int, damping: float, precision: str, dtype: torch.dtype) -> None:
    """Refuses products too coarse for the damping: their rounding would make small eigenvalues negative."""
    if dtype == torch.float64 or not solver.certified:
        return
    if solver.name == "minimax" and p > 1 and p % 2 and damping < LEAST_ODD_DAMPING:
        raise ValueError(
            f"minimax in float32 is safe for odd roots p = {p} with damping of at least {LEAST_ODD_DAMPING:g}, not "
            f"{damping:g}: raise the damping, or use solver='coupled-newton' or a float64 stack"
        )
    least = least_damping(precision, p)
    if solver.name == "eigh" or damping >= least:
        return
    if precision == "fp32":
        if solver.iterates and damping > 0:
            raise ValueError(
                f"{solver.name} in float32 is safe for damping of at least {least:g}, not {damping:g}: "
                "raise the damping, or use solver='eigh' or a float64 stack"
            )
        return
    safe = next(name for name in ("bf16x3", "fp16x3", "fp32") if damping >= least_damping(name, p) or name == "fp32")
    raise ValueError(
        f"precision {precision!r} is safe for p = {p} with damping of at least {least:g}, not {damping:g}: "
        f"raise the damping, or use precision={safe!r}"
    )


def least_damping(precision: str, p: int) -> float:
    """Smallest damping for which products of this ``precision`` are safe, for inverse ``p``-th roots."""
    # The inverse itself has no half that could come first: the large entries of X carry float16's error into X A.
    least = LEAST_DAMPING["fp16" if precision == "mixed" and p == 1 else precision]
    return max(least, _LARGEST_FLOAT16**-p) if precision in ("mixed", "fp16x3", "fp16") else least
