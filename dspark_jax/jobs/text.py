"""How a checkpoint turns text and dialogues into token ids, and ids back."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from dspark_jax import chat
from dspark_jax.checkpoint.tokenizer import TOKENIZER_FILE, encode_text, read_tokenizer
from dspark_jax.errors import RequestError


@dataclass(frozen=True)
class Text:
    """The tokenizer and chat format of one checkpoint.

    Attributes:
        checkpoint: its folder, for sentences.
        tokenizer: None where the folder has none; then prompts are ids.
        release: whose effort levels `thinking` names.
    """

    checkpoint: Path
    tokenizer: Tokenizer | None
    release: chat.Release

    @classmethod
    def of(cls, checkpoint: Path) -> "Text":
        """That of a folder."""
        return cls(checkpoint, read_tokenizer(checkpoint), chat.release_of(checkpoint))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, taken as it is."""
        return encode_text(text, self._tokenizer())

    def encode_messages(
        self, messages: Sequence[chat.Message], thinking: chat.Thinking, generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a dialogue that goes on with an answer, or, without a generation prompt, ends in one."""
        return chat.encode(
            messages,
            self._tokenizer(),
            thinking=thinking,
            generation_prompt=generation_prompt,
            release=self.release,
        )

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text of new tokens without the special ones that bound it, None without a tokenizer."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True) if self.tokenizer else None

    def answer(self, ids: Sequence[int], thinking: chat.Thinking) -> chat.Answer:
        """The answer to a dialogue."""
        return chat.parse(ids, self._tokenizer(), thinking=thinking)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{self.checkpoint}: has no {TOKENIZER_FILE}, which a text prompt needs; fetch it, or give token ids."
            )
        return self.tokenizer
