"""A run in another's trainer, taken up from a checkpoint by new processes, ends with the bits of the unbroken one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts import Scripts

SCRIPT = Path(__file__).parent / "trainers.py"


def launch(scripts: Scripts, tool: str, strategy: str, folder: Path, phase: str, processes: int = 2) -> set[str]:
    """The checksums of the weights that the processes end with."""
    pytest.importorskip(tool)
    done = scripts.run(SCRIPT, tool, strategy, str(folder), phase, folder=folder, processes=processes, imports=[tool])
    assert done.returncode == 0, done.stderr
    assert "the part of one process" not in done.stderr, done.stderr
    return set(re.findall(rf"{phase} \d ([0-9a-f]{{64}})", done.stdout))


@pytest.mark.parametrize(
    ("tool", "strategy"),
    [("accelerate", "ddp"), ("transformers", "ddp"), ("lightning", "ddp"), ("lightning", "fsdp")],
)
def test_resumed_halfway(scripts: Scripts, tmp_path: Path, tool: str, strategy: str) -> None:
    straight = launch(scripts, tool, strategy, tmp_path, "straight")
    assert len(straight) == 1
    assert launch(scripts, tool, strategy, tmp_path, "resumed") == straight
    if tool != "lightning" or strategy == "fsdp":
        assert (
            len(launch(scripts, tool, strategy, tmp_path, "resumed", processes=1)) == 1
        )  # other batches, but all of the state
