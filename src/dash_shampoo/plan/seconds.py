"""An estimate of a step's time: its work at a share of the device's peak rates, one stage after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dash_shampoo.plan.arrays import Real
from dash_shampoo.plan.devices import Device
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
        precision: of the products that make roots.
        tf32: whether torch is told to multiply float32 matrices in TF32, which decides all other products.
    """

    device: Device
    efficiency: float
    precision: str = "fp32"
    tf32: bool = False

    def work(self, flops: Real, traffic: Real, precision: str) -> Real:
        """Seconds of work that is bound by its products or by the memory."""
        seconds = np.maximum(flops / self.device.product(precision), traffic / self.device.memory)
        return seconds / self.efficiency


def stage_seconds(amounts: Mapping[str, Real], rates: Rates) -> dict[str, Real]:
    """Seconds of each stage of Dash on average, and of the "roots due" at the step with the most: (ranks,) each.

    Args:
        amounts: "flops/STAGE" and "traffic/STAGE", (ranks,) each.
        rates: of the device.
    """
    found = {}
    for stage in (*STAGES, "roots due"):
        precision = rates.precision if stage.startswith("roots") else "tf32" if rates.tf32 else "fp32"
        found[stage] = rates.work(amounts[f"flops/{stage}"], amounts[f"traffic/{stage}"], precision)
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
