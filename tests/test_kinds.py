"""Parameters are told by what they are: the groups of what people train are those that one would make by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from dash_shampoo import param_groups
from tests.grouping import grouping


class Block(nn.Module):
    """A layer whose width is that of the table, and whose inner width is the vocabulary's."""

    def __init__(self, width: int = 8, hidden: int = 30) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)


BLOCK = ["attention.in_proj_weight", "attention.out_proj.weight", "down.weight", "up.weight"]


class Trunk(nn.Module):
    """A model of text without a head."""

    def __init__(self, vocabulary: int = 30, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))


def with_heads(*heads: tuple[str, nn.Module], trunk: nn.Module | None = None) -> nn.Module:
    model = nn.Module()
    model.trunk = trunk or Trunk()
    for name, head in heads:
        setattr(model, name, head)
    return model


def heads_of(model: nn.Module) -> list[str]:
    """The parameters in the embeddings' group that are no tables."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    (group,) = (group for group in param_groups(model) if group["name"] == "embeddings")
    return [name for name, parameter in group["params"] if id(parameter) not in tables]


def test_no_layer_is_a_head_without_one() -> None:
    # Inner layers are as wide as the vocabulary or wider than the positions, and the last one is as wide as the table.
    assert heads_of(Trunk()) == []
    assert heads_of(Trunk(vocabulary=8)) == []
    assert heads_of(nn.Sequential(Trunk(vocabulary=4), nn.LayerNorm(8))) == []


def test_a_head_may_be_longer_than_the_vocabulary() -> None:
    assert heads_of(with_heads(("head", nn.Linear(8, 30)))) == ["head.weight"]
    assert heads_of(with_heads(("head", nn.Linear(8, 64)))) == ["head.weight"]
    assert heads_of(with_heads(("classes", nn.Linear(8, 29)))) == []


def test_a_head_may_be_as_long_as_the_layers_are_wide() -> None:
    model = with_heads(("inner", nn.Linear(8, 8)), ("head", nn.Linear(8, 8)), trunk=Trunk(vocabulary=8))
    assert heads_of(model) == ["head.weight"]


def test_a_head_may_share_the_tables_weight() -> None:
    model = with_heads(("head", nn.Linear(8, 30, bias=False)))
    model.head.weight = model.trunk.words.weight
    assert heads_of(model) == []
    assert [name for group in param_groups(model) for name, _ in group["params"]].count("trunk.words.weight") == 1


def test_there_may_be_several_heads() -> None:
    # Of several kinds, in any order, among those onto other things, and of more than a layer each.
    def head() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 30))

    model = with_heads(
        ("plain", nn.Linear(8, 30)),
        ("classes", nn.Linear(8, 3)),
        ("deep", head()),
        ("predictions", nn.ModuleList([nn.Linear(8, 30), nn.Linear(8, 30)])),
        ("named", nn.ModuleDict({"a": head(), "b": head()})),
        ("value", nn.Linear(8, 1)),
    )
    last = ["plain", "deep.3", "predictions.0", "predictions.1", "named.a.3", "named.b.3"]
    assert heads_of(model) == [f"{name}.weight" for name in last]


def test_layers_for_several_tokens_end_in_heads_of_their_own() -> None:
    block = with_heads(("head", nn.Linear(8, 30)), trunk=Block())
    model = with_heads(("head", nn.Linear(8, 30)), ("ahead", nn.ModuleList([block])))
    assert heads_of(model) == ["head.weight", "ahead.0.head.weight"]


def test_encoder_and_decoder_have_heads_of_their_own() -> None:
    def part(vocabulary: int) -> nn.Module:
        return with_heads(("output", nn.Linear(8, vocabulary)), trunk=Trunk(vocabulary))

    model = with_heads(("decoder", part(20)), ("again", nn.Linear(8, 50)), trunk=part(50))
    assert heads_of(model) == ["trunk.output.weight", "decoder.output.weight", "again.weight"]


def test_a_head_may_be_as_wide_as_a_recurrent_layer() -> None:
    model = nn.Module()
    model.table, model.up = nn.Embedding(30, 8), nn.Linear(8, 48)
    model.rnn, model.head = nn.GRU(48, 32), nn.Linear(32, 30)
    assert heads_of(model) == ["head.weight"]


def test_a_flat_model_has_one_head() -> None:
    model = nn.Module()
    model.table = nn.Embedding(30, 8)
    model.wide, model.inner = nn.Linear(8, 30), nn.Linear(30, 8)
    model.qkv, model.out = nn.Linear(8, 48), nn.Linear(16, 8)
    model.head = nn.Linear(8, 30)
    assert heads_of(model) == ["head.weight"]


def test_a_head_that_the_model_names_is_one() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codebooks = nn.ModuleList(nn.Linear(8, 5) for _ in range(2))
            self.after = Trunk()

        def get_output_embeddings(self) -> nn.Module:
            return self.codebooks

    assert heads_of(Named()) == ["codebooks.0.weight", "codebooks.1.weight"]


def test_parts_of_a_model_that_names_its_head_have_no_others() -> None:
    class Attention(nn.Module):
        """Relative positions under a name that says nothing, beside a layer that gives more than there are."""

        def __init__(self) -> None:
            super().__init__()
            self.buckets, self.out = nn.Embedding(4, 2), nn.Linear(8, 8)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.attention, self.ahead = nn.Embedding(30, 8), Attention(), nn.Linear(8, 30)
            self.head = nn.Linear(8, 30)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    assert heads_of(Named()) == ["ahead.weight", "head.weight"]

    class Tied(nn.Module):
        """A model that names its table, though a part of it ends in a head."""

        def __init__(self) -> None:
            super().__init__()
            self.decoder = with_heads(("output", nn.Linear(8, 30)))

        def get_output_embeddings(self) -> nn.Module:
            return self.decoder.trunk.words

    assert heads_of(Tied()) == ["decoder.output.weight"]


def test_tables_of_every_kind() -> None:
    class PositionalEmbedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(16, 8))

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(20, 8)
            self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(8, 40, [10])
            self.own = PositionalEmbedding()
            self.scaled = type("Scaled", (nn.Embedding,), {})(20, 8)
            self.pos_embed = nn.Parameter(torch.empty(1, 17, 8))
            self.places = nn.Parameter(torch.empty(1, 4, 4, 8))
            self.rel_pos_h = nn.Parameter(torch.empty(7, 8))
            self.register_tokens = nn.ParameterList([torch.empty(4, 8)])
            self.embedding_mixer = nn.Linear(8, 8)
            self.mixing = nn.Parameter(torch.empty(8, 8))
            self.post_proj, self.stable = nn.Parameter(torch.empty(8, 8)), nn.Parameter(torch.empty(8, 8))
            self.W_E = parametrizations.weight_norm(nn.Embedding(20, 8))
            self.class_token = nn.Parameter(torch.empty(1, 1, 8))

    assert grouping(Tables) == {
        "matrices": ["embedding_mixer.weight", "mixing", "post_proj", "stable"],
        "embeddings": [
            "W_E.parametrizations.weight.original1",
            "adaptive.head.weight",
            "adaptive.tail.*.*.weight",
            "bag.weight",
            "own.weight",
            "places",
            "pos_embed",
            "register_tokens.*",
            "rel_pos_h",
            "scaled.weight",
        ],
        "vectors": ["W_E.parametrizations.weight.original0", "class_token"],
    }


def test_convolutions_of_every_kind() -> None:
    class Adapted(nn.Conv2d):
        """A convolution with an adapter of low rank."""

        def __init__(self) -> None:
            super().__init__(8, 8, 3)
            self.lora_a, self.lora_b = nn.Parameter(torch.empty(2, 72)), nn.Parameter(torch.empty(8, 2))

    class StyleConv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(1, 8, 8, 3, 3))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
            self.classes = nn.Embedding(10, 16)
            self.down = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.LazyConv2d(8, 3), Adapted()])
            self.volume, self.depthwise = nn.Conv3d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=8)
            self.gamma = nn.Parameter(torch.empty(8, 1, 1))
            self.shift = nn.ModuleList([nn.Linear(16, 8), nn.Linear(16, 24)])
            self.up = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2), nn.ConvTranspose1d(8, 4, 2)])
            self.normed = nn.utils.weight_norm(nn.Conv1d(8, 8, 3))
            self.style = StyleConv()
            self.out = nn.Conv2d(8, 3, 1)
            self.down[1](torch.empty(1, 8, 4, 4))

    assert grouping(UNet) == {
        "matrices": ["down.*.lora_a", "down.*.lora_b", "shift.*.weight", "time.*.weight"],
        "convolutions": [
            "depthwise.weight",
            "down.*.weight",
            "normed.weight_v",
            "out.weight",
            "style.weight",
            "up.*.weight",
            "volume.weight",
        ],
        "embeddings": ["classes.weight"],
        "vectors": ["gamma", "normed.weight_g"],
    }


def test_stacks_are_what_is_no_convolution() -> None:
    class GroupedExperts(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.w1, self.w2 = nn.Parameter(torch.empty(count, 16, 8)), nn.Parameter(torch.empty(count, 8, 16))
            self.bias = nn.Parameter(torch.empty(count, 16))

    model = nn.ModuleList([GroupedExperts(4), GroupedExperts(1), nn.Bilinear(4, 5, 6)])
    assert grouping(lambda: model) == {
        "stacks": ["*.w1", "*.w2", "*.weight"],
        "elementwise": ["*.bias"],
        "vectors": ["*.bias"],  # of a single expert
    }


def test_adapters_are_matrices_whatever_their_rank() -> None:
    class Adapted(nn.Module):
        def __init__(self, layer: nn.Linear, rank: int) -> None:
            super().__init__()
            self.layer = layer.requires_grad_(False)
            self.a = nn.Linear(layer.in_features, rank, bias=False)
            self.b = nn.Linear(rank, layer.out_features, bias=False)
            self.magnitude = nn.Parameter(torch.empty(layer.out_features, 1))

    model = Trunk().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up, 4), Adapted(block.down, 1)
    assert grouping(lambda: model) == {
        "matrices": ["blocks.*.up.a.weight", "blocks.*.up.b.weight"],
        "vectors": [
            "blocks.*.down.a.weight",
            "blocks.*.down.b.weight",
            "blocks.*.down.magnitude",
            "blocks.*.up.magnitude",
        ],
    }


@pytest.mark.parametrize("shape", [(), (8,), (1, 8), (8, 1), (8, 1, 1), (1, 8, 1, 1), (1, 1, 8), (1, 1), (0,), (0, 5)])
def test_vectors_have_at_most_one_dimension_above_one(shape: tuple[int, ...]) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(shape))
    assert [group["name"] for group in param_groups(model)] == ["vectors"]


def test_what_is_used_elementwise_is_no_matrix() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A_log, self.D = nn.Parameter(torch.empty(8, 4)), nn.Parameter(torch.empty(2, 8))
            self.bias_u, self.attention_biases = nn.Parameter(torch.empty(2, 4)), nn.Parameter(torch.empty(4, 9))
            self.norm, self.normed = nn.LayerNorm((4, 6, 6)), parametrizations.weight_norm(nn.Linear(8, 8))

    assert grouping(Mixer) == {
        "matrices": ["normed.parametrizations.weight.original1"],
        "elementwise": ["A_log", "D", "attention_biases", "bias_u", "norm.bias", "norm.weight"],
        "vectors": ["normed.parametrizations.weight.original0"],
    }


def test_recurrent_layers_and_attention_are_matrices() -> None:
    groups = grouping(lambda: nn.ModuleList([nn.LSTM(8, 8), nn.MultiheadAttention(8, 2, add_bias_kv=True)]))
    assert groups["matrices"] == ["*.in_proj_weight", "*.out_proj.weight", "*.weight_hh_l0", "*.weight_ih_l0"]
    assert groups["vectors"] == ["*.bias_k", "*.bias_v"]
