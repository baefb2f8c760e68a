"""What the processes of the tests do: a step of Dash, with all that it keeps, sends and holds counted."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dash_shampoo import Dash, param_groups
from dash_shampoo.parallel.world import World
from dash_shampoo.plan.tiles import KINDS
from dash_shampoo.train.llama import Llama, LlamaConfig
from tests.parallel import jobs
from tests.test_memory import Live

LLAMA = LlamaConfig(layers=2, width=48, heads=4, hidden=80, context=8, vocabulary=66, kv_heads=2)


def make_model(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small model: "llama", or that of the tests of parallel steps."""
    torch.manual_seed(7)
    return (Llama(LLAMA) if kind == "llama" else jobs.Model()).to(dtype)


def measured(kind: str, strategy: str, options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A step's state by kind, bytes to and from other processes by collective, and peak of new memory."""
    model = jobs.prepare(make_model(kind, dtype), strategy)
    optimizer = Dash(param_groups(model), **options)
    for step in range(2):  # the first makes the state
        jobs.give(model, step)
        gc.collect()
        with Counted() as wire, Live() as live:
            optimizer.step()
    return {"state": state_bytes(optimizer), "wire": wire.bytes, "peak": live.peak}


def state_bytes(optimizer: Dash) -> dict[str, int]:
    """Bytes of this process's state, by kind."""
    found = dict.fromkeys(KINDS.values(), 0)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                found[KINDS.get(name.partition(".")[2], "numbers")] += value.nbytes
    return found


class Counted:
    """Counts the bytes of collectives inside, by what travels and which way, from their arguments."""

    def __init__(self) -> None:
        self.bytes: dict[str, float] = {}
        self._patches = [
            mock.patch.object(World, name, _calling(getattr(World, name), getattr(self, name)))
            for name in ("sum", "gather", "exchange")
        ]

    def __enter__(self) -> Counted:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def sum(self, world: World, values: Tensor) -> None:
        each = 2 * (world.size - 1) / world.size * values.nbytes
        self._add("survey", each, each)

    def gather(self, world: World, values: Tensor) -> None:
        each = (world.size - 1) * values.nbytes
        self._add("updates", each, each)

    def exchange(self, world: World, values: Tensor, sent: Sequence[int], received: Sequence[int], what: str) -> None:
        assert sum(sent) == len(values)
        size, me = values.itemsize, dist.get_rank()
        self._add(what.removeprefix("the "), (sum(sent) - sent[me]) * size, (sum(received) - received[me]) * size)

    def _add(self, what: str, sent: float, received: float) -> None:
        for way, count in (("sent", sent), ("received", received)):
            self.bytes[f"wire/{what}/{way}"] = self.bytes.get(f"wire/{what}/{way}", 0) + count


def _calling(method: Any, before: Any) -> Any:
    def called(*arguments: Any) -> Any:
        before(*arguments)
        return method(*arguments)

    return called
