"""Recomputes what a record holds for float32: the target, its internals, decoding, the drafter, and both loops.

Each function yields pairs of a key and the value for it, shaped like the record's own. Some keys keep only the last
positions of a prompt, or the first of what is decoded after it; `_last` and `_first` cut to what is there.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.crosscheck.record import PROMPT_ALONE, Record, Run, runs
from dspark_jax.crosscheck.replay import DraftStart, Trace, draft_at, feed, replay
from dspark_jax.decoding.generate import run as run_loop
from dspark_jax.decoding.request import Request, check_requests
from dspark_jax.model.model import Model
from pallas_kernels.hyper_connection import mixes, split_mixes

Values = Iterator[tuple[str, np.ndarray]]

SINKHORN_LAYER = 1  # the record takes its sinkhorn example from this layer's attention site, on the short prompt


def exact(model: Model, record: Record) -> Values:
    """All keys below `exact/` that the record holds."""
    sequences = runs(record)
    seen = replay(model, sequences) if sequences else {}
    yield from _sinkhorn(model, record, seen)
    if not sequences:
        return
    yield from _prompt(record, sequences, seen)
    yield from _fed(model, record, sequences)
    yield from _short(seen)
    yield from _emitted(model, record, sequences, seen)
    if model.drafter is not None:
        yield from _drafts(model, record, sequences, seen)


def _last(record: Record, key: str, values: np.ndarray) -> Values:
    if key in record:
        yield key, values[len(values) - len(record[key]) :]


def _first(record: Record, key: str, values: np.ndarray) -> Values:
    if key in record:
        yield key, values[: len(record[key])]


def _prompt(record: Record, sequences: dict[str, Run], seen: dict[str, Trace]) -> Values:
    if "main" in sequences:
        main, n = seen["main"], len(sequences["main"].prompt)
        yield from _last(record, "exact/prefill_logits", main.logits[:n])
        yield from _last(record, "exact/prefill_main_hidden", main.taps[:n])
        for layer, (picks, weights) in enumerate(zip(main.router_picks, main.router_weights, strict=True)):
            yield from _last(record, f"exact/router/layer{layer}/indices", picks[:n])
            yield from _last(record, f"exact/router/layer{layer}/weights", weights[:n])
        for layer, picks in main.index_picks.items():
            yield from _last(record, f"exact/indexer/layer{layer}/prefill_topk", picks[:n])
    if "tiny" in sequences:
        n = len(sequences["tiny"].prompt)
        yield from _last(record, "exact/tiny/prefill_logits", seen["tiny"].logits[:n])


def _fed(model: Model, record: Record, sequences: dict[str, Run]) -> Values:
    fed: dict[str, Run] = {name: sequences[name] for name in PROMPT_ALONE if name in sequences and sequences[name].rest}
    steps = feed(model, fed) if fed else {}
    if "main" in steps:
        yield from _first(record, "exact/decode/logits", steps["main"].logits)
        yield from _first(record, "exact/decode/main_hidden", steps["main"].taps)
        for layer, picks in steps["main"].index_picks.items():
            yield from _first(record, f"exact/indexer/layer{layer}/decode_topk", picks)
    if "tiny" in steps:
        yield from _first(record, "exact/tiny/decode_logits", steps["tiny"].logits)


def _short(seen: dict[str, Trace]) -> Values:
    if "short" in seen:
        short = seen["short"]
        yield "exact/short/hc_streams", short.streams
        yield "exact/short/hc_head_out", short.collapsed
        yield "exact/short/logits_last", short.logits[-1]


def _sinkhorn(model: Model, record: Record, seen: dict[str, Trace]) -> Values:
    if not record.group("exact/sinkhorn") or model.target is None or len(model.target.layers) <= SINKHORN_LAYER:
        return
    config, site = model.config, model.target.layers[SINKHORN_LAYER].hc_attn
    yield "exact/sinkhorn/scale", np.asarray(site.scale[...])
    yield "exact/sinkhorn/base", np.asarray(site.base[...])
    if "short" in seen:
        streams = jnp.asarray(seen["short"].streams[SINKHORN_LAYER - 1])
        yield "exact/sinkhorn/mixes", np.asarray(mixes(streams, site.fn[...], config.rms_norm_eps))
    if "exact/sinkhorn/mixes" in record:  # from the recorded mixes, so that the split is held to its own tolerance
        mixed = jnp.asarray(record["exact/sinkhorn/mixes"])
        split = split_mixes(mixed, site.base[...], site.scale[...], config.hc_sinkhorn_iters, config.hc_eps)
        yield from zip(
            ("exact/sinkhorn/pre", "exact/sinkhorn/post", "exact/sinkhorn/comb"), map(np.asarray, split), strict=True
        )


def _emitted(model: Model, record: Record, sequences: dict[str, Run], seen: dict[str, Trace]) -> Values:
    """What the decoding loop emits with nothing stopping it, for the greedy run and the loops in one batch."""
    emitting = {name: run for name, run in sequences.items() if name not in PROMPT_ALONE}
    if not emitting:
        return
    requests = [Request(run.prompt, max_new_tokens=len(run.rest), stop_ids=()) for run in emitting.values()]
    generation = run_loop(model, check_requests(requests, model))
    for row, (name, run) in zip(generation.tokens, emitting.items(), strict=True):
        key = "exact/greedy/tokens" if name == "greedy" else f"exact/{name}/stream"
        yield key, row[len(run.prompt) : len(run.ids)]
    if "greedy" in emitting:
        logits = np.sort(seen["greedy"].logits[len(sequences["greedy"].prompt) - 1 : -1], axis=-1)
        yield "exact/greedy/margins", logits[:, -1] - logits[:, -2]


def _drafts(model: Model, record: Record, sequences: dict[str, Run], seen: dict[str, Trace]) -> Values:
    """The drafter at the recorded positions, all of them in one batch."""
    places = {}
    asked = {"exact/draft/start_pos", "exact/draft/anchor_ids"} <= set(record.keys)
    if asked and "main" in sequences and sequences["main"].rest:
        positions = record.positions("exact/draft/start_pos", below=len(sequences["main"].ids))
        anchors = record.ids("exact/draft/anchor_ids")
        places["draft"] = [DraftStart(seen["main"].taps[: p + 1], a) for p, a in zip(positions, anchors, strict=True)]
    for name in (name for name in sequences if f"exact/{name}/start_pos" in record):
        ids = sequences[name].ids
        positions = record.positions(f"exact/{name}/start_pos", below=len(ids) - 1)
        places[name] = [DraftStart(seen[name].taps[: p + 1], ids[p + 1]) for p in positions]
    if not places:
        return
    step, features = draft_at(model, [begin for begins in places.values() for begin in begins])
    offset = 0
    for name, begins in places.items():
        part = slice(offset, offset := offset + len(begins))
        one = jax.tree.map(lambda values, part=part: values[part], step)
        output_ids = np.concatenate([[[begin.anchor] for begin in begins], one.ids], axis=1)
        drafts = {"output_ids": output_ids, "confidence": one.confidence}
        if name == "draft":
            first, last = 0, len(begins) - 1
            drafts |= {
                "main_hidden": np.stack([begin.taps[-1] for begin in begins]),
                "main_x": features[part],
                "base_logits": one.base_logits,
                "logits": one.logits,
                "first_stages": np.stack([stage[first] for stage in one.stages]),
                "first_hidden": one.hidden[first],
                "last_stages": np.stack([stage[last] for stage in one.stages]),
            }
        else:
            decoded = np.array([len(begin.taps) for begin in begins]) - 1
            drafts |= _verified(seen[name], sequences[name], decoded, one.ids)
        yield from ((f"exact/{name}/{key}", values) for key, values in drafts.items())


def _verified(seen: Trace, run: Run, positions: np.ndarray, drafts: np.ndarray) -> dict[str, np.ndarray]:
    """How many drafts of each recorded round the target's greedy choice accepts, and the token that follows them."""
    choice = seen.logits.argmax(axis=-1)  # choice[p] is the token after position p
    accepted = []
    for position, block in zip(positions, drafts, strict=True):
        known = block[: len(choice) - position - 2]  # beyond, the record does not say what the target chose
        agrees = known == choice[position + 1 : position + 1 + len(known)]
        accepted.append(int(np.cumprod(agrees).sum()))
    return {
        "first_token": choice[[len(run.prompt) - 1]],
        "accepted": np.array(accepted),
        "bonus_ids": choice[positions + 1 + np.array(accepted)],
    }
