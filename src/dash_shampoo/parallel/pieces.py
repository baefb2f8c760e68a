"""Pieces of updates on their way into parameters: the last line of the algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_shampoo.blocks import as_stack
from dash_shampoo.factors import workspace
from dash_shampoo.parallel.boxes import Box, as_plain, is_wrapper, local
from dash_shampoo.parallel.runs import Run
from dash_shampoo.portions import portions


class Piece(NamedTuple):
    """A part of an update on its way into a parameter."""

    place: int  # of the parameter in its bank
    group: Mapping[str, Any]
    update: Tensor
    weight: Tensor  # what it moves, of the same shape


def pieces_of(run: Run, updates: Tensor, weights: Sequence[Tensor]) -> list[Piece]:
    """The pieces of a run: its ``updates``, one member's after another, with what they move of each member."""
    own = updates.view(-1, *weights[0].shape).unbind()
    return [
        Piece(member.place, member.group, update, weight)
        for member, update, weight in zip(run.members, own, weights, strict=True)
    ]


class Wrapped:
    """Parameters that are wrapper subclasses: each is read into a plain tensor, and written back whole, once a step.

    A quantised weight rounds at each write, and nothing but its own operations reach its values.

    Args:
        dtype: of the plain tensors, that of the stacks: in the weight's own, bfloat16, small updates would be lost.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._plain: dict[int, tuple[Tensor, Tensor]] = {}  # by parameter: what is held, and its values

    def of(self, parameter: Tensor) -> Tensor:
        """What this process holds of a parameter, to write to: itself, or its values until `write_back`."""
        held = local(parameter)
        if not is_wrapper(held):
            return held
        if id(parameter) not in self._plain:
            self._plain[id(parameter)] = held, as_plain(held, self._dtype)
        return self._plain[id(parameter)][1]

    def write_back(self) -> None:
        """Writes what has been read."""
        for held, values in self._plain.values():
            held.copy_(values)
        self._plain.clear()


class Weights:
    """What this process holds of parameters, to write to; leaving writes back what could not be read as a view."""

    def __init__(self, wrapped: Wrapped) -> None:
        self._wrapped = wrapped
        self._stacks: dict[int, tuple[Tensor, Tensor]] = {}  # by parameter: what is held, and its matrices

    def of(self, run: Run, box: Box, held: Box) -> list[Tensor]:
        """The ``box`` of each member of a run, of which this process holds ``held``: in its own shape if that is it."""
        if box == held:
            return [self._wrapped.of(member.parameter) for member in run.members]
        return [box.of(self.stack(member.parameter, run.view), held) for member in run.members]

    def stack(self, parameter: Tensor, view: str) -> Tensor:
        """What is held, as matrices: (k, rows, columns)."""
        if id(parameter) not in self._stacks:
            held = self._wrapped.of(parameter)
            self._stacks[id(parameter)] = held, as_stack(held, view)
        return self._stacks[id(parameter)][1]

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        for held, stack in self._stacks.values():
            if stack.data_ptr() != held.data_ptr():
                held.copy_(stack.view(held.shape))


def decay(pieces: list[Piece]) -> list[Piece]:
    """update <- update + weight_decay W; returns the pieces that have any."""
    decayed = []
    for group, own in _by_group(pieces):
        if group["weight_decay"]:
            torch._foreach_add_(
                [piece.update for piece in own], [piece.weight for piece in own], alpha=group["weight_decay"]
            )
            decayed += own
    return decayed


def descend(pieces: list[Piece]) -> None:
    """W <- W - lr update; the updates are used up."""
    for group, own in _by_group(pieces):
        updates, weights = [piece.update for piece in own], [piece.weight for piece in own]
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.device == updates[0].device:
            torch._foreach_mul_(updates, -lr.reshape(()))
            torch._foreach_add_(weights, updates)
        else:
            torch._foreach_add_(weights, updates, alpha=-float(lr))  # of a tensor on the host, without a wait


def _by_group(pieces: list[Piece]) -> Iterable[tuple[Mapping[str, Any], list[Piece]]]:
    found: dict[int, tuple[Mapping[str, Any], list[Piece]]] = {}
    for piece in pieces:
        found.setdefault(id(piece.group), (piece.group, []))[1].append(piece)
    return found.values()


def settle(pieces: list[Piece], taken: Tensor, dtype: torch.dtype) -> None:
    """Moves weights by updates that are zero already where a parameter has not ``taken`` (p,) the step.

    Updates that have come in another dtype than ``dtype`` are converted as many at a time as the workspace holds: all
    at once they would take as much memory as what the process holds of the model.
    """
    if all(piece.update.dtype == dtype for piece in pieces):
        _settle(pieces, taken)
        return
    device = pieces[0].update.device
    most = min(workspace(limit, device) for limit in {piece.group["max_workspace"] for piece in pieces})
    for some in portions(pieces, lambda piece: piece.update.numel() * dtype.itemsize, most):
        _settle(_converted(some, dtype), taken)


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
