"""What the runs of a comparison come to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from dash_shampoo.compare.contenders import Contender
from dash_shampoo.compare.runs import Case

YARDSTICK = "adamw"  # whose best loss the others' steps and seconds are measured to


@dataclass(frozen=True)
class Point:
    """After a number of steps, means over seeds of seconds and of the validation loss, and its lowest and highest."""

    step: int
    seconds: float
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """A contender at its best learning rate.

    Attributes:
        contender: whose row it is.
        grid: for each learning rate the final losses, by seed.
        lr: the rate of the lowest mean loss, among those with as many seeds as any.
        loss: mean of the final losses there.
        error: standard error of that mean; ``None`` with one seed.
        curve: on the way there.
        share: of the optimizer in the seconds of training.
        memory: largest, in bytes, or ``None`` if unknown.
        tokens_per_step: as the name says.
        stacks: what Dash said of its stacks at the end, with the first seed.
        steps: until the mean loss is at or below AdamW's best; ``None`` if it never is, or AdamW takes no part.
        seconds: the same in seconds of training.
    """

    contender: Contender
    grid: dict[float, list[float]]
    lr: float
    loss: float
    error: float | None
    curve: list[Point]
    share: float
    memory: int | None
    tokens_per_step: int
    stacks: Mapping[str, float]
    steps: int | None = None
    seconds: float | None = None


def summarise(contenders: Sequence[Contender], records: Mapping[Case, Mapping[str, Any]]) -> list[Row]:
    """A row for every contender that has a run, lowest loss first."""
    rows = [row for contender in contenders if (row := _row(contender, records))]
    yardsticks = [row.loss for row in rows if row.contender.optimizer == YARDSTICK]
    target = min(yardsticks, default=-math.inf)
    return sorted((_timed(row, target) for row in rows), key=lambda row: row.loss)


def _row(contender: Contender, records: Mapping[Case, Mapping[str, Any]]) -> Row | None:
    own = {case: record for case, record in records.items() if case.contender.label == contender.label}
    if not own:
        return None
    by_rate = {
        lr: [record for case, record in own.items() if case.lr == lr] for lr in sorted({case.lr for case in own})
    }
    grid = {lr: [_finite(record["loss"]) for record in found] for lr, found in by_rate.items()}
    most = max(map(len, grid.values()))
    lr = min((lr for lr in grid if len(grid[lr]) == most), key=lambda lr: fmean(grid[lr]))
    best, losses = by_rate[lr], grid[lr]
    memory = [record["memory"] for record in best if record["memory"] is not None]
    return Row(
        contender=contender,
        grid=grid,
        lr=lr,
        loss=fmean(losses),
        error=stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 and math.isfinite(fmean(losses)) else None,
        curve=[_point(points) for points in zip(*(record["curve"] for record in best), strict=False)],
        share=fmean(record["optimizer_seconds"] / max(record["seconds"], 1e-9) for record in best),
        memory=max(memory, default=None),
        tokens_per_step=best[0]["tokens_per_step"],
        stacks=best[0]["diagnostics"],
    )


def _finite(loss: float) -> float:
    """A loss to compare: one that is no number is worse than any."""
    return math.inf if math.isnan(loss) else loss


def _point(points: Sequence[Sequence[float]]) -> Point:
    losses = [_finite(loss) for _, _, loss in points]
    return Point(
        step=int(points[0][0]),
        seconds=fmean(seconds for _, seconds, _ in points),
        loss=fmean(losses),
        low=min(losses),
        high=max(losses),
    )


def _timed(row: Row, target: float) -> Row:
    first = next((point for point in row.curve if point.loss <= target), None)
    if first is None:
        return row
    return Row(**{**vars(row), "steps": first.step, "seconds": first.seconds})
