"""The options of a parameter group: what they may be, and which parameters may share a stack."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from dash_shampoo.blocks import VIEWS, pieces, stack_shape
from dash_shampoo.grafting import NAMES
from dash_shampoo.parallel.boxes import is_distributed, unsupported
from dash_shampoo.roots import inverse_root, resolve_solver, solver_options

ALGORITHMS = ("shampoo", "adamw")
VECTORS = ("adamw", "shampoo")
SIDES = ("auto", "both")

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


def structure(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """The options of ``group`` that decide which stacks its parameters live in."""
    options = [group[name] for name in STRUCTURE if name != "solver"]
    return (*options, resolve_solver(group["solver"]), group["momentum"] > 0)


def normalise(group: dict[str, Any]) -> None:
    """Checks the options of ``group`` and writes those with several spellings in their plain form.

    Raises:
        ValueError: an option is out of its range or not one of its names; the message says what it may be.
    """
    group["solver"] = solver_options(group["solver"])
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr must be a number or a tensor of one element, not a tensor of shape {tuple(lr.shape)}")
    else:
        _number("lr", lr, 0.0)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, not {betas!r}")
    for name, beta in (("betas[0]", betas[0]), ("betas[1]", betas[1]), ("graft_beta2", group["graft_beta2"])):
        if beta is not None:
            _number(name, beta, 0.0, 1.0)
    _number("weight_decay", group["weight_decay"], 0.0)
    _number("momentum", group["momentum"], 0.0, 1.0)
    _number("graft_eps", group["graft_eps"], 0.0)
    _name("algorithm", group["algorithm"], ALGORITHMS)
    _name("vectors", group["vectors"], VECTORS)
    _name("view", group["view"], VIEWS)
    _name("sides", group["sides"], SIDES)
    for name in ("split_rows", "split_columns"):
        group[name] = _split(name, group[name])
    _name("on_nonfinite", group["on_nonfinite"], ("skip", "raise"))
    _name("grafting", group["grafting"], NAMES)
    _name("state_dtype", group["state_dtype"], ("fp32", "bf16"))
    for name in ("block_size", "update_every", "start_step", "max_workspace", "root"):
        if group[name] is not None or name not in ("max_workspace", "root"):
            _count(name, group[name])
    if group["nesterov"] and not group["momentum"]:
        raise ValueError("nesterov needs momentum > 0")
    if group["start_step"] > 1 and group["grafting"] == "none":
        raise ValueError("start_step > 1 needs a grafting method: it is what runs before Shampoo starts")
    for root in roots(group):
        own = {name: group[name] for name in ("solver", "damping", "epsilon", "precision")}
        inverse_root(torch.empty(0, 1, 1), root, **own)


def refuse_misspelt(group: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises ValueError for a key of ``group`` that is no option but nearly spelt like one.

    Other unknown keys are the user's and the schedulers' own.
    """
    for name in group.keys() - known.keys() - {"params", "param_names"}:
        close = get_close_matches(str(name), known, n=1, cutoff=0.85)
        if close:
            raise ValueError(f"unknown option {name!r} in a parameter group; did you mean {close[0]!r}?")


def names(groups: list[dict[str, Any]]) -> dict[int, str]:
    """What messages call each parameter, by its id: its name if the groups have names, else its place in them."""
    called = {}
    for i, group in enumerate(groups):
        for j, parameter in enumerate(group["params"]):
            known = group.get("param_names")
            called[id(parameter)] = f"parameter {j} of group {i}" if known is None else str(known[j])
    return called


def check_parameters(groups: list[dict[str, Any]]) -> None:
    """Refuses parameters that Dash cannot move, or cannot read as their group says.

    Raises:
        TypeError: complex, not floating point, sparse, distributed or on the meta device, or with a sparse gradient.
        ValueError: the group's ``view`` or splits do not fit the parameter's shape.
    """
    for group in groups:
        for parameter in group["params"]:
            problem = _problem(parameter, group)
            if problem:
                raise TypeError(f"{names(groups)[id(parameter)]} {problem}")
            misfit = _misfit(parameter, group)
            if misfit:
                raise ValueError(f"{names(groups)[id(parameter)]} has the shape {tuple(parameter.shape)}: {misfit}")


def refuse_duplicates(params: list[Any]) -> None:
    """Raises ValueError for a list of parameters, or of (name, parameter) pairs, that has one of them twice."""
    seen: set[int] = set()
    for i, entry in enumerate(params):
        name, parameter = entry if isinstance(entry, tuple) else (f"parameter {i}", entry)
        if id(parameter) in seen:
            raise ValueError(f"{name} is in its parameter group more than once")
        seen.add(id(parameter))


def has_matrices(group: Mapping[str, Any]) -> bool:
    """Whether a group has parameters of two or more dimensions."""
    return any(parameter.ndim > 1 for parameter in group["params"])


def refuse_flattened(groups: list[dict[str, Any]], had_matrices: list[bool]) -> None:
    """Raises TypeError for a group that had matrices when it was given, and now has vectors alone.

    DeepSpeed's ZeRO puts one flat vector, without any mark, in the place of a group's parameters.
    """
    if len(groups) != len(had_matrices):
        return
    for i, (group, had) in enumerate(zip(groups, had_matrices, strict=True)):
        if had and group["params"] and not has_matrices(group):
            raise TypeError(
                f"group {i} had matrices and now has vectors alone, as if DeepSpeed had flattened them: Dash needs "
                "their shapes; use fully_shard (FSDP2) or DistributedDataParallel"
            )


def _problem(parameter: Tensor, group: Mapping[str, Any]) -> str | None:
    if parameter.is_complex():
        return "is complex; Dash moves real parameters only: optimise torch.view_as_real of it"
    if not parameter.is_floating_point():
        return f"has dtype {parameter.dtype}; Dash moves floating-point parameters only"
    if parameter.layout != torch.strided:
        return "is sparse; Dash moves dense parameters only: give it to another optimizer"
    if parameter.is_meta:
        return "is on the meta device: materialise the model first, with model.to_empty(device=...)"
    if is_distributed(parameter) and (reason := unsupported(parameter, group["view"])):
        return reason
    if hasattr(parameter, "_fsdp_flattened"):
        return "is flattened by FullyShardedDataParallel, which hides its shape: use fully_shard (FSDP2)"
    if hasattr(parameter, "ds_id"):
        return "is partitioned by DeepSpeed, which hides its shape: use fully_shard (FSDP2) or DistributedDataParallel"
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        return "has a sparse gradient; use dense gradients (sparse=False in nn.Embedding)"
    return None


def _misfit(parameter: Tensor, group: Mapping[str, Any]) -> str | None:
    if group["view"] == "stack" and parameter.ndim < 3:
        return "view='stack' is for three or more dimensions, of which the last two are those of the matrices"
    if parameter.ndim < 2 or group["algorithm"] != "shampoo":
        return None
    _, *lengths = stack_shape(parameter.shape, group["view"])
    for name, length in zip(("rows", "columns"), lengths, strict=True):
        try:
            pieces(length, group[f"split_{name}"])
        except ValueError as error:
            return f"split_{name} does not fit, {error}"
    return None


def wire(name: str) -> torch.dtype | None:
    """The dtype that ``wire_dtype`` names; ``None`` for that of the updates themselves.

    Raises:
        ValueError: it names none.
    """
    _name("wire_dtype", name, ("fp32", "bf16"))
    return torch.bfloat16 if name == "bf16" else None


def roots(group: Mapping[str, Any]) -> tuple[int, ...]:
    """The roots p that a group's solver may be asked for."""
    if group["algorithm"] != "shampoo":
        return ()
    if group["root"] is not None:
        return (group["root"],)
    return (2, 4) if group["vectors"] == "shampoo" else (4,)


def _number(name: str, value: Any, low: float, high: float = math.inf) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not low <= float(value) < high:
        raise ValueError(f"{name} must be a number in [{low:g}, {high:g}), not {value!r}")


def _count(name: str, value: Any) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")


def _split(name: str, value: Any) -> int | tuple[int, ...] | None:
    """The option in its plain form."""
    if value is None:
        return None
    parts = value if isinstance(value, (list, tuple)) else [value]
    for part in parts:
        _count(f"{name}, or each length in it,", part)
    return tuple(map(int, value)) if isinstance(value, (list, tuple)) else int(value)


def _name(option: str, value: Any, names: tuple[str, ...]) -> None:
    if value not in names:
        close = get_close_matches(str(value), names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown {option} {value!r}: it may be {', '.join(names)}{hint}")
