"""Every solver over condition, size and precision: error, residual, products and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dash_shampoo.bench.timing import interleaved
from dash_shampoo.roots import Solver, inverse_root, products, resolve_solver

ENTRIES = 1 << 21  # of all matrices of a size
SOLVERS = (
    "minimax",
    "newton-db",
    "newton-db-paper",
    "coupled-newton",
    "coupled-newton-paper",
    "chebyshev",
    "eigh",
)


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        solver: its name.
        p: the root.
        size: of the matrices.
        count: of the matrices.
        condition: of the damped matrices, the inverse of the damping.
        precision: of the products.
        error: largest relative error along an eigenvector, against float64.
        residual: largest certified residual.
        ok: whether every certificate held.
        products: of two matrices of the full size.
        milliseconds: for the whole stack.
    """

    solver: str
    p: int
    size: int
    count: int
    condition: float
    precision: str
    error: float
    residual: float
    ok: bool
    products: int
    milliseconds: float


def decaying_stack(count: int, size: int, device: torch.device) -> Tensor:
    """Symmetric positive semidefinite float32 matrices (count, size, size), with eigenvalues from 1 down to 1e-8."""
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(count, size, size, generator=generator, dtype=torch.float64)).Q
    matrix = (q * torch.logspace(0, -8, size, dtype=torch.float64)) @ q.mT
    return ((matrix + matrix.mT) / 2).float().to(device)


def directional_error(root: Tensor, matrix: Tensor, p: int, damping: float) -> float:
    """Largest |v^T X v / x - 1| over the eigenvectors v of ``matrix`` and the exact root's eigenvalues x."""
    values, vectors = torch.linalg.eigh(matrix.double())
    values = values.clamp(min=0)
    exact = (values + damping * values.pow(4).sum(1, keepdim=True).pow(0.25)).pow(-1 / p)
    got = (vectors * (root.double() @ vectors)).sum(1)
    return float((got / exact - 1).abs().max())


def measure(
    sizes: list[int], conditions: list[float], precisions: list[str], p: int, repeats: int, device: torch.device
) -> Iterator[Row]:
    """Rows for every size, condition, solver and precision that is safe."""
    for size in sizes:
        count = max(1, ENTRIES // size**2)
        matrix = decaying_stack(count, size, device)
        for condition in conditions:
            cases = dict(_cases(matrix, p, 1 / condition, precisions))
            work = {name: partial(inverse_root, matrix, p, **options) for name, options in cases.items()}
            times = interleaved(work, repeats, device)
            for name, options in cases.items():
                root = inverse_root(matrix, p, **options)
                yield Row(
                    solver=name.split(" ")[0],
                    p=p,
                    size=size,
                    count=count,
                    condition=condition,
                    precision=options["precision"],
                    error=directional_error(root.value, matrix, p, 1 / condition),
                    residual=float(root.residual.max()),
                    ok=bool(root.ok.all()),
                    products=products(p, solver=options["solver"], damping=options["damping"]),
                    milliseconds=times[name] * 1e3,
                )


def _cases(matrix: Tensor, p: int, damping: float, precisions: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in SOLVERS:
        solver: Solver = resolve_solver(name)
        for precision in precisions if name != "eigh" else ["fp32"]:
            options: dict[str, Any] = {"solver": solver, "damping": damping, "precision": precision}
            try:
                inverse_root(matrix[:1], p, **options)
            except ValueError:  # this precision is not safe at this damping, or the solver has no such root
                continue
            yield f"{name} {precision}", options


def pareto(rows: list[Row], path: Path) -> None:
    """Draws error against time, one panel per size and condition."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels = sorted({(row.size, row.condition) for row in rows})
    columns = len({condition for _, condition in panels})
    figure, grid = plt.subplots(
        len(panels) // columns, columns, figsize=(4 * columns, 3.2 * (len(panels) // columns)), squeeze=False
    )
    for axes, (size, condition) in zip(grid.flat, panels, strict=True):
        own = [row for row in rows if (row.size, row.condition) == (size, condition)]
        for row in own:
            label = row.solver if row.precision == "fp32" else f"{row.solver} {row.precision}"
            (dot,) = axes.loglog(row.milliseconds / row.count, max(row.error, 1e-7), "o")
            axes.annotate(
                label, (row.milliseconds / row.count, max(row.error, 1e-7)), fontsize=6, color=dot.get_color()
            )
        front = _front(own)
        axes.loglog(
            [row.milliseconds / row.count for row in front], [max(row.error, 1e-7) for row in front], "k-", lw=0.5
        )
        axes.set(title=f"{size} x {size}, condition {condition:.0e}", xlabel="ms per matrix", ylabel="relative error")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _front(rows: list[Row]) -> list[Row]:
    """The rows that no other row beats in both error and time, by time."""
    return sorted(
        (row for row in rows if not any(o.error < row.error and o.milliseconds < row.milliseconds for o in rows)),
        key=lambda row: row.milliseconds,
    )


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows as plain values."""
    return [asdict(row) for row in rows]
