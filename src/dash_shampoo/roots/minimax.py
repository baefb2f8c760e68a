"""Minimax: a few polynomials, each the best of its degree where it starts (ours)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from dash_shampoo.kernels import Product
from dash_shampoo.roots.schedule import Step, schedule
from dash_shampoo.roots.solver import LEAST_MIRRORED, Scaled, Solver, Spectrum, add_to_diagonal, congruence, mirrored

LEAST_DAMPING = 1e-8


@dataclass(frozen=True)
class Minimax(Solver):
    """X <- X q_k(M), M <- q_k(M)^p M, with polynomials q_k that depend on p and the damping alone.

    For p = 2 and a damping below 5e-5 the pair Y = A X, X takes the place of M = X Y: as many products, and errors in M
    do not pile up. The inverse itself, p = 1, is the square of the root for p = 2: rounding in M would be amplified by
    the whole condition number.

    Attributes:
        degree: of the polynomials. 2 is the cheapest for a given error: its square is at hand, and serves once.
        tolerance: largest relative error of the eigenvalues in exact arithmetic; ``None`` is 3e-3 for a damping of
            1e-3 and more, and 1e-3 below. Training may do with more, and a step less.
    """

    name: ClassVar[str] = "minimax"
    degree: int = 2
    tolerance: float | None = None

    def check(self, p: int, spectrum: Spectrum) -> None:
        if not isinstance(self.degree, int) or not 1 <= self.degree <= 3:
            raise ValueError(f"minimax has polynomials of degree 1, 2 or 3, not {self.degree!r}")
        tolerance = self.tolerance
        if tolerance is not None and not (isinstance(tolerance, float) and 1e-6 <= tolerance <= 0.5):
            raise ValueError(f"minimax has a tolerance in [1e-6, 0.5], not {self.tolerance!r}")
        if not LEAST_DAMPING * (1 - 1e-6) <= spectrum.low <= 0.5:
            raise ValueError(
                f"minimax needs a damping in [{LEAST_DAMPING:g}, 1], since the damping decides its polynomials; "
                "solver='eigh' takes any"
            )

    def steps(self, p: int, spectrum: Spectrum) -> tuple[Step, ...]:
        """The polynomials for a root and a spectrum."""
        return schedule(p, spectrum.low, self.degree, self.tolerance)

    def error(self, p: int, spectrum: Spectrum) -> float:
        error = self.steps(max(p, 2), spectrum)[-1].error
        return error if p > 1 else 2 * error

    def temporaries(self, p: int) -> int:
        return 7 if self.degree == 2 and p <= 4 else super().temporaries(p)

    def solve(self, scaled: Scaled, p: int, spectrum: Spectrum, product: Product) -> Tensor:
        if p == 1:
            root = self.solve(scaled, 2, spectrum, product)
            return product(root, root)
        coupled = p == 2 and spectrum.low < LEAST_MIRRORED
        product = mirrored(product, spectrum)
        first, *steps = self.steps(p, spectrum)
        root = polynomial(first, scaled.matrix, product, square=scaled.square)
        # The first square has served: its memory is free for what follows.
        if coupled:
            return self._coupled(scaled.matrix, root, steps, product, scaled.square)
        residual, factor, spare = scaled.matrix, root, scaled.square
        chain, other, another = (torch.empty_like(root) for _ in range(3))
        for step in steps:
            residual = congruence(residual, factor, p, product, out=chain, spare=other)
            # From here on the chain's spectrum is shorter, and coarser products will do.
            product = partial(product, low=step.low)
            factor = polynomial(step, residual, product, out=another)
            root, spare = product(root, factor, out=spare), root
        return root

    def _coupled(self, matrix: Tensor, root: Tensor, steps: list[Step], product: Product, spare: Tensor) -> Tensor:
        """The steps after the first for p = 2, with Y = A X, which tends to A^(1/2)."""
        if not steps:
            return root
        partner = product(matrix, root, out=spare)
        residual, factor, spare = (torch.empty_like(root) for _ in range(3))
        for k, step in enumerate(steps):
            product(root, partner, out=residual)
            factor = polynomial(step, residual, product, out=factor)
            root, spare = product(factor, root, out=spare), root
            if k + 1 < len(steps):
                partner, spare = product(partner, factor, out=spare), partner
        return root


def polynomial(
    step: Step, matrix: Tensor, product: Product, *, square: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """q(matrix) for a step's polynomial, in degree - 1 products, or one less if the ``square`` is at hand."""
    constant, linear, *higher = step.coefficients
    if not higher:
        return add_to_diagonal(matrix * linear, constant)
    if len(higher) == 2:
        square = product(matrix, matrix) if square is None else square
        # constant + x (linear + x (quadratic + cubic x))
        inner = product(matrix, square, add=square, alpha=higher[1], beta=higher[0])
        return add_to_diagonal(inner.add_(matrix, alpha=linear), constant)
    if square is not None:
        value = torch.mul(square, higher[0], out=out).add_(matrix, alpha=linear)
    else:
        value = product(matrix, matrix, add=matrix, alpha=higher[0], beta=linear, out=out)
    return add_to_diagonal(value, constant)
