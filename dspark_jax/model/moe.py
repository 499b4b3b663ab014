"""Mixture of experts: router, routed experts in MXFP4, and one shared expert in FP8."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.model.linear import linear, project
from dspark_jax.model.rows import Setting
from dspark_jax.model.weights import Gate, MixtureOfExperts, SharedExpert
from pallas_kernels.mxfp4_experts import Matrices, mxfp4_experts, swiglu
from pallas_kernels.partition import map_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """Experts of each row: `picks` int32 [..., k], `weights` float32 [..., k] that sum to the routed scaling factor."""

    picks: jax.Array
    weights: jax.Array


def mixture_of_experts(
    weights: MixtureOfExperts, x: jax.Array, ids: jax.Array, live: jax.Array, setting: Setting
) -> tuple[jax.Array, Routing]:
    """Sum of the routed experts and the shared one.

    Args:
        x: activations [B, T, d].
        ids: int32 [B, T], token ids, for hash routing.
        live: bool [B, T]; dead rows wake no expert.

    Returns:
        Activations [B, T, d] and the routing.
    """
    numerics, limit = setting.numerics, setting.config.swiglu_limit
    routing = route(weights.gate, x, ids, setting)
    routed = mxfp4_experts(
        x,
        routing.picks,
        routing.weights,
        live,
        Matrices(*(matrix.get_value() for matrix in (weights.experts.w1, weights.experts.w3, weights.experts.w2))),
        limit,
        quantised=numerics.quantise_linear_inputs,
        partition=setting.partition,
        implementation=numerics.implementation,
    )
    shared = _shared_expert(weights.shared_experts, x, setting).astype(jnp.float32)
    return numerics.round(routed + shared), routing


def route(weights: Gate, x: jax.Array, ids: jax.Array, setting: Setting) -> Routing:
    """Scores experts by sqrt(softplus(logit)); picks by token id if there is a table, else the best biased scores."""
    config = setting.config
    scores = jnp.sqrt(jax.nn.softplus(project(x, weights.weight)))
    if weights.tid2eid is not None:
        picks = weights.tid2eid[...][ids]
    else:
        assert weights.bias is not None
        biased = scores + weights.bias[...]
        picks = map_rows(lambda scores: jax.lax.top_k(scores, config.num_experts_per_tok)[1], biased, setting.partition)
    picked = jnp.take_along_axis(scores, picks, axis=-1)
    share = picked / jnp.sum(picked, axis=-1, keepdims=True)
    return Routing(picks, share * config.routed_scaling_factor)


def _shared_expert(weights: SharedExpert, x: jax.Array, setting: Setting) -> jax.Array:
    numerics = setting.numerics
    gate, up = linear(x, weights.w1, setting), linear(x, weights.w3, setting)
    return linear(numerics.round(swiglu(gate, up, setting.config.swiglu_limit)), weights.w2, setting)
