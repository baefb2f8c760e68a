"""What the processes of the tests train."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from dash_shampoo.train.command import go_on
from dash_shampoo.train.loop import Trainer, train
from dash_shampoo.train.processes import launched
from dash_shampoo.train.settings import Settings

SETTINGS: dict[str, Any] = {
    "layers": 2,
    "width": 16,
    "heads": 2,
    "hidden": 24,
    "context": 8,
    "batch_size": 12,
    "accumulate": 2,
    "warmup": 2,
    "steps": 8,
    "eval_every": 4,
    "eval_batches": 2,
    "threads": 1,
    "device": "cpu",
    "options": {"block_size": 8, "update_every": 2},
}
TEXT = "the quick brown fox jumps over the lazy dog. " * 40


def settings(folder: str, **changes: Any) -> Settings:
    return Settings(**{**SETTINGS, "data": f"{folder}/text.txt", **changes})


def start(folder: str, run: str, changes: dict[str, Any]) -> float:
    """Trains in a new folder; returns the last validation loss."""
    _, result = train(settings(folder, **changes), None, Path(folder) / run, Console(quiet=True), launched())
    return result.after


def resume(folder: str, run: str, changes: dict[str, Any]) -> float:
    """Goes on with a run, of which only what concerns the machines changes."""
    earlier, own = go_on(Path(folder) / run, changes)
    _, result = train(own, earlier, None, Console(quiet=True), launched())
    return result.after


def stop_early(folder: str, run: str, changes: dict[str, Any]) -> int:
    """Trains until a signal that comes to one process in the fourth step; returns the steps that have been taken."""
    step = Trainer.train_step

    def interrupted(trainer: Trainer) -> float:
        if trainer.step == 3 and (not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1):
            trainer.signals.append(15)
        return step(trainer)

    Trainer.train_step = interrupted  # type: ignore[method-assign]
    try:
        _, result = train(settings(folder, **changes), None, Path(folder) / run, Console(quiet=True), launched())
    finally:
        Trainer.train_step = step  # type: ignore[method-assign]
    assert result.interrupted
    return result.tokens // (SETTINGS["batch_size"] * SETTINGS["accumulate"] * SETTINGS["context"])


def gradients_agree(folder: str, strategy: str, last: bool) -> bool:
    """Whether a backward pass on this process's share has left every process the same gradients of the embedding."""
    trainer = Trainer(settings(folder, strategy=strategy), launched())
    tokens, targets = trainer.batches.draw(trainer.device)
    with trainer.held.reducing(last):
        torch.nn.functional.cross_entropy(trainer.held.module(tokens).flatten(0, 1), targets.flatten()).backward()
    gradient = trainer.model.embedding.weight.grad
    if gradient is None:  # fully_shard keeps what has not been reduced to itself
        return False
    own = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    largest = own.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return torch.equal(own, largest)


def norm_and_diagnostics(folder: str, changes: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """The gradient's norm that the first step clips by, and the diagnostics after it."""
    trainer = Trainer(settings(folder, clip=0.1, log_optimizer=True, **changes), launched())
    norms: list[Any] = []
    clip = nn.utils.clip_grad_norm_
    with mock.patch.object(nn.utils, "clip_grad_norm_", lambda *arguments: norms.append(clip(*arguments))):
        trainer.train_step()
    norm = norms[0].full_tensor() if hasattr(norms[0], "full_tensor") else norms[0]
    return norm.item(), trainer.diagnostics()


def mistake(folder: str, changes: dict[str, Any], different_texts: bool) -> str:
    """The error that a run with these settings ends with."""
    name = "other.txt" if different_texts and dist.get_rank() else "text.txt"
    own = settings(folder, **{**changes, "data": f"{folder}/{name}"})
    try:
        train(own, None, Path(folder) / "run", Console(quiet=True), launched())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"
