"""What reports are made of: tables in Markdown and HTML, one page that needs no network, and pictures in it."""

from __future__ import annotations

import io
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.metadata import version
from typing import Any

import torch

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto; padding: 1rem; color-scheme: light dark;
       color: light-dark(#1d1f24, #e4e6ea); background: light-dark(#fff, #17191d); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid light-dark(#ddd, #3a3d44); }
th { vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
pre { overflow-x: auto; padding: .7rem; background: light-dark(#f3f4f6, #23262c); }
"""
GREY = "#808690"  # can be read on light and on dark


def page(title: str, body: str, notes: Sequence[str], facts: Mapping[str, str]) -> str:
    """A whole page of HTML: a title, a ``body`` of HTML, what it does not show and what it was made with."""
    known = "\n".join(f"{name}: {value}" for name, value in facts.items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1>{body}<h2>What this does not show</h2>{html_list(notes)}"
        f"<h2>Made with</h2><pre>{escape(known)}</pre></body></html>\n"
    )


def markdown_page(title: str, body: str, notes: Sequence[str], facts: Mapping[str, str]) -> str:
    """The same in Markdown."""
    known = markdown_list([f"{name}: {value}" for name, value in facts.items()])
    return f"# {title}\n\n{body}\n\n## What this does not show\n\n{markdown_list(notes)}\n\n## Made with\n\n{known}\n"


def html_list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def markdown_list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def html_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in line)}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    whole = (headings, ["---"] * len(headings), *lines)
    escaped = ((cell.replace("|", "\\|") for cell in line) for line in whole)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def svg(name: str, draw: Callable[[Any], None]) -> str:
    """What ``draw`` does to axes of matplotlib, as SVG; equal pictures of one ``name`` are equal to the letter."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.hashsalt": name, "text.color": GREY, "axes.labelcolor": GREY, "axes.edgecolor": GREY}):
        figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
        draw(axes)
        axes.tick_params(which="both", colors=GREY)
        axes.grid(alpha=0.25)
        axes.legend(framealpha=0)
        found = io.StringIO()
        figure.savefig(found, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    text = found.getvalue()
    return text[text.index("<svg") :]


def machine() -> dict[str, str]:
    """The command, versions and the machine, for a report."""
    return {
        "command": shlex.join(["dash-shampoo", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "dash-shampoo": version("dash-shampoo"),
    }
