"""Torch's default dtype and device, which programs set as they please, change nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dash_shampoo import Dash

CPU = torch.device("cpu")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "vectors": "shampoo"},
    {"root": 4, "grafting": "none", "update_every": 1},
    {"state_dtype": "bf16"},
    *({"solver": name} for name in ("eigh", "newton-db", "coupled-newton", "chebyshev", "newton-db-paper")),
]


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64, "meta"], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield request.param
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def trained(**options: Any) -> list[Tensor]:
    """Parameters after a few steps, a copy and a resume."""
    shapes = [(12, 9), (5,), (2, 3, 4), (3, 2, 2, 2)]
    make: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    params = [nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel(), **make).view(shape)) for shape in shapes]
    optimizer = Dash(params, lr=0.1, block_size=5, **options)
    for step in range(4):
        for i, parameter in enumerate(params):
            angles = torch.arange(parameter.numel(), **make) * (step + 1.3) + i
            parameter.grad = angles.sin().view(parameter.shape)
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.diagnostics()
    return [parameter.detach() for parameter in params]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_default_in_force_does_not_matter(default: Any, options: dict[str, Any]) -> None:
    expected = trained(**options)
    if default == "meta":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(default)
    for got, plain in zip(trained(**options), expected, strict=True):
        assert got.device == plain.device
        assert torch.equal(got, plain)
