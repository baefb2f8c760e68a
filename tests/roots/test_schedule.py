"""The schedules are optimal, short, and do what they say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_shampoo.roots.schedule import TOP, deviation, minimax, schedule


@given(p=st.integers(1, 8), exponent=st.floats(-8, -0.31), degree=st.integers(1, 3))
def test_each_polynomial_is_optimal(p: int, exponent: float, degree: int) -> None:
    """Chebyshev: the error takes its largest size degree + 2 times, with alternating signs, and nowhere more."""
    low = 10.0**exponent
    step = minimax(p, low, TOP, degree)
    x = torch.logspace(0, 1, 20001, base=TOP / low, dtype=torch.float64) * low
    error = deviation(torch.tensor(step.coefficients, dtype=torch.float64), x, p)
    assert error.abs().max() <= step.error * (1 + 1e-5)
    near = (error.abs() >= step.error * (1 - 1e-4)).nonzero().flatten()
    signs = error[near].sign()
    assert 1 + int((signs[1:] != signs[:-1]).sum()) == degree + 2


@given(p=st.integers(1, 8), exponent=st.floats(-8, -0.31))
def test_a_schedule_takes_the_whole_spectrum_to_its_root(p: int, exponent: float) -> None:
    low = 10.0**exponent
    steps = schedule(p, low)
    x = torch.logspace(0, 1, 4001, base=TOP / low, dtype=torch.float64) * low
    rounding = 1e-12 + 4 * 2.0**-53 / low  # in float64, which the smallest eigenvalues have amplified
    root, chain = torch.ones_like(x), x.clone()
    for step in steps:
        factor = sum(c * chain**k for k, c in enumerate(step.coefficients))
        root, chain = root * factor, chain * factor**p
    assert (root * x ** (1 / p) - 1).abs().max() <= steps[-1].error * (1 + 1e-4) + rounding
    assert steps[-1].error <= 3e-3


def test_the_known_schedule_for_p_4() -> None:
    steps = schedule(4, 9.52e-5)
    expected = [
        (3.86061912, -10.9047203, 8.66282228),
        (1.81467712, -0.58720277, 0.0642348153),
        (1.50692554, -0.595017224, 0.120304722),
        (1.40882439, -0.563883508, 0.155088689),
    ]
    assert steps[-1].error == pytest.approx(2.6e-4, rel=0.03)
    for step, coefficients in zip(steps, expected, strict=True):
        assert step.coefficients == pytest.approx(coefficients, rel=3e-3)


def test_a_schedule_is_computed_once() -> None:
    assert schedule(4, 1e-4) is schedule(4, 1e-4)


@given(p=st.integers(1, 64), exponent=st.floats(-8, -0.31), tolerance=st.sampled_from([1e-2, 1e-4, 1e-6]))
def test_every_tolerance_is_reached_for_any_root(p: int, exponent: float, tolerance: float) -> None:
    steps = schedule(p, 10.0**exponent, tolerance=tolerance)
    assert steps[-1].error <= tolerance
    assert len(steps) < 60
