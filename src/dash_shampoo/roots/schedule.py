"""Polynomials that approximate x^(-1/p) as well as any of their degree can, found by Remez' exchange in float64.

Ours. One polynomial cannot reach across a wide spectrum, but a few in a row can: each maps the interval it is best on
to a shorter one around 1, from which the next starts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dash_shampoo.apart import cached_apart

# How far above 1 an eigenvalue of the scaled matrix may lie: rounding, and nothing else, since the scale is a bound.
TOP = 1.001

_GRID = 4001


class Step(NamedTuple):
    """One polynomial of a schedule.

    Attributes:
        coefficients: of 1, x, x^2, ...
        low: lower end of the interval that it is best on.
        high: upper end of that interval.
        error: largest |x^(1/p) q(x) - 1| there.
    """

    coefficients: tuple[float, ...]
    low: float
    high: float
    error: float


@cached_apart()
def schedule(p: int, low: float, degree: int = 2, tolerance: float | None = None) -> tuple[Step, ...]:
    """The polynomials q_1, q_2, ... that take the spectrum [``low``, 1] to 1 within ``tolerance``.

    With X_0 = I, M_0 = A, step k does X <- X q_k(M), M <- q_k(M)^p M, and A^(-1/p) is the last X. The spectrum of M
    after a step with error e lies in [(1 - e)^p, (1 + e)^p], whatever A is: no step has to look at data.

    Args:
        p: the root, a positive integer.
        low: lower end of the spectrum, in (0, 1).
        degree: of each polynomial.
        tolerance: largest error of the product of all of them; ``None`` is 3e-3 for a spectrum that three polynomials
            of degree 2 bring there for p = 4, and 1e-3 for wider ones.
    """
    if tolerance is None:
        tolerance = 3e-3 if low >= 9e-4 else 1e-3
    steps: list[Step] = []
    interval = (low, TOP)
    while not steps or steps[-1].error > tolerance:
        steps.append(minimax(p, *interval, degree))
        error, least = steps[-1].error, _narrowest(p, degree)
        interval = (min((1 - error) ** p, 1 - least), max((1 + error) ** p, 1 + least))
    return tuple(steps)


def _narrowest(p: int, degree: int) -> float:
    """How far around 1 an interval must reach for the best error to be 1e-11 or more.

    Below, rounding in float64 hides where the error alternates. From the first term that Taylor's series of x^(-1/p)
    leaves out, which is at least 1 / (p (degree + 1)) in size.
    """
    return (1e-11 * 2**degree * p * (degree + 1)) ** (1 / (degree + 1))


def minimax(p: int, low: float, high: float, degree: int) -> Step:
    """The polynomial q of the given degree with the least largest |x^(1/p) q(x) - 1| on [``low``, ``high``].

    Remez' exchange: solve for a polynomial whose error alternates with equal height on degree + 2 points, move the
    points to the extrema of that error, repeat. By Chebyshev's theorem the fixed point is the optimum.
    """
    grid = torch.logspace(0, 1, _GRID, base=high / low, dtype=torch.float64) * low
    grid[0], grid[-1] = low, high
    count = degree + 2
    nodes = torch.cos(torch.linspace(torch.pi, 0, count, dtype=torch.float64))
    points = low * (high / low) ** ((nodes + 1) / 2)
    signs = torch.tensor([(-1.0) ** i for i in range(count)], dtype=torch.float64)
    for _ in range(60):
        powers = torch.stack([points ** (1 / p + j) for j in range(degree + 1)], dim=1)
        solution = torch.linalg.solve(torch.cat([powers, signs[:, None]], dim=1), torch.ones_like(points))
        coefficients, height = solution[:-1], solution[-1].abs()
        error = deviation(coefficients, grid, p)
        points = _alternating_extrema(error, grid, count)
        peak = deviation(coefficients, points, p).abs().max()
        if peak <= height * (1 + 1e-7):
            break
    return Step(tuple(coefficients.tolist()), low, high, float(max(error.abs().max(), height)))


def deviation(coefficients: Tensor, x: Tensor, p: int) -> Tensor:
    """x^(1/p) q(x) - 1, for the polynomial q with the given ``coefficients``."""
    value = torch.zeros_like(x)
    for coefficient in coefficients.flip(0):
        value = value * x + coefficient
    return x ** (1 / p) * value - 1


def _alternating_extrema(error: Tensor, grid: Tensor, count: int) -> Tensor:
    """Where ``error`` is largest in each run of one sign, by parabolas through the grid: ``count`` runs in a row."""
    positive = error >= 0  # an exact zero belongs to a side, or the run after it would be lost
    starts = [0, *((positive[1:] != positive[:-1]).nonzero().flatten() + 1).tolist(), len(error)]
    tops = [start + int(error[start:stop].abs().argmax()) for start, stop in pairwise(starts)]
    while len(tops) > count:  # rounding can add a run at an end
        tops.pop(0 if error[tops[0]].abs() < error[tops[-1]].abs() else -1)
    log = grid.log()
    points = []
    for i in tops:
        offset = 0.0
        if 0 < i < len(grid) - 1:
            left, here, right = error[i - 1 : i + 2].abs().tolist()
            curvature = left - 2 * here + right
            offset = 0.5 * (left - right) / curvature if curvature else 0.0
        points.append(float((log[i] + offset * (log[1] - log[0])).exp()))
    return torch.tensor(points, dtype=torch.float64).clamp(grid[0], grid[-1])
