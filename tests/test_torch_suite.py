"""What torch checks of every optimizer of its own holds for Dash: the checks of its suite, written for Dash.

Three do not apply. Dash has one implementation, so there is no ``foreach``, ``fused`` or loop to compare: in their
place parameters that are moved together move as they do one by one. It is not ``capturable``, but takes learning rates
that are tensors without it. It refuses complex parameters and sparse gradients by name.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR

from dash_shampoo import Dash

INPUTS: list[dict[str, Any]] = [
    {},
    {"lr": 1e-2},
    {"lr": torch.tensor(1e-2)},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"algorithm": "adamw", "weight_decay": 0.1},
    {"algorithm": "adamw", "maximize": True, "lr": torch.tensor(1e-2)},
    {"vectors": "shampoo", "root": 4, "block_size": 3, "update_every": 1},
    {"momentum": 0.9, "nesterov": True, "grafting": "sgd", "lr": 1e-2},
    {"grafting": "none", "solver": "eigh", "lr": 1e-2},
    {"grafting": "rmsprop", "state_dtype": "bf16", "start_step": 3},
    {"grafting": "adagrad", "bias_correction": False},
]
every_input = pytest.mark.parametrize("options", INPUTS, ids=str)


def fresh(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with tensors of their own: schedulers and loads write to them."""
    return copy.deepcopy(options)


class Regression:
    """A weight and a bias for one input."""

    def __init__(self, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        self.weight = nn.Parameter(torch.randn(10, 5) if weight is None else weight)
        self.bias = nn.Parameter(torch.randn(10) if bias is None else bias)
        self.input = torch.linspace(-1, 1, self.weight.shape[1])

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.weight, self.bias]

    def named(self, names: bool) -> Any:
        return [("weight", self.weight), ("bias", self.bias)] if names else self.parameters

    def twin(self) -> Regression:
        return Regression(self.weight.detach().clone(), self.bias.detach().clone())

    def loss(self) -> Tensor:
        return (self.weight.mv(self.input) + self.bias).square().sum()

    def train(self, optimizer: Optimizer, steps: int) -> float:
        """Takes steps; returns the last loss."""
        loss = torch.tensor(0.0)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            optimizer.step()
        return loss.item()


def primed(options: dict[str, Any], names: bool = False) -> tuple[Regression, Dash]:
    model = Regression()
    optimizer = Dash(model.named(names), **fresh(options))
    model.train(optimizer, 4)
    return model, optimizer


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def assert_same_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two state dicts but for the names of their parameters."""
    assert one["state"].keys() == other["state"].keys()
    for key, state in one["state"].items():
        assert_equal(state, other["state"][key])
    for left, right in zip(one["param_groups"], other["param_groups"], strict=True):
        drop = {"param_names"}
        assert {key: left[key] for key in left.keys() - drop} == {key: right[key] for key in right.keys() - drop}


# --- steps ------------------------------------------------------------------------------------------------------------


def contiguous(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape)


def a_column_of_pairs(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(*shape, 2)[..., 0]


@pytest.mark.parametrize("make", [contiguous, a_column_of_pairs])
@every_input
def test_the_loss_goes_where_it_should(options: dict[str, Any], make: Callable[..., Tensor]) -> None:
    model = Regression(make((10, 5)), make((10,)))
    before = model.loss().item()
    after = model.train(Dash(model.parameters, **fresh(options)), 20)
    assert after > before if options.get("maximize") else after < before


@every_input
def test_groups_have_weight_decay_of_their_own(options: dict[str, Any]) -> None:
    model = Regression()
    apart, before = model.twin(), model.loss().item()
    together = Dash([{"params": [model.weight], **fresh(options)}, {"params": [model.bias], "weight_decay": 0.0}])
    alone = [Dash([apart.weight], **fresh(options)), Dash([apart.bias], weight_decay=0.0)]
    after = model.train(together, 20)
    for _ in range(20):
        for parameter in apart.parameters:
            parameter.grad = None
        apart.loss().backward()
        for optimizer in alone:
            optimizer.step()
    assert_equal([*map(Tensor.detach, model.parameters)], [*map(Tensor.detach, apart.parameters)])
    if not options.get("maximize"):
        assert after < before


@every_input
def test_groups_have_a_learning_rate_of_their_own(options: dict[str, Any]) -> None:
    model, idle = Regression(), nn.Parameter(torch.randn(2, 3))
    before, loss = idle.detach().clone(), model.loss().item()
    own = {"lr": 1e-2, **{**fresh(options), "weight_decay": 0.0}}
    optimizer = Dash([{"params": model.parameters, **own}, {"params": [idle]}], lr=1e-28)
    for _ in range(20):
        optimizer.zero_grad()
        model.loss().backward()
        idle.grad = torch.rand_like(idle)
        optimizer.step()
    assert (model.loss().item() > loss) == bool(options.get("maximize"))
    assert_equal(idle.detach(), before)


@every_input
def test_parameters_move_together_as_they_do_one_by_one(options: dict[str, Any]) -> None:
    shapes = [(6, 4), (4, 6), (6, 4), (5,), (), (2, 3, 4), (3, 2, 2, 2), (0,), (0, 4)]
    params = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    together = Dash(params, **fresh(options))
    alone = [Dash([twin], **fresh(options)) for twin in twins]
    for _ in range(5):
        for parameter, twin in zip(params, twins, strict=True):
            parameter.grad = torch.randn_like(parameter)
            twin.grad = parameter.grad.clone()
        together.step()
        for optimizer in alone:
            optimizer.step()
    for parameter, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(parameter, twin, rtol=1e-9, atol=1e-9)


def test_parameters_of_several_dtypes_share_an_optimizer() -> None:
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    values = torch.randn(8, 6).to(torch.bfloat16).double()
    params = [nn.Parameter(values.to(dtype)) for dtype in dtypes]
    optimizer = Dash(params, lr=1e-2)
    for step in range(3):
        gradient = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        for parameter in params:
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    for parameter, dtype in zip(params, dtypes, strict=True):
        assert parameter.dtype == dtype
        torch.testing.assert_close(parameter.double(), params[0], rtol=0, atol=2e-2 if dtype.itemsize == 2 else 1e-4)


@every_input
def test_without_gradients_nothing_happens(options: dict[str, Any]) -> None:
    params = [torch.randn(2, 3) for _ in range(2)]  # that ask for none
    before = [p.clone() for p in params]
    optimizer = Dash(params, **fresh(options))
    assert optimizer.step(lambda: torch.tensor([1.0])) == 1.0
    assert_equal(params, before)
    assert not optimizer.state


@pytest.mark.parametrize("shape", [(5, 1), (5, 4)])
@every_input
def test_gradients_of_zeros_move_nothing(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.randn(shape))
    before = parameter.detach().clone()
    optimizer = Dash([parameter], **{**fresh(options), "weight_decay": 0.0})
    for _ in range(3):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert_equal(parameter.detach(), before)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_cleared(set_to_none: bool) -> None:
    model, optimizer = primed({})
    optimizer.zero_grad(set_to_none=set_to_none)
    for parameter in model.parameters:
        assert parameter.grad is None if set_to_none else not parameter.grad.any()


def test_closures_run_once_and_return_what_they_return() -> None:
    model = Regression()
    optimizer = Dash(model.parameters)
    calls: list[float] = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = model.loss()
        loss.backward()
        calls.append(loss.item())
        return loss

    losses = [optimizer.step(closure) for _ in range(5)]
    assert [loss.item() for loss in losses] == calls
    assert calls[-1] < calls[0]


@every_input
def test_optimizers_can_be_printed(options: dict[str, Any]) -> None:
    text = repr(Dash(Regression().parameters, **fresh(options)))
    assert text.startswith("Dash (")
    assert "block_size: " in text


@every_input
def test_every_parameter_has_state_after_a_step(options: dict[str, Any]) -> None:
    model, optimizer = primed(options)
    assert set(optimizer.state) == set(model.parameters)
    assert all(optimizer.state.values())


# --- construction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (lambda p: p, TypeError, "iterable of Tensors or dicts"),
        (lambda p: [], ValueError, "empty parameter list"),
        (lambda p: [1.0], TypeError, "can only optimize Tensors"),
        (lambda p: [p * 2], ValueError, "non-leaf"),
        (lambda p: [{"params": {p}}], TypeError, "ordered collection"),
        (lambda p: [("named", p), nn.Parameter(torch.ones(2))], ValueError, "with/without names"),
        (lambda p: [{"params": [p, p]}], ValueError, "more than once"),
        (lambda p: [{"params": [p]}, {"params": [p]}], ValueError, "more than one"),
    ],
)
def test_what_is_no_list_of_parameters_is_refused(params: Any, error: type[Exception], message: str) -> None:
    given = params(nn.Parameter(torch.randn(3, 2)))
    with pytest.raises(error, match=message):
        Dash(given)


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable", "differentiable", "amsgrad"])
def test_options_of_torchs_optimizers_that_dash_lacks_are_unknown(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        Dash(Regression().parameters, **{option: True})


def test_groups_may_be_empty() -> None:
    model = Regression()
    twin = model.twin()
    optimizer = Dash([{"params": []}, {"params": model.parameters}, {"params": [], "lr": 1.0}])
    model.train(optimizer, 3)
    other = Dash(twin.parameters)
    twin.train(other, 3)
    assert_equal([*map(Tensor.detach, model.parameters)], [*map(Tensor.detach, twin.parameters)])
    again = Dash([{"params": []}, {"params": twin.parameters}, {"params": []}])
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[2]["lr"] == 1.0


def test_defaults_are_those_of_groups_that_are_added_later() -> None:
    optimizer = Dash([nn.Parameter(torch.randn(3, 2))], lr=0.1)
    optimizer.defaults["lr"], optimizer.defaults["block_size"] = 0.2, 7
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(3, 2))]})
    assert [(group["lr"], group["block_size"]) for group in optimizer.param_groups] == [(0.1, 1024), (0.2, 7)]


# --- learning rates that are tensors, and schedulers ------------------------------------------------------------------


@pytest.mark.parametrize("form", [torch.tensor(0.01, dtype=torch.float64), torch.tensor([0.01], dtype=torch.float64)])
@pytest.mark.parametrize("options", [options for options in INPUTS if "lr" not in options], ids=str)
def test_a_learning_rate_may_be_a_tensor(options: dict[str, Any], form: Tensor) -> None:
    model = Regression()
    twin = model.twin()
    lr = form.clone()
    optimizer, other = Dash(model.parameters, lr=lr, **options), Dash(twin.parameters, lr=0.01, **options)
    for rate in (0.01, 0.02, 0.005):
        lr.fill_(rate)
        other.param_groups[0]["lr"] = rate
        model.train(optimizer, 2)
        twin.train(other, 2)
    assert optimizer.param_groups[0]["lr"] is lr
    # A tensor times the update is rounded before it is subtracted, a number need not be.
    torch.testing.assert_close(model.parameters, twin.parameters, rtol=1e-4, atol=1e-5)


def chained(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.ConstantLR(optimizer, 0.5, 3)]
    return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)


def in_sequence(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(optimizer, 5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, 3, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 12),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: SWALR(o, 0.05, 3),
    "SequentialLR": in_sequence,
    "ChainedScheduler": chained,
}


def test_every_scheduler_of_torch_is_tried() -> None:
    abstract = {"LRScheduler"}
    known = {name for name in lr_scheduler.__all__ if name not in abstract}
    assert known | {"SWALR"} == SCHEDULERS.keys()


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_dash_as_they_drive_adamw(name: str, tensor: bool) -> None:
    runs = []
    for kind in (Dash, AdamW):
        torch.manual_seed(0)
        model = Regression()
        options: dict[str, Any] = {"start_step": 1000} if kind is Dash else {}
        lr = torch.tensor(0.05, dtype=torch.float64) if tensor else 0.05
        if tensor and kind is AdamW:
            options["foreach"] = False
        optimizer = kind(model.parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, **options)
        scheduler = SCHEDULERS[name](optimizer)
        rates = []
        for _ in range(8):
            loss = model.train(optimizer, 1)
            scheduler.step(*([loss] if name == "ReduceLROnPlateau" else []))
            rates.append((float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["betas"]))
        saved = scheduler.state_dict()
        again = SCHEDULERS[name](kind(model.twin().parameters, lr=0.05, betas=(0.9, 0.95), **options))
        again.load_state_dict(saved)
        runs.append((rates, model.parameters))
    (mine, ours), (theirs, others) = runs
    torch.testing.assert_close(torch.tensor([rate for rate, _ in mine]), torch.tensor([rate for rate, _ in theirs]))
    assert [betas for _, betas in mine] == [betas for _, betas in theirs]
    torch.testing.assert_close(ours, others, rtol=1e-5, atol=1e-6)


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [(True, True), (True, False), (False, True), (False, False)])
@every_input
def test_a_loaded_state_goes_on_alike_with_names_or_without(options: dict[str, Any], names: tuple[bool, bool]) -> None:
    model, optimizer = primed(options, names[0])
    twin = model.twin()
    other = Dash(twin.named(names[1]), **fresh(options))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(4):
        model.train(optimizer, 1)
        twin.train(other, 1)
        assert_equal([*map(Tensor.detach, model.parameters)], [*map(Tensor.detach, twin.parameters)])
    assert_same_states(optimizer.state_dict(), other.state_dict())
    if any(names):
        assert other.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


@every_input
def test_groups_of_the_same_parameters_are_saved_alike(options: dict[str, Any]) -> None:
    _, optimizer = primed(options)
    once = optimizer.state_dict()["param_groups"]
    optimizer.param_groups.extend(optimizer.param_groups)
    assert optimizer.state_dict()["param_groups"] == [*once, *once]


@every_input
def test_a_saved_state_is_read_back_as_it_was(options: dict[str, Any]) -> None:
    _, optimizer = primed(options)
    state = optimizer.state_dict()
    for weights_only in (True, False):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert_same_states(torch.load(file, weights_only=weights_only), state)
    assert_same_states(pickle.loads(pickle.dumps(state)), state)


@every_input
def test_a_load_leaves_the_state_that_it_is_given_as_it_is(options: dict[str, Any]) -> None:
    model, optimizer = primed(options)
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state)
    other = Dash(model.twin().parameters, **fresh(options))
    other.load_state_dict(state)
    assert_same_states(state, kept)


@every_input
def test_states_without_newer_options_load(options: dict[str, Any]) -> None:
    """Files of older versions lack options; their defaults hold."""
    model, optimizer = primed(options)
    state = copy.deepcopy(optimizer.state_dict())
    newer = (
        "on_nonfinite",
        "sides",
        "split_rows",
        "split_columns",
        "state_dtype",
        "max_workspace",
        "view",
        "precision",
    )
    for group in state["param_groups"]:
        for option in newer:
            del group[option]
    other = Dash(model.parameters, **fresh(options))
    other.load_state_dict(state)
    assert all(option in other.param_groups[0] for option in newer)
    model.train(other, 1)


@every_input
def test_counts_of_a_state_may_be_plain_numbers(options: dict[str, Any]) -> None:
    model, optimizer = primed(options)
    state = copy.deepcopy(optimizer.state_dict())
    for own in state["state"].values():
        own["step"] = own["step"].item()
    optimizer.load_state_dict(state)
    model.train(optimizer, 1)
    assert float(optimizer.state[model.weight]["step"]) == 5


@every_input
def test_copies_have_all_public_attributes(options: dict[str, Any]) -> None:
    _, optimizer = primed(options)

    def public(some: Dash) -> set[str]:
        return {name for name in vars(some) if not name.startswith("_")}

    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert public(twin) == public(optimizer)
        assert_same_states(twin.state_dict(), optimizer.state_dict())


# --- hooks ------------------------------------------------------------------------------------------------------------


def note_in_state(optimizer: Optimizer) -> None:
    optimizer.state["note"] = 1  # type: ignore[index,assignment]


def note_moved(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "noted": state["state"].pop("note", None)}


@every_input
def test_hooks_of_state_dict_run_before_and_after(options: dict[str, Any]) -> None:
    model, optimizer = primed(options)
    after = optimizer.register_state_dict_post_hook(note_moved)
    assert optimizer.state_dict()["noted"] is None
    before = optimizer.register_state_dict_pre_hook(note_in_state)
    state = optimizer.state_dict()
    assert state["noted"] == 1
    assert "note" not in state["state"]
    after.remove()
    assert optimizer.state_dict()["state"]["note"] == 1
    before.remove()
    # What a hook or a user leaves in the state beside the parameters is theirs.
    model.train(optimizer, 2)
    assert optimizer.diagnostics()["skipped"] == 0
    twin = Dash(model.twin().parameters, **fresh(options))
    twin.load_state_dict(optimizer.state_dict())
    assert twin.state["note"] == 1  # type: ignore[index,comparison-overlap]
    copy.deepcopy(optimizer).step()


def test_hooks_of_state_dict_run_in_their_order() -> None:
    _, optimizer = primed({})
    calls: list[int] = []
    for i in (1, 2):
        optimizer.register_state_dict_pre_hook(lambda _, i=i: calls.append(i))
        optimizer.register_state_dict_post_hook(lambda *_, i=i: calls.append(10 * i))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append(0), prepend=True)
    optimizer.register_state_dict_post_hook(lambda *_: calls.append(5), prepend=True)
    optimizer.state_dict()
    assert calls == [0, 1, 2, 5, 10, 20]


def set_lr(_: Optimizer, state: dict[str, Any]) -> None:
    state["param_groups"][0]["lr"] = 0.002


def return_another(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    other = copy.deepcopy(state)
    other["param_groups"][0]["lr"] = 0.003
    return other


@every_input
def test_hooks_of_load_state_dict_run_before_and_after(options: dict[str, Any]) -> None:
    _, optimizer = primed(options)
    state = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(set_lr)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.002
    optimizer.register_load_state_dict_pre_hook(return_another, prepend=True)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.002  # the first hook has become the second
    seen: list[float] = []
    optimizer.register_load_state_dict_pre_hook(return_another)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["lr"]))
    optimizer.load_state_dict(state)
    assert seen == [0.003]


@every_input
def test_hooks_of_the_step_run_until_they_are_removed(options: dict[str, Any]) -> None:
    params = [torch.tensor([1.0, 1.0])]
    optimizer, other = Dash(params, **fresh(options)), SGD(params)
    calls: list[int] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append(0)),
        register_optimizer_step_post_hook(lambda *_: calls.append(5)),
    ]
    for each in (optimizer, other):
        handles.append(each.register_step_pre_hook(lambda *_: calls.append(1)))
        handles.append(each.register_step_post_hook(lambda *_: calls.append(2)))
    for each in (optimizer, other, optimizer):
        each.step()
    assert calls == [0, 1, 2, 5] * 3
    for handle in handles:
        handle.remove()
    optimizer.step()
    other.step()
    assert calls == [0, 1, 2, 5] * 3


def test_a_hook_of_the_step_may_change_its_arguments() -> None:
    model = Regression()
    optimizer = Dash(model.parameters)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o,), {"closure": lambda: 7.0}))
    assert optimizer.step() == 7.0
