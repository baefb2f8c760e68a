"""What each process holds of a parameter: a box of its matrices, the same on processes that hold copies.

Read off the parameter: a plain tensor is replicated, a DTensor says how its mesh cuts it. `fully_shard` (FSDP2) cuts
one dimension, tensor and expert parallelism another; all at once leave each process a box still.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from dash_shampoo.blocks import Tile, is_matrix, stack_shape

Range = tuple[int, int]  # from the first to the first that is out


class Box(NamedTuple):
    """Ranges of matrices, rows and columns of a stack of matrices."""

    matrices: Range
    rows: Range
    columns: Range

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of matrices, rows and columns."""
        deep, down, across = (stop - start for start, stop in self)
        return deep, down, across

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """What is in both, or ``None``."""
        common = Box(*(_common(one, two) for one, two in zip(self, other, strict=True)))
        return common if all(start < stop for start, stop in common) else None

    def of(self, stack: Tensor, held: Box | None = None) -> Tensor:
        """This box as a view of ``stack``, which has the elements of ``held``, or all."""
        return stack[self.slices(held)]

    def slices(self, held: Box | None = None) -> tuple[slice, ...]:
        """Where this box lies in a stack with the elements of ``held``, or with all."""
        origin = (0, 0, 0) if held is None else tuple(start for start, _ in held)
        return tuple(slice(start - i, stop - i) for (start, stop), i in zip(self, origin, strict=True))


def _common(one: Range, other: Range) -> Range:
    return max(one[0], other[0]), min(one[1], other[1])


def extent(tile: Tile) -> Box:
    """The box that a tile covers."""
    (k, i, j), (deep, down, across), (r, c) = tile
    return Box((k, k + deep), (i, i + down * r), (j, j + across * c))


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


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor's values lie somewhere else, as those of a quantised weight that dequantises itself.

    It has no memory that views could share, and a list of tensors with it may not be given to one call.
    """
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def as_plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A plain tensor with the values of any."""
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def local(tensor: Any) -> Tensor:
    """What this process holds of a tensor."""
    held: Tensor = tensor.to_local() if is_distributed(tensor) else tensor
    return held


def local_gradient(parameter: Any) -> Tensor | None:
    """What this process holds of a parameter's gradient, cut like the parameter; ``None`` without a gradient."""
    gradient: Any = parameter.grad
    if gradient is None:
        return None
    if is_distributed(parameter) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)  # autograd leaves some as partial sums
    held = local(gradient)
    return as_plain(held, held.dtype) if is_wrapper(held) else held


def placement(parameter: Any, ranks: Sequence[int], view: str) -> Placement:
    """How processes hold a parameter of which `unsupported` finds nothing to say.

    Args:
        parameter: a DTensor, or a plain tensor that all processes hold. What a single process holds is whole.
        ranks: global ranks of the processes, in the order of the result.
        view: how the parameter is read; see `stack_shape`.
    """
    if not is_distributed(parameter) or len(ranks) == 1:
        matrices, rows, columns = stack_shape(parameter.shape, view)
        whole = Box((0, matrices), (0, rows), (0, columns))
        return Placement([whole] * len(ranks), list(range(len(ranks))))
    mesh = parameter.device_mesh.mesh
    kinds = list(enumerate(parameter.placements))
    # A strided shard is what fully_shard makes of a dimension that tensor parallelism has cut before.
    order = [pair for pair in kinds if not _strided(pair[1])] + [pair for pair in kinds if _strided(pair[1])]
    cuts = tuple((i, kind.dim if kind.is_shard() or _strided(kind) else None) for i, kind in order)
    return _cut(tuple(parameter.shape), view, cuts, tuple(mesh.shape), tuple(mesh.flatten().tolist()), tuple(ranks))


def axes(shape: tuple[int, ...], view: str) -> dict[int, tuple[int, int]]:
    """The dimensions of a tensor along which a cut leaves boxes of its matrices.

    Args:
        shape: of the tensor.
        view: how it is read; see `stack_shape`.

    Returns:
        For each of them the axis of the stack that it cuts (0 for matrices, 1 for rows, 2 for columns), and how many
        matrices, rows or columns an index of the dimension stands for.
    """
    n = len(shape)
    if n < 3 or is_matrix(n, view):
        return dict(zip(range(n), ((1, 1), (2, prod(shape[2:]))), strict=False))
    return {0: (0, prod(shape[1:-2])), n - 2: (1, 1), n - 1: (2, 1)}


@lru_cache(maxsize=256)  # a model has few shapes, and thousands of processes make this slow
def _cut(
    shape: tuple[int, ...],
    view: str,
    cuts: tuple[tuple[int, int | None], ...],
    sizes: tuple[int, ...],
    mesh: tuple[int, ...],
    ranks: tuple[int, ...],
) -> Placement:
    """The placement of a tensor of which each (mesh dimension, tensor dimension) in turn cuts what is left."""
    index = {rank: i for i, rank in enumerate(mesh)}
    whole = [(0, length) for length in stack_shape(Size(shape), view)]
    places = axes(shape, view)
    boxes, copies = [], []
    for rank in ranks:
        place = _coordinates(index[rank], sizes)
        spans = [(0, length) for length in shape]
        copy = 0
        for dimension, cut in cuts:
            if cut is None:
                copy = copy * sizes[dimension] + place[dimension]
            else:
                spans[cut] = _chunk(spans[cut], sizes[dimension], place[dimension])
        held = list(whole)
        for dimension, (axis, unit) in places.items():
            held[axis] = spans[dimension][0] * unit, spans[dimension][1] * unit
        boxes.append(Box(*held))
        copies.append(copy)
    return Placement(boxes, copies)


def unsupported(parameter: Any, view: str) -> str | None:
    """Why Dash cannot move a DTensor with these placements, or ``None``."""
    allowed = axes(tuple(parameter.shape), view)
    for kind in parameter.placements:
        if kind.is_partial():
            return "is a DTensor of partial sums; Dash moves replicated and sharded parameters"
        if (kind.is_shard() or _strided(kind)) and kind.dim not in allowed:
            return (
                f"is a DTensor cut along dimension {kind.dim}; with its view Dash takes cuts along dimensions "
                f"{', '.join(map(str, sorted(allowed)))}: shard it along dimension 0"
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
