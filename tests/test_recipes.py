"""Every example runs in a process of its own, and its loss falls."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scripts import Scripts

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDS = {
    "transformers_trainer": "transformers",
    "accelerate_loop": "accelerate",
    "lightning_module": "lightning",
    "lora": "peft",
    "digits_convnet": "sklearn",
    "vision_timm": "timm",
}


PARALLEL = ("several_processes",)
CASES = [
    *((path.stem, 1, ()) for path in sorted(EXAMPLES.glob("*.py")) if path.stem not in (*PARALLEL, "fsdp_tp")),
    *((name, 2, (strategy,)) for name in PARALLEL for strategy in ("ddp", "fsdp")),
    ("accelerate_loop", 2, ()),
]


def run(scripts: Scripts, name: str, processes: int, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs an example in ``folder``."""
    imports = [NEEDS[name]] if name in NEEDS else []
    return scripts.run(EXAMPLES / f"{name}.py", *arguments, folder=folder, processes=processes, imports=imports)


@pytest.mark.parametrize(("name", "processes", "arguments"), CASES)
def test_example_runs_and_its_loss_falls(
    scripts: Scripts, name: str, processes: int, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    package = NEEDS.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'dash-shampoo[examples]'")
    done = run(scripts, name, processes, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the part of one process" not in done.stderr
    before, after = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", done.stdout)[-1])
    assert after < 0.9 * before


def test_fsdp_with_tensor_parallelism_is_killed_and_resumed_to_the_bit_and_on_other_processes(
    scripts: Scripts, tmp_path: Path
) -> None:
    straight, broken, fewer = (tmp_path / name for name in ("straight", "broken", "fewer"))
    unbroken = run(scripts, "fsdp_tp", 4, "--folder", str(straight), folder=tmp_path)
    assert unbroken.returncode == 0, unbroken.stderr
    killed = run(scripts, "fsdp_tp", 4, "--folder", str(broken), "--fail-at", "47", folder=tmp_path)
    assert killed.returncode != 0
    assert (broken / "done").read_text() == "40"
    shutil.copytree(broken, fewer)
    resumed = run(scripts, "fsdp_tp", 4, "--folder", str(broken), folder=tmp_path)
    assert "weights" in resumed.stdout, resumed.stderr
    assert resumed.stdout == unbroken.stdout
    on_two = run(
        scripts, "fsdp_tp", 2, "--tensor", "1", "--folder", str(fewer), folder=tmp_path
    )  # sums in another order
    losses = [
        tuple(map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", done.stdout)[0])) for done in (unbroken, on_two)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0][1] < 0.9 * losses[0][0]
