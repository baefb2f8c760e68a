"""The sub-command `dash-shampoo compare`."""

from __future__ import annotations

import os
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from dash_shampoo.compare.contenders import Contender, parse_all
from dash_shampoo.compare.page import machine
from dash_shampoo.compare.report import HEADINGS, cells, write
from dash_shampoo.compare.runs import Case, cases, known, run_all
from dash_shampoo.compare.summary import summarise
from dash_shampoo.train.errors import InputError
from dash_shampoo.train.loop import sizes
from dash_shampoo.train.settings import OPTIMIZERS, SCHEDULES, Settings


def command(
    optimizers: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"NAME[,key=value,...]: {', '.join(OPTIMIZERS)} or module:Class (dash adamw muon).", show_default=False
        ),
    ] = None,
    lr: Annotated[list[float] | None, typer.Option(help="Learning rate to try, for all; repeatable.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 1,
    model: Annotated[str, typer.Option(help=f"Size: {sizes()}.")] = Settings.model,
    layers: Annotated[int | None, typer.Option(help="Number of layers.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the residual stream.")] = None,
    heads: Annotated[int | None, typer.Option(help="Number of attention heads.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Width inside SwiGLU.")] = None,
    data: Annotated[str | None, typer.Option(help="As for train.")] = None,
    tokenizer: Annotated[str, typer.Option(help="As for train.")] = Settings.tokenizer,
    context: Annotated[int | None, typer.Option(help="Length of a sequence.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in a batch.")] = Settings.batch_size,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 400,
    weight_decay: Annotated[float, typer.Option(help="Weight decay, for all.")] = Settings.weight_decay,
    schedule: Annotated[str, typer.Option(help=", ".join(SCHEDULES))] = Settings.schedule,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = Settings.warmup,
    eval_every: Annotated[int, typer.Option(min=1, help="Steps between validation losses.")] = 20,
    eval_batches: Annotated[int, typer.Option(min=1, help="Batches of a validation.")] = Settings.eval_batches,
    log_optimizer: Annotated[
        bool, typer.Option("--log-optimizer", help="Report what Dash says of each stack at the end.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs side by side (one for each GPU, or 1).")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of each run (its share of all).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... (cuda if there is one).")] = None,
    out: Annotated[Path, typer.Option(help="Folder; the same again goes on with what is there.")] = Path(
        "runs/compare"
    ),
) -> None:
    """Trains one model with several optimizers over learning rates and seeds, and reports: Markdown and HTML."""
    contenders = parse_all(optimizers or ["dash", "adamw", "muon"], lr or ())
    jobs = jobs or max(1, torch.cuda.device_count())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    common = Settings(
        model=model,
        layers=layers,
        width=width,
        heads=heads,
        hidden=hidden,
        data=data,
        tokenizer=tokenizer,
        context=context,
        batch_size=batch_size,
        steps=steps,
        weight_decay=weight_decay,
        schedule=schedule,
        warmup=warmup,
        eval_batches=eval_batches,
        log_optimizer=log_optimizer,
        threads=threads or max(1, usable // jobs),
        device=device,
    )
    planned = list(cases(contenders, range(1, seeds + 1), common))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {out}: {error.strerror}") from error
    failed: dict[str, str] = {}
    console = Console()
    with Live(table(planned, out, eval_every), console=console, refresh_per_second=1) as live:

        def after(case: Case, error: str | None) -> None:
            if error is not None:
                failed[case.contender.label] = error
            live.update(table(planned, out, eval_every))

        run_all(planned, out, eval_every, jobs, after)
    rows = summarise(contenders, known(planned, out, eval_every))
    facts = made_with(contenders, common, jobs, failed)
    if rows:
        title = f"{model}, {steps} steps: {', '.join(row.contender.label for row in rows)}"
        console.print(f"report  {write(out, title, rows, facts)}", soft_wrap=True)
    if failed:
        raise InputError("; ".join(f"{label}: {error}" for label, error in failed.items()))


def table(planned: list[Case], folder: Path, every: int) -> Table:
    """What there is so far."""
    records = known(planned, folder, every)
    found = Table(*HEADINGS, title=f"{len(records)} of {len(planned)} runs", title_justify="left")
    for row in summarise([*{case.contender.label: case.contender for case in planned}.values()], records):
        found.add_row(*cells(row))
    return found


def made_with(contenders: list[Contender], common: Settings, jobs: int, failed: dict[str, str]) -> dict[str, str]:
    """The command, versions and the machine, for the report."""
    facts = {**machine(), "side by side": f"{jobs} runs of {common.threads} threads"}
    packages = packages_distributions()
    for contender in contenders:
        top = contender.optimizer.partition(":")[0].partition(".")[0]
        if ":" in contender.optimizer and top in packages:
            facts[packages[top][0]] = version(packages[top][0])
    return {**facts, **{f"{label} failed": error for label, error in failed.items()}}
