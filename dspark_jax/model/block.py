"""One layer of the target or stage of the drafter: attention, then experts, each between hyper-connections."""

from collections.abc import Callable

import jax

from dspark_jax.model.hyper_connections import pass_streams, read_streams, write_streams
from dspark_jax.model.linear import rms_norm
from dspark_jax.model.moe import Routing, mixture_of_experts
from dspark_jax.model.rows import Setting
from dspark_jax.model.weights import Block


def block[State](
    weights: Block,
    streams: jax.Array,
    ids: jax.Array,
    live: jax.Array,
    attention: Callable[[jax.Array], tuple[jax.Array, State]],
    setting: Setting,
) -> tuple[jax.Array, Routing, State]:
    """Streams in, streams out.

    Args:
        streams: activations [B, T, n, d].
        ids: int32 [B, T], token ids.
        live: bool [B, T].
        attention: maps the normed input [B, T, d] to the attention's output and whatever state it leaves; target and
            drafter differ here only.

    Returns:
        Activations [B, T, n, d], the routing of the experts, and the attention's state.
    """
    eps, numerics = setting.config.rms_norm_eps, setting.numerics
    x, site = read_streams(weights.hc_attn, streams, setting)
    x, state = attention(rms_norm(x, weights.attn_norm, eps, numerics))
    streams, x, site = pass_streams(weights.hc_ffn, x, streams, site, setting)
    x, routing = mixture_of_experts(weights.ffn, rms_norm(x, weights.ffn_norm, eps, numerics), ids, live, setting)
    return write_streams(x, streams, site), routing, state
