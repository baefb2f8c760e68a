"""Parameters that every process holds whole, as under DistributedDataParallel: one all-gather of the updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from dash_shampoo.blocks import Tile
from dash_shampoo.factors import workspace
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
        with Weights(member.parameter for member, _, _ in self._tiles) as weights:
            pieces = []
            for member, owner, start in self._tiles:
                box = extent(member.tile)
                update = arrived[owner, start : start + box.size].view(box.shape)
                (top, bottom), (left, right) = box
                weight = weights.of(member.parameter)[top:bottom, left:right]
                pieces.append(Piece(member.place, member.group, update, weight))
            settle(pieces, taken, self._dtype)


def settle(pieces: list[Piece], taken: Tensor, dtype: torch.dtype) -> None:
    """Moves weights by updates that are zero already where a parameter has not ``taken`` (p,) the step.

    Updates that have come in another dtype than ``dtype`` are converted as many at a time as the workspace holds: all
    at once they would take as much memory as what the process holds of the model.
    """
    if all(piece.update.dtype == dtype for piece in pieces):
        _settle(pieces, taken)
        return
    for some in _portions(pieces, dtype.itemsize):
        _settle(_converted(some, dtype), taken)


def _portions(pieces: list[Piece], itemsize: int) -> Iterator[list[Piece]]:
    """Runs of pieces that fit the workspace with elements of ``itemsize`` bytes, or of one piece."""
    device = pieces[0].update.device
    most = min(workspace(limit, device) for limit in {piece.group["max_workspace"] for piece in pieces})
    portion: list[Piece] = []
    size = 0
    for piece in pieces:
        own = piece.update.numel() * itemsize
        if portion and size + own > most:
            yield portion
            portion, size = [], 0
        portion.append(piece)
        size += own
    yield portion


def _converted(pieces: list[Piece], dtype: torch.dtype) -> list[Piece]:
    """The pieces with their updates in ``dtype``."""
    sizes = [piece.update.numel() for piece in pieces]
    flat = torch.empty(sum(sizes), dtype=dtype, device=pieces[0].update.device)
    updates = [part.view_as(piece.update) for part, piece in zip(flat.split(sizes), pieces, strict=True)]
    torch._foreach_copy_(updates, [piece.update for piece in pieces])
    return [piece._replace(update=update) for piece, update in zip(pieces, updates, strict=True)]


def _settle(pieces: list[Piece], taken: Tensor) -> None:
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
