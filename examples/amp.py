"""Dash under automatic mixed precision with a GradScaler: python examples/amp.py"""

import torch
from torch import nn

from dash_shampoo import Dash, param_groups


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = Dash(param_groups(model), lr=1e-2, update_every=5)
    scaler = torch.amp.GradScaler(device)
    x = torch.randn(256, 16, device=device)
    y = x.abs().sum(1, keepdim=True)
    losses = []
    for _ in range(60):
        with torch.autocast(device, torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)  # leaves the step out where scaling has overflowed
        scaler.update()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
