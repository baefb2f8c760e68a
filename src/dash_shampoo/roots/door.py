"""`inverse_root`: the one door to all solvers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache, partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_shampoo.kernels import PRECISIONS, Product, matmul, strict_products, unit_roundoff
from dash_shampoo.roots.certificate import residual, tolerance
from dash_shampoo.roots.chebyshev import Chebyshev
from dash_shampoo.roots.coupled_newton import CoupledNewton, CoupledNewtonPaper
from dash_shampoo.roots.eigh import Eigh
from dash_shampoo.roots.fastest import fastest
from dash_shampoo.roots.minimax import Minimax
from dash_shampoo.roots.newton_db import NewtonDB, NewtonDBPaper
from dash_shampoo.roots.scaling import SCALINGS, scale, schatten4
from dash_shampoo.roots.solver import Scaled, Solver, Spectrum, add_to_diagonal, identity_like

SOLVERS: dict[str, type[Solver]] = {
    solver.name: solver
    for solver in (Minimax, Eigh, NewtonDB, NewtonDBPaper, CoupledNewton, CoupledNewtonPaper, Chebyshev)
}


class Root(NamedTuple):
    """Inverse roots of a stack, each with its certificate.

    Attributes:
        value: (n, b, b) the roots.
        residual: (n,) estimated ||X^p A - I||_F of the damped, scaled matrices: what `residual` computes.
        ok: (n,) whether the residual is within what the solver promises and everything is finite. Where it is not,
            ``value`` is the caller's previous root, or else a multiple of the identity.
    """

    value: Tensor
    residual: Tensor
    ok: Tensor


def inverse_root(
    A: Tensor,
    p: int,
    *,
    solver: str | Mapping[str, Any] | Solver = "minimax",
    damping: float = 1e-4,
    epsilon: float = 0.0,
    scaling: str | None = None,
    precision: str = "fp32",
    previous: Tensor | None = None,
    max_workspace: int | None = None,
) -> Root:
    """Inverse p-th roots (A + (damping |A| + epsilon) I)^(-1/p) of a stack of symmetric positive semidefinite matrices.

    |A| = ||A^2||_F^(1/2) = (sum of lambda^4)^(1/4) is an upper bound of the largest eigenvalue that is known exactly
    from one product, so that every solver approximates the same, well-defined function. It is 1.0 to 2.3 times the
    largest eigenvalue where spectra decay, and never more than b^(1/4) times.

    Nothing here waits for the device, except for ``solver="eigh"``. Blocks do not touch each other: one that is not
    finite, or whose root fails its certificate, is flagged and replaced, and the others are as if it were not there.

    Args:
        A: (n, b, b), float32 or float64; symmetric. It is not changed.
        p: the root, a positive integer (a power of two for "newton-db").
        solver: a name, a solver object, or a mapping with the name under "name" and the solver's fields.
        damping: relative to |A|. "minimax" needs 1e-8 to 1; what lies far below it costs nothing, so it also decides
            how much work a root is.
        epsilon: absolute.
        scaling: how the stack is scaled before it is solved, one of `dash_shampoo.roots.SCALINGS`; ``None`` is the
            solver's own, "bound" for all but the paper's presets.
        precision: of the products, one of `dash_shampoo.kernels.PRECISIONS`; true float32 by default, whatever torch's
            global flags. "mixed" starts with split float16 and goes on in float16 once the spectrum is short, which is
            for GPUs. "auto" measures, once per size, damping and device, which of those that are safe is fastest; what
            it finds may differ between runs. Ignored for float64.
        previous: (n, b, b) roots to keep where a block fails.
        max_workspace: bytes of temporaries; a larger stack is worked off in pieces. ``None``: all at once.

    Returns:
        `Root`: value (n, b, b), residual (n,), ok (n,). The root of a zero matrix is epsilon^(-1/p) I, or I without
        epsilon.

    Raises:
        TypeError: ``A`` is neither float32 nor float64.
        ValueError: a shape or an option is wrong; the message says what it may be.
    """
    chosen = resolve_solver(solver)
    _check(A, p, damping, epsilon, scaling, precision)
    name = scaling or chosen.scaling
    spectrum = Spectrum(low=_lowest(name, damping, A.shape[-1]))
    chosen.check(p, spectrum)
    if precision == "auto":
        measurable = A.dtype == torch.float32 and A.numel() > 0
        precision = _fastest(chosen, p, damping, A.shape[-1], A.device) if measurable else "fp32"
    _check_precision(chosen, p, damping, precision, A.dtype)
    n = len(A)
    most = max(1, n if max_workspace is None else max_workspace // (8 * max(1, A[:1].nbytes)))
    product = partial(matmul, precision=precision, low=spectrum.low)
    bound = tolerance(chosen.error(p, spectrum), spectrum.low, unit_roundoff(precision, A.dtype), p, A.shape[-1])
    if not chosen.certified:
        bound = math.inf
    pieces = A.split(most)
    kept = [None] * len(pieces) if previous is None else previous.split(most)
    with strict_products():
        roots = [
            _solve(piece, p, chosen, damping, epsilon, name, spectrum, product, bound, old)
            for piece, old in zip(pieces, kept, strict=True)
        ]
    return roots[0] if len(roots) == 1 else Root(*(torch.cat(parts) for parts in zip(*roots, strict=True)))


def _solve(
    A: Tensor,
    p: int,
    solver: Solver,
    damping: float,
    epsilon: float,
    scaling: str,
    spectrum: Spectrum,
    product: Product,
    bound: float,
    previous: Tensor | None,
) -> Root:
    if A.numel() == 0:
        return Root(A.clone(), A.new_zeros(len(A)), torch.ones(len(A), dtype=torch.bool, device=A.device))
    # A positive semidefinite matrix has its largest entry on the diagonal: with that at 1 no product over- or
    # underflows. Matrices that are not finite take their own course up to the end, where they are replaced.
    peak = A.diagonal(dim1=1, dim2=2).amax(dim=1).view(-1, 1, 1)
    peak = torch.where((peak > 0) & torch.isfinite(peak), peak, 1)
    matrix = A / peak
    square = product(matrix, matrix, symmetric=True)
    norm = schatten4(square)
    zero = norm == 0
    shift = damping * norm + epsilon / peak
    top = (norm if scaling == "bound" else scale(scaling, matrix, square, product)) + shift
    top = top.masked_fill(zero, 1)
    floor = shift / top
    matrix.div_(top)
    square = square.div_(top.square()).addcmul_(matrix, 2 * floor)
    add_to_diagonal(square, floor.square().squeeze(2))
    add_to_diagonal(matrix, floor.squeeze(2))
    root = solver.solve(Scaled(matrix, square, floor), p, spectrum, product)
    left = residual(root, matrix, p, product)
    value = root.mul_(peak.pow(-1 / p) * top.pow(-1 / p))
    good = torch.isfinite(torch.linalg.vector_norm(value, dim=(1, 2), keepdim=True)) & (left <= bound).view(-1, 1, 1)
    fallback = previous if previous is not None else _multiple_of_identity(peak * top, p, A)
    value = torch.where(good, value, fallback)
    value = torch.where(zero, identity_like(A) * (epsilon ** (-1 / p) if epsilon else 1.0), value)
    return Root(value, left.masked_fill(zero.view(-1), 0), (good | zero).view(-1))


def _multiple_of_identity(norm: Tensor, p: int, like: Tensor) -> Tensor:
    """norm^(-1/p) I where that is finite, else I."""
    factor = norm.pow(-1 / p)
    return identity_like(like) * torch.where(torch.isfinite(factor), factor, torch.ones_like(factor))


def _lowest(scaling: str, damping: float, b: int) -> float:
    """Lower end of the spectrum of the scaled matrices: what damping adds, over the most that the scale may be."""
    largest = {"frobenius": max(1, b) ** 0.25, "paper-multi-power-iteration": 2.0}.get(scaling, 1.0)
    return damping / (damping + largest)


@cache
def _fastest(solver: Solver, p: int, damping: float, size: int, device: torch.device) -> str:
    """The precision with which this root takes the least time, of those that are safe for its damping."""
    safe = ["fp32", *(name for name, least in LEAST_DAMPING.items() if name != "fp32" and damping >= least)]

    def solve(stack: Tensor, precision: str) -> Tensor:
        return inverse_root(stack, p, solver=solver, damping=damping, precision=precision).value

    return fastest(solve, safe if solver.certified else ["fp32"], size, device)


def resolve_solver(solver: str | Mapping[str, Any] | Solver) -> Solver:
    """The solver that a name or a mapping (the name under "name", and the solver's fields) stands for.

    Raises:
        ValueError: there is no such solver, or it has no such field.
    """
    if isinstance(solver, Solver):
        return solver
    fields: dict[str, Any] = dict(solver) if isinstance(solver, Mapping) else {"name": solver}
    name = fields.pop("name", None)
    if name not in SOLVERS:
        close = get_close_matches(str(name), SOLVERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown solver {name!r}: it may be {', '.join(SOLVERS)}{hint}")
    try:
        return SOLVERS[name](**fields)
    except TypeError as error:
        known = ", ".join(field.name for field in dataclasses.fields(SOLVERS[name])) or "none"
        raise ValueError(f"solver {name!r} has the fields {known}, not {', '.join(map(repr, fields))}") from error


def solver_options(solver: str | Mapping[str, Any] | Solver) -> str | dict[str, Any]:
    """A solver in plain values, as a checkpoint can hold it: its name if it has its default fields, else a mapping."""
    chosen = resolve_solver(solver)
    fields = dataclasses.asdict(chosen)
    return chosen.name if chosen == SOLVERS[chosen.name]() else {"name": chosen.name, **fields}


def _check(A: Tensor, p: Any, damping: Any, epsilon: Any, scaling: str | None, precision: str) -> None:
    if A.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"inverse roots are computed in float32 or float64, not {A.dtype}: convert the stack first")
    if A.ndim != 3 or A.shape[1] != A.shape[2]:
        raise ValueError(f"inverse_root takes a stack of shape (n, b, b), not {tuple(A.shape)}")
    if not isinstance(p, Integral) or isinstance(p, bool) or p < 1:
        raise ValueError(f"the root p must be a positive integer, not {p!r}")
    for option, value in (("damping", damping), ("epsilon", epsilon)):
        if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
            raise ValueError(f"{option} must be a non-negative number, not {value!r}")
    if scaling is not None and scaling not in SCALINGS:
        raise ValueError(f"unknown scaling {scaling!r}: it may be {', '.join(SCALINGS)}")
    if precision not in (*PRECISIONS, "auto"):
        raise ValueError(f"unknown precision {precision!r}: it may be {', '.join(PRECISIONS)} or auto")


def _check_precision(solver: Solver, p: int, damping: float, precision: str, dtype: torch.dtype) -> None:
    """Refuses products too coarse for the damping: their rounding would make small eigenvalues negative."""
    least = LEAST_DAMPING[precision]
    if dtype == torch.float32 and solver.name == "minimax" and p > 1 and p % 2 and damping < LEAST_ODD_DAMPING:
        raise ValueError(
            f"minimax in float32 is safe for odd roots p = {p} with damping of at least {LEAST_ODD_DAMPING:g}, not "
            f"{damping:g}: raise the damping, or use solver='coupled-newton' or a float64 stack"
        )
    if dtype == torch.float64 or not solver.certified or damping >= least or solver.name == "eigh":
        return
    safe = next(name for name in ("bf16x3", "fp16x3", "fp32") if damping >= LEAST_DAMPING[name] or name == "fp32")
    if precision != "fp32":
        raise ValueError(
            f"precision {precision!r} is safe for damping of at least {least:g}, not {damping:g}: "
            f"raise the damping, or use precision={safe!r}"
        )


# An eigenvalue's rounding error is the products' unit roundoff times a small constant; below, it may turn negative.
LEAST_ODD_DAMPING = 1e-5  # of minimax, where no two-sided form keeps the chain of products symmetric
LEAST_DAMPING = {"fp32": 0.0, "mixed": 1e-6, "fp16x3": 1e-6, "bf16x3": 1e-4, "tf32": 1e-2, "fp16": 1e-2, "bf16": 1e-1}
