"""Parameters cut over the processes, as by `fully_shard`: one all-to-all of gradients, one of updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dash_shampoo.blocks import as_stack
from dash_shampoo.parallel.boxes import Box
from dash_shampoo.parallel.carrier import Carrier, Gradients
from dash_shampoo.parallel.pieces import Weights, Wrapped, pieces_of, settle
from dash_shampoo.parallel.runs import Run
from dash_shampoo.parallel.world import World


class Share(NamedTuple):
    """The part of a run's tiles that one process holds."""

    run: Run
    box: Box  # of each member's tile

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self.run.members) * self.box.size


class Sharded(Carrier):
    """Each process sends its part of every gradient to the tiles' owners, and gets its part of the updates back."""

    def __init__(self, world: World, wire: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(world, wire, dtype, device)
        self._narrowest: torch.dtype | None = None  # that holds every gradient as it is
        self._start: dict[int, int] = {}  # of this process's runs in a buffer of whole tiles
        self._size = 0
        # For each process: gradients that go to it and come from it, and updates that go to it and come from it.
        self._asked: list[list[Share]] = [[] for _ in world.ranks]
        self._offered: list[list[Share]] = [[] for _ in world.ranks]
        self._answered: list[list[Share]] = [[] for _ in world.ranks]
        self._awaited: list[list[Share]] = [[] for _ in world.ranks]
        self._rectangles: Tensor | None = None
        self._updates: Tensor | None = None
        self._arriving: tuple[Tensor, Callable[[], None]] | None = None

    def add(self, run: Run, owner: int) -> None:
        me, placement = self._world.rank, run.held
        for member in run.members:
            dtype = member.parameter.dtype
            self._narrowest = dtype if self._narrowest is None else torch.promote_types(self._narrowest, dtype)
        mine = run.box.meet(self._held(run))
        if mine is not None:
            self._awaited[owner].append(Share(run, mine))
            if placement.copies[owner] == placement.copies[me]:
                self._asked[owner].append(Share(run, mine))
        if owner != me:
            return
        self._start[id(run)] = self._size
        self._size += run.size
        for other, box in enumerate(placement.boxes):
            theirs = run.box.meet(box)
            if theirs is not None:
                self._answered[other].append(Share(run, theirs))
                if placement.copies[other] == placement.copies[me]:
                    self._offered[other].append(Share(run, theirs))

    def begin(self, gradients: Gradients) -> None:
        out = torch.zeros(_total(self._asked), dtype=self._narrowest, device=self._device)
        pairs = []
        for targets, (run, box) in _cut(out, self._asked):
            there = [(i, own) for i, member in enumerate(run.members) if (own := gradients[member.place]) is not None]
            held = self._held(run)
            # Where a gradient is missing its place stays zero.
            if there and box == held:
                own_targets = targets.view(-1, *there[0][1].shape).unbind()
                pairs += [(own_targets[i], gradient) for i, gradient in there]
            elif there:
                own_targets = targets.unbind()
                pairs += [(own_targets[i], box.of(as_stack(gradient, run.view), held)) for i, gradient in there]
        _copy(pairs)
        arrived, wait = self._world.exchange(out, _sizes(self._asked), _sizes(self._offered), "the gradients")
        wait()
        self._rectangles = torch.empty(self._size, dtype=self._dtype, device=self._device)
        self._updates = torch.empty_like(self._rectangles, dtype=self._wire)
        _copy([(self._part(self._rectangles, share), came) for came, share in _cut(arrived, self._offered)])

    def has_gradient(self, place: int) -> bool:
        return True  # parts that are missing are zero, and `deliver` hears of gradients that are missing altogether

    def gather(self, run: Run, blocks: Tensor) -> None:
        assert self._rectangles is not None
        run.as_tiles(blocks).copy_(run.as_tiles_of_rectangles(self._own(self._rectangles, run)))

    def deliver(self, update: Tensor, taken: Tensor, runs: Sequence[tuple[Run, Tensor]]) -> None:
        assert self._updates is not None
        for run, blocks in runs:
            run.as_tiles_of_rectangles(self._own(self._updates, run)).copy_(run.as_tiles(blocks))

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
        wrapped = Wrapped(self._dtype)
        with Weights(wrapped) as weights:
            pieces = []
            for updates, (run, box) in _cut(arrived, self._awaited):
                pieces += pieces_of(run, updates, weights.of(run, box, self._held(run)))
            settle(pieces, taken, self._dtype)
        wrapped.write_back()

    def _held(self, run: Run) -> Box:
        """What this process holds of each of a run's parameters."""
        return run.held.boxes[self._world.rank]

    def _own(self, buffer: Tensor, run: Run) -> Tensor:
        """Where one of this process's runs lies in a buffer of whole tiles."""
        start = self._start[id(run)]
        return buffer[start : start + run.size]

    def _part(self, buffer: Tensor, share: Share) -> Tensor:
        """Where a share of one of this process's runs lies in a buffer of whole tiles: (k, matrices, rows, columns)."""
        run, box = share
        rectangles = self._own(buffer, run).view(-1, *run.box.shape)
        return rectangles[(slice(None), *box.slices(run.box))]


def _sizes(shares: list[list[Share]]) -> list[int]:
    return [sum(share.size for share in own) for own in shares]


def _total(shares: list[list[Share]]) -> int:
    return sum(_sizes(shares))


def _cut(buffer: Tensor, shares: list[list[Share]]) -> list[tuple[Tensor, Share]]:
    """A flat buffer cut into the shares of each process in turn, each (k, matrices, rows, columns)."""
    flat = [share for own in shares for share in own]
    pieces = buffer.split([share.size for share in flat])
    return [(piece.view(-1, *share.box.shape), share) for piece, share in zip(pieces, flat, strict=True)]


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copies into the first of each pair from the second."""
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
