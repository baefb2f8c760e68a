"""Any shape: state and roots bounded by the block, stacks of matrices and fused matrices as parameters of their own."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dash_shampoo import Dash
from dash_shampoo.layout import cut, layout
from tests.test_optimizer import give_gradients, parameters

SHAPES = st.one_of(
    st.lists(st.integers(1, 5000), min_size=2, max_size=2),
    st.lists(st.integers(1, 40), min_size=0, max_size=5),
    st.tuples(st.integers(1, 16), st.integers(1, 3000), st.integers(1, 3000)).map(list),
    st.tuples(st.integers(1, 3000), st.integers(1, 64), st.integers(1, 7), st.integers(1, 7)).map(list),
)


def meta(shape: list[int] | tuple[int, ...]) -> Tensor:
    return torch.empty(tuple(shape), device="meta")


def options(**given: Any) -> dict[str, Any]:
    return Dash(parameters([(2,)]), **given).param_groups[0]


@given(
    shape=SHAPES,
    block_size=st.integers(1, 2048),
    view=st.sampled_from(["auto", "matrix", "stack"]),
    grafting=st.sampled_from(["adam", "sgd"]),
)
@settings(max_examples=300)
def test_state_and_roots_are_bounded_for_every_shape(
    shape: list[int], block_size: int, view: str, grafting: str
) -> None:
    group = {**options(block_size=block_size, grafting=grafting), "view": view}
    elements = sum(
        prod(each) for name, each in layout(meta(shape), group).items() if "." in name and not name.endswith("failed")
    )
    vector = grafting == "sgd" and len(shape) > 1 and max(shape) == prod(shape)  # AdamW has a statistic all the same
    assert elements <= (4.5 if grafting == "adam" or vector else 3.5) * prod(shape)
    for key, _, _ in cut(meta(shape), group):
        assert key.weight <= 2.5 * prod(key.block)
        assert all(factor.size <= block_size for factor in key.factors.values())


@pytest.mark.parametrize(
    "shape",
    [(8, 4096), (4096, 16), (16, 768), (1, 4096), (512, 1, 3, 3), (64, 3, 7, 7), (8, 14336, 4096), (1, 1, 32), (1, 1)],
)
def test_state_is_at_most_four_and_a_half_times_the_parameter(shape: tuple[int, ...]) -> None:
    assert sum(prod(each) for name, each in layout(meta(shape), options()).items() if "." in name) <= 4.51 * prod(shape)


def test_the_papers_rule_preconditions_both_sides_of_every_block() -> None:
    group = Dash.paper(parameters([(2,)])).param_groups[0]
    for shape in ((8, 4096), (3, 5, 7), (1, 6), (5, 1)):
        keys = [key for key, _, _ in cut(meta(shape), group)]
        assert [(key.left.size, key.right.size) for key in keys if key.left and key.right] == [
            key.block for key in keys
        ]
    assert [tile.grid[0] for _, tile, _ in cut(meta((3, 5, 7)), group)] == [1]


def trained(params: list[nn.Parameter], gradients: list[list[Tensor]], **given: Any) -> list[Tensor]:
    """The parameters after a step with each list of gradients."""
    optimizer = Dash(params, **given)
    for own in gradients:
        for parameter, gradient in zip(params, own, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in params]


OPTIONS: dict[str, Any] = {"lr": 0.1, "update_every": 2, "weight_decay": 0.1, "damping": 1e-3}


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(1, 20)),
    lead=st.sampled_from([(), (2,)]),
    block_size=st.integers(1, 12),
    own=st.sampled_from(
        [{}, {"momentum": 0.9}, {"state_dtype": "bf16"}, {"algorithm": "adamw"}, {"vectors": "shampoo"}]
    ),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(max_examples=40, deadline=None)
def test_a_stack_moves_as_its_matrices_would_by_themselves(
    shape: tuple[int, int, int], lead: tuple[int, ...], block_size: int, own: dict[str, Any], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(*lead, *shape, generator=generator).to(dtype) for _ in range(4))
    common: dict[str, Any] = {**OPTIONS, **own, "block_size": block_size}
    (stack,) = trained([nn.Parameter(start.clone())], [[each] for each in gradients], view="stack", **common)
    alone = trained(
        [nn.Parameter(each.clone()) for each in start.flatten(0, -3)],
        [list(each.flatten(0, -3)) for each in gradients],
        **common,
    )
    assert torch.equal(stack.flatten(0, -3), torch.stack(alone))


@pytest.mark.parametrize("depth", [(), (3,)])
@pytest.mark.parametrize(
    ("split", "lengths", "dim"),
    [({"split_columns": 3}, [8, 8, 8], -1), ({"split_rows": (4, 2, 6)}, [4, 2, 6], -2)],
    ids=["columns", "rows"],
)
def test_fused_matrices_move_as_they_would_by_themselves(
    depth: tuple[int, ...], split: dict[str, Any], lengths: list[int], dim: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(*depth, 12, 24, generator=generator) for _ in range(4))
    (fused,) = trained([nn.Parameter(start.clone())], [[each] for each in gradients], **OPTIONS, **split)
    parts = trained(
        [nn.Parameter(each.clone()) for each in start.split(lengths, dim)],
        [[each.contiguous() for each in gradient.split(lengths, dim)] for gradient in gradients],
        **OPTIONS,
    )
    assert torch.equal(fused, torch.cat(parts, dim))
    (whole,) = trained([nn.Parameter(start.clone())], [[each] for each in gradients], **OPTIONS)
    assert not torch.allclose(fused, whole)


def test_an_experts_gradient_does_not_move_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(4, 16, 8, generator=generator) for _ in range(2))
    louder = gradient.clone()
    louder[1] *= 1e6
    (plain,), (loud,) = (trained([nn.Parameter(start.clone())], [[each]] * 3, **OPTIONS) for each in (gradient, louder))
    others = [0, 2, 3]
    assert torch.equal(plain[others], loud[others])
    assert not torch.equal(plain[1], start[1])


@pytest.mark.parametrize(
    ("shape", "given_options", "words"),
    [
        ((8, 4), {"view": "stack"}, "three or more dimensions"),
        ((8,), {"view": "stack"}, "three or more dimensions"),
        ((8, 4), {"view": "experts"}, "unknown view 'experts'"),
        ((8, 4), {"sides": "left"}, "unknown sides 'left'"),
        ((8, 4), {"split_rows": 3}, "8 does not divide into 3 equal parts"),
        ((8, 4), {"split_columns": (3, 2)}, "does not make 4"),
        ((8, 4), {"split_columns": 0}, "positive integer"),
        ((8, 4), {"split_rows": "3"}, "positive integer"),
        ((8, 4), {"split_rows": (8, 0)}, "positive integer"),
        ((2, 8, 4), {"split_rows": 3}, "8 does not divide into 3 equal parts"),
    ],
)
def test_a_reading_that_does_not_fit_is_refused_by_name(
    shape: tuple[int, ...], given_options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        Dash([("weight", nn.Parameter(torch.zeros(shape)))], **given_options)
    assert words in str(caught.value)
    optimizer = Dash(parameters([(2, 2)]))
    with pytest.raises(ValueError, match=r"\w"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(shape))], **given_options})
    assert len(optimizer.param_groups) == 1


def test_a_state_of_both_sides_is_refused_where_the_short_side_is_preconditioned() -> None:
    params = parameters([(3, 40)], torch.float32)
    both = Dash(params, sides="both")
    give_gradients(params, 0)
    both.step()
    state = both.state_dict()
    state["param_groups"][0].pop("sides")  # as earlier files are
    optimizer = Dash(parameters([(3, 40)], torch.float32))
    with pytest.raises(ValueError, match="sides='both'"):
        optimizer.load_state_dict(state)
