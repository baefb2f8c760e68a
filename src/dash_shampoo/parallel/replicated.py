"""Parameters that every process holds whole, as under DistributedDataParallel: one all-gather of the updates."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from dash_shampoo.blocks import Tile
from dash_shampoo.parallel.boxes import Placement, extent
from dash_shampoo.parallel.carrier import Carrier, Gradients, Member, Piece, Weights, decay, descend
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
        self._filled[owner] += elements(member.tile)

    def begin(self, gradients: Gradients) -> None:
        super().begin(gradients)
        # Equal lengths let one collective do; balanced ownership keeps the padding small.
        self._buffer = torch.zeros(max(self._filled), dtype=self._wire, device=self._device)

    def deliver(self, update: Tensor, live: Tensor, members: list[tuple[Member, Tensor]]) -> None:
        assert self._buffer is not None
        update.masked_fill_(live == 0, 0)
        sinks = [whole(member.tile, self._buffer, self._start[member.place, member.name]) for member, _ in members]
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
        arrived = arrived.to(self._dtype)
        with Weights(member.parameter for member, _, _ in self._tiles) as weights:
            pieces = []
            for member, owner, start in self._tiles:
                box = extent(member.tile)
                update = arrived[owner, start : start + box.size].view(box.shape)
                (top, bottom), (left, right) = box
                weight = weights.of(member.parameter)[top:bottom, left:right]
                pieces.append(Piece(member.place, member.group, update, weight))
            settle(pieces, taken)


def settle(pieces: list[Piece], taken: Tensor) -> None:
    """Moves weights by updates that are zero already where a parameter has not ``taken`` (p,) the step."""
    decayed = decay(pieces)
    if decayed:
        alive = taken.unbind()
        torch._foreach_mul_([piece.update for piece in decayed], [alive[piece.place] for piece in decayed])
    descend(pieces)


def elements(tile: Tile) -> int:
    """Number of elements of a tile."""
    return tile.blocks * prod(tile.block)


def whole(tile: Tile, buffer: Tensor, start: int) -> Tensor:
    """The blocks of a tile whose rectangle lies in a flat buffer from ``start`` on, in the shape of its grid."""
    rectangle = buffer[start : start + elements(tile)].view(extent(tile).shape)
    return tile._replace(origin=(0, 0)).of(rectangle)
