"""Dash in a plain PyTorch loop: python examples/plain.py"""

import torch
from torch import nn

from dash_shampoo import Dash, param_groups


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = Dash(param_groups(model), lr=1e-2, update_every=5)
    x = torch.randn(256, 16)
    y = x.square().sum(1, keepdim=True).sqrt()
    losses = []
    for _ in range(100):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
