"""`param_groups` makes the choices one would make by hand, shows them, and lets each be changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dash_shampoo import Dash, describe, param_groups


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.convolution = nn.Conv1d(8, 8, 3)
        self.wide = nn.Linear(8, 30)  # as wide as the vocabulary, but not the last such layer
        self.inner = nn.Linear(30, 8)
        self.experts = nn.Parameter(torch.ones(4, 8, 16))
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 30, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def names(groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {group["name"]: [name for name, _ in group["params"]] for group in groups}


def test_each_kind_of_parameter_is_a_group() -> None:
    assert names(param_groups(Model())) == {
        "matrices": ["wide.weight", "inner.weight"],
        "convolutions": ["convolution.weight"],
        "stacks": ["experts"],
        "embeddings": ["embedding.weight", "head.weight"],
        "vectors": ["scale", "convolution.bias", "wide.bias", "inner.bias", "norm.weight", "norm.bias"],
    }


def test_each_parameter_is_in_one_group() -> None:
    for tied in (False, True):
        model = Model(tied)
        listed = [parameter for group in param_groups(model) for _, parameter in group["params"]]
        assert {id(parameter) for parameter in listed} == {id(parameter) for parameter in model.parameters()}
        assert len(listed) == len(set(map(id, listed)))


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = Model()
    model.convolution.requires_grad_(False)
    assert "convolutions" not in names(param_groups(model))
    assert list(names(param_groups(nn.Linear(3, 3, bias=False)))) == ["matrices"]


def options(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {group["name"]: {k: v for k, v in group.items() if k not in ("name", "params")} for group in groups}


def test_groups_have_options_of_their_own() -> None:
    assert options(param_groups(Model())) == {
        "matrices": {},
        "convolutions": {"view": "matrix"},
        "stacks": {"view": "stack"},
        "embeddings": {"algorithm": "adamw"},
        "vectors": {"weight_decay": 0.0},
    }


def test_every_choice_can_be_changed() -> None:
    groups = param_groups(
        Model(),
        matrices={"weight_decay": 0.1},
        convolutions={"lr": 2.0},
        stacks={"weight_decay": 0.3},
        embeddings={"algorithm": "shampoo", "lr": 1e-3},
        vectors={"weight_decay": 0.2},
        overrides={r"inner\..*": {"lr": 5.0}, r".*\.weight": {}, "experts": {"split_columns": 2}},
    )
    assert options(groups) == {
        r"matrices: inner\..*": {"weight_decay": 0.1, "lr": 5.0},
        r"matrices: .*\.weight": {"weight_decay": 0.1},
        r"convolutions: .*\.weight": {"weight_decay": 0.1, "view": "matrix", "lr": 2.0},
        "stacks: experts": {"weight_decay": 0.3, "view": "stack", "split_columns": 2},
        r"embeddings: .*\.weight": {"algorithm": "shampoo", "lr": 1e-3},
        "vectors": {"weight_decay": 0.2},
        r"vectors: inner\..*": {"weight_decay": 0.2, "lr": 5.0},
        r"vectors: .*\.weight": {"weight_decay": 0.2},
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"outer": {}}, "no trainable parameter's name matches 'outer'"),
        ({"frozen": {}, "head": {}}, "matches 'frozen', 'head'"),  # a module's name is no parameter's
        ({r".*": {}, r"inner\..*": {}}, "only what an earlier override has matched"),
        ({"inner(": {}}, "'inner\\(' is no regular expression: missing \\)"),
    ],
)
def test_an_override_without_an_effect_is_refused(overrides: dict[str, Any], message: str) -> None:
    model = Model()
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    with pytest.raises(ValueError, match=message):
        param_groups(model, overrides=overrides)


def test_groups_carry_names_into_the_optimizer() -> None:
    optimizer = Dash(param_groups(Model()), lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == ["wide.weight", "inner.weight"]
    assert [group["algorithm"] for group in optimizer.param_groups] == [*["shampoo"] * 3, "adamw", "shampoo"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0] * 5


def test_overrides_split_fused_matrices() -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16)
    with torch.device("meta"):
        model = nn.ModuleDict({"gpt2": transformers.GPT2LMHeadModel(config), "attention": nn.MultiheadAttention(8, 2)})
        model["experts"] = nn.ParameterList([torch.empty(4, 24, 8)])  # gate and up
        model["grouped"] = nn.Linear(16, 24, bias=False)  # queries, and fewer keys and values
    splits = {
        r".*c_attn\.weight": {"split_columns": 3},
        r".*in_proj_weight": {"split_rows": 3},
        r"experts\..*": {"split_rows": 2},
        r"grouped\..*": {"split_rows": [16, 4, 4]},
    }
    table = describe(param_groups(model, overrides=splits))
    for line in (
        "2 x gpt2.transformer.h.*.attn.c_attn.weight (32, 96) 3 of 32 x 32 left and right",
        "attention.in_proj_weight (24, 8) 3 of 8 x 8 left and right",
        "grouped.weight (24, 16) 1 of 16 x 16 left and right 8 of 4 x 4 left and right",
        "stack experts.0 (4, 24, 8) 8 of 12 x 8 left and right",
    ):
        assert line in " ".join(table.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_rows": 3}, r"inner\.weight has the shape \(8, 30\): split_rows does not fit"),
        ({"view": "stack"}, r"inner\.weight has the shape \(8, 30\): view='stack' is for three or more dimensions"),
        ({"split_column": 2}, "unknown option 'split_column' in a parameter group; did you mean 'split_columns'"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dash(param_groups(Model(), overrides={r"inner\.weight": options}))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": torch.compile,
    "parallel": nn.DataParallel,
    "compiled, then parallel": lambda model: nn.DataParallel(torch.compile(model)),
    "parallel, then compiled": lambda model: torch.compile(nn.DataParallel(model)),
    "checkpointed": checkpoint_wrapper,
}


@pytest.mark.parametrize("inner", WRAPPERS)
@pytest.mark.parametrize("outer", WRAPPERS)
def test_names_are_those_of_the_bare_model(outer: str, inner: str) -> None:
    def model() -> nn.Module:
        model = nn.Module()
        model.first, model.module = nn.Linear(3, 3), nn.Linear(3, 3)  # a name that is no wrapper's here
        return model

    wrapped = model()
    wrapped.first = WRAPPERS[inner](wrapped.first)
    groups = param_groups(WRAPPERS[outer](wrapped), overrides={r"first\.weight": {"lr": 1.0}})
    assert names(groups) == names(param_groups(model(), overrides={r"first\.weight": {"lr": 1.0}}))
