"""Dash on a model compiled by torch.compile: python examples/compiled.py"""

import torch
from torch import nn

from dash_shampoo import Dash, param_groups


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    # "aot_eager" needs no compiler on the machine; leave it out to have the model made fast.
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = Dash(param_groups(model), lr=1e-2, update_every=5)
    x = torch.randn(256, 16)
    y = x.sin().sum(1, keepdim=True)
    losses = []
    for _ in range(60):
        loss = nn.functional.mse_loss(compiled(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
