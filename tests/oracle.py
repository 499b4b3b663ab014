"""DeepSeek-V4 and its DSpark drafter in plain NumPy: the independent oracle of the tests.

Written from the specification alone and meant to be read next to it: float64, no caches, no rings, no chunks. Every
call evaluates the whole sequence at once; who sees whom is a mask over absolute positions. "Exact" mode only: weights
are dequantised and activations never quantised (so the Hadamard rotation of the indexer cancels out and is left out).

Letters in shapes: T tokens, d hidden_size, n hc_mult, H heads, D head_dim, V vocab_size, L layers, k experts per token.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax.config import ModelConfig

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]

OVERLAP_RATIO = 4
STORED = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "I8": np.uint8,  # two FP4 codes a byte, so unsigned
    "I64": np.int64,
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


# Weights -------------------------------------------------------------------------------------------------------------


def read_weights(directory: str | Path) -> Weights:
    """All tensors of an official-layout folder, dequantised; official names without the suffix `.weight`."""
    stored: Weights = {}
    for path in sorted(Path(directory).glob("model*.safetensors")):
        data = np.memmap(path, np.uint8, mode="r")
        start = 8 + int(data[:8].view("<u8")[0])
        header = json.loads(data[8:start].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            # A copy, because nothing aligns the tensors of a file.
            values = data[start + first : start + last].copy().view(STORED[entry["dtype"]])
            stored[name] = values.reshape(entry["shape"])
    return dequantise(stored)


def dequantise(stored: Weights) -> Weights:
    """Tensors as stored (uint8 is packed FP4, `X.scale` belongs to `X.weight`) to float64; int64 stays."""
    weights: Weights = {}
    for name, values in stored.items():
        if name.endswith(".scale"):
            continue
        base = name.removesuffix(".weight")
        if values.dtype == np.uint8:
            codes = np.stack([values & 15, values >> 4], axis=-1).reshape(len(values), -1)  # low nibble = even column
            weights[base] = E2M1[codes] * _spread(stored[f"{base}.scale"], codes.shape, (1, 32))
        elif values.dtype == ml_dtypes.float8_e4m3fn:
            weights[base] = values.astype(float) * _spread(stored[f"{base}.scale"], values.shape, (128, 128))
        else:
            weights[base] = values if values.dtype == np.int64 else values.astype(float)
    return weights


def _spread(scale: Array, shape: tuple[int, ...], block: tuple[int, int]) -> Array:
    """One scale for every weight: the last block of a row or column is simply cut."""
    return scale.astype(float).repeat(block[0], axis=0).repeat(block[1], axis=1)[: shape[0], : shape[1]]


def under(weights: Weights, prefix: str) -> Weights:
    """The tensors below `prefix.`, with that part of their names removed."""
    return {name[len(prefix) + 1 :]: w for name, w in weights.items() if name.startswith(f"{prefix}.")}


# Pieces --------------------------------------------------------------------------------------------------------------


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


def softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def rms_norm(x: Array, weight: Array | float, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def top(scores: Array, count: int) -> tuple[Array, float]:
    """Ascending indices of the `count` largest, ties to the lowest index, and the gap to the first one left out."""
    order = np.argsort(-scores, kind="stable")
    margin = scores[order[count - 1]] - scores[order[count]] if count < len(scores) else np.inf
    return np.sort(order[:count]), float(margin)


def rope_frequencies(c: ModelConfig, ratio: int) -> Array:
    """float32 [qk_rope_head_dim / 2]: plain for ratio 0, YaRN and its own base otherwise."""
    size = c.qk_rope_head_dim
    base = c.compress_rope_theta if ratio else c.rope_theta
    plain = np.float32(1) / (base ** (np.arange(0, size, 2) / size)).astype(np.float32)
    if ratio == 0:
        return plain

    def channel(turns: float) -> float:
        length = c.rope_scaling.original_max_position_embeddings
        return size * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = math.floor(channel(c.rope_scaling.beta_fast)), math.ceil(channel(c.rope_scaling.beta_slow))
    low, high = (min(max(limit, 0), size - 1) for limit in (low, high))
    # Where both limits meet, the ramp is a step: the usual guard of YaRN codes, which the specification leaves out.
    ramp = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0, 1).astype(np.float32)
    return plain / np.float32(c.rope_scaling.factor) * ramp + plain * (1 - ramp)


def rope(x: Array, positions: Array, frequencies: Array, inverse: bool = False) -> Array:
    """Rotates the interleaved pairs of the last channels of x [T, ..., channels]; the angle is a float32 product."""
    angles = positions.astype(np.float32)[:, None] * frequencies
    turn = np.exp((-1j if inverse else 1j) * angles.astype(float)).astype(np.complex64)
    turn = np.expand_dims(turn, tuple(range(1, x.ndim - 1)))
    head, tail = np.split(x, [x.shape[-1] - 2 * len(frequencies)], axis=-1)
    rotated = (tail[..., 0::2] + 1j * tail[..., 1::2]) * turn
    return np.concatenate([head, np.stack([rotated.real, rotated.imag], -1).reshape(tail.shape)], axis=-1)


# Hyper-connections ---------------------------------------------------------------------------------------------------


def hc_mixes(h: Array, fn: Array, eps: float) -> Array:
    """Streams h [T, n, d] to the raw mixing values [T, rows of fn]."""
    flat = h.reshape(len(h), -1)
    return rms_norm(flat, 1.0, eps) @ fn.T


def hc_split(c: ModelConfig, mixes: Array, scale: Array, base: Array) -> tuple[Array, Array, Array]:
    """Raw mixing values to pre [T, n], post [T, n] and comb [T, n, n] (source stream, destination stream)."""
    n, eps = c.hc_mult, c.hc_eps
    m = mixes * np.repeat(scale, [n, n, n * n]) + base
    pre, post = sigmoid(m[:, :n]) + eps, 2 * sigmoid(m[:, n : 2 * n])
    comb = softmax(m[:, 2 * n :].reshape(-1, n, n), axis=2) + eps
    comb = comb / (comb.sum(1, keepdims=True) + eps)
    for _ in range(c.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(2, keepdims=True) + eps)
        comb = comb / (comb.sum(1, keepdims=True) + eps)
    return pre, post, comb


def hc_pre(c: ModelConfig, w: Weights, site: str, h: Array) -> tuple[Array, Array, Array]:
    """Collapses the streams for one half-block: its normed input [T, d], and what `hc_post` needs."""
    mixes = hc_mixes(h, w[f"hc_{site}_fn"], c.rms_norm_eps)
    pre, post, comb = hc_split(c, mixes, w[f"hc_{site}_scale"], w[f"hc_{site}_base"])
    return rms_norm(np.einsum("tj,tjd->td", pre, h), w[f"{site}_norm"], c.rms_norm_eps), post, comb


def hc_post(y: Array, h: Array, post: Array, comb: Array) -> Array:
    """Spreads the output y [T, d] of a half-block over the mixed streams."""
    return post[:, :, None] * y[:, None] + np.einsum("tjk,tjd->tkd", comb, h)


def hc_head(c: ModelConfig, w: Weights, h: Array) -> Array:
    """The final collapse of the streams, [T, n, d] to [T, d]."""
    mixes = hc_mixes(h, w["hc_head_fn"], c.rms_norm_eps)
    return np.einsum("tj,tjd->td", sigmoid(mixes * w["hc_head_scale"] + w["hc_head_base"]) + c.hc_eps, h)


# Attention -----------------------------------------------------------------------------------------------------------


def query_latent(c: ModelConfig, w: Weights, x: Array) -> Array:
    return rms_norm(x @ w["wq_a"].T, w["q_norm"], c.rms_norm_eps)


def keys_of(c: ModelConfig, w: Weights, x: Array, positions: Array, frequencies: Array) -> Array:
    """The one latent vector a token, key and value of all heads: [T, D]."""
    return rope(rms_norm(x @ w["wkv"].T, w["kv_norm"], c.rms_norm_eps), positions, frequencies)


def attend(
    c: ModelConfig, w: Weights, latent: Array, keys: Array, seen: Array, positions: Array, frequencies: Array
) -> Array:
    """Attention with sink of the queries from `latent` [T, q_lora_rank] over keys [K, D]; seen [T, K] says which."""
    rows = len(latent)
    q = (latent @ w["wq_b"].T).reshape(rows, c.num_attention_heads, c.head_dim)
    q = rope(rms_norm(q, 1.0, c.rms_norm_eps), positions, frequencies)
    scores = np.where(seen[:, None], np.einsum("thc,kc->thk", q, keys) / math.sqrt(c.head_dim), -np.inf)
    sink = np.broadcast_to(w["attn_sink"][:, None], (rows, c.num_attention_heads, 1))
    shares = softmax(np.concatenate([scores, sink], axis=2), axis=2)[:, :, :-1]  # the sink has no value
    out = rope(shares @ keys, positions, frequencies, inverse=True)
    groups = out.reshape(rows, c.o_groups, -1)
    wo_a = w["wo_a"].reshape(c.o_groups, c.o_lora_rank, -1)
    return np.einsum("tgc,grc->tgr", groups, wo_a).reshape(rows, -1) @ w["wo_b"].T


def compressed_entries(c: ModelConfig, w: Weights, x: Array, ratio: int, frequencies: Array) -> Array:
    """The entries of all complete windows of `ratio` tokens: [T // ratio, width]."""
    windows = len(x) // ratio
    tokens = x[: windows * ratio].reshape(windows, ratio, x.shape[1])
    values, scores = tokens @ w["wkv"].T, tokens @ w["wgate"].T + w["ape"]
    if ratio == OVERLAP_RATIO:

        def overlap(items: Array, absent: float) -> Array:
            previous, own = np.split(items, 2, axis=2)
            previous = np.concatenate([np.full_like(own[:1], absent), previous[:-1]])
            return np.concatenate([previous, own], axis=1)

        values, scores = overlap(values, 0.0), overlap(scores, -np.inf)
    pooled = (softmax(scores, axis=1) * values).sum(1)
    return rope(rms_norm(pooled, w["norm"], c.rms_norm_eps), ratio * np.arange(windows), frequencies)


def index_scores(c: ModelConfig, w: Weights, x: Array, latent: Array, frequencies: Array) -> Array:
    """How much each position wants each compressed entry, visible or not: [T, entries]."""
    heads, width = c.index_n_heads, c.index_head_dim
    q = rope((latent @ w["wq_b"].T).reshape(-1, heads, width), np.arange(len(x)), frequencies)
    keys = compressed_entries(c, under(w, "compressor"), x, OVERLAP_RATIO, frequencies)
    shares = x @ w["weights_proj"].T / math.sqrt(width * heads)
    return np.einsum("th,thw->tw", shares, np.maximum(np.einsum("thc,wc->thw", q, keys), 0))


def target_attention(c: ModelConfig, w: Weights, ratio: int, x: Array) -> tuple[Array, list[tuple[Array, float]]]:
    """A target layer over the whole sequence, and what its indexer, if any, selected for each position (see `top`)."""
    t = np.arange(len(x))
    frequencies = rope_frequencies(c, ratio)
    latent, keys = query_latent(c, w, x), keys_of(c, w, x, t, frequencies)
    seen = (t <= t[:, None]) & (t > t[:, None] - c.sliding_window)
    selected = []
    if ratio:
        entries = compressed_entries(c, under(w, "compressor"), x, ratio, frequencies)
        visible = np.arange(len(entries)) < (t[:, None] + 1) // ratio
        if ratio == OVERLAP_RATIO:
            scores = index_scores(c, under(w, "indexer"), x, latent, frequencies)
            selected = [top(row[ok], min(c.index_topk, ok.sum())) for row, ok in zip(scores, visible, strict=True)]
            visible = np.array([np.isin(np.arange(len(entries)), picks) for picks, _ in selected])
        keys, seen = np.concatenate([keys, entries]), np.concatenate([seen, visible], axis=1)
    return attend(c, w, latent, keys, seen, t, frequencies), selected


# Mixture of experts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """Experts of each token [T, k], ascending, with their mixing weights, and the gap to the first one left out."""

    picks: Array
    weights: Array
    margin: Array


def route(c: ModelConfig, w: Weights, x: Array, ids: Array) -> Routing:
    """By token id where the layer has a table, by score otherwise."""
    affinity = np.sqrt(np.logaddexp(0, x @ w["gate"].T))
    if "gate.tid2eid" in w:
        picks, margin = np.sort(w["gate.tid2eid"][ids], axis=1), np.full(len(x), np.inf)
    else:
        tops = [top(row, c.num_experts_per_tok) for row in affinity + w["gate.bias"]]
        picks, margin = np.array([p for p, _ in tops]), np.array([m for _, m in tops])
    shares = np.take_along_axis(affinity, picks, axis=1)
    return Routing(picks, shares / shares.sum(1, keepdims=True) * c.routed_scaling_factor, margin)


def expert(c: ModelConfig, w: Weights, name: str, x: Array) -> Array:
    gate = np.minimum(x @ w[f"{name}.w1"].T, c.swiglu_limit)
    up = np.clip(x @ w[f"{name}.w3"].T, -c.swiglu_limit, c.swiglu_limit)
    return (gate * sigmoid(gate) * up) @ w[f"{name}.w2"].T


def feed_forward(c: ModelConfig, w: Weights, h: Array, ids: Array) -> tuple[Array, Routing]:
    """The second half-block of a layer: streams in, streams out."""
    x, post, comb = hc_pre(c, w, "ffn", h)
    w = under(w, "ffn")
    routing = route(c, w, x, ids)
    y = expert(c, w, "shared_experts", x)
    for e in np.unique(routing.picks):
        rows, slots = np.nonzero(routing.picks == e)
        np.add.at(y, rows, routing.weights[rows, slots, None] * expert(c, w, f"experts.{e}", x[rows]))
    return hc_post(y, h, post, comb), routing


def embed(c: ModelConfig, weights: Weights, ids: Array) -> Array:
    return np.repeat(weights["embed"][ids][:, None], c.hc_mult, axis=1)


# The target ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The target over a whole sequence.

    Attributes:
        logits: [T, V].
        taps: [T, target layers · d], what the drafter reads.
        streams: [L, T, n, d], after each layer.
        collapsed: [T, d], after the final collapse of the streams, before the final norm.
        router_picks: [L, T, k], ascending.
        router_weights: [L, T, k], in the order of the picks.
        router_margin: [L, T], last picked minus first unpicked selection score; inf for hash layers.
        index_picks: for each CSA layer, the entries that each position selected.
        index_margin: for each CSA layer [T], last picked minus first unpicked visible score; inf if all are picked.
    """

    logits: Array
    taps: Array
    streams: Array
    collapsed: Array
    router_picks: Array
    router_weights: Array
    router_margin: Array
    index_picks: dict[int, list[set[int]]]
    index_margin: dict[int, Array]


def target(config: ModelConfig, weights: Weights, ids: Sequence[int] | Array) -> Result:
    """Evaluates the target on a whole sequence, T ≥ 1."""
    c, ids = config, np.asarray(ids)
    h, streams, routings = embed(c, weights, ids), [], []
    index_picks: dict[int, list[set[int]]] = {}
    index_margin: dict[int, Array] = {}
    for layer, ratio in enumerate(c.layer_ratios):
        w = under(weights, f"layers.{layer}")
        x, post, comb = hc_pre(c, w, "attn", h)
        y, selected = target_attention(c, under(w, "attn"), ratio, x)
        h, routing = feed_forward(c, w, hc_post(y, h, post, comb), ids)
        streams.append(h)
        routings.append(routing)
        if selected:
            index_picks[layer] = [set(picks.tolist()) for picks, _ in selected]
            index_margin[layer] = np.array([margin for _, margin in selected])
    collapsed = hc_head(c, weights, h)
    tapped = c.drafter.target_layer_ids if c.drafter else ()
    return Result(
        logits=rms_norm(collapsed, weights["norm"], c.rms_norm_eps) @ weights["head"].T,
        taps=np.concatenate([np.empty((len(ids), 0)), *(streams[layer].mean(1) for layer in tapped)], axis=1),
        streams=np.stack(streams),
        collapsed=collapsed,
        router_picks=np.stack([r.picks for r in routings]),
        router_weights=np.stack([r.weights for r in routings]),
        router_margin=np.stack([r.margin for r in routings]),
        index_picks=index_picks,
        index_margin=index_margin,
    )


def margins(logits: Array) -> Array:
    """Largest minus second largest value of the last axis."""
    best = np.sort(logits, axis=-1)
    return best[..., -1] - best[..., -2]


def greedy(config: ModelConfig, weights: Weights, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """`count` greedy ids after the prompt (eos is a token like any other) and the margin of each choice; slow."""
    ids, gaps = [int(i) for i in prompt], []
    for _ in range(count):
        last = target(config, weights, ids).logits[-1]
        ids.append(int(last.argmax()))
        gaps.append(float(margins(last)))
    return ids[len(prompt) :], gaps


# The drafter ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftResult:
    """One block of greedy drafts; row i drafts the token at position P + 1 + i.

    Attributes:
        base_logits: [block, V], before the Markov bias.
        logits: [block, V], with it; each row is conditional on the drafts of the rows above.
        ids: [block], the drafts.
        confidence: [block], raw scores: no sigmoid.
        hidden: [block, d], collapsed and not normed.
        stages: [stages, block, n, d], streams after each stage.
        margin: [block], best minus second best logit.
    """

    base_logits: Array
    logits: Array
    ids: Array
    confidence: Array
    hidden: Array
    stages: Array
    margin: Array


def main_features(config: ModelConfig, weights: Weights, taps: Array) -> Array:
    """Taps [P, target layers · d] to what every stage's context keys are made of, [P, d]."""
    return rms_norm(taps @ weights["mtp.0.main_proj"].T, weights["mtp.0.main_norm"], config.rms_norm_eps)


def draft(
    config: ModelConfig, weights: Weights, taps: Array, anchor: int, window_of_slots: bool = False
) -> DraftResult:
    """Drafts a block behind `anchor`, which sits at position P = len(taps); P may be 0.

    With `window_of_slots` a slot sees as far back as a token of the target at its position would, which is the rule of
    llama.cpp; else, by the release, all slots see what the anchor's predecessor saw.
    """
    c = config
    assert c.drafter is not None
    context = np.arange(max(0, len(taps) - c.sliding_window), len(taps))
    slots = len(taps) + np.arange(c.block_size)
    main = main_features(c, weights, taps[context])
    frequencies = rope_frequencies(c, 0)

    seen = np.ones((len(slots), len(context) + len(slots)), bool)  # the whole block too, also the slots behind
    if window_of_slots:
        seen[:, : len(context)] = slots[:, None] - context < c.sliding_window
    ids = np.array([anchor] + [c.drafter.noise_token_id] * (c.block_size - 1))
    h, stages = embed(c, weights, ids), []
    for stage in range(c.num_stages):
        w = under(weights, f"mtp.{stage}")
        attn = under(w, "attn")
        x, post, comb = hc_pre(c, w, "attn", h)
        past, own = keys_of(c, attn, main, context, frequencies), keys_of(c, attn, x, slots, frequencies)
        keys = np.concatenate([past, own])
        y = attend(c, attn, query_latent(c, attn, x), keys, seen, slots, frequencies)
        h, _ = feed_forward(c, w, hc_post(y, h, post, comb), ids)
        stages.append(h)
    last = under(weights, f"mtp.{c.num_stages - 1}")
    hidden = hc_head(c, last, h)
    base = rms_norm(hidden, last["norm"], c.rms_norm_eps) @ weights["head"].T

    chain, logits, confidence = [anchor], [], []
    for slot in range(c.block_size):
        markov = last["markov_head.markov_w1"][chain[-1]]
        logits.append(base[slot] + last["markov_head.markov_w2"] @ markov)
        confidence.append((last["confidence_head.proj"] @ np.concatenate([hidden[slot], markov])).item())
        chain.append(int(logits[-1].argmax()))
    return DraftResult(
        base_logits=base,
        logits=np.stack(logits),
        ids=np.array(chain[1:]),
        confidence=np.array(confidence),
        hidden=hidden,
        stages=np.stack(stages),
        margin=margins(np.stack(logits)),
    )
