"""Carriers bring gradients to the stacks and updates to the parameters.

A tile is computed by the process that owns it. `Direct` is for parameters that this process holds alone; the others
send what they have to the owners and spread what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dash_shampoo.blocks import as_stack
from dash_shampoo.parallel.pieces import Weights, Wrapped, pieces_of, settle
from dash_shampoo.parallel.runs import Run
from dash_shampoo.parallel.world import World

Gradients = list[Tensor | None]

# Elements of a parameter up to which a CPU copies it once more, so that one call serves all parameters of its shape. An
# accelerator always does: there a call takes longer than a copy.
STAGED = 1 << 17


class Carrier:
    """Base of the carriers. A step calls `begin`, `gather` and `deliver` for the runs of each part, `send`, `end`.

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

    def add(self, run: Run, owner: int) -> None:
        """Takes charge of a run, whose owner has this rank in the world."""

    def has_gradient(self, place: int) -> bool:
        """Whether `gather` has something to give at this step for the parameter in this place of the bank."""
        return self._gradients[place] is not None

    def begin(self, gradients: Gradients) -> None:
        """Fetches the gradients of the tiles that this process owns.

        Args:
            gradients: what this process holds of each gradient, by the parameters' places in their bank.
        """
        self._gradients = gradients

    def gather(self, run: Run, blocks: Tensor) -> None:
        """Copies the gradients of a run into its ``blocks`` (n, r, c); what is missing stays as it is."""
        found = [(i, self._gradients[member.place]) for i, member in enumerate(run.members)]
        there = [(i, gradient) for i, gradient in found if gradient is not None]
        if not there:
            return
        sources: list[Tensor] = [gradient for _, gradient in there]
        staged = _is_staged(run, self._device)
        if staged:
            target = blocks.view(-1, *run.shape) if run.in_rows else blocks.new_empty(len(run.members), *run.shape)
        else:
            target = run.as_tiles(blocks)
            tile, view = run.tile, run.view
            sources = [tile.of(as_stack(gradient, view)) for gradient in sources]
        targets = target.unbind()
        torch._foreach_copy_([targets[i] for i, _ in there], sources)
        if staged and not run.in_rows:
            run.as_tiles(blocks).copy_(run.as_tiles_of_rectangles(target))

    def deliver(self, update: Tensor, taken: Tensor, runs: Sequence[tuple[Run, Tensor]]) -> None:
        """Takes an update (n, r, c), which is used up; it is zero where a parameter has not ``taken`` (p,) the step.

        Args:
            update: of a part's blocks.
            taken: 1 for parameters of the bank that take this step, else 0.
            runs: those of the part that this carrier serves, each with its view of ``update``.
        """
        raise NotImplementedError

    def send(self) -> None:
        """Starts to spread what has been delivered."""

    def end(self, taken: Tensor) -> None:
        """Waits for what others have sent and moves the parameters, those that have ``taken`` (p,) the step."""
        self._gradients = []


class Direct(Carrier):
    """Parameters that this process holds alone."""

    def begin(self, gradients: Gradients) -> None:
        super().begin(gradients)
        self._wrapped = Wrapped(self._dtype)

    def deliver(self, update: Tensor, taken: Tensor, runs: Sequence[tuple[Run, Tensor]]) -> None:
        with Weights(self._wrapped) as weights:
            pieces = []
            for run, blocks in runs:
                if _is_staged(run, self._device):
                    updates, targets = run.as_rectangles(blocks), weights.of(run, run.box, run.box)
                else:
                    updates = run.as_tiles(blocks)
                    targets = [run.tile.of(weights.stack(member.parameter, run.view)) for member in run.members]
                pieces += [piece for piece in pieces_of(run, updates, targets) if self.has_gradient(piece.place)]
            settle(pieces, taken, self._dtype)

    def end(self, taken: Tensor) -> None:
        super().end(taken)
        self._wrapped.write_back()


def _is_staged(run: Run, device: torch.device) -> bool:
    """Whether parameters are whole and copied once more on their way, all at once, or need no such copy."""
    return run.whole and (run.in_rows or device.type != "cpu" or run.size <= STAGED * len(run.members))
