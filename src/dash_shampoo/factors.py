"""Factors: every left and right preconditioner of one size in one stack, with its inverse roots."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from dash_shampoo.host import to_device
from dash_shampoo.kernels import temporaries
from dash_shampoo.pairs import Folded, Packed
from dash_shampoo.roots import Eigh, Solver, inverse_root, resolve_precision, root_of_zero
from dash_shampoo.slabs import Slab, Slot
from dash_shampoo.watch import Watch


def workspace(most: int | None, device: torch.device) -> int:
    """Bytes that a stage of the step may use: ``most``, or what is fast on ``device``.

    On a CPU small temporaries stay in the caches; an accelerator wants large batches.
    """
    if most is not None:
        return most
    return 1 << 26 if device.type == "cpu" else 1 << 30


@cache
def keep_freed_memory() -> None:
    """Has the C library keep what a step frees for the next one, so that its pages are not faulted in anew each time.

    glibc gives free memory back to the system beyond twice the size of the largest block that was mapped and freed, of
    those up to 32 MiB. One block of that size, never touched, is all it takes, once; other libraries do not mind.
    """
    torch.empty((1 << 25) - (1 << 16), dtype=torch.uint8, device="cpu")


class FactorKey(NamedTuple):
    """What factors must have in common to share a stack."""

    size: int
    root: int
    solver: Solver
    damping: float
    epsilon: float
    precision: str
    max_workspace: int | None
    small: bool = False  # inverse roots in bfloat16, see `Folded`

    def needed(self, itemsize: int, device: torch.device) -> int:
        """Bytes beside the state that the inverse root of one factor takes."""
        unpacked = 2  # the factor and its root
        precision = resolve_precision(self.precision, self.solver, self.root, self.damping, device)
        stacks = unpacked + self.solver.temporaries(self.root) + temporaries(precision)
        return stacks * itemsize * self.size * (self.size + 1)

    def at_once(self, itemsize: int, device: torch.device) -> int:
        """How many inverse roots the workspace allows at a time, at least one."""
        return max(1, workspace(self.max_workspace, device) // self.needed(itemsize, device))


class Factors:
    """The factors L and R of all blocks that share a `FactorKey`, and their inverse roots.

    Attributes:
        sides: of parts of the stacks, one after another; each has a range of the n factors.
        residual: (n,) certified residual of each last root.
        failures: how many roots have been refused so far, a tensor on the factors' device.
        rescued: how many factors have been solved again by the safer route.
    """

    def __init__(
        self, key: FactorKey, slots: Sequence[Sequence[Slot]], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Makes room for factors.

        Args:
            key: that they share.
            slots: of the factors in the state, for each side.
            dtype: of the factors.
            device: of the factors.
        """
        self.key = key
        self.dtype = dtype
        self.device = device
        self._first = root_of_zero(key.root, key.epsilon)
        kept: Callable[..., Packed | Folded] = partial(Folded, first=self._first)
        if not key.small:
            lower = torch.ones(key.size, key.size, dtype=torch.bool, device=device).tril()
            kept = partial(Packed, first=self._first, lower=lower)
        starts = accumulate((sum(slot.lanes for slot in own) for own in slots), initial=0)
        self.sides = [
            Side(key, start, kept(own, key.size, dtype, device)) for own, start in zip(slots, starts, strict=False)
        ]
        flags = [slot._replace(key=f"{slot.key}_failed") for own in slots for slot in own]
        self._failed = Slab(flags, (), torch.bool, device)
        self.residual = torch.zeros(len(self._failed), dtype=dtype, device=device)
        self.failures = torch.zeros((), dtype=torch.int64, device=device)
        self.rescued = 0
        self._watch = Watch()
        self._without: set[int] | None = None

    def __len__(self) -> int:
        return len(self._failed)

    @property
    def slabs(self) -> list[Slab]:
        """The state of the factors."""
        return [*(slab for side in self.sides for slab in side.pairs.slabs), self._failed]

    @property
    def failed(self) -> Tensor:
        """Whether the solver's last root of each factor was refused by its certificate: (n,).

        The one before it stays then, and the next time an eigendecomposition stands in for the solver.
        """
        return self._failed.tensor

    def update_roots(self, lanes: Sequence[int]) -> None:
        """Recomputes the inverse roots of the factors in ``lanes``, given in their order.

        Factors whose root was refused the last time are solved again by a float64 eigendecomposition.
        """
        failed = self._read()[0]
        for some in self._at_once(lanes, self.key, self.dtype):
            ok = self._solve(some, self.key.solver, self.dtype, self.device)
            self.failed[_index(some, self.device)] = ~ok
            self.failures += (~ok).sum()
        retry = [lane for lane in lanes if failed[lane]]
        for some in self._at_once(retry, self.key._replace(solver=Eigh()), torch.float64):
            self._solve(some, Eigh(), torch.float64, with_float64(self.device))
        self.rescued += len(retry)
        self.watch()

    def without_root(self) -> set[int]:
        """The lanes whose inverse root is that of a zero factor, as their factors were up to the last renewal."""
        if self._without is None:
            self._without = {i for i, without in enumerate(self._read()[1]) if without}
        return self._without

    def watch(self) -> None:
        """Has later steps look after the factors whose root has failed, or is that of a zero factor, up to now."""
        diagonals = torch.cat([side.pairs.diagonal_of_inverse() for side in self.sides])  # (n, b)
        first = torch.full((), self._first, dtype=diagonals.dtype, device=self.device)
        self._watch.post(torch.stack([self.failed, (diagonals == first).all(dim=1)]))
        self._without = None

    def _read(self) -> list[list[bool]]:
        """What `watch` has posted last: a flag of each kind per factor."""
        return self._watch.read(wait=True) or [[False] * len(self)] * 2

    def _at_once(self, lanes: Sequence[int], key: FactorKey, dtype: torch.dtype) -> Iterator[Sequence[int]]:
        """Portions of ``lanes`` whose roots the workspace allows at a time, if they are made as ``key`` says."""
        most = key.at_once(dtype.itemsize, self.device)
        return (lanes[i : i + most] for i in range(0, len(lanes), most))

    def _solve(self, lanes: Sequence[int], solver: Solver, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Renews the inverse roots in ``lanes`` where the certificate allows it; returns where it does."""
        places = list(self._places(lanes))
        root = inverse_root(
            torch.cat([pairs.factor(own) for pairs, own, _ in places]).to(device).to(dtype),
            self.key.root,
            solver=solver,
            damping=self.key.damping,
            epsilon=self.key.epsilon,
            precision=self.key.precision,
        )
        values, good = root.value.to(self.dtype).to(self.device), root.ok.to(self.device)
        counts = [count for _, _, count in places]
        for (pairs, own, _), value, ok in zip(places, values.split(counts), good.split(counts), strict=True):
            pairs.renew(own, value, ok)
        self.residual[_index(lanes, self.device)] = root.residual.to(self.dtype).to(self.device)
        return good

    def _places(self, lanes: Sequence[int]) -> Iterator[tuple[Packed | Folded, slice | Tensor, int]]:
        """The pairs that ``lanes`` are of, each with their places among its own, and their number."""
        starts = [side.start for side in self.sides]
        for i, own in groupby(lanes, key=lambda lane: bisect_right(starts, lane) - 1):
            places = [lane - starts[i] for lane in own]
            yield self.sides[i].pairs, _index(places, self.device), len(places)


def with_float64(device: torch.device) -> torch.device:
    """Where what is on ``device`` can be computed in float64: there, or on the CPU if it has no such numbers."""
    return torch.device("cpu") if device.type == "mps" else device


def _index(lanes: Sequence[int], device: torch.device) -> slice | Tensor:
    """What picks ``lanes``, given in their order, out of a tensor: a range, if they are one."""
    if lanes[-1] - lanes[0] < len(lanes):
        return slice(lanes[0], lanes[-1] + 1)
    return to_device(lanes, torch.int64, device)


class Side(NamedTuple):
    """The factors on one side of a part's blocks."""

    key: FactorKey
    start: int  # of its lanes among those of the `Factors` of this key
    pairs: Packed | Folded

    def accumulate(self, half: Tensor, keep: Tensor) -> None:
        """factor <- keep factor + half half^T, for ``half`` (blocks, b, m) and ``keep`` (blocks, 1, 1)."""
        self.pairs.accumulate(half, keep)

    def inverse(self) -> Tensor:
        """The inverse roots: (blocks, b, b)."""
        return self.pairs.inverse()
