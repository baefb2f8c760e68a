"""The optimizers that the command compares, each on the same parameters."""

from __future__ import annotations

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


def make_optimizers(model: nn.Module, settings: Settings) -> list[Optimizer]:
    """The optimizer of the settings: one, or two for Muon, which moves matrices only and leaves the rest to AdamW.

    Raises:
        InputError: the optimizer does not know an option, or refuses its value.
    """
    known = [name for name in inspect.signature(KINDS[settings.optimizer]).parameters if name != "params"]
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
        muon = torch.optim.Muon(matrices, **{"adjust_lr_fn": "match_rms_adamw", **common, **settings.options})
        return [muon, AdamW(rest, betas=BETAS, **common)]
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
