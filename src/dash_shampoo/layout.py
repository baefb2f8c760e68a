"""Which stack each block of a parameter belongs to, and what its state consists of."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_shampoo.blocks import Tile, matrix_shape, tiles
from dash_shampoo.factors import FactorKey
from dash_shampoo.grafting import METHODS
from dash_shampoo.roots import resolve_solver

# A tile is what a device owns. Larger grids of blocks are cut, so that neither the workspace nor the balance between
# devices hangs on one parameter; and a matrix makes up to this many tiles, for the sake of small models.
TILE_ELEMENTS = 1 << 20
TILES_OF_A_MATRIX = 8


class StackKey(NamedTuple):
    """What blocks must have in common to share a stack."""

    block: tuple[int, int]
    factors: tuple[FactorKey, ...]  # of the preconditioned sides: none, left, or left and right
    grafting: str
    momentum: bool
    nesterov: bool
    bias_correction: bool
    small: bool
    maximize: bool
    max_workspace: int | None


def state_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's state: float64 for float64 parameters, float32 for all others."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def sides(parameter: Tensor, group: Mapping[str, Any]) -> int:
    """How many sides of a parameter's blocks are preconditioned: 2 for matrices, 1 or 0 for vectors, 0 for AdamW."""
    if group["algorithm"] != "shampoo":
        return 0
    if parameter.ndim >= 2:
        return 2
    return 1 if group["vectors"] == "shampoo" and parameter.ndim == 1 else 0


def cut(parameter: Tensor, group: Mapping[str, Any]) -> list[tuple[StackKey, Tile, str]]:
    """The tiles of a parameter, each with the key of the stack that it belongs to and its name in the state."""
    count = sides(parameter, group)
    small = group["state_dtype"] == "bf16" and parameter.dtype != torch.float64
    rows, columns = matrix_shape(parameter.shape)
    # Without a preconditioned side this is AdamW, whatever method a matrix of the group would borrow its norm from.
    base = StackKey(
        block=(0, 0),
        factors=(),
        grafting=_grafting(group, small) if count else "adam",
        momentum=bool(group["momentum"]) and count > 0,
        nesterov=bool(group["nesterov"]) and count > 0,
        bias_correction=group["bias_correction"],
        small=small,
        maximize=group["maximize"],
        max_workspace=group["max_workspace"],
    )
    if count:
        block = (group["block_size"], group["block_size"])
    else:
        block = (min(rows, TILE_ELEMENTS // columns) or 1, columns) if rows * columns else (1, 1)
    most = TILE_ELEMENTS
    if count:
        most = min(most, ceil(rows * columns / TILES_OF_A_MATRIX))
    found = []
    for i, tile in enumerate(tiles(rows, columns, block, most=most, size=partial(weight, count))):
        keys = tuple(_factor_key(group, size, count) for size in tile.block[:count])
        found.append((base._replace(block=tile.block, factors=keys), tile, f"tile{i}"))
    return found


def _grafting(group: Mapping[str, Any], small: bool) -> str:
    factored = f"factored-{group['grafting']}"
    return factored if small and factored in METHODS else str(group["grafting"])


def _factor_key(group: Mapping[str, Any], size: int, sides: int) -> FactorKey:
    return FactorKey(
        size=size,
        root=group["root"] or 2 * sides,
        solver=resolve_solver(group["solver"]),
        damping=group["damping"],
        epsilon=group["epsilon"],
        precision=group["precision"],
        max_workspace=group["max_workspace"],
    )


def layout(parameter: Tensor, group: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a parameter's state, by its name in the state."""
    shapes: dict[str, tuple[int, ...]] = {"step": (), "skipped": ()}
    for key, tile, name in cut(parameter, group):
        n, (r, c) = tile.blocks, tile.block
        method = METHODS[key.grafting]
        shapes[f"{name}.moment"] = (n, r, c)
        kept = None if method is None else method.shape(r, c)
        if kept is not None:
            shapes[f"{name}.statistic"] = (n, *kept)
        if key.momentum:
            shapes[f"{name}.velocity"] = (n, r, c)
        for side, factor in zip(("left", "right"), key.factors, strict=False):
            shapes[f"{name}.{side}"] = (n, factor.size + 1, factor.size)
            shapes[f"{name}.{side}_failed"] = (n,)
    return shapes


def moment_dtype(key: StackKey, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a stack keeps its means of gradients and its momentum in; ``dtype`` is that of its arithmetic."""
    return torch.bfloat16 if key.small and dtype == torch.float32 else dtype


def weight(sides: int, rows: int, columns: int) -> int:
    """Elements of the largest tensor that a stage of the step makes for a block: itself, or one of its factors."""
    return max(rows * columns, *(size * size for size in (rows, columns)[:sides]), 0)
