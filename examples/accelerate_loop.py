"""Dash in a loop of Hugging Face's Accelerate.

python examples/accelerate_loop.py
accelerate launch --num_processes 2 examples/accelerate_loop.py
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dash_shampoo import Dash, param_groups


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    dash = Dash(param_groups(model), lr=1e-2, update_every=5)
    x = torch.randn(512, 16)
    batches = DataLoader(TensorDataset(x, x.norm(dim=1, keepdim=True)), batch_size=32, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, dash, batches)
    # Under DDP save_state() saves what the first process has: it gets the whole state for that.
    accelerator.register_save_state_pre_hook(lambda *_: dash.consolidate_state_dict())
    losses = []
    for _ in range(6):
        for some_x, some_y in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(some_x), some_y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    with tempfile.TemporaryDirectory() as own:
        (folder,) = broadcast_object_list([own])  # that of the first process
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        accelerator.load_state(folder)
        accelerator.wait_for_everyone()
    accelerator.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
