"""Many processes take the step that one would take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel import jobs
from tests.parallel.processes import Processes

STEPS = 5
# The kernels round a batch of one block otherwise than a batch of many, and inverse roots amplify that.
ROUNDING = {torch.float64: {"rtol": 1e-10, "atol": 1e-12}, torch.float32: {"rtol": 2e-4, "atol": 2e-5}}
WORLDS = [
    ("replicated", 2),
    ("replicated", 3),
    ("replicated", 4),
    ("fsdp", 2),
    ("fsdp", 3),
    ("fsdp", 4),
    ("hsdp", 4),
    ("mixed", 4),
]


def assert_equal(many: list[list[Tensor]], one: list[Tensor], **tolerance: Any) -> None:
    for own in many:
        for left, right in zip(own, one, strict=True):
            torch.testing.assert_close(left, right, **(tolerance or ROUNDING[left.dtype]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("strategy", "size"), WORLDS)
def test_many_processes_equal_one(processes: Processes, strategy: str, size: int, dtype: torch.dtype) -> None:
    many = processes.run(jobs.steps, size, strategy, STEPS, {}, dtype)
    assert_equal(many, jobs.steps("alone", STEPS, dtype=dtype))
