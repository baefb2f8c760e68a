"""The processes that hold a parameter together, and what they tell each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dash_shampoo.parallel.boxes import is_distributed

# Its older name is deprecated from torch 2.13 on.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

Group = Any  # dist.ProcessGroup, which exists only where torch is built with distribution


class World:
    """A group of processes. Every call but those of properties is collective.

    Args:
        group: a process group, or ``None`` for this process alone.
    """

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self.ranks: tuple[int, ...] = (0,) if group is None else tuple(dist.get_process_group_ranks(group))
        self.rank: int = 0 if group is None else dist.get_rank(group)

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.ranks)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over the processes, in place."""
        if self.size > 1:
            self._call("the gradients' norms", lambda: dist.all_reduce(values, group=self._group))
        return values

    def gather(self, values: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """The ``values`` (n,) of every process, (size, n), once the function that comes with them has returned."""
        out = values.new_empty(self.size * len(values))
        work = self._call("the updates", lambda: _all_gather(out, values, group=self._group, async_op=True))
        return out.view(self.size, -1), lambda: self._call("the updates", work.wait)

    def exchange(
        self, values: Tensor, sent: Sequence[int], received: Sequence[int], what: str
    ) -> tuple[Tensor, Callable[[], None]]:
        """Sends each process its share of ``values``; what has come, once the function beside it has returned.

        Args:
            values: one-dimensional, for each process in turn.
            sent: how many of them are for each process.
            received: how many come from each.
            what: is on the way, for messages.
        """
        out = values.new_empty(sum(received))
        work = self._call(
            what,
            lambda: dist.all_to_all_single(out, values, list(received), list(sent), group=self._group, async_op=True),
        )
        return out, lambda: self._call(what, work.wait)

    def agree(self, text: str, device: torch.device) -> bool:
        """Whether ``text`` is the same in every process."""
        if self.size == 1:
            return True
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        own = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
        self._call("a comparison", lambda: dist.all_reduce(own, dist.ReduceOp.MAX, group=self._group))
        return int(own[0]) == digest and int(own[1]) == -digest

    def collect(self, value: Any, to: int | None) -> list[Any] | None:
        """The objects of every process, at the one with the rank ``to`` or at all; ``None`` at the others."""
        if self.size == 1:
            return [value]
        if to is None:
            everything: list[Any] = [None] * self.size
            self._call("the state", lambda: dist.all_gather_object(everything, value, group=self._group))
            return everything
        found: list[Any] | None = [None] * self.size if self.rank == to else None
        destination = self.ranks[to]
        self._call("the state", lambda: dist.gather_object(value, found, dst=destination, group=self._group))
        return found

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RuntimeError(
                f"process {self.rank} of {self.size} could not exchange {what}: another process has stopped, is "
                "stuck, or makes other calls than this one. Look for the first error of the other processes, and "
                f"start again from the last checkpoint ({reason})"
            ) from error


ALONE = World(None)


class Worlds:
    """The world of each parameter: found once, since making process groups is collective.

    Args:
        process_group: of plain tensors: "auto" for the default group of `torch.distributed`, if there is one when it
            is first asked for; ``None`` if each process has parameters of its own; or a group.
    """

    def __init__(self, process_group: Group | Literal["auto"] | None) -> None:
        self._process_group = process_group
        self._found: dict[Any, World] = {}  # by mesh; under None that of plain tensors

    def of(self, parameter: Any) -> World:
        """The processes that hold ``parameter``."""
        mesh = parameter.device_mesh if is_distributed(parameter) else None
        if mesh not in self._found:
            self._found[mesh] = self._plain() if mesh is None else self._of_mesh(mesh)
        return self._found[mesh]

    def _plain(self) -> World:
        group = self._process_group
        if group == "auto":
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is None or dist.get_world_size(group) == 1:
            return ALONE
        return self._known(tuple(dist.get_process_group_ranks(group))) or World(group)

    def _of_mesh(self, mesh: Any) -> World:
        ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        if len(ranks) == 1:
            return ALONE
        if ranks == tuple(range(dist.get_world_size())):
            return self._known(ranks) or World(dist.group.WORLD)
        return self._known(ranks) or World(dist.new_group(list(ranks), use_local_synchronization=True))

    def _known(self, ranks: tuple[int, ...]) -> World | None:
        return next((world for world in self._found.values() if world.ranks == ranks and world is not ALONE), None)
