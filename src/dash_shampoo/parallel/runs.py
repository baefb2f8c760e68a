"""Runs: equal tiles of parameters of equal shape, in a row, which single calls read and write.

Tiles are small, so that several processes can share the work. Those that one process owns of one parameter are joined
again where they are neighbours, and those of equal parameters follow each other. The calls of a step are counted in
runs, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Size, Tensor

from dash_shampoo.blocks import Tile, joined, stack_shape
from dash_shampoo.parallel.boxes import Box, Placement, extent
from dash_shampoo.portions import portions


class Member(NamedTuple):
    """Neighbouring tiles of one parameter that one process owns, as one."""

    parameter: Tensor
    place: int  # of the parameter in its bank
    group: dict[str, Any]
    tile: Tile
    names: tuple[tuple[str, int], ...]  # of the tiles in the parameter's state, each with its number of blocks
    held: Placement


class Run:
    """Members in a row that are alike: of one shape, cut and held in one way.

    Attributes:
        members: at least one.
        tile: of each of them.
        view: how their parameters are read.
        shape: of their parameters.
        held: how processes hold each of them.
        whole: whether the tile is the whole parameter.
    """

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        first = members[0]
        self.tile = first.tile
        self.view: str = first.group["view"]
        self.shape: Size = first.parameter.shape
        self.held = first.held
        self.whole = self.box == Box(*((0, length) for length in stack_shape(self.shape, self.view)))

    @cached_property
    def box(self) -> Box:
        """What each tile covers."""
        return extent(self.tile)

    @cached_property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.members) * self.tile.blocks

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return self.blocks * prod(self.tile.block)

    @cached_property
    def in_rows(self) -> bool:
        """Whether the elements of the blocks lie in memory as those of the rectangles do."""
        return self.tile.grid[2] == 1

    def as_tiles(self, blocks: Tensor) -> Tensor:
        """The run's ``blocks`` (n, r, c), each member's in the shape of its tile: (k, matrices, down, across, r, c)."""
        return blocks.view(-1, *self.tile.grid, *self.tile.block)

    def as_tiles_of_rectangles(self, rectangles: Tensor) -> Tensor:
        """The same view of contiguous ``rectangles``, which have the elements of each tile row by row."""
        (deep, down, across), (r, c) = self.tile.grid, self.tile.block
        return rectangles.view(-1, deep, down, r, across, c).transpose(3, 4)

    def as_rectangles(self, blocks: Tensor) -> Tensor:
        """The run's ``blocks`` row by row, (k, matrices, rows, columns): a view if they lie like that, else a copy."""
        return self.as_tiles(blocks).transpose(3, 4).reshape(-1, *self.box.shape)


def join(members: Iterable[Member], most: int) -> Iterator[Member]:
    """Joins neighbours among members in a row into members of at most ``most`` blocks, in the same order of blocks."""
    found: list[Member] = []
    for member in members:
        found.append(member)
        while len(found) > 1 and (both := _joined(found[-2], found[-1], most)) is not None:
            found[-2:] = [both]
        if len(found) > 1 and found[-2].place != found[-1].place:
            yield from found[:-1]
            del found[:-1]
    yield from found


def _joined(one: Member, other: Member, most: int) -> Member | None:
    tile = joined(one.tile, other.tile) if one.place == other.place else None
    if tile is None or tile.blocks > most:
        return None
    return one._replace(tile=tile, names=one.names + other.names)


def runs(members: Iterable[Member], most: int) -> Iterator[list[Run]]:
    """Members, those that are alike side by side, in portions of at most ``most`` blocks, and each portion as runs."""
    ordered: list[list[Member]] = []
    for member in join(members, most):
        alike = next((own for own in ordered if _alike(own[0], member)), None)
        if alike is None:
            ordered.append([member])
        else:
            alike.append(member)
    numbered = ((i, member) for i, own in enumerate(ordered) for member in own)
    for portion in portions(numbered, lambda pair: pair[1].tile.blocks, most):
        yield [Run([member for _, member in own]) for _, own in groupby(portion, key=itemgetter(0))]


def _alike(one: Member, other: Member) -> bool:
    return (
        one.tile == other.tile
        and one.parameter.shape == other.parameter.shape
        and one.group["view"] == other.group["view"]
        and one.held == other.held
    )
