"""What a step of many processes does: its collectives, its state, and gradients that are missing or not finite."""

from __future__ import annotations

import pytest
import torch

from tests.parallel import jobs
from tests.parallel.processes import Processes
from tests.parallel.test_equality import assert_equal


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("replicated", ["all_reduce", "_all_gather"]),
        ("fsdp", ["all_reduce", "all_to_all_single", "all_to_all_single"]),
    ],
)
def test_collectives_of_a_step(processes: Processes, strategy: str, expected: list[str]) -> None:
    assert processes.run(jobs.collectives, 2, strategy) == [expected] * 2


@pytest.mark.parametrize(("strategy", "size"), [("replicated", 2), ("fsdp", 4), ("hsdp", 4), ("mixed", 3)])
def test_state_is_there_once_and_in_balance(processes: Processes, strategy: str, size: int) -> None:
    sizes = processes.run(jobs.state_size, size, strategy)
    (alone,) = processes.run(jobs.state_size, 1, "alone")
    assert sum(sizes) == alone
    assert max(sizes) < 1.8 * alone / size


def test_a_gradient_that_some_processes_lack_counts_as_zero_there_if_sharded(processes: Processes) -> None:
    found = processes.run(jobs.partly_missing, 3, "fsdp")
    for each in found:
        assert all(all(step) for step in each["moved"])
        assert each["skipped"] == 0
        assert set(each["ages"]) == {3}
    assert_equal([each["parameters"] for each in found], found[0]["parameters"], rtol=0, atol=0)


def test_a_gradient_that_some_processes_lack_skips_the_step_if_replicated(processes: Processes) -> None:
    found = processes.run(jobs.partly_missing, 3, "replicated")
    for each in found:
        assert [[i for i, moved in enumerate(step) if not moved] for step in each["moved"]] == [[], [1, 3], []]
        assert each["skipped"] == 2
    assert_equal([each["parameters"] for each in found], found[0]["parameters"], rtol=0, atol=0)


@pytest.mark.parametrize("nan", [False, True])
def test_a_gradient_that_some_replicas_lack_is_called_missing(processes: Processes, nan: bool) -> None:
    lacking = "is missing on some of the processes that hold replicas"
    for before, message, left, after in processes.run(jobs.refused_gradients, 3, nan):
        said, _, end = message.rpartition("; ")
        *rest, missing = said.split(", and ")
        assert missing == f"the gradient of embedding.weight, wide.bias {lacking}"
        assert rest == (["the gradient of wide.weight is not finite"] if nan else [])
        assert end == "no parameter has been moved"
        assert (before, left, after) == (False, True, False)


@pytest.mark.parametrize("strategy", ["replicated", "fsdp", "hsdp"])
@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_a_gradient_that_is_not_finite_on_one_process(processes: Processes, strategy: str, on_nonfinite: str) -> None:
    for each in processes.run(jobs.not_finite, 4, strategy, on_nonfinite):
        assert each["finite"]
        if on_nonfinite == "skip":
            assert [i for i, moved in enumerate(each["moved"]) if not moved] == [2]
            assert each["skipped"] == 1
            assert not each["error"]
            assert len(each["warned"]) == 1
        else:
            assert not any(each["moved"])
            assert "not finite" in each["error"]


def test_models_that_differ_between_processes_are_refused_by_name_on_each(processes: Processes) -> None:
    for message in processes.run(jobs.different_models, 2, "auto"):
        assert "weight, bias" in message
        assert "process_group=None" in message
    assert processes.run(jobs.different_models, 2, None) == ["stepped"] * 2


@pytest.mark.parametrize(("strategy", "named"), [("fsdp", "embedding.weight"), ("mixed", "wide.weight")])
def test_an_optimizer_made_before_fully_shard_is_told_so(processes: Processes, strategy: str, named: str) -> None:
    for warned in processes.run(jobs.made_too_early, 2, strategy):
        assert len(warned) == 1
        assert "make Dash after it" in warned[0]
        assert named in warned[0]
    assert processes.run(jobs.made_too_early, 2, "replicated") == [[]] * 2


def test_gradients_travel_in_the_dtype_of_their_parameters(processes: Processes) -> None:
    full, half = (sum(processes.run(jobs.bytes_of_gradients, 3, dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert full == 2 * half
    assert full == 4 * sum(parameter.numel() for parameter in jobs.make_model().parameters())
