"""What the processes of a world tell each other about a step before they take it, in one all-reduce."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dash_shampoo.host import to_device
from dash_shampoo.parallel.boxes import Placement
from dash_shampoo.parallel.world import World
from dash_shampoo.watch import Watch

# Of a digest of the options. A sum over processes says of each bit whether they agree, exactly, whatever the dtype.
BITS = 32
# Replicas' gradients may differ by rounding alone. Norms are compared by their standard deviation over the processes,
# relative to their root mean square: a bit of bfloat16 is 0.4 %, and batches of their own give tens of per cent.
SPREAD = 0.02
# Gradients this much smaller than the largest of all may consist of rounding errors, which differ.
NEGLIGIBLE = 1e-3


def report_length(parameters: int) -> int:
    """How many numbers a `Census` of so many parameters sums over the processes."""
    return 3 * parameters + BITS + 1


class Survey(NamedTuple):
    """What is known of the gradients at a step, the same on every process: each (p,), per parameter of a bank."""

    present: Tensor  # whether there is one
    whole: Tensor  # whether all processes have one that must
    good: Tensor  # whether it is whole and finite
    nonzero: Tensor  # whether its norm is not zero, nor underflows


class Findings(NamedTuple):
    """What a survey has brought to light, alike on every process."""

    differing: list[bool]  # whether the norm of a replicated gradient differs between processes, per parameter
    options: bool  # whether options differ
    alone: bool  # whether some processes only have come to arrange their stacks anew


class Census:
    """Finds out which gradients are there, and whether the processes are as alike as they must be.

    A report of each process is summed: a 1 for each gradient, its squared norm over the number of copies and its norm
    over the number of processes (p,), the bits of the options' digest, and a 1 if it arranges its stacks anew.

    Args:
        world: the processes.
        held: how they hold each parameter.
        dtype: of the report.
        device: of the report.
    """

    def __init__(self, world: World, held: Sequence[Placement], dtype: torch.dtype, device: torch.device) -> None:
        self.world = world
        copies = [each.number_of_copies for each in held]
        whole = [each.replicated for each in held]
        self._copies = torch.tensor(copies, dtype=dtype, device=device)
        self._needed = torch.tensor([world.size if each else 1 for each in whole], dtype=dtype, device=device)
        self._replicated = torch.tensor([each and world.size > 1 for each in whole], device=device)
        self._everything = torch.ones(len(held), dtype=torch.bool, device=device)
        self._options: tuple[str, Tensor] | None = None
        self._came: list[bool] = []
        self._found: list[bool] | None = None
        self._watch = Watch()

    def take(self, gradients: Sequence[Tensor | None], options: str, rates: Sequence[Tensor] = ()) -> Survey:
        """Surveys a step's gradients.

        A gradient whose squared Frobenius norm overflows the dtype counts as not finite: its factors would. So does one
        of a replicated parameter that is missing on some processes; of a sharded one, missing parts are zero.

        Args:
            gradients: what this process holds of each.
            options: all options, in words that are the same on every process.
            rates: further ones, on the device.
        """
        self._came = [gradient is not None for gradient in gradients]
        present, own = self._norms([gradient for gradient in gradients if gradient is not None])
        if self.world.size == 1:
            return Survey(present, present, present & (own * own < math.inf), own > 0)
        report = self._blank()
        came, squares, norms, bits, _ = self._parts(report)
        came.copy_(present)
        squares.copy_(own * own / self._copies)
        norms.copy_(own / self.world.size)
        bits.copy_(self._digest(options))
        for i, rate in enumerate(rates):
            bits.copy_((bits + _bits_of(rate).roll(i).to(bits.device)) % 2)
        self._exchange(report)
        whole = came >= self._needed
        return Survey(came > 0, whole, whole & (squares < math.inf), norms > 0)

    def _norms(self, there: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Which gradients this process has, and their norms, 0 for the others: each (p,)."""
        if not there:
            return self._everything.logical_not(), torch.zeros_like(self._copies)
        own = torch.stack(torch._foreach_norm(there, 2, dtype=self._copies.dtype))
        if len(there) == len(self._came):
            return self._everything, own
        places = to_device((i for i, came in enumerate(self._came) if came), torch.int64, own.device)
        present = torch.zeros_like(self._everything).index_fill_(0, places, 1)
        return present, torch.zeros_like(self._copies).index_copy_(0, places, own)

    def announce(self) -> bool:
        """Tells the others, in the place of a survey, that this process arranges its stacks anew; whether all do."""
        report = self._blank()
        *_, arranging = self._parts(report)
        arranging.fill_(1)
        self._exchange(report)
        return int(arranging) == self.world.size

    def came(self) -> list[bool]:
        """Which gradients were there at the last survey; asked again, none were. Waits for that survey."""
        came, self._came = self._came, []
        if came and self.world.size > 1:
            came = self._read()[: len(came)]
        return came or [False] * len(self._copies)

    def findings(self) -> Findings | None:
        """What the last survey has found, ``None`` without one. Waits for it."""
        if self.world.size == 1 or not (read := self._read()):
            return None
        *differing, options, alone = read[len(self._copies) :]
        return Findings(differing, options, alone)

    def forget(self) -> None:
        """Leaves the step that `take` has begun."""
        self._came = []

    def _blank(self) -> Tensor:
        return self._copies.new_zeros(report_length(len(self._copies)))

    def _parts(self, report: Tensor) -> tuple[Tensor, ...]:
        return report.split((*[len(self._copies)] * 3, BITS, 1))

    def _exchange(self, report: Tensor) -> None:
        if self.world.size == 1:
            return
        self.world.sum(report)
        came, squares, norms, bits, arranging = self._parts(report)
        size = self.world.size
        whole = self._replicated & (came == size)
        differing = differ(torch.where(whole, squares, 0), norms)
        options = ((bits > 0) & (bits < size)).any() & (arranging == 0)
        self._watch.post(torch.cat([came > 0, differing, options.view(1), (arranging > 0) & (arranging < size)]))
        self._found = None

    def _read(self) -> list[bool]:
        if self._found is None:
            self._found = self._watch.read(wait=True) or []
        return self._found

    def _digest(self, options: str) -> Tensor:
        if self._options is None or self._options[0] != options:
            digest = int.from_bytes(hashlib.sha256(options.encode()).digest()[: BITS // 8], "big")
            bits = (digest >> i & 1 for i in range(BITS))
            self._options = options, to_device(bits, self._copies.dtype, self._copies.device)
        return self._options[1]


def differ(squares: Tensor, norms: Tensor) -> Tensor:
    """Whether values differ between processes by more than rounding, by the means (p,) of their squares and of them."""
    spread = 1 - norms.square() / squares  # not a number without a gradient, or with one that is not finite
    tiny = torch.finfo(squares.dtype).tiny / torch.finfo(squares.dtype).eps
    enough = (squares > NEGLIGIBLE**2 * squares.max()) & (squares > tiny)
    return (spread > SPREAD**2) & enough


def _bits_of(rate: Tensor) -> Tensor:
    """The bits of a number in single precision."""
    words = rate.detach().reshape(1).to(torch.float32).view(torch.int32)
    return words >> torch.arange(BITS, device=rate.device) & 1
