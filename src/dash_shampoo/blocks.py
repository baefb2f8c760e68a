"""A parameter and its blocks: every tensor is a stack of matrices, every matrix a few grids of equal blocks.

Shampoo preconditions matrices block by block. A tensor of any shape is read as a stack of matrices, most often of one,
and each matrix is cut into blocks; the remainders on the right and at the bottom give three more block shapes. A `Tile`
is one such grid of equal blocks, so the blocks of a whole grid are read or written by a single strided copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from torch import Size, Tensor

VIEWS = ("auto", "matrix", "stack")


class Tile(NamedTuple):
    """A grid of equal, adjacent blocks inside a stack of matrices.

    Attributes:
        origin: matrix, row and column of the grid's first element.
        grid: number of matrices, and of blocks down and across each of them.
        block: rows and columns of each block.
    """

    origin: tuple[int, int, int]
    grid: tuple[int, int, int]
    block: tuple[int, int]

    @property
    def blocks(self) -> int:
        """Number of blocks in the grid."""
        return prod(self.grid)

    def of(self, stack: Tensor) -> Tensor:
        """The grid as a view of ``stack`` (k, rows, columns): (matrices, down, across, block rows, block columns)."""
        (k, i, j), (r, c) = self.origin, self.block
        deep, down, right = stack.stride()
        offset = stack.storage_offset() + k * deep + i * down + j * right
        return stack.as_strided((*self.grid, r, c), (deep, r * down, c * right, down, right), offset)

    def of_blocks(self, blocks: Tensor) -> Tensor:
        """``blocks`` (n, block rows, block columns) viewed in the shape that `of` gives the stack."""
        return blocks.view(*self.grid, *self.block)


def joined(one: Tile, other: Tile) -> Tile | None:
    """The tile that two tiles make whose blocks follow each other, in the same order; ``None`` if they make none."""
    if one.block != other.block:
        return None
    (k, i, j), (deep, down, across), (r, c) = one
    if other.origin == (k, i, j + across * c) and deep == down == 1 and other.grid[:2] == (1, 1):
        return one._replace(grid=(1, 1, across + other.grid[2]))
    if other.origin == (k, i + down * r, j) and deep == 1 and other.grid[::2] == (1, across):
        return one._replace(grid=(1, down + other.grid[1], across))
    if other.origin == (k + deep, i, j) and other.grid[1:] == (down, across):
        return one._replace(grid=(deep + other.grid[0], down, across))
    return None


def stack_shape(shape: Size, view: str) -> tuple[int, int, int]:
    """Number, rows and columns of the matrices that a tensor is read as; a vector is a column.

    Args:
        shape: of the tensor.
        view: of a tensor of three or more dimensions. "matrix": one matrix, (first dimension, rest), as of a
            convolution's weight; "stack": a stack of matrices over the last two dimensions, as of experts; "auto": a
            stack for three dimensions, a matrix for more.
    """
    if len(shape) < 2:
        return 1, prod(shape), 1
    if len(shape) == 2 or is_matrix(len(shape), view):
        return 1, shape[0], prod(shape[1:])
    return prod(shape[:-2]), shape[-2], shape[-1]


def is_matrix(dimensions: int, view: str) -> bool:
    """Whether a tensor of three or more dimensions is read as one matrix, not as a stack."""
    return view == "matrix" or (view == "auto" and dimensions > 3)


def as_stack(tensor: Tensor, view: str) -> Tensor:
    """``tensor`` as its matrices (k, rows, columns): a view wherever the memory layout allows one, else a copy."""
    return tensor.reshape(stack_shape(tensor.shape, view))


class Span(NamedTuple):
    """Equal pieces of a dimension, one after another."""

    start: int
    pieces: int
    length: int  # of a piece


def spans(start: int, length: int, block: int) -> list[Span]:
    """The full blocks of a range that begins at ``start``, and its remainder."""
    full, rest = divmod(length, block)
    found = [Span(start, full, block)] if full else []
    if rest:
        found.append(Span(start + full * block, 1, rest))
    return found


def pieces(length: int, split: int | Sequence[int] | None) -> list[Span]:
    """The ranges that a dimension of fused matrices is split into.

    Args:
        length: of the dimension.
        split: a number of equal parts, the length of each part, or ``None`` for the whole.

    Raises:
        ValueError: ``split`` does not divide ``length``, or does not add up to it.
    """
    if split is None or isinstance(split, int):
        count = split or 1
        if length % count:
            raise ValueError(f"{length} does not divide into {count} equal parts")
        split = [length // count] * count
    if sum(split) != length:
        raise ValueError(f"{' + '.join(map(str, split))} does not make {length}")
    return [Span(sum(split[:i]), 1, each) for i, each in enumerate(split)]


def grids(rows: Span, columns: Span, block: tuple[int, int]) -> Iterator[tuple[Span, Span]]:
    """Cuts a rectangle into grids of equal blocks: the body, the right edge, the bottom edge and the corner.

    Args:
        rows: of the rectangle.
        columns: of the rectangle.
        block: largest rows and columns of a block.
    """
    for down in spans(rows.start, rows.pieces * rows.length, block[0]):
        for across in spans(columns.start, columns.pieces * columns.length, block[1]):
            yield down, across


def tiles(
    depth: int, down: Span, across: Span, *, most: int | None = None, weight: int | None = None
) -> Iterator[Tile]:
    """Cuts a grid of blocks that lies at one place in each of ``depth`` matrices into tiles.

    Args:
        depth: number of matrices.
        down: rows of the grid.
        across: columns of the grid.
        most: largest weight of a tile. A heavier grid is cut between its matrices; that of a single matrix between
            its rows of blocks; and a row of blocks that is heavier still between its blocks. ``None``: no limit.
        weight: of a block; its number of elements unless given.

    Yields:
        Tiles that cover each element of the grid exactly once.
    """
    own = down.length * across.length if weight is None else weight
    blocks = depth * down.pieces * across.pieces if most is None else max(1, most // own)
    wide = min(across.pieces, blocks)
    tall = min(down.pieces, max(1, blocks // across.pieces))
    deep = min(depth, max(1, blocks // (down.pieces * across.pieces)))
    for k in range(0, depth, deep):
        for i in range(0, down.pieces, tall):
            for j in range(0, across.pieces, wide):
                yield Tile(
                    (k, down.start + i * down.length, across.start + j * across.length),
                    (min(deep, depth - k), min(tall, down.pieces - i), min(wide, across.pieces - j)),
                    (down.length, across.length),
                )
