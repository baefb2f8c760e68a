"""Parameters cut over the processes, as by `fully_shard`: one all-to-all of gradients, one of updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dash_shampoo.blocks import as_stack
from dash_shampoo.parallel.boxes import Box, Placement, blocks_of, extent, rectangle
from dash_shampoo.parallel.carrier import Carrier, Gradients, Member
from dash_shampoo.parallel.pieces import Piece, Weights, settle
from dash_shampoo.parallel.world import World


class Share(NamedTuple):
    """The part of a tile that one process holds."""

    member: Member
    box: Box


class Sharded(Carrier):
    """Each process sends its part of every gradient to the tiles' owners, and gets its part of the updates back."""

    def __init__(self, world: World, wire: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(world, wire, dtype, device)
        self._narrowest: torch.dtype | None = None  # that holds every gradient as it is
        self._held: dict[int, Box] = {}  # by this process, of the parameter in each place
        self._start: dict[tuple[int, str], int] = {}  # of this process's tiles in a buffer of whole tiles
        self._size = 0
        # For each process: gradients that go to it and come from it, and updates that go to it and come from it.
        self._asked: list[list[Share]] = [[] for _ in world.ranks]
        self._offered: list[list[Share]] = [[] for _ in world.ranks]
        self._answered: list[list[Share]] = [[] for _ in world.ranks]
        self._awaited: list[list[Share]] = [[] for _ in world.ranks]
        self._rectangles: Tensor | None = None
        self._updates: Tensor | None = None
        self._arriving: tuple[Tensor, Callable[[], None]] | None = None

    def add(self, member: Member, owner: int, placement: Placement) -> None:
        me = self._world.rank
        dtype = member.parameter.dtype
        self._narrowest = dtype if self._narrowest is None else torch.promote_types(self._narrowest, dtype)
        whole = extent(member.tile)
        self._held[member.place] = held = placement.boxes[me]
        mine = whole.meet(held)
        if mine is not None:
            self._awaited[owner].append(Share(member, mine))
            if placement.copies[owner] == placement.copies[me]:
                self._asked[owner].append(Share(member, mine))
        if owner != me:
            return
        self._start[member.place, member.name] = self._size
        self._size += whole.size
        for other, box in enumerate(placement.boxes):
            theirs = whole.meet(box)
            if theirs is not None:
                self._answered[other].append(Share(member, theirs))
                if placement.copies[other] == placement.copies[me]:
                    self._offered[other].append(Share(member, theirs))

    def begin(self, gradients: Gradients) -> None:
        out = torch.zeros(_total(self._asked), dtype=self._narrowest, device=self._device)
        stacks: dict[int, Tensor | None] = {}
        pairs = []
        for target, (member, box) in _cut(out, self._asked):
            if member.place not in stacks:
                gradient = gradients[member.place]
                stacks[member.place] = None if gradient is None else as_stack(gradient, member.group["view"])
            stack = stacks[member.place]
            if stack is not None:  # or else its place stays zero
                pairs.append((target, box.of(stack, self._held[member.place])))
        _copy(pairs)
        arrived, wait = self._world.exchange(out, _sizes(self._asked), _sizes(self._offered), "the gradients")
        wait()
        self._rectangles = torch.empty(self._size, dtype=self._dtype, device=self._device)
        self._updates = torch.empty_like(self._rectangles, dtype=self._wire)
        _copy([(self._part(self._rectangles, share), came) for came, share in _cut(arrived, self._offered)])

    def has_gradient(self, member: Member) -> bool:
        return True  # parts that are missing are zero, and `deliver` hears of gradients that are missing altogether

    def gradient(self, member: Member) -> Tensor:
        assert self._rectangles is not None
        return blocks_of(member.tile, self._rectangles, self._start[member.place, member.name])

    def deliver(self, update: Tensor, live: Tensor, members: list[tuple[Member, Tensor]]) -> None:
        assert self._updates is not None
        update.masked_fill_(live == 0, 0)
        _copy(
            [
                (blocks_of(member.tile, self._updates, self._start[member.place, member.name]), blocks)
                for member, blocks in members
            ]
        )

    def send(self) -> None:
        assert self._updates is not None
        out = torch.empty(_total(self._answered), dtype=self._wire, device=self._device)
        _copy([(target, self._part(self._updates, share)) for target, share in _cut(out, self._answered)])
        self._rectangles = self._updates = None
        self._arriving = self._world.exchange(out, _sizes(self._answered), _sizes(self._awaited), "the updates")

    def end(self, taken: Tensor) -> None:
        assert self._arriving is not None
        arrived, wait = self._arriving
        wait()
        self._arriving = None
        members = [share.member for shares in self._awaited for share in shares]
        with Weights((member.parameter, member.group) for member in members) as weights:
            pieces = []
            for update, (member, box) in _cut(arrived, self._awaited):
                weight = box.of(weights.of(member.parameter), self._held[member.place])
                pieces.append(Piece(member.place, member.group, update, weight))
            settle(pieces, taken, self._dtype)

    def _part(self, buffer: Tensor, share: Share) -> Tensor:
        """Where a share of one of this process's tiles lies in a buffer of whole tiles."""
        tile = share.member.tile
        start = self._start[share.member.place, share.member.name]
        return share.box.of(rectangle(tile, buffer, start), extent(tile))


def _sizes(shares: list[list[Share]]) -> list[int]:
    return [sum(share.box.size for share in own) for own in shares]


def _total(shares: list[list[Share]]) -> int:
    return sum(_sizes(shares))


def _cut(buffer: Tensor, shares: list[list[Share]]) -> list[tuple[Tensor, Share]]:
    """A flat buffer cut into the shares of each process in turn."""
    flat = [share for own in shares for share in own]
    pieces = buffer.split([share.box.size for share in flat])
    return [(piece.view(share.box.shape), share) for piece, share in zip(pieces, flat, strict=True)]


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copies into the first of each pair from the second."""
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
