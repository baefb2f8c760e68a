"""Claim: models that Shampoo trained have fewer outliers, and lose less when they are rounded to few bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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


def rows(moment: str, records: Mapping[Case, Mapping[str, Any]], names: Sequence[str]) -> Iterator[Row]:
    """A row for each optimizer: means over seeds, with the standard error of what rounding costs."""
    for label, own in at(moment, records).items():
        row: Row = {"optimizer": label, "equal": moment, "seeds": len(own)}
        for name in ("step", "loss", *names):
            row[name] = fmean(each[name] for each in own) if own else None
            if name in ROUNDINGS:
                row[f"error of {name}"] = standard_error([each[name] for each in own])
                row[f"perplexity, {name}"] = perplexity(row["loss"] + row[name]) if own else None
        yield row


def said(moment: str, records: Mapping[Case, Mapping[str, Any]]) -> Iterator[str]:
    """What rounding costs each optimizer's models beside the reference's."""
    first, *others = rows(moment, records, [*SPREADS, *ROUNDINGS])
    for row in others:
        if row["loss"] is None:
            yield f"{row['optimizer']}, equal {moment}: never there."
            continue
        costs = ", ".join(f"{name} {_plus_minus(row, name)} for {_plus_minus(first, name)}" for name in ROUNDINGS)
        outliers = f"{row[SPREADS[3]]:.3g} for {first[SPREADS[3]]:.3g}"
        yield (
            f"{row['optimizer']} for {first['optimizer']}, equal {moment}: rounding adds, in nats, {costs}; "
            f"the activations' largest outlier is {outliers}."
        )


def _plus_minus(row: Row, name: str) -> str:
    error = row[f"error of {name}"]
    return f"{row[name]:.4f}" + ("" if error is None else f" ± {error:.4f}")


def report(records: Mapping[Case, Mapping[str, Any]], common: Settings) -> Report:
    """Reports on runs."""
    moments = ("loss", "steps")
    lines: dict[str, list[tuple[float, float]]] = {}
    for case, record in records.items():
        if case.seed == 1:
            lines[case.contender.label] = [(step, loss) for step, loss in record["curve"][1:] if math.isfinite(loss)]
    spreads = [row for moment in moments for row in rows(moment, records, SPREADS)]
    costs = [row for moment in moments for row in rows(moment, records, list(ROUNDINGS))]
    return Report(
        f"Compression: {common.model}, {common.steps} steps",
        "Models that Shampoo trained have fewer outliers than those of AdamW, and lose less by rounding to few bits.",
        [sentence for moment in moments for sentence in said(moment, records)],
        [Table("Outliers", spreads), Table("What rounding to the nearest adds to the loss, in nats", costs)],
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
