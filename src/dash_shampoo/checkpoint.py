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

from dash_shampoo.layout import layout, state_dtype
from dash_shampoo.names import bare_name, names
from dash_shampoo.options import normalise
from dash_shampoo.parallel.ownership import Ownership
from dash_shampoo.stacks import Bank
from dash_shampoo.state_checks import check_blocks, check_complete, check_fit, check_group, tile_of, without_idle


class Held:
    """A parameter's state on its way through the base class.

    Attributes:
        state: as it will be.
        writes: tensors in it that are the optimizer's already, each with the values that it will have.
    """

    def __init__(self, state: dict[str, Any], writes: list[tuple[Tensor, Tensor]]) -> None:
        self.state = state
        self.writes = writes


@torch.no_grad()
def release(state: dict[Any, Any]) -> None:
    """Opens the boxes of `match`: from here on the state is the optimizer's own."""
    for parameter, held in state.items():
        if isinstance(held, Held):
            state[parameter] = held.state
            for target, source in held.writes:
                target.copy_(source)


def match(optimizer: Optimizer, ownership: Ownership, banks: list[Bank], state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict in the order of the optimizer's own parameters, on their devices, checked and boxed.

    Nothing of the optimizer has changed when this is through, and nothing that comes after it can fail. Values are to
    be written to the tensors that the optimizer has, where those fit: a second state beside them may find no memory.

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
                owned, now_asked = ownership.owned(parameter, group), layout(parameter, group)
                check_fit(states[i], now_asked, called[id(parameter)])
                check_blocks(states[i], now_asked, called[id(parameter)])
                shapes = layout(parameter, merged)
                check_complete(states[i], shapes, owned, called[id(parameter)])
                own = {key: v for key, v in states[i].items() if tile_of(key) is None or key in shapes}
                fitting[i] = parameter, {key: v for key, v in own.items() if tile_of(key) in (None, *owned)}
    now = optimizer.state
    stacked: dict[int, Tensor] = {entry.data_ptr(): entry for bank in banks for entry in bank.entries(now)}
    held = {i: _held(new, parameter, now.get(parameter, {}), stacked) for i, (parameter, new) in fitting.items()}
    return {**state_dict, "state": {**states, **held}, "param_groups": saved}


def _held(state: Mapping[str, Any], parameter: Tensor, now: Mapping[str, Any], stacked: Mapping[int, Tensor]) -> Held:
    """A parameter's state for its device, with counts as the optimizer keeps them.

    Args:
        state: that is loaded.
        parameter: whose state it is.
        now: the state that there is.
        stacked: entries of the optimizer's whole state that the stacks hold, by their places in memory.
    """
    kept, writes = dict(state), []
    for key, dtype in (("step", state_dtype(parameter)), ("skipped", torch.int64)):
        if key in state:
            number = state[key].reshape(()) if isinstance(state[key], Tensor) else state[key]
            kept[key] = torch.as_tensor(number, dtype=dtype, device=parameter.device)
    for key in ("age", "turn"):
        if key in state:
            kept[key] = int(state[key])
    for key, value in kept.items():
        if not isinstance(value, Tensor):
            continue
        target = now.get(key)
        if isinstance(target, Tensor) and stacked.get(target.data_ptr()) is target and _alike(target, value):
            kept[key] = target
            if value.data_ptr() != target.data_ptr() or value.stride() != target.stride():
                # What lies in the state itself, under another name, might be written over before it is read.
                lies_there = value.untyped_storage().data_ptr() in stacked
                writes.append((target, value.clone() if lies_there else value))
        else:
            kept[key] = value.to(parameter.device, copy=True)
    return Held(kept, writes)


def _alike(target: Tensor, value: Tensor) -> bool:
    return target.shape == value.shape and target.dtype == value.dtype


def take_over(
    state: dict[Any, Any], banks: list[Bank], before: list[Bank], called: Mapping[int, str], *, as_it_was: bool
) -> None:
    """Has banks take what stands in an optimizer's state, and leaves there what the banks serve.

    Args:
        state: of the optimizer, by parameter.
        banks: of all parameters.
        before: those that may hold the state now.
        called: the parameters' names by their ids, for messages.
        as_it_was: whether parameters and options are those that the state was made for. Else what the options ask for
            now may be missing, and begins anew.

    Raises:
        ValueError: an entry does not fit, or one is missing. Nothing has been taken then.
    """
    own: dict[Any, dict[str, Any]] = {}
    for bank in banks:
        for parameter, shapes in zip(bank.parameters, bank.shapes(), strict=True):
            own[parameter] = entries = state.get(parameter, {})
            check_fit(entries, shapes, called[id(parameter)])
            needed = {key: s for key, s in shapes.items() if as_it_was or tile_of(key) is None or ".moment" in key}
            check_complete(entries, needed, {str(tile_of(key)) for key in needed}, called[id(parameter)])
    slabs = {slab.first: slab for bank in before for slab in bank.slabs}
    for bank in banks:
        states = [own[parameter] for parameter in bank.parameters]
        bank.take(states, slabs)
        for entries, shapes, turn in zip(states, bank.shapes(), bank.turns, strict=True):
            entries["age"], entries["turn"] = int(entries.get("age", 0)), int(entries.get("turn", turn))
            for key in [key for key in entries if tile_of(key) is not None and key not in shapes]:
                del entries[key]
    for known in [known for known in state if isinstance(known, Tensor)]:  # other keys are the user's
        del state[known]
    state.update(own)


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
