"""The notebook runs from its first cell to its last, and draws."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "a_first_look.ipynb"
NEWEST = 4


def test_every_cell_runs_and_both_pictures_are_drawn(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=NEWEST)  # type: ignore[no-untyped-call]
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert any("AdamW: lr" in output.get("text", "") for output in outputs)


def test_it_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=NEWEST)  # type: ignore[no-untyped-call]
    assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
