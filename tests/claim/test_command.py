"""The commands of the claims, end to end at toy size."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dash_shampoo.claim.command import text_of
from dash_shampoo.cli import main
from dash_shampoo.train.errors import InputError
from dash_shampoo.train.llama import SIZES, LlamaConfig

CLAIMS = {
    "scaling": "--steps 2 --most 2 --damping 1e-2",
    "power-iteration": "--steps 2 --most 2 --trials 4 --matrix 32",
    "step-time": "--repeats 1 --solver minimax --solver eigh --update-every 2",
    "quality": "--steps 2 --seeds 1 --solver eigh",
    "compression": "adamw dash --steps 2 --seeds 1",
    "solvers": "--steps 2 --most 2 --repeats 1 --root 2 --damping 1e-2",
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_is_a_command_with_a_report(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SIZES, "tiny", LlamaConfig(layers=1, width=16, heads=2, hidden=24, context=8))
    data = "" if name == "step-time" else "--data text.txt"
    arguments = f"{name} {CLAIMS[name]} {data} --device cpu --threads 1"
    monkeypatch.setattr(sys, "argv", ["dash-shampoo", "claim", *arguments.split()])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    folder = tmp_path / "runs" / "claim" / name
    assert {path.name for path in folder.iterdir()} >= {"report.md", "report.html", "rows.json"}
    assert f"command: dash-shampoo claim {name}" in (folder / "report.md").read_text()


def test_a_config_belongs_to_a_data_set_of_the_hub() -> None:
    assert text_of("hub:allenai/c4", "en") == "hub:allenai/c4:en"
    assert text_of("a.txt", None) == "a.txt"
    with pytest.raises(InputError, match="belongs to a hub data set"):
        text_of("a.txt", "en")
