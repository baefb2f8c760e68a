"""Inverse roots that one can write down: of diagonal matrices, projections, vectors times themselves and identities."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dash_shampoo.roots import inverse_root

N = 12
# Within what each solver promises in float64 at these dampings.
TOLERANCE = {"minimax": 2e-3, "newton-db": 2e-3, "coupled-newton": 2e-3, "eigh": 1e-10, "chebyshev": 5e-3}
DAMPING = {"chebyshev": 1e-2}
CASES = [(s, p) for s in TOLERANCE for p in range(1, 9) if s != "newton-db" or p in (2, 4, 8)]


def norm(values: Tensor) -> Tensor:
    """The bound of the largest eigenvalue that damping is relative to: (sum of the fourth powers)^(1/4)."""
    return values.pow(4).sum().pow(0.25)


def unit_vectors(k: int) -> Tensor:
    """Orthonormal columns (N, k), with no random numbers: those of the discrete cosine transform."""
    i, j = torch.arange(N, dtype=torch.float64), torch.arange(k, dtype=torch.float64)
    columns = torch.cos(torch.pi * (i[:, None] + 0.5) * j[None] / N)
    return columns / torch.linalg.vector_norm(columns, dim=0)


def diagonal(p: int, damping: float) -> tuple[Tensor, Tensor]:
    values = torch.arange(1, N + 1, dtype=torch.float64)
    return values.diag(), (values + damping * norm(values)).pow(-1 / p).diag()


def identity(p: int, damping: float) -> tuple[Tensor, Tensor]:
    one = torch.eye(N, dtype=torch.float64)
    return 3 * one, (3 * (1 + damping * N**0.25)) ** (-1 / p) * one


def projection(p: int, damping: float) -> tuple[Tensor, Tensor]:
    rank = 4
    onto = unit_vectors(rank) @ unit_vectors(rank).T
    small = damping * rank**0.25
    beside = torch.eye(N, dtype=torch.float64) - onto
    return onto, (1 + small) ** (-1 / p) * onto + small ** (-1 / p) * beside


def rank_one(p: int, damping: float) -> tuple[Tensor, Tensor]:
    vector = torch.arange(1, N + 1, dtype=torch.float64)
    square = vector.square().sum()
    along = torch.outer(vector, vector) / square
    beside = torch.eye(N, dtype=torch.float64) - along
    return square * along, (square * (1 + damping)) ** (-1 / p) * along + (square * damping) ** (-1 / p) * beside


def two_by_two(p: int, damping: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues 4 and 2 along (1, 1) and (1, -1)."""
    high, low = ((value + damping * (4.0**4 + 2.0**4) ** 0.25) ** (-1 / p) for value in (4.0, 2.0))
    half = torch.tensor([[high + low, high - low], [high - low, high + low]], dtype=torch.float64) / 2
    return torch.tensor([[3.0, 1.0], [1.0, 3.0]], dtype=torch.float64), half


@pytest.mark.parametrize("known", [diagonal, identity, projection, rank_one, two_by_two])
@pytest.mark.parametrize(("solver", "p"), CASES)
def test_the_root_is_the_one_that_can_be_written_down(solver: str, p: int, known: object) -> None:
    assert callable(known)
    damping = DAMPING.get(solver, 1e-4)
    matrix, expected = known(p, damping)
    root = inverse_root(matrix.unsqueeze(0), p, solver=solver, damping=damping)
    assert root.ok.all()
    error = torch.linalg.matrix_norm(root.value[0] - expected, 2) / torch.linalg.matrix_norm(expected, 2)
    assert error < TOLERANCE[solver]


@pytest.mark.parametrize(("solver", "p"), CASES)
def test_its_power_undoes_the_matrix(solver: str, p: int) -> None:
    damping = DAMPING.get(solver, 1e-4)
    vectors, values = unit_vectors(N), torch.logspace(0, -3, N, dtype=torch.float64)
    matrix = vectors * values @ vectors.T
    root = inverse_root(matrix.unsqueeze(0), p, solver=solver, damping=damping).value[0]
    one = torch.eye(N, dtype=torch.float64)
    damped = matrix + damping * norm(values) * one
    undone = torch.linalg.matrix_power(root, p) @ damped
    assert torch.linalg.matrix_norm(undone - one, 2) < 8 * p * TOLERANCE[solver]
