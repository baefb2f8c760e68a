"""Outliers have their textbook values, and rounding to few bits is exact, bounded and undone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dash_shampoo.claim.rounding import (
    activations,
    kurtosis,
    linears,
    outlier,
    rounded,
    rounded_activation,
    rounded_weight,
)


def test_kurtosis_of_known_distributions() -> None:
    generator = torch.Generator().manual_seed(1)
    assert kurtosis(torch.randn(10**6, generator=generator)) == pytest.approx(0, abs=0.03)
    assert kurtosis(torch.rand(10**6, generator=generator)) == pytest.approx(-1.2, abs=0.02)
    # Bernoulli's: (1 - 6 p (1 - p)) / (p (1 - p)).
    assert kurtosis(torch.tensor([1.0] + 9 * [0.0])) == pytest.approx((1 - 0.54) / 0.09)


def test_an_outlier_is_over_the_root_mean_square() -> None:
    assert outlier(torch.tensor([-4.0, 0, 0, 0])) == 2
    assert outlier(torch.tensor([[1.0, -1.0]])) == 1


@given(bits=st.integers(2, 8), rows=st.integers(1, 5), columns=st.integers(1, 9), seed=st.integers(0, 99))
def test_weights_are_off_by_half_a_step_of_their_row_at_most(bits: int, rows: int, columns: int, seed: int) -> None:
    scales = torch.logspace(-6, 6, rows).unsqueeze(1)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scales
    step = weight.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    found = rounded_weight(weight, bits)
    assert ((found - weight).abs() <= 0.5001 * step).all()
    levels = found / step
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-4)
    torch.testing.assert_close(rounded_weight(found, bits), found)


def test_zeros_stay_zeros() -> None:
    assert rounded_weight(torch.zeros(2, 3), 4).eq(0).all()
    assert rounded_activation(torch.zeros(2, 3), 8).eq(0).all()


def test_an_outlier_takes_the_precision_of_all_activations() -> None:
    x = torch.tensor([0.3, -0.2, 254.0])
    assert rounded_activation(x, 8).tolist() == [0, 0, 254]


def test_a_rounded_model_computes_with_rounded_numbers_and_is_itself_again_after() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2, bias=False))
    x, before = torch.randn(3, 6), [each.clone() for each in model.parameters()]
    first, _, second = model
    with torch.no_grad():
        inside = first.bias + rounded_activation(x, 8) @ rounded_weight(first.weight, 4).T
        expected = rounded_activation(inside.tanh(), 8) @ rounded_weight(second.weight, 4).T
        with rounded(model, 4, 8):
            torch.testing.assert_close(model(x), expected)
        with pytest.raises(RuntimeError, match="stop"), rounded(model, 4):
            raise RuntimeError("stop")
        with rounded(model, 4):
            assert not torch.equal(first.weight, before[0])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not any(each._forward_pre_hooks for each in linears(model))


def test_activations_are_inputs_of_linear_layers() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.randn(3, 6)
    inside = model[:2](x)
    assert list(activations(model, x)) == [(kurtosis(x), outlier(x)), (kurtosis(inside), outlier(inside))]
