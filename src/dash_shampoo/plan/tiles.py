"""The tiles of a model with all that each of them takes, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dash_shampoo.blocks import Tile
from dash_shampoo.layout import StackKey, cut, layout, moment_dtype, state_dtype
from dash_shampoo.parallel.boxes import axes, extent
from dash_shampoo.parallel.cost import cost, renewal, stages
from dash_shampoo.plan.arrays import Real, Whole
from dash_shampoo.renewals import least, take_turns, turn_of_tile

# What each tensor of a tile's state is, by its name in the state.
KINDS = {
    "moment": "means",
    "velocity": "momentum",
    "statistic": "statistics",
    "left": "factors",
    "right": "factors",
    "left_root": "factors",
    "right_root": "factors",
    "left_failed": "numbers",
    "right_failed": "numbers",
}
STAGES = ("factors", "roots", "precondition", "elements")


@dataclass(frozen=True)
class Cut:
    """The tiles of a parameter, and of every other one of its shape and group.

    Attributes:
        shape: length of the parameter's first dimension, which shards are cut along, and elements at an index of it.
        unit: rows of the parameter's matrix, or matrices of its stack, at an index of the first dimension.
        gradient: dtype of the parameter and its gradient.
        dtype: of its state.
        keys: the stack of each tile.
        costs: what balances ownership, of each tile.
        start: first row, or matrix, of each tile.
        stop: the one after its last.
        width: elements of each tile in a row, or matrix.
        amounts: what each tile takes, by name: "tiles", "blocks", "elements"; "state/KIND" bytes; "flops/STAGE" and
            "traffic/STAGE" per step, FLOPs of products and bytes of memory, and for the step in which its roots are
            due "flops/roots due" and "traffic/roots due".
        every: steps between two renewals of the roots.
        renewals: what balances them, of each tile.
    """

    shape: tuple[int, int]
    unit: int
    gradient: torch.dtype
    dtype: torch.dtype
    keys: list[StackKey]
    costs: list[float]
    start: Whole
    stop: Whole
    width: Whole
    amounts: dict[str, Real]
    every: int
    renewals: list[float]


def cut_parameter(parameter: Tensor, group: Mapping[str, Any]) -> Cut:
    """The tiles of a parameter with what they take."""
    tiles = cut(parameter, group)
    dtype = state_dtype(parameter)
    boxes = [extent(tile) for _, tile, _ in tiles]
    rows = {"tiles": [1] * len(tiles), "blocks": [tile.blocks for _, tile, _ in tiles]}
    rows["elements"] = [box.size for box in boxes]
    amounts = {name: np.array(values, np.float64) for name, values in rows.items()}
    amounts |= _state(parameter, group, tiles, dtype)
    amounts |= _work(tiles, group["update_every"], dtype.itemsize)
    length = parameter.shape[0] if parameter.ndim else 1
    axis, unit = axes(tuple(parameter.shape), group["view"]).get(0, (1, 1))
    return Cut(
        shape=(length, parameter.numel() // length if length else 0),
        unit=unit,
        gradient=parameter.dtype,
        dtype=dtype,
        keys=[key for key, _, _ in tiles],
        costs=[cost(key, tile, group) for key, tile, _ in tiles],
        start=np.array([box[axis][0] for box in boxes], np.int64),
        stop=np.array([box[axis][1] for box in boxes], np.int64),
        width=np.array([box.size // box.shape[axis] for box in boxes], np.int64),
        amounts=amounts,
        every=group["update_every"],
        renewals=[renewal(key, tile) for key, tile, _ in tiles],
    )


def _state(
    parameter: Tensor, group: Mapping[str, Any], tiles: Sequence[tuple[StackKey, Tile, str]], dtype: torch.dtype
) -> dict[str, Real]:
    """Bytes of each tile's state, by kind."""
    place = {name: (i, key) for i, (key, _, name) in enumerate(tiles)}
    found = {f"state/{kind}": np.zeros(len(tiles)) for kind in KINDS.values()}
    for name, shape in layout(parameter, group).items():
        tile, _, tensor = name.partition(".")
        if tensor:
            i, key = place[tile]
            found[f"state/{KINDS[tensor]}"][i] += int(np.prod(shape)) * _dtype(tensor, key, dtype).itemsize
    return found


def _dtype(tensor: str, key: StackKey, dtype: torch.dtype) -> torch.dtype:
    if KINDS[tensor] == "numbers":
        return torch.bool
    return moment_dtype(key, dtype) if tensor in ("moment", "velocity", "left_root", "right_root") else dtype


def _work(tiles: Sequence[tuple[StackKey, Tile, str]], update_every: int, itemsize: int) -> dict[str, Real]:
    """FLOPs and bytes of memory of each tile's stages."""
    spread = [stages(key, tile, update_every, itemsize) for key, tile, _ in tiles]
    due = [stages(key, tile, 1, itemsize)["roots"] for key, tile, _ in tiles]
    works = {stage: [each[stage] for each in spread] for stage in STAGES} | {"roots due": due}
    found = {}
    for stage, own in works.items():
        found[f"flops/{stage}"] = np.array([work.flops for work in own])
        found[f"traffic/{stage}"] = np.array([work.bytes for work in own])
    return found


@dataclass
class Tiles:
    """The tiles of all parameters, in the order of the parameters.

    Attributes:
        cuts: of each parameter; equal parameters share one.
        keys: the stacks that there are.
        stack: of each tile, as its place in ``keys``.
    """

    cuts: list[Cut]
    keys: list[StackKey] = field(init=False)
    stack: Whole = field(init=False)

    def __post_init__(self) -> None:
        places: dict[StackKey, int] = {}
        numbers: dict[int, Whole] = {}
        for each in {id(each): each for each in self.cuts}.values():
            numbers[id(each)] = np.array([places.setdefault(key, len(places)) for key in each.keys], np.int64)
        self.keys = list(places)
        self.stack = np.concatenate([numbers[id(each)] for each in self.cuts])

    @property
    def size(self) -> int:
        """Bytes of an element of the state."""
        return self.cuts[0].dtype.itemsize

    @property
    def gradient_size(self) -> int:
        """Bytes of an element of a gradient on its way: in the narrowest dtype that holds them all."""
        return reduce(torch.promote_types, {each.gradient for each in self.cuts}).itemsize

    @property
    def costs(self) -> list[float]:
        """What balances ownership, of each tile."""
        return [cost for each in self.cuts for cost in each.costs]

    @property
    def every(self) -> int:
        """Steps between two renewals of the roots, the most if parameters differ."""
        return max(each.every for each in self.cuts)

    def turns(self, device: torch.device) -> Whole:
        """The turn of each tile in a new run on a device, in steps from 0 to below ``every``."""
        costs, every = [each.renewals for each in self.cuts], [each.every for each in self.cuts]
        found = take_turns(costs, every, [None] * len(costs), least(device))
        turns = [
            turn_of_tile(turn, number) % period
            for turn, own, period in zip(found, costs, every, strict=True)
            for number in range(len(own))
        ]
        return np.array(turns, np.int64)

    def amount(self, name: str) -> Real:
        """One of `Cut.amounts`, of each tile."""
        return np.concatenate([each.amounts[name] for each in self.cuts])

    def names(self) -> list[str]:
        """Names of the amounts."""
        return list(self.cuts[0].amounts)

    def of_parameters(self, values: Whole) -> list[Whole]:
        """One value per tile, cut into those of each parameter."""
        return np.split(values, np.cumsum([len(each.costs) for each in self.cuts])[:-1])


def tiles_of(parameters: Sequence[tuple[Tensor, dict[str, Any]]]) -> Tiles:
    """The tiles of parameters, given with their groups. Equal layers are cut once."""
    known: dict[tuple[Any, ...], Cut] = {}
    cuts = []
    for parameter, group in parameters:
        key = (parameter.shape, parameter.dtype, id(group))
        if key not in known:
            known[key] = cut_parameter(parameter, group)
        cuts.append(known[key])
    return Tiles(cuts)
