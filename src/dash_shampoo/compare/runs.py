"""All runs of a comparison: which there are, which are known, and several of them side by side."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from dash_shampoo.compare.contenders import Contender
from dash_shampoo.train.settings import Settings


@dataclass(frozen=True, eq=False)
class Case:
    """One run: a contender at a learning rate with a seed."""

    contender: Contender
    lr: float
    seed: int
    settings: Settings

    def record(self, folder: Path, every: int) -> Path:
        """Where its results are or will be: named by all that decides them, and not by threads or devices."""
        decisive = {**dataclasses.asdict(self.settings), "every": every, "threads": None}
        name = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]
        return folder / "runs" / f"{name}.json"


def cases(contenders: Sequence[Contender], seeds: Sequence[int], common: Settings) -> Iterator[Case]:
    """Every run, those of the first seed before those of the second, so that a comparison that is cut is of use."""
    for seed in seeds:
        for contender in contenders:
            for lr in contender.rates:
                own: dict[str, Any] = {
                    "optimizer": contender.optimizer,
                    "options": contender.options,
                    "lr": lr,
                    "seed": seed,
                    **contender.settings,
                }
                settings = dataclasses.replace(common, **own)
                settings.check()
                yield Case(contender, lr, seed, settings)


def known(all_cases: Sequence[Case], folder: Path, every: int) -> dict[Case, dict[str, Any]]:
    """The records of those cases that have one."""
    found = ((case, case.record(folder, every)) for case in all_cases)
    return {case: json.loads(path.read_text(encoding="utf-8")) for case, path in found if path.exists()}


def run_all(
    all_cases: Sequence[Case], folder: Path, every: int, jobs: int, after: Callable[[Case, str | None], None]
) -> None:
    """Runs the cases that have no record yet, each in a process of its own.

    Args:
        all_cases: of the comparison.
        folder: of the comparison.
        every: steps between validation losses.
        jobs: runs at a time; on machines with GPUs each takes the next that is free.
        after: called after each run with its error, ``None`` if there is none. A run with an error leaves no record,
            and is tried again next time.
    """
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    gpus: SimpleQueue[int] = SimpleQueue()
    for i in range(jobs):
        gpus.put(i % max(1, torch.cuda.device_count()))

    def run(case: Case) -> None:
        gpu = gpus.get()
        try:
            after(case, _run(case, case.record(folder, every), every, gpu))
        finally:
            gpus.put(gpu)

    missing = [case for case in all_cases if not case.record(folder, every).exists()]
    pool = ThreadPoolExecutor(jobs)
    try:
        list(pool.map(run, missing))
    finally:
        pool.shutdown(cancel_futures=True)


def _run(case: Case, record: Path, every: int, gpu: int) -> str | None:
    environment = dict(os.environ)
    if torch.cuda.device_count() > 1:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        environment["CUDA_VISIBLE_DEVICES"] = visible[gpu] if gpu < len(visible) and visible[gpu] else str(gpu)
    settings = json.dumps(dataclasses.asdict(case.settings))
    command = [sys.executable, "-m", "dash_shampoo.compare.measure", settings, str(every), str(record)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"it ended with {done.returncode}"
