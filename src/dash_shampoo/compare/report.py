"""The report of a comparison: Markdown, and HTML that needs no network."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

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
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto; padding: 1rem; color-scheme: light dark;
       color: light-dark(#1d1f24, #e4e6ea); background: light-dark(#fff, #17191d); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid light-dark(#ddd, #3a3d44); }
th { vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
pre { overflow-x: auto; padding: .7rem; background: light-dark(#f3f4f6, #23262c); }
"""


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
        _markdown_table(HEADINGS, [cells(row) for row in rows]),
        _markdown_table(("optimizer", "lr: mean loss (seeds)"), [grid_cells(row) for row in rows]),
    ]
    tables += [_markdown_table((row.contender.label, STACKS), lines) for row in rows if (lines := stack_lines(row))]
    between = "\n\n".join(tables)
    notes = "\n".join(f"- {note}" for note in NOT_SHOWN)
    known = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    return f"# {title}\n\n{between}\n\n## What this does not show\n\n{notes}\n\n## Made with\n\n{known}\n"


def html(title: str, rows: Sequence[Row], facts: Mapping[str, str]) -> str:
    """The report as one page, its pictures within."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in NOT_SHOWN)
    known = "\n".join(f"{name}: {value}" for name, value in facts.items())
    stacks = "".join(
        f"<h2>Stacks of {escape(row.contender.label)}</h2>{_html_table(('stack', STACKS), lines)}"
        for row in rows
        if (lines := stack_lines(row))
    )
    pictures = "".join(f"<h2>Loss over {axis}</h2>{picture(rows, axis)}" for axis in AXES)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1>{_html_table(HEADINGS, [cells(row) for row in rows])}{pictures}"
        f"<h2>Every learning rate</h2>"
        f"{_html_table(('optimizer', 'lr: mean loss (seeds)'), [grid_cells(row) for row in rows])}"
        f"{stacks}<h2>What this does not show</h2><ul>{notes}</ul>"
        f"<h2>Made with</h2><pre>{escape(known)}</pre></body></html>\n"
    )


def picture(rows: Sequence[Row], axis: str) -> str:
    """The losses over one of `AXES` as SVG, in colours that can be read on light and on dark."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    grey = "#808690"
    with plt.rc_context({"svg.hashsalt": axis, "text.color": grey, "axes.labelcolor": grey, "axes.edgecolor": grey}):
        figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
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
        axes.tick_params(colors=grey)
        axes.grid(alpha=0.25)
        axes.legend(framealpha=0)
        found = io.StringIO()
        figure.savefig(found, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    text = found.getvalue()
    return text[text.index("<svg") :]


def write(folder: Path, title: str, rows: Sequence[Row], facts: Mapping[str, str]) -> Path:
    """Writes ``report.md`` and ``report.html``; returns the latter's path."""
    (folder / "report.md").write_text(markdown(title, rows, facts), encoding="utf-8")
    page = folder / "report.html"
    page.write_text(html(title, rows, facts), encoding="utf-8")
    return page


def _markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, ["---"] * len(headings), *lines))


def _html_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in line)}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
