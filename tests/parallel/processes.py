"""Real processes for the tests: started once, they run one job after another, each in a fresh gloo group."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)
MOST = int(os.environ.get("PARALLEL_PROCESSES", "4"))


class Processes:
    """As many processes as a job may want, waiting for jobs."""

    def __init__(self, count: int = MOST) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "dash_shampoo"]
        )
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self,
        job: Callable[..., Any],
        size: int,
        *arguments: Any,
        timeout: timedelta = TIMEOUT,
        lost: Sequence[int] = (),
    ) -> list[Any]:
        """What ``job(*arguments)`` returns in each of ``size`` processes of a new group, but those ``lost``.

        Raises:
            AssertionError: it raised in one of them; with that process's traceback.
        """
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(size):
                self._pipes[rank].send((job, rank, size, str(Path(folder) / "store"), timeout, arguments))
            answers = [self._pipes[rank].recv() for rank in range(size) if rank not in lost]
        failures = [f"process {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            job, rank, size, store, timeout, arguments = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        joined = False
        try:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
            _meet(rank, size, store, TIMEOUT)
            if timeout != TIMEOUT:  # a short one is not for processes that start
                dist.destroy_process_group()
                _meet(rank, size, f"{store} again", timeout)
            joined = True
            answer = True, job(*arguments)
        except Exception:
            answer = False, traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send(answer)
        if not joined:
            return  # groups count what has been made, so that this process would not find the others again


def _meet(rank: int, size: int, store: str, timeout: timedelta) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    dist.barrier()  # a job may end before another process is through
