"""Makes sure that processes which hold parameters together are as alike as their step needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dash_shampoo.names import few
from dash_shampoo.options import described
from dash_shampoo.parallel.boxes import is_distributed
from dash_shampoo.parallel.census import Census
from dash_shampoo.parallel.ownership import Entry
from dash_shampoo.parallel.world import World

REPLICAS = (
    "Dash takes plain tensors for replicas, as DistributedDataParallel keeps them, and divides the work on them; use "
    "process_group=None if each process trains parameters of its own, as under ZeroRedundancyOptimizer "
    "(optimizer_class=functools.partial(Dash, process_group=None)), or the group of those that hold the same"
)
GRADIENTS = (
    "differ between processes that Dash takes for replicas, or are those of different steps: each block would follow "
    "one process's alone. Average them before step(), as DistributedDataParallel does outside no_sync(); give pipeline "
    "stages, experts or adapters that other processes do not share a process_group of their own, for Dash or in their "
    "parameter group: None where each process trains its own"
)
ARRANGEMENT = "parameters, groups, options that decide the stacks, or a loaded state are new on {}: {}"
TOGETHER = "change them on every process, in the same steps"


class Agreement:
    """Compares processes: all they have when stacks are arranged, and what may change since at each step.

    Every error is raised by all processes that hold the parameters together, unless it says so.
    """

    def __init__(self) -> None:
        self._compared: set[Tensor] = set()
        self._entries: list[Entry] = []
        self._names: Mapping[int, str] = {}
        self._wire: torch.dtype | None = None
        self._censuses: list[tuple[Census, Sequence[Tensor]]] = []

    def compare(self, entries: list[Entry], names: Mapping[int, str], wire: torch.dtype | None) -> None:
        """Compares parameters, options and the values of new replicas. Collective.

        Args:
            entries: all parameters.
            names: what messages call them, by their ids.
            wire: in which updates travel.

        Raises:
            RuntimeError: they differ.
        """
        self._entries, self._names, self._wire = entries, names, wire
        for world in {entry.world: None for entry in entries if entry.world.size > 1}:
            own = [entry for entry in entries if entry.world is world]
            device = own[0].parameter.device
            if not world.agree(str(len(own)), device):
                raise RuntimeError(
                    f"the processes give Dash different numbers of parameters, this one {len(own)}. {REPLICAS}"
                )
            options = [described(entry.group, wait=True) for entry in own]
            values = [self._described(entry.parameter) for entry in own]
            if world.agree(f"{wire} {options} {values}", device):
                continue
            if not world.agree(str(wire), device):
                raise RuntimeError("wire_dtype differs between processes: give every process the same")
            self._refuse_options(world, own, options)
            different = self._of_which(world, own, values)
            raise RuntimeError(f"{different}: the processes differ in shape, dtype or values. {REPLICAS}")
        self._compared = {entry.parameter for entry in entries}

    def follow(self, censuses: list[tuple[Census, Sequence[Tensor]]]) -> None:
        """Watches the surveys of an arrangement from now on, each given with its parameters."""
        self._censuses = [(census, parameters) for census, parameters in censuses if census.world.size > 1]

    def announce(self) -> None:
        """Tells the other processes that this one arranges its stacks anew. Collective.

        Raises:
            RuntimeError: they do not; on the others too, if they are still there at their next step.
        """
        censuses, self._censuses = self._censuses, []
        together = [census.announce() for census, _ in censuses]  # all of them, whatever the first says
        if not all(together):
            raise RuntimeError(ARRANGEMENT.format("this process and not on all others", TOGETHER))

    def check(self) -> None:
        """Raises for what the last step's surveys have found: a step later, when nothing has to be waited for.

        Raises:
            RuntimeError: the processes differ in their options, or in gradients that should be equal.
        """
        for census, parameters in self._censuses:
            found = census.findings()
            if found is None:
                continue
            if found.alone:
                raise RuntimeError(ARRANGEMENT.format("another process and not on this one", TOGETHER))
            if found.options:
                self.compare(self._entries, self._names, self._wire)
                raise RuntimeError(f"options differed between processes at the last step: {TOGETHER}")
            pairs = zip(parameters, found.differing, strict=True)
            differing = [self._names[id(parameter)] for parameter, differs in pairs if differs]
            if differing:
                raise RuntimeError(f"the gradients of {few(differing)} {GRADIENTS}")

    def _refuse_options(self, world: World, entries: list[Entry], options: list[dict[str, str]]) -> None:
        device = entries[0].parameter.device
        differing = [name for name in options[0] if not world.agree(str([each[name] for each in options]), device)]
        if differing:
            concerned = self._of_which(world, entries, [str(each) for each in options])
            raise RuntimeError(
                f"{', '.join(differing)} of {concerned} differ between processes: give every process the same "
                f"options, and {TOGETHER}"
            )

    def _of_which(self, world: World, entries: list[Entry], texts: list[str]) -> str:
        """The names of the parameters whose texts differ between processes."""
        pairs = zip(entries, texts, strict=True)
        return few(
            [
                self._names[id(entry.parameter)]
                for entry, text in pairs
                if not world.agree(text, entries[0].parameter.device)
            ]
        )

    def _described(self, parameter: Tensor) -> str:
        placements = getattr(parameter, "placements", None)
        text = f"{tuple(parameter.shape)} {parameter.dtype} {placements}"
        if parameter not in self._compared and not is_distributed(parameter):
            text += f" {_checksum(parameter)}"
        return text


def _checksum(parameter: Tensor) -> int:
    """The sum of a tensor's bits as integers: exact, so the same in any order of summation."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.dtype.itemsize]
    return int(parameter.detach().view(words).sum(dtype=torch.int64))
