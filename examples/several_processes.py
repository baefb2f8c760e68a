"""Dash on several processes, with a checkpoint that any number of them can resume.

torchrun --standalone --nproc-per-node 2 examples/several_processes.py [ddp | fsdp]
"""

import gc
import sys
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dash_shampoo import Dash, param_groups

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def train(strategy: str) -> tuple[float, float]:
    """The first and the last loss."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DistributedDataParallel(model) if strategy == "ddp" else fully_shard(model)
    optimizer = Dash(param_groups(model), lr=1e-2, update_every=5)  # after fully_shard, which replaces parameters
    x = torch.randn(256, 16)
    y = x.square().sum(1, keepdim=True).sqrt()
    own, targets = x.chunk(size)[rank], y.chunk(size)[rank]
    losses = []
    for step in range(100):
        loss = nn.functional.mse_loss(model(own), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
        if step == 50:
            save_and_load(model, optimizer)
    return losses[0], losses[-1]


def save_and_load(model: nn.Module, optimizer: Dash) -> None:
    """Every process writes the blocks that it owns, and reads those that it will own."""
    with TemporaryDirectory() as folder:
        path = [folder]
        dist.broadcast_object_list(path)
        weights, state = get_state_dict(model, optimizer, options=FLAT)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path[0])
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path[0])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=FLAT)
        dist.barrier()


def main() -> None:
    dist.init_process_group()
    before, after = train(sys.argv[1] if len(sys.argv) > 1 else "ddp")
    if dist.get_rank() == 0:
        print(f"loss {before:.4f} -> {after:.4f}")
    gc.collect()  # gloo may abort a process that ends while DistributedDataParallel still holds its group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
