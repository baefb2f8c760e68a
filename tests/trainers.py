"""Training in others' trainers, under torchrun: straight through with a checkpoint halfway, or resumed from that.

    torchrun --nproc-per-node 2 tests/trainers.py TOOL STRATEGY FOLDER PHASE

Each recipe is what a user writes; what it has more than AdamW's is marked.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dash_shampoo import Dash, param_groups
from dash_shampoo.integrations import DashFactory, trainer_callback

HALF, END = 4, 7
OPTIONS: dict[str, Any] = {"lr": 1e-2, "update_every": 3, "block_size": 16}


def data() -> TensorDataset:
    x = torch.randn(16 * END, 32, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.flip(1).cumsum(1)[:, :8])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 8))


def digest(model: nn.Module) -> str:
    """A checksum of a model's weights, whoever holds them."""
    whole = [getattr(each, "full_tensor", each.detach)().detach() for each in model.parameters()]
    return hashlib.sha256(b"".join(each.contiguous().numpy().tobytes() for each in whole)).hexdigest()


def accelerate(strategy: str, folder: Path, phase: str) -> str:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    sharded = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=sharded if strategy == "fsdp" else None)
    model = network()
    dash = Dash(param_groups(model), **OPTIONS)
    batches = DataLoader(data(), batch_size=8)
    model, optimizer, batches = accelerator.prepare(model, dash, batches)
    if strategy == "ddp":
        accelerator.register_save_state_pre_hook(lambda *_: dash.consolidate_state_dict())  # more than AdamW's
    step = 0
    if phase == "resumed":
        accelerator.load_state(str(folder))
        step = HALF
    for x, y in accelerator.skip_first_batches(batches, step):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == HALF and phase == "straight":
            accelerator.save_state(str(folder))
    return digest(model)


def transformers(strategy: str, folder: Path, phase: str) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=False, **sizes))
    rows = [{"input_ids": (tokens := (torch.arange(8) + i) % 64), "labels": tokens} for i in range(8 * END)]
    fsdp = {"fsdp": "full_shard", "fsdp_config": {"version": 2, "fsdp_version": 2}} if strategy == "fsdp" else {}
    arguments = TrainingArguments(
        str(folder / "run"),
        max_steps=END,
        save_steps=HALF,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **fsdp,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        optimizer_cls_and_kwargs=(DashFactory, OPTIONS),
        callbacks=[trainer_callback()],  # more than AdamW's
    )
    trainer.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{HALF}") if phase == "resumed" else None)
    return digest(trainer.model)


def lightning(strategy: str, folder: Path, phase: str) -> str:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def configure_model(self) -> None:
            if strategy == "fsdp":
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, *_: Any) -> Tensor:
            # By the step: Lightning begins an epoch anew when it resumes.
            x, y = data()[torch.arange(8) + 8 * (2 * self.global_step + self.global_rank)]
            return nn.functional.mse_loss(self.model(x), y)

        def configure_optimizers(self) -> Dash:
            return Dash(param_groups(self), **OPTIONS)

    size = int(os.environ.get("WORLD_SIZE", "1"))
    sharded = ModelParallelStrategy(
        data_parallel_size=size, tensor_parallel_size=1, save_distributed_checkpoint=False, process_group_backend="gloo"
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=sharded if strategy == "fsdp" else "ddp",
        max_steps=END,
        logger=False,
        callbacks=[ModelCheckpoint(folder / phase, filename="half", every_n_train_steps=HALF)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression()
    trainer.fit(
        module,
        DataLoader(data(), batch_size=8),
        ckpt_path=folder / "straight" / "half.ckpt" if phase == "resumed" else None,
    )
    return digest(module)


if __name__ == "__main__":
    warnings.filterwarnings("error", message="this state dict is the part")
    tool, strategy, folder, phase = sys.argv[1:]
    found = globals()[tool](strategy, Path(folder), phase)
    print(f"{phase} {os.environ.get('RANK', '0')} {found}", flush=True)
