"""Steps that one can write down, and small problems that every solver, grafting method and dtype solves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dash_shampoo import Dash

SOLVERS = ["minimax", "newton-db", "coupled-newton", "chebyshev", "eigh"]
EXACT = {"lr": 1.0, "betas": (0.0, 0.9), "grafting": "none"}


def gradient_of(*values: float, rows: int = 5, columns: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """U (rows, k), the singular ``values`` and V (columns, k) of a gradient."""
    generator = torch.Generator().manual_seed(3)
    k = len(values)
    left, right = (
        torch.linalg.qr(torch.randn(size, k, generator=generator, dtype=torch.float64)).Q for size in (rows, columns)
    )
    return left, torch.tensor(values, dtype=torch.float64), right


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("root", [2, 4])
def test_the_first_step_shrinks_singular_values_by_their_own_power(solver: str, root: int) -> None:
    """L and R have the squares of G's singular values s: U = V' f(s) V with f = s (s^2 + damping |L|)^(-2/p).

    At p = 4 that is the nearest orthogonal matrix but for the damping, which is what Muon moves by.
    """
    left, s, right = gradient_of(3.0, 2.0, 1.0, 0.5)
    parameter = nn.Parameter(torch.zeros(5, 4, dtype=torch.float64))
    damping = 1e-2
    optimizer = Dash([parameter], **EXACT, solver=solver, root=root, damping=damping, sides="both")
    parameter.grad = left * s @ right.T
    optimizer.step()
    damped = s.square() + damping * s.pow(8).sum().pow(0.25)
    expected = -(left * (s * damped.pow(-2 / root))) @ right.T
    tolerance = 2e-2 if solver == "chebyshev" else 5e-3
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=tolerance * float(expected.norm()))
    if root == 4:
        torch.testing.assert_close(parameter.detach(), -left @ right.T, rtol=0, atol=0.2)


@pytest.mark.parametrize("solver", ["minimax", "eigh"])
def test_a_vector_moves_by_its_gradient_over_its_norm(solver: str) -> None:
    """Its one factor is g g^T, with the root 1 / |g| along g."""
    parameter = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    optimizer = Dash([parameter], **EXACT, solver=solver, root=2, damping=1e-4, vectors="shampoo")
    parameter.grad = torch.arange(1.0, 7.0, dtype=torch.float64)
    optimizer.step()
    expected = -parameter.grad / parameter.grad.norm() / (1 + 1e-4) ** 0.5
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("steps", [1, 10, 300])
def test_the_state_after_many_equal_gradients(steps: int, bias_correction: bool) -> None:
    """Corrected means of a constant are the constant; others have gathered 1 - beta^t of it."""
    parameter = nn.Parameter(torch.zeros(5, 4, dtype=torch.float64))
    options: dict[str, Any] = {"bias_correction": bias_correction, "root": 4, "solver": "eigh", "damping": 1e-3}
    optimizer = Dash([parameter], lr=1e-3, betas=(0.9, 0.99), **options)
    left, s, right = gradient_of(3.0, 2.0, 1.0, 0.5)
    G = left * s @ right.T
    for _ in range(steps):
        parameter.grad = G.clone()
        optimizer.step()
    state = optimizer.state[parameter]
    torch.testing.assert_close(state["tile0.moment"][0], (1 - 0.9**steps) * G, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state["tile0.statistic"][0], (1 - 0.99**steps) * G * G, rtol=1e-11, atol=1e-13)
    gathered = 1.0 if bias_correction else 1 - 0.99**steps
    for side, factor in (("left", G @ G.T), ("right", G.T @ G)):
        kept = state[f"tile0.{side}"][0][1:].tril()  # the root lies in the other triangle
        torch.testing.assert_close(kept, gathered * factor.tril(), rtol=1e-11, atol=1e-12)
    assert (state["age"], float(state["step"]), int(state["skipped"])) == (steps, steps, 0)


class LeastSquares:
    """A matrix and a vector to be found from inputs whose scales differ by 30."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(96, 10, generator=generator) * torch.logspace(0, -1.5, 10)
        self.targets = self.inputs @ torch.randn(10, 6, generator=generator) + torch.randn(6, generator=generator)
        self.weight = nn.Parameter(torch.zeros(10, 6, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(6, dtype=dtype))

    def loss(self) -> Tensor:
        found = self.inputs.to(self.weight.dtype) @ self.weight + self.bias
        return (found - self.targets.to(found.dtype)).float().square().mean()

    def solved(self, steps: int, **options: Any) -> float:
        """What is left of the loss after training with a falling learning rate."""
        before = self.loss().item()
        optimizer = Dash([self.weight, self.bias], **options)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss().backward()
            optimizer.step()
            schedule.step()
        return self.loss().item() / before


RUNS: list[dict[str, Any]] = [
    *({"solver": solver, "root": root} for solver in SOLVERS for root in (2, 4)),
    *({"solver": solver} for solver in ("newton-db-paper", "coupled-newton-paper")),
    {"grafting": "rmsprop"},
    {"grafting": "adagrad", "lr": 0.5},
    {"grafting": "sgd", "lr": 4.0},  # slow, as plain descent is
    {"grafting": "none", "root": 4},  # at p = 2 the update would grow as the gradient shrinks
    {"algorithm": "adamw"},
    {"vectors": "shampoo", "momentum": 0.5, "nesterov": True},
    {"state_dtype": "bf16", "block_size": 4},
    {"start_step": 20, "update_every": 1},
]


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_a_small_problem_is_solved_by_everything(options: dict[str, Any]) -> None:
    most = 1e-2 if options.get("grafting") == "sgd" else 1e-3
    assert LeastSquares(torch.float32).solved(150, **{"lr": 0.1, **options}) < most


@pytest.mark.parametrize("algorithm", ["shampoo", "adamw"])
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float64, 1e-3), (torch.float32, 1e-3), (torch.bfloat16, 1e-3), (torch.float16, 1e-3)]
)
def test_a_small_problem_is_solved_in_every_dtype(dtype: torch.dtype, most: float, algorithm: str) -> None:
    assert LeastSquares(dtype).solved(150, lr=0.1, algorithm=algorithm) < most
