"""Torch's process-wide flags for float32 products: held while roots are computed, and put back after.

With them set, torch may multiply float32 matrices in TF32 or bfloat16, which an inverse root does not survive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch

from dash_shampoo.apart import cached_apart
from dash_shampoo.kernels.device import has_tensor_cores

# The flags are the process's own: two threads that change and restore them in turn would leave them changed.
_LOCK = RLock()

_ONEDNN: Any = torch.backends.mkldnn


@contextmanager
def strict_products(device: torch.device) -> Iterator[None]:
    """Makes float32 products on a kind of ``device`` true float32 ones inside, whatever autocast and torch's flags say.

    Products on other threads meanwhile are strict too; the flags are restored after.
    """
    flag = torch.backends.cuda.matmul if device.type == "cuda" else _ONEDNN.matmul
    strict = "bf16" if device.type == "cpu" and _onednn_is_exact() else "ieee"
    available = torch.amp.is_autocast_available(device.type)
    with torch.autocast(device.type if available else "cpu", enabled=False), _LOCK, _held(flag, strict):
        yield


@contextmanager
def quick_products(device: torch.device) -> Iterator[None]:
    """Has float32 products take the fastest kernel whose rounding training does not see, whatever torch's flags say.

    That is TF32 on tensor cores, and on a CPU what is a float32 product. Elsewhere torch's flags decide.
    """
    if device.type == "cpu" and _onednn_is_exact():
        with strict_products(device):
            yield
    elif has_tensor_cores(device):
        with torch.autocast("cuda", enabled=False), tf32_products():
            yield
    else:
        yield


@contextmanager
def tf32_products() -> Iterator[None]:
    """Lets float32 products on CUDA use TF32 inside."""
    with _LOCK, _held(torch.backends.cuda.matmul, "tf32"):
        yield


@contextmanager
def _held(flag: Any, value: str) -> Iterator[None]:
    """Sets ``flag.fp32_precision`` inside.

    A flag of "none" reads as the value of the flag above it. Put back as "none" where the two agree, it goes on
    following.
    """
    before = flag.fp32_precision
    if before == value or (before == "none" and value == "ieee"):
        yield
        return
    above = _ONEDNN if flag is _ONEDNN.matmul else torch.backends
    follows = before == above.fp32_precision
    flag.fp32_precision = value
    try:
        yield
    finally:
        flag.fp32_precision = "none" if follows else before


@cached_apart()
def _onednn_is_exact() -> bool:
    """Whether products on the CPU stay true float32 ones when torch permits bfloat16.

    The permission sends them from MKL to oneDNN, which takes bfloat16 only on processors with AMX, and is elsewhere a
    float32 product: on AMD processors, where MKL does without AVX-512, at twice the speed. Asked of the products
    themselves: 1 + 2^-12 times an identity keeps its last bit, or it does not.
    """
    if not _ONEDNN.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    probe = torch.full((2, 256, 256), 1 + 2.0**-12, dtype=torch.float32)
    eye = torch.eye(256, dtype=torch.float32).expand(2, -1, -1).contiguous()
    with _held(_ONEDNN.matmul, "bf16"):
        return torch.equal(torch.bmm(probe, eye), probe) and torch.equal(torch.bmm(eye, probe), probe)
