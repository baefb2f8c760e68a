"""How long the host is busy with the calls of a step: where the device is faster than that, it waits for them."""

from __future__ import annotations

import numpy as np
import torch

from dash_shampoo.factors import FactorKey, workspace
from dash_shampoo.parallel.cost import root_products
from dash_shampoo.plan.arrays import Real, Whole
from dash_shampoo.plan.ranks import Ranks
from dash_shampoo.plan.tiles import Tiles
from dash_shampoo.stacks import TEMPORARIES

# Dispatched calls, counted on a CPU: for the stages of a part, and for the roots of a batch of factors beside those of
# each of its products. What a call takes, Python included: 3 microseconds on a quiet CPU, 7 on a busy one.
PART, ROOTS, PRODUCT = 76, 50, 7
SECONDS = 7e-6


def host_seconds(tiles: Tiles, owners: Whole, ranks: Ranks, device: torch.device) -> Real:
    """Seconds that the calls of a step take on average: (ranks,).

    Args:
        tiles: of all parameters.
        owners: rank that owns each tile.
        ranks: and how they hold the parameters.
        device: that computes.
    """
    place = tiles.stack * ranks.size + owners
    shape = len(tiles.keys), ranks.size
    blocks = np.bincount(place, weights=tiles.amount("blocks"), minlength=shape[0] * shape[1]).reshape(shape)
    calls: Real = np.zeros(ranks.size, np.float64)
    lanes: dict[FactorKey, Real] = {}
    for key, own in zip(tiles.keys, blocks, strict=True):
        most = max(1, workspace(key.max_workspace, device) // (TEMPORARIES * tiles.size * key.weight))
        calls = calls + PART * np.ceil(own / most)
        for factor in key.factors.values():
            lanes[factor] = lanes.get(factor, np.zeros(ranks.size)) + own
    in_turns = bool(tiles.turns(device).any())
    for factor, count in lanes.items():
        at_a_time, how_often = (count / tiles.every, 1.0) if in_turns else (count, 1 / tiles.every)
        batches = np.ceil(at_a_time / factor.at_once(tiles.size, device)) * how_often
        calls = calls + batches * (ROOTS + PRODUCT * root_products(factor))
    found: Real = calls * SECONDS
    return found
