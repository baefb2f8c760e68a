"""Many processes take the step that one would take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel import jobs
from tests.parallel.processes import MOST, Processes

STEPS = 5
# The kernels round a batch of one block otherwise than a batch of many, and inverse roots amplify that.
ROUNDING = {torch.float64: {"rtol": 1e-10, "atol": 1e-12}, torch.float32: {"rtol": 2e-4, "atol": 2e-5}}
WORLDS = [
    ("replicated", 2),
    ("replicated", 3),
    ("replicated", 4),
    ("fsdp", 2),
    ("fsdp", 3),
    ("fsdp", 4),
    ("hsdp", 4),
    ("mixed", 4),
]
WORLDS += [(strategy, MOST) for strategy in ("replicated", "fsdp", "hsdp", "mixed") if MOST > 4]


def assert_equal(many: list[list[Tensor]], one: list[Tensor], **tolerance: Any) -> None:
    for own in many:
        for left, right in zip(own, one, strict=True):
            torch.testing.assert_close(left, right, **(tolerance or ROUNDING[left.dtype]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("strategy", "size"), WORLDS)
def test_many_processes_equal_one(processes: Processes, strategy: str, size: int, dtype: torch.dtype) -> None:
    many = processes.run(jobs.steps, size, strategy, STEPS, {}, dtype)
    assert_equal(many, jobs.steps("alone", STEPS, dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "nesterov": True},
        {"lr": torch.tensor(0.05), "grafting": "rmsprop"},
        {"solver": "eigh", "root": None, "vectors": "shampoo"},
        {"state_dtype": "bf16"},
        {"start_step": 3, "maximize": True, "bias_correction": False},
        {"max_workspace": 1},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_every_option_means_the_same(processes: Processes, strategy: str, options: dict[str, Any]) -> None:
    many = processes.run(jobs.steps, 3, strategy, STEPS, options)
    assert_equal(many, jobs.steps("alone", STEPS, options), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_low_precision_parameters(processes: Processes, strategy: str, dtype: torch.dtype) -> None:
    many = processes.run(jobs.steps, 2, strategy, STEPS, {}, dtype)
    assert_equal(many, jobs.steps("alone", STEPS, dtype=dtype), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("strategy", ["replicated", "fsdp", "mixed"])
@pytest.mark.parametrize("workspace", [None, 1, 2000])  # which decides how many are converted at a time
def test_updates_in_bfloat16_are_rounded_and_no_more(
    processes: Processes, strategy: str, workspace: int | None
) -> None:
    many = processes.run(jobs.steps, 2, strategy, 1, {"wire_dtype": "bf16", "max_workspace": workspace})
    one, start = jobs.steps("alone", 1), jobs.steps("alone", 0)
    for own in many:
        for left, right, before in zip(own, one, start, strict=True):
            torch.testing.assert_close(left - before, right - before, rtol=2**-8, atol=1e-5)
    assert any(not torch.equal(left, right) for left, right in zip(many[0], one, strict=True))
    assert all(torch.equal(left, right) for left, right in zip(*many, strict=True))  # replicas stay replicas


@pytest.mark.parametrize(("strategy", "size"), [("replicated", 2), ("fsdp", 3), ("hsdp", 4), ("mixed", 4)])
def test_parameters_without_gradients_wait_as_on_one_process(processes: Processes, strategy: str, size: int) -> None:
    many = processes.run(jobs.steps, size, strategy, 7, {"update_every": 3}, torch.float64, jobs.never_first_two)
    one = jobs.steps("alone", 7, {"update_every": 3}, torch.float64, jobs.never_first_two)
    assert_equal(many, one)


@pytest.mark.parametrize(("strategy", "size"), [("replicated", 2), ("fsdp", 3), ("hsdp", 4)])
def test_gradients_of_zeros_do_not_count_at_first(processes: Processes, strategy: str, size: int) -> None:
    rest = 7, {"update_every": 3}, torch.float64, jobs.never_first_two, jobs.later_and_later
    assert_equal(processes.run(jobs.steps, size, strategy, *rest), jobs.steps("alone", *rest))


@pytest.mark.parametrize("size", [2, 3])
def test_training_with_ddp_equals_training_on_the_whole_batch(processes: Processes, size: int) -> None:
    assert_equal(processes.run(jobs.train_ddp, size, 8), jobs.train_alone(8), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [2, 4])
def test_training_with_fsdp_equals_training_on_the_whole_batch(processes: Processes, size: int) -> None:
    assert_equal(processes.run(jobs.train_fsdp, size, 8), jobs.train_alone(8), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(1,), (2, 3), (3, 0), (1, 1, 5)])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_fewer_elements_than_processes(processes: Processes, strategy: str, shape: tuple[int, ...], wire: str) -> None:
    many = processes.run(jobs.few_elements, 4, strategy, shape, {"wire_dtype": wire})
    one = jobs.few_elements("alone", shape, {})
    rounding = {"rtol": 1e-12, "atol": 0} if wire == "fp32" else {"rtol": 1e-2, "atol": 1e-2}
    assert_equal([[own] for own in many], [one], **rounding)


@pytest.mark.parametrize(
    ("cuts", "sizes", "replicas"),
    [
        ([], (4,), 0),
        ([0], (4,), 0),
        ([1], (4,), 0),
        ([2], (4,), 0),
        ([0, 1], (2, 2), 0),
        ([0, 0], (2, 2), 0),
        ([2, 0], (2, 2), 0),
        ([0], (2, 2), 1),
    ],
    ids=str,
)
def test_experts_in_one_parameter_move_as_parameters_of_their_own(
    processes: Processes, cuts: list[int], sizes: tuple[int, ...], replicas: int
) -> None:
    assert all(processes.run(jobs.experts, 4, cuts, sizes, replicas))


@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_quantised_weights_move_as_on_one_process(processes: Processes, strategy: str) -> None:
    """A rounding more or less of the update may move a value to its neighbour, at most a step of 2^-4 away."""
    many = processes.run(jobs.quantised_steps, 2, strategy, STEPS)
    one = jobs.quantised_steps("alone", STEPS)
    for own in many:
        for got, expected in zip(own, one, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0.07)
            assert (got != expected).float().mean() < 0.02
