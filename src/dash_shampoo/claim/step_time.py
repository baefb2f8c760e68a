"""Claim: stacks of blocks and roots by products make Shampoo's step several times as fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dash_shampoo import Dash
from dash_shampoo.bench.step import parameters_with_gradients
from dash_shampoo.bench.timing import interleaved
from dash_shampoo.claim.report import Picture, Report, Row, Table
from dash_shampoo.compare.contenders import Contender, parse
from dash_shampoo.plan.paper import MILLISECONDS, SETTING
from dash_shampoo.train.errors import InputError
from dash_shampoo.train.optimizers import optimizer_class

SOLVERS = ("minimax", "newton-db-paper", "coupled-newton-paper", "chebyshev", "eigh")
PEERS = ("distributed_shampoo:DistributedShampoo", "heavyball:SOAP", "pytorch_optimizer:SOAP")
ALONE = "one call a block"
# The least that Dash works on at once is one block, and one root.
ONE_AT_A_TIME = {"max_workspace": 1}


@dataclass(frozen=True)
class Work:
    """An optimizer whose steps are timed.

    Attributes:
        optimizer: of the parameters.
        parameters: that it moves.
        gradients: of each. Some optimizers drop or overwrite what they find in the parameters.
        cycle: steps in which every root is renewed once.
    """

    optimizer: Optimizer
    parameters: Sequence[nn.Parameter]
    gradients: Sequence[Tensor]
    cycle: int = 1

    def run(self) -> None:
        """A cycle of steps."""
        for _ in range(self.cycle):
            for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()


def installed(names: Sequence[str]) -> tuple[list[Contender], list[str]]:
    """The optimizers that are installed, and the names of those that are not."""
    found, missing = [], []
    for name in names:
        try:
            found.append(parse(name))
        except InputError:
            missing.append(name)
    return found, missing


def others(matrices: Sequence[nn.Parameter], peers: Sequence[Contender]) -> dict[str, Work]:
    """AdamW, Muon and those of other packages, on the matrices alone.

    Raises:
        InputError: one of them refuses its options.
    """
    gradients = [_gradient(parameter) for parameter in matrices]
    found: dict[str, Optimizer] = {
        "adamw": torch.optim.AdamW(matrices, lr=1e-3),
        "muon": torch.optim.Muon(matrices, lr=1e-3),
    }
    for peer in peers:
        kind: Any = optimizer_class(peer.optimizer)
        try:
            found[peer.label] = kind(list(matrices), lr=1e-3, **peer.options)
        except (TypeError, ValueError) as error:
            raise InputError(f"{peer.label}: {str(error).splitlines()[0]}; --peer takes NAME,key=value") from error
    return {name: Work(optimizer, matrices, gradients) for name, optimizer in found.items()}


def ours(
    matrices: Sequence[nn.Parameter], solvers: Sequence[str], block_size: int, update_every: int, root: int
) -> dict[tuple[str, str], Work]:
    """Dash with each solver, and block by block, by the names of the solver and of the way."""
    gradients = [_gradient(parameter) for parameter in matrices]
    shared: dict[str, Any] = {"lr": 1e-3, "block_size": block_size, "update_every": update_every, "root": root}
    ways: list[tuple[str, Mapping[str, Any]]] = [("stacks", {}), (ALONE, ONE_AT_A_TIME)]
    return {
        (solver, way): Work(Dash(matrices, solver=solver, **shared, **more), matrices, gradients, update_every)
        for way, more in ways
        for solver in solvers
    }


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def measure(
    matrices: Sequence[nn.Parameter],
    solvers: Sequence[str],
    block_sizes: Sequence[int],
    update_every: Sequence[int],
    root: int,
    peers: Sequence[Contender],
    repeats: int,
) -> list[Row]:
    """A row for each optimizer: those of one block size and frequency take their steps in turn, as memory allows."""
    device = matrices[0].device
    rows = []
    known = others(matrices, peers)
    times = interleaved({name: work.run for name, work in known.items()}, repeats, device)
    for name, seconds in times.items():
        rows.append(_row(name, "", None, None, seconds, 0))
    del known
    for block_size in block_sizes:
        for every in update_every:
            own = ours(matrices, solvers, block_size, every, root)
            pieces = {f"{solver}|{way}": partial(Work.run, work) for (solver, way), work in own.items()}
            times = interleaved(pieces, repeats, device)
            for (solver, way), work in own.items():
                assert isinstance(work.optimizer, Dash)
                roots = int(work.optimizer.diagnostics()["roots"])
                seconds = times[f"{solver}|{way}"] / every
                rows.append(_row(solver, way, block_size, every, seconds, roots))
    return rows


def _row(name: str, way: str, block: int | None, every: int | None, seconds: float, roots: int) -> Row:
    return {
        "optimizer": name,
        "works on": way,
        "block size": block,
        "roots every": every,
        "milliseconds a step": 1e3 * seconds,
        "roots": roots,
    }


def report(
    model: str,
    layers: int | None,
    solvers: Sequence[str],
    block_sizes: Sequence[int],
    update_every: Sequence[int],
    root: int,
    peers: Sequence[str],
    repeats: int,
    device: torch.device,
) -> Report:
    """Measures and reports.

    Raises:
        InputError: a peer that was asked for is not installed, or refuses its options.
    """
    found, missing = ([parse(peer) for peer in peers], []) if peers else installed(PEERS)
    matrices = [each for each in parameters_with_gradients(model, layers, device) if each.ndim == 2]
    rows = measure(matrices, solvers, block_sizes, update_every, root, found, repeats)
    name, processes, gpu = SETTING
    paper = [{"in the paper": what, "milliseconds a step": milliseconds} for what, milliseconds in MILLISECONDS.items()]
    return Report(
        f"Step time: {model}, p = {root}",
        "A step is several times as fast if blocks are worked on in stacks, and inverse roots are made by products.",
        [_said(own) for own in groups(rows)],
        [Table("Measured here", rows), Table(f"The paper's, {name} on {processes} x {gpu}, blocks of 1024", paper)],
        [_picture(rows)],
        (
            f"Medians of {repeats} taken in turn. With roots every k steps, k steps are timed together.",
            f"{ALONE}: the same code with the smallest workspace, so that it makes one call for each block and root.",
            "Gradients are random with a decaying spectrum. All move all matrices, and nothing else.",
            "Muon multiplies in bfloat16, which some CPUs emulate slowly.",
            "The paper's times are of another model or machine, unless the size and the machine above are its own.",
            *([f"Not installed, and not measured: {', '.join(missing)}."] if missing else []),
        ),
    )


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of Dash, by block size and frequency."""
    found: dict[tuple[Any, Any], list[Row]] = {}
    for row in rows:
        if row["block size"] is not None:
            found.setdefault((row["block size"], row["roots every"]), []).append(row)
    return list(found.values())


def _said(rows: Sequence[Row]) -> str:
    times = {(row["optimizer"], row["works on"]): row["milliseconds a step"] for row in rows}
    stacked = {name: time for (name, way), time in times.items() if way != ALONE}
    parts = [
        f"{name} {time:.3g} ms, {times[name, ALONE] / time:.2f} times as fast as with {ALONE}"
        for name, time in sorted(stacked.items(), key=lambda item: item[1])
    ]
    return f"Blocks of {rows[0]['block size']}, roots every {rows[0]['roots every']}: {'; '.join(parts)}."


def _picture(rows: Sequence[Row]) -> Picture:
    stacked = [row for own in groups(rows) for row in own if row["works on"] != ALONE]
    lines = {
        f"{name}, blocks of {size}": [
            (row["roots every"], row["milliseconds a step"])
            for row in stacked
            if (row["optimizer"], row["block size"]) == (name, size)
        ]
        for name, size in dict.fromkeys((row["optimizer"], row["block size"]) for row in stacked)
    }
    return Picture("Time over the frequency of roots", "roots every so many steps", "milliseconds a step", lines, "xy")
