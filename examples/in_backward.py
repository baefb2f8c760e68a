"""Dash inside the backward pass, so that no two gradients are in memory at once: python examples/in_backward.py

Each parameter has an optimizer of its own, which steps as soon as its gradient is there and lets it go. That gives up
what stacks are for, batching over layers: use it where memory is short. Gradients cannot be clipped by their norm then.
"""

import torch
from torch import Tensor, nn

from dash_shampoo import Dash, param_groups


def step_in_backward(model: nn.Module, **options: object) -> list[Dash]:
    """Lets each parameter step by itself; returns the optimizers, whose states and learning rates are the user's."""
    optimizers = {
        parameter: Dash([{**group, "params": [(name, parameter)]}], **options)
        for group in param_groups(model)
        for name, parameter in group["params"]
    }

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizers = step_in_backward(model, lr=1e-2, update_every=5)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100) for optimizer in optimizers]
    x = torch.randn(256, 16)
    y = x.square().sum(1, keepdim=True).sqrt()
    losses = []
    for _ in range(100):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        for schedule in schedules:
            schedule.step()
        losses.append(loss.item())
    assert all(parameter.grad is None for parameter in model.parameters())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
