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
    bound = values.max() * (values / values.max()).pow(4).sum().pow(0.25)
    return vectors @ torch.diag((values + damping * bound + epsilon) ** (-1 / p)) @ vectors.T


class Block:
    """One block's state, and the paper's lines for it."""

    def __init__(self, rows: int, columns: int, sides: str, o: dict[str, Any]) -> None:
        self.o, self.sides, self.t = o, sides, 0
        self.L, self.R = torch.zeros(rows, rows).double(), torch.zeros(columns, columns).double()
        self.M, self.V = torch.zeros(rows, columns).double(), torch.zeros(rows, columns).double()
        self.velocity = torch.zeros(rows, columns).double()
        self.Li: Tensor | None = None  # before the first gradient there is nothing to take a root of
        self.Ri: Tensor | None = None

    def update(self, G: Tensor) -> Tensor:
        o, (beta1, beta2) = self.o, self.o["betas"]
        graft_beta2 = beta2 if o["graft_beta2"] is None else o["graft_beta2"]
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
            if o["grafting"] != "none" and U.norm() > 0:
                U = U * step.norm() / U.norm()
        if self.sides and o["momentum"]:
            self.velocity = o["momentum"] * self.velocity + U
            U = U + o["momentum"] * self.velocity if o["nesterov"] else self.velocity
        return U

    def precondition(self, M: Tensor, correction: float) -> Tensor:
        o = self.o
        if self.L.any() and (self.Li is None or (self.t - o["start_step"]) % o["update_every"] == 0):
            p = o["root"] or 2 * len(self.sides)
            self.Li = inverse_root(self.L / correction, p, o["damping"], o["epsilon"])
            self.Ri = inverse_root(self.R / correction, p, o["damping"], o["epsilon"])
        if self.Li is None or self.Ri is None:
            return M  # which is zero
        left = self.Li @ M if "L" in self.sides else M
        return left @ self.Ri if "R" in self.sides else left

    def grafted(self, M: Tensor, V: Tensor) -> Tensor:
        method, eps = self.o["grafting"] if self.sides else "adam", self.o["graft_eps"]
        if method not in ("adam", "rmsprop", "adagrad"):
            return M
        root = (V if method == "adam" else self.V).sqrt() + eps
        return torch.where(root > 0, M / root, 0)  # without graft_eps, entries that have had no gradient stay


def is_thin(rows: int, columns: int) -> bool:
    return rows * (rows + 1) + columns * (columns + 1) > 2.5 * rows * columns


def sides_of(rows: int, columns: int, o: dict[str, Any]) -> str:
    """The sides of a matrix's block that are preconditioned: both, or the short one of a thin block."""
    if o["sides"] == "both" or not is_thin(rows, columns):
        return "LR"
    return "L" if rows <= columns else "R"


def ranges(start: int, stop: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def blocks_of(rows: int, columns: int, o: dict[str, Any]) -> list[tuple[slice, slice]]:
    """Blocks of at most ``block_size``; strips of thin ones are cut anew, into equal pieces that are not thin."""
    b = o["block_size"]
    found = []
    # The body and what remains of it, in each dimension: all blocks of such a rectangle are equal.
    edges = [[(0, n - n % b, b), (n - n % b, n, n % b)] for n in (rows, columns)]
    for (top, bottom, r), (left, right, c) in product(*edges):
        if top == bottom or left == right:
            continue
        short, block = min(r, c), (r, c)
        sizes = [size for size in range(short, 2 * short + 1) if not is_thin(short, size)]
        if o["sides"] == "auto" and is_thin(r, c) and sizes:
            total = right - left if r == short else bottom - top
            size = max((size for size in sizes if total % size == 0), default=-(-total // -(-total // max(sizes))))
            block = (r, size) if r == short else (size, c)
        found += list(product(ranges(top, bottom, block[0]), ranges(left, right, block[1])))
    return found


class Reference:
    """Moves one float64 parameter as `Dash` with the same options should."""

    def __init__(self, parameter: Tensor, **options: Any) -> None:
        self.o = options
        self.W = parameter.detach().double().clone()
        self.begun = False
        stack = self.stack()
        _, rows, columns = stack.shape
        vector = self.W.ndim < 2 or (options["sides"] == "auto" and 1 in (rows, columns))
        plain = options["algorithm"] == "adamw" or (vector and options["vectors"] == "adamw") or self.W.ndim == 0
        size = max(1, rows, columns) if plain else options["block_size"]
        rule = {"block_size": size, "sides": "both" if plain or vector else options["sides"]}
        self.places, self.blocks = [], []
        for k, (i, j) in product(range(len(stack)), blocks_of(rows, columns, rule)):
            place = k, i, j
            block = stack[place].shape
            sides = "" if plain else ("L" if rows >= columns else "R") if vector else sides_of(*block, options)
            self.places.append(place)
            self.blocks.append(Block(*block, sides, options))

    def stack(self) -> Tensor:
        """The parameter as matrices: (k, rows, columns)."""
        shape = self.W.shape
        if self.W.ndim < 2:
            return self.W.reshape(1, -1, 1)
        view = self.o["view"]
        if self.W.ndim == 2 or view == "matrix" or (view == "auto" and self.W.ndim > 3):
            return self.W.reshape(1, shape[0], prod(shape[1:]))
        return self.W.reshape(prod(shape[:-2]), *shape[-2:])

    def step(self, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        self.begun = self.begun or bool(gradient.any())
        if not self.begun:  # zeros before the first other gradient let weights decay, and do nothing else
            self.W = (1 - self.o["lr"] * self.o["weight_decay"]) * self.W
            return
        sign = -1.0 if self.o["maximize"] else 1.0
        stack = self.stack()
        G = sign * gradient.double().reshape(stack.shape)
        for place, block in zip(self.places, self.blocks, strict=True):
            U = block.update(G[place])
            stack[place] = (1 - self.o["lr"] * self.o["weight_decay"]) * stack[place] - self.o["lr"] * U
        self.W = stack.reshape(self.W.shape)
