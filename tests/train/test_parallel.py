"""Several processes train as one does, and go on with each other's runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.processes import Processes
from tests.train import jobs

ROUNDING = {"rel": 2e-4}
STRATEGIES: list[tuple[int, dict[str, Any]]] = [
    (2, {"strategy": "ddp"}),
    (3, {"strategy": "fsdp"}),
    (4, {"strategy": "hsdp", "replicas": 2}),
]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(jobs.TEXT)
    (tmp_path / "other.txt").write_text(jobs.TEXT[::-1])
    return str(tmp_path)


def losses(folder: str, run: str) -> dict[int, dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    for line in (Path(folder) / run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update({key: value for key, value in row.items() if "loss" in key})
    return rows


@pytest.mark.parametrize(
    ("size", "changes", "own"),
    [
        *((*each, {}) for each in STRATEGIES),
        (2, {"strategy": "ddp"}, {"optimizer": "adamw", "options": {}}),
        (3, {"strategy": "fsdp"}, {"optimizer": "adamw", "options": {}}),
        (2, {"strategy": "fsdp"}, {"optimizer": "muon", "options": {}}),  # which orthogonalises whole matrices
        (4, {"strategy": "fsdp"}, {"tied": True, "clip": 0.1}),
    ],
)
def test_several_processes_train_as_one(
    processes: Processes, folder: str, size: int, changes: dict[str, Any], own: dict[str, Any]
) -> None:
    (one,) = processes.run(jobs.start, 1, folder, "one", own)
    many = processes.run(jobs.start, size, folder, "many", {**own, **changes})
    assert many == [many[0]] * size
    assert many[0] == pytest.approx(one, **ROUNDING)
    left, right = losses(folder, "one"), losses(folder, "many")
    assert left.keys() == right.keys()
    for step, row in left.items():
        assert right[step] == pytest.approx(row, **ROUNDING)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((1, {}), (2, {"strategy": "fsdp"})),
        ((2, {"strategy": "ddp"}), (4, {"strategy": "fsdp"})),
        ((3, {"strategy": "fsdp"}), (2, {"strategy": "ddp"})),
        ((4, {"strategy": "hsdp", "replicas": 2}), (1, {})),
    ],
)
def test_a_run_goes_on_with_other_processes(
    processes: Processes, folder: str, first: tuple[int, dict[str, Any]], second: tuple[int, dict[str, Any]]
) -> None:
    (straight,) = processes.run(jobs.start, 1, folder, "straight", {})
    assert processes.run(jobs.stop_early, first[0], folder, "run", first[1]) == [4] * first[0]
    ends = processes.run(jobs.resume, second[0], folder, "run", second[1])
    assert ends[0] == pytest.approx(straight, **ROUNDING)
    assert losses(folder, "run").keys() == losses(folder, "straight").keys()


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        *STRATEGIES,
        (3, {"strategy": "ddp"}),  # whose sums depend on how gradients are bundled
        (2, {"strategy": "fsdp", "optimizer": "sgd", "options": {}, "tied": True}),
    ],
)
def test_a_run_goes_on_with_as_many_processes_to_the_bit(
    processes: Processes, folder: str, size: int, changes: dict[str, Any]
) -> None:
    straight = processes.run(jobs.start, size, folder, "straight", changes)
    processes.run(jobs.stop_early, size, folder, "run", changes)
    assert processes.run(jobs.resume, size, folder, "run", {}) == straight
    ends = [torch.load(Path(folder) / run / "checkpoint.pt")["model"] for run in ("straight", "run")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize(("size", "changes"), STRATEGIES)
def test_clipping_and_diagnostics_are_of_the_whole_model(
    processes: Processes, folder: str, size: int, changes: dict[str, Any]
) -> None:
    ((norm, numbers),) = processes.run(jobs.norm_and_diagnostics, 1, folder, {})
    assert norm > 0.1  # so that it is clipped
    assert numbers["dash/roots"] > 0
    assert any(name.endswith("/ratio") for name in numbers)
    close = {
        name: pytest.approx(value, rel=0.02, abs=1e-3 if name.endswith("residual") else 0)
        for name, value in numbers.items()
    }
    for own in processes.run(jobs.norm_and_diagnostics, size, folder, changes):
        assert own == (pytest.approx(norm, rel=1e-4), close)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_travel_once_per_step(processes: Processes, folder: str, strategy: str) -> None:
    assert processes.run(jobs.gradients_agree, 2, folder, strategy, True) == [True] * 2
    assert False in processes.run(jobs.gradients_agree, 2, folder, strategy, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({}, "differ in the text"), ({"heads": 3}, "does not divide"), ({"options": {"blocksize": 3}}, "block_size")],
)
def test_a_mistake_is_raised_in_every_process(
    processes: Processes, folder: str, changes: dict[str, Any], message: str
) -> None:
    for error in processes.run(jobs.mistake, 2, folder, changes, not changes):
        assert error.startswith("InputError")
        assert message in error
    assert not (Path(folder) / "run").exists()


def torchrun(folder: str, arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    small = "--layers 1 --width 16 --heads 2 --hidden 24 --context 8 --warmup 2 --eval-batches 2 --threads 1"
    words = arguments.replace("SMALL", small).split()
    return subprocess.run(
        [*launcher, "-m", "dash_shampoo", "train", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=120,
    )


def test_torchrun_trains_and_one_process_goes_on(folder: str, processes: Processes) -> None:
    done = torchrun(folder, f"SMALL --data {folder}/text.txt --steps 4 --batch-size 4 --strategy fsdp --folder run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("seconds of training") == 1
    rows = losses(folder, "run")
    assert rows[4]["validation/loss"] < rows[0]["validation/loss"]
    (after,) = processes.run(jobs.resume, 1, folder, "run", {})  # finished: it says again what it had come to
    assert after == pytest.approx(rows[4]["validation/loss"], **ROUNDING)


def test_torchrun_and_a_mistake(folder: str) -> None:
    done = torchrun(folder, "SMALL --data text.txt --batch-size 5")
    assert done.returncode != 0
    assert done.stderr.count("dash-shampoo: batch_size 5") == 1
    assert "exitcode  : 2" in done.stderr
    assert not (Path(folder) / "runs").exists()
