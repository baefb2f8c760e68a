"""Claim: a model trains as well with roots by products as with eigendecompositions, and better with Newton-DB."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console

from dash_shampoo.claim.report import Picture, Report, Row, Table
from dash_shampoo.compare.contenders import Contender
from dash_shampoo.compare.runs import Case, cases, known, run_all
from dash_shampoo.train.errors import InputError
from dash_shampoo.train.loop import perplexity
from dash_shampoo.train.settings import Settings

SOLVERS = ("eigh", "minimax", "newton-db-paper", "coupled-newton-paper", "chebyshev")
REFERENCE = "eigh"
LOSSES_OF_A_RUN = 5
# Student's t for 95 % by degrees of freedom from 1 on; from 10 on it is about that of many.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
MANY = 2.2
PAPER = "Llama-953M, blocks of 1024: Newton-DB 11.68, eigendecomposition 11.80"


def contenders(solvers: Sequence[str], lr: float, options: Mapping[str, Any]) -> list[Contender]:
    """Dash with each solver, the reference first."""
    names = dict.fromkeys((REFERENCE, *solvers))
    return [Contender(name, "dash", (lr,), {**options, "solver": name}) for name in names]


def trained(taking_part: Sequence[Contender], seeds: int, common: Settings, folder: Path) -> dict[Case, dict[str, Any]]:
    """The records of all runs, one on each GPU at a time; those that are there already are not made again.

    Raises:
        InputError: a setting or an option cannot be used, or a run failed.
    """
    every = max(1, common.steps // LOSSES_OF_A_RUN)
    planned = list(cases(taking_part, range(1, seeds + 1), common))
    errors: list[str] = []
    console = Console()

    def after(case: Case, error: str | None) -> None:
        console.print(f"{case.contender.label}, seed {case.seed}: {error or 'done'}", highlight=False)
        if error is not None:
            errors.append(error)

    run_all(planned, folder, every, max(1, torch.cuda.device_count()), after)
    if errors:
        raise InputError(errors[0])
    return known(planned, folder, every)


def rows(records: Mapping[Case, Mapping[str, Any]]) -> list[Row]:
    """A row for each solver: means over seeds, and of the differences to the reference with the same seed."""
    losses: dict[str, dict[int, float]] = {}
    seconds: dict[str, list[float]] = {}
    for case, record in records.items():
        losses.setdefault(case.contender.label, {})[case.seed] = float(record["loss"])
        seconds.setdefault(case.contender.label, []).append(record["seconds"])
    return [_row(name, own, losses[REFERENCE], fmean(seconds[name])) for name, own in losses.items()]


def _row(name: str, losses: Mapping[int, float], reference: Mapping[int, float], seconds: float) -> Row:
    finite = [loss for loss in losses.values() if math.isfinite(loss)]
    apart = [losses[seed] - reference[seed] for seed in losses if math.isfinite(losses[seed] - reference[seed])]
    mean = fmean(finite) if finite else None
    return {
        "solver": name,
        "seeds": len(losses),
        "diverged": len(losses) - len(finite),
        "loss": mean,
        "its error": standard_error(finite),
        "perplexity": None if mean is None else perplexity(mean),
        "loss over eigh": fmean(apart) if apart else None,
        "error of that": standard_error(apart),
        "seconds": seconds,
    }


def standard_error(values: Sequence[float]) -> float | None:
    """Of a mean; ``None`` for fewer than two values."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def said(row: Row) -> str:
    """What a row says of the claim: a difference is one that Student's test has at 95 %, for pairs of one seed."""
    if row["loss over eigh"] is None:
        return f"{row['solver']}: diverged."
    apart, error = row["loss over eigh"], row["error of that"]
    change = f"perplexity {100 * math.expm1(apart):+.2f} % of eigh's"
    if error is None:
        return f"{row['solver']}: {change}; one seed says nothing of chance."
    verdict = "no difference beyond chance"
    pairs = row["seeds"] - row["diverged"]
    if abs(apart) > (STUDENT[pairs - 2] if pairs - 2 < len(STUDENT) else MANY) * error:
        verdict = "better" if apart < 0 else "worse"
    return f"{row['solver']}: {change}, ± {100 * error:.2f} %: {verdict}."


def report(records: Mapping[Case, Mapping[str, Any]], common: Settings) -> Report:
    """Reports on runs."""
    summary = rows(records)
    each = [
        {"solver": case.contender.label, "seed": case.seed, "step": int(step), "loss": loss}
        for case, record in records.items()
        for step, _, loss in record["curve"]
    ]
    at: dict[str, dict[int, list[float]]] = {}
    for row in each:
        if row["step"] > 0 and math.isfinite(row["loss"]):
            at.setdefault(row["solver"], {}).setdefault(row["step"], []).append(row["loss"])
    means = {solver: [(step, fmean(losses)) for step, losses in own.items()] for solver, own in at.items()}
    return Report(
        f"Quality: {common.model}, {common.steps} steps",
        "Newton-DB reaches a lower validation perplexity than the eigendecomposition, the others about the same.",
        [*(said(row) for row in summary if row["solver"] != REFERENCE), f"In the paper, perplexity: {PAPER}."],
        [Table("Means over seeds", summary), Table("Every loss", each)],
        [Picture("Validation loss, mean over seeds", "steps", "validation loss (nats per token)", means)],
        (
            "Runs of one seed have the same weights to begin with and the same batches: differences are of pairs.",
            "A difference is said to be one if Student's test for pairs has it at 95 %; of five such "
            "reports one or so has a difference that is none.",
            "All solvers have one damping and one learning rate, which was found with minimax and p = 2.",
            "Seconds are of training alone, evaluation left out.",
        ),
    )
