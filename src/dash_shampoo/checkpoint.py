"""Loading and moving state without changing a bit of it.

`torch.optim.Optimizer.load_state_dict` casts every tensor to its parameter's dtype, which would cut the float32 factors
of a bfloat16 parameter down to bfloat16. `match` therefore hands the state over in `Held` boxes, which the base class
passes through, and `release` opens them. Its other work is to let named parameters find their state in any order, and
to take from a whole state what this process owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dash_shampoo.layout import layout
from dash_shampoo.names import bare_name
from dash_shampoo.options import names
from dash_shampoo.parallel.ownership import Ownership


class Held:
    """A parameter's state on its way through the base class."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


def release(state: dict[Any, Any]) -> None:
    """Opens the boxes of `match`: from here on the state is the optimizer's own, on its parameters' devices."""
    for parameter, held in state.items():
        if isinstance(held, Held):
            state[parameter] = {
                name: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                for name, value in held.state.items()
            }


def match(optimizer: Optimizer, ownership: Ownership, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict in the order of the optimizer's own parameters, checked against them and boxed.

    Raises:
        ValueError: the names differ, a tensor has another shape than the parameter's blocks ask for, or one is missing.
    """
    groups = optimizer.param_groups
    saved = state_dict["param_groups"]
    if all("param_names" in group for group in chain(groups, saved)):
        saved = _by_name(groups, saved)
    ids = chain.from_iterable(group["params"] for group in saved)
    parameters = chain.from_iterable(((p, group) for p in group["params"]) for group in groups)
    states, called = dict(state_dict["state"]), names(groups)
    for i, (parameter, group) in zip(ids, parameters, strict=False):
        if i in states:
            owned, shapes = ownership.owned(parameter, group), layout(parameter, group)
            _check(states[i], shapes, owned, called[id(parameter)])
            _refuse_other_sides(states[i], shapes, called[id(parameter)])
            states[i] = Held({key: value for key, value in states[i].items() if _tile(key) in (None, *owned)})
    return {**state_dict, "state": states, "param_groups": saved}


def restore(views: Mapping[str, Tensor], old: Mapping[str, Any], name: str) -> None:
    """Copies an earlier state into the stacks' views; of a parameter that had none, each keeps its first value.

    Raises:
        ValueError: a tensor has another shape than its view, or a tile is missing.
    """
    _check(old, {key: view.shape for key, view in views.items()}, {_tile(key) for key in views} - {None}, name)
    for key, view in views.items():
        if key in old:
            view.copy_(old[key])


def _tile(key: str) -> str | None:
    """The tile that an entry of the state is of, or ``None`` for those of the parameter."""
    tile, dot, _ = key.partition(".")
    return tile if dot else None


def _check(
    state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], tiles: AbstractSet[str | None], name: str
) -> None:
    """Makes sure that a parameter's state, if there is one, has ``tiles`` and none but tensors of these ``shapes``."""
    for key, shape in shapes.items():
        if key in state and tuple(state[key].shape) != tuple(shape):
            raise ValueError(
                f"the state of {name} does not fit: {key} is {tuple(state[key].shape)}, but its shape and block_size "
                f"ask for {tuple(shape)}; use the model, and the block_size, view, sides and splits, that the state "
                "was made with"
            )
    there = {_tile(key) for key in state} - {None}
    missing = sorted(map(str, tiles - there)) if "step" in state else []
    if missing:
        raise ValueError(
            f"the state of {name} lacks {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}: it is of other blocks, "
            "or the part of one process among several; save what full_state_dict() returns, or all parts with "
            "torch.distributed.checkpoint"
        )


def _refuse_other_sides(state: Mapping[str, Any], shapes: Mapping[str, Any], name: str) -> None:
    """Raises ValueError for a state with factors of sides that are not preconditioned."""
    other = sorted(key for key in state if key.endswith((".left", ".right")) and key not in shapes)
    if other:
        raise ValueError(
            f"the state of {name} does not fit: it has {other[0]}, a factor of a side that is not preconditioned now. "
            "It was made with sides='both', which was the rule before there was that option: set it for this "
            "parameter's group, or start its state anew"
        )


def _by_name(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved groups, in the order and division of the optimizer's own."""
    # Files may have the names of a wrapped model.
    spell = str if _names(groups) == _names(saved) else bare_name
    places = {
        spell(name): (group, i)
        for group in saved
        for name, i in zip(group["param_names"], group["params"], strict=True)
    }
    own = [spell(name) for group in groups for name in group["param_names"]]
    differing = sorted(places.keys() ^ set(own))
    if differing:
        raise ValueError(f"the state is of other parameters: {', '.join(differing[:5])} {'...' * (len(differing) > 5)}")
    ordered = []
    for group in groups:
        names = group["param_names"]
        options = places[spell(names[0])][0] if names else group
        ordered.append(
            {**group, **options, "params": [places[spell(name)][1] for name in names], "param_names": list(names)}
        )
    return ordered


def _names(groups: list[dict[str, Any]]) -> set[str]:
    return {name for group in groups for name in group["param_names"]}
