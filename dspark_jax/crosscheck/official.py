"""Recomputes what a record holds for the official numerics.

At small widths these roundings are chaotic, so only single layers fed with recorded streams can be held to a tolerance.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.crosscheck.record import LAYERS, Record, Run, runs
from dspark_jax.crosscheck.replay import DraftStart, draft_at, replay
from dspark_jax.model.cache import target_cache
from dspark_jax.model.model import Model
from dspark_jax.model.rows import Rows
from dspark_jax.model.target import embed, layer_step
from pallas_kernels.precision import round_to


def layer_by_layer(model: Model, record: Record) -> Iterator[tuple[str, np.ndarray]]:
    """Each layer's output when it is fed the recorded streams of the layer before it (embeddings for the first)."""
    if LAYERS not in record or "exact/short/prompt_ids" not in record:
        return
    model = replace(model, numerics=replace(model.numerics, rsqrt=torch_cpu_rsqrt))
    ids, recorded = jnp.asarray([record.ids("exact/short/prompt_ids")], jnp.int32), record[LAYERS]
    shape = (model.config.num_hidden_layers, ids.shape[1], model.config.hc_mult, model.config.hidden_size)
    yield LAYERS, np.asarray(_layers(model, ids, jnp.asarray(recorded))) if recorded.shape == shape else np.zeros(shape)


TORCH_VECTOR_STEP = 32  # bfloat16 values that one turn of PyTorch's vector loop takes


def torch_cpu_rsqrt(x: jax.Array) -> jax.Array:
    """torch.rsqrt of a bfloat16 tensor on a CPU: past the last whole vector step it rounds the root, too.

    Found from the golden records, whose last two rows differ from a single rounding; PyTorch 2.13 confirms it. With
    one rounding everywhere those rows alone put a layer beyond the tolerance.

    Args:
        x: float32 with bfloat16 values, in the order of the PyTorch tensor.
    """
    root = round_to(jnp.sqrt(x), jnp.bfloat16).astype(jnp.float32)
    whole = x.size // TORCH_VECTOR_STEP * TORCH_VECTOR_STEP
    return jnp.where(jnp.arange(x.size).reshape(x.shape) < whole, jax.lax.rsqrt(x), 1 / root)


@jax.jit
def _layers(model: Model, ids: jax.Array, recorded: jax.Array) -> jax.Array:
    assert model.target is not None
    n, config = ids.shape[1], model.config
    setting = model.setting(n)
    rows = Rows(ids, jnp.zeros(1, jnp.int32), jnp.full(1, n, jnp.int32))
    cache = target_cache(config, model.numerics, batch=1, capacity=n, width=1)
    inputs = [embed(model.vocabulary, ids, setting), *recorded[:-1, None]]
    outputs = [
        layer_step(layer, streams, cache.layers[i], rows, config.layer_ratios[i], setting)[0]
        for i, (layer, streams) in enumerate(zip(model.target.layers, inputs, strict=True))
    ]
    return jnp.stack(outputs)[:, 0]


def end_to_end(model: Model, record: Record) -> Iterator[tuple[str, np.ndarray]]:
    """The rest of `inference/`: a whole run, for the reader's information."""
    sequences = {name: run for name, run in runs(record).items() if name in ("main", "short")}
    if not record.group("inference") or not sequences:
        return
    seen = replay(model, sequences)
    if "short" in seen:
        yield "inference/short/logits_last", seen["short"].logits[-1]
    if "main" not in seen:
        return
    n = len(sequences["main"].prompt)
    logits, taps = seen["main"].logits, seen["main"].taps
    if "inference/prefill_logits" in record:
        yield "inference/prefill_logits", logits[max(n - len(record["inference/prefill_logits"]), 0) : n]
    yield "inference/prefill_main_hidden_last", taps[n - 1]
    if "inference/decode_logits" in record:
        yield "inference/decode_logits", logits[n : n + len(record["inference/decode_logits"])]
    if record.group("inference/draft") and model.drafter is not None and len(sequences["main"].rest) > 1:
        yield from _draft(model, sequences["main"], taps, n)


def _draft(model: Model, run: Run, taps: np.ndarray, n: int) -> Iterator[tuple[str, np.ndarray]]:
    anchor = run.rest[1]
    step, _ = draft_at(model, [DraftStart(taps[: n + 1], anchor)])
    yield "inference/draft/output_ids", np.concatenate([[anchor], step.ids[0]])
    yield "inference/draft/logits", step.logits[0]
    yield "inference/draft/confidence", step.confidence[0]
