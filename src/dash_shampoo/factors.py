"""Factors: every left and right preconditioner of one size in one stack, with its inverse roots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dash_shampoo.kernels import temporaries
from dash_shampoo.pairs import Folded, Packed
from dash_shampoo.roots import Eigh, Solver, inverse_root, resolve_precision
from dash_shampoo.slabs import Slab, Slot
from dash_shampoo.watch import Watch


def workspace(most: int | None, device: torch.device) -> int:
    """Bytes that a stage of the step may use: ``most``, or what is fast on ``device``.

    On a CPU small temporaries stay in the caches; an accelerator wants large batches.
    """
    if most is not None:
        return most
    return 1 << 26 if device.type == "cpu" else 1 << 30


def keep_freed_memory() -> None:
    """Has the C library keep what a step frees for the next one, so that its pages are not faulted in anew each time.

    glibc gives free memory back to the system beyond twice the size of the largest block that was mapped and freed, of
    those up to 32 MiB. One block of that size, never touched, is all it takes; other libraries do not mind.
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
        pairs: the n factors (zero at first) and inverse roots (the identity until the first `update_roots`).
        residual: (n,) certified residual of each last root.
        failures: how many roots have been refused so far, a tensor on the factors' device.
        rescued: how many factors have been solved again by the safer route.
    """

    def __init__(self, key: FactorKey, slots: Sequence[Slot], dtype: torch.dtype, device: torch.device) -> None:
        self.key = key
        self.dtype = dtype
        self.device = device
        kept = Folded if key.small else Packed
        self.pairs: Packed | Folded = kept(slots, key.size, dtype, device)
        self._failed = Slab([slot._replace(key=f"{slot.key}_failed") for slot in slots], (), torch.bool, device)
        self.residual = torch.zeros(len(self._failed), dtype=dtype, device=device)
        self.failures = torch.zeros((), dtype=torch.int64, device=device)
        self.rescued = 0
        self._watch = Watch()

    def __len__(self) -> int:
        return len(self._failed)

    @property
    def slabs(self) -> list[Slab]:
        """The state of the factors."""
        return [*self.pairs.slabs, self._failed]

    @property
    def failed(self) -> Tensor:
        """Whether the solver's last root of each factor was refused by its certificate: (n,).

        The one before it stays then, and the next time an eigendecomposition stands in for the solver.
        """
        return self._failed.tensor

    def update_roots(self, lanes: Tensor | None) -> None:
        """Recomputes the inverse roots of the factors in ``lanes`` (indices), or of all of them for ``None``.

        Factors whose root was refused the last time are solved again by a float64 eigendecomposition.
        """
        n = len(self)
        most = self.key.at_once(self.dtype.itemsize, self.device)
        retry = [i for i, failed in enumerate(self._watch.read(wait=True) or ()) if failed]
        ranges = (slice(i, min(i + most, n)) for i in range(0, n, most))
        for some in ranges if lanes is None else lanes.split(most):
            ok = self._solve(some, self.key.solver, self.dtype)
            self.failed[some] = ~ok
            self.failures += (~ok).sum()
        if retry and lanes is not None:
            retry = sorted(set(retry) & set(lanes.tolist()))
        for i in retry:
            self._solve(slice(i, i + 1), Eigh(), torch.float64)
        self.rescued += len(retry)
        self.watch()

    def watch(self) -> None:
        """Has the next `update_roots` look after the factors that have failed up to now."""
        self._watch.post(self.failed)

    def _solve(self, lanes: slice | Tensor, solver: Solver, dtype: torch.dtype) -> Tensor:
        """Renews the inverse roots in ``lanes`` where the certificate allows it; returns where it does."""
        root = inverse_root(
            self.pairs.factor(lanes).to(dtype),
            self.key.root,
            solver=solver,
            damping=self.key.damping,
            epsilon=self.key.epsilon,
            precision=self.key.precision,
        )
        self.pairs.renew(lanes, root.value, root.ok)
        self.residual[lanes] = root.residual.to(self.dtype)
        return root.ok


class Side(NamedTuple):
    """The factors on one side of a stack's blocks."""

    factors: Factors
    lanes: slice

    def part(self, lanes: slice) -> Side:
        """The side of a range of the stack's blocks."""
        start = self.lanes.start
        return Side(self.factors, slice(start + lanes.start, start + lanes.stop))

    def accumulate(self, half: Tensor, keep: Tensor) -> None:
        """factor <- keep factor + half half^T, for ``half`` (blocks, b, m) and ``keep`` (blocks, 1, 1)."""
        self.factors.pairs.accumulate(self.lanes, half, keep)

    def inverse(self) -> Tensor:
        """The inverse roots: (blocks, b, b)."""
        return self.factors.pairs.inverse(self.lanes)
