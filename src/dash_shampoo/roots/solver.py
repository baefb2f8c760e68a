"""What every solver is: a frozen description of how to compute X = A^(-1/p) for matrices with spectrum in (0, 1]."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dash_shampoo.kernels import Product

# Lowest spectrum at which all of an iteration's products may be mirrored. Measured with matrices of low rank, of 64 to
# 1024 rows: at 1e-3 that makes an error of 3e-5 one of 9e-5, at 1e-4 and p = 2 one of 3e-4 ten times as large.
LEAST_MIRRORED = 9e-4


@dataclass(frozen=True)
class Spectrum:
    """What is known, before any data is seen, of a stack of scaled matrices.

    Attributes:
        low: lower end of the spectrum; 0 if nothing is known.
        high: upper end of the spectrum.
    """

    low: float
    high: float = 1.0


class Scaled(NamedTuple):
    """A stack to solve.

    Attributes:
        matrix: (n, b, b), symmetric, with its spectrum in (0, 1].
        square: (n, b, b), its square.
        floor: (n, 1, 1), what damping has added to every eigenvalue: none is smaller but by rounding.
    """

    matrix: Tensor
    square: Tensor
    floor: Tensor


class Solver:
    """Base of the solvers, which are frozen dataclasses.

    Attributes:
        name: what options call the solver.
        scaling: how a stack is scaled before it is solved unless the caller says otherwise, one of `SCALINGS`.
        certified: whether roots with a larger residual than the solver promises are refused. The paper's own settings
            are not: they are here to be compared with, and give what they give.
        iterates: whether products build on each other, so that the damping must stay clear of their rounding.
    """

    name: ClassVar[str] = ""
    scaling: str = "bound"
    certified: ClassVar[bool] = True
    iterates: ClassVar[bool] = True

    def check(self, p: int, spectrum: Spectrum) -> None:
        """Raises ValueError if the solver cannot do this root, with what can."""

    def error(self, p: int, spectrum: Spectrum) -> float:
        """Largest relative error of the root's eigenvalues in exact arithmetic."""
        return 0.0

    def temporaries(self, p: int) -> int:
        """How many stacks as large as the one to solve are in use at once, but for those inside a product."""
        return 9

    def solve(self, scaled: Scaled, p: int, spectrum: Spectrum, product: Product) -> Tensor:
        """The inverse p-th roots (n, b, b) of the scaled matrices."""
        raise NotImplementedError


def check_steps(steps: int | None, name: str) -> None:
    """Raises ValueError unless ``steps`` is ``None`` or a positive number of iteration steps."""
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ValueError(f"{name} takes a positive number of steps, or None, not {steps!r}")


def identity_like(matrix: Tensor) -> Tensor:
    """The identity, for a stack: (1, b, b)."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).unsqueeze(0)


def add_to_diagonal(matrix: Tensor, value: float | Tensor) -> Tensor:
    """Adds a number, or one per matrix (n, 1), to the diagonals of a stack, in place."""
    matrix.diagonal(dim1=1, dim2=2).add_(value)
    return matrix


def power(matrix: Tensor, exponent: int, product: Product) -> Tensor:
    """``matrix`` to a positive integer power, in floor(log2) products and one for each further bit."""
    result = None
    while True:
        if exponent & 1:
            result = matrix if result is None else product(result, matrix)
        exponent >>= 1
        if not exponent:
            assert result is not None
            return result
        matrix = product(matrix, matrix)


def congruence(
    matrix: Tensor,
    factor: Tensor,
    p: int,
    product: Product,
    *,
    one_sided: Product | None = None,
    out: Tensor | None = None,
    spare: Tensor | None = None,
) -> Tensor:
    """factor^p matrix for commuting symmetric stacks, as factor^(p/2) matrix factor^(p/2), which stays symmetric.

    For odd p one more factor comes in on one side, and the result is made symmetric. Each form needs as many products
    as the one-sided one. ``one_sided`` makes the first product with ``matrix``, which is symmetric only as far as its
    factors commute. ``out`` and ``spare`` are memory that may be used; ``out`` may be ``matrix``.
    """
    half = power(factor, p // 2, product)
    result = product((one_sided or product)(half, matrix, out=spare), half, out=out)
    if p % 2:
        result = product(result, factor, out=spare)
        result = torch.add(result, result.mT, out=out).mul_(0.5)
    return result


def mirrored(product: Product, spectrum: Spectrum) -> Product:
    """``product`` for symmetric results, of which it may compute one triangle and mirror it.

    Mirroring costs accuracy: a product of matrices that commute but for rounding is symmetric but for rounding, and one
    triangle of it commutes less. What that moves between large and small eigenvalues grows with their ratio. Where it
    would be seen the full product is kept.
    """
    return partial(product, symmetric=True) if spectrum.low >= LEAST_MIRRORED else product
