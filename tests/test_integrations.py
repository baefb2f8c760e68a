"""Libraries that make the optimizer themselves make Dash, with the groups of `param_groups`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dash_shampoo import Dash, param_groups
from dash_shampoo.integrations import DashFactory, register_timm


def algorithms(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {str(group["name"]): str(group["algorithm"]) for group in optimizer.param_groups}


def test_the_trainer_of_transformers_makes_dash_and_resumes_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}

    def trainer() -> Any:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, save_steps=2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
        )
        data = [{"input_ids": (tokens := (torch.arange(8) + i) % 32), "labels": tokens} for i in range(32)]
        options = {"lr": 1e-2, "weight_decay": 0.1}
        return transformers.Trainer(
            model, arguments, train_dataset=data, optimizer_cls_and_kwargs=(DashFactory, options)
        )

    whole, resumed = trainer(), trainer()
    whole.train()
    optimizer = getattr(whole.optimizer, "optimizer", whole.optimizer)
    assert isinstance(optimizer, Dash)
    assert algorithms(optimizer)["embeddings"] == "adamw"
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_timm_makes_dash_by_its_name() -> None:
    optim = pytest.importorskip("timm.optim", exc_type=ImportError)
    register_timm()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(4))
    model(torch.ones(1, 3, 5, 5).expand(2, -1, -1, -1))
    optimizer = optim.create_optimizer_v2(
        model, "dash", lr=5e-3, weight_decay=0.05, betas=(0.9, 0.98), eps=1e-8, param_group_fn=param_groups
    )
    assert isinstance(optimizer, Dash)
    assert set(algorithms(optimizer)) == {"convolutions", "matrices", "vectors"}
    assert {group["name"]: group["weight_decay"] for group in optimizer.param_groups}["vectors"] == 0
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.98)


def test_a_name_that_timm_would_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="underscores"):
        register_timm("dash_shampoo")
