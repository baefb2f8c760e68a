"""Weights that hold int8 numbers and dequantise themselves, as in quantised training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

KEEPS = {torch.ops.aten.detach.default, torch.ops.aten.clone.default}
WRITES = {torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor, torch.ops.aten.addcdiv_.default}


class Int8Weight(Tensor):
    """An int8 matrix or vector with a scale for each row; other operations see its values."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Int8Weight:
        own = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=dtype, device=numbers.device)
        assert isinstance(own, Int8Weight)
        own.numbers, own.scale = numbers, scale
        return own

    @classmethod
    def of(cls, values: Tensor) -> Int8Weight:
        return cls(*quantised(values), dtype=values.dtype)

    def dequantised(self) -> Tensor:
        return (self.numbers * self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KEEPS:
            return cls(func(args[0].numbers), func(args[0].scale), args[0].dtype)
        if func is torch.ops.aten.view.default and tuple(args[1]) == tuple(args[0].shape):  # as DTensor.from_local does
            return cls(args[0].numbers, args[0].scale, args[0].dtype)
        seen, named = tree_map_only(Int8Weight, Int8Weight.dequantised, (args, kwargs or {}))
        if not isinstance(args[0], Int8Weight) or func not in WRITES:
            return func(*seen, **named)
        return args[0].write(seen[1] if func is torch.ops.aten.copy_.default else func(*seen, **named))

    def write(self, values: Tensor) -> Int8Weight:
        numbers, scale = quantised(values)
        self.numbers.copy_(numbers)
        self.scale.copy_(scale)
        return self


class DeafWeight(Int8Weight):
    """One whose writes go to a copy."""

    def write(self, values: Tensor) -> Int8Weight:
        return self


class ShyWeight(Int8Weight):
    """One that cannot be cloned."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers, and the scale of each row: it is a power of 2, so that what has been rounded once stays as it is."""
    rows = values.float().flatten(1) if values.ndim > 1 else values.float().reshape(-1, 1)
    most = rows.abs().amax(1).clamp(min=2.0**-40) / 127
    scale = torch.exp2(most.log2().ceil()).view(-1, *[1] * (values.ndim - 1))
    return (values / scale).round().to(torch.int8), scale
