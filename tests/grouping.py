"""The groups of a model, in a form that a test can write down."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn

from dash_shampoo import describe, param_groups

Groups = dict[str, list[str]]


def grouping(build: Callable[[], nn.Module]) -> Groups:
    """The groups of a model on the meta device, layers' numbers as ``*``, and of the vectors those that are not 1-D."""
    with torch.device("meta"):
        groups = param_groups(build())
    describe(groups)  # Dash takes each parameter as its group says
    found: Groups = {}
    for group in groups:
        for name, parameter in group["params"]:
            if parameter.ndim != 1:
                found.setdefault(group["name"], []).append(re.sub(r"(?<![^.])\d+(?![^.])", "*", name))
    return {group: sorted(set(called)) for group, called in found.items()}
