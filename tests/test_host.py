"""Between host and device a step sends through one way, and reads through one: neither waits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dash_shampoo
from dash_shampoo import Dash, renewals
from dash_shampoo.host import to_device
from tests.test_optimizer import give_gradients, parameters

CPU = torch.device("cpu")
HOME = Path(dash_shampoo.__file__).parent
# What makes tensors from the host's numbers, and what reads a tensor's.
SENDS = ["tensor", "as_tensor", "from_numpy", "asarray", "scalar_tensor"]
READS = ["item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__", "cpu", "nonzero"]
# Operations whose result's size depends on values, for which the host waits.
SIZED_BY_VALUES = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::repeat_interleave",
    "aten::_unique2",
    "aten::is_nonzero",
    "aten::equal",
    "aten::allclose",
}


class Sizes(TorchDispatchMode):
    """Notes operations of a step that wait for values."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        masks = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if masks or name in SIZED_BY_VALUES:
            self.found.add(f"{name} in {caller()}")
        return func(*args, **(kwargs or {}))


def caller() -> str:
    """The innermost file of the package that is at work."""
    frame = sys._getframe(1)
    while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(HOME):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else str(Path(frame.f_code.co_filename).relative_to(HOME))


@contextmanager
def noted() -> Iterator[set[str]]:
    """The files of the package that send to the device or read from it meanwhile, and how."""
    found: set[str] = set()

    def watch(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if own := caller():
                found.add(f"{name} in {own}")
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    with ExitStack() as stack:
        for name in SENDS:
            stack.enter_context(watch(torch, name))
        for name in READS:
            stack.enter_context(watch(Tensor, name))
        stack.enter_context(Sizes(found))
        yield found


@pytest.mark.parametrize("solver", ["minimax", "newton-db", "coupled-newton", "chebyshev"])
@pytest.mark.parametrize("least", [0.0, 1e30], ids=["turns", "at once"])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_step_has_one_way_to_the_device_and_one_back(
    monkeypatch: pytest.MonkeyPatch, solver: str, least: float, lr: Any
) -> None:
    """With groups that differ, gradients that are missing or late, states just loaded, and roots due or not."""
    monkeypatch.setattr(renewals, "LEAST", least)
    params = parameters([(9, 7), (9, 7), (9, 7), (6,), (3, 4, 4), (2, 3, 2, 2), (1, 5)], torch.float32)
    differing = {"betas": (0.8, 0.9), "weight_decay": 0.1, "graft_eps": 1e-6, "start_step": 3, "momentum": 0.5}
    groups = [
        {"params": params[:2], "momentum": 0.9},
        {"params": params[2:4], **differing},
        {"params": params[4:], "algorithm": "adamw"},
    ]
    optimizer = Dash(groups, lr=lr, block_size=4, update_every=2, solver=solver, damping=1e-2)
    for step in range(7):
        give_gradients(params, step)
        if step == 0:
            params[0].grad = None
        if step in (3, 5):
            params[1].grad = params[4].grad = None
        if step == 0:  # makes what is kept from then on
            optimizer.step()
            continue
        optimizer._arrange()  # a step that arranges stacks anew may wait
        for bank in optimizer._banks:
            bank.close()
        with noted() as found:
            optimizer.step()
        assert found <= {"tensor in host.py", "tolist in watch.py"}
    assert torch.isfinite(params[0]).all()


def test_what_the_test_above_would_note() -> None:
    values = torch.arange(3.0)
    with mock.patch(f"{__name__}.HOME", Path(__file__).parent), noted() as found:
        torch.tensor([1.0])
        values.tolist()
        values[values > 1]
    assert found == {f"{what} in test_host.py" for what in ("tensor", "tolist", "aten::index")}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_numbers_arrive_whatever_mode_is_on(mode: Any) -> None:
    with mode(), torch.device("meta"):
        sent = to_device([1.5, -2.0, 1.5], torch.float64, CPU)
    torch.testing.assert_close(sent, torch.tensor([1.5, -2.0, 1.5], dtype=torch.float64))
    assert not sent.is_inference()
    torch.testing.assert_close(to_device([True, False], torch.bool, CPU), torch.tensor([True, False]))
    torch.testing.assert_close(to_device([1, 0], torch.int64, CPU), torch.tensor([1, 0]))
    assert to_device((), torch.int64, CPU).shape == (0,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_on_a_gpu_never_waits() -> None:
    params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters([(9, 7), (9, 7), (6,)], torch.float32)]
    optimizer = Dash([{"params": params[:1]}, {"params": params[1:], "betas": (0.8, 0.9)}], block_size=4)
    for step in range(12):
        for parameter in params:
            parameter.grad = torch.randn_like(parameter)
        if step == 5:
            params[0].grad = None
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
