"""Jobs that save and resume."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

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

from dash_shampoo import Dash, param_groups, renewals
from dash_shampoo.parallel.world import World
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


@mock.patch.object(renewals, "LEAST", 0.0)
def train(strategy: str, first: int, stop: int, route: str, folder: str | None, out: str | None) -> list[Tensor]:
    """Trains from step ``first`` to ``stop``, resuming from ``folder`` and saving to ``out`` by a ``route``.

    Roots are renewed in turns, as those of large models are.
    """
    model, optimizer = make(strategy)
    if folder is not None:
        {"dcp": load_dcp, "whole": load_whole, "full": load_full}[route](model, optimizer, folder)
    advance(model, optimizer, first, stop)
    if out is not None:
        {"dcp": save_dcp, "whole": save_whole, "full": save_full}[route](model, optimizer, out)
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


def save_full(model: nn.Module, optimizer: Dash, folder: str) -> None:
    """As Accelerate and Lightning save a full state dict."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        state = get_optimizer_state_dict(model, optimizer, options=options)
    weights = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        Path(folder).mkdir()
        torch.save({"model": weights, "optimizer": state}, Path(folder) / "whole.pt")


def load_full(model: nn.Module, optimizer: Dash, folder: str) -> None:
    first = dist.get_rank() == 0
    state = torch.load(Path(folder) / "whole.pt") if first else {"model": {}, "optimizer": {}}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def full_everywhere(strategy: str) -> dict[str, Any]:
    """What torch's function and `full_state_dict` give each process as the full state, and what comes of loading it."""
    model, optimizer = make(strategy)
    advance(model, optimizer, 0, 3)
    options = StateDictOptions(full_state_dict=True)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    own = optimizer.full_state_dict(to=None)
    other, loaded = make(strategy)
    set_model_state_dict(other, get_model_state_dict(model, options=options), options=options)
    set_optimizer_state_dict(other, loaded, full, options=options)
    assert own is not None
    for each in ((model, optimizer), (other, loaded)):
        advance(*each, 3, 5)
    return {
        "full": list(full["state"].values()),
        "own": list(own["state"].values()),
        "straight": [jobs.whole(parameter) for parameter in model.parameters()],
        "resumed": [jobs.whole(parameter) for parameter in other.parameters()],
    }


def bytes_sent() -> tuple[int, int]:
    """Bytes that this process pickles for the whole state, and bytes of its part."""
    model, optimizer = make("replicated")
    advance(model, optimizer, 0, 3)
    part = sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    )
    with mock.patch.object(World, "collect", autospec=True, side_effect=World.collect) as collect:
        optimizer.full_state_dict()
    return sum(len(pickle.dumps(call.args[1])) for call in collect.call_args_list), part


def part_as_full(strategy: str, everywhere: bool) -> str:
    """What Dash says of one process's part, loaded as if it were the full state."""
    model, optimizer = make(strategy)
    advance(model, optimizer, 0, 2)
    state = [copy.deepcopy(get_optimizer_state_dict(model, optimizer))]
    dist.broadcast_object_list(state)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not everywhere)
    model, optimizer = make(strategy)
    try:
        set_optimizer_state_dict(model, optimizer, state[0], options=options)
    except ValueError as error:
        return str(error)
    return "taken"


def warned_of_parts(strategy: str) -> dict[str, list[str]]:
    """What Dash warns of when its state is taken in several ways."""
    model, optimizer = make(strategy)
    ways: dict[str, Callable[[], Any]] = {
        "before": optimizer.state_dict,
        "step": lambda: advance(model, optimizer, 0, 2),
        "own": optimizer.state_dict,
        "parts": lambda: get_optimizer_state_dict(model, optimizer, options=FLAT),
        "parts on the CPU": lambda: get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(cpu_offload=True)
        ),
        "copy": lambda: copy.deepcopy(optimizer),
        "whole": optimizer.full_state_dict,
    }
    said = {}
    for way, take in ways.items():
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            take()
        said[way] = [str(each.message) for each in warned if "part of one process" in str(each.message)]
    return said


def consolidated(strategy: str) -> list[str]:
    """What a process's state dict is: consolidated for the first, after a step, for all, and after a load."""
    model, optimizer = make(strategy)
    advance(model, optimizer, 0, 2)
    found = []

    def look() -> None:
        whole = optimizer.full_state_dict(to=None)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            own = optimizer.state_dict()
        is_whole = whole is not None and _tensors(own).keys() == _tensors(whole).keys()
        if is_whole:
            assert all(torch.equal(value.cpu(), _tensors(whole)[key]) for key, value in _tensors(own).items())
        found.append(("whole" if is_whole else "part") + ", with a warning" * bool(warned))

    optimizer.consolidate_state_dict()
    look()
    advance(model, optimizer, 2, 3)
    look()
    optimizer.consolidate_state_dict(to=None)
    look()
    optimizer.load_state_dict(optimizer.state_dict())
    look()
    return found


def _tensors(state_dict: dict[str, Any]) -> dict[tuple[Any, str], Tensor]:
    return {
        (i, key): value
        for i, state in state_dict["state"].items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


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


def moved(strategy: str, move: bool) -> list[Tensor]:
    """Trains, and in some steps moves entries of the state, different ones on each process."""
    model, optimizer = make(strategy)
    for step in range(8):
        if move and step % 3 == dist.get_rank():
            for own in optimizer.state.values():
                own |= {key: value.clone() for key, value in own.items() if isinstance(value, Tensor)}
        if move and step == 5:
            for own in optimizer.state.values():
                for value in own.values():
                    if isinstance(value, Tensor):
                        value.data = value.data.clone()
        advance(model, optimizer, step, step + 1)
    return [jobs.whole(parameter) for parameter in model.parameters()]
