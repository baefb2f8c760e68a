"""State and workspace are bounded, and counted."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dash_shampoo import Dash, param_groups
from dash_shampoo import layout as layout_module
from dash_shampoo.layout import layout
from dash_shampoo.train.llama import SIZES, Llama
from tests.test_optimizer import give_gradients, parameters


def multiples_of_the_parameters(size: str, **options: Any) -> float:
    """State of Dash for a model, in multiples of its parameters' float32 size; nothing is allocated."""
    with torch.device("meta"):
        model = Llama(SIZES[size])
    defaults = Dash(parameters([(2, 2)]), **options).defaults
    elements = sum(
        math.prod(shape) * (0.5 if options.get("state_dtype") == "bf16" and name.endswith(("moment", "_root")) else 1.0)
        for group in param_groups(model)
        for _, parameter in group["params"]
        for name, shape in layout(parameter, {**defaults, **group}).items()
    )
    return elements / sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("size", ["llama-953m", "llama-1b", "llama-7b"])
@pytest.mark.parametrize("block_size", [256, 512, 1024, 2048])
def test_state_is_at_most_four_times_the_parameters_and_twice_in_bfloat16(size: str, block_size: int) -> None:
    assert multiples_of_the_parameters(size, block_size=block_size) <= 4.0
    assert multiples_of_the_parameters(size, block_size=block_size, state_dtype="bf16") <= 2.0


def test_the_layout_is_what_is_allocated() -> None:
    params = parameters([(9, 7), (6,), (4, 3, 2, 2), ()], torch.float32)
    for options in (
        {},
        {"grafting": "sgd"},
        {"momentum": 0.9},
        {"vectors": "shampoo"},
        {"algorithm": "adamw"},
        {"state_dtype": "bf16"},
    ):
        optimizer = Dash(params, block_size=4, **options)
        give_gradients(params, 0)
        optimizer.step()
        for parameter in params:
            state = {name: tuple(v.shape) for name, v in optimizer.state[parameter].items() if isinstance(v, Tensor)}
            assert state == {k: tuple(v) for k, v in layout(parameter, optimizer.param_groups[0]).items()}


class Live(TorchDispatchMode):
    """Follows the bytes of tensors that are made inside and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {
            t.untyped_storage().data_ptr()
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if torch.is_tensor(t)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(tensor):
                self._follow(tensor, old)
        return result

    def _follow(self, tensor: Tensor, old: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in old and key not in self.holders:
            return  # a view of something that was there before
        self.holders[key] = self.holders.get(key, 0) + 1
        self.sizes[key] = storage.nbytes()
        self.peak = max(self.peak, sum(self.sizes.values()))
        weakref.finalize(tensor, self._release, key)

    def _release(self, key: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.holders[key], self.sizes[key]


@pytest.mark.parametrize("root", [2, 4])
@pytest.mark.parametrize("algorithm", ["shampoo", "adamw"])
def test_a_step_stays_within_its_workspace(root: int, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "TILE_ELEMENTS", 1 << 14)
    params: list[nn.Parameter] = parameters([(256, 256)] * 12 + [(500, 130)] * 4, torch.float32)
    model = sum(parameter.nbytes for parameter in params)
    options: dict[str, Any] = {"block_size": 64, "root": root, "update_every": 1, "algorithm": algorithm}
    optimizer = Dash(params, max_workspace=1 << 20, **options)
    give_gradients(params, 0)
    optimizer.step()
    give_gradients(params, 1)
    with Live() as live:
        optimizer.step()
    assert live.peak <= 1 << 20
    assert live.peak < model / 3
    twins = parameters([(256, 256)] * 12 + [(500, 130)] * 4, torch.float32)
    wide = Dash(twins, **options)
    for step in range(2):
        give_gradients(twins, step)
        wide.step()
    for one, other in zip(params, twins, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"solver": "chebyshev"},
        {"solver": "newton-db"},
        {"solver": "coupled-newton"},
        {"solver": {"name": "minimax", "degree": 3}},
        {"precision": "fp16x3"},
        {"state_dtype": "bf16"},
    ],
    ids=str,
)
def test_roots_by_any_solver_and_precision_stay_within_the_workspace(options: dict[str, Any]) -> None:
    params: list[nn.Parameter] = parameters([(256, 256)] * 12, torch.float32)
    optimizer = Dash(params, block_size=64, update_every=1, root=4, damping=1e-2, max_workspace=1 << 20, **options)
    for step in range(2):
        give_gradients(params, step)
        with Live() as live:
            optimizer.step()
    assert live.peak <= 1 << 20


FAULTS = """
import os, resource, torch
from dash_shampoo import Dash
torch.set_num_threads(1)
params = [torch.nn.Parameter(torch.randn(1024, 1024)) for _ in range(4)]
optimizer = Dash(params, block_size=256, update_every=1)
for step in range(3):
    for parameter in params:
        parameter.grad = torch.randn(1024, 1024)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    optimizer.step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults * os.sysconf("SC_PAGE_SIZE"))
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries keep what is freed, or cannot be asked"
)
def test_a_step_takes_up_the_memory_that_the_last_one_freed() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=120)
    temporaries = 9 * 4 * 2 * 4 * 1024 * 1024  # of the roots: at least nine stacks of 2 factors for each of the blocks
    assert int(done.stdout) < temporaries / 2
