"""Random weights to start a pre-training from.

At the start the streams behave like one residual network with norms in front: every site reads a weighted mean of equal
streams, adds its output to each of them, and mixes them hardly at all. Sites differ in which stream they mostly read,
and that is what makes the streams part later (Zhu et al. 2024, "Hyper-Connections", arXiv:2409.19606, section 3.2).
"""

import math
import re

import jax
import numpy as np
from flax import nnx

from dspark_jax.config import ModelConfig
from dspark_jax.model.model import Model, abstract_model
from dspark_jax.model.numerics import Numerics
from dspark_jax.model.weights import Table
from dspark_jax.training.parameters import Parameters, release, weights_of

READS_OWN = 0.7  # share of the stream that a site mostly reads; the others have equal parts of the rest
KEEPS_OWN = 0.95  # share of a stream that mixing leaves where it is
DYNAMIC = 0.01  # factor of what a site makes of its streams' contents, at the start
EMBEDDING = 0.3  # standard deviation
HEAD = 0.25  # of the logits, whose inputs have a mean square of one


def initial_model(config: ModelConfig, numerics: Numerics, seed: int) -> Model:
    """A model with random weights in the checkpoint's dtypes and balanced hash tables, the drafter included."""
    generator = np.random.default_rng(seed)
    abstract = abstract_model(config, numerics)
    values = {
        name: _draw(name, variable.get_value().shape, config, generator).astype(np.float32)
        for name, variable in weights_of(abstract)
    }
    tables = [hash_table(config, generator) for _ in range(config.num_hash_layers)]

    @jax.jit  # one program; alone, each small operation of the packing would be compiled for each shape
    def packed(values: Parameters, tables: list[jax.Array]) -> Model:
        left = iter(tables)

        def filled(variable: nnx.Variable) -> nnx.Variable:
            return Table(next(left)) if isinstance(variable, Table) else variable

        return jax.tree.map(filled, release(abstract, values), is_leaf=lambda node: isinstance(node, nnx.Variable))

    return packed(values, tables)


def hash_table(config: ModelConfig, generator: np.random.Generator) -> np.ndarray:
    """Experts of every token id, int32 [V, k], distinct for a token and equally many tokens for an expert.

    Tokens are shuffled and dealt out in turn; the experts of one lie a stride apart that changes from round to round.
    """
    experts, picked = config.n_routed_experts, config.num_experts_per_tok
    turn = generator.permutation(config.vocab_size)[:, None]
    stride = 1 + (turn // experts) % (experts // picked)
    return ((turn + stride * np.arange(picked)) % experts).astype(np.int32)


def site_base(streams: int, own: int) -> np.ndarray:
    """`base` of a site in a block, [(2+n)*n]: reads mostly stream `own`, writes one part to each, keeps them apart."""
    read = _logit(_mostly(READS_OWN, streams)[own])
    mix = np.log(_mostly(KEEPS_OWN, streams))
    return np.concatenate([read, np.zeros(streams), mix.ravel()])


def _mostly(share: float, count: int) -> np.ndarray:
    """Rows that sum to one, with `share` on the diagonal: [count, count]."""
    return np.where(np.eye(count, dtype=bool), share, (1 - share) / (count - 1))


def _logit(share: np.ndarray) -> np.ndarray:
    return np.log(share / (1 - share))


def _draw(name: str, shape: tuple[int, ...], config: ModelConfig, generator: np.random.Generator) -> np.ndarray:
    """Values of one weight, by the end of its path; a matrix keeps the mean square of what it multiplies."""
    streams = config.hc_mult
    if re.search(r"norm$", name):
        return np.ones(shape)
    if re.search(r"(attn_sink|ape|bias|markov_w2|confidence)$", name):
        return np.zeros(shape)
    if name.endswith("hc_head.base"):
        return np.full(shape, _logit(np.array(1 / streams)))
    if site := re.search(r"(\d+)[.]hc_(attn|ffn)[.]base$", name):
        return site_base(streams, (2 * int(site[1]) + (site[2] == "ffn")) % streams)
    if re.search(r"hc_\w+[.]scale$", name):
        return np.full(shape, DYNAMIC)
    noise = generator.standard_normal(shape, np.float32)
    if re.search(r"(embed|markov_w1)$", name):
        return EMBEDDING * noise
    noise *= shape[-1] ** -0.5
    if name == "vocabulary.head":
        return HEAD * noise
    # What goes back to the streams is summed over all sites, and keeps their size together.
    return noise / math.sqrt(2 * config.num_hidden_layers) if re.search(r"(wo_b|[.]w2)$", name) else noise
