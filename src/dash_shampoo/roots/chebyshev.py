"""Chebyshev expansion of x^(-1/p): one long polynomial (arXiv 2602.02016)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dash_shampoo.apart import cached_apart
from dash_shampoo.kernels import Product
from dash_shampoo.roots.solver import Scaled, Solver, Spectrum, add_to_diagonal, identity_like, mirrored

EVALUATIONS = ("clenshaw", "paterson-stockmeyer")


@dataclass(frozen=True)
class Chebyshev(Solver):
    """The Chebyshev expansion of x^(-1/p) on the spectrum, cut off at a degree.

    It converges as ((sqrt(k) - 1) / (sqrt(k) + 1))^degree for a condition number k, so it is good to k of about 1e3.

    Attributes:
        degree: of the polynomial.
        evaluation: "clenshaw" as in the paper, with a product per degree, or "paterson-stockmeyer" with about
            2 sqrt(degree).
    """

    name: ClassVar[str] = "chebyshev"
    iterates: ClassVar[bool] = False
    degree: int = 60
    evaluation: str = "paterson-stockmeyer"

    def check(self, p: int, spectrum: Spectrum) -> None:
        if not isinstance(self.degree, int) or self.degree < 1:
            raise ValueError(f"chebyshev needs a degree of at least 1, not {self.degree!r}")
        if self.evaluation not in EVALUATIONS:
            raise ValueError(f"chebyshev's evaluation is one of {', '.join(EVALUATIONS)}, not {self.evaluation!r}")
        if not spectrum.low:
            raise ValueError("chebyshev needs damping > 0: it expands x^(-1/p) on the damped spectrum")

    def error(self, p: int, spectrum: Spectrum) -> float:
        return largest_error(p, spectrum.low, self.degree)

    def temporaries(self, p: int) -> int:
        return 9 + (stride(self.degree + 1) if self.evaluation == "paterson-stockmeyer" else 0)

    def solve(self, scaled: Scaled, p: int, spectrum: Spectrum, product: Product) -> Tensor:
        product = mirrored(product, spectrum)
        matrix, low, high = scaled.matrix, spectrum.low, spectrum.high
        series = expansion(p, low, self.degree)
        # The spectrum [low, 1] on the interval [-1, 1] of the Chebyshev polynomials.
        variable = add_to_diagonal(matrix * (2 / (high - low)), -(high + low) / (high - low))
        if self.evaluation == "clenshaw":
            return clenshaw(reversed(list(enumerate(series))), variable, product)
        return paterson_stockmeyer(series, variable, product)


@cached_apart()
def expansion(p: int, low: float, degree: int) -> tuple[float, ...]:
    """Chebyshev coefficients of x^(-1/p) on [``low``, 1], from many more samples than the degree."""
    samples = 16 * (degree + 1) + 1024
    angles = (torch.arange(samples, dtype=torch.float64) + 0.5) * (math.pi / samples)
    values = ((1 + low) / 2 + (1 - low) / 2 * angles.cos()) ** (-1 / p)
    orders = torch.arange(degree + 1, dtype=torch.float64)
    coefficients = (orders[:, None] * angles).cos() @ values * (2 / samples)
    coefficients[0] /= 2
    return tuple(coefficients.tolist())


@cached_apart()
def largest_error(p: int, low: float, degree: int) -> float:
    """Largest relative error of the cut-off expansion on [``low``, 1]."""
    x = torch.logspace(math.log10(low), 0, 2000, dtype=torch.float64)
    angles = ((2 * x - 1 - low) / (1 - low)).clamp(-1, 1).acos()
    orders = torch.arange(degree + 1, dtype=torch.float64)
    values = (angles[:, None] * orders).cos() @ torch.tensor(expansion(p, low, degree), dtype=torch.float64)
    return float((values * x ** (1 / p) - 1).abs().max())


def clenshaw(series: Iterable[tuple[int, float | Tensor]], variable: Tensor, product: Product) -> Tensor:
    """The sum of c_k T_k(variable) in a product per degree, from (k, c_k) for k from the degree down to 0.

    Coefficients are numbers, or matrices that commute with ``variable``.
    """
    terms = iter(series)
    one, two = _plus(torch.zeros_like(variable), next(terms)[1]), torch.zeros_like(variable)
    for k, coefficient in terms:
        value = product(variable, one).mul_(2 if k else 1).sub_(two)
        one, two = _plus(value, coefficient), one
    return one


def _plus(matrix: Tensor, coefficient: float | Tensor) -> Tensor:
    """Adds a multiple of the identity, or a matrix, in place."""
    return matrix.add_(coefficient) if isinstance(coefficient, Tensor) else add_to_diagonal(matrix, coefficient)


def paterson_stockmeyer(series: tuple[float, ...], variable: Tensor, product: Product) -> Tensor:
    """The sum of series[k] T_k(variable), as a short series in T_m(variable) whose coefficients are short series."""
    m = stride(len(series))
    chebyshev = [identity_like(variable), variable]
    while len(chebyshev) <= m:
        chebyshev.append(product(variable, chebyshev[-1]).mul_(2).sub_(chebyshev[-2]))
    return clenshaw(_folded(series, chebyshev[:m]), chebyshev[m], product)


def stride(count: int) -> int:
    """How many of a series of ``count`` terms go into one: with the square root, products are fewest."""
    return max(1, round(math.sqrt(count)))


def _folded(series: tuple[float, ...], chebyshev: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The series in T_m that equals ``series``, for m = len(``chebyshev``), its terms from the top down.

    T_(jm+i) = 2 T_i T_(jm) - T_(jm-i) moves the terms between multiples of m to either side of them.
    """
    m = len(chebyshev)
    terms = [*series, *[0.0] * (-len(series) % m)]
    for j in reversed(range(len(terms) // m)):
        inner = terms[j * m] * chebyshev[0]
        for i in range(1, m):
            inner = inner + (2 if j else 1) * terms[j * m + i] * chebyshev[i]
            if j:
                terms[j * m - i] -= terms[j * m + i]
        yield j, inner
