"""A parameter and its blocks: every tensor is a matrix, every matrix at most four grids of equal blocks.

Shampoo preconditions matrices block by block. A tensor of any shape is viewed as (first dimension, rest) and cut into
blocks of at most ``block_size``; the remainders on the right and at the bottom give three more block shapes. A `Tile`
is one such grid of equal blocks, so the blocks of a whole grid are read or written by a single strided copy.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from operator import mul
from typing import NamedTuple

from torch import Size, Tensor


class Tile(NamedTuple):
    """A grid of equal, adjacent blocks inside a matrix.

    Attributes:
        origin: row and column of the grid's upper left corner.
        grid: number of blocks down and across.
        block: rows and columns of each block.
    """

    origin: tuple[int, int]
    grid: tuple[int, int]
    block: tuple[int, int]

    @property
    def blocks(self) -> int:
        """Number of blocks in the grid."""
        return self.grid[0] * self.grid[1]

    def of(self, matrix: Tensor) -> Tensor:
        """The grid as a view of ``matrix`` (rows, columns), of shape (down, across, block rows, block columns)."""
        (i, j), (r, c) = self.origin, self.block
        down, right = matrix.stride()
        offset = matrix.storage_offset() + i * down + j * right
        return matrix.as_strided((*self.grid, r, c), (r * down, c * right, down, right), offset)

    def of_stack(self, stack: Tensor) -> Tensor:
        """``stack`` (blocks, block rows, block columns) viewed in the shape that `of` gives the matrix."""
        return stack.view(*self.grid, *self.block)


def matrix_shape(shape: Size) -> tuple[int, int]:
    """Rows and columns of the matrix that a tensor of ``shape`` is treated as: (first dimension, rest)."""
    if len(shape) == 0:
        return 1, 1
    return shape[0], prod(shape[1:])


def as_matrix(tensor: Tensor) -> Tensor:
    """``tensor`` in its matrix shape: a view wherever the memory layout allows one, a copy otherwise."""
    return tensor.reshape(matrix_shape(tensor.shape))


def is_matrix_view(tensor: Tensor) -> bool:
    """Whether `as_matrix` gives a view of ``tensor``, so that writing to it writes to the tensor."""
    return tensor.ndim <= 2 or tensor.is_contiguous()


def tiles(
    rows: int,
    columns: int,
    block: tuple[int, int],
    *,
    most: int | None = None,
    size: Callable[[int, int], int] = mul,
) -> list[Tile]:
    """Cuts a matrix into grids of equal blocks: the body, the right edge, the bottom edge and the corner.

    Args:
        rows: rows of the matrix.
        columns: columns of the matrix.
        block: largest rows and columns of a block.
        most: largest size of a grid; a larger one is cut between its rows of blocks, and one row of blocks that is
            larger still between its blocks. ``None``: no limit.
        size: size of a block, from its rows and columns; their product unless given.

    Returns:
        Tiles that cover each element exactly once; none for an empty matrix.
    """
    found = []
    for i, down, r in _spans(rows, block[0]):
        for j, across, c in _spans(columns, block[1]):
            blocks = down * across if most is None else max(1, most // size(r, c))
            tall, wide = max(1, blocks // across), min(across, blocks)
            for k in range(0, down, tall):
                for m in range(0, across, wide):
                    grid = (min(tall, down - k), min(wide, across - m))
                    found.append(Tile((i + k * r, j + m * c), grid, (r, c)))
    return found


def _spans(length: int, block: int) -> list[tuple[int, int, int]]:
    """(start, number of blocks, block length) of the full blocks of a dimension and of its remainder."""
    full, rest = divmod(length, block)
    spans = [(0, full, block)] if full else []
    if rest:
        spans.append((full * block, 1, rest))
    return spans
