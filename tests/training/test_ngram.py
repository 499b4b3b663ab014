"""The n-gram baseline against a brute-force Kneser-Ney, and as a probability distribution."""

from collections import Counter

import numpy as np
import pytest

from dspark_jax.errors import CorpusError
from dspark_jax.training.tiny_v4 import ngram

V = 40
LENGTHS = (1, 2, 3)


def text(seed: int, length: int) -> np.ndarray:
    """Tokens of which few are frequent, and that often follow the one before in a cycle."""
    rng = np.random.default_rng(seed)
    tokens = [0]
    while len(tokens) < length:
        tokens.append((tokens[-1] + 1) % V if rng.random() < 0.3 else min(int(rng.zipf(1.3)), V) - 1)
    return np.array(tokens, np.uint16)


class BruteForce:
    """Chen and Goodman's formulas on dictionaries of tuples."""

    def __init__(self, stream: list[int], length: int) -> None:
        self.counts = {length: Counter(tuple(stream[i : i + length]) for i in range(len(stream) - length + 1))}
        for shorter in range(length - 1, 0, -1):
            self.counts[shorter] = Counter(gram[1:] for gram in self.counts[shorter + 1])
        self.discounts = {order: self.discount(counts) for order, counts in self.counts.items()}

    @staticmethod
    def discount(counts: Counter[tuple[int, ...]]) -> dict[int, float]:
        n = Counter(counts.values())
        y = n[1] / (n[1] + 2 * n[2])
        found = {1: 1 - 2 * y * n[2] / n[1], 2: 2 - 3 * y * n[3] / n[2], 3: 3 - 4 * y * n[4] / n[3]}
        return {count: max(taken, 0.0) for count, taken in found.items()}

    def probability(self, context: tuple[int, ...], token: int) -> float:
        lower = self.probability(context[1:], token) if context else 1 / V
        order = len(context) + 1
        followers = {gram[-1]: count for gram, count in self.counts[order].items() if gram[:-1] == context}
        if not followers:
            return lower
        taken = {t: self.discounts[order][min(count, 3)] for t, count in followers.items()}
        own = followers[token] - taken[token] if token in followers else 0.0
        return (own + sum(taken.values()) * lower) / sum(followers.values())


@pytest.mark.parametrize("length", LENGTHS)
def test_probabilities_are_those_of_the_formulas(length: int) -> None:
    train, test = text(1, 400), text(2, 80)
    found = ngram.train(train, length, V).probabilities(test)
    oracle = BruteForce(train.tolist(), length)
    contexts = [tuple(test[max(i - length + 1, 0) : i].tolist()) for i in range(1, len(test))]
    expected = [oracle.probability(context, int(token)) for context, token in zip(contexts, test[1:], strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
def test_they_sum_to_one_after_every_context_seen_or_not(length: int) -> None:
    model = ngram.train(text(3, 400), length, V)
    for context in ([0, 1, 2], [5, 39, 17], [38, 38, 38]):
        whole = [model.probabilities(np.array([*context, token]))[-1] for token in range(V)]
        assert min(whole) > 0
        assert sum(whole) == pytest.approx(1, abs=1e-12)


def test_longer_contexts_help_where_there_is_something_to_know_and_bits_add_up() -> None:
    train, test = np.tile(text(4, 50), 20), np.tile(text(4, 50), 2)
    train = np.concatenate([train, text(5, 400)])
    spent = [ngram.bits(ngram.train(train, length, V), test) for length in LENGTHS]
    assert spent[0] > 1.5 * spent[1] > 1.5 * spent[2]
    assert spent[2] == pytest.approx(-np.log2(ngram.train(train, 3, V).probabilities(test)).sum())


def test_the_first_tokens_have_shorter_contexts() -> None:
    train = text(6, 400)
    short, long = (ngram.train(train, length, V).probabilities(train[:2]) for length in (2, 3))
    assert short.shape == long.shape == (1,)
    # The bigrams of a trigram model count what they follow, and not how often they occur.
    assert long[0] != short[0]


def test_text_that_decides_no_discount_is_refused() -> None:
    with pytest.raises(CorpusError, match="once, twice and three times"):
        ngram.train(np.arange(10) % 5, 2, V)
    with pytest.raises(CorpusError, match="63 bits"):
        ngram.train(text(1, 400), 12, V)
