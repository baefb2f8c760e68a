"""Prints the tables of docs/choices.md from what `benchmarks/choices.py` has measured: python benchmarks/tables.py"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from choices import BASE, LRS
from plots import Row, rows, spread

TEXTS = ("python", "tinyshakespeare")
RATES = sorted(LRS)


def loss(chosen: list[Row]) -> str:
    """Mean, standard deviation and number of seeds of the final validation loss."""
    if not chosen:
        return ""
    average, deviation = spread(chosen)
    return f"{average:.3f}{f' ± {deviation:.3f}' if len(chosen) > 1 else ''} ({len(chosen)})"


def change(options: dict[str, Any]) -> str:
    """What differs from the base, as the table calls it."""
    differing = {name: value for name, value in options.items() if BASE.get(name) != value}
    if isinstance(solver := differing.get("solver"), dict):
        del differing["solver"]
        differing["tolerance"] = solver["tolerance"]
    return ", ".join(f"`{name}` {value}" for name, value in differing.items()) or "defaults of this study"


def rivals(data: list[Row]) -> None:
    print("| optimizer | steps | lr | python | tinyshakespeare |\n|---|---|---|---|---|")
    chosen: dict[tuple[str, int, float], list[Row]] = defaultdict(list)
    for row in data:
        if row["options"] in ({}, BASE):
            chosen[row["optimizer"], row["steps"], row["lr"]].append(row)
    for (optimizer, steps, lr), own in sorted(chosen.items(), key=lambda item: (item[0][1] != 400, item[0])):
        cells = [loss([row for row in own if row["text"] == text]) for text in TEXTS]
        print(f"| {optimizer} | {steps} | {lr} | {' | '.join(cells)} |")


def options(data: list[Row]) -> None:
    print("| | " + " | ".join(f"{text}, lr {lr:g}" for text in TEXTS for lr in RATES) + " |\n|---|" + "---|" * 6)
    chosen: dict[str, list[Row]] = defaultdict(list)
    for row in data:
        if row["optimizer"] == "dash" and row["steps"] == 400:
            chosen[change(row["options"])].append(row)
    for name, own in sorted(chosen.items(), key=lambda item: (not item[0].startswith("defaults"), item[0])):
        cells = [loss([row for row in own if (row["text"], row["lr"]) == (text, lr)]) for text in TEXTS for lr in RATES]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    data = rows()
    rivals(data)
    print()
    options(data)


if __name__ == "__main__":
    main()
