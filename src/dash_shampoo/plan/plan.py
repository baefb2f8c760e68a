"""The plan: what each rank owns, keeps, computes and sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dash_shampoo.parallel.census import report_length
from dash_shampoo.parallel.ownership import assign
from dash_shampoo.plan.arrays import Real, Whole
from dash_shampoo.plan.host import host_seconds
from dash_shampoo.plan.ranks import Ranks
from dash_shampoo.plan.seconds import Rates, exchange_seconds, stage_seconds
from dash_shampoo.plan.tiles import STAGES, Tiles
from dash_shampoo.plan.traffic import Traffic, busiest, per_rank, traffic
from dash_shampoo.plan.workspace import peak


@dataclass(frozen=True)
class Plan:
    """What Dash takes on every rank.

    Attributes:
        ranks: and how they hold the parameters.
        amounts: by name, (ranks,) each: those of `plan.tiles.Cut`; "state", "workspace" and "memory" in bytes;
            "wire/WHAT/sent" and "wire/WHAT/received" in bytes for "gradients", "updates" and "survey", and "wire/sent"
            and "wire/received" in all; "cost" in FLOPs, as ownership counts them; "seconds/STAGE", "seconds/exchange",
            "seconds/host" of the calls, "seconds" of a step on average, and "seconds/longest step". What is due is that
            of the step with the most.
    """

    ranks: Ranks
    amounts: dict[str, Real]

    @property
    def balance(self) -> float:
        """The largest modelled cost of a rank over their mean."""
        return imbalance(self.amounts["cost"])

    @property
    def memory(self) -> float:
        """Bytes of state and workspace on the rank that needs most."""
        return float(self.amounts["memory"].max())

    @property
    def seconds(self) -> float:
        """Seconds of a step on average: of the slowest rank, as the others wait for it."""
        return float(self.amounts["seconds"].max())

    def as_json(self) -> dict[str, Any]:
        """Every amount: in total over the ranks, largest, mean, smallest, and of each rank."""
        return {name: {**summary(values), "ranks": plain(values)} for name, values in self.amounts.items()}


def imbalance(values: Real) -> float:
    """The largest over the mean; 1 where there is nothing."""
    mean = float(values.mean())
    return float(values.max()) / mean if mean else 1.0


def summary(values: Real) -> dict[str, float]:
    """Total, largest, mean and smallest."""
    return {
        "total": float(values.sum()),
        "max": float(values.max()),
        "mean": float(values.mean()),
        "min": float(values.min()),
    }


def plain(values: Real) -> list[float | int]:
    """Values for JSON, whole numbers as such."""
    if np.all(values == np.floor(values)) and np.all(np.abs(values) < 2**53):
        return [int(value) for value in values]
    return [float(value) for value in values]


def own(tiles: Tiles, ranks: Ranks, device: torch.device) -> tuple[Whole, Real]:
    """Who owns each tile, as in a run, and the modelled cost of each rank."""
    loads = [0.0] * ranks.size
    owners = assign(tiles.costs, loads, tiles.turns(device).tolist())
    return np.array(owners, np.int64), np.array(loads)


def make(
    tiles: Tiles,
    owned: tuple[Whole, Real],
    ranks: Ranks,
    rates: Rates,
    *,
    wire: torch.dtype | None = None,
    device: torch.device,
) -> Plan:
    """The plan of a step.

    Args:
        tiles: of all parameters.
        owned: what `own` says of them.
        ranks: and how they hold the parameters.
        rates: of the device.
        wire: dtype in which updates travel, ``None`` for that of the state.
        device: that computes: its type decides how large the workspace is.
    """
    owners, loads = owned
    size = tiles.size
    narrow = size if wire is None else wire.itemsize
    amounts = {name: per_rank(owners, tiles.amount(name), ranks) for name in tiles.names()}
    turns = tiles.turns(device)
    for name in ("flops/roots due", "traffic/roots due"):
        amounts[name] = busiest(owners, turns, tiles.every, tiles.amount(name), ranks)
    # Every rank has two counters for each parameter: of its steps, and of those that it skipped (int64).
    amounts["state/numbers"] += len(tiles.cuts) * (size + 8)
    amounts["state"] = _sum(amounts, "state/")
    buffers = traffic(tiles, owners, ranks)
    amounts["workspace"] = peak(tiles, owners, ranks, buffers, narrow, device).astype(np.float64)
    amounts["memory"] = amounts["state"] + amounts["workspace"]
    amounts["flops"] = sum((amounts[f"flops/{stage}"] for stage in STAGES), np.zeros(ranks.size))
    on_wire = wire_bytes(buffers, ranks, len(tiles.cuts), Sizes(size, tiles.gradient_size, narrow))
    amounts |= on_wire
    for way in ("sent", "received"):
        amounts[f"wire/{way}"] = sum((on_wire[name] for name in on_wire if name.endswith(way)), np.zeros(ranks.size))
    amounts["cost"] = loads if ranks.size > 1 else np.array([sum(tiles.costs)])
    seconds = stage_seconds(amounts, rates)
    due = seconds.pop("roots due")
    exchange = exchange_seconds(on_wire, buffers, ranks, size, rates)
    amounts |= {f"seconds/{stage}": each for stage, each in seconds.items()}
    amounts["seconds/exchange"] = exchange
    computing = _sum(amounts, "seconds/")
    host = amounts["seconds/host"] = host_seconds(tiles, owners, ranks, device)
    amounts["seconds"] = np.maximum(computing, host)
    amounts["seconds/longest step"] = np.maximum(computing - seconds["roots"] + due, host)
    return Plan(ranks, amounts)


class Sizes(NamedTuple):
    """Bytes of an element."""

    state: int
    gradient: int
    update: int


def wire_bytes(buffers: Traffic, ranks: Ranks, parameters: int, sizes: Sizes) -> dict[str, Real]:
    """Bytes that each rank sends to others and receives from them: (ranks,) each.

    All-gathers and all-reduces are counted as rings, which take the fewest bytes: n - 1 buffers of every other rank,
    and 2 (n - 1) / n of the buffer. What a rank sends to itself does not count.

    Args:
        buffers: of the exchange.
        ranks: and how they hold the parameters.
        parameters: how many there are: what a census says of them is summed over the ranks.
        sizes: of elements on their way.
    """
    others = ranks.size - 1
    leaves = buffers.updates_out * others if ranks.replicated else buffers.updates_out - buffers.stays
    updates = [leaves * sizes.update, (buffers.updates_in - buffers.stays) * sizes.update]
    gradients = [np.zeros(ranks.size, np.int64)] * 2
    if not ranks.replicated:
        both_ways = buffers.gradients_out, buffers.gradients_in
        gradients = [(buffer - buffers.stays) * sizes.gradient for buffer in both_ways]
    survey = np.full(ranks.size, 2 * others / ranks.size * report_length(parameters) * sizes.state)
    named = {"gradients": gradients, "updates": updates, "survey": [survey, survey]}
    return {
        f"wire/{what}/{way}": values.astype(np.float64)
        for what, both in named.items()
        for way, values in zip(("sent", "received"), both, strict=True)
    }


def _sum(amounts: dict[str, Real], prefix: str) -> Real:
    return np.sum([values for name, values in amounts.items() if name.startswith(prefix)], axis=0)
