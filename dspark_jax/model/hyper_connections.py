"""Hyper-connection sites of a block and of a head; the mathematics is `pallas_kernels.hyper_connection`."""

from typing import NamedTuple

import jax

from dspark_jax.model.rows import Setting
from dspark_jax.model.weights import HyperConnection
from pallas_kernels.hyper_connection import collapse, expand, head_weights, mixes, split_mixes


class Site(NamedTuple):
    """How one half-block writes back: `post` float32 [B, T, n], `comb` float32 [B, T, n, n] (source, destination)."""

    post: jax.Array
    comb: jax.Array


def read_streams(weights: HyperConnection, streams: jax.Array, setting: Setting) -> tuple[jax.Array, Site]:
    """Activations [B, T, n, d] -> the input of a half-block [B, T, d], and how its output is written."""
    config = setting.config
    mixed = mixes(streams, weights.fn[...], config.rms_norm_eps)
    pre, post, comb = split_mixes(mixed, weights.base[...], weights.scale[...], config.hc_sinkhorn_iters, config.hc_eps)
    return setting.numerics.round(collapse(streams, pre)), Site(post, comb)


def write_streams(x: jax.Array, streams: jax.Array, site: Site, setting: Setting) -> jax.Array:
    """The streams after a half-block whose output is `x` [B, T, d]."""
    return setting.numerics.round(expand(x, streams, site.post, site.comb))


def collapse_streams(weights: HyperConnection, streams: jax.Array, setting: Setting) -> jax.Array:
    """The end of the streams: activations [B, T, n, d] -> [B, T, d]."""
    mixed = mixes(streams, weights.fn[...], setting.config.rms_norm_eps)
    share = head_weights(mixed, weights.base[...], weights.scale[...], setting.config.hc_eps)
    return setting.numerics.round(collapse(streams, share))
