"""Runs for the claim of compression: trained models, at equal loss and at equal steps, and what rounding costs them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from dash_shampoo.claim.report import Row
from dash_shampoo.claim.rounding import activations, kurtosis, linears, outlier, rounded
from dash_shampoo.compare.contenders import Contender, parse
from dash_shampoo.compare.runs import Case, cases
from dash_shampoo.train.errors import InputError
from dash_shampoo.train.loop import Trainer
from dash_shampoo.train.settings import LEARNING_RATES, Settings

OPTIMIZERS = ("adamw", "dash", "muon")
LOSSES_OF_A_RUN = 40
ROUNDINGS: dict[str, tuple[int, int | None]] = {
    "int8 weights": (8, None),
    "int4 weights": (4, None),
    "int8 weights and activations": (8, 8),
}
SPREADS = ("weights' kurtosis", "weights' outlier", "activations' kurtosis", "activations' outlier")


def contenders(texts: Sequence[str]) -> list[Contender]:
    """Optimizers with one learning rate each, the reference first.

    Raises:
        InputError: one has several learning rates, or none that is usual, or cannot be used.
    """
    found = []
    for text in texts:
        each = parse(text)
        usual = LEARNING_RATES.get(each.optimizer)
        if "lr=" not in text and usual is not None:
            each = dataclasses.replace(each, rates=(usual,))
        if len(each.rates) > 1:
            raise InputError(f"{text!r} needs one learning rate here, as in {each.optimizer},lr={each.rates[0]:g}")
        found.append(each)
    return found


def measured(trainer: Trainer, loss: float) -> Row:
    """What a model at this validation loss has of outliers, and what rounding costs it, in nats."""
    tokens, _ = trainer.validation_batches().draw(trainer.device)
    weights = [each.weight for each in linears(trainer.model)]
    inside = list(activations(trainer.model, tokens))
    found: Row = {
        "step": trainer.step,
        "loss": loss,
        "weights' kurtosis": median(map(kurtosis, weights)),
        "weights' outlier": max(map(outlier, weights)),
        "activations' kurtosis": median(each for each, _ in inside),
        "activations' outlier": max(each for _, each in inside),
    }
    for name, (bits, inputs) in ROUNDINGS.items():
        with rounded(trainer.model, bits, inputs):
            found[name] = trainer.evaluate() - loss
    return found


def measure(settings: Settings, target: float | None) -> dict[str, Any]:
    """Trains once, and looks at the model at the end, and where its loss is first at the target or below.

    Args:
        settings: of the run.
        target: loss of the reference, or ``None`` if this is it.

    Returns:
        ``curve`` of [step, validation loss]; ``steps`` and ``loss``, what `measured` found at equal steps and at equal
        loss, each ``None`` if the loss was not finite, or never at the target.
    """
    trainer = Trainer(settings)
    every = max(1, settings.steps // LOSSES_OF_A_RUN)
    curve = [[0, trainer.evaluate()]]
    found: dict[str, Any] = {"curve": curve, "steps": None, "loss": None}
    while trainer.step < settings.steps and math.isfinite(curve[-1][1]):
        trainer.train_step()
        if trainer.step % every and trainer.step != settings.steps:
            continue
        loss = trainer.evaluate()
        curve.append([trainer.step, loss])
        if target is not None and found["loss"] is None and loss <= target:
            found["loss"] = measured(trainer, loss)
    if math.isfinite(curve[-1][1]):
        found["steps"] = measured(trainer, curve[-1][1])
    if target is None:
        found["loss"] = found["steps"]
    return found


def trained(
    taking_part: Sequence[Contender], seeds: int, common: Settings, folder: Path, console: Console
) -> dict[Case, dict[str, Any]]:
    """What `measure` found in every run, of which those that are there already are not made again.

    Raises:
        InputError: a setting or an option cannot be used, or a reference's loss is not finite.
    """
    (folder / "runs").mkdir(exist_ok=True)
    found: dict[Case, dict[str, Any]] = {}
    targets: dict[int, float] = {}
    for case in cases(taking_part, range(1, seeds + 1), common):
        reference = case.contender is taking_part[0]
        target = None if reference else targets[case.seed]
        found[case] = _known_or_made(case, target, folder)
        console.print(f"{case.contender.label}, seed {case.seed}: done", highlight=False)
        if reference:
            if found[case]["steps"] is None:
                raise InputError(f"{case.contender.label} diverged, and is the reference: give it a lower lr")
            targets[case.seed] = found[case]["steps"]["loss"]
    return found


def _known_or_made(case: Case, target: float | None, folder: Path) -> dict[str, Any]:
    own = case.record(folder, LOSSES_OF_A_RUN)
    # The loss at which to look decides too.
    path = own.with_name(f"{own.stem}-{target}.json")
    if path.exists():
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return known
    found = measure(case.settings, target)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(found) + "\n", encoding="utf-8")
    os.replace(beside, path)
    return found
