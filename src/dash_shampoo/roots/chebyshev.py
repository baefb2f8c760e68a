"""Chebyshev expansion of x^(-1/p): one long polynomial (arXiv 2602.02016)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

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
    degree: int = 60
    evaluation: str = "paterson-stockmeyer"

    def check(self, p: int, spectrum: Spectrum) -> None:
        if self.degree < 1:
            raise ValueError(f"chebyshev needs a degree of at least 1, not {self.degree!r}")
        if self.evaluation not in EVALUATIONS:
            raise ValueError(f"chebyshev's evaluation is one of {', '.join(EVALUATIONS)}, not {self.evaluation!r}")
        if not spectrum.low:
            raise ValueError("chebyshev needs damping > 0: it expands x^(-1/p) on the damped spectrum")

    def error(self, p: int, spectrum: Spectrum) -> float:
        return largest_error(p, spectrum.low, self.degree)

    def solve(self, scaled: Scaled, p: int, spectrum: Spectrum, product: Product) -> Tensor:
        product = mirrored(product, spectrum)
        matrix, low, high = scaled.matrix, spectrum.low, spectrum.high
        series = expansion(p, low, self.degree)
        # The spectrum [low, 1] on the interval [-1, 1] of the Chebyshev polynomials.
        variable = add_to_diagonal(matrix * (2 / (high - low)), -(high + low) / (high - low))
        if self.evaluation == "clenshaw":
            return clenshaw([identity_like(matrix) * c for c in series], variable, product)
        return paterson_stockmeyer(series, variable, product)


@cache
def expansion(p: int, low: float, degree: int) -> tuple[float, ...]:
    """Chebyshev coefficients of x^(-1/p) on [``low``, 1], from many more samples than the degree."""
    samples = 16 * (degree + 1) + 1024
    angles = (torch.arange(samples, dtype=torch.float64) + 0.5) * (math.pi / samples)
    values = ((1 + low) / 2 + (1 - low) / 2 * angles.cos()) ** (-1 / p)
    orders = torch.arange(degree + 1, dtype=torch.float64)
    coefficients = (orders[:, None] * angles).cos() @ values * (2 / samples)
    coefficients[0] /= 2
    return tuple(coefficients.tolist())


@cache
def largest_error(p: int, low: float, degree: int) -> float:
    """Largest relative error of the cut-off expansion on [``low``, 1]."""
    x = torch.logspace(math.log10(low), 0, 2000, dtype=torch.float64)
    angles = ((2 * x - 1 - low) / (1 - low)).clamp(-1, 1).acos()
    orders = torch.arange(degree + 1, dtype=torch.float64)
    values = (angles[:, None] * orders).cos() @ torch.tensor(expansion(p, low, degree), dtype=torch.float64)
    return float((values * x ** (1 / p) - 1).abs().max())


def clenshaw(series: list[Tensor], variable: Tensor, product: Product) -> Tensor:
    """sum_k series[k] T_k(variable), for matrices ``series[k]`` that commute with ``variable``."""
    one = two = torch.zeros_like(variable)
    for coefficient in reversed(series[1:]):
        one, two = product(variable, one).mul_(2).sub_(two).add_(coefficient), one
    return product(variable, one).sub_(two).add_(series[0])


def paterson_stockmeyer(series: tuple[float, ...], variable: Tensor, product: Product) -> Tensor:
    """sum_k series[k] T_k(variable) as a short series in T_m(variable) whose coefficients are short series themselves.

    T_(jm+i) = 2 T_i T_(jm) - T_(jm-i) moves the terms between multiples of m to either side of them, from the top down.
    """
    m = max(1, round(math.sqrt(len(series))))
    chebyshev = [identity_like(variable), variable]
    while len(chebyshev) <= m:
        chebyshev.append(product(variable, chebyshev[-1]).mul_(2).sub_(chebyshev[-2]))
    terms = list(series) + [0.0] * (-len(series) % m)
    outer: list[Tensor] = []
    for j in reversed(range(len(terms) // m)):
        inner = terms[j * m] * chebyshev[0]
        for i in range(1, m):
            inner = inner + (2 if j else 1) * terms[j * m + i] * chebyshev[i]
            if j:
                terms[j * m - i] -= terms[j * m + i]
        outer.insert(0, inner.expand_as(variable))
    return clenshaw(outer, chebyshev[m], product)
