"""Parameters that every process holds whole, as under DistributedDataParallel: one all-gather of the updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dash_shampoo.parallel.carrier import Carrier, Gradients
from dash_shampoo.parallel.pieces import Weights, Wrapped, pieces_of, settle
from dash_shampoo.parallel.runs import Run
from dash_shampoo.parallel.world import World


class Replicated(Carrier):
    """Each process computes the updates of its tiles from its own gradients, which are equal, and all-gathers them."""

    def __init__(self, world: World, wire: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(world, wire, dtype, device)
        self._runs: list[tuple[Run, int, int]] = []  # with its owner and its place in the owner's buffer
        self._filled = [0] * world.size
        self._buffer: Tensor | None = None
        self._start: dict[int, int] = {}  # by run
        self._arriving: tuple[Tensor, Callable[[], None]] | None = None

    def add(self, run: Run, owner: int) -> None:
        start = self._filled[owner]
        self._runs.append((run, owner, start))
        self._start[id(run)] = start
        self._filled[owner] += run.size

    def begin(self, gradients: Gradients) -> None:
        super().begin(gradients)
        # Equal lengths let one collective do; balanced ownership keeps the padding small.
        self._buffer = torch.zeros(max(self._filled), dtype=self._wire, device=self._device)

    def deliver(self, update: Tensor, taken: Tensor, runs: Sequence[tuple[Run, Tensor]]) -> None:
        assert self._buffer is not None
        for run, blocks in runs:
            start = self._start[id(run)]
            run.as_tiles_of_rectangles(self._buffer[start : start + run.size]).copy_(run.as_tiles(blocks))

    def send(self) -> None:
        assert self._buffer is not None
        self._arriving = self._world.gather(self._buffer)

    def end(self, taken: Tensor) -> None:
        super().end(taken)
        assert self._arriving is not None
        arrived, wait = self._arriving
        wait()
        self._arriving = self._buffer = None
        wrapped = Wrapped(self._dtype)
        with Weights(wrapped) as weights:
            pieces = []
            for run, owner, start in self._runs:
                updates = arrived[owner, start : start + run.size]
                held = run.held.boxes[self._world.rank]
                pieces += pieces_of(run, updates, weights.of(run, run.box, held))
            settle(pieces, taken, self._dtype)
        wrapped.write_back()
