"""Jobs that save and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dash_shampoo import Dash, param_groups
from tests.parallel import jobs

OPTIONS: dict[str, Any] = {**jobs.OPTIONS, "momentum": 0.9}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def make(strategy: str) -> tuple[nn.Module, Dash]:
    model = jobs.prepare(jobs.make_model(torch.float64), strategy)
    return model, Dash(param_groups(model), **OPTIONS)


def advance(model: nn.Module, optimizer: Dash, first: int, stop: int) -> None:
    for step in range(first, stop):
        jobs.give(model, step, jobs.never_first_two)
        optimizer.step()


def train(strategy: str, first: int, stop: int, route: str, folder: str | None, out: str | None) -> list[Tensor]:
    """Trains from step ``first`` to ``stop``, resuming from ``folder`` and saving to ``out`` by a ``route``."""
    model, optimizer = make(strategy)
    if folder is not None:
        (load_dcp if route == "dcp" else load_whole)(model, optimizer, folder)
    advance(model, optimizer, first, stop)
    if out is not None:
        (save_dcp if route == "dcp" else save_whole)(model, optimizer, out)
    return [jobs.whole(parameter) for parameter in model.parameters()]


def save_dcp(model: nn.Module, optimizer: Dash, folder: str) -> None:
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }
    dcp.save(state, checkpoint_id=folder)


def load_dcp(model: nn.Module, optimizer: Dash, folder: str) -> None:
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)


def save_whole(model: nn.Module, optimizer: Dash, folder: str) -> None:
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    state = optimizer.full_state_dict()
    assert (state is None) == (dist.get_rank() != 0)
    if state is not None:
        Path(folder).mkdir()
        torch.save({"model": weights, "optimizer": state}, Path(folder) / "whole.pt")


def load_whole(model: nn.Module, optimizer: Dash, folder: str) -> None:
    state = torch.load(Path(folder) / "whole.pt")
    set_model_state_dict(model, state["model"], options=StateDictOptions(full_state_dict=True))
    optimizer.load_state_dict(state["optimizer"])
    owned = sum("moment" in key for own in optimizer.state.values() for key in own)
    everything = sum("moment" in key for own in state["optimizer"]["state"].values() for key in own)
    assert owned < everything or dist.get_world_size() == 1


def part_of_another(folder: str) -> str:
    """What Dash says of the state of another process."""
    model, optimizer = make("replicated")
    advance(model, optimizer, 0, 2)
    torch.save(optimizer.state_dict(), f"{folder}/{dist.get_rank()}.pt")
    optimizer.load_state_dict(torch.load(f"{folder}/{dist.get_rank()}.pt"))  # its own it takes
    advance(model, optimizer, 2, 3)
    dist.barrier()
    try:
        optimizer.load_state_dict(torch.load(f"{folder}/0.pt"))
    except ValueError as error:
        return str(error)
    return "taken"


def growing(strategy: str) -> list[Tensor]:
    """A group is added, options change and a state is loaded in the middle of training."""
    model = jobs.prepare(jobs.make_model(torch.float64), strategy)
    first, *rest = model.named_parameters()
    optimizer = Dash([first], **OPTIONS)
    advance(model, optimizer, 0, 2)
    optimizer.add_param_group({"params": rest, "lr": 0.02})
    advance(model, optimizer, 2, 4)
    optimizer.param_groups[1]["damping"] = 1e-2
    advance(model, optimizer, 4, 6)
    optimizer.load_state_dict(optimizer.state_dict())
    advance(model, optimizer, 6, 8)
    optimizer.state.pop(first[1])  # it starts anew
    advance(model, optimizer, 8, 10)
    return [jobs.whole(parameter) for parameter in model.parameters()]
