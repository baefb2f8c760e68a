"""The groups of Transformers' models are those that one would make by hand."""

from __future__ import annotations

import pytest
import transformers

from tests.grouping import grouping


def within(prefix: str, *called: str) -> list[str]:
    return [f"{prefix}{name}.weight" for name in called]


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SEQUENCES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,  # as wide as the vocabulary is long
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
    **TEXT,
}
LLAMA = within("model.layers.*.self_attn.", "k_proj", "o_proj", "q_proj", "v_proj")
ATTENTION = ("k_proj", "out_proj", "q_proj", "v_proj")
BERT = [
    *within("bert.encoder.layer.*.attention.", "output.dense", "self.key", "self.query", "self.value"),
    *within("bert.encoder.layer.*.", "intermediate.dense", "output.dense"),
]
BERT_TABLES = within("bert.embeddings.", "position_embeddings", "token_type_embeddings", "word_embeddings")
SEQUENCE_LAYERS = [
    *within("model.decoder.layers.*.encoder_attn.", *ATTENTION),
    *within("model.decoder.layers.*.", "fc1", "fc2"),
    *within("model.decoder.layers.*.self_attn.", *ATTENTION),
    *within("model.encoder.layers.*.", "fc1", "fc2"),
    *within("model.encoder.layers.*.self_attn.", *ATTENTION),
]


def test_gpt2() -> None:
    # Its linear layers are Transformers' Conv1D: transposed, and no convolutions. The head is the table.
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, **TEXT)
    assert grouping(lambda: transformers.GPT2LMHeadModel(config)) == {
        "matrices": within("transformer.h.*.", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        "embeddings": within("transformer.", "wpe", "wte"),
    }


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tied: bool) -> None:
    config = transformers.LlamaConfig(**SIZES, **TEXT, tie_word_embeddings=tied)
    assert grouping(lambda: transformers.LlamaForCausalLM(config)) == {
        "matrices": [*within("model.layers.*.mlp.", "down_proj", "gate_proj", "up_proj"), *LLAMA],
        "embeddings": ["lm_head.weight"] * (not tied) + ["model.embed_tokens.weight"],
    }


def test_mixtral() -> None:
    # Experts are stacks of matrices; the router, with a row for each, is a matrix.
    config = transformers.MixtralConfig(**SIZES, **TEXT, num_key_value_heads=1, num_local_experts=4)
    assert grouping(lambda: transformers.MixtralForCausalLM(config)) == {
        "matrices": [*within("model.layers.*.mlp.", "gate"), *LLAMA],
        "stacks": ["model.layers.*.mlp.experts.down_proj", "model.layers.*.mlp.experts.gate_up_proj"],
        "embeddings": ["lm_head.weight", "model.embed_tokens.weight"],
    }


def test_gpt_oss() -> None:
    # Experts have biases here.
    config = transformers.GptOssConfig(**SIZES, **TEXT, num_key_value_heads=1, num_local_experts=4, head_dim=16)
    experts = "model.layers.*.mlp.experts."
    assert grouping(lambda: transformers.GptOssForCausalLM(config)) == {
        "matrices": [*within("model.layers.*.mlp.", "router"), *LLAMA],
        "stacks": [f"{experts}down_proj", f"{experts}gate_up_proj"],
        "embeddings": ["lm_head.weight", "model.embed_tokens.weight"],
        "elementwise": [f"{experts}down_proj_bias", f"{experts}gate_up_proj_bias"],
    }


def test_vit() -> None:
    config = transformers.ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=48)
    layer = "vit.layers.*."
    assert grouping(lambda: transformers.ViTForImageClassification(config)) == {
        "matrices": [
            "classifier.weight",
            *within(f"{layer}attention.", "k_proj", "o_proj", "q_proj", "v_proj"),
            *within(f"{layer}mlp.", "fc1", "fc2"),
        ],
        "convolutions": ["vit.embeddings.patch_embeddings.projection.weight"],
        "embeddings": ["vit.embeddings.position_embeddings"],  # (1, 17, 32)
        "vectors": ["vit.embeddings.cls_token"],  # (1, 1, 32)
    }


def test_swin() -> None:
    config = transformers.SwinConfig(embed_dim=8, depths=[1, 1], num_heads=[2, 4], window_size=2, image_size=16)
    block = "encoder.layers.*.blocks.*."
    assert grouping(lambda: transformers.SwinModel(config, add_pooling_layer=False)) == {
        "matrices": [
            *within(f"{block}attention.", "k_proj", "o_proj", "q_proj", "v_proj"),
            *within(f"{block}mlp.", "fc1", "fc2"),
            "encoder.layers.*.downsample.reduction.weight",
        ],
        "convolutions": ["embeddings.patch_embeddings.projection.weight"],
        "embeddings": [f"{block}attention.relative_position_bias.relative_position_bias_table"],
    }


def test_convnext() -> None:
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_labels=10)
    layer = "convnext.encoder.stages.*."
    assert grouping(lambda: transformers.ConvNextForImageClassification(config)) == {
        "matrices": ["classifier.weight", *within(f"{layer}layers.*.", "pwconv1", "pwconv2")],
        "convolutions": [
            "convnext.embeddings.patch_embeddings.weight",
            *within(layer, "downsampling_layer.*", "layers.*.dwconv"),
        ],
    }


def test_whisper() -> None:
    config = transformers.WhisperConfig(**SEQUENCES, num_mel_bins=8, max_source_positions=64, max_target_positions=32)
    assert grouping(lambda: transformers.WhisperForConditionalGeneration(config)) == {
        "matrices": SEQUENCE_LAYERS,
        "convolutions": within("model.encoder.", "conv1", "conv2"),
        "embeddings": within("model.decoder.", "embed_positions", "embed_tokens"),  # the encoder's are frozen
    }


def test_bart() -> None:
    config = transformers.BartConfig(**SEQUENCES, max_position_embeddings=62)
    assert grouping(lambda: transformers.BartForConditionalGeneration(config)) == {
        "matrices": SEQUENCE_LAYERS,
        "embeddings": within("model.", "decoder.embed_positions", "encoder.embed_positions", "shared"),
    }


def test_t5() -> None:
    # Relative positions are tables inside attention, which makes heads of none of its layers.
    config = transformers.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, **TEXT)
    layer, attention = "er.block.*.layer.*.", ("k", "o", "q", "v")
    assert grouping(lambda: transformers.T5ForConditionalGeneration(config)) == {
        "matrices": [
            *within(f"decod{layer}DenseReluDense.", "wi", "wo"),
            *within(f"decod{layer}EncDecAttention.", *attention),
            *within(f"decod{layer}SelfAttention.", *attention),
            *within(f"encod{layer}DenseReluDense.", "wi", "wo"),
            *within(f"encod{layer}SelfAttention.", *attention),
        ],
        "embeddings": [
            f"decod{layer}SelfAttention.relative_attention_bias.weight",
            f"encod{layer}SelfAttention.relative_attention_bias.weight",
            "shared.weight",
        ],
    }


def test_bert() -> None:
    # What it ends with for masked words is its table; what it ends with for classes is a matrix, of however many.
    config = transformers.BertConfig(**SIZES, **TEXT, max_position_embeddings=32, num_labels=64)
    assert grouping(lambda: transformers.BertForMaskedLM(config)) == {
        "matrices": [*BERT, "cls.predictions.transform.dense.weight"],
        "embeddings": BERT_TABLES,
    }
    assert grouping(lambda: transformers.BertForSequenceClassification(config)) == {
        "matrices": [*BERT, *within("", "bert.pooler.dense", "classifier")],
        "embeddings": BERT_TABLES,
    }


def test_clip() -> None:
    # Its last layers lead into a common space, whose width is no vocabulary.
    text = {**SIZES, **TEXT, "max_position_embeddings": 16}
    images = {**SIZES, "image_size": 16, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=images, projection_dim=64)
    layers = [
        name
        for part in ("text_model", "vision_model")
        for name in (
            *within(f"{part}.encoder.layers.*.mlp.", "fc1", "fc2"),
            *within(f"{part}.encoder.layers.*.self_attn.", *ATTENTION),
        )
    ]
    assert grouping(lambda: transformers.CLIPModel(config)) == {
        "matrices": sorted([*layers, "text_projection.weight", "visual_projection.weight"]),
        "convolutions": ["vision_model.embeddings.patch_embedding.weight"],
        "embeddings": [
            *within("text_model.embeddings.", "position_embedding", "token_embedding"),
            "vision_model.embeddings.position_embedding.weight",
        ],
        "vectors": ["logit_scale"],
    }


def test_wav2vec2() -> None:
    # A weight-normed convolution whose name speaks of positions and embeddings.
    config = transformers.Wav2Vec2Config(
        **SIZES, **TEXT, conv_dim=[8, 8], conv_kernel=[3, 3], conv_stride=[2, 2], num_conv_pos_embedding_groups=2
    )
    groups = grouping(lambda: transformers.Wav2Vec2ForCTC(config))
    position = "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight"
    assert groups["convolutions"] == [
        f"{position}.original1",
        "wav2vec2.feature_extractor.conv_layers.*.conv.weight",
    ]
    assert groups["vectors"] == [f"{position}.original0"]
    assert "embeddings" not in groups
