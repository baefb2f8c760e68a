"""Gradients of zeros do not count before the first other one, and a factor waits for no turn once it is not zero."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from dash_shampoo import Dash, param_groups
from tests.roots.matrices import exact_root
from tests.test_contract import assert_same_state, snapshot
from tests.test_optimizer import give_gradients, parameters

SHAPES = [(9, 7), (6,), (3, 5, 4), (4, 3, 2, 2), (1, 8), (12, 2), ()]


def give_zeros(params: list[nn.Parameter]) -> None:
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)


@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    zeros=st.integers(1, 3),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    options=st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([3, 16]),
            "update_every": st.sampled_from([1, 2, 100]),
            "start_step": st.sampled_from([1, 2]),
            "grafting": st.sampled_from(["adam", "rmsprop", "adagrad", "sgd", "none"]),
            "vectors": st.sampled_from(["adamw", "shampoo"]),
            "state_dtype": st.sampled_from(["fp32", "bf16"]),
            "momentum": st.sampled_from([0.0, 0.9]),
            "graft_eps": st.sampled_from([1e-8, 0.0]),
            "epsilon": st.sampled_from([0.0, 1e-10]),
            "bias_correction": st.booleans(),
            "maximize": st.booleans(),
        }
    ).filter(lambda options: options["start_step"] == 1 or options["grafting"] != "none"),
)
def test_gradients_of_zeros_leave_a_run_as_it_would_have_been(
    shapes: list[tuple[int, ...]], zeros: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    params, twins = parameters(shapes, dtype), parameters(shapes, dtype)
    optimizer, other = Dash(params, lr=0.05, **options), Dash(twins, lr=0.05, **options)
    for _ in range(zeros):
        give_zeros(params)
        optimizer.step()
    for step in range(4):
        give_gradients(params, step)
        give_gradients(twins, step)
        optimizer.step()
        other.step()
    assert all(torch.equal(parameter, twin) for parameter, twin in zip(params, twins, strict=True))
    assert_same_state(snapshot(optimizer), snapshot(other))


@pytest.mark.parametrize("update_every", [1, 100])
def test_a_state_dict_asked_for_before_the_first_step_leaves_a_run_as_it_would_have_been(update_every: int) -> None:
    """torch.distributed.checkpoint makes the state by a step with gradients of zeros and without a learning rate."""
    ends = []
    for asks in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 9), nn.LayerNorm(9), nn.Linear(9, 4))
        optimizer = Dash(param_groups(model), lr=0.05, weight_decay=0.1, update_every=update_every)
        if asks:
            get_optimizer_state_dict(model, optimizer)
        for step in range(5):
            optimizer.zero_grad()
            inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            optimizer.step()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*ends, strict=True))


def test_gradients_of_zeros_let_weights_decay() -> None:
    (parameter,) = parameters([(4, 4)])
    before = parameter.detach().clone()
    optimizer = Dash([parameter], lr=0.1, weight_decay=0.5)
    give_zeros([parameter])
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), before * 0.95)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_first_gradient_that_is_not_finite_does_not_count(bad: float) -> None:
    params, twins = parameters(SHAPES[:4]), parameters(SHAPES[:4])
    optimizer, other = Dash(params, update_every=100), Dash(twins, update_every=100)
    give_gradients(params, 0)
    for parameter in params:
        parameter.grad.fill_(bad)
    with pytest.warns(RuntimeWarning, match="not finite"):
        optimizer.step()
    for step in range(3):
        give_gradients(params, step)
        give_gradients(twins, step)
        optimizer.step()
        other.step()
    assert all(torch.equal(parameter, twin) for parameter, twin in zip(params, twins, strict=True))


def roots_of(optimizer: Dash, parameter: Tensor, side: str) -> tuple[Tensor, Tensor]:
    """The factors of the blocks of a parameter, all of one shape, and their inverse roots: each (n, b, b)."""
    state = optimizer.state[parameter]
    arrays = torch.cat([entry for key, entry in state.items() if key.endswith(f".{side}")])  # (n, b + 1, b)
    lower, upper = arrays[:, 1:].tril(), arrays[:, :-1].triu()
    return lower + lower.tril(-1).mT, upper + upper.triu(1).mT


@pytest.mark.parametrize("start_step", [1, 3])
def test_an_expert_is_preconditioned_from_its_first_gradient_on(start_step: int) -> None:
    """Roots serve a hundred steps here, and each expert gets its first gradient at a step of its own."""
    experts = parameters([(4, 6, 5)])
    optimizer = Dash(experts, lr=0.1, update_every=100, start_step=start_step, damping=1e-3, solver="eigh")
    first = [0, 2, 2, 5]
    made: dict[tuple[int, str], Tensor] = {}
    for step in range(8):
        give_gradients(experts, step)
        for expert, begin in enumerate(first):
            experts[0].grad[expert] *= step >= begin
        optimizer.step()
        for side in ("left", "right"):
            factors, roots = roots_of(optimizer, experts[0], side)
            for expert, begin in enumerate(first):
                renewal = max(begin, start_step - 1)
                if step < renewal:
                    torch.testing.assert_close(roots[expert], torch.eye(len(roots[expert])).double())
                elif step == renewal:
                    torch.testing.assert_close(roots[expert], exact_root(factors[[expert]], 2, 1e-3)[0])
                    made[expert, side] = roots[expert].clone()
                else:
                    assert torch.equal(roots[expert], made[expert, side])


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_a_run_resumed_while_experts_wait_goes_on_to_the_bit(state_dtype: str) -> None:
    ends = []
    for resumed in (False, True):
        experts = parameters([(3, 6, 5)], torch.float32)
        options: dict[str, Any] = {"lr": 0.1, "update_every": 4, "epsilon": 1e-10, "state_dtype": state_dtype}
        optimizer = Dash(experts, **options)
        for step in range(7):
            give_gradients(experts, step)
            experts[0].grad[1] *= step >= 2
            experts[0].grad[2] *= step >= 5
            optimizer.step()
            if resumed:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = Dash(experts, **options)
                optimizer.load_state_dict(saved)
        ends.append(experts[0].detach())
    assert torch.equal(*ends)


@pytest.mark.parametrize("scale", [1e-19, 1e-25])
def test_factors_that_fade_away_are_zero_and_fail_nothing(scale: float) -> None:
    params = parameters([(8, 6), (3, 6, 5)], torch.float32)
    optimizer = Dash(params, lr=0.1, betas=(0.9, 0.7), update_every=5)
    for step in range(400):
        give_gradients(params, step, scale if step else 1.0)
        if step > 350:
            give_zeros(params)
        optimizer.step()
    numbers = optimizer.diagnostics()
    assert numbers["roots_failed"] == numbers["roots_rescued"] == 0
    _, roots = roots_of(optimizer, params[0], "left")
    torch.testing.assert_close(roots, torch.eye(roots.shape[1]).expand_as(roots))
    give_gradients(params, 1000)
    optimizer.step()  # the 401st, at which no roots are due
    factors, roots = roots_of(optimizer, params[0], "left")
    torch.testing.assert_close(roots, exact_root(factors.double(), 2, 1e-4).float(), rtol=2e-2, atol=1e-2)
