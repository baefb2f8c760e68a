"""Processes talk in groups of Dash's own, and what leaves out a call gets an error that says so."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import nn

from dash_shampoo import Dash
from tests.parallel import worlds
from tests.parallel.processes import Processes
from tests.parallel.test_equality import assert_equal


def test_groups_are_shared_by_optimizers_and_by_nobody_else(processes: Processes) -> None:
    for rank, found in enumerate(processes.run(worlds.groups_of_its_own, 4, timeout=worlds.TIMEOUT)):
        assert found["shared"]
        assert found["own"]
        assert found["ranks"] == [[0, 1, 2, 3]] * 2 + [[0, 1] if rank < 2 else [2, 3]]
        assert found["timeouts"] == [worlds.TIMEOUT] * 3  # that of init_process_group


@pytest.mark.parametrize("how", ["leaves out", "join", "throw"])
def test_a_process_that_makes_fewer_steps_stops_the_others_with_an_error(how: str) -> None:
    pool = Processes(2)
    try:
        first, second = pool.run(worlds.uneven, 2, how, timeout=timedelta(seconds=5))
    finally:
        pool.close()
    if how == "throw":
        assert "exhausted" in first + second
    else:
        assert "left out a step()" in second
    assert "went on" not in (first, second)


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_copies_keep_the_group_that_was_given(processes: Processes, way: str) -> None:
    for first, second in processes.run(worlds.copied, 2, way):
        assert_equal([first], second, rtol=0, atol=0)


def test_groups_of_parameters_have_processes_of_their_own(processes: Processes) -> None:
    together, alone = (processes.run(worlds.experts, 4, way) for way in (True, False))
    for found, expected in zip(together, alone, strict=True):
        assert_equal([list(found.values())], list(expected.values()))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"process_group": "all"}, "process_group must be"),
        ({"proces_group": None}, "did you mean 'process_group'"),
        ({"wire_dtype": "bf16"}, "wire_dtype is an option of Dash itself"),
    ],
)
def test_options_that_no_group_of_parameters_has(option: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dash([{"params": [nn.Parameter(torch.zeros(2, 2))], **option}])
