"""What a measurement of generation generates."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any

import numpy as np

from dspark_jax.decoding.request import Request, check_requests
from dspark_jax.errors import RequestError, check_count
from dspark_jax.model.model import Model


@dataclass(frozen=True)
class Workload:
    """Prompts, a batch of them after the other. No id stops a sequence, so that each spends its budget.

    Attributes:
        batch_size: sequences that run side by side.
        prompt_tokens: ids of each random prompt.
        max_new_tokens: of each sequence.
        draft_tokens: offered in a round of the speculative run; None for the trained block.
        temperature: 0 decodes greedily.
        repeats: timed repetitions of each run.
        seed: of the random prompts, and of sampling.
        prompts: token ids of as many prompts as fill whole batches; None for one batch of random ids. What a trained
            drafter is worth shows only on prompts of the kind that it was trained for.
    """

    batch_size: int = 1
    prompt_tokens: int = 128
    max_new_tokens: int = 128
    draft_tokens: int | None = None
    temperature: float = 0.0
    repeats: int = 5
    seed: int = 0
    prompts: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        """Checks what has nothing to do with the model, so that no weights are loaded in vain.

        Raises:
            RequestError: a number below 1 of what there must be some of, or a last batch that is not full.
        """
        for name in ("batch_size", "prompt_tokens", "max_new_tokens", "draft_tokens", "repeats"):
            value = getattr(self, name)
            if value is not None:
                check_count(value, name)
        if self.sequences % self.batch_size:
            raise RequestError(
                f"{self.sequences} prompts do not fill batches of {self.batch_size}, and empty places would be "
                "measured, too; choose a batch size that divides the number of prompts, or other prompts."
            )

    @property
    def sequences(self) -> int:
        """How many there are in all batches together."""
        return self.batch_size if self.prompts is None else len(self.prompts)

    @property
    def prompt_lengths(self) -> tuple[int, int]:
        """Ids of the shortest and of the longest prompt."""
        lengths = [self.prompt_tokens] if self.prompts is None else [len(prompt) for prompt in self.prompts]
        return min(lengths), max(lengths)

    def request(self, prompt: Sequence[int], draft_tokens: int | None, number: int = 0) -> Request:
        """How sequence `number` is completed, not checked."""
        return Request(
            prompt,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=self.seed + number,
            draft_tokens=draft_tokens,
            stop_ids=(),
        )

    def batches(self, model: Model, draft_tokens: int | None) -> list[Sequence[Request]]:
        """The checked requests, `batch_size` in each batch.

        Raises:
            RequestError: see `check_requests`.
        """
        prompts = self._random_prompts(model.config.vocab_size) if self.prompts is None else self.prompts
        requests = [self.request(prompt, draft_tokens, number) for number, prompt in enumerate(prompts)]
        return list(batched(check_requests(requests, model), self.batch_size))

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values; of the prompts where they come from, how many they are, and how long."""
        settings = dataclasses.asdict(dataclasses.replace(self, prompts=None))
        del settings["prompt_tokens"]
        shortest, longest = self.prompt_lengths
        return settings | {
            "prompts": "random" if self.prompts is None else "given",
            "sequences": self.sequences,
            "shortest_prompt": shortest,
            "longest_prompt": longest,
        }

    def _random_prompts(self, vocabulary: int) -> list[list[int]]:
        shape = (self.batch_size, self.prompt_tokens)
        return np.random.default_rng(self.seed).integers(vocabulary, size=shape).tolist()
