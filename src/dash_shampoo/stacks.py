"""Stacks: equal blocks of all parameters in 3-D tensors, which own the optimizer's state.

A `Bank` holds everything of one device and dtype: which parameters it serves, how many steps each has taken, the
`Stack` of each block shape and the `Factors` of each factor size. A `Part` is the range of a stack that fits the
workspace; the stages of the step work on one part at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dash_shampoo.blocks import Tile, as_matrix, is_matrix_view
from dash_shampoo.factors import FactorKey, Factors, Side, workspace
from dash_shampoo.grafting import METHODS, Grafting, Scalar
from dash_shampoo.layout import StackKey, cut, moment_dtype, state_dtype, weight
from dash_shampoo.watch import Watch

# The most tensors of a part's size that a stage of the step holds beside the state.
TEMPORARIES = 6


class Member(NamedTuple):
    """One tile of one parameter in a stack."""

    parameter: Tensor
    place: int  # of the parameter in its bank
    group: dict[str, Any]
    tile: Tile
    name: str  # of the tile in the parameter's state


class Part:
    """A range of a stack's blocks with its members: what the stages of the step work on."""

    def __init__(self, stack: Stack, members: list[Member], lanes: slice, device: torch.device) -> None:
        self.key = stack.key
        self.dtype = stack.dtype
        self.members = members
        self.lanes = lanes
        self.moment = stack.moment[lanes]  # (n, r, c)
        self.statistic = stack.statistic[lanes] if stack.statistic is not None else None
        self.velocity = stack.velocity[lanes] if stack.velocity is not None else None
        self.sides = [side.part(lanes) for side in stack.sides]
        self.grafting = stack.grafting
        counts = [member.tile.blocks for member in members]
        self.counts = counts
        owners = torch.tensor([member.place for member in members])
        self.owner = owners.repeat_interleave(torch.tensor(counts)).to(device)  # (n,)

    def has_gradients(self) -> bool:
        """Whether any member has a gradient."""
        return any(member.parameter.grad is not None for member in self.members)

    def per_block(self, values: Tensor) -> Tensor:
        """One value per parameter of the bank (p,) spread over this part's blocks: (n, 1, 1)."""
        return values[self.owner].view(-1, 1, 1)

    def option(self, name: str) -> Scalar:
        """An option of the members' groups: a number where they agree, else one per block (n, 1, 1)."""
        values = [_option(member.group, name) for member in self.members]
        if all(value == values[0] for value in values):
            return values[0]
        spread = [value for value, count in zip(values, self.counts, strict=True) for _ in range(count)]
        return torch.tensor(spread, dtype=self.dtype, device=self.moment.device).view(-1, 1, 1)

    def where(self, flags: list[bool]) -> bool | Tensor:
        """One flag per parameter of the bank, for this part's blocks: a bool where they agree, else (n, 1, 1)."""
        own = {flags[member.place] for member in self.members}
        if len(own) == 1:
            return own.pop()
        return self.per_block(torch.tensor(flags, device=self.owner.device))

    def gather(self, live: Tensor) -> Tensor:
        """The gradients' blocks (n, r, c) in the stack's dtype; zero in blocks that are not ``live`` (n, 1, 1)."""
        gradient = torch.empty_like(self.moment, dtype=self.dtype)
        targets, sources = [], []
        for member, blocks in self._active(gradient):
            assert member.parameter.grad is not None
            targets.append(blocks)
            sources.append(member.tile.of(as_matrix(member.parameter.grad)))
        torch._foreach_copy_(targets, sources)
        if self.key.maximize:
            gradient.neg_()
        return gradient.masked_fill_(live == 0, 0)

    def apply(self, update: Tensor, live: Tensor) -> None:
        """W <- W - lr (update + weight_decay W) for the ``live`` blocks; ``update`` (n, r, c) is used up."""
        written = []
        for member, blocks in self._active(update):
            matrix = as_matrix(member.parameter)
            written.append((member, blocks, matrix, member.tile.of(matrix)))
        groups = {id(member.group): member.group for member, *_ in written}.values()
        for group in groups:
            if group["weight_decay"]:
                updates, weights = _of_group(written, group)
                torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        update.masked_fill_(live == 0, 0)
        for group in groups:
            updates, weights = _of_group(written, group)
            if isinstance(group["lr"], Tensor):
                torch._foreach_mul_(updates, -group["lr"].to(update.device))
                torch._foreach_add_(weights, updates)
            else:
                torch._foreach_add_(weights, updates, alpha=-group["lr"])
        for member, _, matrix, _ in written:
            if not is_matrix_view(member.parameter):
                member.parameter.copy_(matrix.view(member.parameter.shape))

    def _active(self, stack: Tensor) -> Iterator[tuple[Member, Tensor]]:
        """The members with a gradient, each with its blocks of ``stack`` (n, r, c) in its tile's shape."""
        for member, blocks in zip(self.members, stack.split(self.counts), strict=True):
            if member.parameter.grad is not None:
                yield member, member.tile.of_stack(blocks)


def _option(group: Mapping[str, Any], name: str) -> Any:
    if name == "beta1":
        return group["betas"][0]
    if name == "graft_beta2" and group[name] is not None:
        return group[name]
    return group["betas"][1] if name in ("beta2", "graft_beta2") else group[name]


def _of_group(
    written: list[tuple[Member, Tensor, Tensor, Tensor]], group: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """The blocks of the update and of the weights of one group's members."""
    chosen = [(blocks, weights) for member, blocks, _, weights in written if member.group is group]
    return [blocks for blocks, _ in chosen], [weights for _, weights in chosen]


class Stack:
    """All blocks that share a `StackKey`, and their state.

    Attributes:
        moment: (n, r, c) running mean of the gradients.
        statistic: (n, ...) what the grafting method keeps, if it keeps anything.
        velocity: (n, r, c) momentum of the update, if the groups ask for it.
        sides: left and right factors of the blocks, as ranges of the bank's `Factors`.
        parts: ranges of the stack that fit the workspace.
    """

    def __init__(
        self,
        key: StackKey,
        members: list[Member],
        sides: list[Side],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.key = key
        self.sides = sides
        self.grafting: Grafting | None = METHODS[key.grafting]
        n = sum(member.tile.blocks for member in members)
        shape = (n, *key.block)
        self.dtype = dtype
        self.moment = torch.zeros(shape, dtype=moment_dtype(key, dtype), device=device)
        kept = None if self.grafting is None else self.grafting.shape(*key.block)
        self.statistic = None if kept is None else torch.zeros(n, *kept, dtype=dtype, device=device)
        self.velocity = torch.zeros_like(self.moment) if key.momentum else None
        self.parts = [Part(self, some, lanes, device) for some, lanes in _portions(key, members, dtype, device)]

    def states(self) -> Iterator[tuple[Member, dict[str, Tensor]]]:
        """Each member with the views of this stack that are its state."""
        start = 0
        for part in self.parts:
            for member in part.members:
                lanes = slice(start, start + member.tile.blocks)
                start = lanes.stop
                tensors = {"moment": self.moment, "statistic": self.statistic, "velocity": self.velocity}
                views = {name: tensor[lanes] for name, tensor in tensors.items() if tensor is not None}
                for name, side in zip(("left", "right"), self.sides, strict=False):
                    own = side.part(lanes)
                    views[name], views[f"{name}_failed"] = own.packed, own.failed
                yield member, {f"{member.name}.{name}": view for name, view in views.items()}


def _portions(
    key: StackKey, members: list[Member], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[list[Member], slice]]:
    """Runs of members that fit the workspace, or of one member, with the lanes they take up."""
    block = TEMPORARIES * dtype.itemsize * weight(len(key.factors), *key.block)
    most = workspace(key.max_workspace, device) // block
    portion: list[Member] = []
    start = stop = 0
    for member in members:
        if portion and stop - start + member.tile.blocks > most:
            yield portion, slice(start, stop)
            portion, start = [], stop
        portion.append(member)
        stop += member.tile.blocks
    if portion:
        yield portion, slice(start, stop)


class Bank:
    """All stacks of one device and dtype.

    Attributes:
        parameters: those it serves, in the order of the groups.
        steps: (p,) steps that each parameter has taken.
        skipped: (p,) steps that each parameter has skipped because its gradient was not finite.
        stacks: one per `StackKey`.
        factors: one per `FactorKey`.
    """

    def __init__(
        self, entries: Iterable[tuple[Tensor, dict[str, Any]]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.parameters: list[Tensor] = []
        self.groups: list[dict[str, Any]] = []
        shared: dict[StackKey, list[Member]] = {}
        for place, (parameter, group) in enumerate(entries):
            self.parameters.append(parameter)
            self.groups.append(group)
            for key, tile, name in cut(parameter, group):
                shared.setdefault(key, []).append(Member(parameter, place, group, tile, name))
        self.steps = torch.zeros(len(self.parameters), dtype=dtype, device=device)
        self.skipped = torch.zeros(len(self.parameters), dtype=torch.int64, device=device)
        self._watch = Watch()
        self.factors = self._allocate_factors(shared, device)
        self.stacks = self._allocate_stacks(shared, device)

    @property
    def parts(self) -> list[Part]:
        """The parts of all stacks."""
        return [part for stack in self.stacks for part in stack.parts]

    def _allocate_factors(self, shared: dict[StackKey, list[Member]], device: torch.device) -> dict[FactorKey, Factors]:
        counts: dict[FactorKey, int] = {}
        for key, members in shared.items():
            for factor in key.factors:
                counts[factor] = counts.get(factor, 0) + sum(member.tile.blocks for member in members)
        return {key: Factors(key, n, self.dtype, device) for key, n in counts.items()}

    def _allocate_stacks(self, shared: dict[StackKey, list[Member]], device: torch.device) -> list[Stack]:
        taken = dict.fromkeys(self.factors, 0)
        stacks = []
        for key, members in shared.items():
            n = sum(member.tile.blocks for member in members)
            sides = []
            for factor in key.factors:
                sides.append(Side(self.factors[factor], slice(taken[factor], taken[factor] + n)))
                taken[factor] += n
            stacks.append(Stack(key, members, sides, self.dtype, device))
        return stacks

    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def finite(self) -> tuple[list[int], Tensor]:
        """The parameters with a gradient (indices, k of them), and whether each gradient is finite (k,).

        A gradient whose squared Frobenius norm overflows the stack's dtype counts as not finite: its factors would.
        """
        present = [i for i, parameter in enumerate(self.parameters) if parameter.grad is not None]
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=self.dtype))
        return present, torch.isfinite(norms * norms)

    def admit(self, present: list[int], finite: Tensor) -> Tensor:
        """Which parameters take this step, 1 or 0 (p,): those with a finite gradient. Counts the step for each."""
        if len(present) < len(self.parameters):
            lanes = torch.tensor(present, device=self.steps.device)
            taken = torch.zeros_like(self.steps).index_copy_(0, lanes, finite.to(self.dtype))
            self.skipped.index_add_(0, lanes, (~finite).to(torch.int64))
        else:
            taken = finite.to(self.dtype)
            self.skipped += ~finite
        self.steps += taken
        self._watch.post(self.skipped.sum())
        return taken

    def has_skipped(self) -> bool:
        """Whether a parameter has skipped a step, as far as the host knows without waiting for the device."""
        return bool(self._watch.read(wait=False))

    def lanes_due(self, due: list[bool]) -> Iterator[tuple[Factors, Tensor | None]]:
        """The factors that have lanes of parameters that are ``due`` (by index), with those lanes; ``None`` for all."""
        chosen: dict[FactorKey, list[int]] = {key: [] for key in self.factors}
        for part in self.parts:
            for side in part.sides:
                lane = side.lanes.start
                for member in part.members:
                    if due[member.place]:
                        chosen[side.factors.key] += range(lane, lane + member.tile.blocks)
                    lane += member.tile.blocks
        for key, lanes in chosen.items():
            factors = self.factors[key]
            if len(lanes) == len(factors.packed):
                yield factors, None
            elif lanes:
                yield factors, torch.tensor(lanes, device=factors.packed.device)

    def states(self) -> list[dict[str, Tensor]]:
        """The state of each parameter: views of the bank's tensors."""
        states: list[dict[str, Tensor]] = [
            {"step": step, "skipped": skipped}
            for step, skipped in zip(self.steps.unbind(), self.skipped.unbind(), strict=True)
        ]
        for stack in self.stacks:
            for member, views in stack.states():
                states[member.place].update(views)
        return states


def arrange(entries: Iterable[tuple[Tensor, dict[str, Any]]]) -> list[Bank]:
    """Banks for parameters, each given with its group: one per device and dtype of the state."""
    shared: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, dict[str, Any]]]] = {}
    for parameter, group in entries:
        shared.setdefault((state_dtype(parameter), parameter.device), []).append((parameter, group))
    return [Bank(some, dtype, device) for (dtype, device), some in shared.items()]
