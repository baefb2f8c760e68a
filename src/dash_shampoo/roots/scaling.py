"""Scales: how large a stack's largest eigenvalues are, from above.

An iteration that assumes a spectrum in [0, 1] diverges above it, so what scales its input must be an upper bound. A
power iteration gives a lower one: 29 % low with one vector on a hard spectrum, and any amount for an unlucky start.
Here it comes with a certificate that makes it an upper bound; only the paper's own form goes without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dash_shampoo.apart import cached_apart
from dash_shampoo.kernels import Product, matmul

SCALINGS = ("bound", "frobenius", "power-iteration", "multi-power-iteration", "paper-multi-power-iteration")

ITERATIONS = 10
VECTORS = 16


def schatten4(square: Tensor) -> Tensor:
    """||A^2||_F^(1/2) = (sum of lambda^4)^(1/4), from A^2 (n, b, b): (n, 1, 1).

    At least the largest eigenvalue, at most b^(1/4) times it, and 1.0 to 2.3 times it on decaying spectra.
    """
    return torch.linalg.vector_norm(square, dim=(1, 2), keepdim=True).sqrt()


def scale(name: str, matrix: Tensor, square: Tensor, product: Product) -> Tensor:
    """A scale (n, 1, 1) for ``matrix`` (n, b, b), symmetric positive semidefinite with entries in [-1, 1].

    Args:
        name: one of `SCALINGS`. "bound" is `schatten4`; "frobenius" the Frobenius norm; the power iterations return the
            least of "bound" and of what `certified_bound` makes of their vectors; "paper-multi-power-iteration" is
            twice the estimate, as in arXiv 2602.02016, and may be too small.
        matrix: the stack.
        square: its square.
        product: the product of stacks.
    """
    if name == "bound":
        return schatten4(square)
    if name == "frobenius":
        return torch.linalg.vector_norm(matrix, dim=(1, 2), keepdim=True)
    vectors = power_iteration(matrix, 1 if name == "power-iteration" else VECTORS, product)
    if name.startswith("paper"):
        return 2 * rayleigh_quotients(matrix, vectors, product).amax(dim=2, keepdim=True)
    return torch.minimum(schatten4(square), certified_bound(square, vectors, product))


def power_iteration(matrix: Tensor, count: int, product: Product) -> Tensor:
    """``count`` unit vectors (n, b, count) after ten steps of power iteration on each matrix, from fixed starts."""
    n, b, _ = matrix.shape
    vectors = starts(b, min(count, b), matrix.dtype, matrix.device).expand(n, -1, -1)
    for _ in range(ITERATIONS):
        vectors = _normalise(product(matrix, vectors))
    return vectors


def rayleigh_quotients(matrix: Tensor, vectors: Tensor, product: Product) -> Tensor:
    """v^T A v for each of the unit vectors (n, b, k): (n, 1, k), none above the largest eigenvalue."""
    return (vectors * product(matrix, vectors)).sum(dim=1, keepdim=True)


def largest_eigenvalue(matrix: Tensor) -> Tensor:
    """An estimate of each largest eigenvalue (n,) from below, by power iteration on (n, b, b) from 16 starts."""
    vectors = power_iteration(matrix, VECTORS, matmul)
    return rayleigh_quotients(matrix, vectors, matmul).amax(dim=(1, 2))


def certified_bound(square: Tensor, vectors: Tensor, product: Product) -> Tensor:
    """An upper bound (n, 1, 1) of A's largest eigenvalue, from B = A^2 (n, b, b) and any vectors (n, b, k). Ours.

    With V an orthonormal basis of the vectors and W of what is left, lambda_max(B) <= lambda_max(V^T B V) +
    lambda_max(W^T B W), as for any positive semidefinite B, and the second term is at most ||B W||_F, whose square is
    ||B||_F^2 - ||B V||_F^2. Vectors near the top of the spectrum make the first term tight and the second small; poor
    vectors make the bound loose, not wrong.
    """
    basis = torch.linalg.qr(vectors).Q
    image = product(square, basis)
    inside = schatten4(_symmetric_square(product(basis.mT, image)))
    rest = square.square().sum(dim=(1, 2), keepdim=True) - image.square().sum(dim=(1, 2), keepdim=True)
    slack = 1 + 64 * torch.finfo(square.dtype).eps
    # The difference of two nearly equal sums is known only to their rounding.
    rest = rest.clamp(min=0) + torch.finfo(square.dtype).eps * square.square().sum(dim=(1, 2), keepdim=True)
    return (inside + rest.sqrt()).sqrt() * slack


def _symmetric_square(matrix: Tensor) -> Tensor:
    return torch.bmm(matrix, matrix.mT)


def _normalise(vectors: Tensor) -> Tensor:
    """Columns of length one; a zero column stays zero."""
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return vectors / norms.masked_fill(norms == 0, 1)


@cached_apart()
def starts(b: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``count`` random unit vectors (b, count), the same every time, from a generator of their own."""
    generator = torch.Generator().manual_seed(2602_02016)
    vectors = torch.randn(b, count, generator=generator, dtype=torch.float64)
    return (vectors / torch.linalg.vector_norm(vectors, dim=0)).to(device=device, dtype=dtype)
