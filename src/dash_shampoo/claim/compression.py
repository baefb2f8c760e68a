"""Claim: models that Shampoo trained have fewer outliers, and lose less when they are rounded to few bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from dash_shampoo.claim.compression_runs import ROUNDINGS, SPREADS
from dash_shampoo.claim.quality import standard_error
from dash_shampoo.claim.report import Picture, Report, Row, Table
from dash_shampoo.compare.runs import Case
from dash_shampoo.train.loop import perplexity
from dash_shampoo.train.settings import Settings


def at(moment: str, records: Mapping[Case, Mapping[str, Any]]) -> dict[str, list[Row]]:
    """What was found at equal "steps" or "loss", by optimizer; those that never got there have an empty list."""
    found: dict[str, list[Row]] = {}
    for case, record in records.items():
        found.setdefault(case.contender.label, []).extend([record[moment]] if record[moment] else [])
    return found


def spreads(moment: str, records: Mapping[Case, Mapping[str, Any]]) -> list[Row]:
    """A row for each optimizer: how far weights and activations spread, means over seeds."""
    return [
        {
            "optimizer": label,
            "equal": moment,
            "seeds": len(own),
            **{name: fmean(each[name] for each in own) if own else None for name in ("step", "loss", *SPREADS)},
        }
        for label, own in at(moment, records).items()
    ]


def costs(moment: str, records: Mapping[Case, Mapping[str, Any]]) -> list[Row]:
    """A row for each optimizer and rounding: what that adds to the loss, means over seeds and their standard errors."""
    return [
        {
            "optimizer": label,
            "equal": moment,
            "rounded": name,
            "adds, nats": fmean(each[name] for each in own),
            "its error": standard_error([each[name] for each in own]),
            "perplexity": perplexity(fmean(each["loss"] + each[name] for each in own)),
        }
        for label, own in at(moment, records).items()
        for name in ROUNDINGS
        if own
    ]


def said(moment: str, records: Mapping[Case, Mapping[str, Any]]) -> Iterator[str]:
    """What rounding costs each optimizer's models beside the reference's."""
    spread = {row["optimizer"]: row for row in spreads(moment, records)}
    added = {(row["optimizer"], row["rounded"]): _plus_minus(row) for row in costs(moment, records)}
    first, *others = spread
    for label in others:
        if not spread[label]["seeds"]:
            yield f"{label}, equal {moment}: never there."
            continue
        words = ", ".join(f"{name} {added[label, name]} for {added[first, name]}" for name in ROUNDINGS)
        outliers = f"{spread[label][SPREADS[3]]:.3g} for {spread[first][SPREADS[3]]:.3g}"
        yield (
            f"{label} for {first}, equal {moment}: rounding adds, in nats, {words}; "
            f"the activations' largest outlier is {outliers}."
        )


def _plus_minus(row: Row) -> str:
    error = row["its error"]
    return f"{row['adds, nats']:.4f}" + ("" if error is None else f" ± {error:.4f}")


def report(records: Mapping[Case, Mapping[str, Any]], common: Settings) -> Report:
    """Reports on runs."""
    moments = ("loss", "steps")
    lines: dict[str, list[tuple[float, float]]] = {}
    for case, record in records.items():
        if case.seed == 1:
            lines[case.contender.label] = [(step, loss) for step, loss in record["curve"][1:] if math.isfinite(loss)]
    return Report(
        f"Compression: {common.model}, {common.steps} steps",
        "Models that Shampoo trained have fewer outliers than those of AdamW, and lose less by rounding to few bits.",
        [sentence for moment in moments for sentence in said(moment, records)],
        [
            Table("Outliers", [row for moment in moments for row in spreads(moment, records)]),
            Table("What rounding adds to the loss", [row for moment in moments for row in costs(moment, records)]),
        ],
        [Picture("Validation loss, seed 1", "steps", "validation loss (nats per token)", lines)],
        (
            "Kurtosis is the median over linear layers, above a normal distribution's; an outlier is the largest "
            "magnitude over the root mean square, and the largest of all layers. Activations are inputs of these.",
            "Weights have a scale for each row, activations one for each tensor, from the largest magnitude: "
            "no method that is made against outliers.",
            "At equal loss is the first measurement at or below the reference's last loss: in the middle of a "
            "schedule, where the learning rate is high and weights are noisier than at the end of one.",
            "Embeddings are not rounded. Each optimizer has one learning rate and the common weight decay, "
            "both of which change outliers too.",
        ),
    )
