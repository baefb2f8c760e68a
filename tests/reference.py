"""Shampoo straight from the paper's algorithm: one parameter, one block, one float64 eigendecomposition at a time."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor


def inverse_root(factor: Tensor, p: int, damping: float, epsilon: float) -> Tensor:
    values, vectors = torch.linalg.eigh(factor)
    values = values.clamp(min=0)
    if values.max() == 0:
        return torch.eye(len(factor), dtype=factor.dtype)
    bound = values.max() * (values / values.max()).pow(4).sum().pow(0.25)
    return vectors @ torch.diag((values + damping * bound + epsilon) ** (-1 / p)) @ vectors.T


class Block:
    """One block's state, and the paper's lines for it."""

    def __init__(self, rows: int, columns: int, sides: int, o: dict[str, Any]) -> None:
        self.o, self.sides, self.t = o, sides, 0
        self.L, self.R = torch.zeros(rows, rows).double(), torch.zeros(columns, columns).double()
        self.M, self.V = torch.zeros(rows, columns).double(), torch.zeros(rows, columns).double()
        self.velocity = torch.zeros(rows, columns).double()

    def update(self, G: Tensor) -> Tensor:
        o, (beta1, beta2) = self.o, self.o["betas"]
        graft_beta2 = o["graft_beta2"] or beta2
        self.t += 1
        self.L = beta2 * self.L + (1 - beta2) * G @ G.T
        self.R = beta2 * self.R + (1 - beta2) * G.T @ G
        self.M = beta1 * self.M + (1 - beta1) * G
        if o["grafting"] == "adagrad" and self.sides:
            self.V = self.V + G * G
        else:
            self.V = graft_beta2 * self.V + (1 - graft_beta2) * G * G
        corrected = o["bias_correction"]
        M = self.M / (1 - beta1**self.t) if corrected else self.M
        step = self.grafted(M, self.V / (1 - graft_beta2**self.t) if corrected else self.V)
        U = step
        if self.sides and self.t >= o["start_step"]:
            U = self.precondition(M, 1 - beta2**self.t if corrected else 1.0)
            if o["grafting"] != "none":
                U = U * step.norm() / U.norm()
        if self.sides and o["momentum"]:
            self.velocity = o["momentum"] * self.velocity + U
            U = U + o["momentum"] * self.velocity if o["nesterov"] else self.velocity
        return U

    def precondition(self, M: Tensor, correction: float) -> Tensor:
        o = self.o
        if (self.t - o["start_step"]) % o["update_every"] == 0:
            p = o["root"] or 2 * self.sides
            self.Li = inverse_root(self.L / correction, p, o["damping"], o["epsilon"])
            self.Ri = inverse_root(self.R / correction, p, o["damping"], o["epsilon"])
        return self.Li @ M @ self.Ri if self.sides == 2 else self.Li @ M

    def grafted(self, M: Tensor, V: Tensor) -> Tensor:
        method, eps = self.o["grafting"] if self.sides else "adam", self.o["graft_eps"]
        if method == "adam":
            return M / (V.sqrt() + eps)
        if method in ("rmsprop", "adagrad"):
            return M / (self.V.sqrt() + eps)
        return M


class Reference:
    """Moves one float64 parameter as `Dash` with the same options should."""

    def __init__(self, parameter: Tensor, **options: Any) -> None:
        self.o = options
        self.W = parameter.detach().double().clone()
        matrix = self.matrix()
        b = options["block_size"]
        self.sides = 2 if self.W.ndim >= 2 else int(self.W.ndim == 1 and options["vectors"] == "shampoo")
        if options["algorithm"] == "adamw":
            self.sides = 0
        if not self.sides:
            b = max(1, *matrix.shape)
        corners = product(range(0, matrix.shape[0], b), range(0, matrix.shape[1], b))
        self.places = [(slice(i, i + b), slice(j, j + b)) for i, j in corners]
        self.blocks = [Block(*matrix[place].shape, self.sides, options) for place in self.places]

    def matrix(self) -> Tensor:
        rows = self.W.shape[0] if self.W.ndim else 1
        return self.W.reshape(rows, prod(self.W.shape[1:]))

    def step(self, gradient: Tensor) -> None:
        sign = -1.0 if self.o["maximize"] else 1.0
        matrix = self.matrix()
        G = sign * gradient.double().reshape(matrix.shape)
        for place, block in zip(self.places, self.blocks, strict=True):
            U = block.update(G[place])
            matrix[place] = (1 - self.o["lr"] * self.o["weight_decay"]) * matrix[place] - self.o["lr"] * U
        self.W = matrix.reshape(self.W.shape)
