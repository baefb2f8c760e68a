"""Scales are upper bounds, and no looser than they need to be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_shampoo.roots import inverse_root
from dash_shampoo.roots.scaling import certified_bound, power_iteration, scale, schatten4, starts
from tests.roots.matrices import exact_root, relative_error, with_spectrum

BOUNDS = ["bound", "frobenius", "power-iteration", "multi-power-iteration"]


@pytest.mark.parametrize("name", BOUNDS)
@given(
    spectrum=st.lists(st.floats(0, 1), min_size=1, max_size=20),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_scale_is_never_below_the_largest_eigenvalue(
    name: str, spectrum: list[float], seed: int, dtype: torch.dtype
) -> None:
    values = torch.tensor(spectrum, dtype=torch.float64)
    values = values / values.max() if values.max() > 1e-3 else torch.ones_like(values)
    A = with_spectrum(values, n=2, seed=seed).to(dtype)
    assert (scale(name, A, A @ A, torch.bmm) >= 1 - 1e-5).all()


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_scales_are_tight_on_decaying_spectra(power: float) -> None:
    A = with_spectrum(torch.arange(1, 257, dtype=torch.float64) ** -power, n=2)
    square = A @ A
    bound, multi = schatten4(square), scale("multi-power-iteration", A, square, torch.bmm)
    assert (bound < 2.3).all()
    assert (multi <= bound).all()


def test_a_power_iteration_started_on_the_wrong_axis_stays_there_and_the_bound_does_not() -> None:
    A = torch.diag(torch.tensor([100.0, 1.0])).unsqueeze(0)
    trapped = torch.tensor([[[0.0], [1.0]]])
    assert torch.bmm(A, trapped).norm() == 1  # what an unguarded iteration would report, for ever
    assert certified_bound(A @ A, trapped, torch.bmm) >= 100


def test_an_eigenvector_that_no_start_sees_is_bounded_all_the_same() -> None:
    b = 40
    unseen = torch.linalg.qr(torch.cat([starts(b, 16, torch.float64, torch.device("cpu")), torch.eye(b).double()], 1)).Q
    v = unseen[:, 16:17]
    A = (0.01 * torch.eye(b).double() + v @ v.T).unsqueeze(0)
    A = (A + A.mT) / 2
    for name in BOUNDS:
        assert scale(name, A, A @ A, torch.bmm) >= 1.01 - 1e-9
        root = inverse_root(A, 4, solver="newton-db", scaling=name, damping=1e-3)
        assert root.ok.all()
        assert relative_error(root.value, exact_root(A, 4, 1e-3)) < 1e-3


def test_power_iterations_start_from_the_same_vectors_every_time() -> None:
    A = with_spectrum(torch.linspace(1, 0.1, 10))
    one, other = (power_iteration(A, 4, torch.bmm) for _ in range(2))
    assert torch.equal(one, other)
    torch.testing.assert_close(one.norm(dim=1), torch.ones(3, 4).double())


def test_coupled_newton_keeps_away_from_the_open_end_of_its_interval() -> None:
    # At M = (p + 1) I the iteration returns 0: a multiple of the identity is where a scale of b^(-1/2) would put it.
    for b in (1, 25):
        A = torch.eye(b).double().unsqueeze(0)
        for scaling in BOUNDS:
            root = inverse_root(A, 4, solver="coupled-newton", scaling=scaling, damping=1e-2)
            assert relative_error(root.value, exact_root(A, 4, 1e-2)) < 1e-3
