"""The options of a parameter group: what they may be, and which parameters may share a stack."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dash_shampoo.blocks import VIEWS
from dash_shampoo.grafting import NAMES
from dash_shampoo.kernels import PRECISIONS
from dash_shampoo.roots import Solver, inverse_root, resolve_solver, solver_options

ALGORITHMS = ("shampoo", "adamw")
VECTORS = ("adamw", "shampoo")
SIDES = ("auto", "both")
NAMED = {
    "algorithm": ALGORITHMS,
    "vectors": VECTORS,
    "view": VIEWS,
    "sides": SIDES,
    "grafting": NAMES,
    "precision": (*PRECISIONS, "auto"),
    "on_nonfinite": ("skip", "raise"),
    "state_dtype": ("fp32", "bf16"),
}

# A change of one of these moves parameters to other stacks; every other option is read anew at each step.
STRUCTURE = (
    "algorithm",
    "vectors",
    "view",
    "sides",
    "split_rows",
    "split_columns",
    "block_size",
    "solver",
    "damping",
    "epsilon",
    "precision",
    "root",
    "grafting",
    "state_dtype",
    "bias_correction",
    "nesterov",
    "maximize",
    "max_workspace",
)
# These are.
READ_AT_EACH_STEP = (
    "lr",
    "betas",
    "weight_decay",
    "update_every",
    "graft_beta2",
    "graft_eps",
    "momentum",
    "start_step",
    "on_nonfinite",
)


def structure(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """The options of ``group`` that decide which stacks its parameters live in."""
    options = [group[name] for name in STRUCTURE if name != "solver"]
    return (*options, resolve_solver(group["solver"]), group["momentum"] > 0)


def described(group: Mapping[str, Any], *, wait: bool) -> dict[str, str]:
    """All options of ``group``, each in words that are the same on every process.

    Args:
        group: a parameter group.
        wait: for tensors on a device; else they are called tensors, whatever their value.
    """
    return {name: _described(group[name], wait) for name in (*STRUCTURE, *READ_AT_EACH_STEP)}


def _described(value: Any, wait: bool) -> str:
    if isinstance(value, Tensor):
        return repr(value.tolist()) if wait or value.device.type == "cpu" else "a tensor"
    return repr([_plain(each) for each in value] if isinstance(value, (tuple, list)) else _plain(value))


def normalise(group: dict[str, Any]) -> None:
    """Checks the options of ``group`` and writes those with several spellings in their plain form.

    A learning rate that is a tensor is read, for which this waits for its device.

    Raises:
        ValueError: an option is of another type, out of its range or not one of its names; the message says what it may
            be.
    """
    group["betas"] = _pair("betas", group["betas"])
    for name in ("split_rows", "split_columns"):
        group[name] = _split(name, group[name])
    chosen = solver_options(group["solver"])
    group["solver"] = chosen if isinstance(chosen, str) else {name: _plain(value) for name, value in chosen.items()}
    make_plain(group)
    _learning_rate(group["lr"])
    for name, beta in (("betas[0]", group["betas"][0]), ("betas[1]", group["betas"][1])):
        _number(name, beta, 1.0)
    for name in ("weight_decay", "graft_eps", "damping", "epsilon"):
        _number(name, group[name])
    _number("momentum", group["momentum"], 1.0)
    if group["graft_beta2"] is not None:
        _number("graft_beta2", group["graft_beta2"], 1.0)
    for name in ("nesterov", "bias_correction", "maximize"):
        _flag(name, group[name])
    for name, allowed in NAMED.items():
        _name(name, group[name], allowed)
    for name in ("block_size", "update_every", "start_step", "max_workspace", "root"):
        if group[name] is not None or name not in ("max_workspace", "root"):
            _count(name, group[name])
    if group["nesterov"] and not group["momentum"]:
        raise ValueError("nesterov needs momentum > 0")
    if group["start_step"] > 1 and group["grafting"] == "none":
        raise ValueError("start_step > 1 needs a grafting method: it is what runs before Shampoo starts")
    for root in roots(group):
        solver = resolve_solver(group["solver"])
        _check_root(root, solver, group["damping"], group["epsilon"], group["precision"])


def snapshot(group: Mapping[str, Any], options: Iterable[str]) -> dict[str, Any]:
    """The ``options`` that a normalised ``group`` has now, for `is_as_before`."""
    own = {name: group.get(name) for name in options}
    return {name: dict(value) if isinstance(value, dict) else value for name, value in own.items()}


def is_as_before(group: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether ``group`` has the options that `snapshot` saw; a tensor is the same while it is the same object."""
    if all(map(operator.is_, map(group.get, before), before.values())):  # at nearly every step, and quick
        return True
    return all(
        (new := group.get(name)) is old or (type(new) is type(old) and not isinstance(new, Tensor) and new == old)
        for name, old in before.items()
    )


def make_plain(group: dict[str, Any]) -> None:
    """Writes NumPy's numbers, which schedulers leave in a group and torch's safe loader refuses, as Python's."""
    for name, value in group.items():
        if type(value) is tuple:
            group[name] = tuple(_plain(each) for each in value)
        else:
            group[name] = _plain(value)


@cache
def _check_root(p: int, solver: Solver, damping: float, epsilon: float, precision: str) -> None:
    """Raises ValueError for a root that ``solver`` cannot compute with these options."""
    none = torch.empty(0, 1, 1, dtype=torch.float32, device="cpu")
    inverse_root(none, p, solver=solver, damping=damping, epsilon=epsilon, precision=precision)


def refuse_misspelt(group: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises ValueError for a key of ``group`` that is no option but nearly spelt like one, or not one of a group.

    Other unknown keys are the user's and the schedulers' own.
    """
    if "wire_dtype" in group:
        raise ValueError("wire_dtype is an option of Dash itself, not of a parameter group")
    for name in group.keys() - known.keys() - {"params", "param_names"}:
        close = get_close_matches(str(name), [*known, "process_group"], n=1, cutoff=0.85)
        if close:
            raise ValueError(f"unknown option {name!r} in a parameter group; did you mean {close[0]!r}?")


def wire(name: str) -> torch.dtype | None:
    """The dtype that ``wire_dtype`` names; ``None`` for that of the updates themselves.

    Raises:
        ValueError: it names none.
    """
    _name("wire_dtype", name, ("fp32", "bf16"))
    return torch.bfloat16 if name == "bf16" else None


def check_process_group(value: Any) -> None:
    """Raises ValueError unless ``process_group`` is "auto", ``None`` or a group that this process is in."""
    if value is not None and value != "auto" and not callable(getattr(value, "size", None)):
        raise ValueError(f"process_group must be 'auto', None or a group that this process is in, not {value!r}")


def roots(group: Mapping[str, Any]) -> tuple[int, ...]:
    """The roots p that a group's solver may be asked for."""
    if group["algorithm"] != "shampoo":
        return ()
    if group["root"] is not None:
        return (group["root"],)
    return (2, 4) if group["vectors"] == "shampoo" else (4,)


def _plain(value: Any) -> Any:
    """A number of NumPy, or an array of no dimension, as one of Python; anything else as it is."""
    return value if isinstance(value, Tensor) or getattr(value, "ndim", None) != 0 else value.item()


def _sequence(value: Any) -> tuple[Any, ...] | None:
    """The entries of a sequence of whatever type, or ``None``."""
    try:
        return tuple(_plain(value[i]) for i in range(len(value)))
    except (TypeError, LookupError):
        return None


def _pair(name: str, value: Any) -> tuple[Any, ...]:
    entries = _sequence(value)
    if entries is None or len(entries) != 2:
        raise ValueError(f"{name} must be two numbers, not {value!r}")
    return entries


def _learning_rate(lr: Any) -> None:
    if not isinstance(lr, Tensor):
        _number("lr", lr)
        return
    if lr.numel() != 1 or lr.is_complex() or lr.dtype == torch.bool:
        kind = f"of shape {tuple(lr.shape)} and dtype {lr.dtype}"
        raise ValueError(f"lr must be a number or a tensor of one real element, not a tensor {kind}")
    _number("lr", lr.item())


def _number(name: str, value: Any, high: float = math.inf) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < high:
        raise ValueError(f"{name} must be a number in [0, {high:g}), not {value!r}")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")


def _count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")


def _split(name: str, value: Any) -> int | tuple[int, ...] | None:
    """The option in its plain form."""
    if value is None:
        return None
    parts, one = _sequence(value), _plain(value)
    for part in (one,) if parts is None else parts:
        _count(f"{name}, or each length in it,", part)
    return one if parts is None else parts


def _name(option: str, value: Any, names: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in names:
        close = get_close_matches(str(value), names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown {option} {value!r}: it may be {', '.join(names)}{hint}")
