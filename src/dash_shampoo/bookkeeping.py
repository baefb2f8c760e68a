"""Which parameters take part in a step, what their gradients are fit for, and how many of them have counted."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dash_shampoo.names import few
from dash_shampoo.options import structure
from dash_shampoo.parallel.boxes import is_distributed
from dash_shampoo.parallel.census import Survey
from dash_shampoo.parallel.ownership import Entry
from dash_shampoo.parallel.world import Worlds
from dash_shampoo.stacks import Bank

Group = dict[str, Any]
States = Mapping[Any, dict[str, Any]]  # of an optimizer, by parameter


def taking_part(groups: Iterable[Group], state: States, worlds: Worlds) -> list[tuple[Tensor, Group]]:
    """The parameters that have state or will have, each with its group; the same on every process."""

    def is_shared(parameter: Tensor) -> bool:
        return parameter.requires_grad and worlds.of(parameter).size > 1

    return [
        (parameter, group)
        for group in groups
        for parameter in group["params"]
        if parameter.grad is not None or parameter in state or is_shared(parameter)
    ]


def signature(parameters: Iterable[tuple[Tensor, Group]], groups: Iterable[Group]) -> tuple[Any, ...]:
    """What the stacks depend on, but for the state."""
    found = [(id(p), p.device, p.dtype, p.shape) for p, _ in parameters]
    return found, [(id(group), structure(group)) for group in groups]


def ages(bank: Bank, state: States) -> list[int]:
    """How many gradients each parameter will have had after this step, if those come that are expected."""
    return [state[p]["age"] + bank.expects(i) for i, p in enumerate(bank.parameters)]


def count_gradients(banks: Iterable[Bank], state: States) -> None:
    """Adds the gradients of the last step that count to the ages, once."""
    for bank in banks:
        for parameter, came in zip(bank.parameters, bank.came(), strict=True):
            own = state.get(parameter, {})
            if came and "age" in own:  # or the user has taken it out
                own["age"] += 1


def refuse_nonfinite(bank: Bank, survey: Survey, called: Mapping[int, str]) -> None:
    """Raises for gradients that cannot be used, where their groups ask for it; only that waits for the device.

    Args:
        bank: of the parameters.
        survey: of their gradients.
        called: names by ids.

    Raises:
        FloatingPointError: a gradient is not finite, or missing on some processes; the message says which.
    """
    asked = [group["on_nonfinite"] == "raise" for group in bank.groups]
    if not any(asked):
        return
    faults = {
        "is not finite": survey.whole & ~survey.good,
        "is missing on some of the processes that hold replicas": survey.present & ~survey.whole,
    }
    found = []
    for fault, bad in faults.items():
        refused = [p for p, *both in zip(bank.parameters, asked, bad.tolist(), strict=True) if all(both)]
        if refused:
            found.append(f"the gradient of {few([called[id(parameter)] for parameter in refused])} {fault}")
    if found:
        raise FloatingPointError(f"{', and '.join(found)}; no parameter has been moved")


def warn_of_stale_parameters(entries: Sequence[Entry], called: Mapping[int, str]) -> None:
    """Warns of parameters that have no gradient at the first step, which a model may not have any more.

    Of those that processes hold in parts a gradient may be missing here alone, so it takes all of them to be odd.
    """
    shared = [entry.parameter for entry in entries if entry.world.size > 1]
    missing = [parameter for parameter in shared if parameter.grad is None]
    if len(missing) < len(shared):
        missing = [parameter for parameter in missing if not is_distributed(parameter)]
    if missing:
        warnings.warn(
            f"no gradient on this process for {few([called[id(parameter)] for parameter in missing])}: if "
            "fully_shard has replaced parameters since Dash was made, make Dash after it; requires_grad=False for "
            "those that never get one",
            RuntimeWarning,
            stacklevel=5,
        )
