"""The most memory that a step needs beside the state: per rank, from what its stages and carriers hold at a time."""

from __future__ import annotations

import numpy as np
import torch

from dash_shampoo import stacks
from dash_shampoo.factors import FactorKey, workspace
from dash_shampoo.plan.arrays import Whole
from dash_shampoo.plan.ranks import Ranks
from dash_shampoo.plan.tiles import Tiles
from dash_shampoo.plan.traffic import Traffic


def peak(tiles: Tiles, owners: Whole, ranks: Ranks, buffers: Traffic, wire: int, device: torch.device) -> Whole:
    """Bytes that a step holds beside the state at most, without what the communication library itself needs: (ranks,).

    Args:
        tiles: of all parameters.
        owners: rank that owns each tile.
        ranks: and how they hold the parameters.
        buffers: of the exchange.
        wire: bytes of an element of an update on its way.
        device: that computes.
    """
    size = tiles.size
    parts, roots = _stages(tiles, owners, ranks, device)
    stage = _most(parts * stacks.TEMPORARIES, roots)
    if ranks.size == 1:
        return stage
    arrived = buffers.updates_in * wire
    # Updates that come in another dtype than that of the state are converted as many at a time as the workspace holds.
    converted = np.minimum(buffers.updates_in * size, _portion(tiles, device)) if wire != size else 0
    out = buffers.updates_out * wire
    if ranks.replicated:
        return _most(out + stage, out + arrived + converted)
    rectangles, updates = buffers.owned * size, buffers.owned * wire
    begin = (buffers.gradients_out + buffers.gradients_in) * tiles.gradient_size + rectangles + updates
    compute = rectangles + updates + stage
    send = updates + out + np.maximum(rectangles, arrived)
    return _most(begin, compute, send, out + arrived + converted)


def _portion(tiles: Tiles, device: torch.device) -> int:
    """Bytes of the updates that are converted at a time, at most."""
    limit = min(workspace(key.max_workspace, device) for key in tiles.keys)
    return max(limit, tiles.size * int(tiles.amount("elements").max()))


def _stages(tiles: Tiles, owners: Whole, ranks: Ranks, device: torch.device) -> tuple[Whole, Whole]:
    """Bytes of the largest part's gradient, or factor if that is larger, and of the temporaries of roots: (ranks,)."""
    blocks = tiles.amount("blocks").astype(np.int64)
    place = tiles.stack * ranks.size + owners
    shape = len(tiles.keys), ranks.size
    count = np.bincount(place, weights=blocks, minlength=shape[0] * shape[1]).astype(np.int64).reshape(shape)
    largest = np.zeros(shape[0] * shape[1], np.int64)  # tile of a stack
    np.maximum.at(largest, place, blocks)
    parts = [np.zeros(ranks.size, np.int64)]
    lanes: dict[FactorKey, Whole] = {}
    for key, own, tile in zip(tiles.keys, count, largest.reshape(shape), strict=True):
        each = tiles.size * key.weight
        most = np.maximum(workspace(key.max_workspace, device) // (stacks.TEMPORARIES * each), tile)
        parts.append(np.minimum(own, most) * each)
        for factor in key.factors.values():
            lanes[factor] = lanes.get(factor, np.zeros(ranks.size, np.int64)) + own
    roots = [np.zeros(ranks.size, np.int64)]
    for factor, own in lanes.items():
        roots.append(np.minimum(own, factor.at_once(tiles.size, device)) * factor.needed(tiles.size, device))
    return _most(*parts), _most(*roots)


def _most(*candidates: Whole) -> Whole:
    return np.max(np.stack(candidates), axis=0)
