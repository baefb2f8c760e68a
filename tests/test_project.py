"""What stands in several files of the project is the same in all of them."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from dash_shampoo import __version__

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def read(*path: str) -> str:
    return ROOT.joinpath(*path).read_text(encoding="utf-8")


def test_the_citation_and_the_changelog_know_the_version() -> None:
    assert yaml.safe_load(read("CITATION.cff"))["version"] == __version__
    assert f"\n## {__version__}" in read("CHANGELOG.md")


def test_the_workflow_tests_every_python_and_the_lowest_torch_that_the_package_promises() -> None:
    job = yaml.safe_load(read(".github", "workflows", "ci.yml"))["jobs"]["test"]
    promised = re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT)
    assert job["strategy"]["matrix"]["python"] == promised
    assert f'requires-python = ">={promised[0]}"' in PROJECT
    commands = [step.get("run", "") for step in job["steps"]]
    (lowest,) = re.findall(r"'torch==([\d.]+)\.\*'", "\n".join(commands))
    assert f'"torch>={lowest}"' in PROJECT
    assert ".ci/run" in commands


def test_every_target_of_make_that_is_written_about_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.yml"), ROOT / ".ci" / "run"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"(?:^ {4}|^|`|run: )make ([a-z-]+)", text, re.MULTILINE))
    assert {"test", "dist"} <= named <= targets
