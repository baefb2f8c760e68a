"""Text becomes tokens, and tokens batches, the same every time."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from dash_shampoo.train.data import Batches, encode, load_corpus, read_text, standard_library
from dash_shampoo.train.errors import InputError

TEXT = "To be, or not to be: that is the question. " * 50


def test_the_last_tenth_is_for_validation(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    corpus = load_corpus(str(file), "bytes", 8)
    whole = np.concatenate([corpus.train, corpus.validation])
    assert bytes(whole.astype(np.uint8)).decode() == TEXT
    assert len(corpus.train) == int(0.9 * len(TEXT))


def test_characters_make_the_smallest_vocabulary() -> None:
    tokens, vocabulary = encode("banäna", "chars")
    assert vocabulary == 4
    assert tokens.tolist() == [1, 0, 2, 3, 2, 0]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("b" * 100)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_text("a" * 100)
    corpus = load_corpus(str(tmp_path), "chars", 8)
    assert corpus.train[0] == 1
    assert corpus.validation[-1] == 2


def test_a_token_file_is_mapped(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    (np.arange(1000) % 300).astype(np.uint16).tofile(file)
    corpus = load_corpus(str(file), "bytes", 8)
    assert corpus.vocabulary == 300
    assert isinstance(corpus.train, np.memmap)


def test_a_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel({"to": 0, "be": 1, "?": 2}, unk_token="?"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.save(str(tmp_path / "own.json"))
    tokens, vocabulary = encode("to be or not to be", str(tmp_path / "own.json"))
    assert (tokens.tolist(), vocabulary) == ([0, 1, 2, 2, 0, 1], 3)


def test_the_standard_library_is_a_long_text_and_always_the_same() -> None:
    text = standard_library()
    assert len(text) > 1_000_000
    assert "def " in text
    assert text == standard_library()


def test_batches_come_from_their_own_generator() -> None:
    tokens = np.arange(500, dtype=np.uint16)
    state = torch.get_rng_state()
    one, other = Batches(tokens, 4, 8, seed=3), Batches(tokens, 4, 8, seed=3)
    device = torch.device("cpu")
    for _ in range(3):
        x, y = one.draw(device)
        assert x.shape == y.shape == (4, 8)
        assert torch.equal(x + 1, y)
        assert torch.equal(x, other.draw(device)[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_every_place_of_the_text_can_be_drawn() -> None:
    batches = Batches(np.arange(10, dtype=np.uint16), 64, 7, seed=0)
    starts = {int(i) for _ in range(10) for i in batches.draw(torch.device("cpu"))[0][:, 0]}
    assert starts == {0, 1, 2}


def test_a_folder_named_like_a_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.bin").mkdir()
    with pytest.raises(InputError, match="Is a directory"):
        load_corpus(str(tmp_path / "folder.bin"), "bytes", 8)


def test_a_changed_text_has_another_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    prints = []
    for text in (TEXT, TEXT, "t" + TEXT[1:], TEXT[:-1] + "!", TEXT + TEXT):
        file.write_text(text)
        prints.append(load_corpus(str(file), "bytes", 8).fingerprint())
    assert prints[0] == prints[1]
    assert all(prints.count(each) == 1 for each in prints[2:])


@pytest.mark.parametrize(
    ("name", "content", "tokenizer", "message"),
    [
        ("missing.txt", None, "bytes", "no such file or folder"),
        ("short.txt", b"too short", "bytes", "text is too short: 9 tokens"),
        ("empty.bin", b"", "bytes", "text is too short: 0 tokens"),
        ("odd.bin", b"odd", "bytes", "its size, 3 bytes, is odd"),
        ("missing.bin", None, "bytes", "no such file or folder"),
        ("picture.png", b"\x89PNG\xff\xfe", "bytes", "not UTF-8"),
        ("text.txt", b"text", "missing.json", "no such tokenizer"),
    ],
)
def test_bad_data_is_refused(tmp_path: Path, name: str, content: bytes | None, tokenizer: str, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_corpus(str(tmp_path / name), tokenizer, 8)


def test_a_data_set_of_files_is_read_by_its_configuration(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    header = "---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files: {name}/*.json\n" for name in ("en", "de")
    )
    (tmp_path / "README.md").write_text(f"{header}---\n")
    for name, text in (("en", "to be"), ("de", "sein")):
        (tmp_path / name).mkdir()
        rows = [json.dumps({"text": text, "url": "none"})] * 2
        (tmp_path / name / "train.json").write_text("\n".join(rows))
    assert read_text(f"hub:{tmp_path}:en") == "to be\nto be"
    assert read_text(f"hub:{tmp_path}:de") == "sein\nsein"


def test_a_hub_data_set_is_read_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = types.ModuleType("datasets")

    def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> list[dict[str, str]]:
        if name == "nobody/nothing":
            raise FileNotFoundError("no such data set\non the hub")
        assert (split, streaming) == ("train", True)
        return [{"text": "to be"}, {"text": config or "or not"}]

    hub.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert read_text("hub:william/plays") == "to be\nor not"
    assert read_text("hub:william/plays:en") == "to be\nen"
    assert read_text("hub:C:/plays") == "to be\nor not"
    with pytest.raises(InputError, match=r"'nobody/nothing': no such data set$"):
        read_text("hub:nobody/nothing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'dash-shampoo\[hub\]'"):
        read_text("hub:william/plays")
