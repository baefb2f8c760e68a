"""Products until roots are found, by what scales the matrices."""

from __future__ import annotations

import pytest
import torch

from dash_shampoo.claim.matrices import turned
from dash_shampoo.claim.scaling import (
    EXACT,
    FROBENIUS,
    PAPER,
    SCHATTEN,
    SOLVERS,
    TOLERANCE,
    counted,
    report,
    scales,
    steps_needed,
)
from dash_shampoo.roots import CoupledNewton, NewtonDB
from dash_shampoo.roots.newton_db import response


def test_steps_are_the_fewest_that_bring_every_eigenvalue_home() -> None:
    x = torch.tensor([[1.0, 0.5], [1.0, 1e-3]], dtype=torch.float64)
    for steps, values in zip(steps_needed(NewtonDB, 4, x), x, strict=True):
        assert steps is not None

        def worst(steps: int, values: torch.Tensor = values) -> float:
            found = (response(NewtonDB(steps=steps), 4, float(each)) * float(each) ** 0.25 for each in values)
            return max(abs(each - 1) for each in found)

        assert worst(steps) <= TOLERANCE < worst(steps - 1)


def test_an_iteration_that_diverges_never_finds_a_root() -> None:
    # Newton-DB takes up to 3, coupled Newton up to p + 1 over its factor z = (p + 1) / 2, which is 2.
    x = torch.tensor([[2.9], [3.1]], dtype=torch.float64)
    found = steps_needed(NewtonDB, 2, x)
    assert found[0] is not None
    assert found[1] is None
    assert steps_needed(CoupledNewton, 2, torch.tensor([[2.1]], dtype=torch.float64)) == [None]


@pytest.mark.parametrize("solver", ["chebyshev", "minimax"])
def test_polynomials_find_nothing_above_their_interval(solver: str) -> None:
    x, low = torch.tensor([[1.0, 0.1], [1.2, 0.1]], dtype=torch.float64), torch.tensor([0.1, 0.1])
    inside, outside = counted(solver, 4, x, low)
    assert inside is not None
    assert outside is None


def test_scales_of_equal_eigenvalues_are_known() -> None:
    found = {name: float(scale) for name, (scale, _) in scales(turned(torch.ones(16), 1, seed=0)).items()}
    expected = {FROBENIUS: 4, PAPER: 2, SCHATTEN: 2, EXACT: 1}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_the_report_has_a_row_for_every_scale() -> None:
    made = report({"equal": turned(torch.ones(16), 2, seed=0), "other": torch.eye(3).unsqueeze(0)}, 4, 1e-2)
    (table,) = made.tables
    assert len(table.rows) == 2 * 7
    rows = {row["scale"]: row for row in table.rows if row["matrices"] == "equal"}
    assert all(rows[FROBENIUS][solver] > rows[PAPER][solver] for solver in SOLVERS if solver != "minimax")
    assert rows[FROBENIUS]["never found"] == 0
    assert "other: the Frobenius norm is 1.73 times" in made.found[1]
