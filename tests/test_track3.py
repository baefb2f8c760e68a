"""The script for modded-nanogpt's track 3: its data, its model, a run at toy size, and its judge."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch

from dash_shampoo import param_groups
from dash_shampoo.train.errors import InputError

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # scripts there import each other by their bare names
track3 = importlib.import_module("track3")
track3_log = importlib.import_module("track3_log")


def losses(log: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step:\d+/\d+ val_loss:(\S+)", log, re.MULTILINE)]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("track3") / "seed-3.txt"
    track3.main(["--toy", "--steps", "12", "--seed", "3", "--option", "update_every=5", "--out", str(path)])
    return path


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard.bin"
    track3.write_shard(path, np.arange(65_000, dtype=np.uint16))
    return path


def test_a_shard_is_read_as_it_was_written(shard: Path) -> None:
    header = np.fromfile(shard, "<i4", 256)
    assert header[:4].tolist() == [20240520, 1, 65_000, 0]
    assert shard.stat().st_size == 256 * 4 + 65_000 * 2
    assert np.array_equal(track3.read_shard(shard), np.arange(65_000))


@pytest.mark.parametrize(("place", "value"), [(0, 20240521), (1, 2), (2, 65_001)], ids=["magic", "version", "length"])
def test_what_is_no_whole_shard_is_refused(shard: Path, place: int, value: int) -> None:
    file = np.memmap(shard, "<i4", "r+")
    file[place] = value
    file.flush()
    with pytest.raises(InputError, match="cut short" if place == 2 else "no shard"):
        track3.read_shard(shard)


@pytest.mark.parametrize("size", [2, 8])
def test_batches_of_all_processes_join_to_that_of_one(shard: Path, size: int) -> None:
    whole = list(track3.batches([str(shard)], 16, 8, 0, 1))
    parts = [list(track3.batches([str(shard)], 16, 8, rank, size)) for rank in range(size)]
    assert len(whole) == (65_000 - 2) // 128
    for place, batch in enumerate(whole):
        for each, of_one in enumerate(batch):
            assert torch.equal(torch.cat([part[place][each] for part in parts]), of_one)


def test_targets_are_the_next_tokens_and_shards_are_not_joined(shard: Path) -> None:
    found = list(track3.batches([str(shard)] * 2, 16, 8, 0, 1))
    assert len(found) == 2 * ((65_000 - 2) // 128)
    assert all(torch.equal(targets, inputs + 1) for inputs, targets in found)
    assert [int(inputs[0, 0]) for inputs, _ in found[:2]] == [0, 128]
    assert int(found[len(found) // 2][0][0, 0]) == 0


def test_shards_that_do_not_suffice_are_refused_before_the_run(shard: Path) -> None:
    most = (65_000 - 2) // 128
    assert track3.shards(str(shard), 128, most) == [str(shard)]
    with pytest.raises(InputError, match=f"{most} batches of {most + 1}"):
        track3.shards(str(shard), 128, most + 1)
    with pytest.raises(InputError, match="0 shards"):
        track3.shards(str(shard.parent / "none*.bin"), 128, 1)


def test_the_model_is_the_size_of_the_track(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("normal_", "uniform_", "kaiming_uniform_"):  # slow on the meta device
        monkeypatch.setattr(torch.nn.init, name, lambda parameter, *numbers, **options: parameter)
    with torch.device("meta"):
        model = track3.GPT(track3.Shape())
    block = 12 * 768**2 + (4 + 1 + 4) * 768 + 2 * 768  # matrices, biases, gains
    assert sum(p.numel() for p in model.parameters()) == 12 * block + 2 * 50304 * 768 + 50304 + 2 * 768
    hidden = next(group for group in param_groups(model) if group["name"] == "matrices")
    assert len(hidden["params"]) == 12 * 6


def test_the_loss_before_training_is_that_of_a_guess_and_the_future_is_not_seen() -> None:
    model = track3.GPT(track3.TOY)
    tokens = torch.randint(64, (2, 33))
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(64 * math.log(64))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    targets = torch.zeros(1, 32, dtype=torch.long)
    changed = tokens[:1, :-1].clone()
    changed[0, -1] = (changed[0, -1] + 1) % 64
    logits = []
    model.head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    model(tokens[:1, :-1], targets)
    model(changed, targets)
    torch.testing.assert_close(logits[0][:, :-1], logits[1][:, :-1])
    assert not torch.allclose(logits[0][:, -1], logits[1][:, -1])


def test_what_turned_queries_and_keys_have_in_common_depends_on_their_distance() -> None:
    attention = track3.Attention(track3.TOY)
    query, key = (attention.turned(torch.randn(16).expand(1, 1, 32, 16))[0, 0] for _ in range(2))
    products = query @ key.T
    for distance in range(-31, 32):
        own = products.diagonal(distance)
        torch.testing.assert_close(own, own[:1].expand_as(own), rtol=0, atol=1e-5)
    assert products.diagonal(0)[0] != products.diagonal(5)[0]


def test_rates_rise_stay_and_fall_to_nothing() -> None:
    rates = [track3.share(step, 100, 4, 0.5) for step in range(101)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(rates[4:51]) == {1.0}
    assert rates[50:] == pytest.approx([1 - step / 50 for step in range(51)])


def test_the_rates_are_those_of_the_track() -> None:
    arguments = track3.parse(["--option", "betas=[0.8, 0.9]", "--lr", "0.25"])
    optimizer = track3.make_optimizer(track3.GPT(track3.TOY), arguments)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert {rates["embedding.weight"], rates["head.weight"], rates["head.bias"]} == {0.7, 0.004, 0.015}
    assert rates["blocks.1.down.weight"] == 0.25
    betas = {group["name"]: group["betas"] for group in optimizer.param_groups}
    assert betas["matrices"] == (0.8, 0.9)
    assert betas["vectors"] == (0.8, 0.95)
    with pytest.raises(InputError, match="block_sice"):
        track3.make_optimizer(track3.GPT(track3.TOY), track3.parse(["--option", "block_sice=2"]))


def test_a_toy_run_learns_and_its_log_holds_the_sources(log: Path) -> None:
    text = log.read_text(encoding="utf-8")
    found = losses(text)
    assert found[0] == pytest.approx(math.log(64), abs=1e-4)
    assert found[-1] < 0.8 * found[0]
    head = text.partition(f"\n{track3.RULER}\n")[0]
    assert Path(track3.__file__).read_text(encoding="utf-8") in head
    source = (ROOT / "src" / "dash_shampoo" / "shampoo.py").read_text(encoding="utf-8")
    assert "#> dash_shampoo/shampoo.py\n" + "".join(f"#|{line}\n" for line in source.splitlines()) in head
    compile(head, "head", "exec")


def test_a_log_is_never_written_over(log: Path) -> None:
    with pytest.raises(SystemExit, match="is there already"):
        track3.main(["--toy", "--out", str(log)])


def test_the_program_in_a_log_repeats_the_run_without_the_library(log: Path, tmp_path: Path) -> None:
    text = log.read_text(encoding="utf-8")
    (tmp_path / "again.py").write_text(text.partition(f"\n{track3.RULER}\n")[0], encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "again.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert losses(done.stdout) == pytest.approx(losses(text), abs=1e-4)
    again = (tmp_path / "runs/track3/seed-3.txt").read_text(encoding="utf-8")
    assert again.partition(track3.RULER)[0] == text.partition(track3.RULER)[0]


@pytest.mark.parametrize(("found", "passes"), [([3.276], True), ([3.2761], False), ([3.278] * 4, True)])
def test_the_verdict_is_the_rule_of_the_track(found: list[float], passes: bool) -> None:
    mean, margin, p = track3_log.verdict(found)
    assert mean == pytest.approx(found[0])
    assert (margin >= track3_log.MARGIN) == passes
    assert p == pytest.approx(1 - NormalDist(3.28, 0.0013 / math.sqrt(len(found))).cdf(2 * 3.28 - mean), rel=1e-6)
    assert (p < 0.00105) == passes  # 0.004 are 3.08 deviations


def write_log(path: Path, seed: int, found: dict[int, float], steps: int = 100, lr: float = 0.1) -> Path:
    arguments = argparse.Namespace(lr=lr, seed=seed, out=path)
    lines = [f"step:{step}/{steps} val_loss:{loss:.5f} train_time:1.0s" for step, loss in found.items()]
    text = track3_log.program(Path(track3.__file__), arguments)
    path.write_text("\n".join([text, track3.RULER, *lines, ""]), encoding="utf-8")
    return path


def test_runs_are_judged_together_and_may_stop_at_one_step_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [
        write_log(tmp_path / f"{seed}", seed, {50: 3.3, 75: 3.27 + seed / 1000, 100: last})
        for seed, last in ((1, 3.277), (2, 3.2795), (3, 3.276), (4, 3.2785))
    ]
    assert track3_log.judge(logs)
    printed = capsys.readouterr().out
    assert "step 75: mean loss 3.27250 of 4, margin 0.01500 of 0.004" in printed
    assert "step 100: mean loss 3.27775 of 4, margin 0.00450 of 0.004" in printed
    assert not track3_log.judge(logs[1:2])
    with pytest.raises(SystemExit) as end:
        track3.main(["--judge", *map(str, logs)])
    assert end.value.code == 0


def test_logs_that_cannot_be_judged_together_are_refused(tmp_path: Path, log: Path) -> None:
    first = write_log(tmp_path / "first", 1, {100: 3.27})
    refused = {
        "seed in itself": ("counts once", write_log(tmp_path / "same", 1, {100: 3.26})),
        "options": ("different", write_log(tmp_path / "other", 2, {100: 3.26}, lr=0.2)),
        "end": ("came to its end", write_log(tmp_path / "short", 2, {50: 3.26})),
        "file": ("cannot be read", tmp_path / "none"),
        "toy": ("no entry", log),
    }
    for message, path in refused.values():
        with pytest.raises(InputError, match=message):
            track3_log.judge([first, path])
