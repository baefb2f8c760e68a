"""Who owns which tile: the longest first, each to the process with the least to do so far."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dash_shampoo.blocks import Tile
from dash_shampoo.layout import StackKey, cut
from dash_shampoo.parallel.cost import cost, renewal
from dash_shampoo.parallel.world import World, Worlds
from dash_shampoo.renewals import ALL_AT_ONCE, least, take_turns, turn_of_tile


class Entry(NamedTuple):
    """A parameter that Dash moves, with its tiles and the processes that own them."""

    parameter: Tensor
    group: dict[str, Any]
    world: World
    tiles: list[tuple[StackKey, Tile, str]]  # as `cut` gives them
    owners: list[int]  # ranks in the world, tile by tile
    turn: int  # of the parameter; see `renewals`

    def costs(self) -> list[float]:
        """What balances ownership, of each tile."""
        return [cost(key, tile, self.group) for key, tile, _ in self.tiles]

    def renewals(self) -> list[float]:
        """What balances renewals, of each tile."""
        return [renewal(key, tile) for key, tile, _ in self.tiles]

    def turns(self) -> list[int]:
        """The turn of each tile."""
        return [turn_of_tile(self.turn, number) % self.group["update_every"] for number in range(len(self.tiles))]


class Ownership:
    """Remembers who owns what: a tile stays where it is as long as its parameter is cut alike.

    Args:
        worlds: which processes hold a parameter.
    """

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds
        self._owners: dict[Tensor, list[int]] = {}

    def entries(
        self, parameters: Iterable[tuple[Tensor, dict[str, Any]]], turns: Mapping[Tensor, int] | None = None
    ) -> list[Entry]:
        """Parameters with the owners of their tiles and their turns; the same on every process.

        Args:
            parameters: each with its group.
            turns: of those that have one already.
        """
        found = []
        for parameter, group in parameters:
            world, tiles = self.worlds.of(parameter), cut(parameter, group)
            owners = self._owners.get(parameter, [])
            if world.size == 1:
                owners = [0] * len(tiles)
            elif len(owners) != len(tiles):
                owners = []
            found.append(Entry(parameter, group, world, tiles, owners, ALL_AT_ONCE))
        found = _with_turns(found, turns or {})
        new = [entry for entry in found if not entry.owners]
        for world in {entry.world: None for entry in new}:
            loads = [0.0] * world.size
            for entry in found:
                if entry.world is world and entry.owners:
                    for owner, each in zip(entry.owners, entry.costs(), strict=True):
                        loads[owner] += each
            own = [entry for entry in new if entry.world is world]
            costs = [each for entry in own for each in entry.costs()]
            order = [each for entry in own for each in entry.turns()]
            owners_of_new = iter(assign(costs, loads, order))
            for entry in own:
                entry.owners.extend(next(owners_of_new) for _ in entry.tiles)
        self._owners = {entry.parameter: entry.owners for entry in found if entry.world.size > 1}
        return found

    def owned(self, parameter: Tensor, group: Mapping[str, Any]) -> set[str]:
        """Names of the tiles of a parameter that this process owns, as of the last `entries`."""
        rank = self.worlds.of(parameter).rank
        names = [name for _, _, name in cut(parameter, group)]
        owners = self._owners.get(parameter, [rank] * len(names))
        return {name for name, owner in zip(names, owners, strict=True) if owner == rank}

    @property
    def is_shared(self) -> bool:
        """Whether there are parameters that processes hold together, as of the last `entries`; alike on all of them."""
        return bool(self._owners)

    @property
    def is_partial(self) -> bool:
        """Whether this process owns a part of what it holds together with others."""
        return any(set(owners) - {self.worlds.of(parameter).rank} for parameter, owners in self._owners.items())


def _with_turns(entries: list[Entry], known: Mapping[Tensor, int]) -> list[Entry]:
    """Entries with their turns, ``known`` or new."""
    turns: dict[Tensor, int] = {}
    for world in {entry.world: None for entry in entries}:
        own = [entry for entry in entries if entry.world is world]
        taken = take_turns(
            [entry.renewals() for entry in own],
            [entry.group["update_every"] for entry in own],
            [known.get(entry.parameter) for entry in own],
            least(own[0].parameter.device),
        )
        turns |= {entry.parameter: turn for entry, turn in zip(own, taken, strict=True)}
    return [entry._replace(turn=turns[entry.parameter]) for entry in entries]


def assign(costs: Sequence[float], loads: list[float], turns: Sequence[int] | None = None) -> list[int]:
    """Owners of tasks: longest processing time first (Graham, 1969), which ends within 4/3 of the best balance.

    The same on every process, since nothing but the arguments decides, and ties go to the first.

    Args:
        costs: of the tasks.
        loads: what each process has to do already; what it gets is added.
        turns: of the tasks. Equal tasks of one turn go to different processes.

    Returns:
        The process of each task.
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = [0] * len(costs)
    turns = [0] * len(costs) if turns is None else turns
    for task in sorted(range(len(costs)), key=lambda task: (-costs[task], turns[task])):
        load, rank = heap[0]
        owners[task] = rank
        heapq.heapreplace(heap, (load + costs[task], rank))
    for load, rank in heap:
        loads[rank] = load
    return owners
