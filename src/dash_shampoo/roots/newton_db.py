"""Newton-DB: square roots of square roots, by the product form of the Denman-Beavers iteration (arXiv 2602.02016)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from torch import Tensor

from dash_shampoo.kernels import Product
from dash_shampoo.roots.solver import Scaled, Solver, Spectrum, add_to_diagonal, check_steps

# A chosen number of steps leaves an error of at most this for the smallest eigenvalue of each square root.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class NewtonDB(Solver):
    """Y <- Y T, Z <- T Z with T = (3 I - Z Y) / 2 from Y = A, Z = I takes Y to A^(1/2) and Z to A^(-1/2).

    An inverse p-th root for p = 2^m takes m such iterations, each on the square root that the one before has found;
    the inverse itself is the square of the root for p = 2.

    Attributes:
        steps: of each iteration; ``None`` for as many as the damping asks for.
        scaling: one of `dash_shampoo.roots.SCALINGS`.
    """

    name: ClassVar[str] = "newton-db"
    steps: int | None = None
    scaling: str = "bound"

    def check(self, p: int, spectrum: Spectrum) -> None:
        if p & (p - 1):
            raise ValueError(f"newton-db computes roots p = 1, 2, 4, 8, ..., not p = {p}; use 'minimax' or 'eigh'")
        check_steps(self.steps, self.name)
        if self.steps is None and not spectrum.low:
            raise ValueError(
                "newton-db needs damping > 0 to choose its number of steps: give one, or NewtonDB(steps=...)"
            )

    def error(self, p: int, spectrum: Spectrum) -> float:
        if p == 1:
            return 2 * self.error(2, spectrum)
        return abs(response(self, p, spectrum.low) * spectrum.low ** (1 / p) - 1) if spectrum.low else 1.0

    def solve(self, scaled: Scaled, p: int, spectrum: Spectrum, product: Product) -> Tensor:
        if p == 1:
            root = self.solve(scaled, 2, spectrum, product)
            return product(root, root)
        matrix = scaled.matrix
        levels = p.bit_length() - 1
        for level in range(1, levels + 1):
            steps = self._steps(level, spectrum)
            last = level == levels
            # The first step has Z = I: Z Y is the matrix itself, and T Z is T.
            factor = _factor(matrix)
            inverse, root = factor, product(matrix, factor) if steps > 1 or not last else factor
            for k in range(1, steps):
                factor = _factor(product(inverse, root))
                final = k + 1 == steps
                if not final or last:
                    inverse = product(factor, inverse)
                if not final or not last:
                    root = product(root, factor)
            matrix = root
        return inverse

    def _steps(self, level: int, spectrum: Spectrum) -> int:
        return self.steps if self.steps is not None else steps_for(spectrum.low ** (1 / 2 ** (level - 1)))


@dataclass(frozen=True)
class NewtonDBPaper(NewtonDB):
    """Newton-DB as arXiv 2602.02016 trains with it: 10 + 10 steps, scaled by twice a power iteration's estimate."""

    name: ClassVar[str] = "newton-db-paper"
    certified: ClassVar[bool] = False
    steps: int | None = 10
    scaling: str = "paper-multi-power-iteration"


def _factor(matrix: Tensor) -> Tensor:
    """T = (3 I - matrix) / 2."""
    return add_to_diagonal(matrix * -0.5, 1.5)


def response(solver: NewtonDB, p: int, x: float) -> float:
    """What the solver makes of an eigenvalue ``x`` in [0, 1], in exact arithmetic: x^(-1/p) if it has converged."""
    inverse, low = 1.0, x
    for _ in range(p.bit_length() - 1):
        steps = solver.steps if solver.steps is not None else steps_for(low)
        root, inverse = x, 1.0
        for _ in range(steps):
            factor = 1.5 - 0.5 * inverse * root
            root, inverse = root * factor, inverse * factor
        x, low = root, low**0.5
    return inverse


@cache
def steps_for(low: float) -> int:
    """Steps that take the inverse square root of every eigenvalue in [``low``, 1] to its relative `TOLERANCE`."""
    steps, progress = 0, low
    while 1 - progress**0.5 > TOLERANCE:
        progress *= (1.5 - 0.5 * progress) ** 2
        steps += 1
    return max(steps, 1)
