"""A model's parameters and Dash's options for each of them, on the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dash_shampoo import Dash, param_groups
from dash_shampoo.options import normalise, wire
from dash_shampoo.train.errors import InputError, choose
from dash_shampoo.train.llama import Llama, LlamaConfig


class Options(NamedTuple):
    """Options of Dash.

    Attributes:
        defaults: of every group.
        wire: dtype in which updates travel, ``None`` for that of the state.
    """

    defaults: dict[str, Any]
    wire: torch.dtype | None


def options(given: Mapping[str, Any]) -> Options:
    """Dash's options, checked as Dash checks them.

    Raises:
        InputError: Dash does not know an option, or refuses its value.
    """
    known = [name for name in inspect.signature(Dash).parameters if name not in ("params", "process_group")]
    for name in given:
        choose("option of dash", name, known)
    try:
        defaults = Dash([torch.zeros(1)], **given).defaults
        return Options(defaults, wire(given.get("wire_dtype", "fp32")))
    except (TypeError, ValueError) as error:
        raise InputError(f"dash: {str(error).splitlines()[0]}") from error


def meta_model(config: LlamaConfig, dtype: torch.dtype = torch.float32) -> Llama:
    """A model that takes no memory, with its parameters in a dtype."""
    with torch.device("meta"):
        return Llama(config).to(dtype)


def parameters(model: nn.Module, defaults: Mapping[str, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
    """The parameters of a model, each with its group, in the order in which Dash goes through them."""
    found = []
    for group in param_groups(model):
        full = {**defaults, **group}
        normalise(full)
        found += [(parameter, full) for _, parameter in group["params"]]
    return found
