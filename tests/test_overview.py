"""`describe` says what the optimizer does: as many elements, the same blocks, the same factors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dash_shampoo import Dash, describe, param_groups


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.patches = nn.Conv2d(3, 16, 4)
        self.blocks = nn.ModuleList(nn.Linear(16, 40, bias=False) for _ in range(12))
        self.gate = nn.Linear(16, 12)


TABLE = """\
group         moved by  view    parameters            shape          blocks        preconditioned
matrices      shampoo           12 x blocks.*.weight  (40, 16)       2 of 16 x 16  left and right
                                                                     2 of 8 x 8    left and right
matrices      shampoo           gate.weight           (12, 16)       1 of 12 x 16  left and right
convolutions  shampoo   matrix  patches.weight        (16, 3, 4, 4)  3 of 16 x 16  left and right
embeddings    adamw             embedding.weight      (100, 16)
vectors       adamw             patches.bias          (16,)
vectors       adamw             gate.bias             (12,)
10,268 elements: 8,640 moved by Shampoo, 1,628 by AdamW"""


def test_a_line_for_alike_parameters_and_one_for_each_shape_of_block() -> None:
    with torch.device("meta"):
        assert describe(param_groups(Model()), block_size=16) == TABLE


def test_an_optimizer_is_described_alike() -> None:
    optimizer = Dash(param_groups(Model()), block_size=16)
    assert describe(optimizer.param_groups) == TABLE


def test_groups_without_names() -> None:
    table = describe(Dash([torch.zeros(4, 4), torch.zeros(4)], vectors="shampoo").param_groups)
    assert [" ".join(line.split()) for line in table.splitlines()[1:3]] == [
        "0 shampoo parameter 0 of group 0 (4, 4) 1 of 4 x 4 left and right",
        "0 shampoo parameter 1 of group 0 (4,) 1 of 4 x 1 left",
    ]


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="block_size must be a positive integer, not 0"):
        describe(param_groups(Model()), block_size=0)
    with pytest.raises(TypeError, match="blocksize"):
        describe(param_groups(Model()), blocksize=8)
    with pytest.raises(ValueError, match=r"blocks\.0\.weight has the shape \(40, 16\): split_rows does not fit, 40"):
        describe(param_groups(Model(), overrides={r"blocks\..*": {"split_rows": 3}}))
