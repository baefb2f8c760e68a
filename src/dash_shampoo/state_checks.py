"""Whether a state fits a parameter: complete and of the right kind, or refused by the parameter's name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from dash_shampoo.names import few
from dash_shampoo.parallel.boxes import is_distributed

Shapes = Mapping[str, tuple[int, ...]]  # of the tensors in a parameter's state, as `layout` gives them

# Entries of the state that are numbers; the others are of tiles.
COUNTS = ("age", "turn", "step", "skipped")


def tile_of(key: str) -> str | None:
    """The tile that an entry of the state is of, or ``None`` for those of the parameter."""
    tile, dot, _ = key.partition(".")
    return tile if dot else None


def without_idle(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state without empty entries: that is what torch makes of a flattened state's parameters that have none."""
    return {key: value for key, value in state.items() if not (isinstance(value, Mapping) and not value)}


def check_group(group: Mapping[str, Any], entries: AbstractSet[str]) -> None:
    """Raises ValueError for a saved group that is no group of Dash; ``entries`` are the names in the saved state."""
    if "block_size" not in group or "solver" not in group:
        kept = f", and it keeps {few(sorted(entries))}" if entries - {"step"} else ""
        raise ValueError(f"this is the state of another optimizer: its groups have no block_size and no solver{kept}")


def check_fit(state: Mapping[str, Any], shapes: Shapes, name: str) -> None:
    """Makes sure that what there is of a parameter's state is of the right kind and shape.

    Raises:
        ValueError: it is not, or it is the state of another optimizer.
    """
    strange = {key for key in state if tile_of(key) is None and key not in COUNTS}
    if strange and not any(map(tile_of, state)):
        raise ValueError(f"the state of {name} is that of another optimizer: it keeps {few(sorted(strange))}")
    for key, shape in {"age": (), "turn": (), **shapes}.items():
        if key in state and (problem := _misfit(key, state[key], tuple(shape))):
            raise ValueError(f"the state of {name} does not fit: {key} {problem}")


def check_blocks(state: Mapping[str, Any], shapes: Shapes, name: str) -> None:
    """Raises ValueError for a parameter's state that has blocks, or factors of sides, that there are none of now."""
    other = {key for key in state if key.endswith((".left", ".right")) and key not in shapes}
    if {tile_of(key) for key in other} <= {tile_of(key) for key in shapes} and other:
        raise ValueError(
            f"the state of {name} does not fit: it has {min(other)}, a factor of a side that is not preconditioned "
            "now. It was made with sides='both', which was the rule before there was that option: set it for this "
            "parameter's group, or start its state anew"
        )
    unknown = {tile for tile in map(tile_of, state) if tile} - {tile_of(key) for key in shapes}
    if unknown:
        raise ValueError(
            f"the state of {name} does not fit: {few(sorted(map(str, unknown)))} is of other blocks; {ADVICE}"
        )


def check_complete(state: Mapping[str, Any], shapes: Shapes, tiles: AbstractSet[str], name: str) -> None:
    """Makes sure that a parameter's state, if there is any, has all entries of ``tiles`` that ``shapes`` ask for.

    Raises:
        ValueError: it lacks some.
    """
    missing = [key for key in ("age", *shapes) if key not in state and tile_of(key) in (None, *tiles)]
    if not state or not missing:
        return
    there = {tile_of(key) for key in state}
    gone = dict.fromkeys(key if tile_of(key) in there else str(tile_of(key)) for key in missing)
    raise ValueError(
        f"the state of {name} lacks {few([*gone])}: it is of other blocks or "
        "options, or the part of one process among several; save what full_state_dict() returns, or all parts with "
        "torch.distributed.checkpoint"
    )


ADVICE = "use the model, and the block_size, view, sides and splits, that the state was made with"


def _misfit(key: str, value: Any, shape: tuple[int, ...]) -> str | None:
    """What is wrong with an entry, or ``None``."""
    if key in COUNTS:
        return None if _is_count(value) else f"is {value!r}, not a number"
    if not isinstance(value, Tensor):
        return f"is {value!r}, not a tensor"
    if tuple(value.shape) != shape:
        return f"is {tuple(value.shape)}, but its shape and block_size ask for {shape}; {ADVICE}"
    if value.is_meta:
        return "is on the meta device, which has no values: load the file with another map_location"
    if value.layout != torch.strided or is_distributed(value):
        return "is not a plain dense tensor"
    right = value.dtype == torch.bool if key.endswith("_failed") else value.is_floating_point()
    return None if right else f"has the dtype {value.dtype}"


def _is_count(value: Any) -> bool:
    """Whether a value is a number, in whatever form files keep it."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not (value.is_meta or value.is_complex() or value.dtype == torch.bool)
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
