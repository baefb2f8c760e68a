"""State dicts of all processes together, where each has a part."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from dash_shampoo.names import few
from dash_shampoo.parallel.ownership import Ownership

REMEDIES = (
    "Save what full_state_dict() returns, which every process has to call, or all parts with "
    "torch.distributed.checkpoint; under trainers that save on one process alone, have every process call "
    "consolidate_state_dict() before (docs/integrations.md)"
)


class Asked(NamedTuple):
    """What a function of torch.distributed.checkpoint wants of an optimizer's state dict."""

    whole: bool  # the state of all processes
    everywhere: bool  # at all of them; else at the first


class Consolidated(NamedTuple):
    """That the state of all processes has been gathered for `state_dict`."""

    state: dict[int, Any] | None  # here, or ``None`` where it is another process that has it


def asked() -> Asked | None:
    """What torch.distributed.checkpoint wants of the state dict that it asks for; ``None`` if others ask for it.

    It calls an optimizer's `state_dict` without a word about its `StateDictOptions`, and then gathers what is a
    DTensor: of state that each process has under names of its own it would keep one process's, and lose the others'.
    So the options are read where it has them.

    Raises:
        RuntimeError: this version of torch has them elsewhere.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict":
        frame = frame.f_back
    if frame is None:
        return None
    info: Any = frame.f_locals.get("info")
    if not hasattr(info, "full_state_dict") or not hasattr(info, "cpu_offload"):
        raise RuntimeError(
            "this version of torch.distributed.checkpoint does not say whether it wants the state of all processes: "
            "use full_state_dict() and load_state_dict() of the optimizer"
        )
    return Asked(whole=info.full_state_dict, everywhere=not info.cpu_offload)


def gather(optimizer: Optimizer, part: dict[str, Any], ownership: Ownership, to: int | None) -> dict[str, Any] | None:
    """The state dict of all processes, on the CPU, at the process ``to`` of each world; ``None`` at the others.

    Collective. Goes parameter by parameter, so that no process holds more than it has, but those that get the whole.

    Args:
        optimizer: whose state it is.
        part: its state dict of this process.
        ownership: says which processes hold a parameter.
        to: a rank; ``None`` for all processes.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = [i for group in part["param_groups"] for i in group["params"]]
    states, here = {key: own for key, own in part["state"].items() if key not in ids}, True
    for i, parameter in zip(ids, parameters, strict=True):
        world = ownership.worlds.of(parameter)
        here = here and to in (None, world.rank)
        # A copy, since the state goes on changing.
        state = {
            key: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
            for key, value in part["state"].get(i, {}).items()
        }
        found = world.collect(state, to)
        if found is not None and any(found):
            states[i] = {key: value for each in found for key, value in each.items()}
    return {**part, "state": states} if here else None


def refuse_mixture(saved: Mapping[Any, Any], own: Mapping[Any, Any]) -> None:
    """Refuses a state that fills up another's with this optimizer's own, as torch.distributed.checkpoint does.

    Where a full state dict lacks an entry, `set_optimizer_state_dict` puts what the optimizer has at the time: zeros.

    Args:
        saved: the state that is to be loaded, by parameter. Users may have left more in it, under other keys.
        own: the optimizer's.

    Raises:
        ValueError: a parameter's step count is another's, and some of its tensors are those that are in use.
    """
    states = [state for state in own.values() if isinstance(state, Mapping)]
    live = {id(value) for state in states for value in state.values() if isinstance(value, Tensor)}
    mixed = [
        str(name)
        for name, state in saved.items()
        if isinstance(state, Mapping)
        and "step" in state
        and id(state["step"]) not in live
        and any("." in key and id(value) in live for key, value in state.items())
    ]
    if mixed:
        raise ValueError(
            f"the state of {few(mixed)} lacks what this process owns: it is the "
            f"part of one process among several. {REMEDIES}. A whole state loads without "
            "flatten_optimizer_state_dict, or by load_state_dict()"
        )
