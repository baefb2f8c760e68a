"""Gradients accumulated over small batches move Dash as one large batch does: python examples/accumulation.py"""

import copy

import torch
from torch import Tensor, nn

from dash_shampoo import Dash, param_groups


def train(model: nn.Module, x: Tensor, y: Tensor, pieces: int) -> list[float]:
    optimizer = Dash(param_groups(model), lr=1e-2, update_every=5)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        total = 0.0
        for some_x, some_y in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            loss = nn.functional.mse_loss(model(some_x), some_y) / pieces
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    x = torch.randn(256, 16).double()
    y = x.prod(1, keepdim=True).sign()
    whole, pieces = train(copy.deepcopy(model), x, y, 1), train(copy.deepcopy(model), x, y, 8)
    if max(abs(one - other) for one, other in zip(whole, pieces, strict=True)) > 1e-6:
        raise SystemExit("accumulated gradients went another way than the large batch")
    print(f"loss {pieces[0]:.4f} -> {pieces[-1]:.4f}")


if __name__ == "__main__":
    main()
