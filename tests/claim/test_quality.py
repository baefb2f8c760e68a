"""What runs with several solvers come to."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dash_shampoo.claim.quality import contenders, report, rows, said, standard_error
from dash_shampoo.compare.runs import Case
from dash_shampoo.train.settings import Settings


def records(losses: dict[str, list[float]]) -> dict[Case, dict[str, Any]]:
    return {
        Case(each, 1e-3, seed, Settings(seed=seed)): {
            "loss": loss,
            "seconds": 2.0,
            "curve": [[0, 0.0, 5.0], [10, 2.0, loss]],
        }
        for each in contenders(list(losses), 1e-3, {"root": 4})
        for seed, loss in enumerate(losses[each.label], 1)
    }


def test_the_eigendecomposition_takes_part_always_and_first() -> None:
    found = contenders(["minimax", "eigh"], 1e-3, {"root": 4})
    assert [each.options["solver"] for each in found] == ["eigh", "minimax"]
    assert found[1].options["root"] == 4


def test_differences_are_of_runs_with_the_same_seed() -> None:
    # Seeds differ by 1, solvers by 0.1 and 0.5: pairs see past the former.
    eigh, other = rows(records({"eigh": [2.0, 3.0], "minimax": [1.9, 2.5]}))
    assert (eigh["loss over eigh"], eigh["error of that"]) == (0, 0)
    assert other["loss over eigh"] == pytest.approx(-0.3)
    assert other["error of that"] == pytest.approx(0.2)
    assert other["perplexity"] == pytest.approx(math.exp(2.2))
    assert "no difference beyond chance" in said(other)


@pytest.mark.parametrize(("losses", "word"), [([1.8, 2.81], "better"), ([2.2, 3.21], "worse")])
def test_differences_beyond_chance_are_named(losses: list[float], word: str) -> None:
    assert f": {word}." in said(rows(records({"eigh": [2.0, 3.0], "minimax": losses}))[1])


def test_runs_that_diverge_are_counted_and_left_out() -> None:
    row = rows(records({"eigh": [2.0, 3.0], "minimax": [math.nan, 2.9]}))[1]
    assert (row["diverged"], row["loss"], row["its error"]) == (1, 2.9, None)
    assert said(rows(records({"eigh": [2.0], "minimax": [math.inf]}))[1]) == "minimax: diverged."


def test_one_value_has_no_standard_error() -> None:
    assert standard_error([1.0]) is None
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)


def test_the_report_has_every_loss() -> None:
    made = report(records({"eigh": [2.0, 3.0], "minimax": [1.9, 2.7]}), Settings(steps=10))
    assert [row["loss"] for row in made.tables[1].rows] == [5, 2.0, 5, 3.0, 5, 1.9, 5, 2.7]
    assert len(made.found) == 2
