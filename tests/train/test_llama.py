"""The model is a Llama: sizes, causality, attention."""

from __future__ import annotations

import pytest
import torch

from dash_shampoo.train.errors import InputError
from dash_shampoo.train.llama import SIZES, Llama, LlamaConfig, config_for, rotate, rotation

SMALL = LlamaConfig(layers=2, width=32, heads=4, hidden=48, context=16, vocabulary=20)


def parameters(config: LlamaConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Llama(config).parameters())


@pytest.mark.parametrize(
    ("size", "millions"), [("llama-18m", 17.8), ("llama-953m", 953), ("llama-1b", 1236), ("llama-7b", 6738)]
)
def test_named_sizes_have_their_number_of_parameters(size: str, millions: float) -> None:
    assert parameters(SIZES[size]) / 1e6 == pytest.approx(millions, rel=2e-3)


def test_a_later_token_does_not_change_earlier_logits() -> None:
    model = Llama(SMALL).eval()
    tokens = torch.randint(20, (2, 16))
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 20
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_grouped_queries_equal_full_attention_with_repeated_keys_and_values() -> None:
    grouped = Llama(config_for("tiny", layers=1, width=32, heads=4, kv_heads=2, vocabulary=20)).eval()
    full = Llama(config_for("tiny", layers=1, width=32, heads=4, vocabulary=20)).eval()
    state = grouped.state_dict()
    for name in ("key", "value"):
        key = f"blocks.0.attention.{name}.weight"
        state[key] = state[key].view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32)
    full.load_state_dict(state)
    tokens = torch.randint(20, (2, 12))
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_a_tied_head_is_the_embedding() -> None:
    assert parameters(SMALL) - parameters(LlamaConfig(**{**SMALL.__dict__, "tied": True})) == 20 * 32
    model = Llama(LlamaConfig(**{**SMALL.__dict__, "tied": True}))
    assert model.head.weight is model.embedding.weight


def test_rotation_depends_on_the_distance_alone() -> None:
    angles = rotation(10, 8)
    q, k = torch.randn(8), torch.randn(8)
    scores = rotate(q.expand(10, 8), angles) @ rotate(k.expand(10, 8), angles).T
    for distance in range(9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_an_untrained_model_is_as_good_as_guessing() -> None:
    model = Llama(SMALL)
    tokens = torch.randint(20, (8, 16))
    assert model.loss(tokens, tokens).item() == pytest.approx(torch.tensor(20.0).log().item(), abs=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "width 128 does not divide into 3 heads"),
        ({"heads": 128}, "even size"),
        ({"kv_heads": 3}, "4 heads do not divide"),
        ({"layers": 0}, "layers must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config_for("tiny", **changes)
    with pytest.raises(InputError, match="did you mean 'llama-7b'"):
        config_for("lama-7b")
