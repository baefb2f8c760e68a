"""A process that fails stops the others with an error that says so, and the run goes on from its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.parallel import checkpoints, faults
from tests.parallel.processes import Processes
from tests.parallel.test_equality import assert_equal


@pytest.fixture
def own_processes() -> Iterator[Processes]:
    """Processes of which some will be lost."""
    pool = Processes(3)
    yield pool
    pool.close()


@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_a_process_that_is_killed_in_a_step(
    own_processes: Processes, processes: Processes, tmp_path: Path, strategy: str
) -> None:
    folder = str(tmp_path / "checkpoint")
    for message, seconds in own_processes.run(faults.train, 3, strategy, folder, "killed", lost=[2]):
        assert "another process has stopped" in message
        assert "of 3 could not exchange" in message
        assert "start again from the last checkpoint" in message
        assert seconds < 20
    end = faults.FAILS + 1
    resumed = processes.run(checkpoints.train, 3, strategy, faults.SAVED, end, "dcp", folder, None)
    straight = processes.run(checkpoints.train, 3, strategy, 0, end, "dcp", None, None)
    assert_equal(resumed, straight[0], rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["replicated", "fsdp"])
def test_a_process_that_raises_and_ends(own_processes: Processes, tmp_path: Path, strategy: str) -> None:
    folder = str(tmp_path / "checkpoint")
    for message, seconds in own_processes.run(faults.train, 3, strategy, folder, "raises", lost=[2]):
        assert "another process has stopped" in message
        assert seconds < 20


def test_a_process_that_is_stuck_ends_the_others_after_the_time_out(own_processes: Processes, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    *others, _ = own_processes.run(faults.train, 3, "replicated", folder, "stuck", timeout=timedelta(seconds=3))
    for message, seconds in others:
        assert "is stuck" in message
        assert 1.5 < seconds < 20
