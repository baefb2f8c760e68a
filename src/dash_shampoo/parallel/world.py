"""The processes that hold a parameter together, and what they tell each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dash_shampoo.parallel.boxes import is_distributed

# Its older name is deprecated from torch 2.13 on.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

Group = Any  # dist.ProcessGroup, which exists only where torch is built with distribution


class Processes(NamedTuple):
    """Which processes make a world, in plain values, so that an optimizer can be pickled.

    Attributes:
        ranks: in the default group.
        backend: in which they talk.
        timeout: of their calls; ``None`` is the backend's own.
    """

    ranks: tuple[int, ...]
    backend: str
    timeout: timedelta | None


Choice = Processes | Literal["auto"] | None


def choice(process_group: Group | Literal["auto"] | None) -> Choice:
    """What `Dash` was told of the processes that hold replicas, in plain values."""
    return process_group if process_group in ("auto", None) else processes_of(process_group)


def processes_of(group: Group) -> Processes:
    """The processes of a group."""
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    return Processes(ranks, dist.get_backend_config(group), _timeout(group))


def _timeout(group: Group) -> timedelta | None:
    """What `init_process_group` or `new_group` was told; torch has no public way to ask."""
    for device in group._device_types:
        found: timedelta | None = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if found is not None:
            return found
    return None


# Of Dash's own: calls in the group of DistributedDataParallel would meet its calls where a process leaves out a step,
# which kills processes. Groups cost connections and memory, so all optimizers of a process share them. By the default
# group of their time; torch alone keeps them alive, so that they end when it destroys them.
_groups: WeakKeyDictionary[Group, WeakValueDictionary[Processes, Group]] = WeakKeyDictionary()


def _group_of(processes: Processes) -> Group:
    """A group for these processes; collective where there was none."""
    known = _groups.setdefault(dist.group.WORLD, WeakValueDictionary())
    group = known.get(processes)
    if group is None:
        ranks, backend, timeout = processes
        some = len(ranks) < dist.get_world_size()
        group = known[processes] = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, use_local_synchronization=some, group_desc="dash_shampoo"
        )
    return group


class World:
    """A group of processes. Every call but those of properties is collective.

    Args:
        processes: those of the world, or ``None`` for this process alone.
    """

    def __init__(self, processes: Processes | None) -> None:
        self._processes = processes
        self.ranks: tuple[int, ...] = (0,) if processes is None else processes.ranks
        self.rank: int = 0 if processes is None else self.ranks.index(dist.get_rank())

    @property
    def _group(self) -> Group:
        assert self._processes is not None
        return _group_of(self._processes)

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
                "stuck, or makes other calls than this one, as if it has left out a step() or ended its epoch early. "
                f"Look for the first error of the other processes, and start again from the last checkpoint ({reason})"
            ) from error


ALONE = World(None)


class Worlds:
    """The world of each parameter.

    Args:
        process_group: of plain tensors: "auto" for the default group of `torch.distributed`, if there is one when it
            is first asked for; ``None`` if each process has parameters of its own; or a group.
    """

    def __init__(self, process_group: Group | Literal["auto"] | None) -> None:
        self._choice = choice(process_group)
        self._choices: dict[Any, Choice] = {}  # of parameters whose group has one of its own
        self._found: dict[Any, World] = {}  # by mesh, or choice

    def __getstate__(self) -> dict[str, Any]:
        return {"_choice": self._choice, "_choices": self._choices, "_found": {}}

    def choose(self, parameters: Iterable[Any], process_group: Group | Literal["auto"] | None) -> None:
        """Gives plain tensors another ``process_group`` than all others."""
        self._choices.update(dict.fromkeys(parameters, choice(process_group)))

    def of(self, parameter: Any) -> World:
        """The processes that hold ``parameter``."""
        key = parameter.device_mesh if is_distributed(parameter) else self._choices.get(parameter, self._choice)
        if key not in self._found:
            processes = _of_mesh(key) if is_distributed(parameter) else _chosen(key)
            self._found[key] = ALONE if processes is None or len(processes.ranks) == 1 else self._world(processes)
        return self._found[key]

    def _world(self, processes: Processes) -> World:
        known = (world for world in self._found.values() if world is not ALONE and world.ranks == processes.ranks)
        return next(known, None) or World(processes)


def _chosen(choice: Choice) -> Processes | None:
    if choice != "auto":
        return choice
    return processes_of(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else None


def _of_mesh(mesh: Any) -> Processes:
    return processes_of(dist.group.WORLD)._replace(ranks=tuple(sorted(mesh.mesh.flatten().tolist())))
