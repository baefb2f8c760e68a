"""Resume is bit-equal, whatever the dtype, the step, the order or the route."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dash_shampoo import Dash
from dash_shampoo.roots import NewtonDB
from tests.test_contract import SHAPES, assert_same_state, run, snapshot
from tests.test_optimizer import parameters


def through_a_file(value: Any) -> Any:
    """Saves and loads as users do: by default `torch.load` takes tensors and plain values only."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location="cpu")


def fresh(params: list[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
    twins = parameters([tuple(parameter.shape) for parameter in params], dtype)
    for twin, parameter in zip(twins, params, strict=True):
        twin.data.copy_(parameter.data)
    return twins


def assert_resume_is_bit_equal(dtype: torch.dtype, before: int, after: int, **options: Any) -> None:
    params = parameters(SHAPES, dtype)
    optimizer = Dash(params, lr=0.01, block_size=4, **options)
    run(optimizer, params, range(before))
    twins = fresh(params, dtype)
    resumed = Dash(twins, lr=0.5, block_size=4, **options)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    run(optimizer, params, range(before, before + after))
    run(resumed, twins, range(before, before + after))
    assert all(torch.equal(one, other) for one, other in zip(params, twins, strict=True))
    assert_same_state(snapshot(optimizer), snapshot(resumed))


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16]),
    before=st.integers(0, 5),
    after=st.integers(1, 4),
    grafting=st.sampled_from(["adam", "adagrad", "rmsprop", "sgd", "none"]),
    vectors=st.sampled_from(["adamw", "shampoo"]),
    update_every=st.integers(1, 4),
    momentum=st.sampled_from([0.0, 0.9]),
    state_dtype=st.sampled_from(["fp32", "bf16"]),
)
def test_resume_at_any_step_is_bit_equal(dtype: torch.dtype, before: int, after: int, **options: Any) -> None:
    assert_resume_is_bit_equal(dtype, before, after, **options)


@pytest.mark.parametrize("solver", ["minimax", "newton-db", "coupled-newton", "chebyshev", "eigh", "newton-db-paper"])
def test_resume_is_bit_equal_for_every_solver(solver: str) -> None:
    damping = {"newton-db-paper": 0.0}.get(solver, 1e-3)
    assert_resume_is_bit_equal(torch.bfloat16, 4, 4, solver=solver, update_every=3, damping=damping, epsilon=1e-10)


def test_a_solver_given_as_an_object_is_saved_as_plain_values() -> None:
    assert_resume_is_bit_equal(torch.float32, 2, 2, solver=NewtonDB(steps=12))


def test_loading_into_an_optimizer_that_has_stepped_replaces_its_state() -> None:
    params, twins = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    optimizer, other = Dash(params, block_size=4), Dash(twins, block_size=4)
    run(optimizer, params, range(3))
    run(other, twins, range(5, 7))
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    for twin, parameter in zip(twins, params, strict=True):
        twin.data.copy_(parameter.data)
    run(optimizer, params, range(3, 5))
    run(other, twins, range(3, 5))
    assert all(torch.equal(one, other) for one, other in zip(params, twins, strict=True))


def test_a_loaded_state_is_a_copy() -> None:
    params, twins = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    optimizer, other = Dash(params, block_size=4), Dash(twins, block_size=4)
    run(optimizer, params, range(2))
    other.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(snapshot(optimizer))
    run(other, twins, range(2, 4))
    assert_same_state(before, snapshot(optimizer))


def test_named_parameters_find_their_state_in_any_order() -> None:
    params = parameters([(9, 7), (7, 9), (9, 7)], torch.float32)
    optimizer = Dash([(f"w{i}", p) for i, p in enumerate(params)], lr=0.1, block_size=4)
    run(optimizer, params, range(3))
    twins = fresh(params, torch.float32)
    resumed = Dash([(f"w{i}", twins[i]) for i in (2, 0, 1)], lr=0.1, block_size=4)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for step in range(3, 6):
        run(optimizer, params, range(step, step + 1))
        for twin, parameter in zip(twins, params, strict=True):
            twin.grad = parameter.grad.clone()
        resumed.step()
    assert all(torch.equal(one, other) for one, other in zip(params, twins, strict=True))


def test_state_of_other_names_is_refused() -> None:
    params = parameters([(4, 4)], torch.float32)
    optimizer = Dash([("weight", params[0])], block_size=4)
    other = Dash([("gewicht", parameters([(4, 4)], torch.float32)[0])], block_size=4)
    with pytest.raises(ValueError, match="gewicht, weight"):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("names", [True, False])
def test_state_of_another_block_size_is_refused_with_both_shapes(names: bool) -> None:
    def make(block_size: int) -> tuple[Dash, list[nn.Parameter]]:
        params = parameters([(8, 8)], torch.float32)
        named = [("layer.weight", params[0])] if names else params
        return Dash(named, block_size=block_size), params

    optimizer, params = make(4)
    run(optimizer, params, range(1))
    other, _ = make(8)
    name = r"layer\.weight" if names else "parameter 0 of group 0"
    with pytest.raises(ValueError, match=rf"{name}.*\(1, 4, 4\).*\(1, 8, 8\)"):
        other.load_state_dict(optimizer.state_dict())


def test_state_of_another_model_is_refused() -> None:
    params, others = parameters([(8, 8)], torch.float32), parameters([(8, 6)], torch.float32)
    optimizer = Dash(params, block_size=8)
    run(optimizer, params, range(1))
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*\(1, 8, 8\).*\(1, 8, 6\)"):
        Dash(others, block_size=8).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"different number of parameter groups|size of optimizer's group"):
        Dash(params + others, block_size=8).load_state_dict(optimizer.state_dict())


def test_load_hooks_see_the_plain_state() -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = Dash(params, block_size=4)
    run(optimizer, params, range(2))
    seen: list[Any] = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["state"][0]["step"].item()))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[params[0]]["step"].item()))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [2.0, 2.0]


@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_checkpoint_state_dicts_round_trip(flatten: bool, tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    models = [nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [Dash(model.parameters(), lr=0.01, block_size=4, update_every=2) for model in models]
    run(optimizers[0], list(models[0].parameters()), range(3))
    models[1].load_state_dict(models[0].state_dict())
    state = through_a_file(get_optimizer_state_dict(models[0], optimizers[0], options=options))
    set_optimizer_state_dict(models[1], optimizers[1], state, options=options)
    for model, optimizer in zip(models, optimizers, strict=True):
        run(optimizer, list(model.parameters()), range(3, 6))
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
