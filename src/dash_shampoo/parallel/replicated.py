"""Parameters that every process holds whole, as under DistributedDataParallel: one all-gather of the updates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dash_shampoo.parallel.boxes import Placement, blocks_of, extent, rectangle
from dash_shampoo.parallel.carrier import Carrier, Gradients, Member
from dash_shampoo.parallel.pieces import Piece, Weights, settle
from dash_shampoo.parallel.world import World


class Replicated(Carrier):
    """Each process computes the updates of its tiles from its own gradients, which are equal, and all-gathers them."""

    def __init__(self, world: World, wire: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(world, wire, dtype, device)
        self._tiles: list[tuple[Member, int, int]] = []  # with its owner and its place in the owner's buffer
        self._filled = [0] * world.size
        self._buffer: Tensor | None = None
        self._start: dict[tuple[int, str], int] = {}
        self._arriving: tuple[Tensor, Callable[[], None]] | None = None

    def add(self, member: Member, owner: int, placement: Placement) -> None:
        start = self._filled[owner]
        self._tiles.append((member, owner, start))
        self._start[member.place, member.name] = start
        self._filled[owner] += extent(member.tile).size

    def begin(self, gradients: Gradients) -> None:
        super().begin(gradients)
        # Equal lengths let one collective do; balanced ownership keeps the padding small.
        self._buffer = torch.zeros(max(self._filled), dtype=self._wire, device=self._device)

    def deliver(self, update: Tensor, live: Tensor, members: list[tuple[Member, Tensor]]) -> None:
        assert self._buffer is not None
        update.masked_fill_(live == 0, 0)
        sinks = [blocks_of(member.tile, self._buffer, self._start[member.place, member.name]) for member, _ in members]
        torch._foreach_copy_(sinks, [blocks for _, blocks in members])

    def send(self) -> None:
        assert self._buffer is not None
        self._arriving = self._world.gather(self._buffer)

    def end(self, taken: Tensor) -> None:
        super().end(taken)
        assert self._arriving is not None
        arrived, wait = self._arriving
        wait()
        self._arriving = self._buffer = None
        with Weights((member.parameter, member.group) for member, _, _ in self._tiles) as weights:
            pieces = []
            for member, owner, start in self._tiles:
                update = rectangle(member.tile, arrived[owner], start)
                weight = extent(member.tile).of(weights.of(member.parameter))
                pieces.append(Piece(member.place, member.group, update, weight))
            settle(pieces, taken, self._dtype)
