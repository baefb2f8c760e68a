"""Folded matrices take half the memory and come back to the bit."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_shampoo.triangles import fold, folded_shape, unfold


@given(b=st.integers(1, 40), n=st.integers(0, 3), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_symmetric_matrix_comes_back_from_half_its_elements(b: int, n: int, dtype: torch.dtype) -> None:
    half = torch.randn(n, b, b, generator=torch.Generator().manual_seed(b)).to(dtype)
    matrix = half + half.mT
    folded = fold(matrix)
    rows, columns = folded_shape(b)
    assert folded.shape == (n, rows, columns)
    assert rows * columns == b * (b + 1) // 2
    assert torch.equal(unfold(folded, b), matrix)
