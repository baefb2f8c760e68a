"""Errors, products and times of solvers on given matrices."""

from __future__ import annotations

import pytest
import torch

from dash_shampoo.claim.matrices import turned
from dash_shampoo.claim.solvers import REFERENCE, errors, groups, report, usable
from dash_shampoo.roots import products


def test_the_error_of_a_root_is_that_of_its_eigenvalues() -> None:
    stack = torch.diag_embed(torch.tensor([[1.0, 0.25], [4.0, 1.0]]))
    wrong = torch.diag_embed(torch.tensor([[1.0, 2.2], [0.5, 0.7]]))
    assert errors(wrong, stack, 2, 0.0).tolist() == pytest.approx([0.1, 0.3])


def test_solvers_that_cannot_do_a_root_are_left_out() -> None:
    assert not any(name.startswith("newton-db") for name in usable(3, 1e-3, "fp32"))
    assert "chebyshev" in usable(3, 1e-3, "fp32")
    assert REFERENCE in usable(2, 1e-6, "bf16")
    assert "minimax" not in usable(2, 1e-6, "bf16")


def test_the_report_has_a_row_for_every_solver_and_leaves_zeros_out() -> None:
    stack = torch.cat([turned(torch.logspace(0, -4, 12), 2, seed=0), torch.zeros(1, 12, 12)])
    made = report({"some": stack}, [4], [1e-2, 1e-3], "fp32", repeats=1)
    (table,) = made.tables
    assert [len(own) for own in groups(table.rows)] == [7, 7]
    for row in table.rows:
        assert row["count"] == 2
        assert row["products"] == products(4, solver=row["solver"], damping=row["damping"])
        assert row["refused"] == 0
    good = {row["solver"]: row["error, largest"] for row in groups(table.rows)[1]}
    assert all(good[name] < 5e-3 for name in ("minimax", "newton-db", "coupled-newton", "eigh"))
    assert len(made.found) == len(made.pictures) == 2
