"""Text as tokens, and batches of it."""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dash_shampoo.train.errors import InputError

# What is read of the built-in text, and of a hub data set, at most.
MOST_CHARACTERS = 8_000_000


@dataclass
class Corpus:
    """A text, cut into its first 90 % for training and the rest for validation.

    Attributes:
        train: token ids, uint16 or int64.
        validation: token ids.
        vocabulary: number of different tokens.
    """

    train: np.ndarray[Any, Any]
    validation: np.ndarray[Any, Any]
    vocabulary: int

    def fingerprint(self) -> list[int]:
        """Numbers that a changed text changes: its length and sums of its ends, as the whole of a huge file is slow."""
        ends = (self.train[:1_000_000], self.validation[-1_000_000:])
        return [len(self.train) + len(self.validation), *(zlib.crc32(end.tobytes()) for end in ends)]


def load_corpus(data: str | None, tokenizer: str, context: int) -> Corpus:
    """Reads and tokenises a text.

    Args:
        data: a text file, a folder of them, a ``.bin`` file of uint16 tokens, "hub:NAME" or "hub:NAME:CONFIG" for a
            data set of the hub with a "text" column, or ``None`` for the source files of Python's standard library.
        tokenizer: "bytes", "chars", or a file of the `tokenizers` package.
        context: length of the sequences that will be drawn.

    Raises:
        InputError: there is no such file, it cannot be read, or it is too short.
    """
    if data is not None and data.endswith(".bin"):
        tokens = _token_file(_existing(data))
        vocabulary = int(tokens.max()) + 1 if len(tokens) else 0
    else:
        tokens, vocabulary = encode(read_text(data), tokenizer)
    cut = int(0.9 * len(tokens))
    shortest = min(cut, len(tokens) - cut)
    if shortest < context + 1:
        raise InputError(
            f"the text is too short: {len(tokens)} tokens, of which a tenth is for validation, "
            f"but a sequence needs {context + 1}; use a longer text or a smaller --context"
        )
    return Corpus(tokens[:cut], tokens[cut:], vocabulary)


def read_text(data: str | None) -> str:
    """The text that ``data`` names, as for `load_corpus`."""
    if data is None:
        return standard_library()
    if data.startswith("hub:"):
        return _hub_text(data.removeprefix("hub:"))
    path = _existing(data)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    try:
        return "\n".join(file.read_text(encoding="utf-8") for file in files)
    except UnicodeDecodeError as error:
        raise InputError(f"{data} is not UTF-8 text; token files are named .bin") from error
    except OSError as error:
        raise InputError(f"cannot read {data}: {error.strerror}") from error


def _token_file(path: Path) -> np.ndarray[Any, Any]:
    try:
        size = path.stat().st_size
        if path.is_file() and size % 2:
            raise InputError(f"{path} is no file of uint16 tokens: its size, {size} bytes, is odd")
        return np.memmap(path, dtype=np.uint16, mode="r") if size else np.zeros(0, np.uint16)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def standard_library() -> str:
    """Python's standard library as a text: there on every machine, and the same for the same version of Python."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
    texts: list[str] = []
    total = 0
    for file in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(file.relative_to(root).parts):
            text = file.read_text(encoding="utf-8", errors="ignore")
            texts.append(text)
            total += len(text)
            if total > MOST_CHARACTERS:
                break
    return "\n".join(texts)[:MOST_CHARACTERS]


def _hub_text(given: str) -> str:
    """The text of a data set, or of its configuration NAME:CONFIG, read row by row and no further than needed."""
    name, _, config = given.rpartition(":")
    if not name or "/" in config or "\\" in config:  # the colon, if any, is one of a path
        name, config = given, ""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise InputError("a hub data set needs the datasets package: pip install 'dash-shampoo[hub]'") from error
    try:
        rows = load_dataset(name, config or None, split="train", streaming=True)
        texts: list[str] = []
        total = 0
        for row in rows:
            texts.append(row["text"])
            total += len(row["text"])
            if total > MOST_CHARACTERS:
                break
    except Exception as error:  # whatever the hub's client raises, the user needs one line of it
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"cannot read the hub data set {given!r}: {reason}") from error
    return "\n".join(texts)


def encode(text: str, tokenizer: str) -> tuple[np.ndarray[Any, Any], int]:
    """Token ids of a text, and the number of different tokens."""
    if tokenizer == "bytes":
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16), 256
    if tokenizer == "chars":
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        alphabet, tokens = np.unique(codes, return_inverse=True)
        return tokens.astype(np.int64), len(alphabet)
    path = _existing(tokenizer, what="tokenizer")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError(
            "a tokenizer file needs the tokenizers package: pip install 'dash-shampoo[tokenizers]'"
        ) from error
    try:
        own = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exceptions
        raise InputError(f"{tokenizer} is not a file of the tokenizers package") from error
    return np.array(own.encode(text).ids, dtype=np.int64), own.get_vocab_size()


def _existing(name: str, what: str = "file or folder") -> Path:
    path = Path(name)
    if not path.exists():
        raise InputError(f"no such {what}: {name}")
    return path


class Batches:
    """Random sequences of a token array, from a generator of its own.

    Args:
        tokens: ids, one-dimensional.
        batch_size: sequences of a batch over all processes.
        context: length of a sequence.
        seed: of the generator.
        rank: of this process, which takes its share of each batch.
        size: number of processes, which divides the batch size.
    """

    def __init__(
        self,
        tokens: np.ndarray[Any, Any],
        batch_size: int,
        context: int,
        seed: int,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.tokens = tokens
        self.batch_size = batch_size
        self.context = context
        self.share = slice(rank * batch_size // size, (rank + 1) * batch_size // size)
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and, one place further on, the tokens to predict: two of (batch / processes, context)."""
        starts = torch.randint(len(self.tokens) - self.context, (self.batch_size,), generator=self.generator)
        rows = np.stack([self.tokens[i : i + self.context + 1] for i in starts[self.share].tolist()]).astype(np.int64)
        batch = torch.from_numpy(rows).to(device)
        return batch[:, :-1], batch[:, 1:]
