"""Roots of what training makes: factors G G^T of low rank, whose spectrum is a few large values and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dash_shampoo.kernels import matmul
from dash_shampoo.roots import inverse_root, resolve_solver, solve
from dash_shampoo.roots.solver import Spectrum
from tests.roots.matrices import norm

CASES = [
    *((solver, p, damping) for solver in ("minimax", "newton-db", "eigh") for p in (2, 4) for damping in (1e-3, 1e-4)),
    *(("coupled-newton", p, damping) for p in (2, 3, 4) for damping in (1e-3, 1e-4)),
    *(("minimax", p, 1e-4) for p in (3, 5, 8)),
    *(("minimax", p, 1e-5) for p in (2, 4)),
    ("chebyshev", 2, 1e-2),
    ("chebyshev", 4, 1e-2),
]
# The roots' error where only rounding makes it, by damping: one in the range of A is amplified by its inverse, or for
# p = 2 by less. CPUs round differently: each is twice to three times the largest that was seen on one.
ROUNDING = {1e-2: 1e-4, 1e-3: 2e-4, 1e-4: 3e-4, 1e-5: 2.5e-3}
# Odd roots have no two-sided form that ends in a symmetric product. The other was measured.
WORSE = {("minimax", 3): 3.0, ("coupled-newton", 2): 3.0}


def low_rank(b: int, rank: int) -> Tensor:
    """A Gram matrix of ``rank`` random vectors: (1, b, b)."""
    half = torch.randn(1, b, rank, generator=torch.Generator().manual_seed(rank))
    return half @ half.mT


def error_in_range(got: Tensor, A: Tensor, rank: int, p: int, damping: float) -> float:
    """Largest length of X v - x v over the eigenvectors v of A's range, relative to the exact root's eigenvalue x.

    It counts what X moves out of the range, where the exact root is up to damping^(-1/p) times as large.
    """
    values, vectors = torch.linalg.eigh(A.double())
    values, vectors = values[:, -rank:], vectors[:, :, -rank:]
    exact = ((values + damping * norm(A)) ** (-1 / p)).unsqueeze(1)
    difference = torch.linalg.vector_norm(got.double() @ vectors - vectors * exact, dim=1, keepdim=True)
    return float((difference / exact).max())


def bound(solver: str, p: int, damping: float) -> float:
    """What the solver is off by in exact arithmetic, and rounding."""
    rounding = WORSE.get((solver, p), 1.0) * ROUNDING[damping]
    return resolve_solver(solver).error(p, Spectrum(damping / (1 + damping))) + rounding


@pytest.mark.parametrize(("solver", "p", "damping"), CASES)
@pytest.mark.parametrize("rank", [3, 64])
def test_mirrored_strips_lose_nothing_in_the_range(solver: str, p: int, damping: float, rank: int) -> None:
    A = low_rank(512, rank)  # a size at which a CPU mirrors
    root = inverse_root(A, p, solver=solver, damping=damping)
    assert root.ok.all()
    assert error_in_range(root.value, A, rank, p, damping) < bound(solver, p, damping)


@pytest.mark.parametrize(("solver", "p", "damping"), CASES)
@pytest.mark.parametrize("rank", [1, 3, 16, 127])
@pytest.mark.parametrize("tile", [1, 32])
def test_mirrored_tiles_lose_nothing_in_the_range(
    monkeypatch: pytest.MonkeyPatch, solver: str, p: int, damping: float, rank: int, tile: int
) -> None:
    """As the kernels for GPUs mirror: the lower half, exactly."""

    def mirrored(a: Tensor, b: Tensor, *, symmetric: bool = False, **options: Any) -> Tensor:
        full = matmul(a, b, **options)
        if not symmetric or a.shape != b.shape:
            return full
        row = torch.arange(a.shape[-1])
        below = (row[:, None] // tile > row // tile) | ((row[:, None] // tile == row // tile) & (row[:, None] >= row))
        return full.copy_(torch.where(below, full, full.mT))

    monkeypatch.setattr(solve, "matmul", mirrored)
    A = low_rank(128, rank)
    root = inverse_root(A, p, solver=solver, damping=damping)
    assert root.ok.all()
    assert error_in_range(root.value, A, rank, p, damping) < bound(solver, p, damping)
