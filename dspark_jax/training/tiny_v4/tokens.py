"""The corpus as tokens: one file that a training run needs and nothing else."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dspark_jax.errors import CorpusError
from dspark_jax.training.tiny_v4.corpus import SPLITS, Corpus, Split, beginnings
from dspark_jax.training.tiny_v4.tokenizer import BEGIN, END, SPECIAL, train_tokenizer

FACTS = "facts"  # name of what is no array, in the file


@dataclass(frozen=True)
class TokenisedCorpus:
    """The three sides as streams of tokens, each file between a begin and an end token.

    Attributes:
        streams: uint16 [N] for each side.
        tokenizer: contents of `tokenizer.json`.
        beginnings: functions and classes of the test side, for held-out prompts.
        provenance: where the text came from.
    """

    streams: Mapping[Split, np.ndarray]
    tokenizer: str
    beginnings: tuple[str, ...]
    provenance: Mapping[str, str | int]

    def text_bytes(self, stream: np.ndarray) -> int:
        """UTF-8 bytes of the text of some tokens; special tokens have none."""
        tokenizer = Tokenizer.from_str(self.tokenizer)
        # Byte-level BPE writes a token with one character for each of its bytes.
        sizes = np.zeros(tokenizer.get_vocab_size(), np.int64)
        for token, number in tokenizer.get_vocab().items():
            sizes[number] = 0 if token in SPECIAL else len(token)
        return int(sizes[stream].sum())


def tokenise(corpus: Corpus, vocab_size: int) -> TokenisedCorpus:
    """Trains the tokenizer on the train side and encodes all three."""
    tokenizer = train_tokenizer(corpus.texts("train"), vocab_size)
    return TokenisedCorpus(
        streams={split: _stream(tokenizer, corpus.texts(split)) for split in SPLITS},
        tokenizer=tokenizer.to_str(pretty=True),
        beginnings=tuple(beginnings(corpus.texts("test"))),
        provenance=corpus.provenance,
    )


def write(corpus: TokenisedCorpus, path: Path) -> None:
    """Writes the corpus as one compressed file, beside its name first."""
    facts = {
        "tokenizer": corpus.tokenizer,
        "beginnings": corpus.beginnings,
        "provenance": dict(corpus.provenance),
    }
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        arrays: dict[str, np.ndarray] = {FACTS: np.frombuffer(json.dumps(facts).encode(), np.uint8)}
        np.savez_compressed(file, allow_pickle=False, **arrays, **{split: corpus.streams[split] for split in SPLITS})
    os.replace(partial, path)


def read(path: Path) -> TokenisedCorpus:
    """Reads what `write` wrote.

    Raises:
        CorpusError: the file cannot be read, or is none of ours.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            facts = json.loads(arrays[FACTS].tobytes())
            streams = {split: arrays[split] for split in SPLITS}
        return TokenisedCorpus(streams, facts["tokenizer"], tuple(facts["beginnings"]), facts["provenance"])
    except (OSError, ValueError, KeyError) as error:
        raise CorpusError(
            f"{path}: is no corpus of tiny-v4 ({error}); expected a file written by the command 'corpus'."
        ) from error


def _stream(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return np.concatenate([np.array([BEGIN, *one.ids, END], np.uint16) for one in encoded])
