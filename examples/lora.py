"""Dash on LoRA adapters of PEFT, for a tiny Llama made from a configuration: python examples/lora.py"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from dash_shampoo import Dash, param_groups


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes))
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    optimizer = Dash(param_groups(model), lr=3e-2, update_every=5)
    tokens = (torch.arange(16) + 8 * torch.arange(8).unsqueeze(1)) % 64  # sequences that count upwards
    losses = []
    for _ in range(80):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
