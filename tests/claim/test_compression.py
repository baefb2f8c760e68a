"""Models are compared where their loss is that of the reference, and after as many steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dash_shampoo.claim import compression_runs
from dash_shampoo.claim.compression import costs, report, said, spreads
from dash_shampoo.claim.compression_runs import ROUNDINGS, SPREADS, contenders, trained
from dash_shampoo.compare.runs import Case
from dash_shampoo.train.errors import InputError
from dash_shampoo.train.settings import Settings


class Falling:
    """A training whose loss is 5 less a rate for each step."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.step = settings, 0

    def train_step(self) -> None:
        self.step += 1

    def evaluate(self) -> float:
        rate = {"adamw": 0.01, "dash": 0.02, "sgd": 0.001, "muon": math.nan}[self.settings.optimizer]
        return 5 - rate * self.step if self.step else 5.0


@pytest.fixture
def falling(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trainings are `Falling`; returns the steps at which models were looked at."""
    looked: list[int] = []

    def measured(trainer: Falling, loss: float) -> dict[str, Any]:
        looked.append(trainer.step)
        return {"step": trainer.step, "loss": loss, **dict.fromkeys([*SPREADS, *ROUNDINGS], 0.5)}

    monkeypatch.setattr(compression_runs, "Trainer", Falling)
    monkeypatch.setattr(compression_runs, "measured", measured)
    return looked


def run(names: str, folder: Path, seeds: int = 1) -> dict[Case, dict[str, Any]]:
    return trained(contenders(names.split()), seeds, Settings(steps=80), folder, Console(quiet=True))


def test_moments_of_equal_loss_and_of_equal_steps(falling: list[int], tmp_path: Path) -> None:
    records = run("adamw dash sgd muon", tmp_path)
    steps = {row["optimizer"]: row["step"] for row in spreads("steps", records)}
    assert steps == {"adamw": 80, "dash": 80, "sgd": 80, "muon": None}
    # Twice as fast, Dash has AdamW's last loss after half of its steps; the others never have.
    assert {row["optimizer"]: row["step"] for row in spreads("loss", records)} == {
        "adamw": 80,
        "dash": 40,
        "sgd": None,
        "muon": None,
    }
    assert [sentence.rpartition(": ")[2] for sentence in said("loss", records)][1:] == ["never there."] * 2


def test_what_is_known_is_not_trained_again(falling: list[int], tmp_path: Path) -> None:
    first = run("adamw dash", tmp_path)
    before = len(falling)
    again = run("adamw dash", tmp_path, seeds=2)
    assert list(again.values())[:2] == list(first.values())
    assert len(falling) == 2 * before


def test_a_reference_that_diverges_is_an_error(falling: list[int], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="muon diverged"):
        run("muon dash", tmp_path)


def test_each_optimizer_has_one_learning_rate() -> None:
    assert [each.rates for each in contenders(["adamw", "dash,lr=1e-2"])] == [(2e-3,), (1e-2,)]
    with pytest.raises(InputError, match="needs one learning rate"):
        contenders(["adamw,lr=[1e-3,2e-3]"])


def test_what_rounding_adds_is_a_mean_over_seeds(falling: list[int], tmp_path: Path) -> None:
    records = run("adamw dash", tmp_path, seeds=2)
    *_, last = (record["steps"] for record in records.values())
    last["int4 weights"] = 1.5
    found = {(row["optimizer"], row["rounded"]): row for row in costs("steps", records)}
    own = found["dash", "int4 weights"]
    assert (own["adds, nats"], own["its error"]) == (1.0, 0.5)
    assert own["perplexity"] == pytest.approx(math.exp(5 - 0.02 * 80 + 1))
    assert found["dash", "int8 weights"]["adds, nats"] == 0.5


def test_the_report_has_both_moments_of_every_optimizer(falling: list[int], tmp_path: Path) -> None:
    made = report(run("adamw dash", tmp_path, seeds=2), Settings(steps=80))
    outliers, rounding = made.tables
    assert [(row["optimizer"], row["equal"], row["seeds"]) for row in outliers.rows] == [
        (name, moment, 2) for moment in ("loss", "steps") for name in ("adamw", "dash")
    ]
    assert len(rounding.rows) == len(ROUNDINGS) * len(outliers.rows)
    assert len(made.found) == 2
