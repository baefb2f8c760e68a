"""The training loop."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from dash_shampoo import Dash
from dash_shampoo.diagnostics import merge
from dash_shampoo.train.data import Batches, load_corpus
from dash_shampoo.train.errors import InputError
from dash_shampoo.train.llama import SIZES, Llama, config_for, cross_entropy
from dash_shampoo.train.optimizers import make_optimizers, make_schedulers
from dash_shampoo.train.processes import ALONE, Processes, interruptible, pick_device, set_threads
from dash_shampoo.train.run import Elsewhere, Run
from dash_shampoo.train.settings import Settings
from dash_shampoo.train.strategies import hold

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
    """A model, its data and its optimizer, which `train` steps through. With several processes all is collective.

    Args:
        settings: that decide the run.
        processes: that train together, each on its share of every batch.

    Raises:
        InputError: settings or data cannot be used, in every process.
    """

    def __init__(self, settings: Settings, processes: Processes = ALONE) -> None:
        self.settings = settings
        self.processes = processes
        self.device = processes.together(lambda: pick_device(settings.device, processes))
        torch.manual_seed(settings.seed)
        context = settings.context or processes.together(lambda: config_for(settings.model)).context
        corpus = processes.together(lambda: load_corpus(settings.data, settings.tokenizer, context))
        self.text = corpus.fingerprint()
        processes.agree("the text or its tokenizer", self.text)
        model = processes.together(lambda: make_model(settings, context, corpus.vocabulary))
        self.held = hold(model, settings, self.device, processes)
        self.model = self.held.model
        self.batches = self._batches(corpus.train, context, settings.seed)
        self.validation = corpus.validation
        self.optimizers = processes.together(lambda: make_optimizers(self.model, settings))
        self.schedulers = make_schedulers(self.optimizers, settings)
        self.step = 0
        self.before = math.nan
        self.seconds = self.optimizer_seconds = 0.0
        # bfloat16 where it is fast; a CPU keeps float32, where runs are exact to the bit.
        self.autocast = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        self.signals: list[int] = []  # that have come to this process
        self._agreed = False

    @property
    def tokens_per_step(self) -> int:
        """Over all processes."""
        s = self.settings
        return s.batch_size * s.accumulate * self.batches.context

    @property
    def interrupted(self) -> bool:
        """Whether a signal has come: of several processes, to any before the last loss, which all know alike."""
        return bool(self.signals) if self.processes.size == 1 else self._agreed

    def train_step(self) -> float:
        """One step of the optimizer, with its gradient averaged over the accumulated batches; returns the loss."""
        start = time.perf_counter()
        total = torch.zeros((), device=self.device)
        for i in range(self.settings.accumulate):
            tokens, targets = self.batches.draw(self.device)
            with self.held.reducing(last=i == self.settings.accumulate - 1):
                with self.autocast:
                    loss = cross_entropy(self.held.module(tokens), targets) / self.settings.accumulate
                loss.backward()
            total += loss.detach()
        if self.settings.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        value = self._average(total)  # waits for the gradients, so that what follows times the optimizer alone
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
        batches = self.validation_batches()
        self.model.eval()
        losses: list[Tensor] = []
        for _ in range(self.settings.eval_batches):
            tokens, targets = batches.draw(self.device)
            with self.autocast:
                losses.append(self.model.loss(tokens, targets))
        self.model.train()
        self.held.evaluated()
        return self._average(torch.stack(losses).mean())

    def state_dict(self) -> dict[str, Any]:
        """Everything a run goes on from, on any number of processes; of several, rank 0 alone gets all of it."""
        return {
            "model": self.held.model_state(),
            "optimizers": [self.held.optimizer_state(optimizer) for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "generator": self.batches.generator.get_state(),
            "text": self.text,
            "step": self.step,
            "before": self.before,
            "seconds": self.seconds,
            "optimizer_seconds": self.optimizer_seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to where `state_dict` was, whatever number of processes it was on. Nothing here is collective."""
        if state["text"] != self.text:
            raise InputError("the text or its tokenizer has changed since the checkpoint: the run cannot go on with it")
        self.held.load_model(state["model"])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            self.held.load_optimizer(optimizer, own)
        for scheduler, own in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(own)
        self.batches.generator.set_state(state["generator"].cpu())
        for name in ("step", "before", "seconds", "optimizer_seconds"):
            setattr(self, name, state[name])

    def diagnostics(self) -> dict[str, float]:
        """What Dash says of itself, for the log: each process of the roots that it owns."""
        detail = self.settings.log_optimizer
        own = [each.diagnostics(detail=detail) for each in self.optimizers if isinstance(each, Dash)]
        found = [each for part in self.processes.gather(own) for each in part]
        return {f"dash/{name}": value for name, value in merge(found).items()}

    def validation_batches(self) -> Batches:
        """Those that every evaluation draws from, from the first on."""
        return self._batches(self.validation, self.batches.context, seed=0)

    def _batches(self, tokens: Any, context: int, seed: int) -> Batches:
        return Batches(tokens, self.settings.batch_size, context, seed, self.processes.rank, self.processes.size)

    def _average(self, loss: Tensor) -> float:
        """The mean of a loss over the processes, which on the way agree on whether to stop."""
        value, self._agreed = self.processes.average(loss, bool(self.signals))
        return value


def make_model(settings: Settings, context: int, vocabulary: int) -> Llama:
    """The model of the settings, on the CPU.

    Raises:
        InputError: its sizes do not fit each other.
    """
    return Llama(
        config_for(
            settings.model,
            layers=settings.layers,
            width=settings.width,
            heads=settings.heads,
            kv_heads=settings.kv_heads,
            hidden=settings.hidden,
            tied=settings.tied,
            context=context,
            vocabulary=max(vocabulary, 1),
        )
    )


def train(
    settings: Settings, earlier: Run | None, folder: Path | None, console: Console, processes: Processes = ALONE
) -> tuple[Run, Result]:
    """Trains as the settings say, or goes on with an earlier run; returns it and what it has come to.

    Args:
        settings: of the run.
        earlier: run to go on with, or ``None`` for a new one.
        folder: for a new one, as for `Run.create`.
        console: for the progress bar.
        processes: that train together. Collective.

    Raises:
        InputError: a setting, the data or the folder cannot be used; nothing has been written then.
    """
    set_threads(settings.threads, processes)
    trainer = Trainer(settings, processes)
    if earlier is not None:
        processes.together(lambda: go_back(trainer, earlier))
    with interruptible(processes) as trainer.signals:
        if earlier is None:
            kind = Run if processes.leads else Elsewhere
            run = processes.together(lambda: kind.create(folder, settings))
            run.save(trainer.state_dict())
        else:
            run = earlier
            run.forget_after(trainer.step)
        if math.isnan(trainer.before):
            trainer.before = trainer.evaluate()
            log_validation(run, trainer, trainer.before)
        with progress(console, settings) as bar:
            last = steps(trainer, run, bar)
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
        interrupted=trainer.interrupted,
    )
    return run, result


def go_back(trainer: Trainer, run: Run) -> None:
    """Puts the trainer where a run's checkpoint is.

    Raises:
        InputError: the checkpoint is damaged, or does not fit the settings.
    """
    several = trainer.processes.size > 1
    state = run.load(torch.device("cpu") if several else trainer.device, mapped=several)
    try:
        trainer.load_state_dict(state)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"the checkpoint in {run.folder} does not fit the settings there: {error}") from error


def steps(trainer: Trainer, run: Run, bar: Progress) -> float | None:
    """Trains to the last step, or to an interruption; returns the validation loss there if it has been taken."""
    settings = trainer.settings
    known = [row["validation/loss"] for row in run.metrics() if "validation/loss" in row]
    validation = known[-1] if known else trainer.before
    shown: dict[str, Any] = {"loss": math.nan, "validation": validation, "rate": 0.0, "share": 0.0}
    task = bar.add_task("", total=settings.steps, completed=trainer.step, **shown)
    after: float | None = trainer.before if trainer.step == 0 else None
    while trainer.step < settings.steps and not trainer.interrupted:
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
    values = {"validation/loss": loss, "validation/perplexity": perplexity(loss), **trainer.diagnostics()}
    run.log(trainer.step, **values)


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is beyond a float."""
    return torch.tensor(loss, dtype=torch.float64).exp().item()


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
