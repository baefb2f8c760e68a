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
            start = time.perf_counter()
            piece()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: median(each) for name, each in times.items()}
