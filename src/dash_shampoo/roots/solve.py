"""`inverse_root`: solves a stack by whichever solver, with scaling, damping and certificate alike for all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_shampoo.kernels import Product, matmul, promised_error, strict_products, temporaries, unit_roundoff
from dash_shampoo.roots.certificate import finite, residual, tolerance
from dash_shampoo.roots.chebyshev import Chebyshev
from dash_shampoo.roots.checks import check_options, check_precision, check_tensors
from dash_shampoo.roots.coupled_newton import CoupledNewton, CoupledNewtonPaper
from dash_shampoo.roots.eigh import Eigh
from dash_shampoo.roots.minimax import Minimax
from dash_shampoo.roots.newton_db import NewtonDB, NewtonDBPaper
from dash_shampoo.roots.rule import resolve_precision
from dash_shampoo.roots.scaling import VECTORS, scale, schatten4
from dash_shampoo.roots.solver import Scaled, Solver, Spectrum, add_to_diagonal, identity_like

SOLVERS: dict[str, type[Solver]] = {
    solver.name: solver
    for solver in (Minimax, Eigh, NewtonDB, NewtonDBPaper, CoupledNewton, CoupledNewtonPaper, Chebyshev)
}


class Root(NamedTuple):
    """Inverse roots of a stack, each with its certificate.

    Attributes:
        value: (n, b, b) the roots.
        residual: (n,) estimated ||X^(p/2) A X^(p/2) - I||_F of the damped, scaled matrices; NaN where one is not
            finite.
        ok: (n,) whether the residual is within what the solver promises and everything is finite. Where it is not,
            ``value`` is the caller's previous root, or else a multiple of the identity.
    """

    value: Tensor
    residual: Tensor
    ok: Tensor


class _Plan(NamedTuple):
    """How every piece of a stack is solved; the fields are `inverse_root`'s arguments, and what follows from them."""

    p: int
    solver: Solver
    damping: float
    epsilon: float
    scaling: str
    spectrum: Spectrum
    product: Product
    bound: float  # the largest residual that is ok


def inverse_root(
    A: Tensor,
    p: int,
    *,
    solver: str | Mapping[str, Any] | Solver = "minimax",
    damping: float = 1e-4,
    epsilon: float = 0.0,
    scaling: str | None = None,
    precision: str = "auto",
    previous: Tensor | None = None,
    max_workspace: int | None = None,
    out: Tensor | None = None,
) -> Root:
    """Inverse p-th roots (A + (damping |A| + epsilon) I)^(-1/p) of a stack of symmetric positive semidefinite matrices.

    |A| = ||A^2||_F^(1/2) = (sum of lambda^4)^(1/4) is an upper bound of the largest eigenvalue that is known exactly
    from one product, so that every solver approximates the same, well-defined function. It is 1.0 to 2.3 times the
    largest eigenvalue where spectra decay, and never more than b^(1/4) times.

    Nothing here waits for the device, except for ``solver="eigh"``. Blocks do not touch each other: one that is not
    finite, or whose root fails its certificate, is flagged and replaced, and the others are as if it were not there.
    Roots carry no gradient, and autocast does not reach them.

    Args:
        A: (n, b, b), float32 or float64; symmetric. It is not changed.
        p: the root, a positive integer (a power of two for "newton-db").
        solver: a name, a solver object, or a mapping with the name under "name" and the solver's fields.
        damping: relative to |A|. "minimax" needs 1e-8 to 1, in float32 1e-6 to 1; what lies far below it costs
            nothing, so it also decides how much work a root is.
        epsilon: absolute.
        scaling: how the stack is scaled before it is solved, one of `dash_shampoo.roots.SCALINGS`; ``None`` is the
            solver's own, "bound" for all but the paper's presets.
        precision: of the products, one of `dash_shampoo.kernels.PRECISIONS`, whatever torch's global flags. "auto" is a
            rule: split float16 going over to float16 ("mixed") on GPUs with tensor cores where the damping allows it,
            true float32 elsewhere. Ignored for float64.
        previous: (n, b, b) roots to keep where a block fails, like ``A`` in dtype and device.
        max_workspace: bytes of temporaries, beside the result; a larger stack is worked off in pieces. ``None``: all at
            once. One matrix at a time is the least that can be.
        out: (n, b, b) takes the roots, like ``A`` in dtype and device. It may be ``previous``, but must not overlap
            ``A``.

    Returns:
        `Root`: value (n, b, b), residual (n,), ok (n,). A matrix whose |A| is less than half of `vanishing` is as good
        as zero, and has the root of zero: `root_of_zero` times I.

    Raises:
        TypeError: ``A`` is no tensor, or neither float32 nor float64.
        ValueError: a shape or an option is wrong; the message says what it may be.
    """
    chosen = resolve_solver(solver)
    check_tensors(A, previous, out)
    check_options(p, damping, epsilon, scaling or chosen.scaling, precision, max_workspace)
    precision = resolve_precision(precision, chosen, p, damping, A.device)
    plan = _plan(p, chosen, damping, epsilon, scaling, precision, A)
    n = len(A)
    result = Root(
        torch.empty_like(A, memory_format=torch.contiguous_format, requires_grad=False) if out is None else out,
        torch.zeros(n, dtype=A.dtype, device=A.device),
        torch.ones(n, dtype=torch.bool, device=A.device),
    )
    if A.numel() == 0:
        return result
    with torch.no_grad(), strict_products(A.device):
        each = A[:1].nbytes * (chosen.temporaries(p) + temporaries(precision))
        most = n if max_workspace is None else max_workspace // each
        for start in range(0, n, max(1, most)):
            piece = slice(start, start + max(1, most))
            kept = None if previous is None else previous[piece]
            _solve(A[piece], plan, kept, Root(*(part[piece] for part in result)))
    return result


class Call(NamedTuple):
    """A product of two b x b matrices on the way to a root.

    Attributes:
        low: smallest eigenvalue that matters to it, relative to the largest.
        symmetric: whether the product is known to be symmetric, and may be mirrored.
    """

    low: float
    symmetric: bool


def calls(p: int, *, solver: str | Mapping[str, Any] | Solver = "minimax", damping: float = 1e-4) -> list[Call]:
    """The products of two b x b matrices that `inverse_root` takes for a root, that of the scaling included.

    Raises:
        ValueError: as for `inverse_root`.
    """
    found = []

    def noted(a: Tensor, b: Tensor, **rest: Any) -> Tensor:
        if a.shape == b.shape:
            found.append(Call(rest.get("low", plan.spectrum.low), rest.get("symmetric", False)))
        return matmul(a, b, **rest)

    # Larger than the vectors of a power iteration are many: their products are thin.
    stack = torch.eye(VECTORS + 1, dtype=torch.float64, device="cpu").unsqueeze(0)
    plan = _plan(p, resolve_solver(solver), damping, 0.0, None, "fp32", stack)
    result = Root(torch.empty_like(stack), stack.new_zeros(1), stack.new_ones(1, dtype=torch.bool))
    with torch.no_grad():
        _solve(stack, plan._replace(product=noted), None, result)
    return found


def products(p: int, *, solver: str | Mapping[str, Any] | Solver = "minimax", damping: float = 1e-4) -> int:
    """How many products of two b x b matrices `inverse_root` takes for a root, that of the scaling included.

    Raises:
        ValueError: as for `inverse_root`.
    """
    return len(calls(p, solver=solver, damping=damping))


def _plan(
    p: int, solver: Solver, damping: float, epsilon: float, scaling: str | None, precision: str, A: Tensor
) -> _Plan:
    """How a stack like ``A`` is solved; raises ValueError where it cannot be."""
    name = scaling or solver.scaling
    spectrum = Spectrum(low=_lowest(name, damping, A.shape[-1]))
    solver.check(p, spectrum)
    check_precision(solver, p, damping, precision, A.dtype)
    error = solver.error(p, spectrum) + promised_error(precision, A.dtype)
    bound = tolerance(error, spectrum.low, unit_roundoff(precision, A.dtype), p, A.shape[-1])
    return _Plan(
        p=p,
        solver=solver,
        damping=damping,
        epsilon=epsilon,
        scaling=name,
        spectrum=spectrum,
        product=partial(matmul, precision=precision, low=spectrum.low),
        bound=bound if solver.certified else math.inf,
    )


def _solve(A: Tensor, plan: _Plan, previous: Tensor | None, result: Root) -> None:
    """Writes the roots of ``A`` and their certificates to ``result``."""
    p, epsilon, product = plan.p, plan.epsilon, plan.product
    # A positive semidefinite matrix has its largest entry on the diagonal: with that at 1 no product over- or
    # underflows. Matrices that are not finite take their own course up to the end, where they are replaced.
    peak = A.diagonal(dim1=1, dim2=2).amax(dim=1).view(-1, 1, 1)
    peak = torch.where(torch.isfinite(peak), peak, 1).clamp(min=max(epsilon, vanishing(A.dtype)))
    matrix = A / peak
    square = product(matrix, matrix, symmetric=True)
    norm = schatten4(square)
    zero = norm < vanishing(A.dtype) / (2 * peak)
    shift = plan.damping * norm + epsilon / peak
    top = (norm if plan.scaling == "bound" else scale(plan.scaling, matrix, square, product)) + shift
    top = top.masked_fill(zero, 1)
    floor = shift / top
    matrix.div_(top)
    square = square.div_(top.square()).addcmul_(matrix, 2 * floor)
    add_to_diagonal(square, floor.square().squeeze(2))
    add_to_diagonal(matrix, floor.squeeze(2))
    root = plan.solver.solve(Scaled(matrix, square, floor), p, plan.spectrum, product)
    left = residual(root, matrix, p)
    del matrix, square
    unit = peak.pow(-1 / p) * top.pow(-1 / p)  # the root of what the matrices were divided by
    value = root.mul_(unit)
    good = finite(value) & (left <= plan.bound)
    # What takes a block's place: a zero matrix has a root of its own, a failed one its last.
    usable = torch.isfinite(unit) & (unit > 0)
    other = identity_like(A) * torch.where(zero, root_of_zero(p, epsilon), torch.where(usable, unit, 1))
    if previous is not None:
        other = torch.where(zero, other, previous)
    zero = zero.view(-1)
    torch.where((good & ~zero).view(-1, 1, 1), value, other, out=result.value)
    torch.where(zero, torch.zeros_like(left), left, out=result.residual)
    torch.logical_or(good, zero, out=result.ok)


def vanishing(dtype: torch.dtype) -> float:
    """What is lost among entries of this size is no longer below their rounding: products of theirs underflow."""
    return torch.finfo(dtype).tiny / torch.finfo(dtype).eps


def root_of_zero(p: int, epsilon: float) -> float:
    """What the inverse root of a zero matrix is a multiple of the identity by: epsilon^(-1/p), 1 without epsilon."""
    return epsilon ** (-1 / p) if epsilon else 1.0


def _lowest(scaling: str, damping: float, b: int) -> float:
    """Lower end of the spectrum of the scaled matrices: what damping adds, over the most that the scale may be."""
    largest = {"frobenius": max(1, b) ** 0.25, "paper-multi-power-iteration": 2.0}.get(scaling, 1.0)
    return damping / (damping + largest)


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
    kind: Any = SOLVERS[name]
    try:
        return kind(**fields)
    except TypeError as error:
        known = ", ".join(field.name for field in dataclasses.fields(kind)) or "none"
        raise ValueError(f"solver {name!r} has the fields {known}, not {', '.join(map(repr, fields))}") from error


def solver_options(solver: str | Mapping[str, Any] | Solver) -> str | dict[str, Any]:
    """A solver in plain values, as a checkpoint can hold it: its name if it has its default fields, else a mapping."""
    chosen: Any = resolve_solver(solver)
    fields = dataclasses.asdict(chosen)
    return chosen.name if chosen == SOLVERS[chosen.name]() else {"name": chosen.name, **fields}
