"""Measurements measure what they say."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from dash_shampoo.bench import gpu, roots
from dash_shampoo.bench.roots import directional_error, measure
from dash_shampoo.bench.step import measure as measure_steps
from dash_shampoo.bench.timing import interleaved
from dash_shampoo.plan.model import meta_model, options, parameters
from dash_shampoo.plan.tiles import tiles_of
from dash_shampoo.train.llama import SIZES
from tests.roots.matrices import exact_root, with_condition
from tests.test_cli import Call, call, folder

__all__ = ["call", "folder"]  # fixtures

CPU = torch.device("cpu")


def test_work_is_timed_in_turns_after_a_warm_up() -> None:
    calls: list[str] = []
    times = interleaved({"a": lambda: calls.append("a"), "b": lambda: (calls.append("b"), time.sleep(0.01))}, 3, CPU)
    assert calls == ["a", "b"] * 4
    assert times["a"] < 0.005 < times["b"]


def test_the_error_is_the_largest_along_an_eigenvector() -> None:
    A = with_condition(1e4, b=12, n=2)
    exact = exact_root(A, 4, 1e-3)
    assert directional_error(exact, A, 4, 1e-3) < 1e-9
    _, vectors = torch.linalg.eigh(A[1])
    largest = torch.outer(vectors[:, -1], vectors[:, -1])  # the root is smallest there
    exact[1] += 0.01 * (vectors[:, -1] @ exact[1] @ vectors[:, -1]) * largest
    assert directional_error(exact, A, 4, 1e-3) == pytest.approx(0.01, rel=1e-6)


def test_rows_for_every_safe_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots, "ENTRIES", 1 << 14)
    rows = list(measure([16], [1e2, 1e5], ["fp32", "fp16"], p=4, repeats=1, device=CPU))
    cases = {(row.solver, row.condition, row.precision) for row in rows}
    assert ("minimax", 1e5, "fp32") in cases
    assert ("minimax", 1e2, "fp16") in cases
    assert ("minimax", 1e5, "fp16") not in cases
    assert all(row.milliseconds > 0 for row in rows)
    assert all(row.error < 0.01 for row in rows if row.solver in ("minimax", "eigh") and row.precision == "fp32")


def test_rows_of_the_step() -> None:
    rows = measure_steps({"adamw": {}, "muon": {}, "minimax": {"block_size": 64}}, "tiny", 1, repeats=1, device=CPU)
    assert [row.name for row in rows] == ["adamw", "muon", "minimax"]
    assert rows[0].state == pytest.approx(2.0, rel=1e-3)
    assert rows[0].matrices == 0
    assert rows[2].matrices > 0
    assert all(row.seconds > 0 and row.operations > 0 for row in rows)


def test_bench_commands_print_a_table_and_write_json_and_a_plot(tmp_path: Path, call: Call) -> None:
    done = call("bench roots --size 64 --condition 1e3 --repeats 1 --out results")
    assert done.returncode == 0, done.stderr
    assert "minimax" in done.stdout
    data = json.loads((tmp_path / "results" / "roots.json").read_text())
    assert {row["solver"] for row in data["rows"]} >= {"minimax", "eigh", "newton-db-paper"}
    assert data["machine"]["torch"] == torch.__version__
    assert (tmp_path / "results" / "roots.png").stat().st_size > 1000
    done = call("bench step --model tiny --layers 1 --repeats 1 --block-size 64 --solver minimax --out results")
    assert done.returncode == 0, done.stderr
    names = [row["name"] for row in json.loads((tmp_path / "results" / "step.json").read_text())["rows"]]
    assert names == ["adamw", "muon", "minimax"]


def test_the_bench_for_gpus_runs_small_on_a_cpu(tmp_path: Path, call: Call) -> None:
    done = call("bench gpu --repeats 1 --device cpu --out results")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results" / "gpu.json").read_text())["rows"]
    assert list(dict.fromkeys(row["table"] for row in rows)) == ["ceilings", "roots", "steps"]
    solved = {row["what"]: row for row in rows if row["table"] == "roots"}
    minimax, paper = (solved[f"{solver} fp32 8 x 64"] for solver in ("minimax", "newton-db-paper"))
    assert minimax["ok"]
    assert minimax["error"] < 1e-2 < paper["error"]
    step = next(row for row in rows if row["table"] == "steps")
    stages = sum(step[f"{stage}_ms"] for stage in ("survey", "accumulate", "roots", "move"))
    assert 0.3 * step["step_ms"] < stages <= step["step_ms"]
    assert "| minimax fp32 8 x 64 |" in (tmp_path / "results" / "gpu.md").read_text()


def test_the_load_is_what_one_of_eight_processes_owns_of_the_papers_model() -> None:
    counts: dict[int, float] = {}
    for block_size in (1024, 2048):
        tiles = tiles_of(parameters(meta_model(SIZES["llama-953m"]), options({"block_size": block_size}).defaults))
        for stack, blocks in zip(tiles.stack, tiles.amount("blocks"), strict=True):
            for factor in tiles.keys[stack].factors.values():
                counts[factor.size] = counts.get(factor.size, 0) + blocks / 8
    assert counts == gpu.PAPER.stacks


def test_the_bench_for_gpus_ends_in_time() -> None:
    rows = list(gpu.measure(gpu.SMALL, 4, 1, 0.0, CPU))
    assert [row["table"] for row in rows] == ["ceilings", "end"]


def test_the_bench_for_gpus_checks_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "has_tensor_cores", lambda _: True)
    monkeypatch.setattr(gpu.fused, "check", lambda kind, precision, device, size: 1.0 if kind == "full" else 0.0)
    rows = list(gpu.kernels(CPU))
    assert len(rows) == 3 * 3 * 3
    assert {row["what"].split()[0] for row in rows if not row["right"]} == {"full"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("bench roots --precision fp8", "fp32, fp16x3"),
        ("bench step --solver minmax", "did you mean 'minimax'"),
        ("bench step --model tny", "did you mean 'tiny'"),
        ("bench roots --size 0", "--size"),
        ("bench roots --device tpu9", "no device"),
    ],
)
def test_mistakes_get_one_line(call: Call, arguments: str, words: str) -> None:
    done = call(arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
