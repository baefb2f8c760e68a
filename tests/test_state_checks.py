"""A state is taken as a whole or refused as a whole, by name; a load that fails leaves the optimizer as it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dash_shampoo import Dash
from dash_shampoo.layout import layout
from tests.test_checkpoint import through_a_file
from tests.test_contract import SHAPES, assert_same_state, run, snapshot
from tests.test_optimizer import give_gradients, parameters

OPTIONS: dict[str, Any] = {"lr": 0.01, "block_size": 4, "update_every": 2, "momentum": 0.9, "vectors": "shampoo"}


def trained(steps: int = 3, **options: Any) -> tuple[Dash, list[nn.Parameter]]:
    params = parameters(SHAPES, torch.float32)
    optimizer = Dash([(f"w{i}", p) for i, p in enumerate(params)], **{**OPTIONS, **options})
    run(optimizer, params, range(steps))
    return optimizer, params


def saved(**options: Any) -> dict[str, Any]:
    """A state dict that has no memory in common with its optimizer."""
    return copy.deepcopy(trained(**options)[0].state_dict())


def assert_refused(state: Any, message: str) -> None:
    """Makes sure that loading raises and changes nothing: the run goes on as its twin does."""
    optimizer, params = trained(5)
    twin, others = trained(5)
    groups = [dict(group) for group in optimizer.param_groups]
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_same_state(before, snapshot(optimizer))
    assert [dict(group) for group in optimizer.param_groups] == groups
    run(optimizer, params, range(5, 8))
    run(twin, others, range(5, 8))
    assert all(torch.equal(one, other) for one, other in zip(params, others, strict=True))


# --- what does not fit ------------------------------------------------------------------------------------------------

EVERY_KEY = ["age", *layout(parameters([SHAPES[0]])[0], trained(0)[0].param_groups[0])]
WRONG: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda value: None,
    "text": lambda value: "12",
    "on meta": lambda value: value.to("meta") if isinstance(value, Tensor) else torch.empty((), device="meta"),
    "another shape": lambda value: torch.zeros(5, 1, 3),
    "complex": lambda value: torch.as_tensor(value).to(torch.complex64),
    "sparse": lambda value: torch.zeros(3, 3).to_sparse(),
    "a flag": lambda value: True,
}


@given(key=st.sampled_from(EVERY_KEY), wrong=st.sampled_from(sorted(WRONG)))
def test_an_entry_of_another_kind_is_refused(key: str, wrong: str) -> None:
    state = saved()
    state["state"][0][key] = WRONG[wrong](state["state"][0][key])
    assert_refused(state, rf"the state of w0 does not fit: {key} ")


@given(key=st.sampled_from(EVERY_KEY))
def test_an_entry_that_is_missing_is_refused(key: str) -> None:
    state = saved()
    del state["state"][0][key]
    assert_refused(state, rf"the state of w0 lacks {key}[:,]")


def test_a_tile_that_is_missing_or_too_many_is_refused() -> None:
    state = saved()
    for key in [key for key in state["state"][0] if key.startswith("tile1.")]:
        state["state"][0][key.replace("tile1", "tile77")] = state["state"][0].pop(key)
    assert_refused(state, "tile77 is of other blocks")
    del state["state"][0]
    state["state"][2] = {key: value for key, value in state["state"][2].items() if not key.startswith("tile0")}
    assert_refused(state, "the state of w2 lacks tile0: .*full_state_dict")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.AdamW, "another optimizer.*exp_avg, exp_avg_sq"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "another optimizer.*momentum_buffer"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "another optimizer: its groups have no block_size"),
        (torch.optim.Adafactor, "another optimizer"),
    ],
    ids=["AdamW", "SGD with momentum", "SGD", "Adafactor"],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_the_state_of_another_optimizer_is_called_so(make: Any, message: str, steps: int) -> None:
    params = parameters(SHAPES, torch.float32)
    other = make(params)
    run(other, params, range(steps))
    assert_refused(other.state_dict(), message if steps else "another optimizer")


def test_the_state_of_another_optimizer_in_our_groups_is_called_so() -> None:
    state = saved()
    state["state"][1] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(6), "exp_avg_sq": torch.zeros(6)}
    assert_refused(state, "w1 is that of another optimizer: it keeps exp_avg, exp_avg_sq")


@pytest.mark.parametrize(("option", "value"), [("block_size", 0), ("solver", "newton"), ("momentum", "high")])
def test_a_state_with_invalid_options_is_refused(option: str, value: Any) -> None:
    state = saved()
    state["param_groups"][0][option] = value
    assert_refused(state, option)


def test_a_hook_that_raises_leaves_the_optimizer_as_it_was() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("the hook's own")

    optimizer, _ = trained(5)
    before = snapshot(optimizer)
    optimizer.register_load_state_dict_pre_hook(fail)
    with pytest.raises(ValueError, match="the hook's own"):
        optimizer.load_state_dict(saved())
    assert_same_state(before, snapshot(optimizer))


@pytest.mark.parametrize("fails_at", [1, 7, 20])  # of the tensors that have to be made
def test_a_load_that_runs_out_of_memory_leaves_the_optimizer_as_it_was(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, params = trained(0)
    twin, others = trained(0)
    for each, own in ((optimizer, params), (twin, others)):
        run(each, own[1:2], range(5))
    state, before, calls = saved(momentum=0.5), snapshot(optimizer), 0
    to = Tensor.to

    def scarce(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise torch.OutOfMemoryError("no memory left")
        return to(self, *arguments, **options)

    monkeypatch.setattr(Tensor, "to", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.load_state_dict(state)
    monkeypatch.undo()
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert_same_state(before, snapshot(optimizer))
    run(optimizer, params, range(5, 8))
    run(twin, others, range(5, 8))
    assert all(torch.equal(one, other) for one, other in zip(params, others, strict=True))


# --- what fits, in other forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [float, int, lambda value: torch.tensor([float(value)])], ids=["float", "int", "(1,)"])
def test_counts_may_be_plain_numbers(form: Any) -> None:
    optimizer, params = trained()
    state = copy.deepcopy(optimizer.state_dict())
    for own in state["state"].values():
        own.update({key: form(own[key]) for key in ("age", "step", "skipped")})
    twin, others = trained(0)
    twin.load_state_dict(state)
    for parameter, other in zip(params, others, strict=True):
        other.data.copy_(parameter)
    assert_same_state(snapshot(optimizer), snapshot(twin))
    run(optimizer, params, range(3, 6))
    run(twin, others, range(3, 6))
    assert all(torch.equal(one, other) for one, other in zip(params, others, strict=True))


def test_options_of_the_file_win_over_those_of_the_optimizer() -> None:
    state = saved(momentum=0.9)
    optimizer, _ = trained(0, momentum=0.0)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert torch.equal(optimizer.state_dict()["state"][0]["tile0.velocity"], state["state"][0]["tile0.velocity"])


def test_entries_that_a_user_has_added_are_kept() -> None:
    state = saved()
    state["state"][0]["ema"] = torch.ones(3)
    optimizer, _ = trained(0)
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state_dict()["state"][0]["ema"], torch.ones(3))


def test_groups_have_the_same_keys_after_any_load_and_copy() -> None:
    optimizer, _ = trained()
    keys = optimizer.param_groups[0].keys()
    old = copy.deepcopy(optimizer.state_dict())
    old["param_groups"][0]["differentiable"] = False  # as files of before have it
    optimizer.load_state_dict(old)
    assert optimizer.param_groups[0].keys() == keys
    optimizer.load_state_dict(optimizer.state_dict())
    (group,) = copy.deepcopy(optimizer).param_groups
    assert group.keys() == keys
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.zeros(2)))]})
    assert optimizer.param_groups[1].keys() == keys


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("extra", ["file", "optimizer", "neither"])
def test_a_checkpoint_can_be_rolled_back_to(extra: str, flatten: bool, tmp_path: Path) -> None:
    """With files from before and after a load, and with those that have torch's own option in their groups."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = nn.Linear(7, 9)
    optimizer = Dash(model.parameters(), lr=0.01, block_size=4)
    run(optimizer, list(model.parameters()), range(2))
    if extra == "file":
        optimizer.param_groups[0]["differentiable"] = False
    dcp.save({"o": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=tmp_path)
    optimizer.param_groups[0].pop("differentiable", None)
    weights, state = copy.deepcopy(model.state_dict()), snapshot(optimizer)
    run(optimizer, list(model.parameters()), range(2, 5))
    if extra == "optimizer":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again = {"o": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(again, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, optimizer, again["o"], options=options)
    model.load_state_dict(weights)
    assert_same_state(state, snapshot(optimizer))


@pytest.mark.parametrize("prime", [True, False])
def test_flattened_state_with_a_parameter_that_never_had_a_gradient_loads(prime: bool) -> None:
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    models = [nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5)) for _ in range(2)]
    optimizers = [Dash(model.named_parameters(), block_size=4) for model in models]
    run(optimizers[0], list(models[0][0].parameters()), range(2))
    if prime:
        run(optimizers[1], list(models[1][0].parameters()), range(1))
    state = through_a_file(get_optimizer_state_dict(models[0], optimizers[0], options=flat))
    set_optimizer_state_dict(models[1], optimizers[1], state, options=flat)
    models[1].load_state_dict(models[0].state_dict())
    for model, optimizer in zip(models, optimizers, strict=True):
        run(optimizer, list(model.parameters()), range(2, 5))
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_groups_are_plain_enough_for_json() -> None:
    state = saved()
    assert json.loads(json.dumps(state["param_groups"]))[0]["block_size"] == 4


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_in_force_does_not_matter(device: str) -> None:
    optimizer, params = trained(0)
    twin, others = trained(0)
    run(twin, others, range(4))
    with torch.device(device):
        for step in range(4):
            with torch.device("cpu"):
                give_gradients(params, step)
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(torch.equal(one, other) for one, other in zip(params, others, strict=True))
