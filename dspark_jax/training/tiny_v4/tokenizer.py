"""tiny-v4's tokenizer: byte-level BPE, so that every text has ids and comes back from them unchanged."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BEGIN, END, NOISE = 0, 1, 2
SPECIAL = ("<|begin|>", "<|end|>", "<|noise|>")  # by id; in front of a file, behind it, and the drafter's open slots


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns merges from texts.

    Args:
        vocab_size: ids in all: the special tokens, the 256 bytes, and merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
