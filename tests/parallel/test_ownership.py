"""Tiles are owned in balance, and the same on every process."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dash_shampoo import Dash, param_groups
from dash_shampoo.layout import cut
from dash_shampoo.parallel.cost import Work, stages
from dash_shampoo.parallel.ownership import Entry, Ownership, assign
from dash_shampoo.parallel.world import ALONE, World, Worlds
from dash_shampoo.roots import products
from dash_shampoo.train.llama import Llama, config_for


class Many(World):
    """A world that is only counted, never talked to."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self.ranks = tuple(range(size))


class Everywhere(Worlds):
    """Every parameter is held by the same processes."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self.world = Many(size)

    def of(self, parameter: object) -> World:
        return self.world


def loads(entries: list[Entry]) -> list[float]:
    found = [0.0] * entries[0].world.size
    for entry in entries:
        for owner, each in zip(entry.owners, entry.costs(), strict=True):
            found[owner] += each
    return found


@pytest.mark.parametrize(
    ("size", "processes", "most"), [("llama-953m", 8, 1.05), ("llama-7b", 64, 1.10), ("llama-7b", 8, 1.02)]
)
def test_load_of_llamas_is_balanced(size: str, processes: int, most: float) -> None:
    with torch.device("meta"):
        model = Llama(config_for(size))
    groups = [
        {**Dash([nn.Parameter(torch.zeros(1))]).defaults, **group, "params": [p for _, p in group["params"]]}
        for group in param_groups(model)
    ]
    entries = Ownership(Everywhere(processes)).entries((p, group) for group in groups for p in group["params"])
    found = loads(entries)
    assert max(found) <= most * sum(found) / processes
    assert {owner for entry in entries for owner in entry.owners} == set(range(processes))


def test_small_models_are_spread_too() -> None:
    layer = nn.Linear(512, 512, bias=False)
    group = {**Dash([layer.weight]).defaults, "block_size": 64, "params": [layer.weight]}
    (entry,) = Ownership(Everywhere(8)).entries([(layer.weight, group)])
    assert Counter(entry.owners) == dict.fromkeys(range(8), 1)


def test_what_is_owned_stays_where_it_is_and_new_parameters_fill_up() -> None:
    ownership = Ownership(Everywhere(3))
    layers = [nn.Linear(16, 16, bias=False).weight for _ in range(7)]
    group = {**Dash(layers).defaults, "block_size": 8}
    before = {id(e.parameter): list(e.owners) for e in ownership.entries([(p, group) for p in layers[:4]])}
    entries = ownership.entries([(p, group) for p in reversed(layers)])
    assert all(entry.owners == before[id(entry.parameter)] for entry in entries if id(entry.parameter) in before)
    counts = Counter(owner for entry in entries for owner in entry.owners)
    assert max(counts.values()) - min(counts.values()) <= 1


@given(costs=st.lists(st.floats(0.1, 100), min_size=1, max_size=60), processes=st.integers(1, 8))
def test_longest_first_is_within_its_bound(costs: list[float], processes: int) -> None:
    found = [0.0] * processes
    owners = assign(costs, found)
    assert len(owners) == len(costs)
    assert sum(found) == pytest.approx(sum(costs))
    best = max(sum(costs) / processes, *costs)
    assert max(found) <= best + max(costs) * (1 - 1 / processes) + 1e-9


def test_one_process_owns_everything() -> None:
    weight = nn.Parameter(torch.zeros(9, 9))
    group = Dash([weight]).defaults
    (entry,) = Ownership(Worlds(None)).entries([(weight, group)])
    assert entry.world is ALONE
    assert set(entry.owners) == {0}


def test_flops_are_those_of_the_products() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    group = {**Dash([weight]).defaults, "block_size": 32, "root": 4, "damping": 1e-4}
    work: dict[str, float] = Counter()
    for key, tile, _ in cut(weight, group):
        for name, each in stages(key, tile, update_every=5).items():
            work[name] += each.flops
    product = 2 * 32**3
    assert work == {
        "factors": 4 * 2 * product,
        "roots": 4 * 2 * products(4) * product / 5,
        "precondition": 4 * 2 * product,
        "elements": 0,
    }
    assert Work(1.0, 2.0) + Work(3.0, 4.0).times(2) == Work(7.0, 10.0)
