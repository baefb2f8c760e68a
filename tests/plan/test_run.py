"""The plan says what a run on real processes does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dash_shampoo.plan.devices import DEVICES
from dash_shampoo.plan.model import options, parameters
from dash_shampoo.plan.plan import Plan, make, own
from dash_shampoo.plan.ranks import ranks
from dash_shampoo.plan.seconds import Rates
from dash_shampoo.plan.tiles import tiles_of
from tests.parallel.processes import Processes
from tests.plan import jobs

STRATEGIES = {"alone": "alone", "replicated": "ddp", "fsdp": "fsdp", "hsdp": "hsdp"}
OPTIONS: dict[str, Any] = {"block_size": 16, "update_every": 1, "weight_decay": 0.1}
CASES: list[tuple[str, int, dict[str, Any], torch.dtype]] = [
    ("replicated", 2, {}, torch.float32),
    ("replicated", 4, {"wire_dtype": "bf16", "momentum": 0.9}, torch.float32),
    ("fsdp", 2, {"state_dtype": "bf16"}, torch.float32),
    ("fsdp", 3, {"wire_dtype": "bf16", "vectors": "shampoo", "grafting": "none"}, torch.bfloat16),
    ("fsdp", 4, {}, torch.float32),
    ("hsdp", 4, {"momentum": 0.9}, torch.float32),
]
# Step counts and flags of parameters and blocks, which the plan leaves out of the workspace.
NUMBERS = 2048


def planned(kind: str, strategy: str, size: int, given: dict[str, Any], dtype: torch.dtype = torch.float32) -> Plan:
    chosen = options(given)
    with torch.device("meta"):
        tiles = tiles_of(parameters(jobs.make_model(kind, dtype), chosen.defaults))
    some = ranks(STRATEGIES[strategy], size, 2 if strategy == "hsdp" else None)
    rates = Rates(DEVICES["cpu"], 0.5)
    return make(tiles, own(tiles, some, torch.device("cpu")), some, rates, wire=chosen.wire, device=torch.device("cpu"))


@pytest.mark.parametrize("kind", ["llama", "mixed shapes"])
@pytest.mark.parametrize(("strategy", "size", "changes", "dtype"), CASES)
def test_state_and_traffic_are_those_of_a_run(
    processes: Processes, kind: str, strategy: str, size: int, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    given = {**OPTIONS, **changes}
    plan = planned(kind, strategy, size, given, dtype)
    for rank, real in enumerate(processes.run(jobs.measured, size, kind, strategy, given, dtype)):
        for name, count in real["state"].items():
            assert plan.amounts[f"state/{name}"][rank] == count, name
        wire = {name: each[rank] for name, each in plan.amounts.items() if name.count("/") == 2 and each[rank]}
        assert wire == {name: pytest.approx(count) for name, count in real["wire"].items() if count}


@pytest.mark.parametrize(  # what is larger: the stages', or either's, or the buffers'
    ("strategy", "size", "changes", "dtype", "workspace"),
    [
        *((*case, None) for case in CASES),
        *((*case, 1 << 14) for case in CASES[::2]),
        *((*case, 1) for case in CASES[1::2]),
    ],
)
def test_a_step_takes_hardly_less_workspace_and_no_more(
    processes: Processes, strategy: str, size: int, changes: dict[str, Any], dtype: torch.dtype, workspace: int | None
) -> None:
    given = {**OPTIONS, **changes, "max_workspace": workspace}
    plan = planned("llama", strategy, size, given, dtype)
    for rank, real in enumerate(processes.run(jobs.measured, size, "llama", strategy, given, dtype)):
        most = plan.amounts["workspace"][rank]
        assert 0.8 * most <= real["peak"] <= most + NUMBERS


def test_one_process_alone_keeps_and_needs_what_the_plan_says() -> None:
    plan, real = planned("llama", "alone", 1, OPTIONS), jobs.measured("llama", "alone", OPTIONS, torch.float32)
    assert {name: plan.amounts[f"state/{name}"][0] for name in real["state"]} == real["state"]
    assert plan.amounts["wire/sent"][0] == sum(real["wire"].values()) == 0
    assert 0.8 * plan.amounts["workspace"][0] <= real["peak"] <= plan.amounts["workspace"][0] + NUMBERS
