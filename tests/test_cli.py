"""The command, as a person meets it; in a process of its own where signals, imports or a fresh start matter."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from dash_shampoo.cli import main
from dash_shampoo.train.loop import Trainer
from dash_shampoo.train.run import Run

TINY = "--layers 1 --width 16 --heads 2 --hidden 24 --context 8 --batch-size 2 --warmup 2 --eval-batches 2 --threads 1"
Call = Callable[[str], subprocess.CompletedProcess[str]]
TEXT = "the quick brown fox jumps over the lazy dog. " * 40


def run(folder: Path, arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from dash_shampoo.cli import main; main()", *arguments.split()]
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, check=False, timeout=120, **options
    )  # type: ignore[call-overload]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture
def call(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """The command in this process, where it starts much sooner."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    threads = torch.get_num_threads()

    def command(arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["dash-shampoo", *arguments.split()])
        with pytest.raises(SystemExit) as stopped, torch.random.fork_rng(devices=[]):
            main()
        code = stopped.value.code
        assert isinstance(code, int)
        return subprocess.CompletedProcess(sys.argv, code, *capsys.readouterr())

    yield command
    torch.set_num_threads(threads)


def losses(folder: Path, name: str) -> dict[int, dict[str, float]]:
    merged: dict[int, dict[str, float]] = {}
    for line in (folder / name / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        wanted = {key: value for key, value in row.items() if key in ("train/loss", "validation/loss")}
        merged.setdefault(row["step"], {}).update(wanted)
    return merged


@pytest.mark.parametrize("optimizer", ["dash", "adamw", "muon", "sgd"])
def test_training_lowers_the_loss_and_fills_the_run_folder(folder: Path, call: Call, optimizer: str) -> None:
    done = call(f"train --data text.txt --optimizer {optimizer} --steps 60 --eval-every 30 --log-optimizer {TINY}")
    assert done.returncode == 0, done.stderr
    files = {file.name.split(".")[0] for file in (folder / "runs" / f"tiny-{optimizer}-001").iterdir()}
    assert files == {"settings", "metrics", "checkpoint", "loss", "events"}
    rows = losses(folder, f"runs/tiny-{optimizer}-001")
    assert set(rows) >= {0, 30, 60}
    last = json.loads((folder / "runs" / f"tiny-{optimizer}-001" / "metrics.jsonl").read_text().splitlines()[-1])
    assert any(name.startswith("dash/block") for name in last) == (optimizer == "dash")
    assert last["validation/perplexity"] == pytest.approx(math.exp(rows[60]["validation/loss"]))
    assert any(name.startswith("dash/") for name in last) == (optimizer == "dash")
    assert rows[60]["validation/loss"] < rows[0]["validation/loss"]
    for words in ("validation loss", "perplexity", "optimizer's share", "loss.png"):
        assert words in done.stdout
    assert f"{math.exp(rows[60]['validation/loss']):.2f}" in done.stdout


def test_runs_get_new_folders(folder: Path, call: Call) -> None:
    for _ in range(2):
        assert call(f"train --data text.txt --steps 1 {TINY}").returncode == 0
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["tiny-dash-001", "tiny-dash-002"]


@pytest.mark.parametrize("optimizer", ["dash", "adamw", "muon"])
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(folder: Path, call: Call, optimizer: str) -> None:
    common = f"train --data text.txt --optimizer {optimizer} --eval-every 5 --save-every 15 {TINY} --steps 40"
    if optimizer == "dash":
        common += " --update-every 4"
    assert call(f"{common} --run whole").returncode == 0
    shutil.copytree(folder / "whole", folder / "cut")
    # Puts the copy back to its checkpoint of step 15, with its later metrics still there.
    cut, settings = Run.open(Path("cut"))
    trainer = Trainer(settings)
    for _ in range(15):
        trainer.train_step()
    trainer.before = 1.0
    cut.save(trainer.state_dict())
    resume = partial(run, folder) if optimizer == "dash" else call  # one of them in a fresh process
    done = resume("train --resume cut")
    assert done.returncode == 0, done.stderr
    assert len(losses(folder, "cut")) == 9  # steps 0, 5, ..., 40
    assert losses(folder, "cut") == losses(folder, "whole")
    # Nothing stands there twice.
    lines = [(folder / name / "metrics.jsonl").read_text().count("\n") for name in ("cut", "whole")]
    assert lines[0] == lines[1]
    states = [torch.load(folder / name / "checkpoint.pt", weights_only=True)["model"] for name in ("whole", "cut")]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_an_interruption_leaves_a_checkpoint_to_go_on_with(folder: Path, call: Call) -> None:
    arguments = f"train --data text.txt --steps 100000 --run long {TINY}".split()
    command = [sys.executable, "-c", "from dash_shampoo.cli import main; main()", *arguments]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not losses_exist(folder / "long" / "metrics.jsonl") and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on with: dash-shampoo train --resume long" in errors
    step = torch.load(folder / "long" / "checkpoint.pt", weights_only=True)["step"]
    assert step > 0
    settings = json.loads((folder / "long" / "settings.json").read_text())
    (folder / "long" / "settings.json").write_text(json.dumps({**settings, "steps": step + 3}))
    assert call("train --resume long").returncode == 0
    assert torch.load(folder / "long" / "checkpoint.pt", weights_only=True)["step"] == step + 3


@pytest.mark.parametrize(
    ("number", "times", "code"),
    [(signal.SIGINT, 1, 130), (signal.SIGTERM, 1, 130), (signal.SIGTERM, 2, -signal.SIGTERM)],
)
def test_an_interruption_of_the_first_evaluation_leaves_a_checkpoint_too(
    folder: Path, call: Call, number: signal.Signals, times: int, code: int
) -> None:
    script = (
        "import signal, sys; from dash_shampoo.train import loop; from dash_shampoo.cli import main;"
        "evaluate = loop.Trainer.evaluate; waiting = [int(sys.argv.pop(1))] * int(sys.argv.pop(1));"
        "interrupt = lambda: [signal.raise_signal(waiting.pop()) for _ in range(len(waiting))];"
        "loop.Trainer.evaluate = lambda trainer: (interrupt(), evaluate(trainer))[1]; main()"
    )
    arguments = f"train --data text.txt --steps 3 --run early {TINY}".split()
    command = [sys.executable, "-c", script, str(int(number)), str(times), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code, done.stderr
    assert ("go on with: dash-shampoo train --resume early" in done.stderr) == (times == 1)
    assert torch.load(folder / "early" / "checkpoint.pt", weights_only=True)["step"] == 0
    assert call("train --resume early").returncode == 0
    assert set(losses(folder, "early")) == {0, 3}


def test_a_finished_run_resumed_says_again_what_it_had_come_to(folder: Path, call: Call) -> None:
    first = call(f"train --data text.txt --steps 5 --run done --lr 0.1 {TINY}")
    again = call("train --resume done")
    assert again.returncode == 0, again.stderr
    wanted = [line for line in first.stdout.splitlines() if "validation loss (" in line]
    assert wanted == [line for line in again.stdout.splitlines() if "validation loss (" in line]
    assert len(wanted) == 1


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("text.txt", "fox", "cat", "text or its tokenizer has changed"),
        ("run/settings.json", '"width": 16', '"width": 32', "does not fit the settings"),
        ("run/settings.json", '"steps": 1', '"steps": "one"', "cannot be read"),
    ],
)
def test_a_run_does_not_go_on_with_another_text_or_model(
    folder: Path, call: Call, file: str, old: str, new: str, words: str
) -> None:
    assert call(f"train --data text.txt --steps 1 --run run {TINY}").returncode == 0
    content = (folder / file).read_text()
    assert old in content
    (folder / file).write_text(content.replace(old, new, 1))
    before = (folder / "run" / "metrics.jsonl").read_bytes(), (folder / "run" / "checkpoint.pt").read_bytes()
    done = call("train --resume run")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert words in done.stderr
    after = (folder / "run" / "metrics.jsonl").read_bytes(), (folder / "run" / "checkpoint.pt").read_bytes()
    assert before == after


def losses_exist(path: Path) -> bool:
    return path.exists() and "train/loss" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train --modle tiny", "No such option"),
        ("train --steps many", "--steps"),
        ("train --model tny", "did you mean 'tiny'"),
        ("train --optimizer adm", "did you mean 'adamw'"),
        ("train --data nowhere.txt", "no such file or folder: nowhere.txt"),
        ("train --data short.txt", "text is too short"),
        ("train --data text.txt --heads 5", "does not divide into 5 heads"),
        ("train --data text.txt --solver minmax", "did you mean 'minimax'"),
        ("train --data text.txt --damping -1", "damping"),
        ("train --data text.txt --set nonsense=1", "nonsense"),
        ("train --data text.txt --set nonsense", "key=value"),
        ("train --data text.txt --config nowhere.toml", "no such file: nowhere.toml"),
        ("train --data text.txt --device tpu9", "no device"),
        ("train --data text.txt --run taken", "exists already"),
        ("train --data text.txt --steps 0", "steps must be at least 1"),
        ("train --data text.txt --clip nan", "clip must be a finite number"),
        ("train --data text.txt --strategy fsdp", "strategy fsdp needs several processes: torchrun"),
        ("train --data text.txt --replicas 2", "replicas is for strategy hsdp"),
        ("train --data text.txt --lr nan", "lr must be a finite number"),
        ("train --data text.txt --seed -1", "seed must be at least 0"),
        ("train --data text.txt --set lr=1", "give --lr"),
        ("train --data text.txt --set dampling=1", "did you mean 'damping'"),
        ("train --data text.txt --optimizer adamw --solver eigh", "unknown option of adamw 'solver'"),
        ("train --data text.txt --run text.txt/run", "cannot make the folder"),
        ("train --resume taken", "no run to resume"),
        ("train --resume damaged", "damaged"),
        ("train --resume damaged --steps 3", "give no other settings"),
        ("tarin", "tarin"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2_and_writes_nothing(
    folder: Path, call: Call, arguments: str, words: str
) -> None:
    (folder / "short.txt").write_text("short")
    (folder / "taken").mkdir()
    (folder / "taken" / "kept.txt").write_text("kept")
    (folder / "damaged").mkdir()
    (folder / "damaged" / "settings.json").write_text(json.dumps({"data": "text.txt", "steps": 1}))
    (folder / "damaged" / "checkpoint.pt").write_bytes(b"PK not a checkpoint")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = call(arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert done.stderr.startswith("dash-shampoo: ")
    assert done.stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_version_and_help(call: Call) -> None:
    assert call("--version").stdout.startswith("dash-shampoo ")
    help_text = call("train --help").stdout
    assert "--update-every" in help_text
    assert "llama-953m" in help_text


def test_without_the_extra_the_command_says_what_to_install(folder: Path) -> None:
    script = (
        "import importlib.util as u, sys; find = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name in ('typer', 'rich') else find(name, *a);"
        "from dash_shampoo.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "pip install 'dash-shampoo[train]'" in done.stderr


def test_the_library_itself_needs_torch_alone(folder: Path) -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(['typer', 'rich', 'numpy', 'matplotlib', 'tensorboard']));"
        "import torch, dash_shampoo; p = torch.nn.Parameter(torch.ones(3, 3)); p.grad = torch.ones(3, 3);"
        "dash_shampoo.Dash([p]).step(); print(sorted(m for m in sys.modules if m.startswith('dash_shampoo.train')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
