"""How wrong power iterations are, against what is known of two dimensions."""

from __future__ import annotations

import math

import pytest
import torch

from dash_shampoo.claim.power_iteration import estimates, hidden, ratios, report, row
from dash_shampoo.roots.scaling import ITERATIONS

CPU = torch.device("cpu")


def test_one_vector_is_too_small_as_often_as_a_random_angle_says() -> None:
    # diag(1, r), start (cos t, sin t): after k steps the estimate is (1 + r s) / (1 + s) with s = r^(2k) tan(t)^2.
    r, low, trials = 0.95, 0.99, 4000
    s = (1 - low) / (low - r)
    expected = 1 - 2 / math.pi * math.atan(math.sqrt(s) / r**ITERATIONS)
    values = torch.tensor([1.0, r], dtype=torch.float64).expand(trials, -1)
    found = (ratios(values, trials, CPU)["1 from below"] < low).double().mean()
    assert float(found) == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / trials))


def test_shares_and_ends_are_those_of_the_estimates() -> None:
    found = row("some", "1 from below", torch.tensor([0.4, 0.95, 1.0, 1.2], dtype=torch.float64))
    assert (found["lowest"], found["highest"], found["matrices tried"]) == (0.4, 1.2, 4)
    assert found["median"] == pytest.approx(0.975)
    assert [found[name] for name in found if name.startswith(("too", "by"))] == [0.5, 0.5, 0.25, 0.25]


def test_no_start_sees_the_hidden_eigenvalue_and_the_certificate_holds() -> None:
    found = {name: float(value) for name, value in estimates(hidden(40)).items()}
    assert found["1 from below"] == pytest.approx(1 / 3, rel=1e-2)
    assert found["16 from below"] == pytest.approx(1 / 3, rel=1e-2)
    assert all(value >= 1 - 1e-5 for name, value in found.items() if name.endswith("certified"))


def test_the_report_has_every_kind_and_way() -> None:
    made = report({"factors 8": torch.eye(8).expand(3, -1, -1)}, 32, 4, CPU)
    (table,) = made.tables
    assert len(table.rows) == 5 * (1 + 6 + 1)
    tried = {each["matrices tried"] for each in table.rows if each["matrices"] == "factors 8"}
    assert tried == {6}  # whole turns of three
    assert "The certified bounds were below the largest eigenvalue 0 times." in made.found
