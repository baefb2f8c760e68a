"""Loading and moving state without changing a bit of it.

`torch.optim.Optimizer.load_state_dict` casts every tensor to its parameter's dtype, which would cut the float32 factors
of a bfloat16 parameter down to bfloat16. `match` therefore hands the state over in `Held` boxes, which the base class
passes through, and `release` opens them. Its other work is to let named parameters find their state in any order, to
take from a whole state what this process owns, and to do all that may fail before anything has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dash_shampoo.fit import check_blocks, check_complete, check_fit, check_group, tile_of, without_idle
from dash_shampoo.layout import layout, state_dtype
from dash_shampoo.names import bare_name
from dash_shampoo.options import names, normalise
from dash_shampoo.parallel.ownership import Ownership


class Held:
    """A parameter's state on its way through the base class."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state


def release(state: dict[Any, Any]) -> None:
    """Opens the boxes of `match`: from here on the state is the optimizer's own."""
    for parameter, held in state.items():
        if isinstance(held, Held):
            state[parameter] = held.state


def match(optimizer: Optimizer, ownership: Ownership, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state dict in the order of the optimizer's own parameters, on their devices, checked and boxed.

    Nothing of the optimizer has changed when this is through, and nothing that comes after it can fail.

    Raises:
        ValueError: the names differ, or a parameter's state does not fit it or is not complete.
    """
    groups = optimizer.param_groups
    saved = state_dict["param_groups"]
    states = {i: without_idle(own) if isinstance(own, Mapping) else own for i, own in state_dict["state"].items()}
    kept = set(chain.from_iterable(own for own in states.values() if isinstance(own, Mapping)))
    for group in saved:
        check_group(group, kept)
    if all("param_names" in group for group in chain(groups, saved)):
        saved = _by_name(groups, saved)
    called = names(groups)
    fitting: dict[Any, tuple[Tensor, dict[str, Any]]] = {}
    for group, new in zip(groups, saved, strict=False):
        merged = {**group, **new}
        normalise(merged)
        for parameter, i in zip(group["params"], new["params"], strict=False):
            if i in states:
                owned = ownership.owned(parameter, group)
                check_fit(states[i], layout(parameter, group), called[id(parameter)])
                check_blocks(states[i], layout(parameter, group), called[id(parameter)])
                shapes = layout(parameter, merged)
                check_complete(states[i], shapes, owned, called[id(parameter)])
                own = {key: v for key, v in states[i].items() if tile_of(key) is None or key in shapes}
                fitting[i] = parameter, {key: v for key, v in own.items() if tile_of(key) in (None, *owned)}
    held = {i: Held(_copied(own, parameter)) for i, (parameter, own) in fitting.items()}
    return {**state_dict, "state": {**states, **held}, "param_groups": saved}


def _copied(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """A parameter's state on its device, with counts as the optimizer keeps them."""
    copied = {
        key: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }
    for key, dtype in (("step", state_dtype(parameter)), ("skipped", torch.int64)):
        if key in state:
            number = copied[key].reshape(()) if isinstance(copied[key], Tensor) else copied[key]
            copied[key] = torch.as_tensor(number, dtype=dtype, device=parameter.device)
    if "age" in state:
        copied["age"] = int(state["age"])
    return copied


def restore(views: Mapping[str, Tensor], old: Mapping[str, Any], name: str) -> None:
    """Copies an earlier state into the stacks' views; of a parameter that had none, each keeps its first value.

    Raises:
        ValueError: a tensor does not fit its view, or a tile is missing.
    """
    shapes = {key: tuple(view.shape) for key, view in views.items()}
    check_fit(old, shapes, name)
    kept = {key: shape for key, shape in shapes.items() if tile_of(key) is None or key.endswith(".moment")}
    check_complete(old, kept, {str(tile_of(key)) for key in kept}, name)
    for key, view in views.items():
        if key in old:
            view.copy_(old[key])


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
