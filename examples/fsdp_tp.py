"""FSDP2 and tensor parallelism on one mesh, with checkpoints that any arrangement of processes can go on from.

torchrun --standalone --nproc-per-node 4 examples/fsdp_tp.py --folder CHECKPOINTS [--tensor 2] [--fail-at STEP]

Run it again with the same folder, and it goes on from the last checkpoint there: with as many processes to the bit.
"""

import argparse
import gc
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dash_shampoo import Dash, param_groups

STEPS, SAVE_EVERY, BATCH = 60, 20, 64
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Block(nn.Module):
    """x + down(relu(up(norm(x))))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make(mesh: DeviceMesh) -> nn.Sequential:
    """The model, with each block's matrices cut over "tensor" and all parameters over "data"."""
    torch.manual_seed(0)  # the same weights on every process
    model = nn.Sequential(nn.Linear(16, 32), Block(32), Block(32), nn.Linear(32, 1))
    for block in model[1:3]:
        if mesh["tensor"].size() > 1:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def batch(step: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """This process's share of a step's batch. Processes along "tensor" share theirs."""
    x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
    y = x.square().sum(1, keepdim=True).sqrt()
    rank, size = mesh["data"].get_local_rank(), mesh["data"].size()
    return x.chunk(size)[rank], y.chunk(size)[rank]


def save(folder: Path, step: int, model: nn.Module, optimizer: Dash) -> None:
    """Every process writes what it owns; the checkpoint counts once "done" names it."""
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / str(step))
    if dist.get_rank() == 0:
        (folder / "done.new").write_text(str(step))
        os.replace(folder / "done.new", folder / "done")
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: Dash) -> int:
    """The number of steps that have been done: what the last checkpoint has, or 0 if there is none."""
    if not (folder / "done").exists():
        return 0
    step = int((folder / "done").read_text())
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / str(step))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=FLAT)
    return step


def checksum(model: nn.Module) -> str:
    """Of all weights, as one process alone would have them."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()


def train(folder: Path, tensor: int, fail_at: int | None) -> tuple[float, float, str]:
    """The first loss of all, the last, and the checksum of the weights."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    model = make(mesh)
    optimizer = Dash(param_groups(model), lr=1e-2, update_every=5)  # after the model has been cut

    def loss_of(step: int) -> Tensor:
        x, y = batch(step, mesh)
        return nn.functional.mse_loss(model(x), y)

    def mean(loss: Tensor) -> float:
        found = loss.detach().clone()
        dist.all_reduce(found)
        return found.item() / dist.get_world_size()

    first = mean(loss_of(0))
    for step in range(load(folder, model, optimizer), STEPS):
        if step == fail_at and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # as a machine that goes away
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY == 0:
            save(folder, step + 1, model, optimizer)
    return first, mean(loss_of(STEPS)), checksum(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="of the checkpoints")
    parser.add_argument("--tensor", type=int, default=2, help="processes that share each matrix")
    parser.add_argument("--fail-at", type=int, default=None, help="kill a process before this step")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    before, after, weights = train(arguments.folder, arguments.tensor, arguments.fail_at)
    if dist.get_rank() == 0:
        print(f"weights {weights}")
        print(f"loss {before:.4f} -> {after:.4f}")
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
