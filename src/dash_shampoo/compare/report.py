"""The report of a comparison: Markdown, and HTML that needs no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from dash_shampoo.compare.page import html_table, markdown_page, markdown_table, page, svg
from dash_shampoo.compare.summary import Point, Row

HEADINGS = (
    "optimizer",
    "best lr",
    "loss",
    "steps to AdamW's best",
    "seconds to it",
    "optimizer's share",
    "seconds in all",
    "memory (MB)",
)
STACKS = "at the end, with the first seed"
AXES: dict[str, Callable[[Row, Point], float]] = {
    "steps": lambda _, point: point.step,
    "seconds of training": lambda _, point: point.seconds,
    "tokens": lambda row, point: point.step * row.tokens_per_step,
}
NOT_SHOWN = (
    "It is one model, one text and one shape of schedule: another task may rank them otherwise.",
    "A best learning rate at an end of its grid means that the grid is too narrow there.",
    "The band of a curve goes from the lowest of the seeds to the highest. Behind ± stands the mean's standard error.",
    "Losses are taken at intervals: what is shown is the first of them that is at or below AdamW's best.",
    "adamw, sgd and dash move all parameters, the others the matrices alone, and AdamW the rest.",
    "Seconds are this machine's, with other runs beside. On a CPU the memory is that of the whole process.",
)


def cells(row: Row) -> tuple[str, ...]:
    """A row's cells, for `HEADINGS`."""
    error = "" if row.error is None else f" ± {row.error:.4f}"
    return (
        row.contender.label,
        f"{row.lr:g}",
        f"{row.loss:.4f}{error}" if math.isfinite(row.loss) else "diverged",
        "" if row.steps is None else str(row.steps),
        "" if row.seconds is None else f"{row.seconds:.1f}",
        f"{row.share:.0%}",
        f"{row.curve[-1].seconds:.1f}" if row.curve else "",
        "" if row.memory is None else f"{row.memory / 1e6:.0f}",
    )


def grid_cells(row: Row) -> tuple[str, str]:
    """A contender's name, and the mean loss at each learning rate, with the number of seeds."""
    found = (
        f"{lr:g}: {sum(losses) / len(losses):.4f} ({len(losses)})" if all(map(math.isfinite, losses)) else f"{lr:g}: -"
        for lr, losses in row.grid.items()
    )
    return row.contender.label, ", ".join(found)


def stack_lines(row: Row) -> list[tuple[str, str]]:
    """The stacks that a contender spoke of at the end, each with its numbers."""
    found: dict[str, list[str]] = {}
    for name, value in row.stacks.items():
        stack, _, kind = name.removeprefix("dash/").rpartition("/")
        if stack:
            found.setdefault(stack, []).append(f"{kind.replace('_', ' ')} {value:.4g}")
    return [(stack, ", ".join(numbers)) for stack, numbers in found.items()]


def markdown(title: str, rows: Sequence[Row], facts: Mapping[str, str]) -> str:
    """The report without pictures."""
    tables = [
        markdown_table(HEADINGS, [cells(row) for row in rows]),
        markdown_table(("optimizer", "lr: mean loss (seeds)"), [grid_cells(row) for row in rows]),
    ]
    tables += [markdown_table((row.contender.label, STACKS), lines) for row in rows if (lines := stack_lines(row))]
    return markdown_page(title, "\n\n".join(tables), NOT_SHOWN, facts)


def html(title: str, rows: Sequence[Row], facts: Mapping[str, str]) -> str:
    """The report as one page, its pictures within."""
    stacks = "".join(
        f"<h2>Stacks of {escape(row.contender.label)}</h2>{html_table(('stack', STACKS), lines)}"
        for row in rows
        if (lines := stack_lines(row))
    )
    pictures = "".join(f"<h2>Loss over {axis}</h2>{picture(rows, axis)}" for axis in AXES)
    body = (
        f"{html_table(HEADINGS, [cells(row) for row in rows])}{pictures}<h2>Every learning rate</h2>"
        f"{html_table(('optimizer', 'lr: mean loss (seeds)'), [grid_cells(row) for row in rows])}{stacks}"
    )
    return page(title, body, NOT_SHOWN, facts)


def picture(rows: Sequence[Row], axis: str) -> str:
    """The losses over one of `AXES` as SVG."""
    return svg(axis, partial(_draw, rows, axis))


def _draw(rows: Sequence[Row], axis: str, axes: Any) -> None:
    ends = []
    for row in rows:
        points = [point for point in row.curve if math.isfinite(point.high)]
        x = [AXES[axis](row, point) for point in points]
        (line,) = axes.plot(x, [point.loss for point in points], label=row.contender.label)
        low, high = [point.low for point in points], [point.high for point in points]
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        ends += [point.loss for point in points[1 + len(points) // 5 :]]
    if ends:  # the first losses are those of no training, and would flatten the rest
        room = 0.05 * (max(ends) - min(ends)) or 0.1
        axes.set_ylim(min(ends) - room, max(ends) + room)
    axes.set(xlabel=axis, ylabel="validation loss (nats per token)")


def write(folder: Path, title: str, rows: Sequence[Row], facts: Mapping[str, str]) -> Path:
    """Writes ``report.md`` and ``report.html``; returns the latter's path."""
    (folder / "report.md").write_text(markdown(title, rows, facts), encoding="utf-8")
    found = folder / "report.html"
    found.write_text(html(title, rows, facts), encoding="utf-8")
    return found
