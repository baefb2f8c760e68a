"""Jobs in which a process fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from dash_shampoo import renewals
from dash_shampoo.parallel.world import World
from tests.parallel.checkpoints import advance, make, save_dcp

SAVED, FAILS = 3, 5


@mock.patch.object(renewals, "LEAST", 0.0)  # as in the runs that these are compared with
def train(strategy: str, folder: str, fault: str) -> tuple[str, float]:
    """Saves after three steps; in the sixth the last process fails. The error here, and the seconds until it came."""
    model, optimizer = make(strategy)
    advance(model, optimizer, 0, SAVED)
    save_dcp(model, optimizer, folder)
    advance(model, optimizer, SAVED, FAILS)
    start = time.monotonic()
    try:
        if dist.get_rank() == dist.get_world_size() - 1:
            fail(fault, folder)
        advance(model, optimizer, FAILS, FAILS + 1)
    except RuntimeError as error:
        Path(f"{folder} failed {dist.get_rank()}").touch()
        return str(error), time.monotonic() - start
    return "went on", 0.0


def fail(fault: str, folder: str) -> None:
    if fault == "killed":
        # In the middle of the step: after the survey, before the updates.
        survey = World.sum

        def survey_and_die(world: World, values: Tensor) -> Tensor:
            survey(world, values)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        World.sum = survey_and_die
    if fault == "raises":
        sys.exit("out of memory")
    if fault == "stuck":
        while not all(Path(f"{folder} failed {rank}").exists() for rank in range(dist.get_rank())):
            time.sleep(0.05)
        raise RuntimeError("was stuck")
