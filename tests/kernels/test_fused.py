"""Triton's kernels are right for every size and layout, touch nothing else, and are left aside where they are wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dash_shampoo import Dash
from dash_shampoo.kernels import fused, matmul, products, unit_roundoff
from dash_shampoo.roots import inverse_root
from tests.kernels.interpreted import load, on_the_cpu
from tests.roots.test_low_rank import error_in_range, low_rank

pytest.importorskip("triton")

CPU = torch.device("cpu")
KINDS = ("mirrored", "full", "accumulate")


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return load()


@pytest.fixture
def interpreter(module: ModuleType) -> Iterator[None]:
    with on_the_cpu(module):
        yield


@st.composite
def layouts(draw: st.DrawFn, n: int, rows: int, columns: int) -> Tensor:
    """A poisoned stack (n, rows, columns): of rows or columns, apart from each other, within something larger."""
    across = draw(st.booleans())
    shape = (n, columns, rows) if across else (n, rows, columns)
    steps = [draw(st.sampled_from([1, 1, 2])) for _ in range(3)]
    start = [draw(st.integers(0, 2)) for _ in range(3)]
    wide = torch.full([(size + 1) * step + 3 for size, step in zip(shape, steps, strict=True)], torch.nan)
    view = wide[tuple(slice(s, s + size * step, step) for s, size, step in zip(start, shape, steps, strict=True))]
    return view.mT if across else view


def symmetric(n: int, size: int, seed: int) -> Tensor:
    matrix = torch.randn(n, size, size, generator=torch.Generator().manual_seed(seed))
    return matrix + matrix.mT


def whole(view: Tensor) -> Tensor:
    """Everything that the storage of a view holds."""
    return torch.empty(0).set_(view.untyped_storage())


@given(
    data=st.data(),
    n=st.integers(1, 3),
    size=st.integers(1, 50),
    precision=st.sampled_from(fused.PRECISIONS),
    mirrored=st.booleans(),
    alpha=st.sampled_from([1.0, -0.5]),
    shift=st.sampled_from([0.0, 3.0]),
)
def test_products_of_any_size_and_layout(
    module: ModuleType,
    data: st.DataObject,
    n: int,
    size: int,
    precision: str,
    mirrored: bool,
    alpha: float,
    shift: float,
) -> None:
    a, b, out = (data.draw(layouts(n, size, size)) for _ in range(3))
    a.copy_(symmetric(n, size, 0) if mirrored else torch.randn(n, size, size))
    b.copy_(a @ a / size if mirrored else torch.randn(n, size, size))
    add = data.draw(st.sampled_from([None, out, data.draw(layouts(n, size, size))]))
    before = torch.zeros(()) if add is None else add.copy_(symmetric(n, size, 1)).double()
    written = torch.zeros_like(whole(out)).as_strided(out.size(), out.stride(), out.storage_offset())
    written.fill_(1)
    untouched = (whole(written) == 0) & whole(out).isnan()
    with on_the_cpu(module, tile=16):
        options: dict[str, Any] = {"add": add, "alpha": alpha, "beta": -2.0, "shift": shift, "out": out}
        got = fused.product(a, b, precision=precision, mirrored=mirrored, **options)
    assert got is out
    eye = torch.eye(size).double()
    expected = alpha * a.double() @ b.double() - 2 * before + shift * eye
    scale = abs(alpha) * a.double().abs() @ b.double().abs() + 2 * before.abs() + shift * eye
    assert ((got - expected).abs() <= fused.allowed(precision) * scale + 1e-6 * scale.max()).all()
    assert not mirrored or torch.equal(got, got.mT)
    assert whole(out)[untouched].isnan().all()


@given(
    data=st.data(),
    n=st.integers(1, 3),
    size=st.integers(1, 40),
    depth=st.integers(1, 40),
    precision=st.sampled_from(fused.PRECISIONS),
)
def test_factors_take_gradients_in_place(
    module: ModuleType, data: st.DataObject, n: int, size: int, depth: int, precision: str
) -> None:
    half = data.draw(layouts(n, size, depth)).copy_(torch.randn(n, size, depth))
    keep = torch.rand(n, 1, 1)
    packed = torch.full((n + 2, size + 1, size), torch.nan)
    own, lower = packed[1:-1, 1:], torch.ones(size, size, dtype=torch.bool).tril()
    own.masked_fill_(lower, 0.5)
    exact = half.double() @ half.double().mT
    scale = half.double().abs() @ half.double().abs().mT + 0.5
    with on_the_cpu(module, tile=16):
        fused.accumulate(own, half, keep, precision=precision)
    off = (own - exact - 0.5 * keep).abs() - fused.allowed(precision) * scale
    assert (off[:, lower] <= 0).all()
    assert int(packed.isfinite().sum()) == n * int(lower.sum())  # nothing else is written


@pytest.mark.parametrize("precision", fused.PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_at_the_tiles_of_a_gpu(interpreter: None, kind: str, precision: str) -> None:
    for major in (8, 9):
        with mock.patch.object(fused, "_major", lambda device, major=major: major):
            assert fused.check(kind, precision, CPU) <= fused.allowed(precision) < 16 * unit_roundoff(precision)


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("strides", [(2**31 + 64, 5, 1), (7, 2**30, 1), (7, 1, 2**30)])
def test_offsets_beyond_32_bits(
    module: ModuleType, tmp_path: Path, mirrored: bool, strides: tuple[int, int, int]
) -> None:
    """By strides in a file with holes: it takes no memory."""
    size = 5
    long = sum(stride * (count - 1) for stride, count in zip(strides, (2, size, size), strict=True)) + 1
    a, b, add, out = (
        torch.from_file(str(tmp_path / f"{i}"), shared=True, size=long).as_strided((2, size, size), strides)
        for i in range(4)
    )
    a.copy_(symmetric(2, size, 0))
    b.copy_(a @ a)
    add.copy_(symmetric(2, size, 1))
    with on_the_cpu(module, tile=16):
        fused.product(a, b, precision="fp16x3", mirrored=mirrored, add=add, out=out)
        torch.testing.assert_close(out, a @ b + add, rtol=1e-4, atol=1e-3)
        if strides[2] == 1:
            out.copy_(add)
            fused.accumulate(out, a, torch.ones(2, 1, 1), precision="fp16x3")
            torch.testing.assert_close(out.tril(), (a @ a.mT + add).tril(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("precision", fused.PRECISIONS)
def test_what_is_not_finite_stays_in_its_matrix_and_stays_not_finite(module: ModuleType, precision: str) -> None:
    a = symmetric(3, 20, 0)
    a[1, 3, 3] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # CUDA's own NaN: all ones
    with on_the_cpu(module, tile=16):
        got = fused.product(a, a, precision=precision, mirrored=True)
        assert got[[0, 2]].isfinite().all()
        assert got[1, 3].isnan().all()
        own = torch.zeros(3, 20, 20)
        fused.accumulate(own, a, torch.ones(3, 1, 1), precision=precision)
        assert own[[0, 2]].isfinite().all()
        assert own[1, 3, :4].isnan().all()


# --- in use -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "damping"), [(2, 1e-4), (4, 1e-4), (4, 1e-3)])
def test_roots_of_low_rank_lose_nothing_in_the_fused_products(
    monkeypatch: pytest.MonkeyPatch, interpreter: None, p: int, damping: float
) -> None:
    calls = []
    product = fused.product

    def counted(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        calls.append(options["precision"])
        return product(a, b, **options)

    monkeypatch.setattr(fused, "product", counted)
    monkeypatch.setattr(fused, "_works", lambda *_: True)
    A = low_rank(80, 3)
    errors = {}
    for precision in ("fp16x3", "mixed"):
        root = inverse_root(A, p, damping=damping, precision=precision)
        assert root.ok.all()
        errors[precision] = error_in_range(root.value, A, 3, p, damping)
    plain = error_in_range(inverse_root(A, p, damping=damping, precision="fp32").value, A, 3, p, damping)
    assert errors["fp16x3"] < 1.5 * plain + 5e-5
    assert errors["mixed"] < 1e-2
    assert {"fp16", "fp16x3"} == set(calls)
    assert len(calls) > 20


def test_a_step_takes_gradients_by_the_kernel(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> None:
    def train() -> dict[str, Tensor]:
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(12, 20))
        optimizer = Dash([parameter], lr=0.1, block_size=16, update_every=100)
        for _ in range(2):
            parameter.grad = torch.randn(12, 20)
            optimizer.step()
        return {name: value.clone() for name, value in optimizer.state[parameter].items() if name.endswith("left")}

    by_kernel = train()
    monkeypatch.setattr(fused, "serves", lambda *_: False)
    for name, value in train().items():
        # What TF32 rounds off in the factors, and in the roots that come from them.
        torch.testing.assert_close(by_kernel[name], value, rtol=1e-2, atol=1e-2)
        assert not torch.equal(by_kernel[name], value)


def test_products_that_no_kernel_serves_are_torch_s(interpreter: None) -> None:
    a = symmetric(2, 20, 0)
    with mock.patch.object(fused, "product", side_effect=AssertionError):
        for precision in ("fp32", "bf16", "bf16x3"):
            matmul(a, a, precision=precision)
        matmul(a.double(), a.double(), precision="fp16")
        matmul(a, a[:, :, :3], precision="fp16")
        matmul(a[:0], a[:0], precision="fp16")


def test_a_wrong_kernel_is_left_aside_with_one_warning(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    a = symmetric(2, 20, 0)
    right = fused.product

    def wrong(*arguments: Any, **options: Any) -> Tensor:
        return right(*arguments, **options).mul_(1.01)

    with on_the_cpu(module):
        monkeypatch.setattr(fused, "product", wrong)
        with pytest.warns(RuntimeWarning, match=r"leaves its mirrored kernel in fp16x3 aside on cpu.*off by"):
            got = matmul(a, a, precision="fp16x3", symmetric=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = matmul(a, a, precision="fp16x3", symmetric=True)
    assert torch.equal(got, again)
    torch.testing.assert_close(got, a @ a, rtol=1e-4, atol=1e-4)


def test_a_kernel_that_does_not_compile_is_left_aside(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    def broken() -> Any:
        raise RuntimeError("PTX of another age")

    with on_the_cpu(module):
        monkeypatch.setattr(fused, "_jit", broken)
        with pytest.warns(RuntimeWarning, match="PTX of another age"):
            assert not fused.serves("full", "fp16", torch.ones(1, 4, 4))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["above", "below", "nan"])
def test_the_check_sees_a_kernel_that_leaves_something_out(
    monkeypatch: pytest.MonkeyPatch, interpreter: None, kind: str, where: str
) -> None:
    right, added = fused.product, fused.accumulate

    def spoil(stack: Tensor) -> None:
        row, column = {"above": (3, 140), "below": (140, 3), "nan": (149, 149)}[where]
        stack[1, row, column] = torch.nan if where == "nan" else -7.0

    def product(*arguments: Any, **options: Any) -> Tensor:
        out = right(*arguments, **options)
        spoil(out)
        return out

    def accumulate(own: Tensor, *arguments: Any, **options: Any) -> None:
        added(own, *arguments, **options)
        spoil(own)

    monkeypatch.setattr(fused, "product", product)
    monkeypatch.setattr(fused, "accumulate", accumulate)
    assert not fused.check(kind, "fp16x3", CPU) <= fused.allowed("fp16x3")


def test_without_triton_nothing_is_said(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    def missing() -> Any:
        raise ImportError("no module named triton")

    with on_the_cpu(module), warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(fused, "_jit", missing)
        assert not fused.serves("mirrored", "fp16x3", torch.ones(1, 4, 4))
        assert products.matmul(torch.ones(1, 4, 4), torch.ones(1, 4, 4), precision="fp16x3")[0, 0, 0] == 4
