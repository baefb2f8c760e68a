"""Slabs: tensors of many blocks, whose memory belongs to the entries of the optimizer's state.

The stages of a step want one tensor for all blocks of a shape. Users want entries that they can move, replace, save and
let go one by one, by `optimizer.state` alone. So each entry is an alias: it has the memory of its range of the slab, in
a storage of that size, and keeps the slab's tensor alive. The slab refers to that weakly between steps. Once all of its
entries have been replaced, its memory is free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from torch.utils.weak import TensorWeakRef

State = dict[str, Any]  # of a parameter

# Where a tensor can share a part of another's memory in a storage of its own. Elsewhere entries are plain views, which
# are pickled with all of the slab.
ALIASED = ("cpu", "cuda", "xpu")


class Slot(NamedTuple):
    """The place of an entry in a slab."""

    place: int  # of the parameter in its bank
    key: str  # in the parameter's state
    lanes: int  # of the slab that the entry has; 0 for one lane without that dimension


class Slab:
    """A tensor of entries, one after another along its first dimension.

    Attributes:
        slots: of the entries.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        begin: Callable[[Tensor], object] = Tensor.zero_,
    ) -> None:
        """Describes a slab, which has no memory before `allocate` or `take`.

        Args:
            slots: of the entries.
            shape: of a lane.
            dtype: of the tensor.
            device: of the tensor.
            begin: writes the first values of new lanes.
        """
        self.slots = slots
        self._shape = (sum(max(1, slot.lanes) for slot in slots), *shape)
        self._dtype = dtype
        self._device = device
        self._begin = begin
        self._memory: TensorWeakRef | None = None
        self._tensor: Tensor | None = None
        # Of the entries, which are the slab's as long as both are the same. A reference would keep their memory.
        self._ids: list[int] = []
        self._pointers: list[int] = []

    @property
    def tensor(self) -> Tensor:
        """All entries: (lanes, ...), from `take`, `allocate` or `open` to `close`."""
        assert self._tensor is not None
        return self._tensor

    def __len__(self) -> int:
        return self._shape[0]

    def allocate(self) -> Tensor:
        """New memory with first values, which lives until `close` if no entry has it."""
        self._tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._begin(self._tensor)
        self._memory = TensorWeakRef(self._tensor)
        return self._tensor

    def open(self) -> bool:
        """Whether the memory is still there, as `tensor`."""
        if self._tensor is None and self._memory is not None:
            self._tensor = self._memory()
        return self._tensor is not None

    def close(self) -> None:
        """Leaves the memory to the entries."""
        self._tensor = None

    def shape_of(self, slot: Slot) -> tuple[int, ...]:
        """The shape of an entry."""
        return (slot.lanes, *self._shape[1:]) if slot.lanes else self._shape[1:]

    def holds(self, states: Sequence[State]) -> bool:
        """Whether the entries in parameters' states, by their places, are this slab's own; opens it then."""
        return self._holds(self._entries(states))

    def take(self, states: Sequence[State], others: Mapping[int, Slab]) -> None:
        """Makes the entries in parameters' states this slab's own, with their values; opens it.

        Memory that holds just these entries is kept. What is missing begins anew.

        Args:
            states: of the parameters, by their places.
            others: slabs that may have the memory, by the identity of their first entry.
        """
        entries = self._entries(states)
        other = others.get(id(entries[0]))
        if other is not None and other._like(self) and other._holds(entries):
            memory, tensor = other._memory, other.tensor
            other.close()
            self._memory, self._tensor = memory, tensor
            self._ids, self._pointers = other._ids, other._pointers
            return
        self._ids, self._pointers = [], []
        views = self._views(self.allocate())
        for (place, key, _), view, value in zip(self.slots, views, entries, strict=True):
            if isinstance(value, Tensor):
                view.copy_(value.reshape(view.shape))
            elif value is not None:
                view.fill_(value)
            entry = from_dlpack(view) if self._device.type in ALIASED else view
            states[place][key] = entry
            self._ids.append(id(entry))
            self._pointers.append(entry.data_ptr())

    @property
    def first(self) -> int:
        """The identity of the first entry, 0 if there is none."""
        return self._ids[0] if self._ids else 0

    def _entries(self, states: Sequence[State]) -> list[Any]:
        return [states[place].get(key) for place, key, _ in self.slots]

    def _holds(self, entries: list[Any]) -> bool:
        if list(map(id, entries)) != self._ids:
            return False
        if self.open() and list(map(torch.Tensor.data_ptr, entries)) == self._pointers:
            return True
        self.close()
        return False

    def _like(self, other: Slab) -> bool:
        return (self._shape, self._dtype, self._device) == (other._shape, other._dtype, other._device)

    def _views(self, tensor: Tensor) -> Sequence[Tensor]:
        pieces = tensor.split([max(1, slot.lanes) for slot in self.slots])
        return [piece if slot.lanes else piece[0] for piece, slot in zip(pieces, self.slots, strict=True)]
