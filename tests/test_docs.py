"""Pages of the documentation: links lead somewhere, the site has all of them, and what they show runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
PROGRAMS = ("start", "migrating", "finetuning", "experts", "vision", "checkpoints")  # whole programs, top to bottom
FENCE = re.compile(r"^(```+|~~~+)(\w*)[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What links may name in a page, as GitHub and the site make it of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(page: Path) -> list[str]:
    """The Python that a page shows."""
    return [text for _, language, text in FENCE.findall(page.read_text(encoding="utf-8")) if language == "python"]


def leaves(nav: Any) -> Iterator[str]:
    """The pages of a navigation."""
    if isinstance(nav, str):
        yield nav
    for each in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from leaves(each)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_the_site_has_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    hooks = (ROOT / "scripts" / "site_hooks.py").read_text(encoding="utf-8")
    outside = ast.literal_eval(re.findall(r"^OUTSIDE = (.*)$", hooks, re.MULTILINE)[0])
    assert all((ROOT / path).exists() for path in outside.values())
    own = [path.name for path in ROOT.glob("docs/*.md")]
    assert sorted(leaves(site["nav"])) == sorted([*own, *outside])
    assert all((ROOT / "docs" / path).exists() for path in site["extra_css"])


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_blocks_of_code_are_python(page: Path) -> None:
    for block in blocks(page):
        ast.parse(block)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_page_shows_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / f"{name}.md"
    exec(compile("\n".join(blocks(page)), page, "exec"), {"__name__": name})


def test_the_tables_of_options_name_options_of_dash() -> None:
    options = ast.parse((ROOT / "src" / "dash_shampoo" / "optimizer.py").read_text(encoding="utf-8"))
    (init,) = [node for node in ast.walk(options) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    known = {argument.arg for argument in [*init.args.args, *init.args.kwonlyargs]}
    text = prose(ROOT / "docs" / "tuning.md")
    named = set(re.findall(r"`([a-z]+_[a-z_]+)(?:=[^`]*)?`", text))
    assert named
    assert named <= known
