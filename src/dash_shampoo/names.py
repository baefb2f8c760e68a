"""Parameters' names, without those of the wrappers around a model or its layers, and what messages call them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# What torch.compile, FullyShardedDataParallel and activation checkpointing call the module that they wrap.
WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def bare_names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a model, each once, with the names that they have in the model without any wrapper."""
    seen: set[int] = set()
    for name, parameter in _walk(model, ""):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter


def _walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters(recurse=False):
        yield path + name, parameter
    parallel = isinstance(module, (DataParallel, DistributedDataParallel))
    for name, child in module.named_children():
        wrapped = name in WRAPPED or (parallel and name == "module")
        yield from _walk(child, path if wrapped else f"{path}{name}.")


def bare_name(name: str) -> str:
    """A name as `bare_names` gives it, where the model is not at hand: each "module" in it counts as a wrapper's."""
    return ".".join(part for part in name.split(".") if part not in (*WRAPPED, "module"))


def names(groups: list[dict[str, Any]]) -> dict[int, str]:
    """What messages call each parameter, by its id: its name if the groups have names, else its place in them."""
    called = {}
    for i, group in enumerate(groups):
        for j, parameter in enumerate(group["params"]):
            known = group.get("param_names")
            called[id(parameter)] = f"parameter {j} of group {i}" if known is None else str(known[j])
    return called


def few(called: Sequence[str]) -> str:
    """The first of some names, for a message."""
    return ", ".join(called[:5]) + ", ..." * (len(called) > 5)
