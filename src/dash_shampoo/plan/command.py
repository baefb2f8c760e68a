"""The sub-command `dash-shampoo plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from rich.console import Console

from dash_shampoo.plan.budget import Choice, choices, plan_model
from dash_shampoo.plan.devices import DEVICES
from dash_shampoo.plan.model import meta_model, options
from dash_shampoo.plan.paper import show_paper
from dash_shampoo.plan.plan import Plan
from dash_shampoo.plan.ranks import STRATEGIES, ranks
from dash_shampoo.plan.report import show, show_choices
from dash_shampoo.plan.seconds import Rates
from dash_shampoo.train.command import (
    MODEL,
    Heads,
    Hidden,
    KvHeads,
    Layers,
    Number,
    Text,
    Tied,
    Whole,
    Width,
    option,
)
from dash_shampoo.train.errors import InputError, choose
from dash_shampoo.train.llama import config_for
from dash_shampoo.train.loop import sizes
from dash_shampoo.train.settings import parse_option

MACHINES, OPTIMIZATION, OUTPUT = "Machines", "Options of Dash", "Output"
SIZES = ("layers", "width", "heads", "kv_heads", "hidden", "vocabulary", "tied")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DASH = ("solver", "block_size", "update_every", "damping", "root", "grafting", "momentum", "state_dtype", "wire_dtype")


def command(
    model: Annotated[str, option(MODEL, f"Size: {sizes()} (llama-7b).")] = "llama-7b",
    layers: Layers = None,
    width: Width = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    hidden: Hidden = None,
    vocabulary: Annotated[Whole, option(MODEL, "Length of the embedding.")] = None,
    tied: Tied = None,
    dtype: Annotated[str, option(MODEL, f"Of the parameters: {', '.join(DTYPES)} (fp32).")] = "fp32",
    world_size: Annotated[int, option(MACHINES, "Number of processes, one per device (1).")] = 1,
    strategy: Annotated[Text, option(MACHINES, f"{', '.join(STRATEGIES)} (alone for one process, else fsdp).")] = None,
    replicas: Annotated[Whole, option(MACHINES, "hsdp: copies of the parameters.")] = None,
    gpu: Annotated[str, option(MACHINES, f"Device: {', '.join(DEVICES)} (h100).")] = "h100",
    efficiency: Annotated[float, option(MACHINES, "Share of the device's peak rates that is reached (0.5).")] = 0.5,
    memory_budget: Annotated[Number, option(MACHINES, "GB (10^9 bytes) per device for state and workspace.")] = None,
    solver: Annotated[Text, option(OPTIMIZATION, "Solver of the inverse roots.")] = None,
    block_size: Annotated[Whole, option(OPTIMIZATION, "Largest side of a block.")] = None,
    update_every: Annotated[Whole, option(OPTIMIZATION, "Steps between two renewals of the roots.")] = None,
    damping: Annotated[Number, option(OPTIMIZATION, "Damping, relative to a factor's norm.")] = None,
    root: Annotated[Whole, option(OPTIMIZATION, "p of the inverse p-th root.")] = None,
    grafting: Annotated[Text, option(OPTIMIZATION, "Method whose norm an update has.")] = None,
    momentum: Annotated[Number, option(OPTIMIZATION, "Momentum of the update.")] = None,
    state_dtype: Annotated[Text, option(OPTIMIZATION, "fp32 or bf16.")] = None,
    wire_dtype: Annotated[Text, option(OPTIMIZATION, "fp32 or bf16, for updates between processes.")] = None,
    set_: Annotated[
        list[str] | None, option(OPTIMIZATION, "Any other option of Dash, as key=value; repeatable.", "--set")
    ] = None,
    json_: Annotated[Path | None, option(OUTPUT, "File for all numbers, those of every rank too.", "--json")] = None,
) -> None:
    """What Dash takes of memory, time and network for a model on given machines; nothing is allocated."""
    given = dict(locals())
    config = config_for(model, **{name: given[name] for name in SIZES})
    own = {name: given[name] for name in DASH if given[name] is not None}
    own.update(parse_option(text) for text in set_ or [])
    chosen = strategy or ("alone" if world_size == 1 else "fsdp")
    some = ranks(chosen, world_size, replicas)
    rates = Rates(DEVICES[choose("gpu", gpu, DEVICES)], efficiency)
    check(efficiency, memory_budget, json_)
    device = torch.device("cpu" if gpu == "cpu" else "cuda")
    meta = meta_model(config, DTYPES[choose("dtype", dtype, DTYPES)])
    plan = plan_model(meta, own, some, rates, device)
    console = Console()
    title = Title(model, sum(each.numel() for each in meta.parameters()), dtype, chosen, world_size, some.copies, gpu)
    show(plan, str(title), efficiency, console)
    show_paper(model, world_size, gpu, console)
    found = []
    if memory_budget is not None:
        found = list(choices(meta, own, some, rates, device))
        show_choices(found, memory_budget * 1e9, console)
    if json_ is not None:
        used = {"rates": rates.device._asdict(), "efficiency": efficiency, "options": plain_options(own)}
        write(json_, {**title._asdict(), **used}, plan, found, memory_budget)


class Title(NamedTuple):
    """What a plan is of."""

    model: str
    parameters: int
    dtype: str
    strategy: str
    world_size: int
    copies: int
    gpu: str

    def __str__(self) -> str:
        copies = f" with {self.copies} replicas" if self.strategy == "hsdp" else ""
        machines = f"{self.strategy} on {self.world_size} x {self.gpu}{copies}"
        return f"{self.model}, {self.parameters:,} parameters, {machines}"


def check(efficiency: float, memory_budget: float | None, file: Path | None) -> None:
    """Raises InputError for numbers that make no plan, and for a file that could not be written."""
    if not 0 < efficiency <= 1:
        raise InputError(f"--efficiency must be above 0 and at most 1, not {efficiency:g}")
    if memory_budget is not None and not memory_budget > 0:
        raise InputError(f"--memory-budget must be above 0, not {memory_budget:g}")
    if file is not None and (file.is_dir() or not file.resolve().parent.is_dir()):
        raise InputError(f"cannot write {file}: it needs to be a file in a folder that is there")


def plain_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of Dash, as JSON can hold them."""
    chosen = options(given)
    return {**chosen.defaults, "wire_dtype": given.get("wire_dtype", "fp32")}


def write(file: Path, heading: Mapping[str, Any], plan: Plan, found: list[Choice], budget: float | None) -> None:
    """Writes a plan as JSON.

    Raises:
        InputError: the file cannot be written.
    """
    content: dict[str, Any] = {**heading, "balance": plan.balance, "seconds": plan.seconds, "amounts": plan.as_json()}
    if budget is not None:
        content["budget"] = {
            "bytes": budget * 1e9,
            "choices": [{**choice._asdict(), "fits": choice.memory <= budget * 1e9} for choice in found],
        }
    try:
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {file}: {error.strerror}") from error
