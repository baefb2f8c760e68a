"""One run of a comparison in a process of its own: python -m dash_shampoo.compare.measure SETTINGS EVERY RECORD"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

from dash_shampoo.train.errors import InputError
from dash_shampoo.train.loop import Trainer
from dash_shampoo.train.processes import ALONE, set_threads
from dash_shampoo.train.settings import Settings


def measure(settings: Settings, every: int) -> dict[str, Any]:
    """Trains once.

    Args:
        settings: of the run.
        every: steps between two validation losses.

    Returns:
        ``curve``, a list of [step, seconds of training, validation loss] that a loss which is not finite ends;
        ``loss``, the last; ``seconds`` and, of those, ``optimizer_seconds``; ``tokens_per_step``;
        ``memory``, the most that was in use, in bytes: the device's on a GPU, else the process's; ``parameters``; and
        ``diagnostics``, what Dash said of its stacks at the end, if the settings ask for it.
    """
    set_threads(settings.threads, ALONE)
    trainer = Trainer(settings)
    curve = [[0, 0.0, trainer.evaluate()]]
    while trainer.step < settings.steps and math.isfinite(curve[-1][2]):
        trainer.train_step()
        if trainer.step % every == 0 or trainer.step == settings.steps:
            curve.append([trainer.step, trainer.seconds, trainer.evaluate()])
    return {
        "curve": curve,
        "loss": curve[-1][2],
        "seconds": trainer.seconds,
        "optimizer_seconds": trainer.optimizer_seconds,
        "tokens_per_step": trainer.tokens_per_step,
        "memory": most_memory(trainer.device),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "diagnostics": trainer.diagnostics() if settings.log_optimizer else {},
        "on": str(trainer.device.type),
        "torch": torch.__version__,
    }


def most_memory(device: torch.device) -> int | None:
    """The most memory that was in use so far, in bytes; ``None`` where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def main() -> None:
    settings, every, record = sys.argv[1:]
    try:
        found = measure(Settings(**json.loads(settings)), int(every))
    except InputError as error:
        sys.exit(str(error))
    beside = Path(record).with_suffix(".tmp")
    beside.write_text(json.dumps(found) + "\n", encoding="utf-8")
    os.replace(beside, record)


if __name__ == "__main__":
    main()
