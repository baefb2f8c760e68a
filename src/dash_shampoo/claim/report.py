"""The report of a claim: what is claimed, what was found, tables, pictures and every row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from dash_shampoo.compare.page import html_list, html_table, markdown_list, markdown_page, markdown_table, page, svg
from dash_shampoo.train.errors import InputError

Row = dict[str, Any]  # plain values, of equal names in all rows of a table


@dataclass(frozen=True)
class Table:
    """Rows under a heading, each a line with its values in few digits."""

    heading: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Picture:
    """Lines of points under a heading.

    Attributes:
        heading: what it shows.
        x: what goes to the right.
        y: what goes up.
        lines: points (x, y) by the names of the lines.
        logarithmic: which of the axes are, of "x" and "y".
    """

    heading: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    logarithmic: str = ""


@dataclass(frozen=True)
class Report:
    """All of a report.

    Attributes:
        title: its title.
        claim: what is claimed.
        found: what the rows say of that, a sentence each.
        tables: all that was measured.
        pictures: of the same.
        notes: what it does not show.
    """

    title: str
    claim: str
    found: Sequence[str]
    tables: Sequence[Table]
    pictures: Sequence[Picture] = field(default=())
    notes: Sequence[str] = field(default=())


def markdown(report: Report, facts: Mapping[str, str]) -> str:
    """The report without pictures."""
    tables = "\n\n".join(f"## {table.heading}\n\n{markdown_table(*lines(table.rows))}" for table in report.tables)
    body = f"The claim: {report.claim}\n\n## What was found\n\n{markdown_list(report.found)}\n\n{tables}"
    return markdown_page(report.title, body, report.notes, facts)


def html(report: Report, facts: Mapping[str, str]) -> str:
    """The report as one page, its pictures within."""
    tables = "".join(f"<h2>{escape(table.heading)}</h2>{html_table(*lines(table.rows))}" for table in report.tables)
    pictures = "".join(f"<h2>{escape(each.heading)}</h2>{drawn(each)}" for each in report.pictures)
    body = f"<p>The claim: {escape(report.claim)}</p><h2>What was found</h2>{html_list(report.found)}{tables}{pictures}"
    return page(report.title, body, report.notes, facts)


def lines(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The headings of rows, and their cells."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[words(row.get(name)) for name in columns] for row in rows]


def words(value: object) -> str:
    """A value in few digits; nothing for ``None``."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no"}.get(value, "") if value is not None else ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def drawn(picture: Picture) -> str:
    """The picture as SVG."""
    return svg(picture.heading, partial(_draw, picture))


def _draw(picture: Picture, axes: Any) -> None:
    for name, points in picture.lines.items():
        axes.plot(*zip(*points, strict=True), label=name, marker="o", markersize=3)
    scales = {f"{axis}scale": "log" for axis in picture.logarithmic}
    axes.set(xlabel=picture.x, ylabel=picture.y, **scales)


def make_folder(folder: Path) -> None:
    """Makes a folder for a report, before anything is measured.

    Raises:
        InputError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}") from error


def write(folder: Path, report: Report, facts: Mapping[str, str]) -> Path:
    """Writes ``report.md``, ``rows.json`` and ``report.html``; returns the last one's path."""
    (folder / "report.md").write_text(markdown(report, facts), encoding="utf-8")
    rows = {table.heading: table.rows for table in report.tables}
    text = json.dumps({"made with": facts, "tables": rows}, indent=1)
    (folder / "rows.json").write_text(text + "\n", encoding="utf-8")
    found = folder / "report.html"
    found.write_text(html(report, facts), encoding="utf-8")
    return found
