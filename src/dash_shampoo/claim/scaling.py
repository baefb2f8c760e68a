"""Claim: a scale close to the largest eigenvalue saves products that the Frobenius norm costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from dash_shampoo.claim.matrices import eigenvalues
from dash_shampoo.claim.report import Picture, Report, Row, Table
from dash_shampoo.kernels import matmul
from dash_shampoo.roots import Chebyshev, CoupledNewton, Minimax, NewtonDB, products, schatten4
from dash_shampoo.roots.scaling import (
    ITERATIONS,
    VECTORS,
    certified_bound,
    power_iteration,
    rayleigh_quotients,
)
from dash_shampoo.roots.schedule import TOP
from dash_shampoo.roots.solver import Scaled, Spectrum

TOLERANCE = 1e-3  # largest relative error of a root along any eigenvector
MOST_STEPS = 60
MOST_DEGREE = 2000
FROBENIUS, ONE, SIXTEEN, PAPER = "Frobenius norm", "1 vector", "16 vectors", "16 vectors, x 2 (paper)"
CERTIFIED, SCHATTEN, EXACT = "16 vectors, certified", "|A|, certified", "largest eigenvalue"
SOLVERS = ("newton-db", "coupled-newton", "chebyshev", "minimax")


def scales(stack: Tensor) -> dict[str, tuple[Tensor, float]]:
    """What may scale matrices (n, b, b), each (n,), with its cost in products of two b x b matrices."""
    square = matmul(stack, stack)
    b = stack.shape[-1]
    one, many = (power_iteration(stack, count, matmul) for count in (1, VECTORS))
    single = rayleigh_quotients(stack, one, matmul)
    best = rayleigh_quotients(stack, many, matmul).amax(dim=2)
    steps = (ITERATIONS + 1) / b
    thin = min(VECTORS, b) * steps
    bound = schatten4(square)
    found = {
        FROBENIUS: (torch.linalg.vector_norm(stack, dim=(1, 2)), 0.0),
        ONE: (single, steps),
        SIXTEEN: (best, thin),
        PAPER: (2 * best, thin),
        CERTIFIED: (torch.minimum(bound, certified_bound(square, many, matmul)), 1 + thin),
        SCHATTEN: (bound, 1.0),
        EXACT: (torch.linalg.eigvalsh(stack.double())[:, -1], 0.0),
    }
    return {name: (scale.view(-1).double().cpu(), cost) for name, (scale, cost) in found.items()}


def steps_needed(kind: type[NewtonDB] | type[CoupledNewton], p: int, x: Tensor) -> list[int | None]:
    """The fewest steps that a solver of this kind takes to the roots of spectra ``x`` (n, b); ``None`` if none do.

    Each eigenvalue goes through the solver alone, as a matrix of one row: what rounding does is not in it.
    """
    numbers = x.reshape(-1, 1, 1)
    scaled = Scaled(numbers, numbers.square(), numbers)
    needed: list[int | None] = [None] * len(x)
    for steps in range(1, MOST_STEPS + 1):
        root = kind(steps=steps).solve(scaled, p, Spectrum(float(x.min())), _product).view_as(x)
        good = ((root * x ** (1 / p) - 1).abs() <= TOLERANCE).all(dim=1).tolist()
        needed = [steps if known is None and now else known for known, now in zip(needed, good, strict=True)]
        if None not in needed:
            break
    return needed


def _product(a: Tensor, b: Tensor, **_: object) -> Tensor:
    return a * b


@cache
def _newton_products(p: int, steps: int) -> int:
    return products(p, solver=NewtonDB(steps=steps)) - 1  # less that of the scale


@cache
def _coupled_products(p: int, steps: int) -> int:
    return products(p, solver=CoupledNewton(steps=steps)) - 1


@cache
def _chebyshev_products(p: int, low: float) -> int | None:
    """With the lowest degree, to 5 %, that is as good as `TOLERANCE` on [``low``, 1]."""
    degree = 4
    while degree <= MOST_DEGREE:
        solver = Chebyshev(degree=degree)
        if solver.error(p, Spectrum(low)) <= TOLERANCE:
            return products(p, solver=solver, damping=low / (1 - low)) - 1
        degree = max(degree + 1, round(1.05 * degree))
    return None


@cache
def _minimax_products(p: int, low: float) -> int:
    return products(p, solver=Minimax(tolerance=TOLERANCE), damping=low / (1 - low))


def counted(solver: str, p: int, x: Tensor, low: Tensor) -> list[int | None]:
    """Products of a solver to the roots of scaled spectra ``x`` (n, b) above ``low`` (n,); ``None`` for never.

    Newton's iterations take what comes; Chebyshev's and minimax' polynomials are made for [``low``, 1], and fail above.
    """
    if solver in ("newton-db", "coupled-newton"):
        kind, cost = (NewtonDB, _newton_products) if solver == "newton-db" else (CoupledNewton, _coupled_products)
        return [None if steps is None else cost(p, steps) for steps in steps_needed(kind, p, x)]
    # The polynomials of nearly equal intervals are shared: ten to a decade.
    lows = [10 ** (float(torch.floor(each.log10() * 10)) / 10) for each in low]
    polynomial = _chebyshev_products if solver == "chebyshev" else _minimax_products
    inside = (x.amax(dim=1) <= TOP).tolist()
    return [polynomial(p, low) if good else None for low, good in zip(lows, inside, strict=True)]


def measure(stacks: Mapping[str, Tensor], p: int, damping: float) -> Iterator[Row]:
    """A row for every stack and scale, with the most products that a root of the stack takes each solver."""
    for name, given in stacks.items():
        peak = given.diagonal(dim1=1, dim2=2).amax(dim=1).view(-1, 1, 1)
        stack = given / peak.clamp(min=torch.finfo(given.dtype).tiny)
        values = eigenvalues(stack)
        shift = damping * values.pow(4).sum(dim=1).pow(0.25)
        for called, (scale, cost) in scales(stack).items():
            ratio = scale / values.amax(dim=1)
            x = (values + shift[:, None]) / (scale + shift)[:, None]
            found = {solver: counted(solver, p, x, shift / (scale + shift)) for solver in SOLVERS}
            done = {solver: [each for each in own if each is not None] for solver, own in found.items()}
            yield {
                "matrices": name,
                "scale": called,
                "scale / largest": float(ratio.median()),
                "least": float(ratio.min()),
                **{solver: max(own, default=None) for solver, own in done.items()},
                "never found": sum(len(own) - len(done[solver]) for solver, own in found.items()),
                "roots": len(SOLVERS) * len(stack),
                "its own products": cost,
            }


def sentences(rows: Sequence[Row]) -> Iterator[str]:
    """What the rows say of the claim, for each solver and stack."""
    for name in dict.fromkeys(row["matrices"] for row in rows):
        by_scale = {row["scale"]: row for row in rows if row["matrices"] == name}
        norm, exact = by_scale[FROBENIUS], by_scale[EXACT]
        products = ", ".join(
            f"{solver} {norm[solver]}, {by_scale[PAPER][solver]}, {by_scale[SCHATTEN][solver]}, {exact[solver]}"
            for solver in SOLVERS
        )
        yield (
            f"{name}: the Frobenius norm is {norm['scale / largest']:.3g} times the largest eigenvalue. "
            f"Products with it, the paper's scale, |A|, and the largest eigenvalue itself: {products}."
        )


def report(stacks: Mapping[str, Tensor], p: int, damping: float) -> Report:
    """Measures and reports."""
    rows = list(measure(stacks, p, damping))
    heading = "Most products to a root, by scale and solver"
    lines = {
        solver: sorted((row["scale / largest"], row[solver]) for row in rows if row[solver] is not None)
        for solver in SOLVERS
    }
    picture = Picture(f"Products to a root within {TOLERANCE:g}", "scale / largest eigenvalue", "products", lines, "xy")
    return Report(
        f"Scaling: products to a root of p = {p}, damping {damping:g}",
        "Newton's iterations need fewer steps if matrices are scaled by their largest eigenvalue, "
        "which a power iteration estimates, than by the Frobenius norm.",
        list(sentences(rows)),
        [Table(heading, rows)],
        [picture],
        (
            "Products are counted in exact arithmetic, eigenvalue by eigenvalue. Rounding is not in them.",
            f"A root is found once it is right to {TOLERANCE:g} along every eigenvector. All scales have one damping.",
            "A scale's own products stand apart. Minimax needs the square that |A| is made of anyway.",
            "Newton-DB takes as many steps for each of its square roots.",
            "Polynomials are made for [l, 1]: with a scale below the largest eigenvalue they find no root.",
        ),
    )
