"""The paper's settings behave as the paper's do."""

from __future__ import annotations

import pytest
import torch

from dash_shampoo.roots import inverse_root
from dash_shampoo.roots.scaling import power_iteration, rayleigh_quotients
from tests.roots.matrices import with_spectrum


def test_newton_db_with_10_and_10_steps_is_off_by_the_known_ratios() -> None:
    # Root that comes out over the exact inverse fourth root, by the eigenvalue's size relative to the largest.
    ratios = {1e-2: 1.000, 1e-3: 1.059, 1e-4: 1.600, 1e-5: 2.169, 1e-6: 1.495, 1e-7: 0.860, 1e-8: 0.485}
    A = with_spectrum(torch.tensor([1.0, *ratios], dtype=torch.float64), n=1)
    root = inverse_root(A, 4, solver="newton-db-paper", damping=0.0).value[0]
    values, vectors = torch.linalg.eigh(A[0])
    got = (vectors.T @ root @ vectors).diagonal() * values**0.25
    for value, ratio in zip(values, got, strict=True):
        if value < 0.5:
            expected = ratios[10.0 ** round(float(value.log10()))]
            assert float(ratio) == pytest.approx(expected, abs=2e-3)


def test_coupled_newton_with_10_steps_and_frobenius_scaling() -> None:
    # x <- x (1 + (1 - m) / 4), m <- m (1 + (1 - m) / 4)^4 from m = 2.5 times the scaled eigenvalue, ten times.
    values = torch.tensor([1.0, 1e-2, 1e-4, 1e-6], dtype=torch.float64)
    A = with_spectrum(values, n=1)
    root = inverse_root(A, 4, solver="coupled-newton-paper", damping=0.0).value[0]
    frobenius = values.square().sum().sqrt()
    m, x = 2.5 * values / frobenius, torch.full_like(values, 2.5**0.25)
    for _ in range(10):
        t = 1 + (1 - m) / 4
        m, x = m * t**4, x * t
    expected, _ = (x * frobenius**-0.25).sort(descending=True)
    torch.testing.assert_close(torch.linalg.eigvalsh(root).flip(0), expected, rtol=1e-9, atol=0)


def test_the_papers_scale_is_twice_the_estimate_of_a_power_iteration() -> None:
    A = with_spectrum(torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64), n=2)
    quotients = rayleigh_quotients(A, power_iteration(A, 16, torch.bmm), torch.bmm)
    torch.testing.assert_close(quotients.amax(dim=2), torch.ones(2, 1).double(), rtol=1e-6, atol=0)


def test_epsilon_of_the_paper_keeps_a_singular_matrix_finite() -> None:
    A = with_spectrum(torch.tensor([1.0, 0.5, 0.0, 0.0])).float()
    root = inverse_root(A, 4, solver="newton-db-paper", damping=0.0, epsilon=1e-10)
    assert root.ok.all()
    assert torch.isfinite(root.value).all()
