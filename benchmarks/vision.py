"""Trains a small vision transformer on images of digits with Dash and others, over learning rates and seeds.

    python benchmarks/vision.py [--only dash adamw ...] [--seeds 1 2 3]

The images are those that scikit-learn ships. A rival that is not installed is left out. Appends one JSON line per run
to ``benchmarks/results/vision.jsonl`` and skips runs that are there already, as `benchmarks/choices.py` does.
``--table`` prints what docs/vision.md shows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from candidates import LOOK_AHEAD
from choices import SEEDS, done, record
from shapes import Digits
from torch import Tensor, nn

from dash_shampoo.train.optimizers import make_optimizers, make_schedulers
from dash_shampoo.train.settings import Settings

RESULTS = Path(__file__).parent / "results" / "vision.jsonl"
STEPS, EVERY = 1000, 50
RATES = {
    "dash": (2.5e-3, 5e-3, 1e-2, 2e-2),
    "look-ahead": (2.5e-3, 5e-3, 1e-2, 2e-2),
    "adamw": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    "muon": (2.5e-3, 5e-3, 1e-2, 2e-2),
    "heavyball:SOAP": (2.5e-3, 5e-3, 1e-2, 2e-2),
}


class Block(nn.Module):
    """Attention and a linear layer that is four times as wide, each on the normalised stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        q, k, v = (
            each(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )  # (batch, heads, patches, size)
        x = x + self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.narrow(F.gelu(self.wide(self.second_norm(x))))
        return out


class VisionTransformer(nn.Module):
    """Images (batch, 1, 8, 8) in patches of 2 x 2 to logits (batch, 10)."""

    def __init__(self, width: int = 64, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(F.unfold(images, 2, stride=2).mT) + self.position  # (batch, 16, width)
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return logits


def run(name: str, lr: float, seed: int) -> dict[str, Any]:
    """Trains once; returns validation losses every `EVERY` steps and the seconds of training."""
    torch.manual_seed(seed)
    task = Digits(VisionTransformer(), seed, steps=STEPS)
    options = {"block_size": 128} if name in ("dash", "look-ahead") else {}
    settings = Settings(
        optimizer="dash" if name == "look-ahead" else name, lr=lr, steps=STEPS, warmup=STEPS // 10, options=options
    )
    optimizers = make_optimizers(task.model, settings)
    schedulers = make_schedulers(optimizers, settings)
    curve, seconds = [], 0.0
    with ExitStack() as stack:
        for path, stage in LOOK_AHEAD.stages.items() if name == "look-ahead" else ():
            stack.enter_context(patch(f"dash_shampoo.{path}", stage))
        for step in range(STEPS):
            start = time.perf_counter()
            task.loss().backward()
            nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            seconds += time.perf_counter() - start
            if (step + 1) % EVERY == 0:
                curve.append([step + 1, seconds, task.validate()])
    return {"loss": curve[-1][2], "seconds": seconds, "curve": curve}


def first_below(curves: list[list[list[float]]], loss: float) -> str:
    """Steps and seconds until the mean of the curves is at or below a loss."""
    for points in zip(*curves, strict=True):
        if mean(point[2] for point in points) <= loss:
            return f"{points[0][0]} | {mean(point[1] for point in points):.1f}"
    return " | "


def table() -> None:
    """Prints each optimizer's losses over learning rates, and how long it takes to AdamW's best loss."""
    found: defaultdict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for line in RESULTS.read_text().splitlines():
        row = json.loads(line)
        found[row["optimizer"], row["lr"]].append(row)
    losses = {key: [row["loss"] for row in rows] for key, rows in found.items()}
    names = [name for name in RATES if any(name == key[0] for key in losses)]
    best = {name: min((lr for n, lr in losses if n == name), key=lambda lr: mean(losses[name, lr])) for name in names}
    target = mean(losses["adamw", best["adamw"]])
    print(
        "| optimizer | lr | loss | steps to AdamW's best | seconds to it | seconds in all |\n|---|---|---|---|---|---|"
    )
    for name in names:
        rows, own = found[name, best[name]], losses[name, best[name]]
        error = stdev(own) / len(own) ** 0.5 if len(own) > 1 else 0.0
        reached = first_below([row["curve"] for row in rows], target)
        seconds = mean(row["seconds"] for row in rows)
        print(f"| {name} | {best[name]:g} | {mean(own):.3f} ± {error:.3f} ({len(own)}) | {reached} | {seconds:.1f} |")
    print("\n| optimizer | lr: loss |\n|---|---|")
    for name in names:
        print(
            f"| {name} | {', '.join(f'{lr:g}: {mean(losses[n, lr]):.3f}' for n, lr in sorted(losses) if n == name)} |"
        )
    for lr in RATES["dash"]:
        pairs = [{row["seed"]: row["loss"] for row in found[name, lr]} for name in ("look-ahead", "dash")]
        if len(gaps := [pairs[0][seed] - pairs[1][seed] for seed in pairs[0].keys() & pairs[1].keys()]) > 1:
            error = stdev(gaps) / len(gaps) ** 0.5
            print(f"\nlook-ahead against dash at lr {lr:g}: {mean(gaps):+.4f} ± {error:.4f} ({len(gaps)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=RATES, nargs="+", default=list(RATES))
    parser.add_argument("--lr", type=float, nargs="+", help="learning rates in place of the grid")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        table()
        return
    torch.set_num_threads(arguments.threads)
    known = done(RESULTS)
    for seed in arguments.seeds:
        for name in arguments.only:
            package = name.partition(":")[0]
            if ":" in name and importlib.util.find_spec(package) is None:
                print(f"{name} is left out: pip install {package}")
                continue
            for lr in arguments.lr or RATES[name]:
                own = {"optimizer": name, "lr": lr, "seed": seed, "steps": STEPS}
                key = json.dumps(own, sort_keys=True)
                if key not in known:
                    row = run(name, lr, seed)
                    record(RESULTS, {**own, **row, "key": key})
                    print(name, lr, seed, f"{row['loss']:.4f} {row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
