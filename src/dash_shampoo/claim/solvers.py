"""Claim: iterations of matrix products replace the eigendecomposition, and Newton-DB is the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dash_shampoo.bench.roots import SOLVERS
from dash_shampoo.bench.timing import interleaved
from dash_shampoo.claim.matrices import eigenvalues
from dash_shampoo.claim.report import Picture, Report, Row, Table
from dash_shampoo.roots import inverse_root, products

REFERENCE = "eigh"


def errors(root: Tensor, stack: Tensor, p: int, damping: float) -> Tensor:
    """The largest |v^T X v / x - 1| of each root X (n, b, b), over eigenvectors v and the exact root's x: (n,).

    Both come from an eigendecomposition in float64.
    """
    values, vectors = torch.linalg.eigh(stack.double())
    values = values.clamp(min=0)
    exact = (values + damping * values.pow(4).sum(1, keepdim=True).pow(0.25)).pow(-1 / p)
    got = (vectors * (root.double() @ vectors)).sum(1)
    return (got / exact - 1).abs().amax(dim=1)


def usable(p: int, damping: float, precision: str) -> dict[str, dict[str, Any]]:
    """The options of every solver that takes this root at this damping."""
    found: dict[str, dict[str, Any]] = {}
    one = torch.eye(2).unsqueeze(0)
    for name in SOLVERS:
        # Only products have a precision; an eigendecomposition is the reference as it is.
        own: dict[str, Any] = {
            "solver": name,
            "damping": damping,
            "precision": "fp32" if name == REFERENCE else precision,
        }
        try:
            inverse_root(one, p, **own)
        except ValueError:
            continue
        found[name] = own
    return found


def measure(
    stacks: Mapping[str, Tensor], roots: Sequence[int], dampings: Sequence[float], precision: str, repeats: int
) -> Iterator[Row]:
    """A row for every stack, root, damping and solver."""
    for name, stack in stacks.items():
        # A factor of zeros, of a gradient that never came, has a root by definition.
        given = stack[eigenvalues(stack).amax(dim=1) > 0]
        for p in roots:
            for damping in dampings:
                cases = usable(p, damping, precision)
                work = {solver: partial(inverse_root, given, p, **own) for solver, own in cases.items()}
                times = interleaved(work, repeats, given.device)
                for solver, own in cases.items():
                    root = inverse_root(given, p, **own)
                    error = errors(root.value, given, p, damping)
                    yield {
                        "matrices": name,
                        "count": len(given),
                        "p": p,
                        "damping": damping,
                        "solver": solver,
                        "error, median": float(error.median()),
                        "error, largest": float(error.max()),
                        "refused": int((~root.ok).sum()),
                        "products": products(p, solver=solver, damping=damping),
                        "milliseconds": 1e3 * times[solver],
                        f"speed over {REFERENCE}": times[REFERENCE] / times[solver],
                    }


def report(
    stacks: Mapping[str, Tensor], roots: Sequence[int], dampings: Sequence[float], precision: str, repeats: int
) -> Report:
    """Measures and reports."""
    rows = list(measure(stacks, roots, dampings, precision, repeats))
    return Report(
        f"Solvers on {' and '.join(stacks)}",
        "Inverse roots by Newton-DB or Chebyshev's expansion are faster than by eigendecomposition, "
        "and Newton-DB is more accurate than coupled Newton.",
        [_said(own) for own in groups(rows)],
        [Table("Error, products and time", rows)],
        [_picture(own) for own in groups(rows)],
        (
            "The error is the largest along any eigenvector, against float64; that of eigh is float32's own.",
            "newton-db and coupled-newton take as many steps as the damping asks for, those of the paper ten of each.",
            "A refused root is one whose certificate does not hold. The paper's presets refuse none.",
            f"Times are of the whole stack, medians of {repeats} taken in turn. How fast a decomposition is "
            "beside products depends on the machine, and on the size of the matrices.",
            "chebyshev is evaluated by Paterson and Stockmeyer: by Clenshaw, as in the paper, it takes 60 products.",
        ),
    )


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that differ in the solver alone."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row["matrices"], row["p"], row["damping"]), []).append(row)
    return list(found.values())


def _called(row: Row) -> str:
    return f"{row['matrices']}, p = {row['p']}, damping {row['damping']:g}"


def _said(rows: Sequence[Row]) -> str:
    fastest = min(rows, key=lambda row: row["milliseconds"])
    by_name = {row["solver"]: row for row in rows}
    others = "; ".join(
        f"{name} {by_name[name][f'speed over {REFERENCE}']:.2g} times as fast as {REFERENCE}, "
        f"error {by_name[name]['error, largest']:.1e}"
        for name in ("newton-db", "newton-db-paper", "coupled-newton", "coupled-newton-paper", "chebyshev", "minimax")
        if name in by_name
    )
    return f"{_called(rows[0])}: {others}. The fastest is {fastest['solver']}."


def _picture(rows: Sequence[Row]) -> Picture:
    lines = {row["solver"]: [(row["milliseconds"], max(row["error, largest"], 1e-7))] for row in rows}
    return Picture(f"Error over time: {_called(rows[0])}", "milliseconds", "largest relative error", lines, "xy")
