"""`param_groups` makes the choices one would make by hand, shows them, and lets each be changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dash_shampoo import Dash, param_groups


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.convolution = nn.Conv1d(8, 8, 3)
        self.wide = nn.Linear(8, 30)  # as wide as the vocabulary, but not the last such layer
        self.inner = nn.Linear(30, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 30, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def names(groups: list[dict[str, object]]) -> dict[str, list[str]]:
    return {str(group["name"]): [name for name, _ in group["params"]] for group in groups}  # type: ignore[attr-defined]


def test_matrices_embeddings_with_head_and_vectors() -> None:
    assert names(param_groups(Model())) == {
        "matrices": ["convolution.weight", "wide.weight", "inner.weight"],
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
    assert "convolution.weight" not in names(param_groups(model))["matrices"]
    assert list(names(param_groups(nn.Linear(3, 3, bias=False)))) == ["matrices"]


def test_every_choice_can_be_changed() -> None:
    groups = param_groups(
        Model(),
        matrices={"weight_decay": 0.1},
        embeddings={"algorithm": "shampoo", "lr": 1e-3},
        vectors={"weight_decay": 0.2},
        overrides={r"inner\..*": {"lr": 5.0}, r"wide\.weight": {"algorithm": "adamw"}},
    )
    options = {group["name"]: {k: v for k, v in group.items() if k not in ("name", "params")} for group in groups}
    assert options == {
        "matrices": {"weight_decay": 0.1},
        "embeddings": {"algorithm": "shampoo", "lr": 1e-3},
        "vectors": {"weight_decay": 0.2},
        r"matrices: inner\..*": {"weight_decay": 0.1, "lr": 5.0},
        r"vectors: inner\..*": {"weight_decay": 0.2, "lr": 5.0},
        r"matrices: wide\.weight": {"weight_decay": 0.1, "algorithm": "adamw"},
    }
    with pytest.raises(ValueError, match="no parameter's name matches 'outer'"):
        param_groups(Model(), overrides={"outer": {}})


def test_groups_carry_names_into_the_optimizer() -> None:
    optimizer = Dash(param_groups(Model()), lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == ["convolution.weight", "wide.weight", "inner.weight"]
    assert [group["algorithm"] for group in optimizer.param_groups] == ["shampoo", "adamw", "shampoo"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0, 0.0]
