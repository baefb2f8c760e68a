"""Jobs in which a process fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel import jobs
from tests.parallel.checkpoints import load_dcp, make, save_dcp

SAVED, FAILS = 3, 5


def train(strategy: str, folder: str, fault: str) -> tuple[str, float]:
    """Saves after three steps; in the sixth the last process fails. The error here, and the seconds until it came."""
    model, optimizer = make(strategy)
    for step in range(FAILS + 1):
        jobs.give(model, step)
        if step == SAVED:
            save_dcp(model, optimizer, folder)
            jobs.give(model, step)
        last = dist.get_rank() == dist.get_world_size() - 1
        start = time.monotonic()
        try:
            if step == FAILS and last:
                fail(fault, folder)
            optimizer.step()
        except RuntimeError as error:
            return str(error), time.monotonic() - start
    return "went on", 0.0


def fail(fault: str, folder: str) -> None:
    if fault == "killed":
        # In the middle of the step: after the survey, before the updates.
        dist.all_reduce(torch.zeros(2, sum(1 for _ in jobs.make_model().parameters()), dtype=torch.float64))
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raises":
        sys.exit("out of memory")
    if fault == "stuck":
        while not (Path(folder) / "end").exists():
            time.sleep(0.05)
        raise RuntimeError("was stuck")


def resume(strategy: str, folder: str) -> list[Tensor]:
    model, optimizer = make(strategy)
    load_dcp(model, optimizer, folder)
    for step in range(SAVED, FAILS + 1):
        jobs.give(model, step)
        optimizer.step()
    return [jobs.whole(parameter) for parameter in model.parameters()]


def straight(strategy: str) -> list[Tensor]:
    model, optimizer = make(strategy)
    for step in range(FAILS + 1):
        jobs.give(model, step)
        optimizer.step()
    return [jobs.whole(parameter) for parameter in model.parameters()]
