"""A Llama-type transformer: RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dash_shampoo.train.errors import InputError, choose


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model: ``hidden`` is the width inside SwiGLU, ``kv_heads`` below ``heads`` grouped-query attention."""

    layers: int
    width: int
    heads: int
    hidden: int
    context: int
    vocabulary: int = 256
    kv_heads: int | None = None
    tied: bool = False

    def check(self) -> None:
        """Raises InputError where sizes do not fit each other."""
        for name in ("layers", "width", "heads", "hidden", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise InputError(f"width {self.width} does not divide into {self.heads} heads of an even size")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise InputError(f"{self.heads} heads do not divide into groups for {self.kv_heads} key-value heads")


# The text decides the vocabulary of the small ones; the others have that of the Llama they are named after.
SIZES = {
    "tiny": LlamaConfig(layers=4, width=128, heads=4, hidden=352, context=64),
    "small": LlamaConfig(layers=6, width=384, heads=6, hidden=1024, context=256),
    "llama-18m": LlamaConfig(layers=4, width=512, heads=8, hidden=1536, context=256, vocabulary=4096),
    "llama-953m": LlamaConfig(layers=16, width=2048, heads=16, hidden=5632, context=1024, vocabulary=32000),
    "llama-1b": LlamaConfig(
        layers=16, width=2048, heads=32, hidden=8192, context=2048, vocabulary=128256, kv_heads=8, tied=True
    ),
    "llama-7b": LlamaConfig(layers=32, width=4096, heads=32, hidden=11008, context=2048, vocabulary=32000),
    "llama-70b": LlamaConfig(
        layers=80, width=8192, heads=64, hidden=28672, context=8192, vocabulary=128256, kv_heads=8
    ),
    "llama-405b": LlamaConfig(
        layers=126, width=16384, heads=128, hidden=53248, context=8192, vocabulary=128256, kv_heads=8
    ),
}


def config_for(size: str, **changes: int | bool | None) -> LlamaConfig:
    """The configuration of a named size with some numbers changed; ``None`` changes nothing.

    Raises:
        InputError: there is no such size, or the numbers do not fit each other.
    """
    config = replace(SIZES[choose("model", size, SIZES)], **{k: v for k, v in changes.items() if v is not None})  # type: ignore[arg-type]
    config.check()
    return config


class Llama(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("rotation", rotation(config.context, config.width // config.heads), persistent=False)
        self.apply(self._initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the next token, in nats."""
        return cross_entropy(self(tokens), targets)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        # What adds to the residual stream starts smaller, so that depth does not blow it up.
        if isinstance(module, Block):
            for last in (module.attention.output, module.mlp.down):
                nn.init.normal_(last.weight, std=0.02 / (2 * self.config.layers) ** 0.5)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over logits (batch, time, vocabulary) and the tokens (batch, time) that they should predict, in nats."""
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))


class Block(nn.Module):
    """Attention and SwiGLU, each on a normalised copy of the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Attention(nn.Module):
    """Causal attention; every group of query heads shares one key-value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.size = config.width // config.heads
        kv_width = (config.kv_heads or config.heads) * self.size
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, kv_width, bias=False)
        self.value = nn.Linear(config.width, kv_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )  # (batch, heads, time, size)
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(
            rotate(q, rotation), rotate(k, rotation), v, is_causal=True, enable_gqa=grouped
        )
        out: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def rotation(context: int, size: int, base: float = 10000.0) -> Tensor:
    """Cosines and sines of the rotary angles: (2, context, size / 2)."""
    frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns the pairs (i, i + size / 2) of ``x`` (..., time, size) by the angles of their positions."""
    cosine, sine = rotation[:, : x.shape[-2]].to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)
