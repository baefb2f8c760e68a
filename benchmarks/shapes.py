"""Trains small models whose parameters are no plain square matrices: how Dash reads them, and against AdamW.

    python benchmarks/shapes.py --text PATH [--only lora convolutions strips experts fused] [--seeds 1 2 3]

Each run takes some ten seconds on one thread. Appends one JSON line per run to ``benchmarks/results/shapes.jsonl`` and
skips runs that are there already, as `benchmarks/choices.py` does. ``--table`` prints what docs/choices.md shows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from choices import SEEDS, done, record
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dash_shampoo import Dash, param_groups
from dash_shampoo.train.data import Batches, Corpus, load_corpus
from dash_shampoo.train.llama import Llama, SwiGLU, config_for, cross_entropy
from dash_shampoo.train.optimizers import BETAS, learning_rate
from dash_shampoo.train.settings import Settings

RESULTS = Path(__file__).parent / "results" / "shapes.jsonl"
CPU = torch.device("cpu")


class Task:
    """A model with its data: `loss` of the next batch, and `validate`."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.model = model
        self.steps = steps

    def loss(self) -> Tensor:
        raise NotImplementedError

    def validate(self) -> float:
        raise NotImplementedError


class Language(Task):
    """Bytes of a text to predict."""

    def __init__(
        self, model: nn.Module, corpus: Corpus, seed: int, *, steps: int = 300, batch_size: int = 8, context: int = 64
    ) -> None:
        super().__init__(model, steps)
        self.batches = Batches(corpus.train, batch_size, context, seed)
        held_out = Batches(corpus.validation, 32, context, seed=0)
        self.validation = [held_out.draw(CPU) for _ in range(20)]

    def loss(self) -> Tensor:
        tokens, targets = self.batches.draw(CPU)
        return cross_entropy(self.model(tokens), targets)

    @torch.no_grad()
    def validate(self) -> float:
        return mean(cross_entropy(self.model(tokens), targets).item() for tokens, targets in self.validation)


class Digits(Task):
    """Images of digits, shifted and noisy, to tell apart."""

    def __init__(self, model: nn.Module, seed: int, *, steps: int = 300) -> None:
        from sklearn.datasets import load_digits

        super().__init__(model, steps)
        data = load_digits()
        self.images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
        self.labels = torch.tensor(data.target)
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(0))
        self.training, self.validation = order[:1400], order[1400:]
        self.generator = torch.Generator().manual_seed(seed)

    def loss(self) -> Tensor:
        drawn = torch.randint(len(self.training), (48,), generator=self.generator)
        return self._loss(self.training[drawn], self.generator)

    @torch.no_grad()
    def validate(self) -> float:
        generator = torch.Generator().manual_seed(0)
        return mean(self._loss(self.validation, generator).item() for _ in range(5))

    def _loss(self, chosen: Tensor, generator: torch.Generator) -> Tensor:
        wide = F.pad(self.images[chosen], (1, 1, 1, 1))
        shifts = torch.randint(3, (len(chosen), 2), generator=generator).tolist()
        images = torch.stack([image[:, i : i + 8, j : j + 8] for image, (i, j) in zip(wide, shifts, strict=True)])
        noise = torch.randn(images.shape, generator=generator)
        return F.cross_entropy(self.model(images + 0.25 * noise), self.labels[chosen])


class Adapter(nn.Module):
    """A frozen linear layer and a product of rank 8 beside it (arXiv 2106.09685)."""

    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + 2 * self.up(self.down(x))
        return out


class DepthwiseBlock(nn.Module):
    """A depthwise convolution and two that are pointwise, on a residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, groups=width),
            nn.GroupNorm(1, width),
            nn.Conv2d(width, 2 * width, 1),
            nn.GELU(),
            nn.Conv2d(2 * width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


class Experts(nn.Module):
    """SwiGLU experts in 3-D parameters, of which each token takes two. Some are chosen more rarely than others."""

    def __init__(self, width: int, hidden: int = 64, experts: int = 8, skew: float = 4.0) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.register_buffer("preference", torch.linspace(0, -skew, experts))
        self.gate = nn.Parameter(0.02 * torch.randn(experts, hidden, width))
        self.up = nn.Parameter(0.02 * torch.randn(experts, hidden, width))
        self.down = nn.Parameter(0.02 * torch.randn(experts, width, hidden))
        self.idle = self.calls = 0  # experts without a token, and all, at the steps of training

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = (self.router(tokens) + self.preference).topk(2)
        weights = scores.softmax(-1)
        out = torch.zeros_like(tokens)
        for expert, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down, strict=True)):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            own = tokens[row]
            result = (F.silu(own @ gate.T) * (own @ up.T)) @ down.T
            out = out.index_add(0, row, weights[row, place, None] * result)
            if torch.is_grad_enabled():
                self.calls += 1
                self.idle += len(row) == 0
        return out.view_as(x)


class GPTBlock(nn.Module):
    """Attention and two linear layers as in GPT-2: queries, keys and values come from one fused matrix."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.attention(self.norm(x)).chunk(3, -1)
        )  # (batch, heads, time, size)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.output(y)
        out: Tensor = x + self.narrow(F.gelu(self.wide(self.second_norm(x))))
        return out


class GPT(nn.Module):
    """Tokens (batch, time) to logits (batch, time, 256)."""

    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                last = "output" in name or "narrow" in name
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def tiny(**sizes: Any) -> Llama:
    """The tiny Llama for bytes."""
    return Llama(config_for("tiny", vocabulary=256, layers=2, **sizes))


def replaced(model: nn.Module, kind: type[nn.Module], make: Callable[[Any], nn.Module]) -> nn.Module:
    """The model with another module in the place of each of a kind."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, kind):
                setattr(module, name, make(child))
    return model


@cache
def trained(seed: int) -> dict[str, Tensor]:
    """Weights of the tiny Llama after some steps on Python's source; leaves the random state as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        task = Language(tiny(), load_corpus(None, "bytes", 64), seed)
        fit(task, Dash(param_groups(task.model), lr=5e-3))
    return task.model.state_dict()


def lora(seed: int, text: str) -> Task:
    """Adapters of a model of one text, for another."""
    model = tiny()
    model.load_state_dict(trained(0))
    model.requires_grad_(False)
    replaced(model, nn.Linear, Adapter)
    return Language(model, load_corpus(text, "bytes", 64), seed, steps=200)


def convolutions(seed: int, _: str) -> Task:
    width = 32
    blocks = (DepthwiseBlock(width) for _ in range(3))
    pool = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10))
    return Digits(nn.Sequential(nn.Conv2d(1, width, 3, padding=1), *blocks, *pool), seed)


def strips(seed: int, text: str) -> Task:
    return Language(tiny(), load_corpus(text, "bytes", 64), seed)


def experts(seed: int, text: str) -> Task:
    return Language(replaced(tiny(), SwiGLU, lambda _: Experts(128)), load_corpus(text, "bytes", 64), seed)


def fused(seed: int, text: str) -> Task:
    return Language(GPT(), load_corpus(text, "bytes", 64), seed)


@dataclass(frozen=True)
class Part:
    """A task, and the options of Dash that are compared on it, by a name for the table."""

    task: Callable[[int, str], Task]
    variants: dict[str, dict[str, Any]]
    common: dict[str, Any] = field(default_factory=dict)
    lrs: tuple[float, ...] = (5e-3, 1e-2)


SIDES = {"cut to squares, nearly": {}, "both sides, uncut": {"sides": "both"}}
PARTS = {
    "lora": Part(lora, SIDES),
    "convolutions": Part(convolutions, SIDES, lrs=(1e-2, 2e-2)),
    "strips": Part(strips, SIDES, {"block_size": 112}),
    "experts": Part(experts, {"a stack of matrices": {}, "one matrix": {"stacks": {"view": "matrix"}}}),
    "fused": Part(fused, {"one matrix": {}, "three": {"overrides": {r".*attention\.weight": {"split_rows": 3}}}}),
}


def fit(task: Task, optimizer: Optimizer) -> float:
    """Trains; returns the validation loss at the end."""
    settings = Settings(steps=task.steps, warmup=task.steps // 10)
    scheduler = LambdaLR(optimizer, lambda step: learning_rate(step, settings))
    for _ in range(task.steps):
        optimizer.zero_grad()
        task.loss().backward()
        nn.utils.clip_grad_norm_((p for p in task.model.parameters() if p.requires_grad), 1.0)
        optimizer.step()
        scheduler.step()
    return task.validate()


def make(task: Task, part: Part, name: str, lr: float) -> Optimizer:
    """AdamW, or Dash with a part's variant."""
    if name == "AdamW":
        groups = [{"params": [p for _, p in group["params"]]} for group in param_groups(task.model)]
        return AdamW(groups, lr=lr, betas=BETAS, weight_decay=0.0)
    variant = part.variants[name]
    grouping = {key: variant[key] for key in ("stacks", "overrides") if key in variant}
    options = {key: value for key, value in variant.items() if key not in grouping}
    return Dash(param_groups(task.model, **grouping), lr=lr, **part.common, **options)


def table() -> None:
    """Prints each part's means over seeds and their standard deviation, with the number of seeds."""
    found: defaultdict[tuple[str, str, float], list[float]] = defaultdict(list)
    for line in RESULTS.read_text().splitlines():
        row = json.loads(line)
        found[row["part"], row["variant"], row["lr"]].append(row["loss"])
    for name, part in PARTS.items():
        print(f"\n| {name} | {' | '.join(f'lr {lr:g}' for lr in part.lrs)} |\n|---|{'---|' * len(part.lrs)}")
        for variant in ("AdamW", *part.variants):
            cells = [found[name, variant, lr] for lr in part.lrs]
            shown = [f"{mean(c):.3f} ± {stdev(c) if len(c) > 1 else 0:.3f} ({len(c)})" if c else "" for c in cells]
            print(f"| {variant} | {' | '.join(shown)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", help="the text that the models learn")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        table()
        return
    torch.set_num_threads(arguments.threads)
    known = done(RESULTS)
    for seed in arguments.seeds:
        for name in arguments.only:
            part = PARTS[name]
            for variant in ("AdamW", *part.variants):
                for lr in part.lrs:
                    own = {"part": name, "variant": variant, "lr": lr, "seed": seed}
                    key = json.dumps(own, sort_keys=True)
                    if key in known:
                        continue
                    torch.manual_seed(seed)
                    task = part.task(seed, arguments.text)
                    start = time.perf_counter()
                    loss = fit(task, make(task, part, variant, lr))
                    record(RESULTS, {**own, "loss": loss, "seconds": time.perf_counter() - start, "key": key})
                    print(name, variant, lr, seed, f"{loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
