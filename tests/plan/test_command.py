"""`dash-shampoo plan`, as a person meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dash_shampoo.cli import main
from dash_shampoo.plan.devices import DEVICES
from dash_shampoo.plan.report import in_bytes, in_flops, in_milliseconds

Call = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def command(arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["dash-shampoo", "plan", *arguments.split()])
        with pytest.raises(SystemExit) as stopped:
            main()
        code = stopped.value.code
        assert isinstance(code, int)
        return subprocess.CompletedProcess(sys.argv, code, *capsys.readouterr())

    return command


def test_the_table_says_what_each_rank_takes(call: Call) -> None:
    done = call("--model llama-953m --world-size 8 --strategy fsdp --block-size 1024 --set beta2=1 --gpu h200")
    assert done.returncode == 2
    assert "unknown option of dash 'beta2'" in done.stderr
    done = call("--model llama-953m --world-size 8 --strategy fsdp --block-size 1024 --gpu h200 --momentum 0.9")
    assert (done.returncode, done.stderr) == (0, "")
    assert "llama-953m, 953,223,168 parameters, fsdp on 8 x h200" in done.stdout
    rows = {line[:24].strip(): line.split() for line in done.stdout.splitlines()}
    assert rows["blocks"][-5:-4] == ["1,087"]
    for name in ("means", "grafting statistics", "factors, roots", "momentum", "workspace (peak)", "roots, at most"):
        assert name in rows
    for name in ("gradients sent", "updates received", "survey sent", "exchange", "step, averaged", "longest step"):
        assert name in rows
    assert "load balance" in done.stdout
    assert "measured in the paper" not in done.stdout
    assert "50% of the peak rates" in done.stdout


def test_the_papers_times_stand_beside_the_estimate_of_its_setting(call: Call) -> None:
    done = call("--model llama-953m --world-size 8 --strategy ddp --gpu h100 --update-every 1 --root 4")
    assert done.returncode == 0
    rows = {line[:40].strip(): line.split()[-1] for line in done.stdout.splitlines() if line.strip()}
    assert rows["Newton-DB"] == "177"
    assert rows["coupled Newton in FP16"] == "119"


def test_one_process_sends_nothing(call: Call) -> None:
    done = call("--model tiny --gpu cpu")
    assert done.returncode == 0
    assert "alone on 1 x cpu" in done.stdout
    assert "sent" not in done.stdout


def test_json_has_every_rank(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = call(f"--model tiny --world-size 6 --strategy hsdp --replicas 2 --dtype bf16 --json {file}")
    assert done.returncode == 0, done.stderr
    content = json.loads(file.read_text())
    assert (content["world_size"], content["copies"], content["dtype"]) == (6, 2, "bf16")
    assert content["options"]["block_size"] == 1024
    assert content["rates"]["fp32"] == 67e12
    for name, amount in content["amounts"].items():
        assert len(amount["ranks"]) == 6, name
        assert sum(amount["ranks"]) == pytest.approx(amount["total"])
        assert max(amount["ranks"]) == amount["max"]
    state = content["amounts"]["state"]["ranks"]
    kinds = [amount["ranks"] for name, amount in content["amounts"].items() if name.startswith("state/")]
    assert [sum(kind) for kind in zip(*kinds, strict=True)] == state
    assert "budget" not in content


def test_a_budget_says_what_fits(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = call(f"--model llama-18m --world-size 4 --update-every 5 --memory-budget 0.3 --json {file}")
    assert done.returncode == 0, done.stderr
    budget = json.loads(file.read_text())["budget"]
    assert {choice["block_size"] for choice in budget["choices"]} == {256, 512, 1024, 2048, 4096}
    assert {choice["update_every"] for choice in budget["choices"]} == {1, 5, 10, 100}
    assert all(choice["fits"] == (choice["memory"] <= 3e8) for choice in budget["choices"])
    assert {choice["fits"] for choice in budget["choices"]} == {True, False}
    assert "what fits 300 MB" in done.stdout
    assert done.stdout.count("B fits") == sum(choice["fits"] for choice in budget["choices"])
    done = call("--model llama-18m --world-size 4 --memory-budget 0.001")
    assert "nothing fits: the least is" in done.stdout


def test_numbers_have_three_digits_and_a_unit() -> None:
    assert [in_bytes(each) for each in (0, 12, 999.4, 999.6, 1e9, 2.5e16)] == [
        "0 B",
        "12 B",
        "999 B",
        "1 kB",
        "1 GB",
        "25 PB",
    ]
    assert [in_milliseconds(each) for each in (2.5e-4, 0.9996, 12.34)] == ["0.25 ms", "1 s", "12.3 s"]
    assert in_flops(7) == "7"


@pytest.mark.parametrize("name", DEVICES)
def test_devices_are_faster_in_narrower_formats_and_within_a_node(name: str) -> None:
    device = DEVICES[name]
    assert 0 < device.fp32 == device.product("fp32") <= device.product("tf32") <= device.product("fp16")
    assert device.product("fp16x3") == device.fp16 / 3
    assert device.wire(device.per_node) == device.link >= device.network == device.wire(device.per_node + 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model llama-7bb", "did you mean 'llama-7b'?"),
        ("--strategy fsdb", "did you mean 'fsdp'?"),
        ("--gpu h10", "did you mean 'h100'?"),
        ("--world-size 0", "--world-size must be at least 1"),
        ("--world-size 2 --strategy alone", "is one process"),
        ("--world-size 4 --strategy hsdp", "needs --replicas"),
        ("--world-size 4 --strategy hsdp --replicas 3", "do not divide"),
        ("--world-size 4 --strategy fsdp --replicas 2", "--replicas is for the strategy 'hsdp'"),
        ("--efficiency 0", "--efficiency must be above 0"),
        ("--memory-budget 0", "--memory-budget must be above 0"),
        ("--json nowhere/plan.json", "cannot write nowhere/plan.json"),
        ("--block-size 0", "block_size must be a positive integer"),
        ("--solver minmax", "did you mean 'minimax'?"),
        ("--set blocksize=3", "did you mean 'block_size'?"),
        ("--set block_size", "--set takes key=value"),
        ("--set process_group=1", "unknown option of dash"),
        ("--wire-dtype fp8", "unknown wire_dtype"),
        ("--dtype fp8", "unknown dtype"),
        ("--heads 3", "does not divide"),
    ],
)
def test_mistakes_are_one_line(call: Call, arguments: str, message: str) -> None:
    done = call(arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
