"""An estimate of a step's time: its work at a share of the device's peak rates, one stage after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dash_shampoo.plan.arrays import Real
from dash_shampoo.plan.devices import Device
from dash_shampoo.plan.products import Pace, of_factors, of_updates
from dash_shampoo.plan.ranks import Ranks
from dash_shampoo.plan.tiles import STAGES
from dash_shampoo.plan.traffic import Traffic

# How often each element that a rank holds is read or written where updates come from other processes: its gradient's
# norm, its update, and its weight twice.
HELD_PASSES = 4
# A copy into or out of a buffer reads and writes.
COPY_PASSES = 2


class Rates(NamedTuple):
    """What to reckon with.

    Attributes:
        device: with its peak rates.
        efficiency: the share of them that is reached.
        roots: the pace of inverse roots; ``None`` for products in true float32.
    """

    device: Device
    efficiency: float
    roots: Pace | None = None

    def pace(self, stage: str) -> Pace:
        """The pace of a stage."""
        if stage.startswith("roots"):
            return self.roots or Pace(self.device.fp32)
        return of_factors(self.device) if stage == "factors" else of_updates(self.device)


def stage_seconds(amounts: Mapping[str, Real], rates: Rates) -> dict[str, Real]:
    """Seconds of each stage of Dash on average, and of the "roots due" at the step with the most: (ranks,) each.

    Each is bound by its products or by the memory.

    Args:
        amounts: "flops/STAGE" and "traffic/STAGE", (ranks,) each.
        rates: of the device.
    """
    found = {}
    for stage in (*STAGES, "roots due"):
        pace = rates.pace(stage)
        moved = amounts[f"traffic/{stage}"] * pace.traffic / rates.device.memory
        found[stage] = np.maximum(amounts[f"flops/{stage}"] / pace.products, moved) / rates.efficiency
    return found


def exchange_seconds(wire: Mapping[str, Real], buffers: Traffic, ranks: Ranks, size: int, rates: Rates) -> Real:
    """Seconds of the collectives, and of moving what they bring: (ranks,).

    Args:
        wire: bytes that each rank sends and receives, (ranks,) each.
        buffers: of the exchange, in elements.
        ranks: and how they hold the parameters.
        size: bytes of an element of the state.
        rates: of the device.
    """
    if ranks.size == 1:
        return np.zeros(1)
    passes = HELD_PASSES * buffers.held
    if not ranks.replicated:
        passes = passes + COPY_PASSES * (buffers.gradients_out + buffers.gradients_in + buffers.updates_out)
    busy = np.zeros(ranks.size)
    for name in {name.rpartition("/")[0] for name in wire}:
        busy += np.maximum(wire[f"{name}/sent"], wire[f"{name}/received"])
    bandwidth = rates.device.wire(ranks.size) * rates.efficiency
    return passes * size / (rates.device.memory * rates.efficiency) + busy / bandwidth
