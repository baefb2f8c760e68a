"""What N processes save, M resume, under any strategy, and go on as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import checkpoints
from tests.parallel.processes import Processes
from tests.parallel.test_equality import assert_equal

HALF, END = 4, 7


@pytest.mark.parametrize("route", ["dcp", "whole"])
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


@pytest.mark.parametrize("route", ["dcp", "whole"])
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


def test_the_part_of_another_process_is_refused(processes: Processes, tmp_path: Path) -> None:
    own, other = processes.run(checkpoints.part_of_another, 2, str(tmp_path))
    assert own == "taken"
    assert "lacks tile" in other
    assert "full_state_dict" in other


@pytest.mark.parametrize(("strategy", "size"), [("replicated", 3), ("fsdp", 2)])
def test_groups_and_options_that_change_on_the_way(processes: Processes, strategy: str, size: int) -> None:
    (one,) = processes.run(checkpoints.growing, 1, "replicated")
    assert_equal(processes.run(checkpoints.growing, size, strategy), one)
