"""Factored statistics stand for the squares where that is exact, and lend nearly the same norm where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dash_shampoo import Dash
from dash_shampoo.grafting import METHODS
from tests.test_optimizer import give_gradients, parameters


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_factored_squares_are_exact_for_rank_one_gradients(name: str) -> None:
    full, factored = METHODS[name], METHODS[f"factored-{name}"]
    assert full is not None
    assert factored is not None
    rows, columns = torch.randn(3, 5, 1), torch.randn(3, 1, 4)
    gradient, live = rows * columns, torch.ones(3, 1, 1)
    own, other = torch.zeros(3, *full.shape(5, 4)), torch.zeros(3, *factored.shape(5, 4))
    for scale in (1.0, 0.5, 3.0):
        full.accumulate(own, scale * gradient, live, 0.9)
        factored.accumulate(other, scale * gradient, live, 0.9)
    steps = [method.step(gradient, state, 0.271, 1e-8) for method, state in ((full, own), (factored, other))]
    torch.testing.assert_close(steps[0], steps[1])


def test_factored_squares_of_a_zero_gradient_are_zero() -> None:
    method = METHODS["factored-adam"]
    assert method is not None
    statistic = torch.zeros(2, 9)
    method.accumulate(statistic, torch.zeros(2, 5, 4), torch.ones(2, 1, 1), 0.9)
    assert torch.equal(method.step(torch.zeros(2, 5, 4), statistic, 0.1, 1e-8), torch.zeros(2, 5, 4))


def test_small_state_moves_parameters_nearly_alike() -> None:
    steps = {}
    for state_dtype in ("fp32", "bf16"):
        params = parameters([(40, 24), (17,)], torch.float32)
        optimizer = Dash(params, lr=0.01, block_size=16, state_dtype=state_dtype)
        before = [parameter.detach().clone() for parameter in params]
        for step in range(10):
            give_gradients(params, step)
            optimizer.step()
        steps[state_dtype] = [new.detach() - old for new, old in zip(params, before, strict=True)]
        kept = optimizer.state[params[0]]["tile0.moment"].dtype
        assert kept == (torch.bfloat16 if state_dtype == "bf16" else torch.float32)
    for one, other in zip(steps["fp32"], steps["bf16"], strict=True):
        assert (one - other).norm() < 0.05 * one.norm()


@pytest.mark.parametrize("algorithm", ["adamw", "shampoo"])
@pytest.mark.parametrize("grafting", ["adam", "rmsprop", "adagrad"])
@pytest.mark.parametrize("options", [{}, {"state_dtype": "bf16"}, {"start_step": 100}, {"betas": (0.9, 0.0)}])
def test_without_graft_eps_an_entry_that_has_had_no_gradient_stays(
    algorithm: str, grafting: str, options: dict[str, Any]
) -> None:
    params = parameters([(9, 7), (5,), (1, 3)], torch.float32)
    group = {"params": params[1:], "graft_eps": 1e-8}
    optimizer = Dash(
        [{"params": params[:1]}, group], lr=0.1, graft_eps=0.0, algorithm=algorithm, grafting=grafting, **options
    )
    before = [parameter.detach().clone() for parameter in params]
    for step in range(3):
        give_gradients(params, step)
        for parameter in params:
            parameter.grad[0] = 0
            parameter.grad *= 1 if step < 2 else 0
        optimizer.step()
    for new, old in zip(params, before, strict=True):
        assert torch.isfinite(new).all()
        assert torch.equal(new[0], old[0])
        assert len(new) == 1 or not torch.equal(new[1:], old[1:])


def test_float64_parameters_keep_float64_state() -> None:
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    optimizer = Dash([weight], state_dtype="bf16")
    give_gradients([weight], 0)
    optimizer.step()
    assert optimizer.state[weight]["tile0.moment"].dtype == torch.float64
