"""What travels between processes in a step: the same buffers as the carriers make, per rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dash_shampoo.plan.arrays import Real, Whole
from dash_shampoo.plan.ranks import Ranks
from dash_shampoo.plan.tiles import Cut, Tiles


class Traffic(NamedTuple):
    """Elements of the buffers of a step: (ranks,) each.

    Attributes:
        held: of the parameters that a rank holds.
        owned: of the tiles that it owns.
        gradients_out: of the all-to-all of gradients, with what stays here.
        gradients_in: what comes from it, with what stays here.
        updates_out: of the collective of updates.
        updates_in: what comes from it.
        stays: what of each all-to-all stays here.
    """

    held: Whole
    owned: Whole
    gradients_out: Whole
    gradients_in: Whole
    updates_out: Whole
    updates_in: Whole
    stays: Whole


def per_rank(owners: Whole, values: Real | Whole, ranks: Ranks) -> Real:
    """The sum of one value per tile over the tiles of each rank."""
    total: Real = np.bincount(owners, weights=values, minlength=ranks.size).astype(np.float64)
    return total


def busiest(owners: Whole, turns: Whole, every: int, values: Real, ranks: Ranks) -> Real:
    """The sum of one value per tile over those tiles of each rank whose turn it is, at the step with the most."""
    steps = np.bincount(owners * every + turns, weights=values, minlength=ranks.size * every)
    most: Real = steps.reshape(ranks.size, every).max(axis=1)
    return most


def traffic(tiles: Tiles, owners: Whole, ranks: Ranks) -> Traffic:
    """The buffers of a step.

    Args:
        tiles: of all parameters.
        owners: rank that owns each tile.
        ranks: and how they hold the parameters.
    """
    owned = _whole(per_rank(owners, tiles.amount("elements"), ranks))
    none = np.zeros(ranks.size, np.int64)
    everything = int(owned.sum())
    if ranks.size == 1:
        return Traffic(owned, owned, none, none, none, none, none)
    if ranks.replicated:
        padded = np.full(ranks.size, owned.max())
        held = np.full(ranks.size, everything)
        return Traffic(held, owned, none, none, padded, padded * ranks.size, padded)
    held, out = none.copy(), none.copy()
    stays = np.zeros(ranks.size)
    for cut, own in zip(tiles.cuts, tiles.of_parameters(owners), strict=True):
        bounds = ranks.bounds(cut.shape[0])
        held += np.tile(np.diff(bounds) * cut.shape[1], ranks.copies)
        bounds = bounds * cut.unit
        out += _sent(cut, own // ranks.shards, bounds, ranks)
        stays += per_rank(own, _kept(cut, own % ranks.shards, bounds), ranks)
    # A gradient comes from the holders of the owner's copy; an update goes to those of every copy.
    return Traffic(held, owned, out, owned, owned * ranks.copies, held, _whole(stays))


def _kept(cut: Cut, shard: Whole, bounds: Whole) -> Whole:
    """Elements of each tile that its owner, of the shard given, holds itself."""
    rows = np.minimum(cut.stop, bounds[shard + 1]) - np.maximum(cut.start, bounds[shard])
    return np.maximum(rows, 0) * cut.width


def _sent(cut: Cut, copy: Whole, bounds: Whole, ranks: Ranks) -> Whole:
    """Elements of a parameter that each rank sends to the owners in its copy: (ranks,).

    Between two rows where tiles begin or end, the tiles that a copy owns have together the same width. So the number
    of their elements above a row is piecewise linear in the row, and is only asked for where shards begin and end.
    """
    breaks = np.unique(np.concatenate([cut.start, cut.stop]))
    width = np.zeros((ranks.copies, len(breaks)), np.int64)
    np.add.at(width, (copy, np.searchsorted(breaks, cut.start)), cut.width)
    np.subtract.at(width, (copy, np.searchsorted(breaks, cut.stop)), cut.width)
    width = width.cumsum(axis=1)
    above = np.zeros_like(width)
    above[:, 1:] = np.cumsum(width[:, :-1] * np.diff(breaks), axis=1)
    place = np.searchsorted(breaks, bounds, side="right") - 1
    at_bounds = above[:, place] + width[:, place] * (bounds - breaks[place])
    return np.diff(at_bounds, axis=1).ravel()


def _whole(values: Real) -> Whole:
    return values.astype(np.int64)
