"""How much work the solvers do, and in which form."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_shampoo.kernels import coarsest, matmul
from dash_shampoo.roots import Chebyshev, Eigh, Minimax, NewtonDB, Solver, inverse_root
from dash_shampoo.roots import solve as solving
from dash_shampoo.roots.chebyshev import clenshaw, expansion, largest_error, paterson_stockmeyer
from dash_shampoo.roots.eigh import _decompose
from tests.roots.matrices import eigenvalue_error, exact_root, relative_error, with_condition


class Count:
    """Counts products of two square stacks; thin ones, as of the certificate, are not work worth counting."""

    def __init__(self) -> None:
        self.products = 0

    def __call__(self, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        self.products += a.shape == b.shape
        return matmul(a, b, **options)


def products(
    monkeypatch: pytest.MonkeyPatch, A: Tensor, p: int, solver: Solver | str, **options: Any
) -> tuple[int, Any]:
    count = Count()
    monkeypatch.setattr(solving, "matmul", count)
    root = inverse_root(A, p, solver=solver, **options)
    return count.products, root


@pytest.mark.parametrize(
    ("condition", "most", "error"), [(1e3, 11, 3e-3), (1e4, 16, 1e-3), (1e5, 21, 1e-3), (1e6, 26, 1e-3)]
)
def test_minimax_needs_few_products_for_p_4(
    monkeypatch: pytest.MonkeyPatch, condition: float, most: int, error: float
) -> None:
    A = with_condition(condition, b=64)
    count, root = products(monkeypatch, A, 4, "minimax", damping=1 / condition)
    assert count <= most
    assert eigenvalue_error(root.value, A, 4, 1 / condition) < error


@pytest.mark.parametrize(("damping", "most"), [(1e-3, 13), (1e-4, 17), (1e-5, 21)])
def test_minimax_needs_few_products_for_p_2(monkeypatch: pytest.MonkeyPatch, damping: float, most: int) -> None:
    A = with_condition(1e6, b=64)
    count, root = products(monkeypatch, A, 2, "minimax", damping=damping)
    assert count <= most
    assert eigenvalue_error(root.value, A, 2, damping) < 1e-3


def test_minimax_needs_a_third_of_newton_db_and_a_thousandth_of_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    A = with_condition(1e4, b=64)
    ours, root = products(monkeypatch, A, 4, "minimax", damping=1e-4)
    theirs, paper = products(monkeypatch, A, 4, "newton-db-paper", damping=1e-4)
    assert ours * 3 < theirs
    assert eigenvalue_error(root.value, A, 4, 1e-4) * 1000 < eigenvalue_error(paper.value, A, 4, 1e-4)


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_minimax_of_every_degree(degree: int, p: int) -> None:
    A = with_condition(1e4)
    root = inverse_root(A, p, solver=Minimax(degree=degree), damping=1e-4)
    assert root.ok.all()
    assert relative_error(root.value, exact_root(A, p, 1e-4)) < 2e-3


@pytest.mark.parametrize(("p", "damping", "most"), [(2, 1e-3, 9), (4, 1e-4, 11)])
def test_a_looser_tolerance_saves_a_step_and_is_kept(
    monkeypatch: pytest.MonkeyPatch, p: int, damping: float, most: int
) -> None:
    A = with_condition(1e6, b=64)
    count, root = products(monkeypatch, A, p, Minimax(tolerance=0.05), damping=damping)
    assert count <= most
    assert root.ok.all()
    assert 0.01 < eigenvalue_error(root.value, A, p, damping) < 0.05


def test_minimax_roots_are_symmetric() -> None:
    A = with_condition(1e4, b=64).float()
    for p in (2, 4):
        value = inverse_root(A, p, damping=1e-4).value
        assert (value - value.mT).abs().max() < 1e-3 * value.abs().max()


def test_newton_db_takes_the_steps_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    A = with_condition(1e2)
    few, _ = products(monkeypatch, A, 4, NewtonDB(steps=5), damping=1e-2)
    many, root = products(monkeypatch, A, 4, NewtonDB(steps=20), damping=1e-2)
    assert many - few == 2 * 15 * 3
    assert relative_error(root.value, exact_root(A, 4, 1e-2)) < 1e-10


@pytest.mark.parametrize("degree", [1, 2, 3, 8, 9, 20, 60])
def test_both_evaluations_of_a_chebyshev_series_agree(degree: int) -> None:
    series = expansion(4, 1e-2, degree)
    x = torch.linspace(-1, 1, 9, dtype=torch.float64)
    variable = torch.diag(x).unsqueeze(0)
    expected = torch.diag(sum(c * torch.cos(k * torch.acos(x)) for k, c in enumerate(series))).unsqueeze(0)
    torch.testing.assert_close(clenshaw(reversed(list(enumerate(series))), variable, torch.bmm), expected)
    torch.testing.assert_close(paterson_stockmeyer(series, variable, torch.bmm), expected)


def test_paterson_stockmeyer_needs_few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    A = with_condition(1e2)
    slow, _ = products(monkeypatch, A, 4, Chebyshev(degree=60, evaluation="clenshaw"), damping=1e-2)
    fast, _ = products(monkeypatch, A, 4, Chebyshev(degree=60), damping=1e-2)
    assert slow >= 60
    assert fast <= 18


def test_chebyshev_knows_how_good_it_is() -> None:
    for damping in (1e-1, 1e-2, 1e-3):
        A = with_condition(1e8, b=64)
        error = eigenvalue_error(inverse_root(A, 4, solver="chebyshev", damping=damping).value, A, 4, damping)
        assert error <= largest_error(4, damping / (1 + damping), 60) * 1.01 + 1e-13
    assert largest_error(4, 1e-2, 60) < 1e-4
    assert largest_error(4, 1e-4, 60) > 0.05


@pytest.mark.parametrize("error", [torch.linalg.LinAlgError, RuntimeError])
def test_eigh_falls_back_block_by_block_in_float64(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    eigh = torch.linalg.eigh
    calls: list[tuple[int, torch.dtype]] = []

    def fails_in_batches_and_in_float32(matrix: Tensor) -> Any:
        calls.append((matrix.ndim, matrix.dtype))
        if matrix.ndim == 3 or (matrix.dtype == torch.float32 and matrix[0, 0] > 2):
            raise error("did not converge")
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fails_in_batches_and_in_float32)
    A = torch.stack([torch.eye(3), 3 * torch.eye(3), 2 * torch.eye(3)])
    values, _ = _decompose(A)
    torch.testing.assert_close(values, torch.tensor([1.0, 3.0, 2.0]).view(3, 1).expand(3, 3))
    assert calls.count((2, torch.float64)) == 1


def test_eigh_does_not_hide_that_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(matrix: Tensor) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.raises(torch.OutOfMemoryError):
        _decompose(torch.eye(3).unsqueeze(0))


def test_eigh_gives_up_on_one_matrix_only(monkeypatch: pytest.MonkeyPatch) -> None:
    eigh = torch.linalg.eigh

    def fails(matrix: Tensor) -> Any:
        if matrix.ndim == 3 or matrix[0, 0] < 0.99:
            raise torch.linalg.LinAlgError("did not converge")
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    A = torch.stack([torch.eye(3), torch.diag(torch.tensor([0.5, 1.0, 1.0]))])
    root = inverse_root(A, 4, solver=Eigh(), damping=1e-8, scaling="bound")
    assert root.ok.tolist()[1] is False
    assert torch.isfinite(root.value).all()


def test_every_product_has_the_precision_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver has no product of its own, so that a precision is a property of the product alone."""
    seen = []
    monkeypatch.setattr(solving, "matmul", lambda a, b, precision, **o: seen.append(precision) or matmul(a, b, **o))
    A = with_condition(1e2).float()
    for solver in ("minimax", "newton-db", "coupled-newton", "chebyshev", "eigh"):
        seen.clear()
        inverse_root(A, 4, solver=solver, damping=0.2, precision="tf32")
        assert set(seen) == {"tf32"}
    assert partial(matmul, precision="tf32")(A, A).dtype == torch.float32


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("damping", [1e-2, 1e-3, 1e-4, 1e-5])
def test_mixed_products_are_coarse_where_the_spectrum_is_short(
    monkeypatch: pytest.MonkeyPatch, p: int, damping: float
) -> None:
    seen = []

    def watched(a: Tensor, b: Tensor, *, precision: str, low: float, **options: Any) -> Tensor:
        if a.shape == b.shape:
            seen.append(coarsest(low))
        return matmul(a, b, precision=precision, low=low, **options)

    monkeypatch.setattr(solving, "matmul", watched)
    A = with_condition(1e6, b=64).float()
    root = inverse_root(A, p, damping=damping, precision="mixed")
    assert root.ok.all()
    assert eigenvalue_error(root.value, A, p, damping) < 1e-2
    assert "fp16" in seen
    assert "fp16" not in seen[: len(seen) // 3]  # split products first
