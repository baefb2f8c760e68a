"""A mixture of experts, of which each token takes two, on sequences that count upwards: python examples/experts.py"""

import torch
from torch import Tensor, nn

from dash_shampoo import Dash, param_groups


class Experts(nn.Module):
    """SwiGLU experts in stacked weights, gate and up projections fused."""

    def __init__(self, width: int, hidden: int, experts: int, taken: int = 2) -> None:
        super().__init__()
        self.taken = taken
        self.router = nn.Linear(width, experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * hidden, width) / width**0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).topk(self.taken, dim=-1)  # (tokens, taken) each
        out = torch.zeros_like(x)
        for i, weight in enumerate(weights.softmax(-1).unbind(-1)):
            for expert in chosen[:, i].unique().tolist():
                rows = (chosen[:, i] == expert).nonzero().squeeze(1)
                gate, up = (x[rows] @ self.gate_up_proj[expert].T).chunk(2, dim=-1)
                own = (nn.functional.silu(gate) * up) @ self.down_proj[expert].T
                out = out.index_add(0, rows, own * weight[rows].unsqueeze(1))
        return out


class Model(nn.Module):
    def __init__(self, vocabulary: int = 32, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.norm = nn.RMSNorm(width)
        self.experts = Experts(width, 48, experts=4)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.head(x + self.experts(self.norm(x)))


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    # Each expert has blocks of its own; gate and up projections share no factor.
    groups = param_groups(model, overrides={r".*gate_up_proj": {"split_rows": 2}})
    optimizer = Dash(groups, lr=5e-3, update_every=5)
    losses = []
    for _ in range(60):
        tokens = torch.randint(32, (128,))
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 32)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
