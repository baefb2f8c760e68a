"""What goes on inside Dash, as plain numbers: of all of it, and of each stack by its blocks' or factors' size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dash_shampoo import shampoo
from dash_shampoo.factors import FactorKey, Factors
from dash_shampoo.kernels import bmm
from dash_shampoo.roots import largest_eigenvalue, schatten4
from dash_shampoo.stacks import Bank, Part

Numbers = dict[str, float]

# Numbers of which the largest stands for several stacks or processes; those of means go by their blocks, others add up.
LARGEST = ("largest", "condition", "residual")
MEANS = ("rms", "raw_rms")


def summary(banks: Sequence[Bank], entries: Iterable[tuple[str, Any]]) -> Numbers:
    """The numbers of `Dash.diagnostics` without ``detail``, from the banks and the entries of the state."""
    factors = [factors for bank in banks for factors in bank.factors.values()]
    entries = list(entries)
    return {
        "skipped": _total(value for key, value in entries if key == "skipped"),
        "roots": sum(map(len, factors)),
        "roots_failed": sum(int(each.failures) for each in factors),
        "roots_failing": _total(value for key, value in entries if key.endswith("_failed")),
        "roots_rescued": sum(each.rescued for each in factors),
        "residual": max((float(each.residual.max()) for each in factors if len(each.residual)), default=0.0),
    }


def details(banks: Iterable[Bank], states: Mapping[Tensor, dict[str, Any]]) -> Numbers:
    """The numbers that ``detail`` adds, of banks whose parameters' states are their own still."""
    found: list[Numbers] = []
    for bank in banks:
        try:
            if bank.holds([states.get(parameter, {}) for parameter in bank.parameters]):
                found += of_bank(bank, [states[parameter]["age"] for parameter in bank.parameters])
        finally:
            bank.close()
    return merge(found)


def of_bank(bank: Bank, ages: Sequence[int]) -> Iterator[Numbers]:
    """The numbers of each stack of an open bank, whose parameters have had ``ages`` gradients."""
    started = [age > group["start_step"] for age, group in zip(ages, bank.groups, strict=True)]
    counts = bank.steps.clamp(min=1)
    for part in bank.parts:
        skipped = int(part.per_block(bank.skipped).sum())
        own = {"blocks": len(part.moment), "skipped": skipped, **of_update(part, part.per_block(counts), started)}
        yield _called("block {}x{}".format(*part.key.block), own)
    for factors in bank.factors.values():
        yield _called(f"factor {factors.key.size}", of_factors(factors))


def of_update(part: Part, steps: Tensor, started: list[bool]) -> Numbers:
    """The size of a part's update before momentum, weight decay and learning rate, and of what grafting rescaled."""
    update = shampoo.direction(part, steps, part.where(started))
    if part.grafting is None or not part.sides:
        return {"rms": _rms(update)}
    raw = shampoo.precondition(part, shampoo.mean_gradient(part, steps))
    return {"rms": _rms(update), "raw_rms": _rms(raw)}


def of_factors(factors: Factors) -> Numbers:
    """What there is to know of the factors of one size, the largest where they differ."""
    spectra = [extremes(factors.key, side.pairs.factor(slice(None)), side.inverse()) for side in factors.sides]
    return {
        "factors": len(factors),
        "largest": max((float(largest.max()) for largest, _ in spectra), default=0.0),
        "condition": max((float(condition.max()) for _, condition in spectra), default=1.0),
        "residual": float(factors.residual.max()) if len(factors) else 0.0,
        "failed": int(factors.failures),
        "failing": int(factors.failed.sum()),
        "rescued": factors.rescued,
    }


def extremes(key: FactorKey, factor: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Estimates of each factor's largest eigenvalue (n,), and of its condition once it is damped (n,).

    The smallest eigenvalue is the largest of the inverse root, to the power -p, as of the last renewal, and at least
    what damping adds now.

    Args:
        key: of the factors.
        factor: (n, b, b).
        inverse: (n, b, b) their inverse roots.
    """
    peak = factor.diagonal(dim1=1, dim2=2).amax(dim=1)  # products of what is divided by it do not underflow
    scaled = factor / peak.masked_fill(peak == 0, 1).view(-1, 1, 1)
    largest = peak * largest_eigenvalue(scaled)
    shift = key.damping * peak * schatten4(bmm(scaled, scaled)).view(-1) + key.epsilon
    smallest = torch.maximum(largest_eigenvalue(inverse).pow(-key.root), shift)
    return largest, torch.where(peak > 0, ((largest + shift) / smallest).clamp(min=1), torch.ones_like(peak))


def merge(found: Sequence[Numbers]) -> Numbers:
    """The numbers of several stacks, or of several processes, as if they were one.

    `summary`'s "skipped" is the same in every process; it and all of `LARGEST` are the largest, a mean of `MEANS` goes
    by its blocks, and the rest adds up. The "ratio" of the update to what grafting rescaled follows from their means.
    """
    merged: Numbers = {}
    for name in dict.fromkeys(name for each in found for name in each if not name.endswith("/ratio")):
        stack, _, kind = name.rpartition("/")
        having = [each for each in found if name in each]
        values = [each[name] for each in having]
        if kind in MEANS:
            weights = [each[f"{stack}/blocks"] for each in having]
            merged[name] = math.sqrt(sum(w * v * v for w, v in zip(weights, values, strict=True)) / sum(weights))
        else:
            merged[name] = max(values) if kind in LARGEST or name == "skipped" else sum(values)
    ratios = {
        name.replace("raw_rms", "ratio"): merged[name.replace("raw_rms", "rms")] / value
        for name, value in merged.items()
        if name.endswith("/raw_rms") and value > 0
    }
    return {**merged, **ratios}


def _called(stack: str, numbers: Numbers) -> Numbers:
    return {f"{stack}/{name}": value for name, value in numbers.items()}


def _rms(stack: Tensor) -> float:
    return float(torch.linalg.vector_norm(stack)) / math.sqrt(max(1, stack.numel()))


def _total(values: Iterable[Tensor | float]) -> int:
    """The sum of numbers and of all elements of tensors, wherever they are."""
    found: dict[torch.device, list[Tensor]] = {}
    for value in values:
        tensor = value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
        found.setdefault(tensor.device, []).append(tensor.flatten())
    return sum(int(torch.cat(own).sum()) for own in found.values())
