"""Coupled Newton iteration for any inverse root (Guo and Higham, 2006; the solver CN of arXiv 2602.02016)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from torch import Tensor

from dash_shampoo.kernels import Product
from dash_shampoo.roots.solver import Scaled, Solver, Spectrum, add_to_diagonal, check_steps, congruence, mirrored

TOLERANCE = 1e-4


@dataclass(frozen=True)
class CoupledNewton(Solver):
    """X <- X T, M <- T^p M with T = ((p + 1) I - M) / p, from M = z A and X = z^(1/p) I, z = (p + 1) / 2.

    M tends to I from any spectrum in (0, p + 1). At the open end, M = p + 1, T is zero and stays so: the scaled matrix
    keeps to half of that range.

    Attributes:
        steps: ``None`` for as many as the damping asks for.
        scaling: one of `dash_shampoo.roots.SCALINGS`.
    """

    name: ClassVar[str] = "coupled-newton"
    steps: int | None = None
    scaling: str = "bound"

    def check(self, p: int, spectrum: Spectrum) -> None:
        check_steps(self.steps, self.name)
        if self.steps is None and not spectrum.low:
            raise ValueError(
                "coupled-newton needs damping > 0 to choose its number of steps: give one, or CoupledNewton(steps=...)"
            )

    def error(self, p: int, spectrum: Spectrum) -> float:
        return abs(response(self, p, spectrum.low) * spectrum.low ** (1 / p) - 1) if spectrum.low else 1.0

    def solve(self, scaled: Scaled, p: int, spectrum: Spectrum, product: Product) -> Tensor:
        z = (p + 1) / 2
        product = mirrored(product, spectrum)
        residual = scaled.matrix * z
        factor = _factor(residual, p)
        root = factor
        for _ in range(1, self._steps(p, spectrum)):
            residual = congruence(residual, factor, p, product) if p > 1 else product(residual, factor)
            factor = _factor(residual, p)
            root = product(root, factor)
        return root * z ** (1 / p)

    def _steps(self, p: int, spectrum: Spectrum) -> int:
        return self.steps if self.steps is not None else steps_for(p, spectrum.low)


@dataclass(frozen=True)
class CoupledNewtonPaper(CoupledNewton):
    """Coupled Newton as in arXiv 2602.02016: 10 steps, scaled by the Frobenius norm."""

    name: ClassVar[str] = "coupled-newton-paper"
    certified: ClassVar[bool] = False
    steps: int | None = 10
    scaling: str = "frobenius"


def _factor(residual: Tensor, p: int) -> Tensor:
    """T = ((p + 1) I - residual) / p."""
    return add_to_diagonal(residual * (-1 / p), (p + 1) / p)


def response(solver: CoupledNewton, p: int, x: float) -> float:
    """What the solver makes of an eigenvalue ``x`` in [0, 1], in exact arithmetic: x^(-1/p) if it has converged."""
    z = (p + 1) / 2
    root, residual = z ** (1 / p), z * x
    for _ in range(solver.steps if solver.steps is not None else steps_for(p, x)):
        factor = (p + 1 - residual) / p
        root, residual = root * factor, residual * factor**p
    return root


@cache
def steps_for(p: int, low: float) -> int:
    """Steps that take the inverse root of every eigenvalue in [``low``, 1] to its relative `TOLERANCE`."""
    steps, ends = 0, [(p + 1) / 2 * low, (p + 1) / 2]
    while any(abs(residual ** (1 / p) - 1) > TOLERANCE for residual in ends):
        ends = [residual * ((p + 1 - residual) / p) ** p for residual in ends]
        steps += 1
    return max(steps, 1)
