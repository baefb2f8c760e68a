"""When inverse roots are renewed: as soon as there is a factor, and from then on each tile's in its turn.

If all were renewed at once, every `update_every`-th step would be several times as long as the others. Roots of small
models are renewed at once all the same: the calls that start the work would take longer than the work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

ALL_AT_ONCE = -1  # the turn of parameters whose tiles take none

# What there must be to renew at a step on average, in flops: many times what the calls for it take, which is a
# millisecond or two for each size of factors.
LEAST = 5e9
LEAST_ON_GPUS = 2e11


def least(device: torch.device) -> float:
    """What there must be to renew at each step, in flops, for tiles to take turns."""
    return LEAST if device.type == "cpu" else LEAST_ON_GPUS


def turn_of_tile(turn: int, number: int) -> int:
    """The turn of a tile, by its parameter's and its number among the parameter's tiles."""
    return 0 if turn == ALL_AT_ONCE else turn + number


def is_due(since: int, turn: int, every: int) -> bool:
    """Whether a tile's roots are renewed.

    Args:
        since: steps of its parameter since Shampoo's first.
        turn: of the tile.
        every: steps between two renewals.
    """
    return (since + turn) % every == 0


def take_turns(
    costs: Sequence[Sequence[float]], every: Sequence[int], known: Sequence[int | None], least: float
) -> list[int]:
    """The turns of parameters, such that each step has about as much to renew as any other.

    A parameter's first tile takes the step that has the least to do so far, and the others follow it. Turns are kept in
    the state, so that a run goes on as it was, whatever parameters have come and gone.

    Args:
        costs: of renewing each tile of each parameter, in flops.
        every: steps between two renewals, of each parameter.
        known: the turns that parameters have already.
        least: what there must be to renew at each step; see the function of that name.
    """
    totals: dict[int, float] = defaultdict(float)
    for own, period in zip(costs, every, strict=True):
        totals[period] += sum(own)
    loads = {period: [0.0] * period for period in totals}
    found = [ALL_AT_ONCE] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: known[i] is None):  # new ones last: they fill the gaps
        load, turn = loads[every[i]], known[i]
        if turn is None:
            turn = load.index(min(load)) if totals[every[i]] >= least * every[i] else ALL_AT_ONCE
        for number, cost in enumerate(costs[i]):
            load[turn_of_tile(turn, number) % every[i]] += cost
        found[i] = turn
    return found
