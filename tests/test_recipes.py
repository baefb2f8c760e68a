"""Every example runs in a process of its own, and its loss falls."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDS = {
    "transformers_trainer": "transformers",
    "accelerate_loop": "accelerate",
    "lightning_module": "lightning",
    "lora": "peft",
    "digits_convnet": "sklearn",
}


PARALLEL = ("several_processes",)
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
CASES = [
    *((path.stem, 1, ()) for path in sorted(EXAMPLES.glob("*.py")) if path.stem not in PARALLEL),
    *((name, 2, (strategy,)) for name in PARALLEL for strategy in ("ddp", "fsdp")),
    ("accelerate_loop", 2, ()),
]


@pytest.mark.parametrize(("name", "processes", "arguments"), CASES)
def test_example_runs_and_its_loss_falls(name: str, processes: int, arguments: tuple[str, ...], tmp_path: Path) -> None:
    package = NEEDS.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'dash-shampoo[examples]'")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *(LAUNCHER if processes > 1 else []), EXAMPLES / f"{name}.py", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "the part of one process" not in done.stderr
    before, after = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", done.stdout)[-1])
    assert after < 0.9 * before
