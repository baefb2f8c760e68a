"""Minimax: a few polynomials, each the best of its degree where it starts (ours)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from dash_shampoo.kernels import Product
from dash_shampoo.roots.schedule import Step, schedule
from dash_shampoo.roots.solver import LEAST_MIRRORED, Scaled, Solver, Spectrum, add_to_diagonal, congruence, mirrored

LEAST_DAMPING = 1e-8

# Lowest spectrum at which the chain's products may be mirrored but for one in each step, that of q^(p/2) with M. With
# matrices of low rank an error of 2.2e-4 becomes 2.6e-4 at 1e-4, where mirroring that one too makes it 5.2e-4.
LEAST_CHAINED = 9e-5

# Scales the smallest eigenvalue that matters in a product with D to that of other products: measured, float16.
LEAST_ADDED = 5.0


@dataclass(frozen=True)
class Minimax(Solver):
    """X <- X q_k(M), M <- q_k(M)^p M, with polynomials q_k that depend on p and the damping alone.

    For p = 2 and a damping below 1e-3 the pair X, Y = A X takes the place of M = X Y: as many products, and errors in
    M do not pile up. The inverse itself, p = 1, is the square of the root for p = 2: rounding in M would be amplified
    by the whole condition number.

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
        first, *steps = self.steps(p, spectrum)
        root = polynomial(first.coefficients, scaled.matrix, product, square=scaled.square)
        # The first square has served: its memory is free for what follows.
        if p == 2 and spectrum.low < LEAST_MIRRORED:
            return _coupled(steps, scaled.matrix, root, spectrum, product, scaled.square)
        return _chain(steps, scaled.matrix, root, p, spectrum, product, scaled.square)


def _chain(
    steps: list[Step], residual: Tensor, root: Tensor, p: int, spectrum: Spectrum, product: Product, spare: Tensor
) -> Tensor:
    """The steps after the first with M = ``residual``."""
    one_sided = mirrored(product, spectrum)
    product = partial(product, symmetric=spectrum.low >= LEAST_CHAINED)
    factor = root
    chain, other, another = (torch.empty_like(root) for _ in range(3))
    for step in steps:
        residual = congruence(residual, factor, p, product, one_sided=one_sided, out=chain, spare=other)
        # From here on the chain's spectrum is shorter, and coarser products will do.
        product, one_sided = partial(product, low=step.low), partial(one_sided, low=step.low)
        factor = polynomial(step.coefficients, residual, product, out=another)
        root, spare = product(root, factor, out=spare), root
    return root


def _coupled(
    steps: list[Step], matrix: Tensor, root: Tensor, spectrum: Spectrum, product: Product, spare: Tensor
) -> Tensor:
    """The steps after the first for p = 2, with X = ``root`` and Y = A X, which tends to A^(1/2).

    With E = X Y - I and D = q(I + E) - I a step adds D X to X and Y D to Y: rounding is relative to D, which shrinks.
    E and its square may be mirrored, since the next step finds what that does to it in X and Y, which may not.
    """
    half = partial(product, symmetric=True)
    partner = half(matrix, root, out=spare)
    error, change, spare = (torch.empty_like(root) for _ in range(3))
    for k, step in enumerate(steps):
        half(root, partner, shift=-1.0, out=error)
        change = polynomial(about_one(step.coefficients), error, partial(half, low=step.low), out=change)
        # The largest eigenvalue of X is low^(-1/2), and what D's rounding adds to the smallest, 1, grows with it.
        add = partial(product, low=LEAST_ADDED * math.sqrt(spectrum.low) / (step.low**-0.5 - 1))
        root, spare = add(change, root, add=root, out=spare), root
        if k + 1 < len(steps):
            partner, spare = add(partner, change, add=partner, out=spare), partner
    return root


def about_one(coefficients: tuple[float, ...]) -> tuple[float, ...]:
    """The coefficients of q(1 + x) - 1, from those of q(x)."""
    moved = [sum(math.comb(j, i) * c for j, c in enumerate(coefficients)) for i in range(len(coefficients))]
    return (moved[0] - 1, *moved[1:])


def polynomial(
    coefficients: tuple[float, ...],
    matrix: Tensor,
    product: Product,
    *,
    square: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A polynomial of degree 1 to 3, in a product less than its degree, and one less if the ``square`` is at hand."""
    constant, linear, *higher = coefficients
    if not higher:
        return add_to_diagonal(torch.mul(matrix, linear, out=out), constant)
    if len(higher) == 2:
        square = product(matrix, matrix) if square is None else square
        # constant + x (linear + x (quadratic + cubic x))
        inner = product(matrix, square, add=square, alpha=higher[1], beta=higher[0], shift=constant, out=out)
        return inner.add_(matrix, alpha=linear)
    if square is not None:
        value = torch.mul(square, higher[0], out=out).add_(matrix, alpha=linear)
        return add_to_diagonal(value, constant)
    return product(matrix, matrix, add=matrix, alpha=higher[0], beta=linear, shift=constant, out=out)
