"""The baseline: an interpolated n-gram model with modified Kneser-Ney smoothing.

Source: Chen and Goodman 1998, "An Empirical Study of Smoothing Techniques for Language Modeling" (TR-10-98), section
4.1.6. The highest order counts occurrences; the lower ones count the distinct tokens that an n-gram follows, and below
the unigrams lies the uniform distribution, so that every token has a probability after every context.

An n-gram is one integer, its tokens the digits in base V, so that counting is sorting and looking up is bisecting.
"""

from dataclasses import dataclass

import numpy as np

from dspark_jax.errors import CorpusError


@dataclass(frozen=True)
class Order:
    """What a model knows about the n-grams of one length. Context i is shared by the n-grams whose key // V it is.

    Attributes:
        keys: int64, ascending, the n-grams that were seen.
        discounted: float64, their counts less the discount.
        contexts: int64, ascending, the contexts that were seen.
        totals: float64, the counts of all n-grams of a context, undiscounted.
        freed: float64, what discounting took from a context, which goes to the shorter n-grams.
    """

    keys: np.ndarray
    discounted: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    freed: np.ndarray


@dataclass(frozen=True)
class NGramModel:
    """Probabilities of a token after the tokens before it.

    Attributes:
        orders: unigrams first.
        vocab_size: V.
    """

    orders: tuple[Order, ...]
    vocab_size: int

    def probabilities(self, stream: np.ndarray) -> np.ndarray:
        """Of every token of a stream but the first, given those before it: [N] -> float64 [N-1].

        The first ones have shorter contexts.
        """
        result = np.full(len(stream) - 1, 1 / self.vocab_size)
        for length, order in enumerate(self.orders, start=1):
            keys = ngrams(stream, length, self.vocab_size)
            known = slice(max(length - 2, 0), None)  # tokens that have such a context
            keys = keys[1:] if length == 1 else keys
            result[known] = _interpolated(order, keys, self.vocab_size, result[known])
        return result


def train(stream: np.ndarray, length: int, vocab_size: int) -> NGramModel:
    """Counts the n-grams of a stream up to a length.

    Args:
        stream: integers [N] below `vocab_size`.

    Raises:
        CorpusError: such n-grams do not fit 63 bits, or some discount is undefined because the text is too short.
    """
    if vocab_size**length >= 2**63:
        raise CorpusError(f"{length}-grams of {vocab_size} tokens do not fit 63 bits; expected shorter ones.")
    keys, counts = np.unique(ngrams(stream, length, vocab_size), return_counts=True)
    orders = [_order(keys, counts, vocab_size)]
    for shorter in range(length - 1, 0, -1):
        # Dropping the first token of each distinct n-gram leaves a shorter one once for every token it follows.
        keys, counts = np.unique(keys % vocab_size**shorter, return_counts=True)
        orders.insert(0, _order(keys, counts, vocab_size))
    return NGramModel(tuple(orders), vocab_size)


def ngrams(stream: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """The n-grams of a stream as integers, the earliest token the highest digit: [N] -> int64 [N - length + 1]."""
    count = len(stream) - length + 1
    keys = np.zeros(max(count, 0), np.int64)
    for offset in range(length):
        keys = keys * vocab_size + stream[offset : offset + count]
    return keys


def discounts(counts: np.ndarray) -> np.ndarray:
    """What is taken from n-grams counted 0, 1, 2, and 3 or more times: integers -> float64 [4].

    Raises:
        CorpusError: no n-gram was counted once, twice or three times.
    """
    once, twice, thrice, often = (int((counts == count).sum()) for count in (1, 2, 3, 4))
    if not (once and twice and thrice):
        raise CorpusError(
            f"the text has {once}, {twice} and {thrice} n-grams that occur once, twice and three times; expected some "
            "of each, to estimate discounts from: use more text or shorter n-grams."
        )
    share = once / (once + 2 * twice)
    taken = np.array([0, 1 - 2 * share * twice / once, 2 - 3 * share * thrice / twice, 3 - 4 * share * often / thrice])
    return np.clip(taken, 0, None)


def _order(keys: np.ndarray, counts: np.ndarray, vocab_size: int) -> Order:
    taken = discounts(counts)[np.minimum(counts, 3)]
    contexts, first = np.unique(keys // vocab_size, return_index=True)
    totals, freed = np.add.reduceat(counts, first).astype(np.float64), np.add.reduceat(taken, first)
    return Order(keys, counts - taken, contexts, totals, freed)


def _interpolated(order: Order, keys: np.ndarray, vocab_size: int, shorter: np.ndarray) -> np.ndarray:
    """Probabilities of n-grams, given those of one token less; after a context never seen these are all there is."""
    context, seen = _find(order.contexts, keys // vocab_size)
    place, counted = _find(order.keys, keys)
    own = np.where(counted, order.discounted[place], 0) + order.freed[context] * shorter
    return np.where(seen, own / order.totals[context], shorter)


def _find(sorted_keys: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places of keys in an ascending array, and whether they are there; a place is arbitrary where they are not."""
    place = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return place, sorted_keys[place] == keys


def bits(model: NGramModel, stream: np.ndarray) -> float:
    """Bits that a stream takes, without its first token."""
    return float(-np.log2(model.probabilities(stream)).sum())
