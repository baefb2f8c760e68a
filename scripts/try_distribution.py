"""Tries a wheel as a user would: in a new environment, far from the source, with a training run of a few steps.

python scripts/try_distribution.py dist constraints.txt
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

# The library with torch alone, and a few steps of it.
LIBRARY = """
import sys
import torch
before = set(sys.modules)
import dash_shampoo

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = dash_shampoo.Dash(dash_shampoo.param_groups(model), lr=1e-2)
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
losses = []
for _ in range(20):
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
assert "site-packages" in dash_shampoo.__file__, dash_shampoo.__file__
assert not {"numpy", "typer", "rich", "matplotlib"} & sys.modules.keys() - before, "imported more than torch"
print(dash_shampoo.__version__, "with torch", torch.__version__, f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
"""


def main(dist: Path, constraints: Path) -> None:
    """Installs the one wheel in ``dist``, without and with the command's extra, and uses it."""
    (wheel,) = dist.glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "venv", with_pip=True)
        python = str(Path(folder) / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python")
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(constraints)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

        def run(command: Sequence[str]) -> None:
            subprocess.run(command, cwd=folder, env=environment, check=True)

        run([*install, str(wheel)])
        run([python, "-c", LIBRARY])
        run([*install, f"{wheel}[train]"])
        command = str(Path(python).with_name("dash-shampoo"))
        run([command, "--version"])
        run([command, "train", "--model", "tiny", "--steps", "3", "--batch-size", "2"])
        run([python, "-m", "pip", "check", "--disable-pip-version-check"])


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
