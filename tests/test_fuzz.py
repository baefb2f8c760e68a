"""Random models, options, faults and interruptions: whatever happens, parameters stay finite and resume is bit-equal.

`make fuzz` runs this for longer; set FUZZ_EXAMPLES for the number of cases.
"""

from __future__ import annotations

import io
import os
import warnings
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dash_shampoo import Dash, renewals

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64])
SOLVERS = ["minimax", "newton-db", "coupled-newton", "chebyshev", "eigh", "newton-db-paper", "coupled-newton-paper"]
options = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.sampled_from([0.0, 1e-3, 0.1]),
        "betas": st.tuples(st.sampled_from([0.0, 0.9]), st.sampled_from([0.0, 0.95, 0.999])),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "block_size": st.integers(1, 10),
        "solver": st.sampled_from(SOLVERS),
        "update_every": st.integers(1, 3),
        "damping": st.sampled_from([1e-2, 1e-3, 1e-4, 1e-6]),
        "epsilon": st.sampled_from([0.0, 1e-10, 1e-3]),
        "grafting": st.sampled_from(["none", "sgd", "adagrad", "rmsprop", "adam"]),
        "graft_beta2": st.sampled_from([None, 0.9]),
        "momentum": st.sampled_from([0.0, 0.9]),
        "root": st.sampled_from([None, 1, 2, 4]),
        "vectors": st.sampled_from(["adamw", "shampoo"]),
        "bias_correction": st.booleans(),
        "state_dtype": st.sampled_from(["fp32", "bf16"]),
        "maximize": st.booleans(),
        "algorithm": st.sampled_from(["shampoo", "shampoo", "adamw"]),
        "max_workspace": st.sampled_from([1, 1 << 12, None]),
    },
)
FAULTS = ["none", "zero", "nan", "inf", "huge", "tiny", "constant", "rank-one"]
events = st.one_of(
    st.tuples(st.just("step"), st.lists(st.sampled_from(["good"] * 8 + FAULTS), min_size=1, max_size=4)),
    st.tuples(st.just("resume"), st.none()),
    st.tuples(st.just("add"), st.tuples(shapes, options)),
    st.tuples(st.just("drop"), st.none()),
)


class Case:
    """A model that trains under faults, twice: one run is interrupted now and then, the other is not."""

    def __init__(self, groups: list[tuple[list[tuple[int, ...]], torch.dtype, dict[str, Any]]]) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.runs = []
        made = [([self.random(shape).to(dtype) for shape in some], own) for some, dtype, own in groups]
        for _ in range(2):
            self.runs.append(Dash([{"params": [nn.Parameter(t.clone()) for t in some], **own} for some, own in made]))

    def random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def parameters(self, run: int) -> list[nn.Parameter]:
        return [parameter for group in self.runs[run].param_groups for parameter in group["params"]]

    def gradient(self, parameter: Tensor, fault: str) -> Tensor | None:
        gradient = self.random(tuple(parameter.shape))
        if fault == "none":
            return None
        if fault in ("nan", "inf") and gradient.numel():
            gradient.view(-1)[-1] = float(fault)
        scales = {"zero": 0.0, "huge": 1e30, "tiny": 1e-30}
        gradient = gradient * scales.get(fault, 1.0)
        if fault in ("constant", "rank-one"):
            gradient = torch.ones_like(gradient) * (gradient[:1] if fault == "rank-one" and gradient.ndim else 1.0)
        return gradient.to(parameter.dtype)

    def step(self, faults: list[str]) -> None:
        for i, (one, other) in enumerate(zip(self.parameters(0), self.parameters(1), strict=True)):
            gradient = self.gradient(one, faults[i % len(faults)])
            one.grad, other.grad = (gradient, gradient.clone()) if gradient is not None else (None, None)
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters(0)]
        random = torch.get_rng_state()
        for optimizer in self.runs:
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), random)
        for parameter, gradient in zip(self.parameters(0), before, strict=True):
            assert gradient is None or torch.equal(parameter.grad.nan_to_num(), gradient.nan_to_num())

    def resume(self, _: None) -> None:
        """Saves the first run and goes on with a new optimizer that has loaded it."""
        buffer = io.BytesIO()
        torch.save(self.runs[0].state_dict(), buffer)
        buffer.seek(0)
        groups = []
        for group in self.runs[0].param_groups:
            copies = [nn.Parameter(parameter.detach().clone()) for parameter in group["params"]]
            groups.append({**group, "params": copies})
        self.runs[0] = Dash(groups)
        self.runs[0].load_state_dict(torch.load(buffer))

    def add(self, group: tuple[tuple[int, ...], dict[str, Any]]) -> None:
        shape, own = group
        values = self.random(shape).float()
        for optimizer in self.runs:
            optimizer.add_param_group({"params": [nn.Parameter(values.clone())], **own})

    def drop(self, _: None) -> None:
        for optimizer in self.runs:
            for parameter in optimizer.param_groups[-1]["params"]:
                optimizer.state.pop(parameter, None)
            if len(optimizer.param_groups) > 1:
                optimizer.param_groups.pop()

    def check(self) -> None:
        for one, other in zip(self.parameters(0), self.parameters(1), strict=True):
            assert torch.isfinite(one).all()
            assert torch.equal(one, other)


def refuse_unless_documented(error: ValueError) -> None:
    """Options that do not go together are refused by name; any other error is a fault."""
    if not any(word in str(error) for word in ("damping", "root", "newton-db")):
        raise error


def within_float16(group: tuple[Any, torch.dtype, dict[str, Any]]) -> tuple[Any, torch.dtype, dict[str, Any]]:
    """With no memory of squares, a small gradient after a large one makes a step of mean / eps, as it does in Adam:
    finite, but beyond what float16 parameters can hold."""
    some, dtype, own = group
    if dtype == torch.float16:
        own = {**own, "betas": (own.get("betas", (0.9,))[0], 0.95)}
    return some, dtype, own


groups = st.lists(
    st.tuples(st.lists(shapes, min_size=1, max_size=3), dtypes, options).map(within_float16), min_size=1, max_size=3
)


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES < 1000)
@given(groups=groups, script=st.lists(events, min_size=1, max_size=8), least=st.sampled_from([0.0, renewals.LEAST]))
def test_parameters_stay_finite_and_resume_is_bit_equal(
    groups: Any, script: list[tuple[str, Any]], least: float
) -> None:
    with warnings.catch_warnings(), mock.patch.object(renewals, "LEAST", least):
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            case = Case(groups)
        except ValueError as error:
            refuse_unless_documented(error)
            return
        for name, argument in script:
            try:
                getattr(case, name)(argument)
            except ValueError as error:
                if name != "add":
                    raise
                refuse_unless_documented(error)
            case.check()
