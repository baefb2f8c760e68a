"""Dash in modded-nanogpt's "track 3 optimization": the fewest steps to a validation loss of 3.28, whatever they cost.

    torchrun --standalone --nproc-per-node 8 benchmarks/track3.py --seed 0   # on 1, 2, 4 or 8 GPUs, with the same batch
    python benchmarks/track3.py --judge runs/track3/*.txt                    # do the runs of all seeds reach the loss?
    python benchmarks/track3.py --toy                                        # the same code, tiny, on made-up data

The rules are in records/track_3_optimization of github.com/KellerJordan/modded-nanogpt, whose data/cached_fineweb10B.py
fetches the shards. A log holds this script with the library in comments, a program that repeats the run, then a line of
"=" and the losses.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from track3_log import RULER, judge, program

from dash_shampoo import Dash, describe, param_groups
from dash_shampoo.train.errors import InputError
from dash_shampoo.train.processes import Processes, join, pick_device
from dash_shampoo.train.settings import parse_option

# AdamW's rates for what is no hidden matrix, of the track's tuned baseline (its result 36).
ADAMW = {"algorithm": "adamw", "betas": (0.8, 0.95), "graft_eps": 1e-10, "weight_decay": 0.001}
EMBEDDING, HEAD, VECTORS = 0.7, 0.004, 0.015

FETCH = "modded-nanogpt's data/cached_fineweb10B.py fetches them, 190 steps a shard"


@dataclass(frozen=True)
class Shape:
    """The model and the batch; the defaults are the track's, and its rules fix them."""

    vocabulary: int = 50304
    layers: int = 12
    width: int = 768
    head: int = 128
    sequence: int = 1024
    batch: int = 512  # sequences of a step, over all processes
    validation: int = 20 * 512  # sequences, the first of the validation shards
    every: int = 125  # steps between validations, 25 in the last tenth


TOY = Shape(64, layers=2, width=32, head=16, sequence=32, batch=16, validation=32, every=10)


# --- Data ---
def read_shard(path: str | Path) -> np.ndarray[Any, Any]:
    """The tokens (n,), uint16, of a shard: 256 int32, of which the first are 20240520, 1 and n, then the tokens."""
    with open(path, "rb") as file:
        header = np.fromfile(file, "<i4", 256)
        if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
            raise InputError(f"{path} is no shard of tokens: {FETCH}")
        tokens = np.fromfile(file, "<u2", header[2])
    if len(tokens) != header[2]:
        raise InputError(f"{path} is cut short: {len(tokens)} tokens, not {header[2]}: {FETCH}")
    return tokens


def write_shard(path: Path, tokens: np.ndarray[Any, Any]) -> None:
    """Writes what `read_shard` reads."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def shards(pattern: str, tokens: int, steps: int) -> list[str]:
    """The names of shards in their order, which hold at least ``steps`` batches of ``tokens``."""
    files = sorted(glob(pattern))
    found = sum(max(0, os.path.getsize(file) // 2 - 512 - 2) // tokens for file in files)
    if found < steps:
        raise InputError(f"{len(files)} shards named {pattern} hold {found} batches of {steps}: {FETCH}")
    return files


def batches(files: list[str], sequences: int, length: int, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The tokens in order, in batches: a process's inputs and targets, each int64 (sequences / size, length).

    As in the track, no batch goes over the end of a shard: what is left there is not used.
    """
    step, own = sequences * length, sequences * length // size
    for file in files:
        tokens = read_shard(file)
        for start in range(rank * own, len(tokens) - 1 - step + rank * own, step):
            part = torch.from_numpy(tokens[start : start + own + 1].astype(np.int64))
            yield part[:-1].view(-1, length), part[1:].view(-1, length)


def write_toy(folder: Path, shape: Shape) -> None:
    """Shards of sequences that are learnt in no time: each token is one or two above the last, in a circle."""
    generator = np.random.default_rng(0)
    for name, length in (("train_0", 15_000), ("train_1", 40_000), ("val_0", 2_000)):
        tokens = generator.integers(1, 3, length).cumsum() % shape.vocabulary
        write_shard(folder / f"toy_{name}.bin", tokens)


# --- Model ---
class Linear(nn.Linear):
    """A linear layer that works in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.type_as(x), self.bias.type_as(x))


class RMSNorm(nn.Module):
    """The root mean square norm, with gains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gains.shape, self.gains.type_as(x))


class Attention(nn.Module):
    """Causal attention with normed queries and keys, of which half the pairs of entries turn with the position."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.head
        self.query, self.key, self.value, self.out = (Linear(shape.width, shape.width) for _ in range(4))
        fast = (1 / 1024) ** torch.linspace(0, 1, shape.head // 4)
        angles = torch.outer(torch.arange(shape.sequence).float(), torch.cat([fast, torch.zeros_like(fast)]))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        """Heads (n, heads, length, head) of norm 1, turned by the angles of their positions."""
        first, second = F.rms_norm(x, (self.head,)).float().chunk(2, dim=-1)
        pair = (first * self.cosine + second * self.sine, second * self.cosine - first * self.sine)
        return torch.cat(pair, dim=-1).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(
            self.turned(heads[0]), self.turned(heads[1]), heads[2], is_causal=True, scale=0.12
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two layers with a squared ReLU between them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(shape.width), RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.up, self.down = Linear(shape.width, 4 * shape.width), Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.relu(self.up(self.norm2(x))) ** 2)


class GPT(nn.Module):
    """The track's model; its embedding's dtype is that of the arithmetic."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.norm1, self.norm2 = RMSNorm(shape.width), RMSNorm(shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.head = Linear(shape.width, shape.vocabulary)
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                zero = name.endswith(("out", "down", "head"))
                nn.init.normal_(module.weight, std=0.0 if zero else (0.33 / module.in_features) ** 0.5)
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The sum of the cross-entropies of targets, for tokens and targets (n, length)."""
        logits = self.head(self.norm2(self.blocks(self.norm1(self.embedding(tokens))))).float()
        logits = 15 * logits * torch.rsqrt(logits**2 + 15**2)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


# --- Optimizer ---
def make_optimizer(model: nn.Module, arguments: argparse.Namespace) -> Dash:
    """Dash for the hidden matrices, its AdamW for the embedding, the head, biases and gains."""
    groups = param_groups(
        model,
        vectors={**ADAMW, "lr": VECTORS},
        overrides={r"embedding\.weight": {**ADAMW, "lr": EMBEDDING}, r"head\.weight": {**ADAMW, "lr": HEAD}},
    )
    options = dict(map(parse_option, arguments.option))
    try:
        return Dash(groups, lr=arguments.lr, weight_decay=arguments.weight_decay, **options)
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from error


def share(step: int, steps: int, warmup: int, cooldown: float) -> float:
    """The share of the learning rates at a step: up in a line, level, and down in a line in the last ``cooldown``."""
    return min(1.0, (step + 1) / (warmup + 1), (steps - step) / (cooldown * steps) if cooldown else 1.0)


# --- Run ---
def train(arguments: argparse.Namespace, processes: Processes, note: Callable[[str], None]) -> None:
    """Trains, and notes the validation losses. Collective."""
    shape, device, steps = (TOY if arguments.toy else Shape()), pick_device(None, processes), arguments.steps
    on_gpu, several = device.type == "cuda", processes.size > 1
    torch.manual_seed(arguments.seed)  # parameters are drawn on the CPU, alike in every process
    model = GPT(shape)
    if on_gpu:
        model.embedding.bfloat16()
        model.compile(dynamic=False)
    model.to(device)
    optimizer = make_optimizer(model, arguments)
    schedule = LambdaLR(optimizer, lambda step: share(step, steps, arguments.warmup, arguments.cooldown))
    train_files = shards(arguments.train, shape.batch * shape.sequence, steps)
    fixed_files = shards(arguments.val, shape.validation * shape.sequence, 1)
    own = (shape.sequence, processes.rank, processes.size)
    data, fixed = batches(train_files, shape.batch, *own), next(batches(fixed_files, shape.validation, *own))
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    note(f"{describe(optimizer.param_groups)}\ntorch {torch.__version__}, {processes.size} x {name}")

    def pieces(batch: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(each.to(device).split(arguments.micro_batch) for each in batch), strict=True)

    @torch.no_grad()
    def validate() -> float:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for piece in pieces(fixed):
            total += model(*piece)
        if several:
            dist.all_reduce(total)
        return total.item() / (shape.validation * shape.sequence)

    seconds, start = 0.0, time.perf_counter()
    for step in range(steps + 1):
        if step == steps or step % (shape.every if step < 0.9 * steps else 25) == 0:
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds += time.perf_counter() - start
            times = f"train_time:{seconds:.3f}s step_avg:{1000 * seconds / max(step, 1):.2f}ms"
            note(f"step:{step}/{steps} val_loss:{validate():.5f} {times}")
            start = time.perf_counter()
        if step < steps:
            for piece in pieces(next(data)):
                model(*piece).backward()  # summed over tokens, as in the track, whose AdamW's eps is for that
            for parameter in model.parameters() if several else ():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


# --- Command ---
def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments. Those of the matrices are those of the track's Shampoo (its result 21), not tuned for Dash."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--train", default="data/fineweb10B/fineweb_train_*.bin", help="pattern of the training shards")
    add("--val", default="data/fineweb10B/fineweb_val_*.bin", help="pattern of the validation shards")
    add("--steps", type=int, help="4100 by default")
    add("--lr", type=float, default=0.0015, help="of the hidden matrices")
    add("--weight-decay", type=float, default=0.2, help="of the hidden matrices")
    add("--warmup", type=int, default=0, help="steps in which the learning rates rise")
    add("--cooldown", type=float, default=0.7, help="share of the steps in which they fall to 0")
    add("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of Dash; may be repeated")
    add("--micro-batch", type=int, help="sequences at once, 64 by default; fewer need less memory")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="log, runs/track3/seed-SEED.txt by default")
    add("--toy", action="store_true", help="a tiny model and made-up data")
    add("--judge", type=Path, nargs="+", metavar="LOG", help="judge the logs of several seeds")
    arguments = parser.parse_args(argv)
    arguments.steps = arguments.steps or (60 if arguments.toy else 4100)
    arguments.micro_batch = arguments.micro_batch or (2 if arguments.toy else 64)
    return arguments


def run(arguments: argparse.Namespace, processes: Processes) -> None:
    """Trains, with a log that the first process writes. Collective."""
    if 8 % processes.size:
        raise InputError(f"{processes.size} processes do not share the batch evenly: start 1, 2, 4 or 8")
    path = arguments.out or Path(f"runs/track3/seed-{arguments.seed}.txt")
    if any(processes.gather(processes.leads and path.exists())):
        raise InputError(f"{path} is there already: give another --out, and keep every log, for all seeds count")

    head = f"{program(Path(__file__), arguments)}\n{RULER}\n"  # as it is now, before anyone can change it

    def note(text: str) -> None:
        if processes.leads:
            path.parent.mkdir(parents=True, exist_ok=True)
            before = "" if path.exists() else head
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{before}{text}\n")
            print(text, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        if arguments.toy:
            write_toy(Path(folder), TOY)
            arguments.train, arguments.val = f"{folder}/toy_train_*.bin", f"{folder}/toy_val_*.bin"
        train(arguments, processes, note)


def main(argv: list[str] | None = None) -> None:
    """Trains, or judges: then the exit code is 1 if the logs do not pass."""
    arguments = parse(argv)
    try:
        if arguments.judge:
            sys.exit(0 if judge(arguments.judge) else 1)
        with join(None, timeout=600.0) as processes:
            run(arguments, processes)
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
