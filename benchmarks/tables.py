"""Prints the tables of docs/choices.md: python benchmarks/tables.py

From what `benchmarks/choices.py` and `benchmarks/candidates.py` have measured.
"""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import mean, stdev
from typing import Any

from candidates import RESULTS as CANDIDATES
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


def difference(own: list[Row], base: dict[Any, float]) -> str:
    """Mean over seeds of the loss less the base's with the same seed, its standard error and the number of seeds."""
    found = [row["loss"] - base[place(row)] for row in own if place(row) in base]
    if not found:
        return ""
    error = f" ± {stdev(found) / len(found) ** 0.5:.3f}" if len(found) > 1 else ""
    return f"{mean(found):+.3f}{error} ({len(found)})"


def place(row: Row) -> tuple[Any, ...]:
    """What two runs have in common that differ in the rule of the update alone."""
    settings = json.loads(row["key"])
    own = settings["optimizer"], settings["options"].get("update_every")
    return *own, row["text"], row["lr"], row["steps"], row["seed"]


def candidates(data: list[Row], tried: list[Row]) -> None:
    """Each candidate against Dash's rule, or a rival with weight decay against the one without, seed by seed."""
    plain = [row for row in data if row["options"] in [{}, *({**BASE, "update_every": n} for n in (1, 10, 50))]]
    plain += [row for row in tried if row["candidate"] == "base" or row["candidate"].startswith("every")]
    base = {place(row): row["loss"] for row in plain}
    where = list(dict.fromkeys([*TEXTS, *(row["text"] for row in tried)]))
    print(f"| | steps | lr | {' | '.join(where)} |\n|---|---|---|{'---|' * len(where)}")
    chosen: dict[tuple[str, int, float], list[Row]] = defaultdict(list)
    for row in tried:
        if row not in plain:
            chosen[row["candidate"], row["steps"], row["lr"]].append(row)
    for (name, steps, lr), own in sorted(chosen.items()):
        cells = [difference([row for row in own if row["text"] == text], base) for text in where]
        print(f"| {name} | {steps} | {lr:g} | {' | '.join(cells)} |")


def main() -> None:
    data = rows()
    rivals(data)
    print()
    options(data)
    if CANDIDATES.exists():
        print()
        candidates(data, [json.loads(line) for line in CANDIDATES.read_text().splitlines()])


if __name__ == "__main__":
    main()
