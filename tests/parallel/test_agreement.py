"""Processes that differ where they must be alike are told so by name, and no others are."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from dash_shampoo import Dash
from dash_shampoo.options import READ_AT_EACH_STEP, STRUCTURE
from tests.parallel import agreement
from tests.parallel.processes import Processes
from tests.parallel.test_equality import assert_equal


def test_processes_that_train_on_data_of_their_own_without_averaging_are_no_replicas(processes: Processes) -> None:
    for message, step in processes.run(agreement.own_data, 2, False):
        assert step == 1
        assert "0.weight" in message
        for remedy in ("DistributedDataParallel", "no_sync()", "process_group of their own", "None"):
            assert remedy in message
    assert processes.run(agreement.own_data, 2, True) == [("went on", 5)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_parameter_whose_gradients_are_not_averaged_is_named(
    processes: Processes, size: int, dtype: torch.dtype
) -> None:
    for message, step in processes.run(agreement.gradients, size, "one is not averaged", dtype):
        assert step == 1
        assert "gradients of wide.weight differ" in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("disturbance", [name for name in agreement.DISTURBANCES if name != "one is not averaged"])
def test_replicas_may_round_and_skip(processes: Processes, disturbance: str, dtype: torch.dtype) -> None:
    assert processes.run(agreement.gradients, 3, disturbance, dtype) == [("went on", 5)] * 3


@pytest.mark.parametrize(("strategy", "size"), [("fsdp", 3), ("hsdp", 4), ("mixed", 2)])
def test_shards_differ_as_they_like(processes: Processes, strategy: str, size: int) -> None:
    assert processes.run(agreement.gradients, size, "zero", torch.float32, strategy) == [("went on", 5)] * size


@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", 0.06),
        ("weight_decay", 0.0),
        ("betas", (0.9, 0.99)),
        ("update_every", 5),
        ("block_size", 16),
        ("grafting", "rmsprop"),
        ("wire_dtype", "bf16"),
    ],
)
def test_options_that_differ_from_the_start(processes: Processes, strategy: str, option: str, value: Any) -> None:
    for message, step in processes.run(agreement.other_options, 3, option, value, -1, strategy):
        assert step == 0
        assert option in message
        assert "same" in message


@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", 0.06), ("weight_decay", 0.0), ("betas", (0.9, 0.99)), ("update_every", 5), ("lr in place", 0.06)],
)
def test_options_that_begin_to_differ(processes: Processes, strategy: str, option: str, value: Any) -> None:
    for message, step in processes.run(agreement.other_options, 2, option, value, 2, strategy):
        assert step == 3
        assert option.split(maxsplit=1)[0] in message
        assert "in the same steps" in message


@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
@pytest.mark.parametrize(("option", "value"), [("damping", 0.1), ("state", None)])
def test_stacks_that_one_process_arranges_anew(strategy: str, option: str, value: Any) -> None:
    pool = Processes(2)
    try:
        (own, step), (other, _) = pool.run(
            agreement.other_options, 2, option, value, 2, strategy, timeout=timedelta(seconds=20)
        )
    finally:
        pool.close()
    assert step == 2
    assert "new on this process and not on all others" in own
    assert "another process has stopped" in other


def test_options_may_change_on_all_processes(processes: Processes) -> None:
    assert processes.run(agreement.schedule, 3) == [("went on", 5)] * 3


def test_every_option_is_compared() -> None:
    assert {*STRUCTURE, *READ_AT_EACH_STEP} == set(Dash([nn.Parameter(torch.zeros(1))]).defaults)


def test_a_zero_redundancy_optimizer_is_told_what_works(processes: Processes) -> None:
    for message, _ in processes.run(agreement.zero_redundancy, 2, False):
        assert "functools.partial(Dash, process_group=None)" in message
    (_, alone), *_ = processes.run(agreement.zero_redundancy, 1, True)
    for message, parameters in processes.run(agreement.zero_redundancy, 2, True):
        assert message == "went on"
        assert_equal([parameters], alone)
