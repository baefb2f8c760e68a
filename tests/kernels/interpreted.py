"""Triton's kernels in Triton's interpreter, which runs them on the CPU, tile by tile, with their own offsets."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from dash_shampoo import kernels
from dash_shampoo.kernels import fused


def load() -> ModuleType:
    """A copy of the kernels for the interpreter, which a variable of the environment asks for as they are defined."""
    path = os.path.join(os.path.dirname(kernels.__file__), "jit.py")
    spec = importlib.util.spec_from_file_location("interpreted_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        spec.loader.exec_module(module)
    return module


@contextmanager
def on_the_cpu(module: ModuleType, tile: int | None = None) -> Iterator[None]:
    """Has `fused` take the CPU for a GPU inside, with tiles of a size of their own if given."""
    caches: Any = fused._works
    caches.cache_clear()
    with mock.patch.multiple(fused, _jit=lambda: module, has_tensor_cores=lambda device: True):
        if tile is None:
            yield
        else:
            small = {"launch": lambda *_: fused.Launch(tile, 4), "INNER": 16}
            with mock.patch.multiple(fused, **small):
                yield
    caches.cache_clear()
