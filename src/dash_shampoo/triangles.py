"""Symmetric matrices by one triangle each, in as many elements as the triangle has.

A matrix of size b is cut into a corner A of size k = ceil(b / 2), one C of size h = floor(b / 2), and what is below A.
The lower triangle of A and the upper one of C make a rectangle, under which the third part fits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def folded_shape(b: int) -> tuple[int, int]:
    """Shape of a folded matrix of size ``b``: b (b + 1) / 2 elements."""
    return b + 1 - b % 2, (b + 1) // 2


def fold(matrix: Tensor) -> Tensor:
    """The lower triangles of symmetric matrices (n, b, b): (n, *folded_shape(b))."""
    n, b, _ = matrix.shape
    folded = matrix.new_empty(n, *folded_shape(b))
    a, c, below = _parts(folded, b)
    k = (b + 1) // 2
    below.copy_(matrix[:, k:, :k])
    a.copy_(matrix[:, :k, :k])
    upper = torch.ones(b // 2, b // 2, dtype=torch.bool, device=matrix.device).triu()
    torch.where(upper, matrix[:, k:, k:], c, out=c)
    return folded


def unfold(folded: Tensor, b: int) -> Tensor:
    """The symmetric matrices (n, b, b) that `fold` made ``folded`` of."""
    a, c, below = _parts(folded, b)
    k, h = (b + 1) // 2, b // 2
    lower = torch.ones(k, k, dtype=torch.bool, device=folded.device).tril()
    matrix = folded.new_empty(len(folded), b, b)
    matrix[:, :k, :k] = torch.where(lower, a, a.mT)
    matrix[:, k:, k:] = torch.where(lower[:h, :h].mT, c, c.mT)
    matrix[:, k:, :k] = below
    matrix[:, :k, k:] = below.mT
    return matrix


def diagonal(folded: Tensor, b: int) -> Tensor:
    """The diagonals (n, b) of the matrices that `fold` made ``folded`` of."""
    a, c, _ = _parts(folded, b)
    return torch.cat([a.diagonal(dim1=1, dim2=2), c.diagonal(dim1=1, dim2=2)], dim=1)


def _parts(folded: Tensor, b: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the corners A (n, k, k) and C (n, h, h), which overlap, and of what is below A (n, h, k)."""
    k, h = (b + 1) // 2, b // 2
    first = 1 - b % 2  # row of A, above which C begins
    return folded[:, first : first + k], folded[:, :h, k - h :], folded[:, first + k :]
