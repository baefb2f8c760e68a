"""The matrices that claims are tried on: factors of a short training, and random ones of known spectra."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dash_shampoo.train.loop import Trainer
from dash_shampoo.train.settings import Settings


def trained_factors(settings: Settings, most: int) -> dict[str, Tensor]:
    """Factors of Dash after a short training, by their size: stacks (n, b, b) in float32.

    Args:
        settings: of the training.
        most: factors of a size, taken from all over the model.

    Raises:
        InputError: settings or data cannot be used.
    """
    trainer = Trainer(settings)
    while trainer.step < settings.steps:
        trainer.train_step()
    return {f"factors {size}": some for size, some in kept_factors(trainer.optimizers[0].state, most).items()}


def kept_factors(state: Mapping[Tensor, Mapping[str, Tensor]], most: int) -> dict[int, Tensor]:
    """The factors in the state of a Dash, by their size, at most so many of a size."""
    found: dict[int, list[Tensor]] = {}
    for entries in state.values():
        for name, entry in entries.items():
            if name.endswith((".left", ".right")):
                found.setdefault(entry.shape[-1], []).append(entry)
    return {size: _evenly(entries, most) for size, entries in sorted(found.items())}


def _evenly(entries: list[Tensor], most: int) -> Tensor:
    count = sum(map(len, entries))
    wanted = set(torch.linspace(0, count - 1, min(most, count)).round().int().tolist())
    lanes = [lane for entry in entries for lane in entry]
    # A factor is the lower triangle from the second row on.
    own = torch.stack([lane[1:] for i, lane in enumerate(lanes) if i in wanted]).tril()
    return own + own.tril(-1).mT


def spectra(b: int) -> dict[str, Tensor]:
    """Spectra (b,) in float64 with a largest eigenvalue of 1, by their names."""
    index = torch.arange(1, b + 1, dtype=torch.float64)
    one_above = torch.full((b,), 0.7, dtype=torch.float64)
    one_above[0] = 1
    return {
        "equal": torch.ones(b, dtype=torch.float64),
        "one above the rest": one_above,
        "even, 1 to 0": torch.linspace(1, 0, b, dtype=torch.float64),
        "power law, 1/i": 1 / index,
        "exponential, 1 to 1e-8": torch.logspace(0, -8, b, dtype=torch.float64),
        "rank b/8, even": torch.where(index <= max(1, b // 8), 1 - (index - 1) / (2 * b), 0.0),
    }


def turned(values: Tensor, n: int, seed: int) -> Tensor:
    """Symmetric matrices (n, b, b) in float32 of the eigenvalues (b,) or (n, b), with random eigenvectors.

    A fixed vector is a random one to them.
    """
    generator = torch.Generator().manual_seed(seed)
    b = values.shape[-1]
    q = torch.linalg.qr(torch.randn(n, b, b, generator=generator, dtype=torch.float64)).Q
    matrix = (q * values.double().cpu().view(-1, 1, b)) @ q.mT
    return ((matrix + matrix.mT) / 2).float()


def synthetic(b: int, n: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """``n`` random matrices (n, b, b) of each of the `spectra`."""
    for name, values in spectra(b).items():
        yield name, turned(values, n, seed)


def eigenvalues(stack: Tensor) -> Tensor:
    """Eigenvalues (n, b) in float64 on the CPU, none negative."""
    return torch.linalg.eigvalsh(stack.double()).clamp(min=0).cpu()
