"""Times that can be compared on a noisy machine: taken in turns, and the median of several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch


def interleaved(work: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each piece of work, all of them run in turn ``repeats`` times after one run to warm up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats + 1):
        for name, piece in work.items():
            spent = milliseconds(piece, device)
            if repeat:
                times[name].append(spent / 1e3)
    return {name: median(each) for name, each in times.items()}


def milliseconds(piece: Callable[[], object], device: torch.device) -> float:
    """How long a piece of work takes, on a GPU by its own clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        piece()
        return 1e3 * (time.perf_counter() - start)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    piece()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
