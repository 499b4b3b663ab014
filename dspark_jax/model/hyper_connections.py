"""Hyper-connection sites of a block and of a head; the mathematics is `pallas_kernels.hyper_connection`."""

from typing import NamedTuple, TypedDict

import jax

from dspark_jax.model.rows import Setting
from dspark_jax.model.weights import HyperConnection
from pallas_kernels.hyper_connection import Constants, collapse, head_weights, mixes, read, write, write_then_read
from pallas_kernels.implementation import Implementation
from pallas_kernels.partition import Partition


class Site(NamedTuple):
    """How one half-block writes back: `post` float32 [B, T, n], `comb` float32 [B, T, n, n] (source, destination)."""

    post: jax.Array
    comb: jax.Array


def read_streams(weights: HyperConnection, streams: jax.Array, setting: Setting) -> tuple[jax.Array, Site]:
    """Activations [B, T, n, d] -> the input of a half-block [B, T, d], and how its output is written."""
    x, post, comb = read(streams, *_operands(weights, setting), **_options(setting))
    return x, Site(post, comb)


def write_streams(x: jax.Array, streams: jax.Array, site: Site) -> jax.Array:
    """The streams after a half-block whose output is `x` [B, T, d]."""
    return write(x, streams, site.post, site.comb)


def pass_streams(
    weights: HyperConnection, x: jax.Array, streams: jax.Array, site: Site, setting: Setting
) -> tuple[jax.Array, jax.Array, Site]:
    """`write_streams` of one half-block and `read_streams` of the next: the streams between them, and its results."""
    operands = x, streams, site.post, site.comb, *_operands(weights, setting)
    streams, x, post, comb = write_then_read(*operands, **_options(setting))
    return streams, x, Site(post, comb)


def _operands(weights: HyperConnection, setting: Setting) -> tuple[jax.Array, jax.Array, jax.Array, Constants]:
    config = setting.config
    constants = Constants(config.rms_norm_eps, config.hc_sinkhorn_iters, config.hc_eps)
    return weights.fn[...], weights.base[...], weights.scale[...], constants


class _Options(TypedDict):
    implementation: Implementation | None
    partition: Partition | None


def _options(setting: Setting) -> _Options:
    return {"implementation": setting.numerics.implementation, "partition": setting.partition}


def collapse_streams(weights: HyperConnection, streams: jax.Array, setting: Setting) -> jax.Array:
    """The end of the streams: activations [B, T, n, d] -> [B, T, d]."""
    mixed = mixes(streams, weights.fn[...], setting.config.rms_norm_eps)
    share = head_weights(mixed, weights.base[...], weights.scale[...], setting.config.hc_eps)
    return setting.numerics.round(collapse(streams, share))
