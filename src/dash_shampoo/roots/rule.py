"""The precision that "auto" stands for: a rule, so that it is the same on every process and at every resume."""

from __future__ import annotations

import torch

from dash_shampoo.kernels import has_tensor_cores
from dash_shampoo.roots.checks import least_damping
from dash_shampoo.roots.solver import Solver

# Fastest first, of those whose roots are as good as float32's for training (docs/roots.md).
_ON_TENSOR_CORES = ("mixed", "fp16x3")


def resolve_precision(precision: str, solver: Solver, p: int, damping: float, device: torch.device) -> str:
    """``precision``; for "auto" what suits a root of float32 matrices on a ``device``.

    On tensor cores that is split float16 going over to float16, or where the damping forbids that, split float16. It is
    true float32 for smaller dampings, on other devices, for the paper's presets, which no certificate guards, and for
    eigendecompositions, which gain nothing.
    """
    if precision != "auto":
        return precision
    if not has_tensor_cores(device) or not solver.certified or solver.name == "eigh":
        return "fp32"
    return next((name for name in _ON_TENSOR_CORES if damping >= least_damping(name, p)), "fp32")
