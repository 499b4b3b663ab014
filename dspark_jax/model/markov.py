"""Markov heads: how a draft's logits depend on the token before it (DSpark paper, equations 4 to 6).

A head turns the embedding of the previous token, and in two of the three kinds the slot's hidden vector, into a latent
vector that a second table projects to the vocabulary. The released drafters have the vanilla head.
"""

import jax
import jax.numpy as jnp

from dspark_jax.model.linear import project
from dspark_jax.model.weights import Dense, MarkovHead


def embed_previous(weights: MarkovHead, previous: jax.Array) -> jax.Array:
    """Embeddings of the tokens before the drafts: int32 [...] -> float32 [..., r]."""
    return weights.markov_w1[...][previous].astype(jnp.float32)


def markov_latent(
    weights: MarkovHead, hidden: jax.Array, embedding: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What `markov_w2` projects to the logits that are added to those of a slot.

    Args:
        hidden: [..., d], what the LM head reads.
        embedding: float32 [..., r], of the previous token.
        state: float32 [..., r], zeros at the first slot of a block; only the rnn head changes it.

    Returns:
        float32 [..., r], and the state for the next slot.
    """
    hidden = hidden.astype(jnp.float32)
    if weights.gate_proj is not None:
        return jax.nn.sigmoid(_dense(weights.gate_proj, hidden, embedding)) * embedding, state
    if weights.joint_proj is not None:
        gate, candidate, read = jnp.split(_dense(weights.joint_proj, state, embedding, hidden), 3, axis=-1)
        keep = jax.nn.sigmoid(gate)
        return jnp.tanh(read), keep * state + (1 - keep) * jnp.tanh(candidate)
    return embedding, state


def markov_latents(weights: MarkovHead, hidden: jax.Array, embedding: jax.Array) -> jax.Array:
    """The same for whole blocks whose previous tokens are known: [..., g, d], float32 [..., g, r] -> [..., g, r]."""

    def step(state: jax.Array, slot: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        latent, state = markov_latent(weights, *slot, state)
        return state, latent

    slots = jnp.moveaxis(hidden, -2, 0), jnp.moveaxis(embedding, -2, 0)
    _, latents = jax.lax.scan(step, jnp.zeros_like(embedding[..., 0, :]), slots)
    return jnp.moveaxis(latents, 0, -2)


def _dense(weights: Dense, *parts: jax.Array) -> jax.Array:
    return project(jnp.concatenate(parts, axis=-1), weights.weight) + weights.bias[...]
