"""Settings of a training run: defaults, then a TOML file, then flags."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dash_shampoo.train.errors import InputError, choose

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPTIMIZERS = ("dash", "adamw", "muon", "sgd")
SCHEDULES = ("cosine", "wsd")
STRATEGIES = ("ddp", "fsdp", "hsdp")

# What concerns the machines and not the run: may change when a run goes on.
MACHINE = ("strategy", "replicas", "timeout", "threads", "device")

# Found by grid search on small models; see docs/choices.md.
LEARNING_RATES = {"dash": 5e-3, "adamw": 2e-3, "muon": 5e-3, "sgd": 1e-1}


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run. ``None`` leaves a number to the model's size or to the optimizer."""

    model: str = "tiny"
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    tied: bool | None = None
    data: str | None = None
    tokenizer: str = "bytes"
    context: int | None = None
    batch_size: int = 12
    accumulate: int = 1
    steps: int = 2000
    optimizer: str = "dash"
    lr: float | None = None
    weight_decay: float = 0.0
    schedule: str = "cosine"
    warmup: int = 100
    clip: float = 1.0
    eval_every: int = 200
    eval_batches: int = 50
    save_every: int = 500
    log_optimizer: bool = False
    seed: int = 1
    device: str | None = None
    threads: int | None = None
    strategy: str = "ddp"  # with several processes, as the next two
    replicas: int | None = None  # of hsdp
    timeout: float = 600.0  # seconds that a process waits for the others
    options: dict[str, Any] = field(default_factory=dict)  # of the optimizer

    def check(self) -> None:
        """Raises InputError for numbers and names that make no run."""
        if ":" not in self.optimizer:
            choose("optimizer", self.optimizer, OPTIMIZERS)
        elif self.lr is None:
            raise InputError(f"{self.optimizer} has no usual learning rate here: give --lr")
        choose("schedule", self.schedule, SCHEDULES)
        for name in ("batch_size", "accumulate", "steps", "eval_every", "eval_batches", "save_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("warmup", "clip", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} must be a finite number of at least 0, not {getattr(self, name)}")
        if not 0 <= self.learning_rate < math.inf:
            raise InputError(f"lr must be a finite number of at least 0, not {self.lr}")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed must be at least 0 and below 2^63, not {self.seed}")
        for name in ("lr", "weight_decay"):
            if name in self.options:
                raise InputError(f"{name} is a setting and no option of the optimizer: give --{name.replace('_', '-')}")
        if self.threads is not None and self.threads < 1:
            raise InputError(f"threads must be at least 1, not {self.threads}")
        choose("strategy", self.strategy, STRATEGIES)
        if self.strategy == "hsdp" and (self.replicas is None or self.replicas < 2):
            raise InputError(f"strategy hsdp needs replicas, at least 2, not {self.replicas}")
        if self.strategy != "hsdp" and self.replicas is not None:
            raise InputError(f"replicas is for strategy hsdp, not for {self.strategy}")
        if not 0 < self.timeout < math.inf:
            raise InputError(f"timeout must be a finite number of seconds above 0, not {self.timeout}")

    def check_size(self, size: int) -> None:
        """Raises InputError if ``size`` processes cannot do the run."""
        if size == 1 and self.strategy != "ddp":
            raise InputError(
                f"strategy {self.strategy} needs several processes: "
                "torchrun --standalone --nproc-per-node N -m dash_shampoo train ..."
            )
        if self.batch_size % size:
            raise InputError(
                f"batch_size {self.batch_size}, which is that of all processes together, does not divide by {size}"
            )
        if self.replicas is not None and (size % self.replicas or size == self.replicas):
            raise InputError(f"{size} processes do not divide into {self.replicas} replicas of two or more each")

    def on_machine(self, size: int, changes: dict[str, Any]) -> Settings:
        """The settings of a run that goes on with ``size`` processes and some of `MACHINE` changed."""
        changes = {name: value for name, value in changes.items() if value is not None}
        if size == 1:
            changes.setdefault("strategy", "ddp")  # a run that several processes began
        if changes.get("strategy", "hsdp") != "hsdp":
            changes.setdefault("replicas", None)
        return dataclasses.replace(self, **changes)

    @property
    def learning_rate(self) -> float:
        """The peak learning rate: what was asked for, or the optimizer's usual one."""
        return LEARNING_RATES[self.optimizer] if self.lr is None else self.lr


def load_settings(file: Path | None, flags: dict[str, Any], options: dict[str, Any]) -> Settings:
    """Settings from a TOML file and from flags.

    Args:
        file: a TOML file, or ``None``. Options of the optimizer are in its table "options", or in a table "optimizer"
            beside the optimizer's "name".
        flags: settings given as flags; ``None`` values were not given.
        options: options of the optimizer given as flags.

    Raises:
        InputError: there is no such file, it is no TOML, or it has a key that is no setting.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise InputError(f"no such file: {file}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise InputError(f"{file} cannot be read as TOML: {error}") from error
    if isinstance(values.get("optimizer"), dict):
        table = dict(values["optimizer"])
        values["optimizer"] = table.pop("name", Settings.optimizer)
        options = {**table, **options}
    kinds = {each.name: each.type for each in dataclasses.fields(Settings)}
    for name, value in values.items():
        choose("setting", name, kinds)
        _check_kind(name, value, str(kinds[name]))
    values.update({name: value for name, value in flags.items() if value is not None})
    values["options"] = {**values.get("options", {}), **options}
    settings = Settings(**values)
    settings.check()
    return settings


def _check_kind(name: str, value: Any, kind: str) -> None:
    allowed: dict[str, type | tuple[type, ...]] = {
        "int": int,
        "float": (int, float),
        "str": str,
        "bool": bool,
        "dict": dict,
    }
    wanted = next(python for word, python in allowed.items() if kind.startswith(word))
    if not isinstance(value, wanted) or (isinstance(value, bool) and not kind.startswith("bool")):
        raise InputError(
            f"{name} must be of type {kind.split(' |', maxsplit=1)[0].split('[', maxsplit=1)[0]}, not {value!r}"
        )


def parse_option(text: str) -> tuple[str, Any]:
    """``key=value`` with the value in TOML's notation (a bare word is a string).

    Raises:
        InputError: there is no "=" in it.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--set takes key=value, not {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value
