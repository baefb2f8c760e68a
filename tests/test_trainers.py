"""A run in another's trainer, taken up from a checkpoint by new processes, ends with the bits of the unbroken one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "trainers.py"
SOURCE = Path(__file__).parents[1] / "src"


def launch(tool: str, strategy: str, folder: Path, phase: str, processes: int = 2) -> set[str]:
    """The checksums of the weights that the processes end with."""
    pytest.importorskip(tool)
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*torchrun, str(SCRIPT), tool, strategy, str(folder), phase],
        capture_output=True,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "the part of one process" not in done.stderr, done.stderr
    return set(re.findall(rf"{phase} \d ([0-9a-f]{{64}})", done.stdout))


@pytest.mark.parametrize(
    ("tool", "strategy"),
    [("accelerate", "ddp"), ("transformers", "ddp"), ("lightning", "ddp"), ("lightning", "fsdp")],
)
def test_resumed_halfway(tmp_path: Path, tool: str, strategy: str) -> None:
    straight = launch(tool, strategy, tmp_path, "straight")
    assert len(straight) == 1
    assert launch(tool, strategy, tmp_path, "resumed") == straight
    if tool != "lightning" or strategy == "fsdp":
        assert len(launch(tool, strategy, tmp_path, "resumed", processes=1)) == 1  # other batches, but all of the state
