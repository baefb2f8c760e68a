"""Processes, and how they hold the parameters under each strategy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dash_shampoo.plan.arrays import Whole
from dash_shampoo.train.errors import InputError, choose
from dash_shampoo.train.settings import STRATEGIES as SEVERAL

STRATEGIES = ("alone", *SEVERAL)


class Ranks(NamedTuple):
    """A number of processes.

    Attributes:
        size: number of processes.
        copies: how often the parameters are there: ``size`` times under DistributedDataParallel, once under
            `fully_shard`. Each copy is cut over size / copies consecutive processes.
    """

    size: int
    copies: int

    @property
    def shards(self) -> int:
        """Processes that hold a copy together."""
        return self.size // self.copies

    @property
    def replicated(self) -> bool:
        """Whether every process holds the parameters whole."""
        return self.shards == 1

    def bounds(self, rows: int) -> Whole:
        """Rows of a parameter at which shards begin and end, as `torch.chunk` cuts them: (shards + 1,)."""
        return np.minimum(np.arange(self.shards + 1) * -(-rows // self.shards), rows)


def ranks(strategy: str, size: int, replicas: int | None) -> Ranks:
    """The processes of a strategy.

    Args:
        strategy: one of `STRATEGIES`.
        size: number of processes.
        replicas: copies of the parameters, for "hsdp" alone.

    Raises:
        InputError: there is no such strategy, or the numbers do not fit it.
    """
    choose("strategy", strategy, STRATEGIES)
    if size < 1:
        raise InputError(f"--world-size must be at least 1, not {size}")
    if strategy == "alone" and size > 1:
        raise InputError(f"the strategy 'alone' is one process: choose ddp, fsdp or hsdp for {size}")
    if strategy != "hsdp" and replicas is not None:
        raise InputError(f"--replicas is for the strategy 'hsdp', not for {strategy!r}")
    if strategy == "hsdp":
        if replicas is None:
            raise InputError("the strategy 'hsdp' needs --replicas, the number of copies of the parameters")
        if replicas < 1 or size % replicas:
            raise InputError(f"{size} processes do not divide into {replicas} replicas")
        return Ranks(size, replicas)
    return Ranks(size, 1 if strategy == "fsdp" else size)
