"""Which parameters Dash can move: the others are refused by name, before anything has moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dash_shampoo.blocks import pieces, stack_shape
from dash_shampoo.names import names
from dash_shampoo.parallel.boxes import as_plain, is_distributed, is_wrapper, local, unsupported


def check_parameters(groups: list[dict[str, Any]]) -> None:
    """Refuses parameters that Dash cannot move, or cannot read as their group says.

    Raises:
        TypeError: complex, not floating point, sparse, distributed or on the meta device, of a subclass that cannot be
            written to, or with a sparse gradient.
            A parameter that is frozen, with neither ``requires_grad`` nor a gradient, may be anything.
        ValueError: the group's ``view`` or splits do not fit the parameter's shape.
    """
    for group in groups:
        for parameter in group["params"]:
            problem = _problem(parameter, group)
            if problem:
                raise TypeError(f"{names(groups)[id(parameter)]} {problem}")
            if reason := misfit(parameter, group):
                raise ValueError(f"{names(groups)[id(parameter)]} has the shape {tuple(parameter.shape)}: {reason}")


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


def misfit(parameter: Tensor, group: Mapping[str, Any]) -> str | None:
    """Why the group's ``view`` or splits do not fit a parameter's shape, or ``None`` if they do."""
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


def _problem(parameter: Tensor, group: Mapping[str, Any]) -> str | None:
    if not parameter.requires_grad and parameter.grad is None:
        return None  # frozen: it may be anything
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
    if is_wrapper(held := local(parameter)) and not _is_writable(held):
        return (
            f"is a {type(held).__name__}, which clone and copy_ do not read and write: Dash moves such parameters by "
            "them; implement both in its __torch_dispatch__, or optimise the tensor that it wraps"
        )
    return None


@torch.no_grad()
def _is_writable(held: Tensor) -> bool:
    """Whether a wrapper subclass takes new values, tried on a clone."""
    if not held.numel():
        return True
    try:
        twin, before = held.detach().clone(), as_plain(held, held.dtype)
        twin.copy_(torch.zeros_like(before) if before.any() else torch.ones_like(before))
        return not torch.equal(as_plain(twin, held.dtype), before)
    except (NotImplementedError, TypeError):
        return False
