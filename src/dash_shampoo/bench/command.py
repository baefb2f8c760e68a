"""The sub-commands of `dash-shampoo bench`: `roots`, `step` and `gpu`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dash_shampoo.bench import gpu as gpu_bench
from dash_shampoo.bench import roots as root_bench
from dash_shampoo.bench import step as step_bench
from dash_shampoo.kernels import PRECISIONS
from dash_shampoo.train.errors import InputError, choose
from dash_shampoo.train.processes import pick_device

app = typer.Typer(help="Measures inverse roots and steps on this machine.")

Out = Annotated[Path | None, typer.Option(help="Folder for JSON and plots.")]
Repeats = Annotated[int, typer.Option(min=1, help="Times that each piece of work is timed.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...")]


@app.command()
def roots(
    size: Annotated[list[int] | None, typer.Option(min=1, help="Size of the matrices; repeatable (128, 256).")] = None,
    condition: Annotated[
        list[float] | None, typer.Option(min=2, help="Condition after damping; repeatable (1e3 to 1e6).")
    ] = None,
    precision: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PRECISIONS)}; repeatable (fp32).")] = None,
    root: Annotated[int, typer.Option("--root", min=1, help="p of the inverse p-th root.")] = 4,
    repeats: Repeats = 5,
    device: Device = None,
    out: Out = None,
) -> None:
    """Every solver: error, residual, products and time, with the front of error against time."""
    for name in precision or []:
        choose("precision", name, PRECISIONS)
    rows = list(
        root_bench.measure(
            size or [128, 256],
            condition or [1e3, 1e4, 1e5, 1e6],
            precision or ["fp32"],
            root,
            repeats,
            pick_device(device),
        )
    )
    columns = ["size", "condition", "solver", "precision", "error", "residual", "ok", "products", "milliseconds"]
    show(root_bench.as_json(rows), columns, f"inverse {root}-th roots")
    if out is not None:
        write(out, "roots", root_bench.as_json(rows))
        root_bench.pareto(rows, out / "roots.png")


@app.command()
def step(
    model: Annotated[str, typer.Option(help="Size of the model.")] = "llama-18m",
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Largest side of a block.")] = 256,
    root: Annotated[int | None, typer.Option("--root", help="p of the inverse p-th root.")] = None,
    update_every: Annotated[int, typer.Option(min=1, help="Steps between two renewals of the roots.")] = 1,
    solver: Annotated[list[str] | None, typer.Option(help="Solvers to measure; repeatable (all).")] = None,
    repeats: Repeats = 3,
    device: Device = None,
    out: Out = None,
) -> None:
    """The step of Dash with every solver, beside AdamW and Muon: seconds, operations and state."""
    solvers = [choose("solver", name, root_bench.SOLVERS) for name in solver or root_bench.SOLVERS]
    options = {"block_size": block_size, "root": root, "update_every": update_every}
    cases: dict[str, dict[str, Any]] = {name: {"solver": name, **options} for name in solvers}
    cases = {"adamw": {}, "muon": {}, **cases}
    rows = step_bench.as_json(step_bench.measure(cases, model, layers, repeats, pick_device(device)))
    show(rows, list(rows[0]), f"{model}, block {block_size}, roots every {update_every}")
    if out is not None:
        write(out, "step", rows)


@app.command()
def gpu(
    root: Annotated[int, typer.Option("--root", min=1, help="p of the inverse p-th root.")] = 4,
    minutes: Annotated[float, typer.Option(min=0, help="Time after which no further measurement begins.")] = 7,
    repeats: Repeats = 5,
    device: Device = None,
    out: Out = None,
) -> None:
    """One of eight GPUs in the paper's step: kernels, peak rates, roots and stages; small stacks on a CPU."""
    chosen = pick_device(device)
    rows = []
    for row in gpu_bench.measure(gpu_bench.load_for(chosen), root, repeats, minutes, chosen):
        print(*(f"{key}={written(value)}" for key, value in row.items()), flush=True)
        rows.append(row)
        if out is not None:  # what there is so far, should the rest not come
            write(out, "gpu", rows)
            (out / "gpu.md").write_text(in_markdown(rows), encoding="utf-8")


def written(value: object) -> str:
    """A value in few digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def in_markdown(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown tables, one for each of their kinds."""
    found = []
    for kind in dict.fromkeys(row["table"] for row in rows):
        own = [{k: v for k, v in row.items() if k != "table"} for row in rows if row["table"] == kind]
        columns = list(dict.fromkeys(name for row in own for name in row))
        lines = [[written(row.get(name, "")) for name in columns] for row in own]
        table = [columns, ["---"] * len(columns), *lines]
        found.append(f"## {kind}\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in table) + "\n")
    return "\n".join(found)


def show(rows: list[dict[str, Any]], columns: list[str], title: str) -> None:
    """Prints rows as a table."""
    table = Table(*columns, title=f"{title} ({torch.get_num_threads()} threads)", title_justify="left")
    for row in rows:
        table.add_row(*(f"{row[name]:.3g}" if isinstance(row[name], float) else str(row[name]) for name in columns))
    Console().print(table)


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Writes rows, with what they were measured on, as JSON.

    Raises:
        InputError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}") from error
    machine = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    (folder / f"{name}.json").write_text(
        json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )
