"""The tokenizer of a checkpoint folder."""

from pathlib import Path

from tokenizers import Tokenizer

from dspark_jax.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"


def read_tokenizer(checkpoint: Path) -> Tokenizer | None:
    """The folder's tokenizer, None if it has none.

    Raises:
        CheckpointError: `tokenizer.json` is there but is not a tokenizer.
    """
    path = checkpoint / TOKENIZER_FILE
    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: is not a tokenizer ({error}); fetch the file again.") from error


def encode_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a text as it is: official prompts spell out their special tokens, so none is added."""
    return tokenizer.encode(text, add_special_tokens=False).ids
