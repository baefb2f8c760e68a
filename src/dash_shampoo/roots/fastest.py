"""Which precision is fastest here: measured when it is first asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

REPEATS = 3
COUNT = 4  # matrices that are timed


def fastest(solve: Callable[[Tensor, str], Tensor], precisions: list[str], size: int, device: torch.device) -> str:
    """The one of ``precisions`` with which ``solve(stack, precision)`` takes the least time on matrices of a size."""
    stack = torch.eye(size, dtype=torch.float32, device=device).repeat(COUNT, 1, 1)
    seconds = {}
    for precision in precisions:
        times = []
        for _ in range(REPEATS + 1):  # the first warms up
            start = time.perf_counter()
            solve(stack, precision).sum().item()  # waits for the result
            times.append(time.perf_counter() - start)
        seconds[precision] = min(times[1:])
    return min(precisions, key=lambda precision: seconds[precision])
