"""docs/architecture.md is true: what may import what, the order of a step's stages, and the words."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from types import CodeType, FrameType, ModuleType

import torch
from torch import nn

from dash_shampoo import Dash

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "dash_shampoo"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def modules() -> dict[str, Path]:
    """Every module below the package, by its dotted name; the package itself is ``__init__``."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "dash_shampoo":
                while rest and rest not in known:  # a name in a module
                    rest = rest.rpartition(".")[0]
                yield rest or "__init__"


def rows() -> dict[str, int]:
    """The row of each module or package in the page's table."""
    return {name: int(row) for row, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", PAGE, re.MULTILINE)}


def unit(module: str) -> str:
    return module.partition(".")[0]


def test_every_module_has_its_row() -> None:
    assert rows().keys() == {unit(module) for module in modules()}


def test_modules_import_from_rows_above_their_own_alone() -> None:
    known, row = modules(), rows()
    against = [
        f"{module} imports {other}"
        for module, path in known.items()
        for other in imported(path, known)
        if unit(other) != unit(module) and row[unit(other)] >= row[unit(module)]
    ]
    assert not against


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    TopologicalSorter({module: set(imported(path, known)) - {module} for module, path in known.items()}).prepare()


def picture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("picture", ROOT / "scripts" / "architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def codes(call: str) -> set[CodeType]:
    """The code of a function below the package; of a method also that of its overrides."""
    *path, name = call.split(".")
    depth = max(i for i in range(1, len(path) + 1) if ".".join(path[:i]) in modules())
    holder = importlib.import_module(".".join(["dash_shampoo", *path[:depth]]))
    holders: list[object] = [holder]
    for part in path[depth:]:
        holder = getattr(holder, part)
        assert isinstance(holder, type)
        holders = [holder, *holder.__subclasses__()]
    functions: list[Callable[..., object]] = [vars(each)[name] for each in holders if name in vars(each)]
    return {inspect.unwrap(function).__code__ for function in functions}


def ready_to_step() -> Dash:
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    return Dash(model.parameters())


def test_the_picture_names_the_functions_of_a_step_in_their_order() -> None:
    calls = [call for stage in picture().STAGES for call in stage.calls]
    known = {code: call for call in calls for code in codes(call)}
    optimizer = ready_to_step()
    ready_to_step().step()  # the first of all runs a solver, to count its products
    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in known:
            seen.setdefault(known[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        optimizer.step()
    finally:
        sys.setprofile(before)
    assert list(seen) == calls


def test_the_picture_is_what_its_script_draws() -> None:
    assert picture().TARGET.read_text(encoding="utf-8") == picture().draw()


def test_the_words_stand_in_the_code() -> None:
    words = re.findall(r"^\| (\w+) \|", PAGE.partition("## Words of the code")[2], re.MULTILINE)
    text = "\n".join(path.read_text(encoding="utf-8") for path in modules().values())
    assert len(words) > 10
    assert not [word for word in words if not re.search(rf"\b{word}s?\b", text, re.IGNORECASE)]
