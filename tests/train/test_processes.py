"""Who the processes are, how they hear of each other's mistakes and signals, and how they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from dash_shampoo.cli import build
from dash_shampoo.train import processes as own
from dash_shampoo.train.errors import InputError
from dash_shampoo.train.processes import ALONE, Processes, interruptible, launched, pick_device, set_threads
from dash_shampoo.train.settings import Settings
from tests.train import jobs

SMALL = "--layers 1 --width 16 --heads 2 --hidden 24 --context 8 --warmup 2 --eval-batches 2 --threads 1 --device cpu"


def test_the_environment_says_who_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert launched() == ALONE
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(InputError, match="MASTER_ADDR is not set"):
        launched()
    for name, value in {"MASTER_ADDR": "here", "MASTER_PORT": "1", "RANK": "5", "LOCAL_RANK": "one"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="LOCAL_RANK is 'one'"):
        launched()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launched() == Processes(5, 8, 1, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert launched() == Processes(5, 8, 1, 4)


def test_each_process_has_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)
    assert pick_device("cuda", Processes(3, 4, 1, 2)) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    assert pick_device("cpu", Processes(3, 4, 1, 2)) == torch.device("cpu")
    for name, processes, message in (
        ("cuda", Processes(2, 3, 2, 3), "3 processes on this machine need as many GPUs, but there are 2"),
        ("cuda:0", Processes(1, 2, 1, 2), "give cuda, not cuda:0"),
        ("mps", Processes(1, 2, 1, 2), "on cpu or cuda, not on mps"),
    ):
        with pytest.raises(InputError, match=message):
            pick_device(name, processes)


def test_processes_share_the_threads_of_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    set_threads(None, ALONE)  # torch's own choice stays
    set_threads(None, Processes(0, 6, 0, 3))
    set_threads(None, Processes(0, 16, 0, 16))
    set_threads(5, Processes(0, 6, 0, 3))
    set_threads(3, ALONE)
    assert chosen == [2, 1, 5, 3]


@pytest.fixture
def heeded() -> Iterator[None]:
    """SIGINT as Python has it: shells start jobs in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded")
def test_of_several_processes_an_echo_of_a_signal_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with interruptible(Processes(0, 2, 0, 2)) as received:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGINT]
        monkeypatch.setattr(own, "ECHO", -1.0)  # so that a coarse clock does not matter
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with interruptible(ALONE) as received:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("settings", "size", "message"),
    [
        ({"strategy": "fsdp"}, 1, "strategy fsdp needs several processes: torchrun"),
        ({"batch_size": 10}, 4, "batch_size 10, which is that of all processes together, does not divide by 4"),
        ({"strategy": "hsdp", "replicas": 4}, 6, "6 processes do not divide into 4 replicas"),
        ({"strategy": "hsdp", "replicas": 2}, 2, "2 processes do not divide into 2 replicas of two or more"),
        ({"strategy": "hsdp"}, 4, "hsdp needs replicas"),
        ({"strategy": "hsdp", "replicas": 1}, 4, "hsdp needs replicas, at least 2, not 1"),
        ({"replicas": 2}, 4, "replicas is for strategy hsdp, not for ddp"),
        ({"strategy": "fspd"}, 4, "did you mean 'fsdp'"),
        ({"timeout": 0.0}, 4, "timeout must be"),
    ],
)
def test_settings_that_do_not_suit_the_processes(settings: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _check(Settings(**settings), size)


def _check(settings: Settings, size: int) -> None:
    settings.check()
    settings.check_size(size)


def test_a_run_that_goes_on_keeps_its_strategy_where_that_makes_sense() -> None:
    settings = Settings(strategy="hsdp", replicas=2, timeout=5.0)
    same = settings.on_machine(4, {"strategy": None, "threads": 3})
    assert (same.strategy, same.replicas, same.timeout, same.threads) == ("hsdp", 2, 5.0, 3)
    for changed in (settings.on_machine(4, {"strategy": "fsdp"}), settings.on_machine(1, {})):
        _check(changed, 4 if changed.strategy == "fsdp" else 1)
    with pytest.raises(InputError, match="needs several processes"):
        _check(settings.on_machine(1, {"strategy": "fsdp"}), 1)


def test_torchrun_leaves_the_flags_to_the_command() -> None:
    import typer

    train = typer.main.get_command(build()).commands["train"]  # type: ignore[attr-defined]
    for names in (parameter.opts for parameter in train.params):
        flag = next(name for name in names if name != "--run")  # which torchrun takes for one of its own
        left = get_args_parser().parse_args(["-m", "dash_shampoo", "train", flag, "1"]).training_script_args
        assert left == ["train", flag, "1"]


def start(folder: Path, arguments: str) -> list[subprocess.Popen[str]]:
    """Two processes as torchrun would start them, but without torchrun, which hides how they end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (folder / "text.txt").write_text(jobs.TEXT)
    return [
        subprocess.Popen(
            [sys.executable, "-m", "dash_shampoo", "train", *arguments.split()],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]


def wait_for_steps(folder: Path, process: subprocess.Popen[str]) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and "train/loss" in metrics.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


def end(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    ends = []
    for process in processes:
        out, errors = process.communicate(timeout=60)
        ends.append((process.returncode, out, errors))
    return ends


def test_a_signal_to_one_process_ends_all_after_the_same_step(tmp_path: Path) -> None:
    processes = start(tmp_path, f"{SMALL} --data text.txt --batch-size 4 --steps 100000 --folder run")
    wait_for_steps(tmp_path, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    (first, out, errors), (second, *silent) = end(processes)
    assert (first, second) == (130, 130)
    assert "go on with: dash-shampoo train --resume run" in errors
    assert "seconds of training" in out
    assert silent == ["", ""]
    assert torch.load(tmp_path / "run" / "checkpoint.pt")["step"] > 0


def test_a_mistake_of_a_flag_is_said_once(tmp_path: Path) -> None:
    (first, _, errors), (second, *silent) = end(start(tmp_path, "--modle tiny"))
    assert (first, second) == (2, 2)
    assert errors.startswith("dash-shampoo: No such option: --modle")
    assert errors.count("\n") == 1
    assert silent == ["", ""]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_lost_or_stuck_ends_the_other(tmp_path: Path, fault: signal.Signals) -> None:
    timeout = 6 if fault == signal.SIGSTOP else 600
    processes = start(
        tmp_path, f"{SMALL} --data text.txt --batch-size 4 --steps 100000 --folder run --timeout {timeout}"
    )
    try:
        wait_for_steps(tmp_path, processes[0])
        processes[1].send_signal(fault)
        _, errors = processes[0].communicate(timeout=30)
    finally:
        processes[1].kill()
        processes[1].communicate()
    assert processes[0].returncode not in (0, 2, 130)
    assert "Error" in errors
    assert torch.load(tmp_path / "run" / "checkpoint.pt")["step"] == 0  # a whole one
