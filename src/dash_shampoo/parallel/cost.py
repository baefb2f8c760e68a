"""What a tile costs: the work of its stages, from which ownership is balanced and `dash-shampoo plan` counts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from dash_shampoo.blocks import Tile
from dash_shampoo.factors import FactorKey
from dash_shampoo.layout import StackKey
from dash_shampoo.roots import Eigh, products

# An eigendecomposition of a b x b matrix and the product after it, in flops over b^3: time measured on a CPU at b = 256
# and 1024 over that of a product. On GPUs it is worse still.
EIGENDECOMPOSITION = 40.0
# How often a stage reads or writes each element it works on: counted in the code of the stages.
FACTOR_PASSES, ROOT_PASSES, INVERSE_PASSES, ELEMENT_PASSES = 6, 8, 4, 20
# Flops that take as long as a byte through memory: 10 to 20 on CPUs and on GPUs in float32.
FLOPS_PER_BYTE = 16.0


class Work(NamedTuple):
    """Work of a stage.

    Attributes:
        flops: of matrix products.
        bytes: read from and written to memory.
    """

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: object) -> Work:
        assert isinstance(other, Work)
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, count: float) -> Work:
        """The work of ``count`` such stages."""
        return Work(self.flops * count, self.bytes * count)


def stages(key: StackKey, tile: Tile, update_every: int, itemsize: int = 4) -> dict[str, Work]:
    """The work of one step on a tile by stage, that of roots spread over ``update_every`` steps.

    Returns:
        ``factors``: L and R; ``roots``: the inverse roots; ``precondition``: applying them; ``elements``: copies, means
        and the update.
    """
    r, c = tile.block
    area = sum(factor.size**2 for factor in key.factors.values())
    rows_and_columns = sum(factor.size for factor in key.factors.values())
    factors = Work(2.0 * r * c * rows_and_columns, itemsize * FACTOR_PASSES * area)
    precondition = Work(2.0 * r * c * rows_and_columns, itemsize * INVERSE_PASSES * area)
    roots = Work()
    for factor in key.factors.values():
        roots += root(factor, itemsize).times(1 / update_every)
    elements = Work(0.0, itemsize * ELEMENT_PASSES * r * c)
    named = {"factors": factors, "roots": roots, "precondition": precondition, "elements": elements}
    return {name: work.times(tile.blocks) for name, work in named.items()}


@cache
def root(factor: FactorKey, itemsize: int = 4) -> Work:
    """The work of one inverse root of a factor."""
    b = factor.size
    if isinstance(factor.solver, Eigh):
        return Work(EIGENDECOMPOSITION * b**3, itemsize * ROOT_PASSES * b**2)
    count = root_products(factor)
    return Work(2.0 * count * b**3, itemsize * (3 * count + ROOT_PASSES) * b**2)


@cache
def root_products(factor: FactorKey) -> int:
    """Products of two matrices of a factor's inverse root."""
    return products(factor.root, solver=factor.solver, damping=factor.damping)


def renewal(key: StackKey, tile: Tile) -> float:
    """What renewing a tile's roots costs, in the unit of `cost`."""
    return _total(stages(key, tile, 1)["roots"])


def cost(key: StackKey, tile: Tile, group: Mapping[str, Any]) -> float:
    """What balances ownership: the work of a step on a tile, in flops and bytes at their usual exchange rate."""
    return _total(sum(stages(key, tile, group["update_every"]).values(), Work()))


def _total(work: Work) -> float:
    return work.flops + FLOPS_PER_BYTE * work.bytes
