"""The sub-commands of `dash-shampoo claim`, one for each claim."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table as RichTable

from dash_shampoo.bench.roots import SOLVERS
from dash_shampoo.claim import compression as compression_claim
from dash_shampoo.claim import compression_runs
from dash_shampoo.claim import power_iteration as power_iteration_claim
from dash_shampoo.claim import quality as quality_claim
from dash_shampoo.claim import scaling as scaling_claim
from dash_shampoo.claim import solvers as solvers_claim
from dash_shampoo.claim import step_time as step_time_claim
from dash_shampoo.claim.matrices import synthetic, trained_factors
from dash_shampoo.claim.report import Report, lines, make_folder, write
from dash_shampoo.compare.page import machine
from dash_shampoo.kernels import PRECISIONS
from dash_shampoo.train.command import Layers
from dash_shampoo.train.errors import InputError, choose
from dash_shampoo.train.llama import config_for
from dash_shampoo.train.loop import sizes
from dash_shampoo.train.processes import ALONE, pick_device, set_threads
from dash_shampoo.train.settings import LEARNING_RATES, Settings

app = typer.Typer(help="Tries one claim of the paper (arXiv 2602.02016) on this machine, with a report.")

Size = Annotated[str, typer.Option(help=f"Size of the model: {sizes()}.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps of the training.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of seeds.")]
Data = Annotated[str | None, typer.Option(help="As for train (Python's standard library).")]
Config = Annotated[str | None, typer.Option(help="Of a hub data set, such as en.")]
Tokenizer = Annotated[str, typer.Option(help="As for train.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ... (cuda if there is one).")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads (all, or OMP_NUM_THREADS).")]
Out = Annotated[Path | None, typer.Option(help="Folder of the report (runs/claim/NAME).")]
Block = Annotated[int, typer.Option(min=1, help="Largest side of a block.")]
Root = Annotated[int, typer.Option("--root", min=2, help="p of the inverse p-th root.")]
Damping = Annotated[float, typer.Option(min=1e-6, max=0.5, help="Damping, relative to |A|.")]
Most = Annotated[int, typer.Option(min=1, help="Factors of a size that are taken, and random matrices of a kind.")]


def text_of(data: str | None, config: str | None) -> str | None:
    """``data`` with the ``config`` of a hub data set, as `load_corpus` takes it.

    Raises:
        InputError: it is no hub data set.
    """
    if config is None:
        return data
    if data is None or not data.startswith("hub:"):
        raise InputError("--config belongs to a hub data set: --data hub:allenai/c4 --config en")
    return f"{data}:{config}"


@app.command("scaling")
def scaling(
    size: Size = "tiny",
    steps: Steps = 30,
    data: Data = None,
    config: Config = None,
    tokenizer: Tokenizer = "bytes",
    block_size: Block = 1024,
    root: Root = 4,
    damping: Damping = 1e-4,
    most: Most = 32,
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
) -> None:
    """Products that each solver needs, by what scales the matrices."""
    folder = begin("scaling", out, threads)
    settings = training(size, steps, text_of(data, config), tokenizer, block_size, device)
    stacks = trained_factors(settings, most)
    stacks.update({name: each.to(pick_device(device)) for name, each in synthetic(128, most, seed=1)})
    end(folder, scaling_claim.report(stacks, root, damping))


@app.command("power-iteration")
def power_iteration(
    size: Size = "tiny",
    steps: Steps = 30,
    data: Data = None,
    config: Config = None,
    tokenizer: Tokenizer = "bytes",
    block_size: Block = 1024,
    trials: Annotated[int, typer.Option(min=1, help="Matrices of a kind, or turns of the factors of a size.")] = 512,
    matrix: Annotated[int, typer.Option(min=2, help="Size of random matrices.")] = 128,
    most: Most = 32,
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
) -> None:
    """How often a power iteration is wrong, from one vector and from sixteen, and what a certificate does."""
    folder = begin("power-iteration", out, threads)
    settings = training(size, steps, text_of(data, config), tokenizer, block_size, device)
    stacks = trained_factors(settings, most)
    end(folder, power_iteration_claim.report(stacks, matrix, trials, pick_device(device)))


@app.command("solvers")
def solvers(
    size: Size = "tiny",
    steps: Steps = 30,
    data: Data = None,
    config: Config = None,
    tokenizer: Tokenizer = "bytes",
    block_size: Block = 1024,
    root: Annotated[list[int] | None, typer.Option("--root", min=1, help="p; repeatable (4 and 2).")] = None,
    damping: Annotated[
        list[float] | None, typer.Option(min=1e-6, max=0.5, help="Relative to |A|; repeatable (1e-3, 1e-4, 1e-6).")
    ] = None,
    precision: Annotated[str, typer.Option(help=f"Of the products: {', '.join(PRECISIONS)} or auto.")] = "auto",
    most: Most = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each solver is timed.")] = 5,
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
) -> None:
    """Error, products and time of every solver on factors of a training."""
    choose("precision", precision, (*PRECISIONS, "auto"))
    folder = begin("solvers", out, threads)
    settings = training(size, steps, text_of(data, config), tokenizer, block_size, device)
    stacks = trained_factors(settings, most)
    end(folder, solvers_claim.report(stacks, root or [4, 2], damping or [1e-3, 1e-4, 1e-6], precision, repeats))


@app.command("step-time")
def step_time(
    size: Size = "tiny",
    layers: Layers = None,
    solver: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable ({', '.join(step_time_claim.SOLVERS)}).", show_default=False)
    ] = None,
    update_every: Annotated[
        list[int] | None, typer.Option(min=1, help="Steps between renewals of roots; repeatable (1 and 10).")
    ] = None,
    block_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Repeatable (the model's width, and half of it).")
    ] = None,
    root: Root = 4,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="module:Class,key=value of another package; repeatable (those of a few that are installed)."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each is timed.")] = 3,
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
) -> None:
    """Time of a step by solver, frequency of roots and block size, against one call a block and other packages."""
    solvers = [choose("solver", name, SOLVERS) for name in solver or step_time_claim.SOLVERS]
    width = config_for(size).width
    folder = begin("step-time", out, threads)
    report = step_time_claim.report(
        size,
        layers,
        solvers,
        block_size or [width // 2, width],
        update_every or [1, 10],
        root,
        peer or [],
        repeats,
        pick_device(device),
    )
    end(folder, report)


@app.command("quality")
def quality(
    size: Size = "tiny",
    steps: Steps = 100,
    seeds: Seeds = 3,
    solver: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable ({', '.join(quality_claim.SOLVERS)}).", show_default=False)
    ] = None,
    lr: Annotated[float, typer.Option(min=0, help="Peak learning rate, for all.")] = LEARNING_RATES["dash"],
    update_every: Annotated[int, typer.Option(min=1, help="Steps between two renewals of the roots.")] = 10,
    data: Data = None,
    config: Config = None,
    tokenizer: Tokenizer = "bytes",
    block_size: Block = 1024,
    root: Root = 4,
    damping: Damping = 1e-4,
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
) -> None:
    """Validation perplexity of each solver against the eigendecomposition, over seeds; goes on where it was cut."""
    solvers = [choose("solver", name, SOLVERS) for name in solver or quality_claim.SOLVERS]
    folder = begin("quality", out, threads)
    common = training(size, steps, text_of(data, config), tokenizer, block_size, device)
    common = dataclasses.replace(common, threads=torch.get_num_threads())
    options = {"block_size": block_size, "update_every": update_every, "root": root, "damping": damping}
    taking_part = quality_claim.contenders(solvers, lr, options)
    end(folder, quality_claim.report(quality_claim.trained(taking_part, seeds, common, folder), common))


@app.command("compression")
def compression(
    optimizers: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"As for compare, of one lr each; the first sets the loss ({' '.join(compression_runs.OPTIMIZERS)}).",
            show_default=False,
        ),
    ] = None,
    size: Size = "tiny",
    steps: Steps = 200,
    seeds: Seeds = 3,
    data: Data = None,
    config: Config = None,
    tokenizer: Tokenizer = "bytes",
    device: Device = None,
    threads: Threads = None,
    out: Out = None,
) -> None:
    """Outliers, and perplexity after rounding to few bits, at equal loss and steps; goes on where it was cut."""
    taking_part = compression_runs.contenders(optimizers or compression_runs.OPTIMIZERS)
    folder = begin("compression", out, threads)
    common = training(size, steps, text_of(data, config), tokenizer, None, device)
    records = compression_runs.trained(taking_part, seeds, common, folder, Console())
    end(folder, compression_claim.report(records, common))


def begin(name: str, out: Path | None, threads: int | None) -> Path:
    """The folder of a claim's report, made; sets the threads."""
    folder = out or Path("runs") / "claim" / name
    make_folder(folder)
    set_threads(threads, ALONE)
    return folder


def training(
    size: str, steps: int, data: str | None, tokenizer: str, block_size: int | None, device: str | None
) -> Settings:
    """Settings of a short training with Dash, a tenth of it warm-up; ``None`` leaves blocks to Dash."""
    settings = Settings(
        model=size,
        steps=steps,
        data=data,
        tokenizer=tokenizer,
        warmup=max(1, steps // 10),
        device=device,
        seed=1,
        options={} if block_size is None else {"block_size": block_size},
    )
    settings.check()
    return settings


def end(folder: Path, report: Report) -> None:
    """Writes a report and prints what it found."""
    console = Console()
    for table in report.tables:
        headings, cells = lines(table.rows)
        shown = RichTable(*headings, title=table.heading, title_justify="left")
        for each in cells:
            shown.add_row(*each)
        console.print(shown)
    for sentence in report.found:
        console.print(f"- {sentence}", soft_wrap=True, highlight=False)
    facts = {**machine(), "threads": str(torch.get_num_threads())}
    console.print(f"report  {write(folder, report, facts)}", soft_wrap=True)
