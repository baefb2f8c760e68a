"""Outliers of a model's weights and activations, and the model with both rounded to few bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def kurtosis(x: Tensor) -> float:
    """The excess kurtosis of all entries: 0 for a normal distribution, 3 for Laplace's, -1.2 for a uniform one."""
    x = x.detach().double()
    squares = (x - x.mean()).square()
    return float(squares.square().mean() / squares.mean().square() - 3)


def outlier(x: Tensor) -> float:
    """The largest magnitude over the root mean square."""
    x = x.detach().double()
    return float(x.abs().amax() / x.square().mean().sqrt())


def linears(model: nn.Module) -> list[nn.Linear]:
    """The linear layers, which are what is rounded."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@contextmanager
def before_linears(model: nn.Module, do: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within, ``do`` makes the input of every linear layer from what it would be."""

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        return (do(inputs[0]),)

    handles = [each.register_forward_pre_hook(hook) for each in linears(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def activations(model: nn.Module, tokens: Tensor) -> Iterator[tuple[float, float]]:
    """`kurtosis` and `outlier` of the input of each linear layer, in the order in which they are called."""
    found: list[tuple[float, float]] = []

    def keep(x: Tensor) -> Tensor:
        found.append((kurtosis(x), outlier(x)))
        return x

    with before_linears(model, keep), torch.no_grad():
        model(tokens)
    yield from found


def rounded_weight(weight: Tensor, bits: int) -> Tensor:
    """To the nearest of 2^bits - 1 even steps on both sides of 0, of a scale for each row: (rows, columns)."""
    most = 2 ** (bits - 1) - 1
    scale = (weight.abs().amax(dim=1).float() / most).clamp(min=torch.finfo(torch.float32).tiny)
    zero = torch.zeros_like(scale, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight.float(), scale, zero, 0, -most, most).to(weight.dtype)


def rounded_activation(x: Tensor, bits: int) -> Tensor:
    """The same with one scale for the whole tensor, from its largest magnitude."""
    most = 2 ** (bits - 1) - 1
    scale = (x.abs().amax().float() / most).clamp(min=torch.finfo(torch.float32).tiny)
    zero = torch.zeros((), dtype=torch.int32, device=x.device)
    return torch.fake_quantize_per_tensor_affine(x.float(), scale, zero, -most, most).to(x.dtype)


@contextmanager
@torch.no_grad()
def rounded(model: nn.Module, weights: int, inputs: int | None = None) -> Iterator[None]:
    """Within, linear layers have weights of so many bits, and inputs if asked. All is undone to the bit."""
    kept = {each.weight: each.weight.clone() for each in linears(model)}
    try:
        for weight in kept:
            weight.copy_(rounded_weight(weight, weights))
        with before_linears(model, lambda x: x if inputs is None else rounded_activation(x, inputs)):
            yield
    finally:
        for weight, before in kept.items():
            weight.copy_(before)
