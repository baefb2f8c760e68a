"""Steps that are timed: what takes part, and that a cycle renews every root once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dash_shampoo import Dash
from dash_shampoo.claim.step_time import ALONE, PEERS, Work, groups, installed, measure, others, ours
from dash_shampoo.compare.contenders import parse
from dash_shampoo.train.errors import InputError


def matrices() -> list[nn.Parameter]:
    found = [nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 16))]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def test_one_call_a_block_is_the_same_step_in_more_operations() -> None:
    parameters = {way: matrices() for way in ("stacks", ALONE)}
    for own, other in zip(*parameters.values(), strict=True):
        other.grad = own.grad
    counts = {}
    for way, own in parameters.items():
        work = ours(own, ["minimax"], block_size=4, update_every=1, root=4)["minimax", way]
        with torch.profiler.profile() as profile:
            work.run()
        counts[way] = sum(event.count for event in profile.key_averages())
    assert counts[ALONE] > 3 * counts["stacks"]
    for one, other in zip(*parameters.values(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_cycle_has_gradients_at_every_step_whatever_becomes_of_them() -> None:
    class Forgetful(torch.optim.SGD):
        taken = 0

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            self.taken += all(p.grad is not None for p in self.param_groups[0]["params"])
            self.zero_grad()

    own = matrices()
    optimizer = Forgetful(own, lr=0.1)
    gradients = [p.grad for p in own]
    Work(optimizer, own, gradients, cycle=3).run()  # type: ignore[arg-type]
    assert optimizer.taken == 3


def test_the_rows_are_of_every_solver_block_size_and_frequency() -> None:
    rows = measure(matrices(), ["minimax", "eigh"], [4, 8], [1, 2], 4, [parse("torch.optim:RMSprop,lr=1")], repeats=1)
    assert [row["optimizer"] for row in rows[:3]] == ["adamw", "muon", "torch.optim:RMSprop,lr=1"]
    assert len(rows) == 3 + 2 * 2 * 2 * 2
    assert [len(own) for own in groups(rows)] == [4] * 4
    assert all(row["milliseconds a step"] > 0 for row in rows)
    assert {row["roots"] for row in groups(rows)[0]} == {2 * 12}
    assert isinstance(ours(matrices(), ["eigh"], 4, 1, 2)["eigh", "stacks"].optimizer, Dash)


def test_peers_that_are_not_there_are_named() -> None:
    found, missing = installed(["torch.optim:RMSprop", "no_such_package:SOAP"])
    assert ([each.label for each in found], missing) == (["torch.optim:RMSprop"], ["no_such_package:SOAP"])
    assert all(":" in peer for peer in PEERS)
    with pytest.raises(InputError, match=r"alpha=-1: .*--peer takes"):
        others(matrices(), [parse("torch.optim:RMSprop,alpha=-1")])
