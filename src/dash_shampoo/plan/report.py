"""A plan as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dash_shampoo.plan.arrays import Real
from dash_shampoo.plan.budget import Choice
from dash_shampoo.plan.plan import Plan, imbalance
from dash_shampoo.plan.tiles import STAGES

Row = tuple[str, str]  # what a row is called, and the amount in it


def scaled(value: float, units: Sequence[str]) -> str:
    """A number to three digits in the largest unit, each a thousand of the one before, that leaves it above 1."""
    place = 0
    while value >= 999.5 and place < len(units) - 1:
        value, place = value / 1000, place + 1
    return f"{value:.3g} {units[place]}".rstrip()


def in_bytes(value: float) -> str:
    """Bytes, in decimal units."""
    return scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def in_flops(value: float) -> str:
    """Floating-point operations."""
    return scaled(value, ("", "k", "M", "G", "T", "P", "E"))


def in_milliseconds(value: float) -> str:
    """Seconds as milliseconds, or as they are from one on."""
    return f"{value:.3g} s" if value >= 0.9995 else f"{value * 1e3:.3g} ms"


def counted(value: float) -> str:
    """A count: whole, or with one digit where it is a mean."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


# Each section: its heading, its rows, how a value is written, and whether the ranks' values add up to a total. Times do
# not: ranks run side by side.
SECTIONS: list[tuple[str, list[Row], Callable[[float], str], bool]] = [
    ("owned", [("tiles", "tiles"), ("blocks", "blocks")], counted, True),
    (
        "memory",
        [
            ("means", "state/means"),
            ("grafting statistics", "state/statistics"),
            ("factors, roots", "state/factors"),
            ("momentum", "state/momentum"),
            ("all state", "state"),
            ("workspace (peak)", "workspace"),
            ("state + workspace", "memory"),
        ],
        in_bytes,
        True,
    ),
    (
        "products of a step, FLOP",
        [
            ("factors", "flops/factors"),
            ("roots, averaged", "flops/roots"),
            ("precondition", "flops/precondition"),
            ("all, averaged", "flops"),
            ("roots, at most", "flops/roots due"),
        ],
        in_flops,
        True,
    ),
    (
        "network, of a step",
        [
            ("gradients sent", "wire/gradients/sent"),
            ("gradients received", "wire/gradients/received"),
            ("updates sent", "wire/updates/sent"),
            ("updates received", "wire/updates/received"),
            ("survey sent", "wire/survey/sent"),
            ("all sent", "wire/sent"),
            ("all received", "wire/received"),
        ],
        in_bytes,
        True,
    ),
    (
        "time, estimated",
        [
            *((stage if stage != "roots" else "roots, averaged", f"seconds/{stage}") for stage in STAGES),
            ("exchange", "seconds/exchange"),
            ("calls, on the host", "seconds/host"),
            ("step, averaged", "seconds"),
            ("longest step", "seconds/longest step"),
        ],
        in_milliseconds,
        False,
    ),
]


def show(plan: Plan, title: str, efficiency: float, console: Console) -> None:
    """Prints what each rank takes; times are at an ``efficiency`` that is said beside them."""
    console.print(title, soft_wrap=True)
    table = Table("", "total", "max", "mean", "min", "max/mean", box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for heading, rows, words, add_up in SECTIONS:
        used = [(name, plan.amounts[amount]) for name, amount in rows if plan.amounts[amount].any()]
        if used:
            table.add_row(f"[bold]{heading}[/bold]")
        for name, values in used:
            table.add_row(f"  {name}", *_cells(values, words, add_up))
    console.print(table)
    console.print(f"load balance, max/mean of the modelled cost  {plan.balance:.3f}")
    console.print(f"estimated time of a step, averaged           {in_milliseconds(plan.seconds)}")
    note = f"Times are estimates: {efficiency:.0%} of the peak rates of the data sheet. Calls overlap, nothing else."
    console.print(note, soft_wrap=True)


def _cells(values: Real, words: Callable[[float], str], add_up: bool) -> list[str]:
    total = words(float(values.sum())) if add_up else ""
    limits = (words(float(each)) for each in (values.max(), values.mean(), values.min()))
    return [total, *limits, f"{imbalance(values):.3f}"]


def show_choices(choices: Iterable[Choice], budget: float, console: Console) -> None:
    """Prints memory and time for choices of options, and which fit a budget in bytes."""
    found = list(choices)
    dtypes = list(dict.fromkeys(choice.state_dtype for choice in found))
    table = Table("block size", "roots every", "step, averaged", box=SIMPLE_HEAD, pad_edge=False)
    for dtype in dtypes:
        table.add_column(f"{dtype} state")
    for column in table.columns:
        column.justify = "right"
    rows: dict[tuple[int, int], list[Choice]] = {}
    for choice in found:
        rows.setdefault((choice.block_size, choice.update_every), []).append(choice)
    for (block_size, update_every), own in rows.items():
        # The dtype of the state decides nothing of the work that is counted.
        seconds = max(choice.seconds for choice in own)
        cells = (in_bytes(choice.memory) + (" fits" if choice.memory <= budget else "     ") for choice in own)
        table.add_row(str(block_size), str(update_every), in_milliseconds(seconds), *cells)
    console.print(f"\nstate + workspace of the fullest rank, and what fits {in_bytes(budget)}")
    console.print(table)
    if all(choice.memory > budget for choice in found):
        least = in_bytes(min(choice.memory for choice in found))
        console.print(f"nothing fits: the least is {least}", soft_wrap=True)
