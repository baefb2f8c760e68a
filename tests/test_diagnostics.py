"""`Dash.diagnostics(detail=True)` says what is so, and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dash_shampoo import Dash
from dash_shampoo.diagnostics import merge
from tests.test_optimizer import give_gradients, parameters

SHAPES = [(12, 8), (8, 8), (5,), (3, 8, 8)]


def details(optimizer: Dash) -> dict[str, float]:
    """What ``detail`` adds."""
    own = optimizer.diagnostics()
    found = optimizer.diagnostics(detail=True)
    assert {name: found[name] for name in own} == own
    return {name: value for name, value in found.items() if name not in own}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
@pytest.mark.parametrize("scale", [1e-12, 1.0])
def test_eigenvalues_and_conditions_are_those_of_the_damped_factors(
    dtype: torch.dtype, epsilon: float, scale: float
) -> None:
    (parameter,) = params = parameters([(12, 8)], dtype)
    damping, beta2 = 1e-3, 0.9
    optimizer = Dash(params, update_every=1, damping=damping, epsilon=epsilon * scale**2, betas=(0.9, beta2), root=2)
    left, right = torch.zeros(12, 12).double(), torch.zeros(8, 8).double()
    for step in range(20):
        give_gradients(params, step, scale)
        gradient = parameter.grad.double()
        left = beta2 * left + (1 - beta2) * gradient @ gradient.T
        right = beta2 * right + (1 - beta2) * gradient.T @ gradient
        optimizer.step()
    found = details(optimizer)
    for factor in (left, right):
        values = torch.linalg.eigvalsh(factor / (1 - beta2**20)).clamp(min=0)
        shift = damping * (values / values.max()).pow(4).sum().pow(0.25) * values.max() + epsilon * scale**2
        name = f"factor {len(factor)}"
        assert found[f"{name}/factors"] == 1
        assert found[f"{name}/largest"] == pytest.approx(float(values.max()), rel=0.03)
        condition = (values.max() + shift) / (values.min() + shift)
        assert found[f"{name}/condition"] == pytest.approx(float(condition), rel=0.06)
        assert 0 <= found[f"{name}/residual"] < 0.1


@pytest.mark.parametrize("grafting", ["adam", "sgd"])
def test_the_size_of_the_update_is_what_the_parameters_move_by(grafting: str) -> None:
    lr = 0.1
    both = [parameters([(12, 8), (12, 8), (5,)]) for _ in range(2)]
    grafted, raw = (Dash(params, lr=lr, grafting=name) for params, name in zip(both, (grafting, "none"), strict=True))
    for step in range(4):
        before = [[parameter.detach().clone() for parameter in params] for params in both]
        for params, optimizer in zip(both, (grafted, raw), strict=True):
            give_gradients(params, step)
            optimizer.step()
        moved, rescaled = (
            [(new.detach() - old) / lr for new, old in zip(params, olds, strict=True)]
            for params, olds in zip(both, before, strict=True)
        )
        found = details(grafted)
        rms = torch.cat(moved[:2]).square().mean().sqrt().item()
        raw_rms = torch.cat(rescaled[:2]).square().mean().sqrt().item()
        assert found["block 12x8/blocks"] == 2
        assert found["block 12x8/rms"] == pytest.approx(rms)
        assert found["block 12x8/raw_rms"] == pytest.approx(raw_rms)
        assert found["block 12x8/ratio"] == pytest.approx(rms / raw_rms)
        assert found["block 5x1/rms"] == pytest.approx(moved[2].square().mean().sqrt().item())
        assert "block 5x1/ratio" not in found
        assert "block 12x8/ratio" not in details(raw)


@given(
    options=st.fixed_dictionaries(
        {
            "grafting": st.sampled_from(["none", "adam", "adagrad"]),
            "momentum": st.sampled_from([0.0, 0.5]),
            "start_step": st.sampled_from([1, 3]),
            "update_every": st.sampled_from([1, 2]),
            "bias_correction": st.booleans(),
            "state_dtype": st.sampled_from([None, "bf16"]),
            "block_size": st.sampled_from([4, 1024]),
        }
    ),
    kinds=st.lists(st.sampled_from(["good", "none", "zero", "nan"]), min_size=1, max_size=5),
)
@pytest.mark.filterwarnings("ignore:a gradient was not finite")
def test_looking_changes_nothing(options: dict[str, Any], kinds: list[str]) -> None:
    options = {name: value for name, value in options.items() if value is not None}
    if options["grafting"] == "none":
        options["start_step"] = 1
    both = [parameters(SHAPES, torch.float32) for _ in range(2)]
    watched, other = (Dash(params, lr=0.1, **options) for params in both)
    assert details(watched) == {}  # before the first step there is nothing
    for step, kind in enumerate(kinds):
        for params, optimizer in zip(both, (watched, other), strict=True):
            give_gradients(params, step)
            first = params[0].grad
            if kind == "none":
                params[0].grad = None
            elif kind in ("zero", "nan"):
                first.fill_(0.0 if kind == "zero" else torch.nan)
            optimizer.step()
        found = details(watched)
        assert found == details(watched)
        assert all(isinstance(value, (int, float)) and value == value for value in found.values())
        skipped = sum(value for name, value in found.items() if name.endswith("/skipped"))
        assert (skipped > 0) == ("nan" in kinds[: step + 1])
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    assert str(watched.state_dict()) == str(other.state_dict())


def test_after_loading_details_are_of_what_was_loaded_or_come_with_the_next_step() -> None:
    def trained(steps: int) -> Dash:
        params = parameters(SHAPES)
        optimizer = Dash(params, lr=0.1)
        for step in range(steps):
            give_gradients(params, step)
            optimizer.step()
        return optimizer

    one, other, fresh = trained(3), trained(1), trained(0)
    expected = details(one)
    for optimizer in (other, fresh):
        optimizer.load_state_dict(copy.deepcopy(one.state_dict()))
        found = details(optimizer)
        kept = {name: value for name, value in found.items() if not name.endswith("/residual")}
        assert kept.items() <= expected.items()
    assert found == {}
    give_gradients(fresh.param_groups[0]["params"], 3)
    fresh.step()
    assert details(fresh).keys() == expected.keys()


def test_stacks_of_several_dtypes_and_options_are_told_by_their_size() -> None:
    params = [*parameters([(8, 8)], torch.float32), *parameters([(8, 8)]), *parameters([(8, 8)])]
    optimizer = Dash([{"params": params[:2]}, {"params": params[2:], "damping": 1e-3}], lr=0.1)
    give_gradients(params, 0)
    optimizer.step()
    found = details(optimizer)
    assert found["block 8x8/blocks"] == 3
    assert found["factor 8/factors"] == 6


NUMBERS = st.fixed_dictionaries(
    {
        "skipped": st.just(3),
        "block 4x4/blocks": st.integers(1, 9),
        "block 4x4/skipped": st.integers(0, 9),
        "block 4x4/rms": st.floats(0.1, 9),
        "block 4x4/raw_rms": st.floats(0.1, 9),
        "factor 4/condition": st.floats(1, 1e6),
    }
)


@given(found=st.lists(NUMBERS, min_size=1, max_size=5), cut=st.integers(0, 5))
def test_merging_goes_in_any_portions(found: list[dict[str, float]], cut: int) -> None:
    def squares(each: Mapping[str, float]) -> float:
        return each["block 4x4/blocks"] * each["block 4x4/rms"] ** 2

    whole = merge(found)
    assert merge([merge(found[:cut]), merge(found[cut:])]) == pytest.approx(whole)
    assert whole["skipped"] == 3
    assert whole["block 4x4/skipped"] == sum(each["block 4x4/skipped"] for each in found)
    assert whole["factor 4/condition"] == max(each["factor 4/condition"] for each in found)
    assert squares(whole) == pytest.approx(sum(map(squares, found)))
    assert whole["block 4x4/ratio"] == pytest.approx(whole["block 4x4/rms"] / whole["block 4x4/raw_rms"])
