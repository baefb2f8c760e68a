"""Surveys tell replicas from what is none, and options from others, by sums over processes."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dash_shampoo.parallel.boxes import Box, Placement
from dash_shampoo.parallel.census import BITS, NEGLIGIBLE, Census, differ
from dash_shampoo.parallel.world import World

norms = st.floats(1e-12, 1e12)
sizes = st.integers(2, 512)


def found(values: Tensor) -> list[bool]:
    """What is found of the norms (size, p) of so many processes in single precision, summed one by one."""
    size = len(values)
    squares, means = torch.zeros(2, values.shape[1])
    for own in values.float():
        squares += own * own / size
        means += own / size
    return cast(list[bool], differ(squares, means).tolist())


@given(norm=norms, size=sizes, seed=st.integers(0, 100))
def test_rounding_is_no_difference(norm: float, size: int, seed: int) -> None:
    noise = torch.rand(size, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
    assert found(norm * (1 + 0.5 * torch.finfo(torch.bfloat16).eps * noise)) == [False] * 3


@given(norm=norms, size=sizes, factor=st.floats(1.1, 1e3))
def test_halves_that_differ_by_a_tenth_do(norm: float, size: int, factor: float) -> None:
    values = torch.full((size, 2), norm, dtype=torch.float64)
    values[: size // 2, 1] *= factor
    assert found(values) == [False, True]


@given(norm=norms, size=st.integers(2, 64))
def test_one_process_that_has_nothing_does(norm: float, size: int) -> None:
    values = torch.full((size, 2), norm, dtype=torch.float64)
    values[-1, 0] = 0
    assert found(values) == [True, False]


@given(norm=norms, size=sizes, ratio=st.floats(0, 0.1))
def test_what_is_tiny_beside_the_rest_may_be_rounding(norm: float, size: int, ratio: float) -> None:
    values = torch.full((size, 2), norm, dtype=torch.float64)
    values[:, 1] = norm * NEGLIGIBLE * ratio * torch.linspace(0, 1, size, dtype=torch.float64)
    assert found(values) == [False, False]


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan, 1e-30, 1e30])
def test_nothing_and_what_is_not_finite_are_no_difference(value: float) -> None:
    assert found(torch.full((2, 2), value)) == [False, False]
    assert found(torch.tensor([[value, value], [value, 0.5 * value]])) == [False, False]


class Told(World):
    """A world of two in which the other process has said something."""

    def __init__(self, other: Tensor | None = None) -> None:
        super().__init__(None)
        self.ranks = (0, 1)
        self.other = other
        self.said = torch.empty(0)

    def sum(self, values: Tensor) -> Tensor:
        self.said = values.clone()
        return values.add_(self.said if self.other is None else self.other)


def say(options: str, rates: list[float], world: Told) -> Census:
    whole = Box((0, 1), (0, 2), (0, 2))
    census = Census(world, [Placement([whole] * 2, [0, 1])], torch.float32, torch.device("cpu"))
    census.take([torch.ones(2, 2)], options, [torch.tensor(rate) for rate in rates])
    return census


@given(
    one=st.tuples(st.text(), st.lists(st.floats(0, 1, width=32), max_size=3)),
    other=st.tuples(st.text(), st.lists(st.floats(0, 1, width=32), max_size=3)),
)
def test_options_and_rates_on_the_device_are_told_apart(
    one: tuple[str, list[float]], other: tuple[str, list[float]]
) -> None:
    world = Told()
    say(*one, world)
    findings = say(*other, Told(world.said)).findings()
    assert findings is not None
    # Rates of zero have no bits; that there are fewer of them is for the options to say.
    padded = [(text, [*rates, 0, 0, 0][:3]) for text, rates in (one, other)]
    assert findings.options == (padded[0] != padded[1])
    assert findings.differing == [False]


def test_a_report_has_three_numbers_for_each_parameter() -> None:
    world = Told()
    say("", [], world)
    assert len(world.said) == 3 + BITS + 1
