"""What each process holds of a parameter: a box of its matrix, the same on processes that hold copies.

Read off the parameter: a plain tensor is replicated, a DTensor says how its mesh cuts it. `fully_shard` (FSDP2) cuts
one dimension, tensor parallelism another; both at once leave each process a box still.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from dash_shampoo.blocks import Tile, matrix_shape


class Box(NamedTuple):
    """Rows and columns of a matrix, each from a first to a last that is out."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of columns."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """What is in both, or ``None``."""
        rows = max(self.rows[0], other.rows[0]), min(self.rows[1], other.rows[1])
        columns = max(self.columns[0], other.columns[0]), min(self.columns[1], other.columns[1])
        return Box(rows, columns) if rows[0] < rows[1] and columns[0] < columns[1] else None

    def of(self, matrix: Tensor, held: Box) -> Tensor:
        """This box as a view of ``matrix``, which has the elements of ``held``."""
        (top, bottom), (left, right) = self.rows, self.columns
        i, j = held.rows[0], held.columns[0]
        return matrix[top - i : bottom - i, left - j : right - j]


def extent(tile: Tile) -> Box:
    """The box that a tile covers."""
    (i, j), (down, across), (r, c) = tile
    return Box((i, i + down * r), (j, j + across * c))


def rectangle(tile: Tile, buffer: Tensor, start: int) -> Tensor:
    """The elements of a tile that lie in a flat ``buffer`` from ``start`` on, row by row: (rows, columns)."""
    box = extent(tile)
    return buffer[start : start + box.size].view(box.shape)


def blocks_of(tile: Tile, buffer: Tensor, start: int) -> Tensor:
    """The same elements as blocks, in the shape that `Tile.of` gives."""
    return tile._replace(origin=(0, 0)).of(rectangle(tile, buffer, start))


class Placement(NamedTuple):
    """How the processes of a group hold a parameter.

    Attributes:
        boxes: what each process holds, by its rank in the group.
        copies: which set of processes, that together hold the parameter once, each belongs to.
    """

    boxes: list[Box]
    copies: list[int]

    @property
    def replicated(self) -> bool:
        """Whether every process holds the whole parameter."""
        return self.number_of_copies == len(self.copies)

    @property
    def number_of_copies(self) -> int:
        """How often the parameter is there."""
        return len(set(self.copies))


def is_distributed(parameter: Tensor) -> bool:
    """Whether a parameter is a DTensor."""
    return hasattr(parameter, "placements")


def local(tensor: Any) -> Tensor:
    """What this process holds of a tensor."""
    held: Tensor = tensor.to_local() if is_distributed(tensor) else tensor
    return held


def local_gradient(parameter: Any) -> Tensor | None:
    """What this process holds of a parameter's gradient, cut like the parameter; ``None`` without a gradient."""
    gradient: Any = parameter.grad
    if gradient is None or not is_distributed(parameter):
        return gradient
    if gradient.placements != parameter.placements:  # autograd leaves some as partial sums
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


def placement(parameter: Any, ranks: Sequence[int]) -> Placement:
    """How processes hold a parameter of which `unsupported` finds nothing to say.

    Args:
        parameter: a DTensor, or a plain tensor that all processes hold.
        ranks: global ranks of the processes, in the order of the result.
    """
    rows, columns = matrix_shape(parameter.shape)
    if not is_distributed(parameter):
        return Placement([Box((0, rows), (0, columns))] * len(ranks), list(range(len(ranks))))
    mesh = parameter.device_mesh.mesh
    kinds = list(enumerate(parameter.placements))
    # A strided shard is what fully_shard makes of a dimension that tensor parallelism has cut before.
    order = [pair for pair in kinds if not _strided(pair[1])] + [pair for pair in kinds if _strided(pair[1])]
    cuts = tuple((i, kind.dim if kind.is_shard() or _strided(kind) else None) for i, kind in order)
    return _cut(tuple(parameter.shape), cuts, tuple(mesh.shape), tuple(mesh.flatten().tolist()), tuple(ranks))


@lru_cache(maxsize=256)  # a model has few shapes, and thousands of processes make this slow
def _cut(
    shape: tuple[int, ...],
    cuts: tuple[tuple[int, int | None], ...],
    sizes: tuple[int, ...],
    mesh: tuple[int, ...],
    ranks: tuple[int, ...],
) -> Placement:
    """The placement of a tensor of which each (mesh dimension, tensor dimension) in turn cuts what is left."""
    index = {rank: i for i, rank in enumerate(mesh)}
    rest = prod(shape[2:])
    boxes, copies = [], []
    for rank in ranks:
        place = _coordinates(index[rank], sizes)
        spans = [(0, length) for length in shape[:2]] or [(0, 1)]
        copy = 0
        for dimension, cut in cuts:
            if cut is None:
                copy = copy * sizes[dimension] + place[dimension]
            else:
                spans[cut] = _chunk(spans[cut], sizes[dimension], place[dimension])
        columns = (spans[1][0] * rest, spans[1][1] * rest) if len(spans) > 1 else (0, 1)
        boxes.append(Box(spans[0], columns))
        copies.append(copy)
    return Placement(boxes, copies)


def unsupported(parameter: Any) -> str | None:
    """Why Dash cannot move a DTensor with these placements, or ``None``."""
    for kind in parameter.placements:
        if kind.is_partial():
            return "is a DTensor of partial sums; Dash moves replicated and sharded parameters"
        if (kind.is_shard() or _strided(kind)) and kind.dim > 1:
            return (
                f"is a DTensor cut along dimension {kind.dim}; Dash takes cuts along the first two dimensions: "
                "shard it along dimension 0"
            )
        if not (kind.is_shard() or kind.is_replicate() or _strided(kind)):
            return f"is a DTensor with the placement {kind}, which Dash does not know"
    return None


def _strided(kind: Any) -> bool:
    return type(kind).__name__ == "_StridedShard"


def _coordinates(index: int, sizes: tuple[int, ...]) -> list[int]:
    place = []
    for size in reversed(sizes):
        index, coordinate = divmod(index, size)
        place.append(coordinate)
    return place[::-1]


def _chunk(span: tuple[int, int], pieces: int, index: int) -> tuple[int, int]:
    """The ``index``-th of the pieces that `torch.chunk` cuts a span into; the last ones may be empty."""
    start, stop = span
    size = -(-(stop - start) // pieces)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)
