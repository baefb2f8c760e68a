"""The step equals the paper's algorithm, and with Shampoo asleep it equals torch's own optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dash_shampoo import Dash
from tests.reference import Reference

SHAPES = [
    (),
    (1,),
    (5,),
    (8, 8),
    (12, 8),
    (7, 19),
    (1, 3),
    (3, 1),
    (4, 3, 2, 2),
    (3, 2, 2, 2, 2),
    (0,),
    (0, 4),
]


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes
    ]


def give_gradients(params: list[torch.nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in params:
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
        parameter.grad = torch.empty_like(parameter).copy_(gradient)


def run_against_reference(
    params: list[torch.nn.Parameter],
    steps: int,
    give: Callable[[list[torch.nn.Parameter], int], None] = give_gradients,
    **options: Any,
) -> list[tuple[Tensor, Tensor]]:
    optimizer = Dash(params, **options)
    references = [Reference(parameter, **optimizer.param_groups[0]) for parameter in params]
    for step in range(steps):
        give(params, step)
        optimizer.step()
        for parameter, reference in zip(params, references, strict=True):
            reference.step(parameter.grad)
    return [(parameter.detach(), reference.W) for parameter, reference in zip(params, references, strict=True)]


@pytest.mark.parametrize("update_every", [1, 3])
@pytest.mark.parametrize("grafting", ["none", "sgd", "adagrad", "rmsprop", "adam"])
def test_step_equals_the_papers_algorithm(grafting: str, update_every: int) -> None:
    pairs = run_against_reference(
        parameters(SHAPES),
        steps=7,
        lr=0.1,
        solver="eigh",
        block_size=5,
        damping=1e-3,
        grafting=grafting,
        update_every=update_every,
        weight_decay=0.1,
    )
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@given(
    betas=st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.9, 0.99])),
    block_size=st.integers(1, 9),
    root=st.sampled_from([None, 1, 2, 3, 4]),
    vectors=st.sampled_from(["adamw", "shampoo"]),
    momentum=st.sampled_from([(0.0, False), (0.8, False), (0.8, True)]),
    start_step=st.integers(1, 4),
    bias_correction=st.booleans(),
    maximize=st.booleans(),
    graft_beta2=st.sampled_from([None, 0.7]),
    algorithm=st.sampled_from(["shampoo", "shampoo", "adamw"]),
    weight_decay=st.sampled_from([0.0, 0.1]),
)
def test_every_option_means_what_the_reference_says(
    betas: tuple[float, float], momentum: tuple[float, bool], **options: Any
) -> None:
    pairs = run_against_reference(
        parameters(SHAPES),
        steps=5,
        lr=0.1,
        betas=betas,
        momentum=momentum[0],
        nesterov=momentum[1],
        solver="eigh",
        damping=1e-2,
        epsilon=1e-3,
        update_every=2,
        **options,
    )
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7)


# When the first gradient of a parameter comes, and what there is before.
NEVER = 100
COMINGS = st.tuples(st.sampled_from([0, 0, 1, 2, NEVER]), st.sampled_from(["zero", "none"]))


@given(
    comings=st.lists(COMINGS, min_size=len(SHAPES), max_size=len(SHAPES)),
    parts=st.lists(st.tuples(*[st.sampled_from([0, 0, 3, NEVER])] * 4), min_size=len(SHAPES), max_size=len(SHAPES)),
    block_size=st.sampled_from([3, 5, 16]),
    grafting=st.sampled_from(["adam", "rmsprop", "adagrad", "sgd", "none"]),
    graft_eps=st.sampled_from([0.0, 1e-8]),
    update_every=st.sampled_from([1, 2, 4, 50]),
    bias_correction=st.booleans(),
    vectors=st.sampled_from(["adamw", "shampoo"]),
    momentum=st.sampled_from([0.0, 0.8]),
)
def test_blocks_and_parameters_without_gradients_move_as_the_reference_says(
    comings: list[tuple[int, str]], parts: list[tuple[int, ...]], **options: Any
) -> None:
    """Quarters of a parameter, and parameters, get gradients late or never; without ``graft_eps`` that is 0 / 0."""

    def give(params: list[torch.nn.Parameter], step: int) -> None:
        give_gradients(params, step)
        for parameter, (first, before), quarters in zip(params, comings, parts, strict=True):
            if step < first:
                parameter.grad = None if before == "none" else torch.zeros_like(parameter)
            elif parameter.ndim > 1:
                for quarter, part in zip(quarters_of(parameter.grad), quarters, strict=True):
                    if step < part:
                        quarter.zero_()

    pairs = run_against_reference(
        parameters(SHAPES), steps=6, give=give, lr=0.1, solver="eigh", damping=1e-2, weight_decay=0.1, **options
    )
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7)


def quarters_of(gradient: Tensor) -> list[Tensor]:
    return [quarter for half in gradient.tensor_split(2) for quarter in half.tensor_split(2, dim=1)]


@pytest.mark.parametrize("solver", ["minimax", "newton-db", "coupled-newton", "eigh"])
@pytest.mark.parametrize("precision", ["fp32", "mixed"])
@pytest.mark.parametrize("root", [2, 4])
def test_float32_step_is_near_the_float64_reference(solver: str, root: int, precision: str) -> None:
    pairs = run_against_reference(
        parameters([(40, 24), (33, 65)], torch.float32),
        steps=4,
        lr=0.1,
        solver=solver,
        root=root,
        block_size=32,
        damping=1e-3,
        precision=precision,
    )
    for got, expected in pairs:
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=4e-3 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize(
    ("grafting", "ours", "theirs"),
    [
        ("sgd", {"betas": (0.0, 0.9)}, lambda p: torch.optim.SGD(p, lr=0.1)),
        ("sgd", {"betas": (0.0, 0.9), "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (
            "sgd",
            {"betas": (0.0, 0.9), "momentum": 0.9, "nesterov": True},
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        ),
        ("adagrad", {"betas": (0.0, 0.9), "graft_eps": 1e-10}, lambda p: torch.optim.Adagrad(p, lr=0.1)),
        ("rmsprop", {"betas": (0.0, 0.99)}, lambda p: torch.optim.RMSprop(p, lr=0.1)),
        (
            "adam",
            {"betas": (0.9, 0.5), "graft_beta2": 0.999, "weight_decay": 0.1},
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_before_start_step_the_grafted_method_runs_alone(
    grafting: str, ours: Any, theirs: Any, dtype: torch.dtype
) -> None:
    shapes = [(7, 9), (12, 5), (4, 3, 2, 2)]
    mine, other = parameters(shapes, dtype), parameters(shapes, dtype)
    optimizer = Dash(mine, lr=0.1, grafting=grafting, start_step=1000, block_size=4, **ours)
    peer = theirs(other)
    for step in range(20):
        give_gradients(mine, step)
        give_gradients(other, step)
        optimizer.step()
        peer.step()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for got, expected in zip(mine, other, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("algorithm", ["adamw", "shampoo"])
def test_adamw_groups_and_vectors_equal_torch_adamw(algorithm: str) -> None:
    shapes = [(7, 9), (11,), ()] if algorithm == "adamw" else [(11,), (), (1,)]
    mine, other = parameters(shapes, torch.float32), parameters(shapes, torch.float32)
    optimizer = Dash(mine, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, algorithm=algorithm)
    peer = torch.optim.AdamW(other, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(20):
        give_gradients(mine, step)
        give_gradients(other, step)
        optimizer.step()
        peer.step()
    for got, expected in zip(mine, other, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grafting", ["sgd", "adagrad", "rmsprop", "adam"])
def test_each_block_has_the_grafted_norm(grafting: str) -> None:
    shapes = [(9, 7)]
    shampoo, alone = parameters(shapes), parameters(shapes)
    preconditioned = Dash(shampoo, lr=1.0, grafting=grafting, block_size=4, solver="eigh")
    grafted = Dash(alone, lr=1.0, grafting=grafting, block_size=4, start_step=1000)
    for step in range(5):
        before = [shampoo[0].detach().clone(), alone[0].detach().clone()]
        give_gradients(shampoo, step)
        give_gradients(alone, step)
        preconditioned.step()
        grafted.step()
        ours, theirs = shampoo[0].detach() - before[0], alone[0].detach() - before[1]
        assert not torch.allclose(ours, theirs, rtol=0.1)
        for rows in (slice(0, 4), slice(4, 8), slice(8, 9)):
            for columns in (slice(0, 4), slice(4, 7)):
                torch.testing.assert_close(ours[rows, columns].norm(), theirs[rows, columns].norm(), rtol=1e-9, atol=0)


def storage_variants(weight: Tensor) -> list[Tensor]:
    """The same 4-D values in other memory layouts."""
    return [
        weight.clone(),
        weight.clone(memory_format=torch.channels_last),
        weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    ]


def test_memory_layout_does_not_matter() -> None:
    weight = torch.randn(6, 4, 3, 2)
    results = []
    for variant in storage_variants(weight):
        parameter = torch.nn.Parameter(variant)
        strides = parameter.stride()
        optimizer = Dash([parameter], lr=0.1, block_size=5, weight_decay=0.1)
        for step in range(3):
            give_gradients([parameter], step)
            optimizer.step()
        assert parameter.stride() == strides
        results.append(parameter.detach().contiguous())
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=0, atol=0)


def test_transposed_matrix_storage() -> None:
    straight = torch.nn.Parameter(torch.randn(6, 9))
    transposed = torch.nn.Parameter(straight.detach().t().contiguous().t())
    for parameter in (straight, transposed):
        optimizer = Dash([parameter], lr=0.1, block_size=4)
        for step in range(3):
            give_gradients([parameter], step)
            optimizer.step()
    torch.testing.assert_close(straight, transposed, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_keep_float32_state(dtype: torch.dtype) -> None:
    params = parameters([(9, 7), (5,)], dtype)
    exact = parameters([(9, 7), (5,)], dtype)
    exact = [torch.nn.Parameter(parameter.detach().double()) for parameter in exact]
    optimizer, reference = Dash(params, lr=0.01, block_size=4), Dash(exact, lr=0.01, block_size=4)
    for step in range(3):
        give_gradients(params, step)
        for parameter, twin in zip(params, exact, strict=True):
            twin.grad = parameter.grad.double()
        optimizer.step()
        reference.step()
    for state in optimizer.state.values():
        tensors = [value for value in state.values() if isinstance(value, Tensor) and value.is_floating_point()]
        assert all(value.dtype == torch.float32 for value in tensors)
    for got, expected in zip(params, exact, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=2e-2, atol=2e-2)


class CountOperations(TorchDispatchMode):
    """Counts dispatched operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


# Addressing blocks inside parameters, gradients and stacks: no arithmetic, part of the copies in and out.
VIEWS = {"aten::view", "aten::as_strided", "aten::split_with_sizes", "aten::_unsafe_view", "aten::detach"}


def operations_of_a_step(layers: int, **options: Any) -> dict[str, int]:
    shapes = [shape for _ in range(layers) for shape in [(16, 16), (16, 40), (16,)]]
    params = parameters(shapes, torch.float32)
    optimizer = Dash(params, block_size=16, weight_decay=0.1, **options)
    for step in range(2):
        give_gradients(params, step)
        with CountOperations() as mode:
            optimizer.step()
    return mode.counts


@pytest.mark.parametrize("solver", ["minimax", "newton-db", "coupled-newton", "chebyshev", "eigh"])
def test_operations_do_not_grow_with_the_number_of_layers(solver: str) -> None:
    few, many = operations_of_a_step(4, solver=solver), operations_of_a_step(16, solver=solver)
    arithmetic = [{name: count for name, count in counts.items() if name not in VIEWS} for counts in (few, many)]
    assert arithmetic[0] == arithmetic[1]
    assert sum(many.values()) - sum(few.values()) <= 12 * 30


@pytest.mark.parametrize("layers", [4, 16, 64])
def test_a_step_without_roots_takes_few_calls(layers: int) -> None:
    params = parameters([(32, 32)] * layers, torch.float32)
    optimizer = Dash(params, block_size=8, update_every=100)
    for step in range(3):
        give_gradients(params, step)
        with CountOperations() as mode:
            optimizer.step()
    assert sum(mode.counts.values()) <= 120


class ForbidSynchronisation(CountOperations):
    """Fails on operations that make the host wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        assert name not in {
            "aten::_local_scalar_dense",
            "aten::nonzero",
            "aten::is_nonzero",
            "aten::equal",
        }, name
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("solver", ["minimax", "newton-db", "coupled-newton", "chebyshev"])
def test_no_host_synchronisation_in_a_step(solver: str) -> None:
    params = parameters([(16, 16), (16, 40), (16,)], torch.float32)
    optimizer = Dash(params, lr=torch.tensor(0.1), block_size=16, weight_decay=0.1, solver=solver, vectors="shampoo")
    for step in range(3):
        give_gradients(params, step)
        with ForbidSynchronisation():
            optimizer.step()


def test_paper_preset_is_the_papers_configuration() -> None:
    optimizer = Dash.paper(parameters([(4, 4)]))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.9, 0.95), 0.0)
    assert (group["solver"], group["epsilon"], group["damping"]) == ("newton-db-paper", 1e-10, 0.0)
    assert (group["block_size"], group["update_every"], group["root"], group["momentum"]) == (
        1024,
        1,
        None,
        0.0,
    )


@pytest.mark.parametrize("grafting", ["sgd", "none"])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_an_update_never_aliases_the_state(grafting: str, lr: Any) -> None:
    """Without bias correction the grafted step is the mean gradient itself; weight decay and lr act in place."""
    params = parameters([(6, 5)])
    options: dict[str, Any] = {"start_step": 100} if grafting == "sgd" else {}
    optimizer = Dash(params, lr, grafting=grafting, bias_correction=False, weight_decay=0.5, block_size=4, **options)
    expected = torch.zeros(6, 5, dtype=torch.float64)
    for step in range(3):
        give_gradients(params, step)
        expected = 0.9 * expected + 0.1 * params[0].grad
        optimizer.step()
    torch.testing.assert_close(optimizer.state[params[0]]["tile0.moment"][0], expected[:4, :4], rtol=1e-12, atol=1e-12)
