"""Trains the tiny Llama with rules of the update that Dash does not have, beside the one it has.

    python benchmarks/candidates.py --text PATH --only base look-ahead early ... [--lr 5e-3] [--seeds 1 2 3]

A candidate replaces stages of the step while it trains; nothing of it is in the product. Appends one JSON line per run
to ``benchmarks/results/candidates.jsonl`` as `benchmarks/choices.py` does. Several processes share the work with
``--share I/N``. `benchmarks/tables.py` compares each candidate with the base, seed by seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from choices import BASE, LR, SEEDS, SHORT, done, record, run, texts
from torch import Tensor, nn
from torch.optim import Optimizer

from dash_shampoo import factors, shampoo
from dash_shampoo.kernels import accumulate, bmm
from dash_shampoo.parallel.pieces import Piece, decay
from dash_shampoo.roots.solve import Root
from dash_shampoo.stacks import Part
from dash_shampoo.train.optimizers import make_optimizers
from dash_shampoo.train.settings import Settings

RESULTS = Path(__file__).parent / "results" / "candidates.jsonl"


@dataclass(frozen=True)
class Candidate:
    """What is changed against the base.

    Attributes:
        options: of the optimizer.
        settings: of the run.
        stages: functions, or constants, by what they replace, a path within `dash_shampoo`.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    stages: Mapping[str, Any] = field(default_factory=dict)

    def __add__(self, other: Candidate) -> Candidate:
        return Candidate(
            {**self.options, **other.options}, {**self.settings, **other.settings}, {**self.stages, **other.stages}
        )


def keep_gradient(part: Part, gradient: Tensor, live: Tensor) -> None:
    """`shampoo.update_moments` that keeps G for `look_ahead`."""
    update_moments(part, gradient, live)
    part.gradient = gradient  # type: ignore[attr-defined]


def look_ahead(part: Part, steps: Tensor) -> Tensor:
    """N = beta1 M + (1 - beta1) G for the matrices; its weights add up to 1 - beta1^(t + 1). (n, r, c)"""
    return look_ahead_everywhere(part, steps) if part.sides else mean_gradient(part, steps)


def look_ahead_everywhere(part: Part, steps: Tensor) -> Tensor:
    """The same for what AdamW moves, too, which is NAdam then. (n, r, c)"""
    beta1 = part.option("beta1")
    gradient: Tensor = part.gradient  # type: ignore[attr-defined]
    return gradient.lerp(part.moment, beta1) / shampoo.bias(beta1, steps + 1)


def renewals(when: Callable[[int, int], bool]) -> Callable[[int, int, int], bool]:
    """`stacks.is_due` that renews roots at the step t (from 1) of a parameter if ``when(t, update_every)``."""
    return lambda since, _, every: when(since + 1, every)


def doubling(t: int, every: int) -> bool:
    """1, 2, 4, 8, ... up to the period, and then periodically as ever."""
    return (t - 1) % every == 0 or (t < every and t & (t - 1) == 0)


def each_of_first(t: int, every: int) -> bool:
    """Each of the first ``every`` steps."""
    return t <= every or (t - 1) % every == 0


def growing(t: int, every: int) -> bool:
    """At intervals of an eighth of t, up to the period."""
    due = 1
    while due < t:
        due += min(every, 1 + due // 8)
    return due == t


def kl_factors(part: Part, gradient: Tensor, live: Tensor, steps: Tensor) -> None:
    """L <- beta2 L + (1 - beta2) / c (G Q) (G Q)^T and R <- beta2 R + (1 - beta2) / r (P G)^T (P G), P and Q the roots.

    KL-Shampoo (arXiv 2509.03378). The first gradient, for which there are no roots, makes L of mean eigenvalue 1 and R
    of G's own scale, between which the later ones keep the balance.
    """
    if part.left is None or part.right is None:
        return update_factors(part, gradient, live, steps)
    rows, columns = part.key.block
    beta2 = part.option("beta2")
    gain = ((1 - beta2) * live / shampoo.bias(beta2, steps)).clamp(max=1)
    norm = torch.linalg.vector_norm(gradient, dim=(1, 2), keepdim=True).clamp(min=1e-30)
    first = steps <= 1
    left = torch.where(first, gradient / norm * rows**0.5, bmm(gradient, part.right.inverse()) / columns**0.5)
    right = torch.where(first, gradient, bmm(part.left.inverse(), gradient)) / rows**0.5
    part.left.accumulate(left * gain.sqrt(), 1 - gain)
    part.right.accumulate((right * gain.sqrt()).mT, 1 - gain)
    return None


def constant_norm(norm: Callable[[int, int], float]) -> Callable[[Part, Tensor, Tensor], Tensor]:
    """`shampoo.graft` that gives each block the norm ``norm(rows, columns)``."""

    def graft(part: Part, update: Tensor, _: Tensor) -> Tensor:
        ratio = norm(*part.key.block) / torch.linalg.vector_norm(update, dim=(1, 2), keepdim=True)
        return torch.where(torch.isfinite(ratio), update * ratio, 0)

    return graft


def pseudo_inverse(A: Tensor, p: int, **options: Any) -> Root:
    """A (A + d)^(-3/2) in place of (A + d)^(-1/2), d the damping: zero on the kernel of A, and smooth. For p = 2."""
    root = inverse_root(A, p, **options)
    bound = torch.linalg.matrix_norm(bmm(A, A)).sqrt().view(-1, 1, 1)
    X = root.value
    return root._replace(value=X - bmm(bmm(X, X), X) * (bound * options["damping"] + options["epsilon"]))


def cautious(pieces: list[Piece]) -> list[Piece]:
    """`pieces.decay` of the weights alone that the update moves towards zero."""
    held = [piece.update.clone() for piece in pieces]
    found = decay(pieces)
    for piece, update in zip(pieces, held, strict=True):
        piece.update.copy_(torch.where(update * piece.weight > 0, piece.update, update))
    return found


def keep_norms(model: nn.Module, settings: Settings) -> list[Optimizer]:
    """`optimizers.make_optimizers` whose steps leave each matrix of the blocks with the norm it had first.

    Norm control as in Hyperball (arXiv 2606.16899), without its rule for the length of a step.
    """
    found = make_optimizers(model, settings)
    norms = {
        each: each.detach().norm() for name, each in model.named_parameters() if "blocks" in name and each.ndim == 2
    }

    @torch.no_grad()
    def project(*_: Any) -> None:
        for weight, norm in norms.items():
            weight.mul_(norm / weight.norm())

    found[0].register_step_post_hook(project)
    return found


def to_tf32(x: Tensor) -> Tensor:
    """Float32 numbers rounded to the ten bits of mantissa that tensor cores read of them."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def to_bf16(x: Tensor) -> Tensor:
    """Float32 numbers rounded to bfloat16."""
    return x.bfloat16().float()


def rounded_products(rounding: Callable[[Tensor], Tensor]) -> Candidate:
    """Products outside roots, G G^T and L^(-1/p) M R^(-1/p), of rounded numbers, with sums in float32."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return bmm(rounding(a), rounding(b))

    def add_product(factor: Tensor, half: Tensor, keep: Tensor, lower: Tensor) -> None:
        accumulate(factor, rounding(half), keep, lower)

    return Candidate(stages={"shampoo.bmm": product, "pairs.accumulate": add_product})


update_moments, update_factors, mean_gradient = shampoo.update_moments, shampoo.update_factors, shampoo.mean_gradient
inverse_root = factors.inverse_root

LOOK_AHEAD = Candidate(stages={"shampoo.update_moments": keep_gradient, "shampoo.mean_gradient": look_ahead})
NADAM = LOOK_AHEAD + Candidate(stages={"shampoo.mean_gradient": look_ahead_everywhere})
EARLY = Candidate(stages={"stacks.is_due": renewals(doubling)})
FIRST = Candidate(stages={"stacks.is_due": renewals(each_of_first)})
GROWING = Candidate(stages={"stacks.is_due": renewals(growing)})
TURNS = Candidate(stages={"renewals.LEAST": 0.0})  # also in small models
KL = Candidate(stages={"shampoo.update_factors": kl_factors})
PSEUDO = Candidate(stages={"factors.inverse_root": pseudo_inverse})
CAUTIOUS = Candidate(stages={"parallel.pieces.decay": cautious})
NORMS = Candidate(stages={"train.loop.make_optimizers": keep_norms})
ROWS = Candidate(stages={"shampoo.graft": constant_norm(lambda rows, _: math.sqrt(rows))})
AREA = Candidate(stages={"shampoo.graft": constant_norm(lambda rows, columns: 0.2 * math.sqrt(rows * columns))})


def betas(beta1: float, beta2: float) -> Candidate:
    return Candidate({"betas": (beta1, beta2)})


def every(steps: int) -> Candidate:
    return Candidate({"update_every": steps})


def weight_decay(strength: float) -> Candidate:
    return Candidate(settings={"weight_decay": strength})


CANDIDATES = {
    "base": Candidate(),
    "look-ahead": LOOK_AHEAD,
    "look-ahead, AdamW too": NADAM,
    "turns": TURNS,
    "products in TF32": rounded_products(to_tf32),
    "products in bfloat16": rounded_products(to_bf16),
    "early": EARLY,
    "first": FIRST,
    "growing": GROWING,
    "look-ahead, early": LOOK_AHEAD + EARLY,
    "look-ahead, first": LOOK_AHEAD + FIRST,
    "look-ahead, growing": LOOK_AHEAD + GROWING,
    **{f"betas {a}, {b}": betas(a, b) for a, b in ((0.9, 0.98), (0.95, 0.95), (0.9, 0.9), (0.95, 0.98))},
    **{
        f"look-ahead, betas {a}, {b}": LOOK_AHEAD + betas(a, b)
        for a, b in ((0.9, 0.98), (0.95, 0.95), (0.9, 0.9), (0.95, 0.98))
    },
    **{f"weight decay {x}": weight_decay(x) for x in (0.01, 0.1)},
    **{f"cautious weight decay {x}": CAUTIOUS + weight_decay(x) for x in (0.01, 0.1)},
    "KL": KL,
    "KL, every step": KL + every(1),
    "KL, constant norm": KL + AREA,
    "KL, early, ungrafted": KL + EARLY + Candidate({"grafting": "none"}),
    "KL, every step, ungrafted": KL + every(1) + Candidate({"grafting": "none"}),
    "look-ahead, root 3": LOOK_AHEAD + Candidate({"root": 3}),
    "look-ahead, constant norm": LOOK_AHEAD + AREA,
    "look-ahead, norm of rows": LOOK_AHEAD + ROWS,
    "constant norm": AREA,
    "pseudo-inverse": PSEUDO,
    "norms kept": NORMS,
    "look-ahead, pseudo-inverse": LOOK_AHEAD + PSEUDO,
    **{
        f"{name}every {n}": candidate + every(n)
        for n in (1, 50)
        for name, candidate in {
            "": Candidate(),
            "turns, ": TURNS,
            "look-ahead, ": LOOK_AHEAD,
            "early, ": EARLY,
            "growing, ": GROWING,
            "look-ahead, growing, ": LOOK_AHEAD + GROWING,
        }.items()
    },
}
RIVALS = {
    f"{optimizer}, weight decay {x}": (optimizer, lr, steps, x)
    for optimizer, lr, steps in (("adamw", 2e-3, 1000), ("muon", 5e-3, SHORT))
    for x in (0.01, 0.1)
}


def measure(name: str, settings: Settings) -> dict[str, Any]:
    """Trains with a candidate's stages; what it changes of the settings is in them already."""
    with ExitStack() as stack:
        for path, stage in CANDIDATES[name].stages.items() if name in CANDIDATES else ():
            stack.enter_context(patch(f"dash_shampoo.{path}", stage))
        return run(settings, every=settings.steps)  # losses on the way cost a fifth of the time


def settings_of(name: str, lr: float, steps: int, seed: int, data: str | None, tokenizer: str) -> Settings:
    """The settings of a run of a candidate, or of AdamW or Muon at their best learning rate and usual steps."""
    if name in RIVALS:
        optimizer, lr, steps, decayed = RIVALS[name]
        return Settings(
            optimizer=optimizer,
            lr=lr,
            steps=steps,
            weight_decay=decayed,
            seed=seed,
            data=data,
            tokenizer=tokenizer,
        )
    own = CANDIDATES[name]
    options = {**BASE, **own.options}
    return Settings(lr=lr, steps=steps, seed=seed, data=data, tokenizer=tokenizer, options=options, **own.settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", default=None, help="a second text beside Python's standard library")
    parser.add_argument("--texts", nargs="+", default=None, help="names of the texts to train on; default: all")
    parser.add_argument("--model", default="tiny", help="with --tokenizer, for the second text")
    parser.add_argument("--tokenizer", help="of the second text, in place of characters")
    parser.add_argument("--context", type=int, help="length of a sequence, in place of the model's")
    parser.add_argument("--batch-size", type=int, default=Settings.batch_size)
    parser.add_argument("--only", choices=[*CANDIDATES, *RIVALS], nargs="+", default=list(CANDIDATES), metavar="NAME")
    parser.add_argument("--lr", type=float, nargs="+", default=[LR])
    parser.add_argument("--steps", type=int, default=SHORT)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--share", default="1/1", help="I/N: the I-th of N processes that run side by side")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    place, places = map(int, arguments.share.split("/"))
    known = done(RESULTS)
    sizes = {"model": arguments.model, "context": arguments.context, "batch_size": arguments.batch_size}
    own_texts = [
        (
            data,
            (data and arguments.tokenizer) or tokenizer,
            text if arguments.model == "tiny" else f"{text}, {arguments.model}",
        )
        for data, tokenizer, text in texts(arguments.text)
        if arguments.texts is None or text in arguments.texts
    ]
    runs = [
        (name, text, dataclasses.replace(settings_of(name, lr, arguments.steps, seed, data, tokenizer), **sizes))
        for seed in arguments.seeds
        for lr in arguments.lr
        for data, tokenizer, text in own_texts
        for name in arguments.only
    ]
    for name, text, settings in runs[place - 1 :: places]:
        described = {**dataclasses.asdict(settings), "data": text, "candidate": name}
        if settings.tokenizer == arguments.tokenizer:
            described["tokenizer"] = Path(settings.tokenizer).name
        key = json.dumps(described, sort_keys=True)
        if key in known:
            continue
        head = {"candidate": name, "text": text, "lr": settings.lr, "steps": settings.steps, "seed": settings.seed}
        row = {**head, **measure(name, settings)}
        record(RESULTS, {**row, "key": key})
        print(*head.values(), f"{row['loss']:.4f} {row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
