"""A comparison: who takes part, which runs there are, what they come to, and the report."""

from __future__ import annotations

import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dash_shampoo.cli import main
from dash_shampoo.compare.contenders import RATES, Contender, parse, parse_all
from dash_shampoo.compare.report import html, markdown
from dash_shampoo.compare.runs import Case, cases
from dash_shampoo.compare.summary import summarise
from dash_shampoo.train.errors import InputError
from dash_shampoo.train.settings import Settings


def test_a_contender_is_a_name_with_options() -> None:
    found = parse("dash,solver=eigh,betas=[0.9,0.98],lr=[1e-3,1e-2]")
    assert (found.optimizer, found.rates) == ("dash", (1e-3, 1e-2))
    assert found.options == {"solver": "eigh", "betas": [0.9, 0.98]}


def test_learning_rates_are_its_own_or_those_of_all_or_around_the_usual_one() -> None:
    assert parse("adamw,lr=1e-3", [7.0]).rates == (1e-3,)
    assert parse("adamw", [7.0]).rates == (7.0,)
    assert parse("adamw").rates == (1e-3, 2e-3, 4e-3)
    assert parse("torch.optim:RMSprop").rates == RATES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adam", "did you mean 'adamw'"),
        ("no_such_package:SOAP", "is not installed: pip install no-such-package"),
        ("torch.optim:Nothing", "has no optimizer 'Nothing'"),
        ("adamw,lr=fast", "must be a number"),
        ("adamw,lr=[]", "must be a number"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse(text)


def test_steps_and_warm_up_may_be_its_own() -> None:
    shared = Settings(steps=400, warmup=100)
    (short, usual) = cases(parse_all(["dash,lr=1e-2,steps=160,warmup=40,root=4", "dash,lr=1e-2"]), [1], shared)
    assert (short.settings.steps, short.settings.warmup, short.settings.options) == (160, 40, {"root": 4})
    assert (usual.settings.steps, usual.settings.warmup, usual.settings.options) == (400, 100, {})


@pytest.mark.parametrize("text", ["dash,steps=0", "dash,steps=1.5", "adamw,warmup=true", "sgd,steps=[1,2]"])
def test_steps_that_are_no_whole_number_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"must be a whole number from 1 on, as in \w+=200"):
        parse_all([text])


def test_none_takes_part_twice() -> None:
    with pytest.raises(InputError, match="twice"):
        parse_all(["adamw", "dash", "adamw"])


def test_a_record_is_named_by_what_decides_the_run() -> None:
    def name(every: int = 10, **changes: Any) -> str:
        contender = Contender("dash", "dash", (1e-2,), {})
        (case,) = cases([contender], [changes.pop("seed", 1)], Settings(**changes))
        return case.record(Path(), every).name

    assert name(threads=1) == name(threads=2)
    assert len({name(), name(seed=2), name(steps=7), name(every=5), name(data="x"), name(weight_decay=0.1)}) == 6


def record(*losses: float, seconds: float = 1.0) -> dict[str, Any]:
    """Of a run with a loss every 10 steps, each of which takes ``seconds``."""
    curve = [[10 * i, 10 * i * seconds, loss] for i, loss in enumerate(losses)]
    total = curve[-1][1]
    return {
        "curve": curve,
        "loss": losses[-1],
        "seconds": total,
        "optimizer_seconds": total / 4,
        "tokens_per_step": 100,
        "memory": 10**6,
        "diagnostics": {"dash/skipped": 1, "dash/block 8x9/rms": 0.25, "dash/block 8x9/blocks": 4},
    }


def records(of: dict[str, dict[float, list[dict[str, Any]]]]) -> tuple[list[Contender], dict[Case, dict[str, Any]]]:
    contenders = [Contender(name, name, tuple(rates), {}) for name, rates in of.items()]
    found = {
        Case(contender, lr, seed, Settings(optimizer=contender.optimizer, lr=lr, seed=seed)): each
        for contender in contenders
        for lr, runs in of[contender.label].items()
        for seed, each in enumerate(runs, 1)
    }
    return contenders, found


def test_each_is_shown_at_its_best_rate_and_timed_to_the_best_loss_of_adamw() -> None:
    slow = partial(record, seconds=2)
    summary = summarise(
        *records(
            {
                "adamw": {1e-3: [record(4, 3, 2.5), record(4, 3, 2.7)], 2e-3: [record(4, 3, 2.8), record(4, 3, 2.9)]},
                "dash": {5e-3: [slow(4, 2.5, 2.0), slow(4, 2.5, 2.2)], 1e-2: [record(4, math.nan)]},
            }
        )
    )
    dash, adamw = summary
    assert (dash.contender.label, dash.lr, dash.loss) == ("dash", 5e-3, pytest.approx(2.1))
    assert dash.error == pytest.approx(0.1)  # 0.1414 over the root of two
    assert (dash.steps, dash.seconds, dash.share) == (10, 20.0, 0.25)
    assert (dash.curve[2].low, dash.curve[2].high) == (2.0, 2.2)
    assert (adamw.lr, adamw.loss, adamw.steps) == (1e-3, pytest.approx(2.6), 20)
    assert dash.grid[1e-2] == [math.inf]


def test_a_rate_with_fewer_seeds_is_not_the_best_yet() -> None:
    (row,) = summarise(*records({"sgd": {0.1: [record(4, 3), record(4, 3)], 0.2: [record(4, 1)]}}))
    assert (row.lr, row.steps) == (0.1, None)


def test_the_report_stands_alone_and_shows_every_loss() -> None:
    of = {"adamw": {1e-3: [record(4, 3, 2.5)], 2e-3: [record(4, math.nan)]}, "<dash>": {5e-3: [record(4, 2, 1)]}}
    rows = summarise(*records(of))
    page, text = html("A title", rows, {"command": "a & b"}), markdown("A title", rows, {"command": "a & b"})
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert page.count("<svg") == 3
    assert "&lt;dash&gt;" in page
    assert "a &amp; b" in page
    for loss in ("2.5000", "1.0000"):
        assert loss in page
        assert loss in text
    assert "0.002: -" in text
    for report in (page, text):
        assert "block 8x9" in report
        assert "rms 0.25, blocks 4" in report


def test_the_command_compares_and_takes_up_where_it_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    monkeypatch.chdir(tmp_path)
    common = "--data text.txt --steps 6 --layers 1 --width 16 --heads 2 --hidden 24 --context 8 --batch-size 2"
    common += " --warmup 2 --eval-every 3 --eval-batches 2 --out found --device cpu"

    def command(arguments: str) -> object:
        monkeypatch.setattr(sys, "argv", ["dash-shampoo", "compare", *arguments.split(), *common.split()])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code

    assert command("adamw,lr=1e-2 --jobs 2") == 0
    (first,) = (tmp_path / "found" / "runs").glob("*.json")
    assert json.loads(first.read_text())["diagnostics"] == {}
    assert [step for step, *_ in json.loads(first.read_text())["curve"]] == [0, 3, 6]
    written = first.stat().st_mtime_ns
    assert command("adamw,lr=1e-2 torch.optim:RMSprop,lr=1e-3 --jobs 2") == 0
    assert len(list((tmp_path / "found" / "runs").glob("*.json"))) == 2
    assert first.stat().st_mtime_ns == written
    report = (tmp_path / "found" / "report.md").read_text()
    assert "torch.optim:RMSprop" in report
    assert "command: dash-shampoo compare" in report
    assert "block 16x16" not in report
    assert command("dash,lr=1e-2 --log-optimizer --seeds 1") == 0
    assert "| block 16x16 | blocks 4, skipped 0, rms" in (tmp_path / "found" / "report.md").read_text()
    for path in (tmp_path / "found" / "runs").glob("*.json"):
        if json.loads(path.read_text())["diagnostics"]:
            path.unlink()
    capsys.readouterr()
    assert command("torch.optim:RMSprop,lr=1e-3,alpha=-1") == 2  # what it refuses is reported, and leaves no record
    assert "alpha" in capsys.readouterr().err
    assert len(list((tmp_path / "found" / "runs").glob("*.json"))) == 2
