"""Products have the precision they are asked for."""

from __future__ import annotations

import pytest
import torch

from dash_shampoo.kernels import PRECISIONS, bmm, matmul, strict_products, unit_roundoff
from dash_shampoo.kernels.flags import quick_products


def factors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = (torch.randn(3, 40, 40, dtype=torch.float64).to(dtype) for _ in range(2))
    exact = a.double() @ b.double()
    return a, b, exact


@pytest.mark.parametrize("precision", PRECISIONS)
def test_error_is_that_of_the_precision(precision: str) -> None:
    a, b, exact = factors()
    scale = a.double().abs() @ b.double().abs()
    error = ((matmul(a, b, precision=precision).double() - exact).abs() / scale).max()
    assert error < 2.5 * unit_roundoff(precision) + 8 * unit_roundoff("fp32")  # factors, and sums in float32
    if precision in ("tf32", "fp16", "bf16"):
        assert error > 0.05 * unit_roundoff(precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_float64_stays_float64(precision: str) -> None:
    a, b, exact = factors(torch.float64)
    torch.testing.assert_close(matmul(a, b, precision=precision), exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("with_out", [False, True])
def test_accumulation_and_given_memory(precision: str, with_out: bool) -> None:
    a, b, exact = factors()
    add = torch.randn(3, 40, 40)
    out = torch.empty(3, 40, 40) if with_out else None
    got = matmul(a, b, precision=precision, add=add, alpha=0.5, beta=-2.0, shift=3.0, out=out)
    assert not with_out or got is out
    tolerance = 100 * unit_roundoff(precision)
    expected = 0.5 * exact - 2 * add.double() + 3 * torch.eye(40)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    scaled = matmul(a, b, precision=precision, alpha=-2.0, out=out)
    torch.testing.assert_close(scaled.double(), -2 * exact, rtol=tolerance, atol=tolerance)
    plain = matmul(a, b, precision=precision, out=out)
    torch.testing.assert_close(plain.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("flag", ["highest", "high", "medium"])
def test_strict_products_ignore_the_global_flag_and_leave_it(flag: str) -> None:
    a, b, exact = factors()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(flag)
        with strict_products(torch.device("cpu")):
            got = matmul(a, b)
        assert torch.get_float32_matmul_precision() == flag
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


def test_flag_is_restored_after_an_error() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(RuntimeError, match="inside"), strict_products(torch.device("cpu")):
            raise RuntimeError("inside")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_unknown_precision_is_refused() -> None:
    a, b, _ = factors()
    with pytest.raises(ValueError, match="fp32, fp16x3"):
        matmul(a, b, precision="fp4")


@pytest.mark.parametrize("size", [255, 256, 301, 512])
def test_symmetric_products_equal_full_ones_and_are_symmetric(size: int) -> None:
    a = torch.randn(2, size, size)
    a = a + a.mT
    b = (a @ a) / size
    add = torch.randn(2, size, size)
    add = add + add.mT
    for options in ({}, {"add": add, "alpha": 0.5, "beta": -2.0}):
        full, half = matmul(a, b, **options), matmul(a, b, symmetric=True, **options)
        torch.testing.assert_close(half, full, rtol=1e-4, atol=1e-3)
        out = torch.empty_like(a)
        assert matmul(a, b, symmetric=True, out=out, **options) is out
        assert torch.equal(out, half)
        if size >= 512:
            off = half - half.mT
            assert off[:, :128, -100:].abs().max() == 0
    thin = torch.randn(2, size, 3)
    torch.testing.assert_close(matmul(a, thin, symmetric=True), matmul(a, thin))


def test_a_result_in_columns_is_filled_without_a_product_into_columns() -> None:
    a, b = torch.randn(2, 64, 64), torch.randn(2, 64, 64)
    columns = torch.empty(2, 64, 64).mT
    assert matmul(a, b, precision="fp32", out=columns) is columns
    torch.testing.assert_close(columns, torch.bmm(a, b))


@pytest.mark.parametrize("size", [64, 512])
def test_new_products_lie_in_rows_whatever_the_layout_of_their_factors(size: int) -> None:
    columns = torch.randn(1, size, size).mT
    assert matmul(columns, columns, precision="fp32", symmetric=True).is_contiguous()


def test_the_quick_product_is_a_float32_product_and_leaves_the_flags() -> None:
    a, b, exact = factors()
    flags = torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    scale = a.double().abs() @ b.double().abs()
    assert ((bmm(a, b).double() - exact).abs() / scale).max() < 8 * unit_roundoff("fp32")
    assert (torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision) == flags


@pytest.mark.parametrize("flag", ["highest", "high", "medium"])
def test_products_of_the_step_are_tf32_on_tensor_cores_whatever_torch_s_flag_says(flag: str) -> None:
    """A CUDA device that is not there counts as one with tensor cores."""
    torch.set_float32_matmul_precision(flag)
    try:
        before = torch.backends.cuda.matmul.fp32_precision
        with quick_products(torch.device("cuda")):
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.cuda.matmul.fp32_precision == before
        assert torch.get_float32_matmul_precision() == flag
    finally:
        torch.set_float32_matmul_precision("highest")
