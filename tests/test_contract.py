"""What AdamW survives, Dash survives: the torch.optim contract, faults and odd inputs."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dash_shampoo import Dash, param_groups
from tests.test_optimizer import give_gradients, parameters

SHAPES = [(9, 7), (6,), (8, 8), (4, 3, 2, 2)]


def snapshot(optimizer: Dash) -> list[dict[str, Any]]:
    return [copy.deepcopy(dict(optimizer.state[p])) for group in optimizer.param_groups for p in group["params"]]


def assert_same_state(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            same = torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key]
            assert same, key


def run(optimizer: Dash, params: list[nn.Parameter], steps: range, scale: float = 1.0) -> None:
    for step in steps:
        give_gradients(params, step, scale)
        optimizer.step()


# --- gradients that are missing, late or not finite ---------------------------------------------------------------


@pytest.mark.parametrize("vectors", ["adamw", "shampoo"])
def test_parameter_without_gradient_is_left_as_it_was(vectors: str) -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = Dash(params, lr=0.1, block_size=4, weight_decay=0.1, vectors=vectors, momentum=0.5)
    run(optimizer, params, range(2))
    for missing in range(len(params)):
        give_gradients(params, 2 + missing)
        params[missing].grad = None
        weight, state = params[missing].detach().clone(), snapshot(optimizer)[missing]
        optimizer.step()
        assert torch.equal(params[missing], weight)
        assert_same_state([state], [snapshot(optimizer)[missing]])


@pytest.mark.parametrize("update_every", [1, 3])
def test_a_late_first_gradient_moves_a_parameter_like_its_twin(update_every: int) -> None:
    early, late = parameters([(9, 7)] * 2)
    late.data.copy_(early.data)
    optimizer = Dash([early, late], lr=0.1, block_size=4, update_every=update_every, solver="eigh")
    trace: dict[int, list[Tensor]] = {0: [], 1: []}
    for step in range(9):
        for parameter, delay in [(early, 0), (late, 2)]:
            parameter.grad = None
            if step >= delay:
                give_gradients([parameter], step - delay)
        optimizer.step()
        trace[0].append(early.detach().clone())
        trace[1].append(late.detach().clone())
    for ahead, behind in zip(trace[0], trace[1][2:], strict=False):
        torch.testing.assert_close(ahead, behind, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("grafting", ["adam", "adagrad", "none"])
def test_nonfinite_gradient_skips_its_parameter_and_no_other(bad: float, grafting: str) -> None:
    params, twins = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    options: dict[str, Any] = {"lr": 0.1, "block_size": 4, "weight_decay": 0.1, "momentum": 0.5, "grafting": grafting}
    optimizer, other = Dash(params, **options), Dash(twins, **options)
    run(optimizer, params, range(2))
    run(other, twins, range(2))
    give_gradients(params, 2)
    give_gradients(twins, 2)
    params[0].grad[-1, -1] = bad
    twins[0].grad = None
    before = snapshot(optimizer)[0]
    with pytest.warns(RuntimeWarning, match="not finite"):
        optimizer.step()
    other.step()
    assert torch.equal(params[0], twins[0])
    for parameter, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(parameter, twin, rtol=1e-5, atol=1e-5)
    after = snapshot(optimizer)[0]
    assert after.pop("skipped") == before.pop("skipped") + 1
    assert after.pop("age") == before.pop("age") + 1
    assert_same_state([before], [after])
    assert optimizer.diagnostics()["skipped"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        give_gradients(params, 3)
        params[1].grad.fill_(bad)
        optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in params)


def test_nonfinite_gradient_raises_before_anything_moves_if_asked() -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = Dash([(f"weight{i}", p) for i, p in enumerate(params)], lr=0.1, on_nonfinite="raise")
    run(optimizer, params, range(1))
    give_gradients(params, 1)
    params[2].grad[0, 0] = float("nan")
    before, state = [parameter.detach().clone() for parameter in params], snapshot(optimizer)
    with pytest.raises(FloatingPointError, match="weight2"):
        optimizer.step()
    assert all(torch.equal(parameter, old) for parameter, old in zip(params, before, strict=True))
    optimizer.state_dict()  # counts what there is to count
    assert_same_state(state, snapshot(optimizer))


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_gradients_are_let_go_after_the_step(on_nonfinite: str) -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = Dash(params, on_nonfinite=on_nonfinite)
    give_gradients(params, 0)
    if on_nonfinite == "raise":
        params[2].grad[0, 0] = float("nan")
    gradients = [weakref.ref(parameter.grad) for parameter in params]
    with nullcontext() if on_nonfinite == "skip" else pytest.raises(FloatingPointError):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    assert not any(gradient() is not None for gradient in gradients)


@pytest.mark.parametrize("grafting", ["none", "sgd", "adagrad", "rmsprop", "adam"])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-20, 1e12, 1e18, 1e30])
def test_extreme_gradients_leave_finite_parameters(scale: float, grafting: str) -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = Dash(params, lr=1e-3, block_size=4, grafting=grafting, vectors="shampoo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        run(optimizer, params, range(3), scale)
        run(optimizer, params, range(3, 6))
    assert all(torch.isfinite(parameter).all() for parameter in params)


def test_constant_and_rank_one_gradients_leave_finite_parameters() -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = Dash(params, lr=0.1, block_size=4)
    for _ in range(5):
        for parameter in params:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in params)


def test_zero_gradient_moves_nothing() -> None:
    params = parameters(SHAPES, torch.float32)
    before = [parameter.detach().clone() for parameter in params]
    optimizer = Dash(params, lr=0.1, block_size=4)
    run(optimizer, params, range(3), scale=0.0)
    assert all(torch.equal(parameter, old) for parameter, old in zip(params, before, strict=True))


def test_a_spike_does_not_stop_learning() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    optimizer = Dash([weight], lr=0.02, block_size=4)
    first = weight.norm().item()
    for step in range(1500):  # Adam's squares need a thousand steps to forget it, here as in AdamW
        optimizer.zero_grad()
        weight.square().sum().backward()
        if step == 20:
            weight.grad.mul_(1e12)
        optimizer.step()
    assert weight.norm().item() < 0.5 * first


# --- what a step must leave alone -----------------------------------------------------------------------------------


def test_gradients_and_random_numbers_are_unchanged_by_a_step() -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = Dash.paper(params, lr=0.1, block_size=4, weight_decay=0.1, maximize=True)
    for step in range(3):
        give_gradients(params, step)
        gradients, random = [parameter.grad.clone() for parameter in params], torch.get_rng_state()
        optimizer.step()
        assert all(torch.equal(parameter.grad, old) for parameter, old in zip(params, gradients, strict=True))
        assert torch.equal(torch.get_rng_state(), random)


def test_two_runs_are_equal_to_the_bit() -> None:
    results = []
    for _ in range(2):
        params = parameters(SHAPES, torch.float32)
        run(Dash(params, lr=0.1, block_size=4, update_every=2), params, range(5))
        results.append(params)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_lr_zero_changes_nothing() -> None:
    params = parameters(SHAPES, torch.float32)
    before = [parameter.detach().clone() for parameter in params]
    run(Dash(params, lr=0.0, block_size=4, weight_decay=0.1), params, range(3))
    assert all(torch.equal(parameter, old) for parameter, old in zip(params, before, strict=True))


# --- groups, schedulers and parameters that change ------------------------------------------------------------------


def test_tensor_lr_equals_number() -> None:
    results = []
    for lr in (0.1, torch.tensor(0.1)):
        params = parameters(SHAPES)
        run(Dash(params, lr=lr, block_size=4, weight_decay=0.1), params, range(3))
        results.append(params)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)


def test_options_are_per_group_though_groups_share_stacks() -> None:
    together, apart = parameters([(9, 7)] * 3), parameters([(9, 7)] * 3)
    options = [
        {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0, "graft_beta2": 0.9},
        {"lr": 0.2, "betas": (0.5, 0.8), "weight_decay": 0.1, "update_every": 2},
        {"lr": 0.05, "betas": (0.0, 0.0), "graft_eps": 1e-3, "start_step": 3},
    ]
    groups = [{"params": [parameter], **own} for parameter, own in zip(together, options, strict=True)]
    shared = Dash(groups, block_size=4, solver="eigh")
    run(shared, together, range(5))
    assert len({side.key for bank in shared._banks for part in bank.parts for side in part.sides}) == 3
    for step in range(5):
        give_gradients(apart, step)
        if step == 0:
            alone = [Dash([p], block_size=4, solver="eigh", **own) for p, own in zip(apart, options, strict=True)]
        for optimizer in alone:
            optimizer.step()
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_groups_added_later_move_like_groups_given_at_first() -> None:
    params, twins = parameters(SHAPES), parameters(SHAPES)
    optimizer = Dash(params[:2], lr=0.1, block_size=4, solver="eigh")
    run(optimizer, params[:2], range(3))
    optimizer.add_param_group({"params": params[2:], "lr": 0.2})
    run(optimizer, params, range(3))
    run(Dash(twins[:2], lr=0.1, block_size=4, solver="eigh"), twins[:2], range(3))
    first = Dash(twins[2:], lr=0.2, block_size=4, solver="eigh")
    for step in range(3):
        give_gradients(twins, step)
        first.step()
    for one, other in zip(params[2:], twins[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_removed_parameters_are_forgotten_and_the_rest_goes_on() -> None:
    params, twins = parameters(SHAPES), parameters(SHAPES)
    optimizer, other = (Dash(each, lr=0.1, block_size=4, solver="eigh") for each in (params, twins))
    run(optimizer, params, range(2))
    run(other, twins, range(2))
    removed = optimizer.param_groups[0]["params"].pop(0)
    run(optimizer, params, range(2, 4))
    run(other, twins, range(2, 4))
    assert removed not in optimizer.state
    for one, twin in zip(params[1:], twins[1:], strict=True):
        torch.testing.assert_close(one, twin, rtol=1e-12, atol=1e-12)


def test_frozen_parameters_cost_nothing_and_can_be_thawed() -> None:
    params = parameters(SHAPES, torch.float32)
    params[0].requires_grad_(False)
    optimizer = Dash(params, lr=0.1, block_size=4)
    run(optimizer, params[1:], range(2))
    assert params[0] not in optimizer.state
    params[0].requires_grad_(True)
    before = params[0].detach().clone()
    run(optimizer, params, range(2))
    assert not torch.equal(params[0], before)


def test_new_data_and_new_gradients_are_used() -> None:
    params, twins = parameters(SHAPES), parameters(SHAPES)
    optimizer, other = (Dash(each, lr=0.1, block_size=4, solver="eigh") for each in (params, twins))
    run(optimizer, params, range(2))
    run(other, twins, range(2))
    for parameter in params:
        parameter.data = parameter.data.clone()
    run(optimizer, params, range(2, 4))
    run(other, twins, range(2, 4))
    for one, twin in zip(params, twins, strict=True):
        assert torch.equal(one, twin)


def test_model_cast_after_construction_keeps_its_state() -> None:
    model = nn.Linear(7, 9)
    optimizer = Dash(model.parameters(), lr=0.01, block_size=4)
    run(optimizer, list(model.parameters()), range(2))
    state = snapshot(optimizer)
    model.bfloat16()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    give_gradients(list(model.parameters()), 2)
    model.weight.grad, model.bias.grad = None, None
    optimizer.step()
    assert_same_state(state, snapshot(optimizer))
    run(optimizer, list(model.parameters()), range(3, 5))
    assert model.weight.dtype == torch.bfloat16


def test_reshaped_parameter_is_refused_by_name() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    optimizer = Dash([("layer.weight", weight)], lr=0.1, block_size=4)
    run(optimizer, [weight], range(1))
    weight.data = torch.randn(8, 6)
    give_gradients([weight], 1)
    with pytest.raises(ValueError, match=r"layer\.weight.*\(1, 4, 4\).*\(1, 4, 2\)"):
        optimizer.step()


def test_tied_weights_move_once() -> None:
    embedding = nn.Embedding(10, 6)
    head = nn.Linear(6, 10, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    groups = param_groups(model)
    assert [len(group["params"]) for group in groups] == [1]
    optimizer = Dash(groups, lr=0.1)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert optimizer.state[embedding.weight]["age"] == 1


def test_closure_is_called_with_gradients_enabled() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = Dash([weight], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    expected = weight.detach().square().sum()
    assert torch.equal(optimizer.step(closure), expected)


def test_step_hooks_run() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = Dash([weight], lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    run(optimizer, [weight], range(1))
    assert calls == ["before", "after"]


def test_step_without_any_gradient_does_nothing() -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = Dash(params, lr=0.1)
    optimizer.step()
    assert not optimizer.state
    run(optimizer, params, range(1))
    state = snapshot(optimizer)
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert_same_state(state, snapshot(optimizer))


def test_gradient_clipping_and_scaling_before_the_step() -> None:
    params, twins = parameters(SHAPES), parameters(SHAPES)
    optimizer, other = (Dash(each, lr=0.1, block_size=4, solver="eigh") for each in (params, twins))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        give_gradients(params, step, 2.0**10)
        give_gradients(twins, step)
        scaler.scale(torch.tensor(1.0))
        scaler.unscale_(optimizer)
        for each in (params, twins):
            torch.nn.utils.clip_grad_norm_(each, 1.0)
        scaler.step(optimizer)
        scaler.update()
        other.step()
    for one, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(one, twin, rtol=1e-10, atol=1e-10)


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_as_the_original(duplicate: Any) -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = Dash(params, lr=0.1, block_size=4, update_every=2)
    run(optimizer, params, range(3))
    twins, other = duplicate((params, optimizer))
    assert all(one is not twin for one, twin in zip(params, twins, strict=True))
    run(optimizer, params, range(3, 6))
    run(other, twins, range(3, 6))
    assert all(torch.equal(one, twin) for one, twin in zip(params, twins, strict=True))
    assert_same_state(snapshot(optimizer), snapshot(other))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be"),
        ({"lr": float("nan")}, "lr must be"),
        ({"lr": torch.ones(2)}, "one real element"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]"),
        ({"betas": 0.9}, "two numbers"),
        ({"graft_beta2": 1.5}, "graft_beta2"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"momentum": 1.0}, "momentum"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 1.5}, "block_size"),
        ({"update_every": 0}, "update_every"),
        ({"start_step": 0}, "start_step"),
        ({"root": 0}, "root"),
        ({"damping": -1e-3}, "damping"),
        ({"damping": 0.0}, "damping"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"precision": "bf16"}, "bf16x3"),
        ({"solver": "newton"}, "newton-db"),
        ({"grafting": "adm"}, "did you mean 'adam'"),
        ({"vectors": "admw"}, "did you mean 'adamw'"),
        ({"algorithm": "shampo"}, "did you mean 'shampoo'"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite"),
        ({"nesterov": True}, "nesterov needs momentum"),
        ({"grafting": "none", "start_step": 5}, "start_step > 1 needs"),
        ({"solver": "newton-db", "root": 3}, "newton-db"),
    ],
)
def test_bad_options_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    params = parameters([(4, 4)])
    with pytest.raises(ValueError, match=message):
        Dash(params, **options)
    with pytest.raises(ValueError, match=message):
        Dash([{"params": params, **options}])
    optimizer = Dash(parameters([(4, 4)]))
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": params, **options})
    assert len(optimizer.param_groups) == 1


def test_misspelt_group_option_is_refused_and_foreign_keys_are_kept() -> None:
    params = parameters([(4, 4)])
    with pytest.raises(ValueError, match="did you mean 'block_size'"):
        Dash([{"params": params, "block_sise": 3}])
    assert Dash([{"params": params, "tag": 3}]).param_groups[0]["tag"] == 3


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.zeros(3, 3, dtype=torch.complex64, requires_grad=True), "complex"),
        (torch.zeros(3, 3, device="meta", requires_grad=True), "meta"),
        (torch.eye(3).to_sparse().requires_grad_(), "sparse"),
    ],
)
def test_unsupported_parameters_are_refused_at_construction(parameter: Tensor, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Dash([parameter])
    optimizer = Dash(parameters([(4, 4)]))
    with pytest.raises(TypeError, match=message):
        optimizer.add_param_group({"params": [parameter]})
    assert len(optimizer.param_groups) == 1


def test_duplicate_parameters_are_refused() -> None:
    (parameter,) = parameters([(4, 4)])
    with pytest.raises(ValueError, match="more than once"):
        Dash([parameter, parameter])
    with pytest.raises(ValueError, match="more than one"):
        Dash([{"params": [parameter]}, {"params": [parameter]}])


def test_sparse_gradient_is_refused_by_name() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = Dash(embedding.named_parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="weight has a sparse gradient"):
        optimizer.step()


@pytest.mark.parametrize("forget", [lambda o, p: o.state.pop(p), lambda o, p: o.state[p].clear()])
def test_a_parameter_whose_state_is_taken_away_starts_anew(forget: Any) -> None:
    params, twins = parameters(SHAPES), parameters(SHAPES)
    optimizer = Dash(params, lr=0.1, block_size=4, solver="eigh")
    run(optimizer, params, range(3))
    forget(optimizer, params[0])
    twins[0].data.copy_(params[0].data)
    run(optimizer, params, range(3))
    run(Dash(twins, lr=0.1, block_size=4, solver="eigh"), twins, range(3))
    torch.testing.assert_close(params[0], twins[0], rtol=1e-12, atol=1e-12)
