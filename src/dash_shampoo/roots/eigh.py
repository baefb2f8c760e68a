"""Eigendecomposition: the careful reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dash_shampoo.kernels import Product
from dash_shampoo.roots.certificate import finite
from dash_shampoo.roots.solver import Scaled, Solver, Spectrum, identity_like


@dataclass(frozen=True)
class Eigh(Solver):
    """V diag(lambda^(-1/p)) V^T, from `torch.linalg.eigh` (the solver called EVD in arXiv 2602.02016).

    Eigenvalues below what damping has added to all of them are rounding, and are taken for that. A matrix whose
    decomposition fails is decomposed again alone, in float64; if that fails too its root is NaN, and no other is
    touched. On an accelerator the decomposition itself waits for the device.
    """

    name: ClassVar[str] = "eigh"
    iterates: ClassVar[bool] = False

    def solve(self, scaled: Scaled, p: int, spectrum: Spectrum, product: Product) -> Tensor:
        values, vectors = _decompose(scaled.matrix)  # (n, b), (n, b, b)
        values = torch.maximum(values, scaled.floor.squeeze(2))
        return product(vectors * values.pow(-1 / p).unsqueeze(1), vectors.mT, symmetric=True)


def _decompose(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (n, b) and eigenvectors (n, b, b); NaN for matrices that have none."""
    usable = finite(matrix).unsqueeze(1)
    safe = torch.where(usable.unsqueeze(2), matrix, identity_like(matrix))
    try:
        values, vectors = torch.linalg.eigh(safe)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # of which LinAlgError is one; some backends raise no other
        pairs = [_decompose_alone(one) for one in safe]
        values, vectors = torch.stack([value for value, _ in pairs]), torch.stack([vector for _, vector in pairs])
    return values.masked_fill(~usable, torch.nan), vectors


def _decompose_alone(matrix: Tensor) -> tuple[Tensor, Tensor]:
    for dtype in (matrix.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(matrix.to(dtype))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            continue
        return values.to(matrix.dtype), vectors.to(matrix.dtype)
    return matrix.new_full(matrix.shape[:1], torch.nan), torch.full_like(matrix, torch.nan)
