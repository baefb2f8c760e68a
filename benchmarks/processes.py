"""Seconds per step on several processes: each for itself, sharing the step as replicas, and sharded.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/processes.py

All in turn in one run, so that they can be compared; the slowest process counts. Writes
``benchmarks/results/DEVICE/processes-N.json``.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from dash_shampoo import Dash, param_groups
from dash_shampoo.bench.step import decaying_gradient
from dash_shampoo.bench.timing import interleaved
from dash_shampoo.train.llama import Llama, config_for
from dash_shampoo.train.strategies import cut

CASES: dict[str, dict[str, Any]] = {
    "each for itself": {"process_group": None},
    "replicas": {},
    "replicas, bf16 on the wire": {"wire_dtype": "bf16"},
    "sharded": {},
}


def make(name: str, size: str, device: torch.device, options: dict[str, Any]) -> Dash:
    """An optimizer with gradients of decaying spectrum, as training has them."""
    torch.manual_seed(0)
    model: nn.Module = Llama(config_for(size)).to(device)
    if name == "sharded":
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)  # type: ignore[arg-type]
        fully_shard(model)
    for parameter in model.parameters():
        parameter.grad = cut(decaying_gradient(parameter.shape, device), parameter)
    return Dash(param_groups(model), lr=1e-3, **options, **CASES[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-18m")
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--update-every", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    dist.init_process_group()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    options = {"block_size": arguments.block_size, "update_every": arguments.update_every}
    optimizers = {name: make(name, arguments.model, device, options) for name in CASES}
    times = interleaved(
        {name: partial(each.step, None) for name, each in optimizers.items()}, arguments.repeats, device
    )
    slowest = torch.tensor(list(times.values()), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    rows = dict(zip(times, slowest.tolist(), strict=True))
    if dist.get_rank() == 0:
        for name, seconds in rows.items():
            print(f"{name:30} {seconds:.3f} s   {rows['each for itself'] / seconds:.2f} x")
        folder = Path(__file__).parent / "results" / device.type
        folder.mkdir(parents=True, exist_ok=True)
        record = {**vars(arguments), "processes": dist.get_world_size(), "torch": torch.__version__, "seconds": rows}
        (folder / f"processes-{dist.get_world_size()}.json").write_text(json.dumps(record, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
