"""Draws the figures of the docs: python benchmarks/plots.py

`response.png` needs nothing; `losses.png`, `options.png` and `tuning-*.png` need what `benchmarks/choices.py` has
measured.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib as mpl
import torch
from choices import BASE, LR, RESULTS, SHORT

from dash_shampoo.roots import inverse_root

mpl.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent.parent / "docs"
Row = dict[str, Any]


def response(
    solver: str, precision: str, dtype: torch.dtype, damping: float, p: int = 4
) -> tuple[list[float], list[float]]:
    """Eigenvalues, relative to the largest, and the root's eigenvalue over the undamped exact root's."""
    values = torch.logspace(0, -9, 64, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64)).Q
    matrix = (q * values) @ q.T
    matrix = ((matrix + matrix.T) / 2).unsqueeze(0).to(dtype)
    epsilon = 1e-10 if solver.endswith("paper") else 0.0
    damping = 0.0 if solver.endswith("paper") else damping
    root = (
        inverse_root(matrix, p, solver=solver, damping=damping, epsilon=epsilon, precision=precision).value[0].double()
    )
    got = (q * (root @ q)).sum(0)
    return values.tolist(), (got * values ** (1 / p)).tolist()


def draw_response() -> None:
    """What each solver makes of an eigenvalue: in float64, and in the precisions of the products."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained", sharey=True)
    for solver in ("eigh", "minimax", "newton-db", "chebyshev", "newton-db-paper", "coupled-newton-paper"):
        axes[0].semilogx(
            *response(solver, "fp32", torch.float64, 1e-4), label=solver, lw=3 if solver == "eigh" else 1.3
        )
    axes[0].set_title("float64, damping 1e-4 (the paper's: epsilon 1e-10)")
    for damping in (1e-2, 1e-4, 1e-6):
        for dtype, style in ((torch.float64, "-"), (torch.float32, ":")):
            label = f"{damping:g}, {str(dtype).removeprefix('torch.')}"
            axes[1].semilogx(*response("minimax", "fp32", dtype, damping), style, label=label)
    axes[1].set_title("minimax over damping, float64 and float32")
    for precision in ("fp32", "fp16x3", "bf16x3", "mixed"):
        axes[2].semilogx(*response("minimax", precision, torch.float32, 1e-4), label=precision)
    for precision in ("tf32", "fp16"):
        axes[2].semilogx(*response("minimax", precision, torch.float32, 1e-2), "--", label=f"{precision}, damping 1e-2")
    axes[2].set_title("minimax over precision of the products, damping 1e-4")
    for each in axes:
        each.set(xlabel="eigenvalue / largest eigenvalue", ylim=(0, 2.4))
        each.axhline(1, color="k", lw=0.4)
        each.invert_xaxis()
        each.grid(alpha=0.3)
        each.legend(fontsize=8)
    axes[0].set_ylabel("root's eigenvalue / exact inverse fourth root")
    figure.savefig(DOCS / "response.png", dpi=110)
    plt.close(figure)


def rows() -> list[Row]:
    """What `benchmarks/choices.py` has measured."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def spread(chosen: list[Row]) -> tuple[float, float]:
    """Mean and standard deviation over seeds of the final validation loss."""
    losses = [row["loss"] for row in chosen]
    return mean(losses), stdev(losses) if len(losses) > 1 else 0.0


def draw_losses(data: list[Row]) -> None:
    """Loss over learning rate: AdamW after 1000 steps, Muon and Dash after 400."""
    texts = sorted({row["text"] for row in data})
    figure, grid = plt.subplots(1, len(texts), figsize=(5.5 * len(texts), 4), layout="constrained", squeeze=False)
    for axes, text in zip(grid.flat, texts, strict=True):
        curves: dict[str, dict[float, list[Row]]] = defaultdict(lambda: defaultdict(list))
        for row in data:
            if row["text"] == text and row["part"] in ("main", "exponent"):
                name = row["optimizer"] if row["part"] == "main" else "dash, exponent 1/4"
                curves[f"{name}, {row['steps']} steps"][row["lr"]].append(row)
        for name, points in sorted(curves.items()):
            rates = sorted(points)
            means, deviations = zip(*(spread(points[lr]) for lr in rates), strict=True)
            axes.errorbar(rates, means, yerr=deviations, marker="o", capsize=3, label=name)
        axes.set(xscale="log", xlabel="learning rate", ylabel="validation loss", title=text)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(DOCS / "losses.png", dpi=110)
    plt.close(figure)


def draw_options(data: list[Row]) -> None:
    """Loss over damping, frequency, block size, solver and grafting, each beside the same base."""
    parts = ("damping", "update_every", "block_size", "solver", "grafting")
    names = {"frequency": "update_every", "block": "block_size"}
    texts = sorted({row["text"] for row in data})
    figure, grid = plt.subplots(
        len(texts), len(parts), figsize=(18, 3.2 * len(texts)), layout="constrained", squeeze=False
    )
    for line, text in zip(grid, texts, strict=True):
        own = [row for row in data if row["text"] == text and row["optimizer"] == "dash" and row["steps"] == SHORT]
        own = [row for row in own if row["lr"] == LR]
        base = [row for row in own if row["part"] == "main"]
        for axes, option in zip(line, parts, strict=True):
            default: Callable[[Row], Any] = lambda row, o=option: row["options"].get(o, "adam")  # noqa: E731
            values: dict[Any, list[Row]] = defaultdict(list)
            for row in base + [row for row in own if names.get(row["part"], row["part"]) == option]:
                values[default(row)].append(row)
            keys = sorted(values, key=lambda key: (isinstance(key, str), key))
            means, deviations = zip(*(spread(values[key]) for key in keys), strict=True) if keys else ((), ())
            axes.errorbar([str(key) for key in keys], means, yerr=deviations, marker="o", capsize=3, ls="none")
            axes.set(xlabel=option, title=text)
            axes.tick_params(axis="x", labelrotation=30 if option in ("solver", "grafting") else 0)
            axes.grid(alpha=0.3)
    figure.savefig(DOCS / "options.png", dpi=110)
    plt.close(figure)


def draw_tuning(data: list[Row]) -> None:
    """For each option that docs/tuning.md speaks of, the loss against the base's, seed by seed, on both texts."""
    own = [row for row in data if (row["optimizer"], row["steps"], row["lr"]) == ("dash", SHORT, LR)]
    base = {(row["text"], row["seed"]): row["loss"] for row in own if row["options"] == BASE}
    for option, default in {**BASE, "grafting": "adam", "state_dtype": "fp32"}.items():
        values: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in own:
            value = row["options"].get(option, default)
            alone = {**row["options"], option: default} in (BASE, {**BASE, option: default})
            if alone and isinstance(value, (str, int, float)):
                values[value][row["text"]].append(row["loss"] - base[row["text"], row["seed"]])
        keys = sorted(values, key=lambda key: (isinstance(key, str), key))
        figure, axes = plt.subplots(figsize=(5.6, 3.2), layout="constrained")
        for shift, text in ((-0.06, "python"), (0.06, "tinyshakespeare")):
            found = [values[key][text] for key in keys]
            errors = [stdev(each) if len(each) > 1 else 0.0 for each in found]
            places = [place + shift for place in range(len(keys))]
            axes.errorbar(places, list(map(mean, found)), yerr=errors, marker="o", ls="none", capsize=3, label=text)
        axes.axhline(0, color="k", lw=0.4)
        axes.set_xticks(range(len(keys)), [f"{key}{' (base)' * (key == default)}" for key in keys], rotation=12)
        axes.set(xlabel=option, ylabel=f"loss - loss of the base, {SHORT} steps")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(DOCS / f"tuning-{option.replace('_', '-')}.png", dpi=110)
        plt.close(figure)


def main() -> None:
    draw_response()
    data = rows()
    if data:
        draw_tuning(data)
        draw_losses(data)
        draw_options(data)


if __name__ == "__main__":
    main()
