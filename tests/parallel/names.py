"""Jobs that take state from a model that is wrapped in one way to one that is wrapped in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dash_shampoo import Dash, param_groups
from tests.parallel import jobs

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": torch.compile,
    "ddp": DistributedDataParallel,
    "fsdp": fully_shard,
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def make(wrapper: str, names: str = "bare") -> tuple[nn.Module, Dash]:
    """A model and its optimizer, with the names that `param_groups` gives or with those of the wrapped model."""
    model = WRAPPERS[wrapper](jobs.make_model(torch.float64))
    groups = param_groups(model)
    if names == "wrapped":
        called = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in groups:
            group["params"] = [(called[id(parameter)], parameter) for _, parameter in group["params"]]
    return model, Dash(groups, **jobs.OPTIONS)


def advance(model: nn.Module, optimizer: Dash, first: int, stop: int) -> list[Tensor]:
    for step in range(first, stop):
        jobs.give(model, step)
        optimizer.step()
    return [jobs.whole(parameter) for parameter in model.parameters()]


def load(model: nn.Module, optimizer: Dash, saved: tuple[nn.Module, Dash], route: str) -> None:
    if route == "flat":
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(*saved, options=FLAT), options=FLAT)
    else:
        optimizer.load_state_dict(saved[1].state_dict())


def exchange(names: str, route: str) -> dict[str, list[Tensor]]:
    """The parameters after a step that follows three of another model's, for each pair of wrappers."""

    def pairs() -> Iterator[tuple[str, list[Tensor]]]:
        for saver in WRAPPERS:
            saved = make(saver, names)
            weights = advance(*saved, 0, 3)
            for loader in WRAPPERS:
                model, optimizer = make(loader)
                with torch.no_grad():
                    for parameter, weight in zip(model.parameters(), weights, strict=True):
                        jobs.local(parameter).copy_(weight)  # of a single process
                load(model, optimizer, saved, route)
                yield f"{saver} to {loader}", advance(model, optimizer, 3, 4)

    return dict(pairs())


def straight() -> list[Tensor]:
    """The parameters after as many steps of one model."""
    return advance(*make("plain"), 0, 4)
