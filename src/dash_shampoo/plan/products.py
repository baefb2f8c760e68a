"""What a product takes on a device, by its precision and by what computes it: work, and bytes to and from memory."""

from __future__ import annotations

from typing import NamedTuple

from dash_shampoo.kernels import coarsest
from dash_shampoo.parallel.cost import FACTOR_PASSES, ROOT_PASSES
from dash_shampoo.plan.devices import Device
from dash_shampoo.roots import Call, Solver, calls

# Sides of the kernels' tiles, and of the matrices that this reckons with: what lies above the diagonal is not computed.
TILES_ACROSS = 8
LOWER = (TILES_ACROSS + 1) / (2 * TILES_ACROSS)

# Bytes per element of a product of square float32 matrices, counted in `kernels.products` and `kernels.fused`: factors
# read, the result written, an addend read; where torch computes it, what rounding and splitting make is written and
# read as well, three products of halves are added up, and so is the addend.
FUSED = 16
UNFUSED = {"fp32": 16, "tf32": 84, "fp16": 32, "bf16": 32, "fp16x3": 136, "bf16x3": 136}

# Passes over the factors that accumulating them takes: half of each is read and half written by the kernel; in torch
# the product is written, and product, factor and result are read and written again.
FUSED_FACTOR_PASSES = 1.0


class Pace(NamedTuple):
    """How fast a stage is.

    Attributes:
        products: FLOP/s of its products, all of each counted, also what is mirrored.
        traffic: bytes moved for each that `parallel.cost` counts.
    """

    products: float
    traffic: float = 1.0


def of_roots(solver: Solver, p: int, damping: float, precision: str, device: Device) -> Pace:
    """The pace of inverse roots.

    Args:
        solver: of the roots.
        p: the root.
        damping: relative.
        precision: of the products, one of `dash_shampoo.kernels.PRECISIONS`.
        device: with its peak rates.
    """
    if solver.name == "eigh":
        return Pace(device.fp32)
    found = calls(p, solver=solver, damping=damping)
    kinds = [coarsest(call.low) if precision == "mixed" else precision for call in found]
    seconds = sum(_work(kind, call, device) for kind, call in zip(kinds, found, strict=True))
    moved = sum(FUSED if _is_fused(kind, device) else UNFUSED[kind] for kind in kinds)
    return Pace(len(found) / seconds, _traffic(moved / len(found), len(found)))


def of_factors(device: Device) -> Pace:
    """The pace of G G^T and G^T G, which are in TF32 on tensor cores; see `kernels.bmm`."""
    if not device.tensor_cores:
        return Pace(device.fp32)
    return Pace(device.tf32 / LOWER, FUSED_FACTOR_PASSES / FACTOR_PASSES)


def of_updates(device: Device) -> Pace:
    """The pace of L^(-1/p) M R^(-1/p), which is in TF32 on tensor cores."""
    return Pace(device.tf32 if device.tensor_cores else device.fp32)


def _is_fused(precision: str, device: Device) -> bool:
    return device.tensor_cores and precision in ("fp16", "fp16x3", "tf32")


def _work(precision: str, call: Call, device: Device) -> float:
    """Seconds per FLOP of a product at peak rates."""
    share = LOWER if call.symmetric and _is_fused(precision, device) else 1.0
    return share / device.product(precision)


def _traffic(bytes_per_element: float, count: int) -> float:
    """What `parallel.cost.root` counts for ``count`` products of float32 matrices, as a share of what they move."""
    others = 4 * ROOT_PASSES
    return (bytes_per_element * count + others) / (4 * 3 * count + others)
