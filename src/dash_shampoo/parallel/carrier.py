"""Carriers bring gradients to the stacks and updates to the parameters.

A tile is computed by the process that owns it. `Direct` is for parameters that this process holds alone; the others
send what they have to the owners and spread what comes back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_shampoo.blocks import Tile, as_stack
from dash_shampoo.parallel.boxes import Placement
from dash_shampoo.parallel.pieces import Piece, Weights, decay, descend
from dash_shampoo.parallel.world import World

Gradients = list[Tensor | None]


class Member(NamedTuple):
    """One tile of one parameter."""

    parameter: Tensor
    place: int  # of the parameter in its bank
    group: dict[str, Any]
    tile: Tile
    name: str  # of the tile in the parameter's state
    carrier: Carrier


class Carrier:
    """Base of the carriers. A step calls `begin`, `gradient` and `deliver` for the members of each part, `send`, `end`.

    This base takes gradients from this process alone.

    Args:
        world: the processes that hold the parameters.
        wire: dtype in which updates travel.
        dtype: of the stacks.
        device: of the stacks and the parameters.
    """

    def __init__(self, world: World, wire: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
        self._world = world
        self._wire = wire
        self._dtype = dtype
        self._device = device
        self._gradients: Gradients = []

    def add(self, member: Member, owner: int, placement: Placement) -> None:
        """Takes charge of a tile, whose owner has this rank in the world."""

    def has_gradient(self, member: Member) -> bool:
        """Whether `gradient` has something to give at this step."""
        return self._gradients[member.place] is not None

    def begin(self, gradients: Gradients) -> None:
        """Fetches the gradients of the tiles that this process owns.

        Args:
            gradients: what this process holds of each gradient, by the parameters' places in their bank.
        """
        self._gradients = gradients

    def gradient(self, member: Member) -> Tensor:
        """The gradient's blocks in the shape of the member's tile."""
        gradient = self._gradients[member.place]
        assert gradient is not None
        return member.tile.of(as_stack(gradient, member.group["view"]))

    def deliver(self, update: Tensor, live: Tensor, members: list[tuple[Member, Tensor]]) -> None:
        """Takes an update (n, r, c), which is used up, for blocks of which some are ``live`` (n, 1, 1).

        Args:
            update: of a part's blocks.
            live: 1 for blocks that take this step, else 0.
            members: those of the part that this carrier serves, each with its view of ``update``.
        """
        raise NotImplementedError

    def send(self) -> None:
        """Starts to spread what has been delivered."""

    def end(self, taken: Tensor) -> None:
        """Waits for what others have sent and moves the parameters, those that have ``taken`` (p,) the step."""
        self._gradients = []


class Direct(Carrier):
    """Parameters that this process holds alone."""

    def deliver(self, update: Tensor, live: Tensor, members: list[tuple[Member, Tensor]]) -> None:
        with Weights((member.parameter, member.group) for member, _ in members) as weights:
            pieces = [
                Piece(member.place, member.group, blocks, member.tile.of(weights.of(member.parameter)))
                for member, blocks in members
            ]
            decay(pieces)
            update.masked_fill_(live == 0, 0)
            descend(pieces)
