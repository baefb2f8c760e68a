"""Minimax: a few polynomials, each the best of its degree where it starts (ours)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dash_shampoo.kernels import Product
from dash_shampoo.roots.schedule import Step, schedule
from dash_shampoo.roots.solver import Scaled, Solver, Spectrum, add_to_diagonal, congruence

LEAST_DAMPING = 1e-8


@dataclass(frozen=True)
class Minimax(Solver):
    """X <- X q_k(M), M <- q_k(M)^p M, with polynomials q_k that depend on p and the damping alone.

    For p = 2 the pair Y = A X, X takes the place of M = X Y: as many products, and errors in M do not pile up. The
    inverse itself, p = 1, is the square of that root: rounding in M would be amplified by the whole condition number.

    Attributes:
        degree: of the polynomials. 2 is the cheapest for a given error: its square is at hand, and serves once.
    """

    name: ClassVar[str] = "minimax"
    degree: int = 2

    def check(self, p: int, spectrum: Spectrum) -> None:
        if not 1 <= self.degree <= 3:
            raise ValueError(f"minimax has polynomials of degree 1, 2 or 3, not {self.degree!r}")
        if not LEAST_DAMPING * (1 - 1e-6) <= spectrum.low <= 0.5:
            raise ValueError(
                f"minimax needs a damping in [{LEAST_DAMPING:g}, 1], since the damping decides its polynomials; "
                "solver='eigh' takes any"
            )

    def error(self, p: int, spectrum: Spectrum) -> float:
        error = schedule(max(p, 2), spectrum.low, self.degree)[-1].error
        return error if p > 1 else 2 * error

    def solve(self, scaled: Scaled, p: int, spectrum: Spectrum, product: Product) -> Tensor:
        if p == 1:
            root = self.solve(scaled, 2, spectrum, product)
            return product(root, root)
        first, *steps = schedule(p, spectrum.low, self.degree)
        root = polynomial(first, scaled.matrix, scaled.square, product)
        if p == 2:
            return self._coupled(scaled.matrix, root, steps, product)
        residual = scaled.matrix
        factor = root
        for step in steps:
            residual = congruence(residual, factor, p, product)
            factor = polynomial(step, residual, product(residual, residual), product)
            root = product(root, factor)
        return root

    def _coupled(self, matrix: Tensor, root: Tensor, steps: list[Step], product: Product) -> Tensor:
        """The steps after the first for p = 2, with Y = A X, which tends to A^(1/2)."""
        partner = product(matrix, root) if steps else matrix
        for k, step in enumerate(steps):
            residual = product(root, partner)
            factor = polynomial(step, residual, product(residual, residual), product)
            root = product(factor, root)
            if k + 1 < len(steps):
                partner = product(partner, factor)
        return root


def polynomial(step: Step, matrix: Tensor, square: Tensor, product: Product) -> Tensor:
    """q(matrix) for a step's polynomial; its ``square`` is at hand, the cube costs a product. Uses up neither."""
    constant, linear, *higher = step.coefficients
    if not higher:
        return add_to_diagonal(matrix * linear, constant)
    value = square * higher[0]
    if len(higher) > 1:
        value = value + product(square, matrix) * higher[1]
    return add_to_diagonal(value.add_(matrix, alpha=linear), constant)
