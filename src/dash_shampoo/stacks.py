"""Stacks: equal blocks of all parameters in 3-D tensors, whose memory is that of the optimizer's state.

A `Bank` holds everything of one device and dtype: which parameters it serves, how many steps each has taken, the stack
of each block shape and the `Factors` of each factor size. A `Part` is a range of a stack that fits the workspace; the
stages of the step work on one part at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from dash_shampoo.factors import FactorKey, Factors, Side, keep_freed_memory, workspace
from dash_shampoo.grafting import METHODS, Grafting, Scalar
from dash_shampoo.host import to_device
from dash_shampoo.layout import StackKey, moment_dtype, number_of, state_dtype
from dash_shampoo.options import described
from dash_shampoo.parallel.boxes import Placement, local_gradient, placement
from dash_shampoo.parallel.carrier import Carrier, Direct, Gradients
from dash_shampoo.parallel.census import Census, Survey
from dash_shampoo.parallel.ownership import Entry
from dash_shampoo.parallel.replicated import Replicated
from dash_shampoo.parallel.runs import Member, Run, runs
from dash_shampoo.parallel.sharded import Sharded
from dash_shampoo.parallel.world import World
from dash_shampoo.renewals import is_due, turn_of_tile
from dash_shampoo.slabs import Slab, Slot, State
from dash_shampoo.watch import Watch

Runs = list[tuple[Run, Carrier]]  # each with the carrier that takes charge of it

# The most tensors of a part's size that a stage of the step holds beside the state.
TEMPORARIES = 6


class Part:
    """Blocks of one shape that fit the workspace, with their state: what the stages of the step work on."""

    def __init__(
        self, key: StackKey, runs: Runs, sides: dict[str, Side], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.key = key
        self.dtype = dtype
        self.runs = runs
        self.members = [member for run, _ in runs for member in run.members]
        self.sides = list(sides.values())
        self.left, self.right = sides.get("left"), sides.get("right")
        self.grafting: Grafting | None = METHODS[key.grafting]
        small = moment_dtype(key, dtype)
        kept = None if self.grafting is None else self.grafting.shape(*key.block)
        self._slabs = {"moment": Slab(_slots(runs, "moment"), key.block, small, device)}
        if kept is not None:
            self._slabs["statistic"] = Slab(_slots(runs, "statistic"), kept, dtype, device)
        if key.momentum:
            self._slabs["velocity"] = Slab(_slots(runs, "velocity"), key.block, small, device)
        places = [member.place for member in self.members for _ in range(member.tile.blocks)]
        self.owner = torch.tensor(places, device=device)  # (n,)
        # Each tile's parameter, number and blocks, in the order of the blocks.
        self.tiles = [(each.place, number_of(name), blocks) for each in self.members for name, blocks in each.names]
        self._groups: list[Mapping[str, Any]] = []  # in a row
        group_of: list[int] = []
        for _, alike in groupby(self.members, key=lambda member: id(member.group)):
            own = list(alike)
            group_of += [len(self._groups)] * sum(member.tile.blocks for member in own)
            self._groups.append(own[0].group)
        self._group_of = torch.tensor(group_of, device=device)  # (n,)

    @property
    def slabs(self) -> list[Slab]:
        """The state of the blocks, but for their factors."""
        return list(self._slabs.values())

    @property
    def moment(self) -> Tensor:
        """Running mean of the gradients: (n, r, c)."""
        return self._slabs["moment"].tensor

    @property
    def statistic(self) -> Tensor | None:
        """What the grafting method keeps, if it keeps anything: (n, ...)."""
        return self._slabs["statistic"].tensor if "statistic" in self._slabs else None

    @property
    def velocity(self) -> Tensor | None:
        """Momentum of the update, if the groups ask for it: (n, r, c)."""
        return self._slabs["velocity"].tensor if "velocity" in self._slabs else None

    def has_gradients(self) -> bool:
        """Whether any member may have a gradient at this step."""
        return any(carrier.has_gradient(member.place) for run, carrier in self.runs for member in run.members)

    def per_block(self, values: Tensor) -> Tensor:
        """One value per parameter of the bank (p,) spread over this part's blocks: (n, 1, 1)."""
        return values.index_select(0, self.owner).view(-1, 1, 1)

    def option(self, name: str) -> Scalar:
        """An option of the members' groups: a number where they agree, else one per block (n, 1, 1)."""
        values = [_option(group, name) for group in self._groups]
        if all(value == values[0] for value in values):
            return values[0]
        return to_device(values, self.dtype, self.owner.device)[self._group_of].view(-1, 1, 1)

    def where(self, flags: list[bool]) -> bool | Tensor:
        """One flag per parameter of the bank, for this part's blocks: a bool where they agree, else (n, 1, 1)."""
        own = {flags[member.place] for member in self.members}
        if len(own) == 1:
            return own.pop()
        return self.per_block(to_device(flags, torch.bool, self.owner.device))

    def gather(self, live: Tensor) -> Tensor:
        """The gradients' blocks (n, r, c) in the stack's dtype; zero in blocks that are not ``live`` (n, 1, 1)."""
        gradient = torch.empty_like(self.moment, dtype=self.dtype)
        for (run, carrier), blocks in self._split(gradient):
            carrier.gather(run, blocks)
        if self.key.maximize:
            gradient.neg_()
        return gradient.masked_fill_(live.logical_not(), 0)

    def deliver(self, update: Tensor, live: Tensor, taken: Tensor) -> None:
        """Hands the update (n, r, c), which is used up, to the carriers; of blocks that are not ``live`` it is zero."""
        update.masked_fill_(live.logical_not(), 0)
        shares = self._split(update)
        for carrier in {id(carrier): carrier for _, carrier in self.runs}.values():
            carrier.deliver(update, taken, [(run, blocks) for (run, own), blocks in shares if own is carrier])

    def _split(self, stack: Tensor) -> list[tuple[tuple[Run, Carrier], Tensor]]:
        """The runs, each with its carrier and its blocks of ``stack`` (n, r, c)."""
        return list(zip(self.runs, stack.split_with_sizes([run.blocks for run, _ in self.runs]), strict=True))


def _option(group: Mapping[str, Any], name: str) -> Any:
    if name == "beta1":
        return group["betas"][0]
    if name == "graft_beta2" and group[name] is not None:
        return group[name]
    return group["betas"][1] if name in ("beta2", "graft_beta2") else group[name]


def _slots(runs: Runs, name: str) -> list[Slot]:
    """The places of a part's entries of one name, in the order of its blocks."""
    return [
        Slot(member.place, f"{tile}.{name}", blocks)
        for run, _ in runs
        for member in run.members
        for tile, blocks in member.names
    ]


def _most(key: StackKey, dtype: torch.dtype, device: torch.device) -> int:
    """How many blocks the workspace allows a part to have."""
    return workspace(key.max_workspace, device) // (TEMPORARIES * dtype.itemsize * key.weight)


class Bank:
    """All stacks of one device and dtype, of parameters that the same processes hold.

    Attributes:
        parameters: those it serves, in the order of the groups.
        groups: of each parameter.
        turns: of each parameter, unless its state has another.
        parts: of the stack of each `StackKey`, with the blocks that this process owns.
        factors: one per `FactorKey`.
    """

    def __init__(
        self, entries: Iterable[Entry], dtype: torch.dtype, device: torch.device, world: World, wire: torch.dtype
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.world = world
        self.parameters: list[Tensor] = []
        self.groups: list[dict[str, Any]] = []
        self.turns: list[int] = []
        self._carriers: dict[type[Carrier], Carrier] = {}
        self._gradients: Gradients = []
        placements = []
        members: dict[tuple[StackKey, int], list[Member]] = {}  # by their owner too
        for place, (parameter, group, _, tiles, owners, turn) in enumerate(entries):
            self.parameters.append(parameter)
            self.groups.append(group)
            self.turns.append(turn)
            held = placement(parameter, world.ranks, group["view"])
            placements.append(held)
            for (key, tile, name), owner in zip(tiles, owners, strict=True):
                member = Member(parameter, place, group, tile, ((name, tile.blocks),), held)
                members.setdefault((key, owner), []).append(member)
        self.census = Census(world, placements, dtype, device)
        places = range(len(self.parameters))
        self._steps = Slab([Slot(place, "step", 0) for place in places], (), dtype, device)
        self._skipped = Slab([Slot(place, "skipped", 0) for place in places], (), torch.int64, device)
        self._watch = Watch()
        self._fresh: list[bool] = []
        self._begun = Watch()
        shared: dict[StackKey, list[Runs]] = {}
        for (key, owner), some in members.items():
            portions = [self._carried(portion, owner, wire) for portion in runs(some, _most(key, dtype, device))]
            if owner == world.rank:
                shared[key] = portions
        self.factors = self._make_factors(shared, device)
        sides = {key: iter(factors.sides) for key, factors in self.factors.items()}
        self.parts = [
            Part(key, own, {name: next(sides[factor]) for name, factor in key.factors.items()}, dtype, device)
            for key, portions in shared.items()
            for own in portions
        ]

    @property
    def steps(self) -> Tensor:
        """Steps that each parameter has taken: (p,)."""
        return self._steps.tensor

    @property
    def skipped(self) -> Tensor:
        """Steps that each parameter has skipped because its gradient was not finite: (p,)."""
        return self._skipped.tensor

    @cached_property
    def slabs(self) -> list[Slab]:
        """All of the bank's state."""
        parts = [slab for part in self.parts for slab in part.slabs]
        factors = [slab for factors in self.factors.values() for slab in factors.slabs]
        return [self._steps, self._skipped, *parts, *factors]

    def _carried(self, portion: list[Run], owner: int, wire: torch.dtype) -> Runs:
        """Runs that the process of a rank owns, each with the carrier that takes charge of it."""
        found = []
        for run in portion:
            carrier = self._carrier(run.held, wire)
            carrier.add(run, owner)
            found.append((run, carrier))
        return found

    def _carrier(self, held: Placement, wire: torch.dtype) -> Carrier:
        """The carrier of a parameter that processes hold in this way."""
        kind = Direct if self.world.size == 1 else Replicated if held.replicated else Sharded
        if kind not in self._carriers:
            self._carriers[kind] = kind(self.world, wire, self.dtype, self.device)
        return self._carriers[kind]

    def _make_factors(self, shared: dict[StackKey, list[Runs]], device: torch.device) -> dict[FactorKey, Factors]:
        slots: dict[FactorKey, list[list[Slot]]] = {}
        for key, portions in shared.items():
            for own in portions:
                for side, factor in key.factors.items():
                    slots.setdefault(factor, []).append(_slots(own, side))
        return {key: Factors(key, own, self.dtype, device) for key, own in slots.items()}

    def holds(self, states: list[State]) -> bool:
        """Whether parameters' states, in the order of `parameters`, are the bank's own still; if so, opens the bank."""
        counted = all(type(state.get(key)) is int for state in states for key in ("age", "turn"))
        return counted and all(slab.holds(states) for slab in self.slabs)

    def entries(self, state: Mapping[Tensor, State]) -> Iterator[Tensor]:
        """The entries of the optimizer's ``state`` that are the bank's own still."""
        states = [state.get(parameter, {}) for parameter in self.parameters]
        for slab in self.slabs:
            if slab.holds(states):
                yield from (states[slot.place][slot.key] for slot in slab.slots)
                slab.close()

    def take(self, states: list[State], others: Mapping[int, Slab]) -> None:
        """Takes parameters' states into the bank, one slab after another, and opens it; see `Slab.take`."""
        for slab in self.slabs:
            slab.take(states, others)
        for factors in self.factors.values():
            factors.watch()

    def close(self) -> None:
        """Leaves the state to those who hold its entries."""
        for slab in self.slabs:
            slab.close()

    def expects(self, place: int) -> bool:
        """Whether to reckon with a gradient of a parameter: with one of other processes, where there are any."""
        return self.world.size > 1 or self.parameters[place].grad is not None

    def takes_part(self) -> bool:
        """Whether this step concerns the bank: always where others may wait for this process."""
        return any(self.expects(place) for place in range(len(self.parameters)))

    def survey(self) -> Survey:
        """Fetches the gradients, and finds out which of them are there and finite."""
        self._gradients = [local_gradient(parameter) for parameter in self.parameters]
        groups = {id(group): group for group in self.groups}.values() if self.world.size > 1 else ()
        options = str([described(group, wait=False) for group in groups])
        rates = [group["lr"] for group in groups if isinstance(group["lr"], Tensor) and not group["lr"].is_cpu]
        return self.census.take(self._gradients, options, rates)

    def came(self) -> list[bool]:
        """Which parameters had a gradient that counts at the last step; asked again, none had. Waits for that step."""
        came, fresh = self.census.came(), self._fresh
        self._fresh = []
        if not any(fresh):
            return came
        begun = self._begun.read(wait=True)
        return [here and (known or not new) for here, known, new in zip(came, begun, fresh, strict=True)]

    def is_known(self) -> bool:
        """Whether `came` answers without a wait."""
        return self.world.size == 1 and (self.device.type == "cpu" or not any(self._fresh))

    def admit(self, survey: Survey, fresh: list[bool]) -> Tensor:
        """Which parameters take this step, 1 or 0 (p,): those with a good gradient. Counts the step for each.

        Gradients of zeros before the first other one do not count: a run is as it would have been without them.

        Args:
            survey: of the gradients.
            fresh: which parameters have had none that counts.
        """
        taken = survey.good.to(self.dtype)
        self.skipped.add_(survey.present & ~survey.good)
        self.steps.add_(taken * ((self.steps > 0) | survey.nonzero))
        self._watch.post(self.skipped.sum())
        self._fresh = fresh
        if any(fresh):
            self._begun.post(self.steps > 0)
        return taken

    def forget(self) -> None:
        """Leaves the step that `survey` has begun."""
        self._gradients, self._fresh = [], []
        self.census.forget()

    def begin(self) -> None:
        """Brings the gradients to where they are needed."""
        for carrier in self._carriers.values():
            carrier.begin(self._gradients)
        self._gradients = []

    def send(self) -> None:
        """Starts to spread the updates."""
        for carrier in self._carriers.values():
            carrier.send()

    def end(self, taken: Tensor) -> None:
        """Moves the parameters that have not been moved yet."""
        for carrier in self._carriers.values():
            carrier.end(taken)

    def has_skipped(self) -> bool:
        """Whether a parameter has skipped a step, as far as the host knows without waiting for the device."""
        return bool(self._watch.read(wait=False))

    def lanes_due(self, since: list[int], turns: list[int]) -> Iterator[tuple[Factors, list[int]]]:
        """The factors that have lanes whose roots are made at this step, with those lanes.

        Args:
            since: steps of each parameter since Shampoo's first; negative before.
            turns: of each parameter.
        """
        every = [group["update_every"] for group in self.groups]
        takes = [self.expects(place) and steps >= 0 for place, steps in enumerate(since)]
        chosen: dict[FactorKey, list[int]] = {key: [] for key in self.factors}
        for part in self.parts:
            for side in part.sides:
                lane, without = side.start, self.factors[side.key].without_root()
                for place, number, blocks in part.tiles:
                    own = range(lane, lane + blocks)
                    if takes[place] and is_due(since[place], turn_of_tile(turns[place], number), every[place]):
                        chosen[side.key] += own
                    elif takes[place] and without:
                        chosen[side.key] += [lane for lane in own if lane in without]
                    lane = own.stop
        for key, lanes in chosen.items():
            if lanes:
                yield self.factors[key], lanes

    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """The shapes of the tensors in each parameter's state, by their names, of those that this process owns."""
        found: list[dict[str, tuple[int, ...]]] = [{} for _ in self.parameters]
        for slab in self.slabs:
            for slot in slab.slots:
                found[slot.place][slot.key] = slab.shape_of(slot)
        return found


def arrange(entries: Iterable[Entry], wire: torch.dtype | None) -> list[Bank]:
    """Banks for parameters: one per device, dtype of the state and world. Updates travel as ``wire`` if given."""
    shared: dict[tuple[torch.dtype, torch.device, World], list[Entry]] = {}
    keep_freed_memory()
    for entry in entries:
        key = (state_dtype(entry.parameter), entry.parameter.device, entry.world)
        shared.setdefault(key, []).append(entry)
    return [Bank(some, dtype, device, world, wire or dtype) for (dtype, device, world), some in shared.items()]
