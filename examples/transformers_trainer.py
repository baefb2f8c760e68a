"""Dash in Hugging Face's Trainer, on a tiny Llama made from a configuration: python examples/transformers_trainer.py"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dash_shampoo.integrations import DashFactory, trainer_callback

STEPS = 30


class Counting(Dataset):
    """Sequences that count upwards from a random start."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + i) % 64
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            logging_steps=1,
            save_steps=STEPS // 2,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            lr_scheduler_type="cosine",
            warmup_steps=5,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=Counting(),
            optimizer_cls_and_kwargs=(DashFactory, {"lr": 1e-2, "update_every": 5}),
            callbacks=[trainer_callback()],  # saves all of the state under DDP too
        )
        trainer.train()
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
