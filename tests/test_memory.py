"""State and workspace are bounded, and counted."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
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


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples and lists."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_in(value)


class Live(TorchDispatchMode):
    """Follows the bytes of memory that is taken inside and not free yet, and of that which tensors have before."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.total = 0  # of what is followed, with some that is free by now
        self.peak = 0
        for tensor in tensors:
            self._follow(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, tuple((kwargs or {}).values())))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            if tensor.untyped_storage()._cdata not in old:  # or else a view
                self._follow(tensor)
        return result

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        _, replaced = self.storages.get(storage._cdata, (None, 0))
        self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.total += storage.nbytes() - replaced
        if self.total > self.peak:  # only then what is free matters
            self.storages = {key: kept for key, kept in self.storages.items() if not kept[0].expired()}
            self.total = sum(size for _, size in self.storages.values())
            self.peak = max(self.peak, self.total)


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
    params: list[nn.Parameter] = parameters([(256, 256)] * 6, torch.float32)
    optimizer = Dash(params, block_size=64, update_every=1, root=4, damping=1e-2, max_workspace=1 << 20, **options)
    for step in range(2):
        give_gradients(params, step)
        with Live() as live:
            optimizer.step()
    assert live.peak <= 1 << 20


REARRANGED: list[tuple[int, int]] = [(256, 256)] * 8 + [(8, 8), (130, 500)]
SPACE = 1 << 20  # the workspace


def given(places: list[int], options: dict[str, Any]) -> tuple[Dash, list[nn.Parameter]]:
    """An optimizer of which the parameters in these places have had a step."""
    params: list[nn.Parameter] = parameters(REARRANGED, torch.float32)
    optimizer = Dash(params, block_size=64, update_every=1, max_workspace=SPACE, **options)
    give_gradients([params[i] for i in places], 0)
    optimizer.step()
    return optimizer, params


def size(optimizer: Dash) -> int:
    return sum(v.nbytes for own in optimizer.state.values() for v in own.values() if isinstance(v, Tensor))


def peak_of_a_step(optimizer: Dash) -> int:
    """Bytes of the state and of all that a step makes, at most."""
    held = stacks(optimizer)
    live = Live(*held)
    del held
    with live:
        optimizer.step()
    return live.peak


def stacks(optimizer: Dash) -> list[Tensor]:
    """What holds the state: tensors of the stacks, and entries that are in none."""
    found = []
    for slab in (slab for bank in optimizer._banks for slab in bank.slabs):
        if slab.open():
            found.append(slab.tensor)
            slab.close()
    inside = {entry.data_ptr() for bank in optimizer._banks for entry in bank.entries(optimizer.state)}
    entries = [v for own in optimizer.state.values() for v in own.values() if isinstance(v, Tensor)]
    return found + [entry for entry in entries if entry.data_ptr() not in inside]


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "state_dtype": "bf16"}, {"algorithm": "adamw"}], ids=str)
@pytest.mark.parametrize(
    "late",
    [[8], [0], [5], [9], [2, 8, 9]],
    ids=["another shape", "the first of many", "one of many", "the last", "several"],
)
def test_a_parameter_that_thaws_takes_no_second_state(
    late: list[int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "TILE_ELEMENTS", 1 << 14)
    optimizer, params = given([i for i in range(len(REARRANGED)) if i not in late], options)
    give_gradients(params, 1)
    rearranged, usual = peak_of_a_step(optimizer), peak_of_a_step(optimizer)
    assert usual > 4 * SPACE
    assert rearranged <= max(usual, size(optimizer) + SPACE)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "state_dtype": "bf16"}], ids=str)
@pytest.mark.parametrize("stepped", [True, False])
def test_a_load_and_the_step_after_it_take_no_second_state(
    stepped: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "TILE_ELEMENTS", 1 << 14)
    everything = list(range(len(REARRANGED)))
    file = given(everything, options)[0].state_dict()
    optimizer, params = given(everything if stepped else [], options)
    give_gradients(params, 1)
    held = stacks(optimizer)
    with Live(*held) as loading:
        optimizer.load_state_dict(file)
    assert loading.peak - size(optimizer) <= (8 * len(REARRANGED) if stepped else 0)
    del held
    rearranged, usual = peak_of_a_step(optimizer), peak_of_a_step(optimizer)
    assert rearranged <= max(usual, size(optimizer) + SPACE)


@pytest.mark.parametrize("move", [Tensor.clone, Tensor.double], ids=["the same", "another dtype"])
def test_a_state_that_users_have_moved_is_taken_without_a_second_one(
    move: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "TILE_ELEMENTS", 1 << 14)
    optimizer, params = given(list(range(len(REARRANGED))), {})
    for own in optimizer.state.values():
        own |= {k: move(v) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in own.items()}
    moved = size(optimizer)
    give_gradients(params, 1)
    del own
    assert peak_of_a_step(optimizer) <= moved + SPACE


FAULTS = """
import os, resource, torch
from dash_shampoo import Dash
torch.set_num_threads(1)
params = [torch.nn.Parameter(torch.randn(1024, 1024)) for _ in range(2)]
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
    temporaries = 9 * 2 * 2 * 4 * 1024 * 1024  # of the roots: at least nine stacks of 2 factors for each of the blocks
    assert int(done.stdout) < temporaries / 2
