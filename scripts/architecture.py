"""Draws docs/architecture.svg: how a gradient becomes an update. A test traces a step and compares its order.

python scripts/architecture.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

TARGET = Path(__file__).parents[1] / "docs" / "architecture.svg"

COLOURS = {  # of the module that a stage is in: fill, edge
    "optimizer": ("#ede7f6", "#7e57c2"),
    "stacks": ("#e3f2fd", "#1e88e5"),
    "parallel": ("#e8f5e9", "#43a047"),
    "shampoo": ("#fff3e0", "#fb8c00"),
    "factors": ("#fce4ec", "#d81b60"),
}


class Stage(NamedTuple):
    """A box of the picture.

    Attributes:
        title: what happens.
        formula: the same in the mathematics' own letters, or in words.
        calls: functions below `dash_shampoo`, in the order of their first calls in a step. The box is in the module of
            the first one.
        carries: what goes on to the next box.
    """

    title: str
    formula: str
    calls: tuple[str, ...]
    carries: str


STAGES = (
    Stage(
        "Follow the model",
        "blocks of equal shape share a stack; new ones start at zero",
        ("optimizer.Dash.step", "stacks.arrange", "checkpoint.take_over"),
        "p.grad, of any shape",
    ),
    Stage(
        "Ask which gradients are there and finite",
        "one all-reduce of their norms, if there are several processes",
        ("stacks.Bank.survey", "parallel.census.Census.take", "stacks.Bank.admit"),
        "p.grad of the parameters that take the step",
    ),
    Stage(
        "Bring gradients to the owners of their blocks",
        "an all-to-all if parameters are sharded, else nothing",
        ("parallel.carrier.Carrier.begin",),
        "what each process needs",
    ),
    Stage(
        "Gather blocks into stacks, and take them in",
        "L ← β₂L + (1-β₂) G Gᵀ    R ← β₂R + (1-β₂) Gᵀ G    M ← β₁M + (1-β₁) G",
        ("shampoo.accumulate", "parallel.carrier.Carrier.gather", "shampoo.update_factors", "shampoo.update_moments"),
        "L (n, r, r), R (n, c, c), M (n, r, c)",
    ),
    Stage(
        "Renew inverse roots that are due",
        "all factors of one size at once: P = (L + damping)^(-1/p), with a certificate",
        ("factors.Factors.update_roots", "roots.solve.inverse_root", "roots.minimax.Minimax.solve"),
        "M (n, r, c) and the roots",
    ),
    Stage(
        "Precondition and graft",
        "U = L^(-1/p) M R^(-1/p),  scaled to the norm of Adam's step, block by block",
        ("shampoo.move", "grafting.Adam.step", "shampoo.precondition", "shampoo.graft", "shampoo.add_momentum"),
        "U (n, r, c)",
    ),
    Stage(
        "Hand updates over",
        "parameters that one process holds alone move at once",
        ("stacks.Part.deliver", "parallel.carrier.Carrier.deliver"),
        "updates in flat buffers",
    ),
    Stage(
        "Spread updates, and move the parameters",
        "one all-gather (replicas) or all-to-all (shards);  W ← (1 - lr λ) W - lr U",
        ("parallel.carrier.Carrier.send", "parallel.carrier.Carrier.end"),
        "",
    ),
)

WIDTH, HEIGHT, GAP, LEFT = 640, 88, 34, 16


def draw() -> str:
    """The picture, as SVG with no fonts but the system's."""
    height = len(STAGES) * (HEIGHT + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" role="img" aria-label="How a gradient becomes an update">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for i, stage in enumerate(STAGES):
        parts += _box(stage, i, GAP // 2 + i * (HEIGHT + GAP))
    return "\n".join([*parts, "</svg>", ""])


def _box(stage: Stage, number: int, top: int) -> list[str]:
    fill, edge = COLOURS[stage.calls[0].partition(".")[0]]
    place = f'x="{LEFT}" y="{top}" width="{WIDTH - 2 * LEFT}" height="{HEIGHT}" rx="6"'
    parts = [
        f'<rect {place} fill="{fill}" stroke="{edge}"/>',
        _text(LEFT + 14, top + 26, f"{number + 1}. {stage.title}", 'font-size="16" font-weight="600"'),
        _text(LEFT + 14, top + 50, stage.formula, 'font-size="14"'),
        _text(LEFT + 14, top + 74, "  ".join(_short(call) for call in stage.calls), MONOSPACE),
    ]
    if stage.carries:
        middle, end = WIDTH // 2, top + HEIGHT + GAP
        tip = f"M{middle - 5} {end - 9} L{middle} {end - 1} L{middle + 5} {end - 9} Z"
        parts += [
            f'<path d="M{middle} {top + HEIGHT} V{end - 8}" stroke="#616161"/><path d="{tip}" fill="#616161"/>',
            _text(middle + 12, top + HEIGHT + 21, stage.carries, 'font-size="13" fill="#424242"'),
        ]
    return parts


MONOSPACE = 'font-family="ui-monospace, monospace" font-size="11.5" fill="#424242"'


def _short(call: str) -> str:
    """A function's name as a reader looks for it: with its class, or its module."""
    return ".".join(call.split(".")[-2:])


def _text(x: int, y: int, text: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" xml:space="preserve" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
