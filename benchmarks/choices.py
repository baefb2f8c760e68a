"""Trains the tiny Llama over the options of Dash and its rivals: the evidence behind the defaults.

    python benchmarks/choices.py --text PATH [--only main exponent ...]

Appends one JSON line per run to ``benchmarks/results/choices.jsonl`` and skips runs that are there already, so that it
can be cut and taken up again. `benchmarks/plots.py` draws what docs/choices.md shows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dash_shampoo.train.loop import Trainer
from dash_shampoo.train.settings import Settings

RESULTS = Path(__file__).parent / "results" / "choices.jsonl"
SEEDS = (1, 2, 3)
BASE = {"root": 2, "damping": 1e-4, "update_every": 10, "solver": "minimax", "block_size": 128}
LRS = (5e-3, 3e-3, 1e-2)
LR = LRS[0]  # the best of "main" for Dash on both texts
LONG, SHORT = 1000, 400


# What is changed, one thing at a time, against BASE.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "damping": [{"damping": 1e-2}, {"damping": 1e-3}, {"damping": 1e-6}],
    "frequency": [{"update_every": 1}, {"update_every": 50}],
    "solver": [{"solver": name} for name in ("eigh", "newton-db-paper", "chebyshev", "newton-db")],
    "grafting": [{"grafting": name} for name in ("rmsprop", "adagrad")],
    "block": [{"block_size": 32}, {"block_size": 1024}],
    "tolerance": [
        {"damping": 1e-3, "solver": {"name": "minimax", "tolerance": 0.05}},
        {"solver": {"name": "minimax", "tolerance": 0.05}},
    ],
    "state": [{"state_dtype": "bf16"}],
}


def experiments(part: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Settings and optimizer options of each run of a part of the study."""
    if part == "main":
        for lr in LRS:
            yield {"optimizer": "dash", "lr": lr, "steps": SHORT}, BASE
        for lr in (2e-3, 3e-3, 1e-3):
            yield {"optimizer": "adamw", "lr": lr, "steps": LONG}, {}
        for lr in (5e-3, 1e-2):
            yield {"optimizer": "muon", "lr": lr, "steps": SHORT}, {}
    if part == "exponent":
        for lr in LRS:
            yield {"optimizer": "dash", "lr": lr, "steps": SHORT}, {**BASE, "root": 4}
    for change in OPTIONS.get(part, []):
        yield {"optimizer": "dash", "lr": LR, "steps": SHORT}, {**BASE, **change}
    if part == "grid":
        for change in (change for changes in OPTIONS.values() for change in changes):
            for lr in LRS[1:]:
                yield {"optimizer": "dash", "lr": lr, "steps": SHORT}, {**BASE, **change}
    if part == "half":
        yield {"optimizer": "dash", "lr": LR, "steps": LONG // 2}, BASE
    if part == "long":
        yield {"optimizer": "dash", "lr": LR, "steps": LONG}, BASE
        yield {"optimizer": "muon", "lr": LR, "steps": LONG}, {}


PARTS = (
    "main",
    "exponent",
    "damping",
    "frequency",
    "solver",
    "block",
    "state",
    "half",
    "tolerance",
    "long",
    "grafting",
    "grid",
)


def run(settings: Settings, every: int = 100) -> dict[str, Any]:
    """Trains once; returns validation losses ``every`` so many steps and at the end, and the seconds of training."""
    trainer = Trainer(settings)
    curve = []
    start = time.perf_counter()
    while trainer.step < settings.steps:
        trainer.train_step()
        if trainer.step % every == 0:
            curve.append([trainer.step, trainer.evaluate()])
    return {
        "loss": curve[-1][1] if curve and curve[-1][0] == settings.steps else trainer.evaluate(),
        "curve": curve,
        "seconds": trainer.seconds,
        "optimizer_seconds": trainer.optimizer_seconds,
        "wall": time.perf_counter() - start,
    }


def texts(second: str | None) -> list[tuple[str | None, str, str]]:
    """The texts: path, tokenizer and name of Python's standard library and of a ``second`` one, if there is one."""
    return [(None, "bytes", "python")] + ([(second, "chars", Path(second).stem)] if second else [])


def done(results: Path) -> set[str]:
    """The keys of the runs that have been measured."""
    return {json.loads(line)["key"] for line in results.read_text().splitlines()} if results.exists() else set()


def record(results: Path, row: dict[str, Any]) -> None:
    """Appends a run's row."""
    results.parent.mkdir(exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", default=None, help="a second text beside Python's standard library")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    known = done(RESULTS)
    for seed in arguments.seeds:
        for part in arguments.only:
            for own, options in experiments(part):
                for data, tokenizer, name in texts(arguments.text):
                    settings = Settings(**own, seed=seed, data=data, tokenizer=tokenizer, options=options)
                    described = {**dataclasses.asdict(settings), "data": name}
                    key = json.dumps(described, sort_keys=True)
                    if key not in known:
                        row = {"part": part, "text": name, **own, "options": options, "seed": seed, **run(settings)}
                        record(RESULTS, {**row, "key": key})
                        print(part, name, own, options, seed, f"{row['loss']:.4f} {row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
