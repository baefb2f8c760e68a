"""Which stack each block of a parameter belongs to, and what its state consists of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, product, starmap
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_shampoo.blocks import Span, Tile, grids, pieces, stack_shape, tiles
from dash_shampoo.factors import FactorKey
from dash_shampoo.grafting import METHODS
from dash_shampoo.roots import resolve_solver
from dash_shampoo.triangles import folded_shape

# A tile is what a device owns. Larger grids of blocks are cut, so that neither the workspace nor the balance between
# devices hangs on one parameter; and a matrix makes up to this many tiles, for the sake of small models.
TILE_ELEMENTS = 1 << 20
TILES_OF_A_MATRIX = 8

# Factors and roots of a block's both sides, over its elements: 2 for a square one, 2.5 for one nearly twice as long as
# wide. With the mean and a grafting statistic the state stays within 4.5 times the parameters.
MOST_FACTORS = 2.5


class StackKey(NamedTuple):
    """What blocks must have in common to share a stack."""

    block: tuple[int, int]
    left: FactorKey | None  # of the sides that are preconditioned
    right: FactorKey | None
    grafting: str
    momentum: bool
    nesterov: bool
    bias_correction: bool
    small: bool
    maximize: bool
    max_workspace: int | None

    @property
    def factors(self) -> dict[str, FactorKey]:
        """The preconditioned sides, by their names."""
        both = {"left": self.left, "right": self.right}
        return {side: factor for side, factor in both.items() if factor is not None}

    @property
    def weight(self) -> int:
        """Elements of the largest tensor that a stage of the step makes for a block: itself, or one of its factors."""
        return max(prod(self.block), *(factor.size**2 for factor in self.factors.values()), 0)


def state_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's state: float64 for float64 parameters, float32 for all others."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def preconditioned(block: tuple[int, int], group: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a matrix's block is preconditioned from the left and from the right.

    A block that is still thin, because it has 3 rows or columns at most or is a remainder, is from its short side.
    """
    rows, columns = block
    if group["sides"] == "both" or not is_thin(rows, columns):
        return True, True
    return rows <= columns, rows > columns


def is_thin(rows: int, columns: int) -> bool:
    """Whether the factors of a block's both sides, with their roots, exceed `MOST_FACTORS` times its elements."""
    return rows * (rows + 1) + columns * (columns + 1) > MOST_FACTORS * rows * columns


def cut_thin(down: Span, across: Span) -> Iterator[tuple[Span, Span]]:
    """Cuts a grid of thin blocks along their long sides, into the fewest equal blocks that are not thin.

    Where no length of such a block divides the long side, the last one is shorter.

    The factor of a thin block's long side would be many times as large as the block. Blocks at most about twice as long
    as wide train better than long ones that are preconditioned from their short side alone (docs/choices.md).
    """
    rows, columns = down.length, across.length
    short = min(rows, columns)
    lengths: list[int] = []
    if is_thin(rows, columns):
        lengths = [size for size in range(2 * short, short - 1, -1) if not is_thin(short, size)]
    if not lengths:
        yield down, across
        return
    total = (across.pieces if rows == short else down.pieces) * max(rows, columns)
    length = next((size for size in lengths if total % size == 0), ceil(total / ceil(total / lengths[0])))
    yield from grids(down, across, (rows, length) if rows == short else (length, columns))


def cut(parameter: Tensor, group: Mapping[str, Any]) -> list[tuple[StackKey, Tile, str]]:
    """The tiles of a parameter, each with the key of the stack that it belongs to and its name in the state."""
    depth, rows, columns = stack_shape(parameter.shape, group["view"])
    vector = min(rows, columns) == 1 and (parameter.ndim < 2 or group["sides"] == "auto")
    plain = group["algorithm"] != "shampoo" or parameter.ndim == 0 or (vector and group["vectors"] == "adamw")
    small = group["state_dtype"] == "bf16" and parameter.dtype != torch.float64
    # Without a preconditioned side this is AdamW, whatever method a matrix of the group would borrow its norm from.
    base = StackKey(
        block=(0, 0),
        left=None,
        right=None,
        grafting="adam" if plain else _grafting(group, small),
        momentum=bool(group["momentum"]) and not plain,
        nesterov=bool(group["nesterov"]) and not plain,
        bias_correction=group["bias_correction"],
        small=small,
        maximize=group["maximize"],
        max_workspace=group["max_workspace"],
    )
    if parameter.numel() == 0:
        return []
    most = TILE_ELEMENTS
    if plain:
        regions = [(Span(0, 1, rows), Span(0, 1, columns))]
        block = min(rows, TILE_ELEMENTS // columns) or 1, columns
    else:
        most = min(most, ceil(parameter.numel() / TILES_OF_A_MATRIX))
        splits = (None, None) if vector else (group["split_rows"], group["split_columns"])
        regions = list(product(pieces(rows, splits[0]), pieces(columns, splits[1])))
        block = group["block_size"], group["block_size"]
    found: list[tuple[StackKey, Tile, str]] = []
    coarse = (grid for region in regions for grid in grids(*region, block))
    whole = plain or vector or group["sides"] == "both"
    for down, across in coarse if whole else chain.from_iterable(starmap(cut_thin, coarse)):
        key = base._replace(block=(down.length, across.length))
        if not plain:
            sides = (rows >= columns, rows < columns) if vector else preconditioned(key.block, group)
            left, right = (
                _factor_key(group, size, sum(sides), small) if side else None
                for size, side in zip(key.block, sides, strict=True)
            )
            key = key._replace(left=left, right=right)
        for tile in tiles(depth, down, across, most=most, weight=key.weight):
            found.append((key, tile, f"tile{len(found)}"))
    return found


def number_of(name: str) -> int:
    """The number of a tile among its parameter's, by its name in the state."""
    return int(name.removeprefix("tile"))


def _grafting(group: Mapping[str, Any], small: bool) -> str:
    factored = f"factored-{group['grafting']}"
    return factored if small and factored in METHODS else str(group["grafting"])


def _factor_key(group: Mapping[str, Any], size: int, sides: int, small: bool) -> FactorKey:
    return FactorKey(
        size=size,
        root=group["root"] or 2 * sides,
        solver=resolve_solver(group["solver"]),
        damping=group["damping"],
        epsilon=group["epsilon"],
        precision=group["precision"],
        max_workspace=group["max_workspace"],
        small=small,
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
        for side, factor in key.factors.items():
            if factor.small:
                shapes[f"{name}.{side}"] = shapes[f"{name}.{side}_root"] = (n, *folded_shape(factor.size))
            else:
                shapes[f"{name}.{side}"] = (n, factor.size + 1, factor.size)
            shapes[f"{name}.{side}_failed"] = (n,)
    return shapes


def moment_dtype(key: StackKey, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a stack keeps its means of gradients and its momentum in; ``dtype`` is that of its arithmetic."""
    return torch.bfloat16 if key.small and dtype == torch.float32 else dtype
