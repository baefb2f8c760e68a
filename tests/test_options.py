"""Options mean what they say, or are refused before anything moves; they stay plain numbers, which any loader takes."""

from __future__ import annotations

import io
from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dash_shampoo import Dash
from tests.test_optimizer import give_gradients, parameters


class Pair:
    """A sequence by behaviour alone, as configuration libraries have them."""

    def __init__(self, *entries: float) -> None:
        self.entries = entries

    def __getitem__(self, index: int) -> float:
        return self.entries[index]

    def __len__(self) -> int:
        return len(self.entries)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"lr": torch.tensor(-1.0)}, "lr must be"),
    ({"lr": torch.tensor([float("nan")])}, "lr must be"),
    ({"lr": torch.tensor(True)}, "real element"),
    ({"lr": torch.tensor(1j)}, "real element"),
    ({"lr": "0.1"}, "lr must be"),
    ({"lr": np.array([0.1, 0.2])}, "lr must be"),
    ({"lr": True}, "lr must be"),
    ({"betas": (0.9,)}, "two numbers"),
    ({"betas": "ab"}, r"betas\[0\]"),
    ({"betas": {0.9, 0.95}}, "two numbers"),
    ({"betas": (torch.tensor(0.9), 0.95)}, r"betas\[0\]"),
    ({"betas": (0.9, None)}, r"betas\[1\]"),
    ({"weight_decay": "0.1"}, "weight_decay"),
    ({"weight_decay": float("inf")}, "weight_decay"),
    ({"graft_eps": float("nan")}, "graft_eps"),
    ({"graft_eps": None}, "graft_eps"),
    ({"momentum": None}, "momentum"),
    ({"damping": None, "algorithm": "adamw"}, "damping"),
    ({"damping": True}, "damping"),
    ({"epsilon": float("nan"), "algorithm": "adamw"}, "epsilon"),
    ({"precision": "fp8", "algorithm": "adamw"}, "unknown precision"),
    ({"nesterov": "no"}, "nesterov must be True or False"),
    ({"maximize": "false"}, "maximize must be True or False"),
    ({"bias_correction": None}, "bias_correction must be True or False"),
    ({"block_size": True}, "block_size"),
    ({"block_size": None}, "block_size"),
    ({"update_every": 2.0}, "update_every"),
    ({"start_step": "1"}, "start_step"),
    ({"max_workspace": -1}, "max_workspace"),
    ({"grafting": None}, "unknown grafting None"),
    ({"grafting": ["adam"]}, "unknown grafting"),
    ({"vectors": 1}, "unknown vectors 1"),
    ({"state_dtype": torch.bfloat16}, "unknown state_dtype"),
    ({"solver": None}, "unknown solver None"),
    ({"solver": {"name": "chebyshev", "degree": "60"}}, "degree"),
    ({"solver": {"name": "minimax", "degree": 3.0}}, "degree"),
    ({"solver": {"name": "minimax", "tolerance": "1e-3"}}, "tolerance"),
    ({"solver": {"name": "newton-db", "steps": 1.5}}, "steps"),
    ({"solver": {"name": "newton-db", "scaling": "trace"}}, "scaling"),
    ({"root": 2.0}, "root"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
def test_options_of_another_type_or_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dash(parameters([(4, 4)]), **options)


@pytest.mark.parametrize("option", ["process_group", "wire_dtype"])
def test_options_of_all_groups_are_checked_as_well(option: str) -> None:
    with pytest.raises(ValueError, match=option):
        Dash(parameters([(4, 4)]), **{option: "fp8"})


@pytest.mark.parametrize(
    ("name", "value"),
    [("maximize", 1), ("update_every", 0), ("weight_decay", "0.1"), ("lr", torch.ones(2)), ("lr", -0.1)],
)
def test_an_option_that_becomes_invalid_is_refused_before_anything_moves(name: str, value: Any) -> None:
    params = parameters([(4, 4)])
    optimizer = Dash(params, update_every=1)
    give_gradients(params, 0)
    optimizer.step()
    before, good = params[0].detach().clone(), optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=name):
        optimizer.step()
    assert torch.equal(params[0], before)
    optimizer.param_groups[0][name] = good
    optimizer.step()
    assert not torch.equal(params[0], before)


def moved(**options: Any) -> Tensor:
    params = parameters([(6, 4), (3,)], torch.float32)
    optimizer = Dash(params, weight_decay=0.1, **options)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in params])


@pytest.mark.parametrize("betas", [[0.8, 0.9], Pair(0.8, 0.9), UserList([0.8, 0.9]), np.array([0.8, 0.9])])
def test_betas_may_be_any_sequence(betas: Any) -> None:
    assert torch.equal(moved(betas=betas), moved(betas=(0.8, 0.9)))


@pytest.mark.parametrize(
    "lr",
    [
        np.float64(0.125),
        np.array(0.125),
        np.float32(0.125),
        torch.tensor(0.125),
        torch.tensor([0.125]),
        torch.tensor([[0.125]], dtype=torch.float64),
    ],
    ids=repr,
)
def test_learning_rates_of_any_kind_are_the_number_they_hold(lr: Any) -> None:
    torch.testing.assert_close(moved(lr=lr), moved(lr=0.125), rtol=1e-6, atol=1e-6)


def test_numpys_numbers_are_plain_numbers_in_files() -> None:
    params = parameters([(4, 4)])
    optimizer = Dash(
        params,
        lr=np.float64(0.1),
        betas=np.array([0.9, 0.95]),
        damping=np.float32(1e-3),
        block_size=np.int64(4),
        maximize=np.bool_(True),
        solver={"name": "chebyshev", "degree": np.int64(40)},
    )
    group = optimizer.param_groups[0]
    kinds = [type(group[name]) for name in ("lr", "damping", "block_size", "maximize")]
    assert kinds == [float, float, int, bool]
    give_gradients(params, 0)
    optimizer.step()
    group["lr"] = np.float64(0.05)  # as a scheduler may
    group["initial_lr"] = np.array(0.1)
    group["betas"] = (np.float64(0.8), 0.95)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)["param_groups"][0]
    assert (saved["lr"], saved["initial_lr"], saved["betas"]) == (0.05, 0.1, (0.8, 0.95))


@pytest.mark.parametrize("solver", [{"name": "minimax", "tolerance": 0.01}, "eigh"])
def test_a_solver_changed_on_the_way_is_used(solver: Any) -> None:
    params, twins = parameters([(6, 4)]), parameters([(6, 4)])
    optimizer, other = Dash(params, update_every=1), Dash(twins, update_every=1, solver=solver)
    optimizer.param_groups[0]["solver"] = solver
    for step in range(2):
        give_gradients(params, step)
        give_gradients(twins, step)
        optimizer.step()
        other.step()
    assert torch.equal(params[0], twins[0])


@pytest.mark.parametrize(
    "frozen",
    [
        torch.zeros(3, 3, dtype=torch.int64),
        torch.zeros(5, dtype=torch.uint8),
        torch.zeros(3, 3, dtype=torch.complex64),
        torch.zeros(3, 3, device="meta"),
    ],
)
def test_parameters_that_never_get_a_gradient_may_be_anything(frozen: Tensor) -> None:
    params = [*parameters([(4, 4)]), nn.Parameter(frozen, requires_grad=False)]
    optimizer = Dash([(f"weight{i}", parameter) for i, parameter in enumerate(params)])
    give_gradients(params[:1], 0)
    optimizer.step()
    assert list(optimizer.state) == params[:1]
    again = Dash([(f"weight{i}", parameter) for i, parameter in enumerate(params)])
    again.load_state_dict(optimizer.state_dict())


def test_a_frozen_parameter_that_gets_a_gradient_is_refused_by_name_then() -> None:
    weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64), requires_grad=False)
    optimizer = Dash([("layer.weight", weight)])
    weight.grad = torch.ones_like(weight)
    with pytest.raises(TypeError, match=r"layer\.weight is complex"):
        optimizer.step()
