"""Matrices that claims are tried on."""

from __future__ import annotations

import torch
from torch import nn

from dash_shampoo import Dash
from dash_shampoo.claim.matrices import eigenvalues, kept_factors, spectra, turned


def test_factors_come_out_of_the_state_whole() -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = Dash(layer.parameters(), lr=0.0)
    layer(torch.randn(5, 4)).square().sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    optimizer.step()
    found = kept_factors(optimizer.state, most=8)  # bias-corrected: the first gradient counts whole
    torch.testing.assert_close(found[4], torch.stack([gradient @ gradient.T, gradient.T @ gradient]))


def test_no_more_factors_are_taken_than_asked_for_from_first_to_last() -> None:
    entries = {f"tile{i}.left": torch.full((1, 3, 2), float(i)) for i in range(9)}
    (found,) = kept_factors({torch.zeros(1): entries}, most=3).values()
    assert found.shape == (3, 2, 2)
    assert found[:, 0, 1].tolist() == [0, 4, 8]


def test_random_matrices_have_their_spectra() -> None:
    for values in spectra(16).values():
        assert values.max() == 1
        torch.testing.assert_close(
            eigenvalues(turned(values, 2, seed=1)), values.sort().values.expand(2, -1), atol=1e-6, rtol=0
        )
