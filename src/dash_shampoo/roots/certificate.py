"""A certificate for each root: how far X^p A is from the identity."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dash_shampoo.roots.scaling import starts

PROBES = 8


def finite(matrix: Tensor) -> Tensor:
    """Whether all entries of each matrix are finite: (n, b, b) to (n,). Their squares need not be."""
    return torch.isfinite(torch.linalg.vector_norm(matrix, torch.inf, dim=(1, 2)))


def residual(root: Tensor, matrix: Tensor, p: int) -> Tensor:
    """An estimate (n,) of ||X^(p/2) A X^(p/2) - I||_F for X = ``root`` and A = ``matrix``, both (n, b, b).

    The matrix is applied to a few fixed random vectors, p + 1 products with a thin factor in all: for a vector with
    independent entries of variance 1, the expected squared length of R v is ||R||_F^2. It sees everything that went
    into X, rounding included. Products are in float32 or float64, whatever X was made with: reading X and A takes the
    time. Half of the roots come first: X^2 A X^2 v has a rounding error of u / sqrt(l) at the
    condition number 1 / l, where X^4 A v would have u / l.
    """
    n, b, _ = matrix.shape
    count = min(PROBES, b)
    # As rows: with few columns a CPU's product takes three times as long.
    probes = (starts(b, count, matrix.dtype, matrix.device).mT * math.sqrt(b)).expand(n, -1, -1)  # (n, probes, b)
    image = probes
    for _ in range(p // 2):
        image = torch.bmm(image, root.mT)
    image = torch.bmm(image, matrix.mT)
    for _ in range(p - p // 2):
        image = torch.bmm(image, root.mT)
    return torch.linalg.vector_norm(image - probes, dim=(1, 2)) / math.sqrt(count)


def tolerance(error: float, low: float, roundoff: float, p: int, b: int) -> float:
    """The largest residual that a solver with this relative ``error`` may leave; larger ones mean that it failed.

    Args:
        error: of the root's eigenvalues, in exact arithmetic.
        low: lower end of the spectrum.
        roundoff: of the products.
        p: the root.
        b: size of the matrices.
    """
    # The certificate's own rounding is u / sqrt(l) (u / l for p = 1); that of the smallest eigenvalues is u / l.
    low = max(low, roundoff)
    rounding = roundoff * (16 / low ** max(0.5, 1 / p) + 1 / low)
    return 4 * math.sqrt(b) * (p * max(error, 1e-3) + rounding)
