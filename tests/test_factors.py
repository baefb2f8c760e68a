"""Factors and their roots share memory without touching each other, and a failed root is rescued."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dash_shampoo import Dash
from dash_shampoo.factors import FactorKey, Factors, with_float64
from dash_shampoo.roots import Eigh, Minimax
from dash_shampoo.slabs import Slot
from tests.roots.matrices import exact_root
from tests.test_optimizer import give_gradients, parameters


def allocated(key: FactorKey, *sizes: int, dtype: torch.dtype = torch.float64) -> Factors:
    """Factors of sides with so many blocks each."""
    slots = [[Slot(0, f"tile{i}.left", size)] for i, size in enumerate(sizes)]
    factors = Factors(key, slots, dtype, torch.device("cpu"))
    for slab in factors.slabs:
        slab.allocate()
    return factors


def make(size: int, *sizes: int, **changes: Any) -> Factors:
    return allocated(FactorKey(size, 2, Minimax(), 1e-3, 0.0, "fp32", None)._replace(**changes), *sizes)


def factor(factors: Factors) -> Tensor:
    return torch.cat([side.pairs.factor(slice(None)) for side in factors.sides])


def inverse(factors: Factors) -> Tensor:
    return torch.cat([side.inverse() for side in factors.sides])


def accumulate(factors: Factors, half: Tensor, keep: Tensor) -> None:
    for side in factors.sides:
        count = len(side.inverse())
        side.accumulate(half[side.start : side.start + count], keep[side.start : side.start + count])


def halves(n: int, size: int) -> Tensor:
    return torch.randn(n, size, 2 * size, dtype=torch.float64)


@given(size=st.integers(1, 7), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), data=st.data())
def test_factors_and_inverses_share_an_array_without_touching_each_other(
    size: int, sizes: list[int], data: st.DataObject
) -> None:
    n = sum(sizes)
    factors = make(size, *sizes)
    assert torch.equal(inverse(factors), torch.eye(size).double().expand(n, size, size))
    kept = [slab for side in factors.sides for slab in side.pairs.slabs]
    assert sum(slab.tensor.numel() for slab in kept) == n * size * (size + 1)
    expected = torch.zeros(n, size, size, dtype=torch.float64)
    for _ in range(3):
        side = data.draw(st.sampled_from(factors.sides))
        count = len(side.inverse())
        half = halves(count, size)
        before = inverse(factors)
        side.accumulate(half, torch.full((count, 1, 1), 0.5).double())
        own = slice(side.start, side.start + count)
        expected[own] = 0.5 * expected[own] + half @ half.mT
        torch.testing.assert_close(factor(factors), expected)
        assert torch.equal(inverse(factors), before)
    before = factor(factors)
    chosen = sorted(data.draw(st.lists(st.integers(0, n - 1), min_size=1, unique=True)))
    factors.update_roots(chosen)
    assert torch.equal(factor(factors), before)
    roots = inverse(factors)
    for lane in range(n):
        if lane in chosen and expected[lane].any():
            torch.testing.assert_close(roots[lane], exact_root(before[[lane]], 2, 1e-3)[0], rtol=1e-2, atol=1e-2)
        else:
            torch.testing.assert_close(roots[lane], torch.eye(size).double())


@pytest.mark.parametrize("sizes", [(9,), (4, 5), (1,) * 9])
def test_roots_in_pieces_equal_roots_at_once(sizes: tuple[int, ...]) -> None:
    whole, pieces = make(6, 9), make(6, *sizes, max_workspace=1)
    half = halves(9, 6)
    for factors in (whole, pieces):
        accumulate(factors, half, torch.zeros(9, 1, 1).double())
        factors.update_roots(range(9))
    torch.testing.assert_close(inverse(whole), inverse(pieces))
    assert torch.equal(factor(whole), factor(pieces))


def fails_for_large(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes minimax return rubbish for scaled matrices whose first entry is the largest."""
    solved: list[int] = []
    solve = Minimax.solve

    def solve_badly(self: Minimax, scaled: Any, *rest: Any) -> Tensor:
        root = solve(self, scaled, *rest)
        bad = scaled.matrix[:, 0, 0] > 0.9
        solved.append(int(bad.sum()))
        return torch.where(bad.view(-1, 1, 1), 100 * root, root)

    monkeypatch.setattr(Minimax, "solve", solve_badly)
    return solved


def test_a_refused_root_stays_the_last_good_one_and_is_solved_again_by_eigh(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = make(4, 1, 2)
    first = torch.diag_embed(torch.rand(3, 4, dtype=torch.float64) * 0.1 + 1)
    accumulate(factors, first, torch.zeros(3, 1, 1).double())
    factors.update_roots(range(3))
    good = inverse(factors)
    fails_for_large(monkeypatch)
    second = torch.diag_embed(torch.tensor([1.0, 0.1, 0.1, 0.1]).double()).expand(3, 4, 4).clone()
    second[1] = torch.eye(4)
    accumulate(factors, second, torch.zeros(3, 1, 1).double())
    factors.update_roots(range(3))
    assert factors.failed.tolist() == [True, False, True]
    assert int(factors.failures) == 2
    assert torch.equal(inverse(factors)[[0, 2]], good[[0, 2]])
    for rescued in (2, 4):  # for as long as the solver fails
        factors.update_roots(range(3))
        assert factors.rescued == rescued
        exact = exact_root(factor(factors), 2, 1e-3)
        torch.testing.assert_close(inverse(factors), exact, rtol=1e-3, atol=0)
    monkeypatch.undo()
    for rescued in (6, 6):
        factors.update_roots(range(3))
        assert factors.rescued == rescued
    assert not factors.failed.any()


def test_only_the_factors_that_are_due_are_rescued(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = make(4, 1, 2)
    fails_for_large(monkeypatch)
    half = torch.diag_embed(torch.tensor([1.0, 0.1, 0.1, 0.1]).double()).expand(3, 4, 4)
    accumulate(factors, half, torch.zeros(3, 1, 1).double())
    factors.update_roots(range(3))
    factors.update_roots([1])
    assert factors.rescued == 1
    roots = inverse(factors)
    torch.testing.assert_close(roots[[1]], exact_root(factor(factors)[[1]], 2, 1e-3))
    assert torch.equal(roots[[0, 2]], torch.eye(4).double().expand(2, 4, 4))


@pytest.mark.parametrize("max_workspace", [None, 1])
def test_rescues_are_batched_as_the_workspace_allows(
    monkeypatch: pytest.MonkeyPatch, max_workspace: int | None
) -> None:
    fails_for_large(monkeypatch)
    factors = make(4, 2, 3, max_workspace=max_workspace)
    half = torch.diag_embed(torch.tensor([1.0, 0.1, 0.1, 0.1]).double()).expand(5, 4, 4)
    accumulate(factors, half, torch.zeros(5, 1, 1).double())
    factors.update_roots(range(5))
    batches: list[int] = []
    solve = Eigh.solve
    monkeypatch.setattr(Eigh, "solve", lambda self, scaled, *rest: batches.append(1) or solve(self, scaled, *rest))
    factors.update_roots([0, 2, 3, 4])
    assert factors.rescued == 4
    assert len(batches) == (1 if max_workspace is None else 4)
    torch.testing.assert_close(inverse(factors)[[0, 2, 3, 4]], exact_root(factor(factors)[[0, 2, 3, 4]], 2, 1e-3))


def test_rescues_go_to_the_cpu_where_there_is_no_float64() -> None:
    assert [with_float64(torch.device(name)).type for name in ("cpu", "cuda", "xpu", "mps")] == [
        "cpu",
        "cuda",
        "xpu",
        "cpu",
    ]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1e-10])
@given(size=st.integers(1, 9), zero=st.lists(st.booleans(), min_size=1, max_size=4))
def test_factors_that_are_zero_are_known_as_waiting_for_a_root(
    small: bool, epsilon: float, size: int, zero: list[bool]
) -> None:
    key = FactorKey(size, 2, Minimax(), 1e-3, epsilon, "fp32", None, small)
    factors = allocated(key, len(zero), dtype=torch.float32)
    factors.watch()
    assert factors.without_root() == set(range(len(zero)))
    half = 3 * torch.eye(size) * torch.tensor([not z for z in zero]).view(-1, 1, 1)
    accumulate(factors, half, torch.zeros(len(zero), 1, 1))
    factors.update_roots(range(len(zero)))
    assert factors.without_root() == {i for i, z in enumerate(zero) if z}


def test_diagnostics_count_failures_and_rescues(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_for_large(monkeypatch)
    params = parameters([(4, 4)])
    optimizer = Dash(params, lr=0.1, update_every=1, block_size=4)
    for step in range(3):
        give_gradients(params, step)
        params[0].grad[0] *= 100
        optimizer.step()
    numbers = optimizer.diagnostics()
    assert numbers["roots"] == 2
    assert numbers["roots_failed"] >= 2
    assert numbers["roots_rescued"] >= 1
    assert numbers["roots_failing"] >= 1
    assert torch.isfinite(params[0]).all()


def test_the_workspace_is_that_of_the_precision_that_a_device_takes() -> None:
    by_rule, true, mixed = (make(8, 1, precision=name).key for name in ("auto", "fp32", "mixed"))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert by_rule.needed(4, cpu) == true.needed(4, cpu) == true.needed(4, gpu)
    assert by_rule.needed(4, gpu) == mixed.needed(4, cpu) > true.needed(4, cpu)


def test_folded_factors_keep_their_precision_and_roots_are_rounded_to_bfloat16() -> None:
    keys = [FactorKey(6, 2, Minimax(), 1e-3, 0.0, "fp32", None, small) for small in (False, True)]
    packed, folded = (allocated(key, 2, 1, dtype=torch.float32) for key in keys)
    assert torch.equal(inverse(folded), torch.eye(6).expand(3, 6, 6))
    for step in range(2):
        half = torch.randn(3, 6, 9, generator=torch.Generator().manual_seed(step))
        for factors in (packed, folded):
            accumulate(factors, half, torch.full((3, 1, 1), 0.9 * step))
            factors.update_roots([0, 1, 2] if step == 0 else [0, 2])
        assert torch.equal(factor(folded), factor(packed))
        assert torch.equal(inverse(folded), inverse(packed).bfloat16().float())
