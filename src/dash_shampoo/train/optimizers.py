"""The optimizers that the command compares, each on the same parameters."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dash_shampoo import Dash, param_groups
from dash_shampoo.train.errors import InputError, choose
from dash_shampoo.train.settings import Settings

BETAS = (0.9, 0.95)
KINDS: dict[str, type[Optimizer]] = {"dash": Dash, "adamw": AdamW, "muon": torch.optim.Muon, "sgd": SGD}


# Packages whose name for pip is not that of their module.
PACKAGES = {"distributed_shampoo": "git+https://github.com/facebookresearch/optimizers"}


def optimizer_class(name: str) -> type[Optimizer]:
    """The class of an optimizer: one of `KINDS` by its name, or any that is installed by ``module:Class``.

    Raises:
        InputError: there is no such name, the module is not installed, or it has no such class.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        return KINDS[choose("optimizer", name, KINDS)]
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        top = module.partition(".")[0]
        package = PACKAGES.get(top, top.replace("_", "-"))
        raise InputError(f"{name} is not installed: pip install {package} ({error})") from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise InputError(f"{module} has no optimizer {attribute!r}")
    return found


def make_optimizers(model: nn.Module, settings: Settings) -> list[Optimizer]:
    """The optimizer of the settings: one, or two for Muon and those of other packages, which move matrices only.

    AdamW moves the rest then.

    Raises:
        InputError: the optimizer does not know an option, or refuses its value.
    """
    kind = optimizer_class(settings.optimizer)
    parameters = inspect.signature(kind).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        known = [name for name in parameters if name != "params"]
        for name in settings.options:
            choose(f"option of {settings.optimizer}", name, known)
    groups = param_groups(model)
    common: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    try:
        if settings.optimizer == "dash":
            return [Dash(groups, **{**common, **settings.options})]
        plain = [{key: value for key, value in group.items() if key != "algorithm"} for group in groups]
        if settings.optimizer == "adamw":
            return [AdamW(plain, **{"betas": BETAS, **common, **settings.options})]
        if settings.optimizer == "sgd":
            return [SGD(plain, **{"momentum": 0.9, **common, **settings.options})]
        matrices = [group for group in plain if group["name"] == "matrices"]
        rest = [group for group in plain if group["name"] != "matrices"]
        usual = dict(common)
        own = {"adjust_lr_fn": "match_rms_adamw"} if settings.optimizer == "muon" else {}
        if "weight_decay" not in parameters and not settings.weight_decay:
            common.pop("weight_decay")
        return [kind(matrices, **{**own, **common, **settings.options}), AdamW(rest, **{"betas": BETAS, **usual})]
    except (TypeError, ValueError) as error:
        raise InputError(f"{settings.optimizer}: {str(error).splitlines()[0]}") from error


def make_schedulers(optimizers: list[Optimizer], settings: Settings) -> list[LambdaLR]:
    """Learning rates over the run, as a fraction of the peak."""
    return [LambdaLR(optimizer, lambda step: learning_rate(step, settings)) for optimizer in optimizers]


def learning_rate(step: int, settings: Settings) -> float:
    """The fraction of the peak learning rate at a step: linear warm-up, then down to a tenth.

    "cosine" falls all the way; "wsd" (warm-up, stable, decay) stays at the peak for 80 % and then falls linearly.
    """
    warmup = min(settings.warmup, settings.steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, settings.steps - warmup)
    if settings.schedule == "wsd":
        return 1.0 - 0.9 * max(0.0, (progress - 0.8) / 0.2)
    return 0.1 + 0.45 * (1 + float(torch.cos(torch.tensor(torch.pi * min(1.0, progress), dtype=torch.float64))))
