"""How a factor and its inverse root are kept: together in one array, or each by one triangle in a dtype of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dash_shampoo.kernels import accumulate, bmm
from dash_shampoo.slabs import Slab, Slot
from dash_shampoo.triangles import diagonal, fold, folded_shape, unfold

Lanes = slice | Tensor  # a range, or indices


class Packed:
    """A factor and its inverse root, both symmetric, in one (b + 1, b) array each.

    The factor is the lower triangle from the second row on, the inverse root the upper triangle up to the last row but
    one. Factors are zero at first, inverse roots ``first`` times the identity.
    """

    def __init__(
        self, slots: Sequence[Slot], b: int, dtype: torch.dtype, device: torch.device, first: float, lower: Tensor
    ) -> None:
        self.slabs = (Slab(slots, (b + 1, b), dtype, device, partial(_begin, first=first)),)
        self._lower = lower  # (b, b), True in the lower triangle

    @property
    def _arrays(self) -> Tensor:
        return self.slabs[0].tensor

    def factor(self, lanes: Lanes) -> Tensor:
        """The factors in ``lanes``: (k, b, b)."""
        own = self._arrays[lanes][:, 1:]
        return torch.where(self._lower, own, own.mT)

    def inverse(self) -> Tensor:
        """The inverse roots: (n, b, b)."""
        own = self._arrays[:, :-1]
        return torch.where(self._lower.mT, own, own.mT)

    def diagonal_of_inverse(self) -> Tensor:
        """The diagonals of the inverse roots: (n, b)."""
        return self._arrays[:, :-1].diagonal(dim1=1, dim2=2)

    def accumulate(self, half: Tensor, keep: Tensor) -> None:
        """factor <- keep factor + half half^T, for ``half`` (n, b, m) and ``keep`` (n, 1, 1)."""
        accumulate(self._arrays[:, 1:], half, keep, self._lower)

    def renew(self, lanes: Lanes, root: Tensor, ok: Tensor) -> None:
        """Takes those inverse roots (k, b, b) in ``lanes`` that are ``ok`` (k,)."""
        arrays = self._arrays[lanes]
        own = arrays[:, :-1]
        torch.where(self._lower.mT & ok.view(-1, 1, 1), root.to(own.dtype), own, out=own)
        if isinstance(lanes, Tensor):
            self._arrays.index_copy_(0, lanes, arrays)


def _begin(arrays: Tensor, first: float) -> None:
    arrays.zero_()[:, :-1].diagonal(dim1=1, dim2=2).fill_(first)


class Folded:
    """Factors in float32 and inverse roots in bfloat16, one triangle of each: three quarters of `Packed`.

    Inverse roots bear the rounding; factors, whose small eigenvalues decide the roots, do not (docs/choices.md).
    """

    def __init__(self, slots: Sequence[Slot], b: int, dtype: torch.dtype, device: torch.device, first: float) -> None:
        self._size = b
        roots = [slot._replace(key=f"{slot.key}_root") for slot in slots]
        self.slabs = (
            Slab(slots, folded_shape(b), dtype, device),
            Slab(roots, folded_shape(b), torch.bfloat16, device, partial(_begin_folded, b=b, first=first)),
        )

    @property
    def _factors(self) -> Tensor:
        return self.slabs[0].tensor

    @property
    def _roots(self) -> Tensor:
        return self.slabs[1].tensor

    def factor(self, lanes: Lanes) -> Tensor:
        """The factors in ``lanes``: (k, b, b)."""
        return unfold(self._factors[lanes], self._size)

    def inverse(self) -> Tensor:
        """The inverse roots: (n, b, b)."""
        return unfold(self._roots, self._size).to(self._factors.dtype)

    def diagonal_of_inverse(self) -> Tensor:
        """The diagonals of the inverse roots: (n, b)."""
        return diagonal(self._roots, self._size)

    def accumulate(self, half: Tensor, keep: Tensor) -> None:
        """factor <- keep factor + half half^T, for ``half`` (n, b, m) and ``keep`` (n, 1, 1)."""
        factor = bmm(half, half.mT).addcmul_(unfold(self._factors, self._size), keep)
        self._factors.copy_(fold(factor))

    def renew(self, lanes: Lanes, root: Tensor, ok: Tensor) -> None:
        """Takes those inverse roots (k, b, b) in ``lanes`` that are ``ok`` (k,)."""
        own = fold(root.to(torch.bfloat16))
        self._roots[lanes] = torch.where(ok.view(-1, 1, 1), own, self._roots[lanes])


def _begin_folded(roots: Tensor, b: int, first: float) -> None:
    roots.copy_(fold(torch.eye(b, dtype=roots.dtype, device=roots.device).mul_(first).unsqueeze(0)))
