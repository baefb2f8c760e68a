"""The report of a claim: every row in it, and nothing from a network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dash_shampoo.claim.report import Picture, Report, Table, make_folder, words, write
from dash_shampoo.train.errors import InputError


def test_a_report_holds_every_row_and_stands_alone(tmp_path: Path) -> None:
    rows = [{"name": "<a>|b", "error": 1 / 3}, {"name": "c", "error": None, "more": True}]
    picture = Picture("A picture", "x", "y", {"line": [(1.0, 2.0), (2.0, 3.0)]}, "x")
    report = Report("A title", "that it is so.", ["It is <so>."], [Table("Rows", rows)], [picture], ["Nothing."])
    page = write(tmp_path, report, {"command": "a & b"}).read_text()
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert page.count("<svg") == 1
    for part in ("&lt;a&gt;|b", "0.3333", "yes", "It is &lt;so&gt;.", "a &amp; b", "light-dark"):
        assert part in page
    text = (tmp_path / "report.md").read_text()
    assert "| <a>\\|b | 0.3333 |  |\n| c |  | yes |" in text
    assert json.loads((tmp_path / "rows.json").read_text())["tables"] == {"Rows": rows}


@pytest.mark.parametrize(("value", "cell"), [(None, ""), (True, "yes"), (False, "no"), (12345, "12345"), (0.5, "0.5")])
def test_values_are_written_short(value: object, cell: str) -> None:
    assert words(value) == cell


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot make the folder"):
        make_folder(tmp_path / "file" / "below")
