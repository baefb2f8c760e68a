"""Matrices with known spectra, and their exact roots."""

from __future__ import annotations

import torch
from torch import Tensor


def with_spectrum(values: Tensor, n: int = 3, seed: int = 0) -> Tensor:
    """``n`` symmetric float64 matrices with the eigenvalues ``values`` (b,) and random eigenvectors: (n, b, b)."""
    generator = torch.Generator().manual_seed(seed)
    b = len(values)
    q = torch.linalg.qr(torch.randn(n, b, b, generator=generator, dtype=torch.float64)).Q
    matrix = (q * values.double()) @ q.mT
    return (matrix + matrix.mT) / 2


def with_condition(condition: float, b: int = 24, n: int = 3, seed: int = 0) -> Tensor:
    """Eigenvalues from 1 down to 1 / ``condition``, evenly spaced in their logarithm."""
    return with_spectrum(torch.logspace(0, -float(torch.tensor(condition).log10()), b, dtype=torch.float64), n, seed)


def norm(A: Tensor) -> Tensor:
    """(sum of lambda^4)^(1/4), without over- or underflow: (n,)."""
    values = torch.linalg.eigvalsh(A.double()).clamp(min=0)
    top = values.amax(dim=1)
    scaled = values / torch.where(top > 0, top, 1).unsqueeze(1)
    return top * scaled.pow(4).sum(dim=1).pow(0.25)


def exact_root(A: Tensor, p: int, damping: float, epsilon: float = 0.0) -> Tensor:
    """(A + (damping |A| + epsilon) I)^(-1/p) by float64 eigendecomposition."""
    values, vectors = torch.linalg.eigh(A.double())
    values = values.clamp(min=0) + damping * norm(A).unsqueeze(1) + epsilon
    return (vectors * values.pow(-1 / p).unsqueeze(1)) @ vectors.mT


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest spectral norm of the difference, relative to the expected matrix."""
    difference = torch.linalg.matrix_norm(got.double() - expected, 2)
    return float((difference / torch.linalg.matrix_norm(expected, 2)).max())


def eigenvalue_error(got: Tensor, A: Tensor, p: int, damping: float) -> float:
    """Largest relative error of the root along each eigenvector of ``A``: small eigenvalues of the root count too."""
    values, vectors = torch.linalg.eigh(A.double())
    exact = (values.clamp(min=0) + damping * norm(A).unsqueeze(1)).pow(-1 / p)
    return float(((vectors * (got.double() @ vectors)).sum(dim=1) / exact - 1).abs().max())
