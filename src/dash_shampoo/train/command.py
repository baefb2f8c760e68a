"""The sub-command `dash-shampoo train`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dash_shampoo.train.errors import InputError
from dash_shampoo.train.loop import INTERRUPTED, Result, perplexity, sizes, train
from dash_shampoo.train.processes import Attempt, join, launched
from dash_shampoo.train.run import Elsewhere, Run
from dash_shampoo.train.settings import (
    MACHINE,
    OPTIMIZERS,
    SCHEDULES,
    STRATEGIES,
    Settings,
    load_settings,
    parse_option,
)

Text = str | None
Whole = int | None
Number = float | None

MODEL, DATA, OPTIMIZATION, RUNNING, SEVERAL = "Model", "Data", "Optimization", "Running", "Several processes (torchrun)"
DASH = ("solver", "block_size", "update_every", "damping", "root", "grafting", "start_step", "momentum")


def option(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


# Options of the model's size, which other sub-commands have too.
Layers = Annotated[Whole, option(MODEL, "Number of layers.")]
Width = Annotated[Whole, option(MODEL, "Width of the residual stream.")]
Heads = Annotated[Whole, option(MODEL, "Number of attention heads.")]
KvHeads = Annotated[Whole, option(MODEL, "Number of key-value heads (as many as heads).")]
Hidden = Annotated[Whole, option(MODEL, "Width inside SwiGLU.")]
Tied = Annotated[bool | None, option(MODEL, "Share the embedding with the head.", "--tied/--untied")]


def command(
    model: Annotated[Text, option(MODEL, f"Size: {sizes()} (tiny).")] = None,
    layers: Layers = None,
    width: Width = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    hidden: Hidden = None,
    tied: Tied = None,
    data: Annotated[
        Text, option(DATA, "Text file, folder, .bin of uint16 tokens or hub:NAME[:CONFIG] (Python's standard library).")
    ] = None,
    tokenizer: Annotated[Text, option(DATA, "bytes, chars or a file of the tokenizers package (bytes).")] = None,
    context: Annotated[Whole, option(DATA, "Length of a sequence.")] = None,
    batch_size: Annotated[Whole, option(DATA, "Sequences in a batch, over all processes (12).")] = None,
    accumulate: Annotated[Whole, option(DATA, "Batches whose gradients make a step (1).")] = None,
    optimizer: Annotated[Text, option(OPTIMIZATION, f"{', '.join(OPTIMIZERS)} or module:Class (dash).")] = None,
    lr: Annotated[Number, option(OPTIMIZATION, "Peak learning rate (dash, muon 0.005; adamw 0.002; sgd 0.1).")] = None,
    weight_decay: Annotated[Number, option(OPTIMIZATION, "Weight decay of matrices and embeddings (0).")] = None,
    steps: Annotated[Whole, option(OPTIMIZATION, "Steps of the optimizer (2000).")] = None,
    schedule: Annotated[Text, option(OPTIMIZATION, f"{', '.join(SCHEDULES)} (cosine).")] = None,
    warmup: Annotated[Whole, option(OPTIMIZATION, "Steps of linear warm-up (100).")] = None,
    clip: Annotated[Number, option(OPTIMIZATION, "Largest norm of the gradient, 0 for any (1).")] = None,
    solver: Annotated[Text, option(OPTIMIZATION, "Dash: solver of the inverse roots.")] = None,
    block_size: Annotated[Whole, option(OPTIMIZATION, "Dash: largest side of a block.")] = None,
    update_every: Annotated[Whole, option(OPTIMIZATION, "Dash: steps between two renewals of the roots.")] = None,
    damping: Annotated[Number, option(OPTIMIZATION, "Dash: damping, relative to a factor's norm.")] = None,
    root: Annotated[Whole, option(OPTIMIZATION, "Dash: p of the inverse p-th root.")] = None,
    grafting: Annotated[Text, option(OPTIMIZATION, "Dash: method whose norm an update has.")] = None,
    start_step: Annotated[Whole, option(OPTIMIZATION, "Dash: first step of Shampoo.")] = None,
    momentum: Annotated[Number, option(OPTIMIZATION, "Dash or sgd: momentum.")] = None,
    set_: Annotated[
        list[str] | None, option(OPTIMIZATION, "Any other option of the optimizer, as key=value; repeatable.", "--set")
    ] = None,
    eval_every: Annotated[Whole, option(RUNNING, "Steps between evaluations (200).")] = None,
    eval_batches: Annotated[Whole, option(RUNNING, "Batches of an evaluation (50).")] = None,
    save_every: Annotated[Whole, option(RUNNING, "Steps between checkpoints (500).")] = None,
    log_optimizer: Annotated[
        bool | None, option(RUNNING, "Log what Dash says of each stack, at evaluations.", "--log-optimizer")
    ] = None,
    seed: Annotated[Whole, option(RUNNING, "Seed of the weights and of the batches (1).")] = None,
    device: Annotated[Text, option(RUNNING, "cpu, cuda, ... (cuda if there is one).")] = None,
    threads: Annotated[
        Whole, option(RUNNING, "CPU threads (all, or OMP_NUM_THREADS; of several processes: its share).")
    ] = None,
    strategy: Annotated[Text, option(SEVERAL, f"How they hold the model: {', '.join(STRATEGIES)} (ddp).")] = None,
    replicas: Annotated[Whole, option(SEVERAL, "Copies of the model under hsdp.")] = None,
    timeout: Annotated[Number, option(SEVERAL, "Seconds that a process waits for the others (600).")] = None,
    config: Annotated[Path | None, option(RUNNING, "TOML file of settings; flags go before it.")] = None,
    run: Annotated[
        Path | None,
        option(
            RUNNING,
            "New folder for the run (runs/MODEL-OPTIMIZER-NNN); torchrun takes --run for its own: say --folder.",
            "--run",
            "--folder",
        ),
    ] = None,
    resume: Annotated[Path | None, option(RUNNING, "Folder of a run to go on with, with its own settings.")] = None,
) -> None:
    """Trains a Llama-type model on text and shows what the optimizer did."""
    given = dict(locals())
    for name in ("config", "run", "resume", "set_"):
        given.pop(name)
    options = {name: value for name in DASH if (value := given.pop(name)) is not None}

    def prepare() -> tuple[Run | None, Settings]:
        if resume is None:
            options.update(parse_option(text) for text in set_ or [])
            return None, load_settings(config, given, options)
        changes = {name: given.pop(name) for name in MACHINE}
        if run or config or set_ or options or any(value is not None for value in given.values()):
            raise InputError(
                "--resume goes on with the settings of its run: give no other settings than "
                + ", ".join(f"--{name}" for name in MACHINE)
            )
        return go_on(resume, changes)

    flags = dict(given)
    prepared = Attempt(prepare)  # before there is a process group, whose time-out is among the settings
    device, timeout = flags["device"], flags["timeout"] or Settings.timeout
    if prepared.result is not None:
        device, timeout = prepared.result[1].device, prepared.result[1].timeout
    with join(device, timeout) as processes:
        earlier, settings = processes.together(prepared.get)
        processes.agree("their settings", settings)
        settings.check_size(processes.size)
        console = Console(quiet=not processes.leads)
        folder, result = train(settings, earlier, run, console, processes)
        if processes.leads:
            show(folder, result, console)
    if result.interrupted:
        if processes.leads:
            several = ", under torchrun for several processes" if processes.size > 1 else ""
            print(f"interrupted; go on with: dash-shampoo train --resume {folder.folder}{several}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)


def go_on(folder: Path, changes: dict[str, Any]) -> tuple[Run, Settings]:
    """An earlier run, and its settings with ``changes`` to those that concern the machines.

    Raises:
        InputError: there is no run in that folder, or the changes make no sense.
    """
    processes = launched()
    run, settings = (Run if processes.leads else Elsewhere).open(folder)
    settings = settings.on_machine(processes.size, changes)
    settings.check()
    return run, settings


def show(run: Run, result: Result, console: Console) -> None:
    """Prints what a run has come to."""
    table = Table(title=str(run.folder), show_header=True, title_justify="left")
    for heading in ("", "before", "after"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("validation loss (nats per token)", f"{result.before:.4f}", f"{result.after:.4f}")
    table.add_row("perplexity", f"{perplexity(result.before):.2f}", f"{perplexity(result.after):.2f}")
    console.print(table)
    seconds = max(result.seconds, 1e-9)
    console.print(f"optimizer's share of the step  {result.optimizer_seconds / seconds:.1%}")
    console.print(f"tokens per second              {result.tokens / seconds:,.0f}")
    console.print(f"seconds of training            {result.seconds:.1f}")
    console.print(f"plot                           {run.plot()}", soft_wrap=True)
    console.print(f"metrics and checkpoint         {run.folder}", soft_wrap=True)
