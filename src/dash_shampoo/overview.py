"""Parameter groups as a table, for a user to check."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_shampoo.layout import cut
from dash_shampoo.names import names
from dash_shampoo.optimizer import Dash
from dash_shampoo.options import normalise
from dash_shampoo.parameters import misfit

HEADINGS = ("group", "moved by", "view", "parameters", "shape", "blocks", "preconditioned")

Blocks = tuple[tuple[int, tuple[int, int], str], ...]  # how many of which shape, and which sides are preconditioned


class Row(NamedTuple):
    """What a line, or two, of the table is about.

    Attributes:
        group: name of the group.
        algorithm: that moves the parameters, "shampoo" or "adamw".
        view: how tensors of three or more dimensions are read; empty for others.
        name: of the parameters, with ``*`` in the place of numbers.
        shape: of each.
        blocks: of each.
    """

    group: str
    algorithm: str
    view: str
    name: str
    shape: tuple[int, ...]
    blocks: Blocks


def describe(groups: Iterable[Mapping[str, Any]], **options: Any) -> str:
    """A table of what Dash does with each parameter: its group, algorithm, view, blocks and preconditioned sides.

    Parameters of one group and shape whose names differ in their numbers share a line. Nothing is allocated, so that a
    model on the meta device will do.

    Args:
        groups: what `param_groups` gives, or the ``param_groups`` of an optimizer.
        options: those of `Dash`, for groups that do not have them themselves.

    Raises:
        ValueError: an option is out of range, or does not fit a parameter's shape.
        TypeError: an option is unknown.
    """
    defaults = Dash([torch.zeros(1, device="cpu")], **options).defaults
    found: dict[Row, list[str]] = {}
    sizes: Counter[str] = Counter()
    for i, group in enumerate(groups):
        full = {**defaults, "name": str(i), **group}
        normalise(full)
        blocks: dict[Any, Blocks] = {}
        for name, parameter in _named(full):
            if reason := misfit(parameter, full):
                raise ValueError(f"{name} has the shape {tuple(parameter.shape)}: {reason}")
            alike = parameter.shape, parameter.dtype
            blocks[alike] = blocks.get(alike) or _blocks(parameter, full)
            row = _row(name, parameter, full, blocks[alike])
            found.setdefault(row, []).append(name)
            sizes[row.algorithm] += parameter.numel()
    lines = [HEADINGS, *(line for row, called in found.items() for line in _lines(row, called))]
    total = f"{sizes.total():,} elements: {sizes['shampoo']:,} moved by Shampoo, {sizes['adamw']:,} by AdamW"
    return "\n".join([*_aligned(lines), total])


def _named(group: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a group as `param_groups` gives it, or as an optimizer has it, with what to call them."""
    params = list(group["params"])
    if params and isinstance(params[0], tuple):
        return iter(params)
    return ((name, each) for each, name in zip(params, names([dict(group)]).values(), strict=True))


def _blocks(parameter: Tensor, group: Mapping[str, Any]) -> Blocks:
    found: Counter[tuple[tuple[int, int], str]] = Counter()
    for key, tile, _ in cut(parameter, group):
        found[key.block, " and ".join(key.factors)] += tile.blocks
    return tuple((count, *block) for block, count in found.items())


def _row(name: str, parameter: Tensor, group: Mapping[str, Any], blocks: Blocks) -> Row:
    shampoo = any(sides for *_, sides in blocks)
    return Row(
        group=group["name"],
        algorithm="shampoo" if shampoo else "adamw",
        view=group["view"] if shampoo and parameter.ndim > 2 else "",
        name=re.sub(r"(?<![^.])\d+(?![^.])", "*", name),
        shape=tuple(parameter.shape),
        blocks=blocks if shampoo else (),
    )


def _lines(row: Row, called: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The cells of a row, on a line for each shape of its blocks."""
    name = called[0] if len(called) == 1 else f"{len(called)} x {row.name}"
    cells: tuple[str, ...] = (row.group, row.algorithm, row.view, name, str(row.shape))
    for count, (rows, columns), sides in row.blocks or [(0, (0, 0), "")]:
        yield *cells, f"{count} of {rows} x {columns}" if count else "", sides
        cells = ("",) * len(cells)


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
