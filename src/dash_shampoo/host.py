"""The one way of numbers from the host to a device during a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dash_shampoo.apart import cached_apart


def to_device(values: Iterable[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor (n,) on a device, not to be written to, without a wait.

    `torch.tensor(values, device=...)` copies from pageable memory, for which the host waits until the device has come
    so far. This copies from pinned memory, which is filled once for numbers that come again and again.
    """
    return _staged(tuple(values), dtype, pinned=device.type in ("cuda", "xpu")).to(device, non_blocking=True)


@cached_apart(most=256)
def _staged(values: tuple[float, ...], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=pinned)
