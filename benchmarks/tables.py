"""Prints the tables of docs/choices.md from what `benchmarks/choices.py` has measured: python benchmarks/tables.py"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

RESULTS = Path(__file__).parent / "results" / "choices.jsonl"
TEXTS = ("python", "tinyshakespeare")
BASE: dict[str, Any] = {"root": 2, "damping": 1e-4, "update_every": 10, "solver": "minimax", "block_size": 128}
RATES = (3e-3, 5e-3, 1e-2)
Row = dict[str, Any]


def loss(rows: list[Row]) -> str:
    """Mean, standard deviation and number of seeds of the final validation loss."""
    losses = [row["loss"] for row in rows]
    if not losses:
        return ""
    deviation = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
    return f"{mean(losses):.3f}{deviation} ({len(losses)})"


def change(options: dict[str, Any]) -> str:
    """What differs from the base, as the table calls it."""
    differing = {name: value for name, value in options.items() if BASE.get(name) != value}
    if isinstance(solver := differing.get("solver"), dict):
        del differing["solver"]
        differing["tolerance"] = solver["tolerance"]
    return ", ".join(f"`{name}` {value}" for name, value in differing.items()) or "defaults of this study"


def rivals(rows: list[Row]) -> None:
    print("| optimizer | steps | lr | python | tinyshakespeare |\n|---|---|---|---|---|")
    chosen: dict[tuple[str, int, float], list[Row]] = defaultdict(list)
    for row in rows:
        if row["options"] in ({}, BASE):
            chosen[row["optimizer"], row["steps"], row["lr"]].append(row)
    for (optimizer, steps, lr), own in sorted(chosen.items(), key=lambda item: (item[0][1] != 400, item[0])):
        cells = [loss([row for row in own if row["text"] == text]) for text in TEXTS]
        print(f"| {optimizer} | {steps} | {lr} | {' | '.join(cells)} |")


def options(rows: list[Row]) -> None:
    print("| | " + " | ".join(f"{text}, lr {lr:g}" for text in TEXTS for lr in RATES) + " |\n|---|" + "---|" * 6)
    chosen: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["optimizer"] == "dash" and row["steps"] == 400:
            chosen[change(row["options"])].append(row)
    for name, own in sorted(chosen.items(), key=lambda item: (not item[0].startswith("defaults"), item[0])):
        cells = [loss([row for row in own if (row["text"], row["lr"]) == (text, lr)]) for text in TEXTS for lr in RATES]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    rivals(rows)
    print()
    options(rows)


if __name__ == "__main__":
    main()
