"""What a device can do, as far as a rule may depend on it."""

from __future__ import annotations

from functools import cache

import torch

TENSOR_CORES = (8, 0)  # compute capability from which TF32, float16 and bfloat16 products add up in float32


@cache
def has_tensor_cores(device: torch.device) -> bool:
    """Whether products narrower than float32 are several times as fast on ``device``: NVIDIA's from Ampere on.

    Where there is no CUDA at all, a plan is made for another machine: it is taken for one that has them.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= TENSOR_CORES
