"""Roots are made as soon as there is a factor, and renewed in turns that leave no step much longer than the others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dash_shampoo import Dash, renewals
from dash_shampoo.factors import Factors
from dash_shampoo.renewals import ALL_AT_ONCE, is_due, least, take_turns, turn_of_tile
from tests.test_optimizer import give_gradients, parameters

SHAPES = [(9, 8), (16, 12), (3, 8, 8), (8, 20), (6,)]


@pytest.fixture
def in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the smallest models take turns."""
    monkeypatch.setattr(renewals, "LEAST", 0.0)


@given(
    costs=st.lists(st.lists(st.sampled_from([1.0, 1.0, 8.0]), min_size=1, max_size=8), min_size=20, max_size=60),
    every=st.integers(1, 12),
)
def test_steps_have_about_as_much_to_renew(costs: list[list[float]], every: int) -> None:
    turns = take_turns(costs, [every] * len(costs), [None] * len(costs), 0.0)
    steps = [
        sum(
            cost
            for own, turn in zip(costs, turns, strict=True)
            for number, cost in enumerate(own)
            if is_due(since, turn_of_tile(turn, number), every)
        )
        for since in range(every)
    ]
    total = sum(map(sum, costs))
    assert sum(steps) == total  # each tile has one turn
    assert max(steps) <= total / every + 2 * max(map(sum, costs))


@given(
    costs=st.lists(st.lists(st.floats(0.1, 9), min_size=1, max_size=4), min_size=1, max_size=9),
    every=st.integers(1, 9),
    count=st.integers(0, 9),
)
def test_turns_that_are_taken_stay(costs: list[list[float]], every: int, count: int) -> None:
    periods, none = [every] * len(costs), [None] * len(costs)
    first = take_turns(costs[:count], periods[:count], none[:count], 0.0)
    both = take_turns(costs, periods, [*first, *none[count:]], 0.0)
    assert both[: len(first)] == first
    assert all(0 <= turn < every for turn in both)


def test_small_models_take_none_and_gpus_want_more() -> None:
    costs, every = [[1.0] * 5] * 2, [10, 10]
    assert take_turns(costs, every, [None, None], 1.01) == [ALL_AT_ONCE] * 2
    assert take_turns(costs, every, [None, None], 1.0) == [0, 5]
    assert least(torch.device("cpu")) < least(torch.device("cuda"))
    assert {turn_of_tile(ALL_AT_ONCE, number) for number in range(9)} == {0}


def renewed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many roots each call from here on makes."""
    counts: list[int] = []
    update = Factors.update_roots
    monkeypatch.setattr(Factors, "update_roots", lambda self, lanes: counts.append(len(lanes)) or update(self, lanes))
    return counts


@pytest.mark.usefixtures("in_turns")
@pytest.mark.parametrize("start_step", [1, 3])
def test_all_roots_are_made_at_the_first_step_and_then_each_once_in_a_period(
    monkeypatch: pytest.MonkeyPatch, start_step: int
) -> None:
    params = parameters([(16, 16)] * 6, torch.float32)
    optimizer = Dash(params, block_size=4, update_every=4, start_step=start_step)
    counts = renewed(monkeypatch)
    made = []
    for step in range(start_step + 8):
        give_gradients(params, step)
        counts.clear()
        optimizer.step()
        made.append(sum(counts))
    blocks = 6 * 16 * 2
    assert made == [0] * (start_step - 1) + [blocks] + [blocks // 4] * 8


@pytest.mark.usefixtures("in_turns")
def test_roots_are_those_of_the_factors_at_their_turn() -> None:
    """Each renewal is that of a run that renews at every step, at the same gradients."""
    (often,), (seldom,) = parameters([(12, 12)]), parameters([(12, 12)])
    seldom_optimizer = Dash([seldom], lr=0.0, block_size=4, update_every=3, solver="eigh")
    often_optimizer = Dash([often], lr=0.0, block_size=4, update_every=1, solver="eigh")
    held: dict[tuple[str, int], Tensor] = {}
    for step in range(9):
        for parameter, optimizer in ((often, often_optimizer), (seldom, seldom_optimizer)):
            give_gradients([parameter], step)
            optimizer.step()
        turn = seldom_optimizer.state[seldom]["turn"]
        for key, entry in seldom_optimizer.state[seldom].items():
            tile, _, side = key.partition(".")
            if side not in ("left", "right"):
                continue
            if step == 0 or (step + turn + int(tile.removeprefix("tile"))) % 3 == 0:
                held[key, 0] = often_optimizer.state[often][key][:, :-1].triu()
            torch.testing.assert_close(entry[:, :-1].triu(), held[key, 0], rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("in_turns")
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    update_every=st.integers(1, 5),
    when=st.integers(1, 6),
    named=st.booleans(),
)
def test_a_resumed_run_keeps_its_turns(
    shapes: list[tuple[int, ...]], update_every: int, when: int, named: bool
) -> None:
    """Also where named parameters come back in another order."""

    def make(params: list[nn.Parameter], reverse: bool) -> Dash:
        given: list[Any] = [(f"w{i}", p) for i, p in enumerate(params)] if named else params
        return Dash(given[::-1] if reverse and named else given, lr=0.05, block_size=4, update_every=update_every)

    ends = []
    for resumed in (False, True):
        params = parameters(shapes, torch.float32)
        optimizer = make(params, reverse=False)
        for step in range(8):
            if resumed and step == when:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = make(params, reverse=True)
                optimizer.load_state_dict(saved)
            give_gradients(params, step)
            optimizer.step()
        ends.append([parameter.detach() for parameter in params] + [optimizer.state[p]["turn"] for p in params])
    assert all(
        torch.equal(left, right) if isinstance(left, Tensor) else left == right
        for left, right in zip(*ends, strict=True)
    )


@pytest.mark.usefixtures("in_turns")
def test_parameters_that_come_later_leave_turns_as_they_were() -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = Dash(params[:2], block_size=4, update_every=5)
    give_gradients(params, 0)
    optimizer.step()
    before = [optimizer.state[p]["turn"] for p in params[:2]]
    optimizer.add_param_group({"params": params[2:]})
    give_gradients(params, 1)
    optimizer.step()
    assert [optimizer.state[p]["turn"] for p in params[:2]] == before


def test_a_state_from_before_there_were_turns_is_loaded() -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = Dash(params, block_size=4)
    give_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        del state["turn"]
    other = Dash(params, block_size=4)
    other.load_state_dict(saved)
    give_gradients(params, 1)
    other.step()
    assert all(type(other.state[p]["turn"]) is int for p in params)
