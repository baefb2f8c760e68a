"""A run folder: settings, metrics, TensorBoard events, a checkpoint and a plot."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch

from dash_shampoo.train.errors import InputError
from dash_shampoo.train.settings import Settings

SETTINGS, METRICS, CHECKPOINT, PLOT = "settings.json", "metrics.jsonl", "checkpoint.pt", "loss.png"


class Run:
    """The files of one training run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._events: Any = None
        self._first_step: int | None = None  # of this process, when it goes on with an earlier one's run

    @classmethod
    def create(cls, folder: Path | None, settings: Settings) -> Run:
        """Makes a new folder: the one given, or the first free ``runs/MODEL-OPTIMIZER-NNN``.

        Raises:
            InputError: the folder exists already, or cannot be made.
        """
        if folder is None:
            base = f"{settings.model}-{settings.optimizer}".replace(":", "-")
            folder = next(path for i in range(1, 10**6) if not (path := Path("runs") / f"{base}-{i:03d}").exists())
        try:
            folder.mkdir(parents=True)
        except FileExistsError as error:
            raise InputError(f"{folder} exists already: choose another --run, or --resume {folder}") from error
        except OSError as error:
            raise InputError(f"cannot make the folder {folder}: {error.strerror}") from error
        run = cls(folder)
        text = json.dumps(dataclasses.asdict(settings), indent=2)
        (folder / SETTINGS).write_text(text + "\n", encoding="utf-8")
        return run

    @classmethod
    def open(cls, folder: Path) -> tuple[Run, Settings]:
        """An earlier run and its settings.

        Raises:
            InputError: there is no run in that folder, or no checkpoint yet.
        """
        for name in (SETTINGS, CHECKPOINT):
            if not (folder / name).is_file():
                raise InputError(f"{folder} holds no run to resume: there is no {name}")
        try:
            settings = Settings(**json.loads((folder / SETTINGS).read_text(encoding="utf-8")))
            settings.check()
        except (ValueError, TypeError) as error:
            raise InputError(f"{folder / SETTINGS} cannot be read: {error}") from error
        return cls(folder), settings

    def log(self, step: int, **values: float) -> None:
        """Writes numbers to the metrics and to TensorBoard."""
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._writer().add_scalar(name, value, step)

    def metrics(self) -> list[dict[str, float]]:
        """What has been logged so far."""
        path = self.folder / METRICS
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def forget_after(self, step: int) -> None:
        """Drops metrics of later steps than ``step``, which a resumed run will take again."""
        kept = [json.dumps(row) + "\n" for row in self.metrics() if row["step"] <= step]
        _write_whole(self.folder / METRICS, lambda path: path.write_text("".join(kept), encoding="utf-8"))
        self._first_step = step + 1

    def save(self, state: dict[str, Any]) -> None:
        """Writes a checkpoint, of which at every moment a whole one is there."""
        _write_whole(self.folder / CHECKPOINT, lambda path: torch.save(state, path))

    def load(self, device: torch.device, *, mapped: bool = False) -> dict[str, Any]:
        """The checkpoint.

        Args:
            device: to have its tensors on.
            mapped: leave them in the file until they are used, so that processes of one machine share the memory.

        Raises:
            InputError: it is damaged.
        """
        try:
            state: dict[str, Any] = torch.load(
                self.folder / CHECKPOINT, map_location=device, weights_only=True, mmap=mapped
            )
        except Exception as error:  # a damaged file makes torch raise anything from EOFError to UnpicklingError
            raise InputError(f"{self.folder / CHECKPOINT} cannot be read: it is damaged") from error
        return state

    def plot(self) -> Path:
        """Draws the losses; returns the picture's path."""
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for name, style in (("train/loss", {"alpha": 0.4}), ("validation/loss", {"marker": "o", "markersize": 3})):
            points = [(row["step"], row[name]) for row in self.metrics() if name in row]
            axes.plot([x for x, _ in points], [y for _, y in points], label=name, **style)
        axes.set(xlabel="step", ylabel="loss (nats per token)", title=self.folder.name)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self.folder / PLOT, dpi=120)
        plt.close(figure)
        return self.folder / PLOT

    def close(self) -> None:
        """Finishes the TensorBoard events."""
        if self._events is not None:
            self._events.close()

    def _writer(self) -> Any:
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(self.folder), purge_step=self._first_step)
        return self._events


class Elsewhere(Run):
    """A run whose folder another process writes: reads settings and checkpoint, and writes nothing."""

    @classmethod
    def create(cls, folder: Path | None, _: Settings) -> Elsewhere:
        return cls(folder or Path())

    def log(self, step: int, **values: float) -> None: ...

    def metrics(self) -> list[dict[str, float]]:
        return []

    def forget_after(self, step: int) -> None: ...

    def save(self, state: dict[str, Any]) -> None: ...


def _write_whole(path: Path, write: Any) -> None:
    """Writes to a file beside ``path`` and then puts it in its place, so that a cut leaves the old or the new one."""
    beside = path.with_suffix(path.suffix + ".tmp")
    write(beside)
    os.replace(beside, path)
