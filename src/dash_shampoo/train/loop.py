"""The training loop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from dash_shampoo import Dash
from dash_shampoo.train.data import Batches, load_corpus
from dash_shampoo.train.errors import InputError
from dash_shampoo.train.llama import SIZES, Llama, config_for
from dash_shampoo.train.optimizers import make_optimizers, make_schedulers
from dash_shampoo.train.run import Run
from dash_shampoo.train.settings import Settings

INTERRUPTED = 130  # exit code of a program that SIGINT ended


@dataclass
class Result:
    """What a run has come to.

    Attributes:
        before: validation loss before the first step.
        after: validation loss after the last.
        seconds: of training, evaluation left out.
        optimizer_seconds: of those, in the optimizer's step.
        tokens: trained on in that time.
        interrupted: whether a signal ended the run early.
    """

    before: float
    after: float
    seconds: float
    optimizer_seconds: float
    tokens: int
    interrupted: bool


class Trainer:
    """A model, its data and its optimizer, which `train` steps through."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = pick_device(settings.device)
        torch.manual_seed(settings.seed)
        context = settings.context or config_for(settings.model).context
        corpus = load_corpus(settings.data, settings.tokenizer, context)
        self.text = corpus.fingerprint()
        self.model = Llama(
            config_for(
                settings.model,
                layers=settings.layers,
                width=settings.width,
                heads=settings.heads,
                kv_heads=settings.kv_heads,
                hidden=settings.hidden,
                tied=settings.tied,
                context=context,
                vocabulary=max(corpus.vocabulary, 1),
            )
        ).to(self.device)
        self.batches = Batches(corpus.train, settings.batch_size, context, settings.seed)
        self.validation = corpus.validation
        self.optimizers = make_optimizers(self.model, settings)
        self.schedulers = make_schedulers(self.optimizers, settings)
        self.step = 0
        self.before = math.nan
        self.seconds = self.optimizer_seconds = 0.0
        # bfloat16 where it is fast; a CPU keeps float32, where runs are exact to the bit.
        self.autocast = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    @property
    def tokens_per_step(self) -> int:
        s = self.settings
        return s.batch_size * s.accumulate * self.batches.context

    def train_step(self) -> float:
        """One step of the optimizer, with its gradient averaged over the accumulated batches; returns the loss."""
        start = time.perf_counter()
        total = torch.zeros((), device=self.device)
        for _ in range(self.settings.accumulate):
            tokens, targets = self.batches.draw(self.device)
            with self.autocast:
                loss = self.model.loss(tokens, targets) / self.settings.accumulate
            loss.backward()
            total += loss.detach()
        if self.settings.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        value = total.item()  # waits for the gradients, so that what follows times the optimizer alone
        middle = time.perf_counter()
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        stop = time.perf_counter()
        self.seconds += stop - start
        self.optimizer_seconds += stop - middle
        self.step += 1
        return value

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on validation batches that are the same at every call."""
        batches = Batches(self.validation, self.settings.batch_size, self.batches.context, seed=0)
        self.model.eval()
        losses: list[Tensor] = []
        for _ in range(self.settings.eval_batches):
            tokens, targets = batches.draw(self.device)
            with self.autocast:
                losses.append(self.model.loss(tokens, targets))
        self.model.train()
        return torch.stack(losses).mean().item()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "generator": self.batches.generator.get_state(),
            "text": self.text,
            "step": self.step,
            "before": self.before,
            "seconds": self.seconds,
            "optimizer_seconds": self.optimizer_seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["text"] != self.text:
            raise InputError("the text or its tokenizer has changed since the checkpoint: the run cannot go on with it")
        self.model.load_state_dict(state["model"])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        for scheduler, own in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(own)
        self.batches.generator.set_state(state["generator"].cpu())
        for name in ("step", "before", "seconds", "optimizer_seconds"):
            setattr(self, name, state[name])


def train(settings: Settings, folder: Path | None, resume: Path | None, console: Console) -> tuple[Run, Result]:
    """Trains as the settings say, or goes on with an earlier run; returns its folder and what it has come to.

    Raises:
        InputError: a setting, the data or the folder cannot be used; nothing has been written then.
    """
    run = None
    if resume is not None:
        run, settings = Run.open(resume)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    trainer = Trainer(settings)
    state = run.load(trainer.device) if run else None
    if state is not None:
        try:
            trainer.load_state_dict(state)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"the checkpoint in {resume} does not fit the settings there: {error}") from error
    with interruptible() as interrupted:
        if run is None:
            run = Run.create(folder, settings)
            run.save(trainer.state_dict())
        else:
            run.forget_after(trainer.step)
        if math.isnan(trainer.before):
            trainer.before = trainer.evaluate()
            log_validation(run, trainer, trainer.before)
        with progress(console, settings) as bar:
            last = steps(trainer, run, bar, interrupted)
        # Before the evaluation, which may take longer than who interrupts is willing to wait.
        run.save(trainer.state_dict())
        after = trainer.evaluate() if last is None else last
    run.close()
    result = Result(
        before=trainer.before,
        after=after,
        seconds=trainer.seconds,
        optimizer_seconds=trainer.optimizer_seconds,
        tokens=trainer.step * trainer.tokens_per_step,
        interrupted=bool(interrupted),
    )
    return run, result


def steps(trainer: Trainer, run: Run, bar: Progress, interrupted: list[int]) -> float | None:
    """Trains to the last step, or to an interruption; returns the validation loss there if it has been taken."""
    settings = trainer.settings
    known = [row["validation/loss"] for row in run.metrics() if "validation/loss" in row]
    validation = known[-1] if known else trainer.before
    shown: dict[str, Any] = {"loss": math.nan, "validation": validation, "rate": 0.0, "share": 0.0}
    task = bar.add_task("", total=settings.steps, completed=trainer.step, **shown)
    after: float | None = trainer.before if trainer.step == 0 else None
    while trainer.step < settings.steps and not interrupted:
        loss = trainer.train_step()
        after = None
        share = trainer.optimizer_seconds / trainer.seconds
        rate = trainer.step * trainer.tokens_per_step / trainer.seconds
        if trainer.step % 10 == 0 or trainer.step == settings.steps:
            values = {"train/loss": loss, "tokens_per_second": rate, "optimizer_share": share}
            values["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
            run.log(trainer.step, **values)
        if trainer.step % settings.eval_every == 0 or trainer.step == settings.steps:
            after = validation = trainer.evaluate()
            log_validation(run, trainer, validation)
        if trainer.step % settings.save_every == 0:
            run.save(trainer.state_dict())
        bar.update(task, completed=trainer.step, loss=loss, validation=validation, rate=rate, share=share)
    return after


def log_validation(run: Run, trainer: Trainer, loss: float) -> None:
    """Writes down a validation loss, and what Dash says of itself."""
    values = {"validation/loss": loss, "validation/perplexity": perplexity(loss), **diagnostics(trainer)}
    run.log(trainer.step, **values)


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is beyond a float."""
    return torch.tensor(loss, dtype=torch.float64).exp().item()


def diagnostics(trainer: Trainer) -> dict[str, float]:
    """What Dash says of itself, for the log."""
    own = [optimizer.diagnostics() for optimizer in trainer.optimizers if isinstance(optimizer, Dash)]
    return {f"dash/{name}": value for each in own for name, value in each.items()}


def pick_device(name: str | None) -> torch.device:
    """The device that was asked for, or the GPU if there is one.

    Raises:
        InputError: there is no such device.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"no device {name!r} here") from error
    return device


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """A list that SIGINT or SIGTERM adds itself to, so that the loop ends after its step; a second one acts at once."""
    received: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(each) for each in signals]

    def restore() -> None:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)

    def receive(number: int, _: object) -> None:
        received.append(number)
        restore()

    for each in signals:
        signal.signal(each, receive)
    try:
        yield received
    finally:
        restore()


def progress(console: Console, settings: Settings) -> Progress:
    """The progress bar."""
    return Progress(
        TextColumn(f"{settings.model} {settings.optimizer}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("loss {task.fields[loss]:.3f}  validation {task.fields[validation]:.3f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s  optimizer {task.fields[share]:.0%}"),
        TimeRemainingColumn(),
        console=console,
    )


def sizes() -> str:
    """The names of the model sizes, for help texts."""
    return ", ".join(SIZES)
