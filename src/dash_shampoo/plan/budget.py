"""Which block sizes, state dtypes and update frequencies fit a given memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from dash_shampoo.options import roots
from dash_shampoo.plan.devices import Device
from dash_shampoo.plan.model import options, parameters
from dash_shampoo.plan.plan import Plan, make, own
from dash_shampoo.plan.products import Pace, of_roots
from dash_shampoo.plan.ranks import Ranks
from dash_shampoo.plan.seconds import Rates
from dash_shampoo.plan.tiles import tiles_of
from dash_shampoo.roots import resolve_precision, resolve_solver

BLOCK_SIZES = (256, 512, 1024, 2048, 4096)
STATE_DTYPES = ("fp32", "bf16")
FREQUENCIES = (1, 10, 100)


class Choice(NamedTuple):
    """What a choice of options comes to.

    Attributes:
        block_size: largest side of a block.
        state_dtype: of means and momentum.
        update_every: steps between two renewals of the roots.
        memory: bytes of state and workspace, on the rank that needs most.
        seconds: of a step on average.
        balance: largest modelled cost of a rank over their mean.
    """

    block_size: int
    state_dtype: str
    update_every: int
    memory: float
    seconds: float
    balance: float


def plan_model(model: nn.Module, given: Mapping[str, Any], ranks: Ranks, rates: Rates, device: torch.device) -> Plan:
    """The plan of a model with options of Dash.

    Args:
        model: on any device, "meta" too.
        given: options of Dash.
        ranks: and how they hold the parameters.
        rates: of the device.
        device: of the kind that computes.

    Raises:
        InputError: Dash refuses the options.
    """
    chosen = options(given)
    tiles = tiles_of(parameters(model, chosen.defaults))
    precise = rates._replace(roots=pace(chosen.defaults, rates.device, device))
    return make(tiles, own(tiles, ranks, device), ranks, precise, wire=chosen.wire, device=device)


def pace(defaults: Mapping[str, Any], rates: Device, device: torch.device) -> Pace:
    """How fast the roots of matrices are made."""
    solver, damping = resolve_solver(defaults["solver"]), defaults["damping"]
    p = max(roots(defaults), default=1)
    return of_roots(solver, p, damping, resolve_precision(defaults["precision"], solver, p, damping, device), rates)


def choices(
    model: nn.Module, given: Mapping[str, Any], ranks: Ranks, rates: Rates, device: torch.device
) -> Iterator[Choice]:
    """Every block size with every state dtype and update frequency, beside the other options ``given``."""
    frequencies = sorted({*FREQUENCIES, options(given).defaults["update_every"]})
    for block_size in BLOCK_SIZES:
        for state_dtype in STATE_DTYPES:
            for update_every in frequencies:
                own_options = {"block_size": block_size, "state_dtype": state_dtype, "update_every": update_every}
                plan = plan_model(model, {**given, **own_options}, ranks, rates, device)
                yield Choice(block_size, state_dtype, update_every, plan.memory, plan.seconds, plan.balance)
