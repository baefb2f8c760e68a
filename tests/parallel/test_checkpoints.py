"""What N processes save, M resume, under any strategy, and go on as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parallel import checkpoints
from tests.parallel.processes import Processes
from tests.parallel.test_equality import assert_equal

HALF, END = 4, 7


@pytest.mark.parametrize("route", ["dcp", "whole", "full"])
@pytest.mark.parametrize(
    ("saver", "savers", "resumer", "resumers"),
    [
        ("replicated", 1, "replicated", 2),
        ("replicated", 3, "replicated", 2),
        ("replicated", 2, "replicated", 1),
        ("replicated", 2, "replicated", 4),
        ("fsdp", 4, "fsdp", 3),
        ("fsdp", 2, "fsdp", 4),
        ("fsdp", 3, "replicated", 1),
        ("replicated", 1, "fsdp", 4),
        ("replicated", 2, "fsdp", 3),
        ("hsdp", 4, "mixed", 3),
    ],
)
def test_resumed_on_other_processes(
    processes: Processes, tmp_path: Path, route: str, saver: str, savers: int, resumer: str, resumers: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    (straight,) = processes.run(checkpoints.train, 1, "replicated", 0, END, route, None, None)
    processes.run(checkpoints.train, savers, saver, 0, HALF, route, None, folder)
    resumed = processes.run(checkpoints.train, resumers, resumer, HALF, END, route, folder, None)
    assert_equal(resumed, straight)


@pytest.mark.parametrize("route", ["dcp", "whole", "full"])
@pytest.mark.parametrize(("strategy", "size"), [("replicated", 3), ("fsdp", 3), ("hsdp", 4)])
def test_resumed_on_as_many_processes_is_bit_equal(
    processes: Processes, tmp_path: Path, route: str, strategy: str, size: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    straight = processes.run(checkpoints.train, size, strategy, 0, END, route, None, None)
    processes.run(checkpoints.train, size, strategy, 0, HALF, route, None, folder)
    resumed = processes.run(checkpoints.train, size, strategy, HALF, END, route, folder, None)
    for left, right in zip(straight, resumed, strict=True):
        assert_equal([left], right, rtol=0, atol=0)


@pytest.mark.parametrize(("strategy", "size"), [("replicated", 2), ("fsdp", 3), ("hsdp", 4)])
def test_every_process_can_have_the_whole_state(processes: Processes, strategy: str, size: int) -> None:
    found = processes.run(checkpoints.full_everywhere, size, strategy)
    (alone,) = processes.run(checkpoints.full_everywhere, 1, "replicated")
    for each in found:
        for state, expected in zip(each["full"], alone["full"], strict=True):
            assert {key: value.shape for key, value in state.items() if isinstance(value, Tensor)} == {
                key: value.shape for key, value in expected.items() if isinstance(value, Tensor)
            }
        torch.testing.assert_close(each["full"], each["own"], rtol=0, atol=0)
        assert_equal([each["resumed"]], each["straight"], rtol=0, atol=0)


def test_a_part_is_sent_without_the_bank_that_it_is_a_view_of(processes: Processes) -> None:
    for sent, part in processes.run(checkpoints.bytes_sent, 2):
        assert sent < 2 * part + 100_000  # names, and what pickle says of each tensor


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(("strategy", "size"), [("replicated", 2), ("fsdp", 3), ("hsdp", 4)])
def test_a_part_that_is_loaded_as_the_full_state_is_refused(
    processes: Processes, strategy: str, size: int, everywhere: bool
) -> None:
    first, *others = processes.run(checkpoints.part_as_full, size, strategy, everywhere)
    assert first == "taken"
    for message in others:
        assert "lacks what this process owns" in message
        assert "full_state_dict" in message


@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_a_part_is_noticed_when_it_is_taken(processes: Processes, strategy: str) -> None:
    for said in processes.run(checkpoints.warned_of_parts, 2, strategy):
        (message,) = said.pop("own")
        for remedy in ("full_state_dict()", "torch.distributed.checkpoint", "consolidate_state_dict()"):
            assert remedy in message
        assert not any(said.values())
    (alone,) = processes.run(checkpoints.warned_of_parts, 1, strategy)
    assert not any(alone.values())


@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_a_consolidated_state_dict_is_whole_at_one_process_until_the_next_step(
    processes: Processes, strategy: str
) -> None:
    first, second = processes.run(checkpoints.consolidated, 2, strategy)
    assert first == ["whole", "part, with a warning", "whole", "part, with a warning"]
    assert second == ["part", "part, with a warning", "whole", "part, with a warning"]


def test_the_part_of_another_process_is_refused(processes: Processes, tmp_path: Path) -> None:
    own, other = processes.run(checkpoints.part_of_another, 2, str(tmp_path))
    assert own == "taken"
    assert "lacks tile" in other
    assert "full_state_dict" in other


@pytest.mark.parametrize(("strategy", "size"), [("replicated", 3), ("fsdp", 2)])
def test_groups_and_options_that_change_on_the_way(processes: Processes, strategy: str, size: int) -> None:
    (one,) = processes.run(checkpoints.growing, 1, "replicated")
    assert_equal(processes.run(checkpoints.growing, size, strategy), one)


@pytest.mark.parametrize(("strategy", "size"), [("replicated", 3), ("fsdp", 2), ("hsdp", 4)])
def test_entries_that_are_moved_on_some_processes_go_on_to_the_bit(
    processes: Processes, strategy: str, size: int
) -> None:
    for one, other in zip(
        *(processes.run(checkpoints.moved, size, strategy, move) for move in (False, True)), strict=True
    ):
        assert_equal([other], one, rtol=0, atol=0)
