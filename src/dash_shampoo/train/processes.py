"""The processes that train together: who they are, and what they tell each other besides gradients.

Mistakes of the user are found by some processes and concern all: `Processes.together` raises them everywhere, so that
none waits for one that has given up.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dash_shampoo.train.errors import InputError

T = TypeVar("T")

# Signals that come this many seconds after the first are the same one: from torchrun, and from who signalled torchrun.
ECHO = 2.0
# How long a process with a mistake to report waits for the others to find it too, in seconds.
PATIENCE = 30.0


@dataclass(frozen=True)
class Processes:
    """All processes of a run, as one of them sees them. Every method is collective.

    Attributes:
        rank: of this process among all.
        size: number of processes.
        local_rank: of this process among those of its machine.
        local_size: number of processes of this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every process, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def together(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, which does nothing collective.

        Raises:
            InputError: it raised one in some process; the first one's, in every process.
        """
        if self.size == 1:
            return work()
        own = Attempt(work)
        found = self.gather(own.mistake)
        first = next((rank for rank, each in enumerate(found) if each is not None), None)
        if first is not None:
            raise InputError(f"process {first}: {found[first]}" if first else str(found[first]))
        return own.get()

    def agree(self, what: str, value: object) -> None:
        """Makes sure that ``value`` is the same in every process.

        Raises:
            InputError: it is not; in every process.
        """
        found = self.gather(value)
        other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
        if other is not None:
            raise InputError(f"processes 0 and {other} differ in {what}: every process needs the same")

    def average(self, loss: Tensor, stop: bool) -> tuple[float, bool]:
        """The mean of a loss () over the processes, and whether one of them shall ``stop``: one all-reduce for both."""
        if self.size == 1:
            return loss.item(), stop
        both = torch.stack([loss.detach().double(), torch.full_like(loss, float(stop), dtype=torch.float64)])
        dist.all_reduce(both)
        total, stops = both.tolist()
        return total / self.size, stops > 0

    def wait(self) -> None:
        """Returns when every process is here."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1))


ALONE = Processes()


def launched() -> Processes:
    """Who this process is, by the process group if there is one, or else by the environment that torchrun makes.

    Raises:
        InputError: the environment speaks of several processes, but not of all that is needed.
    """
    grouped = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if grouped else _number("WORLD_SIZE", 1)
    if size == 1:
        return ALONE
    if not dist.is_available():
        raise InputError("this torch is built without torch.distributed: it trains on one process only")
    for name in () if grouped else ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise InputError(f"WORLD_SIZE is {size} but {name} is not set: start several processes with torchrun")
    rank = dist.get_rank() if grouped else _number("RANK")
    return Processes(rank, size, _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE", size))


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} is {text!r} in the environment: start several processes with torchrun") from error


class Attempt(Generic[T]):
    """What ``work`` returns, or its InputError, kept for when the processes can tell each other."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.result: T | None = None
        self.mistake: str | None = None
        try:
            self.result = work()
        except InputError as error:
            self.mistake = str(error)

    def get(self) -> T:
        """The result; raises the InputError instead if there was one."""
        if self.mistake is not None:
            raise InputError(self.mistake)
        return self.result  # type: ignore[return-value]


@contextmanager
def join(device: str | None, timeout: float) -> Iterator[Processes]:
    """The processes of this run in a process group, which is left at the end; none is made for a single process.

    A process group that is there already is used, and stays.

    Args:
        device: that was asked for: gloo carries what is on CPUs, NCCL what is on GPUs.
        timeout: seconds that a process waits for the others before it fails.

    Raises:
        InputError: the environment is incomplete, or the processes do not find each other.
    """
    processes = launched()
    if processes.size == 1 or dist.is_initialized():
        yield processes
        return
    backend = "gloo" if (device or "").startswith("cpu") or not torch.cuda.is_available() else "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"the {processes.size} processes have not found each other: {reason}") from error
    try:
        yield processes
    except InputError:  # which all of them have raised
        _leave()
        raise
    # Other errors leave the group as it is: leaving it may wait for processes that are gone.
    processes.wait()  # torchrun ends the rest as soon as one of them fails or is interrupted
    _leave()


def _leave() -> None:
    gc.collect()  # gloo may abort a process that ends while DistributedDataParallel still holds its group
    dist.destroy_process_group()


def meet(patience: float = PATIENCE) -> bool:
    """Waits until all processes are here, with or without a process group; whether they came. For the end only.

    Who ends first makes torchrun end the others, whatever they have still to say.
    """
    from torch.distributed.rendezvous import rendezvous

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process ends of itself, with an exit code of its own
    limit = timedelta(seconds=patience)
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
        store.set(f"dash-shampoo/met/{rank}", "")
        store.wait([f"dash-shampoo/met/{each}" for each in range(size)], limit)
    except (RuntimeError, ValueError):
        return False
    return True


def pick_device(name: str | None, processes: Processes = ALONE) -> torch.device:
    """The device that was asked for, or the GPU if there is one: of several processes, each has its own.

    Raises:
        InputError: there is no such device.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if processes.size > 1:
            device = _own(device, processes)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"no device {name!r} here") from error
    return device


def _own(device: torch.device, processes: Processes) -> torch.device:
    """This process's device among those of a type."""
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise InputError(f"several processes run on cpu or cuda, not on {device.type}")
    if device.index is not None:
        raise InputError(f"each of several processes has a GPU of its own: give cuda, not {device}")
    count = torch.cuda.device_count()
    if processes.local_rank >= count:
        raise InputError(f"{processes.local_size} processes on this machine need as many GPUs, but there are {count}")
    own = torch.device("cuda", processes.local_rank)
    torch.cuda.set_device(own)
    return own


def set_threads(threads: int | None, processes: Processes) -> None:
    """Sets the CPU threads of this process: as many as asked for, or its share of the machine's if there are several.

    torchrun sets OMP_NUM_THREADS to 1 where nobody has set it, so it says nothing of what is wanted.
    """
    if threads is None and processes.size > 1:
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, usable // processes.local_size)
    if threads is not None:
        torch.set_num_threads(threads)


@contextmanager
def interruptible(processes: Processes) -> Iterator[list[int]]:
    """A list that SIGINT or SIGTERM adds itself to, so that the loop ends after its step; a second one acts at once.

    With several processes the second must come `ECHO` seconds later.
    """
    received: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(each) for each in signals]
    first = 0.0

    def restore() -> None:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)

    def receive(number: int, _: object) -> None:
        nonlocal first
        now = time.monotonic()
        if not received:
            first = now
            received.append(number)
            if processes.size == 1:
                restore()
        elif now - first > ECHO:
            restore()
            signal.raise_signal(number)

    for each in signals:
        signal.signal(each, receive)
    try:
        yield received
    finally:
        restore()
