"""Settings: defaults, then the file, then the flags; and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dash_shampoo import Dash
from dash_shampoo.train.errors import InputError
from dash_shampoo.train.optimizers import learning_rate, make_optimizers, make_schedulers
from dash_shampoo.train.settings import Settings, load_settings, parse_option


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('steps = 7\nlr = 1\noptimizer = "dash"\n[options]\nsolver = "eigh"\ndamping = 1e-3\n')
    settings = load_settings(file, {"steps": 9, "seed": None}, {"damping": 1e-2})
    assert (settings.steps, settings.lr, settings.seed) == (9, 1, 1)
    assert settings.options == {"solver": "eigh", "damping": 1e-2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepps = 1", "did you mean 'steps'"),
        ("steps = ", "TOML"),
        ("steps = 'many'", "steps must be of type int"),
        ("steps = 0", "steps must be at least 1"),
        ("optimizer = 'adam'", "did you mean 'adamw'"),
        ("schedule = 'linear'", "cosine, wsd"),
        ("clip = -1.0", "clip"),
        ("lr = inf", "lr must be a finite number"),
        ("[optimizer]\nname = 'adam'", "did you mean 'adamw'"),
        ("[optimizer]\nname = 1", "optimizer must be of type str"),
        ("[options]\nlr = 1", "give --lr"),
        ("tied = 1", "tied must be of type bool"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        load_settings(file, {}, {})
    with pytest.raises(InputError, match="no such file"):
        load_settings(tmp_path / "none.toml", {}, {})


def test_the_optimizer_may_be_a_table(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('steps = 7\n[optimizer]\nname = "muon"\nmomentum = 0.9\nnesterov = false\n')
    settings = load_settings(file, {}, {"momentum": 0.5})
    assert (settings.optimizer, settings.options) == ("muon", {"momentum": 0.5, "nesterov": False})
    file.write_text('[optimizer]\nsolver = "eigh"\n')
    assert load_settings(file, {}, {}).optimizer == "dash"
    assert load_settings(file, {"optimizer": "sgd"}, {}).optimizer == "sgd"


def test_options_are_read_in_tomls_notation() -> None:
    pairs: dict[str, Any] = {
        "a=1": 1,
        "a=1e-3": 1e-3,
        "a=[1, 2]": [1, 2],
        "a=true": True,
        "a='x'": "x",
        "a=word": "word",
    }
    for text, value in pairs.items():
        assert parse_option(text) == ("a", value)
    with pytest.raises(InputError, match="key=value"):
        parse_option("a")


@pytest.mark.parametrize("optimizer", ["dash", "adamw", "muon", "sgd"])
def test_every_optimizer_moves_every_parameter(optimizer: str) -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.RMSNorm(6), nn.Linear(6, 9, bias=False))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for each in make_optimizers(model, Settings(optimizer=optimizer, lr=0.1)):
        model(torch.arange(9)).square().sum().backward()
        each.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_dash_gets_the_options_that_were_set_and_no_others() -> None:
    (optimizer,) = make_optimizers(nn.Linear(4, 4), Settings(options={"damping": 1e-2}))
    assert isinstance(optimizer, Dash)
    defaults = Dash(nn.Linear(4, 4).parameters()).defaults
    changed = {name for name, value in optimizer.defaults.items() if value != defaults[name]}
    assert changed == {"damping", "lr"}
    refused: dict[str, dict[str, Any]] = {
        "did you mean 'damping'": {"dampling": 1.0},
        "dash: ": {"damping": -1.0},
        "dash: .*none": {"solver": "none"},
    }
    for message, options in refused.items():
        with pytest.raises(InputError, match=message):
            make_optimizers(nn.Linear(4, 4), Settings(options=options))


def test_cosine_and_wsd_schedules() -> None:
    cosine = Settings(steps=100, warmup=10)
    assert [learning_rate(step, cosine) for step in (0, 9, 10)] == pytest.approx([0.1, 1.0, 1.0])
    assert learning_rate(55, cosine) == pytest.approx(0.55)
    assert learning_rate(100, cosine) == pytest.approx(0.1)
    wsd = Settings(steps=100, warmup=10, schedule="wsd")
    assert [learning_rate(step, wsd) for step in (4, 10, 82, 91, 100)] == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1])


def test_schedulers_drive_every_optimizer() -> None:
    settings = Settings(optimizer="muon", lr=0.5, warmup=10)
    optimizers = make_optimizers(nn.Linear(4, 4), settings)
    make_schedulers(optimizers, settings)
    assert [group["lr"] for optimizer in optimizers for group in optimizer.param_groups] == pytest.approx([0.05, 0.05])
