"""Parameters of tensor subclasses move like plain ones or are refused by name: none stays where it is in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from dash_shampoo import Dash
from tests.quantised import DeafWeight, Int8Weight, ShyWeight

SHAPES = [(8, 8), (12, 20), (7, 19), (3, 6, 5), (4, 3, 3, 3), (2, 3, 2, 2, 2), (6,), (1,), ()]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "lr": torch.tensor(0.1)},
    {"algorithm": "adamw", "weight_decay": 0.1},
    {"vectors": "shampoo", "momentum": 0.9, "state_dtype": "bf16"},
]


class Plain(Tensor):
    """A subclass that adds nothing."""


def pairs(shape: tuple[int, ...], make: Any, dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, nn.Parameter]:
    """A parameter that ``make`` makes, and a plain one of the same values."""
    values = torch.randn(shape).to(dtype)
    return nn.Parameter(make(values.clone())), nn.Parameter(values)


def give_gradients(some: list[nn.Parameter], make: Any = None) -> None:
    for parameter in some:
        gradient = torch.randn(parameter.shape).to(parameter.dtype)
        parameter.grad = make(gradient) if make else gradient


def values_of(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype).copy_(parameter.detach())


class Read(torch.autograd.Function):
    """The values of a weight, with its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return values_of(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def two(values: Tensor) -> TwoTensor:
    return TwoTensor(values, values.clone())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("make", [lambda values: values.as_subclass(Plain), two], ids=["plain subclass", "two tensors"])
def test_subclasses_move_as_plain_parameters_do(make: Any, options: dict[str, Any]) -> None:
    both = [pairs(shape, make) for shape in SHAPES]
    wrapped, plain = map(list, zip(*both, strict=True))
    optimizers = [Dash(some, **{"lr": 0.1, "block_size": 6, "update_every": 2, **options}) for some in (wrapped, plain)]
    for _ in range(4):
        give_gradients(plain)
        for own, other in zip(wrapped, plain, strict=True):
            own.grad = make(other.grad.clone())
        for optimizer in optimizers:
            optimizer.step()
    for own, other in zip(wrapped, plain, strict=True):
        assert torch.equal(values_of(own), other)
        if isinstance(own, TwoTensor):
            assert torch.equal(own.a, own.b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_quantised_weights_move_to_the_nearest_values(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Each step is that of a plain parameter of the same values, rounded once."""
    weights = [nn.Parameter(Int8Weight.of(torch.randn(shape).to(dtype))) for shape in SHAPES if shape]
    options = {"lr": 0.1, "block_size": 6, "update_every": 2, **options}
    plain = [nn.Parameter(values_of(weight).float()) for weight in weights]
    optimizers = [Dash(some, **options) for some in (weights, plain)]
    for _ in range(4):
        give_gradients(weights)
        for weight, other in zip(weights, plain, strict=True):
            other.data.copy_(values_of(weight))
            other.grad = weight.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        for weight, other in zip(weights, plain, strict=True):
            expected = Int8Weight.of(other.detach().clone())
            torch.testing.assert_close(weight.numbers, expected.numbers, rtol=0, atol=0)
            torch.testing.assert_close(weight.scale, expected.scale.to(weight.scale.dtype), rtol=0, atol=0)


def test_a_quantised_layer_trains_and_resumes() -> None:
    def trained(steps: int, layer: nn.Linear, optimizer: Dash) -> Tensor:
        for _ in range(steps):
            optimizer.zero_grad()
            error = nn.functional.linear(inputs, Read.apply(layer.weight)) - targets
            error.square().mean().backward()
            optimizer.step()
        return error.square().mean().detach()

    inputs, target = torch.randn(64, 8), torch.randn(8, 8)
    targets = inputs @ target.T
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = nn.Parameter(Int8Weight.of(layer.weight.detach()))
    optimizer = Dash(layer.parameters(), lr=0.1)
    first = trained(1, layer, optimizer)
    assert trained(60, layer, optimizer) < 0.02 * first
    again = Dash(layer.parameters(), lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    before = layer.weight.numbers.clone(), layer.weight.scale.clone()
    trained(3, layer, optimizer)
    expected = values_of(layer.weight)
    layer.weight.numbers.copy_(before[0])
    layer.weight.scale.copy_(before[1])
    trained(3, layer, again)
    assert torch.equal(values_of(layer.weight), expected)


def test_a_quantised_weight_is_left_where_it_is_by_a_gradient_that_is_not_finite() -> None:
    weight = nn.Parameter(Int8Weight.of(torch.randn(8, 8)))
    before = values_of(weight)
    optimizer = Dash([weight], weight_decay=0.1)
    weight.grad = torch.full((8, 8), torch.nan)
    with pytest.warns(RuntimeWarning, match="not finite"):
        optimizer.step()
    assert torch.equal(values_of(weight), before)


@pytest.mark.parametrize("kind", [DeafWeight, ShyWeight])
@pytest.mark.parametrize("shape", [(8, 8), (6,), (2, 4, 4), (4, 3, 3, 3)])
@pytest.mark.parametrize("values", [torch.randn, torch.zeros, torch.ones])
def test_subclasses_that_cannot_be_written_to_are_refused_by_name(kind: Any, shape: Any, values: Any) -> None:
    weight = nn.Parameter(kind.of(values(shape)))
    message = rf"layer.weight is a {kind.__name__}, which clone and copy_ do not read and write"
    with pytest.raises(TypeError, match=message):
        Dash([("layer.weight", weight)])
    other = nn.Parameter(torch.ones(2, 2))
    optimizer = Dash([("other", other)])
    with pytest.raises(TypeError, match=message):
        optimizer.add_param_group({"params": [("layer.weight", weight)]})
    assert len(optimizer.param_groups) == 1
    Dash([nn.Parameter(kind.of(values(shape)), requires_grad=False), other])  # it need not move
