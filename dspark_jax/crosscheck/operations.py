"""Recomputes the recorded quantisers, matrix products and dequantised tensors."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.layout import layout
from dspark_jax.crosscheck.record import Record
from dspark_jax.model.attention import KV_BLOCK
from dspark_jax.model.indexer import INDEX_BLOCK
from dspark_jax.model.model import Model
from pallas_kernels.block_scaled import BlockScaled, decoded_product
from pallas_kernels.fake_quant import LINEAR_BLOCK, fake_e2m1, fake_e4m3, hadamard, quantise_e4m3

PRODUCTS = {
    "ops/fp8_gemm_wq_b_f32": "layers.1.attn.wq_b",
    "ops/fp4_gemm_expert_w1_f32": "layers.2.ffn.experts.3.w1",
}


def operations(model: Model, record: Record) -> Iterator[tuple[str, np.ndarray]]:
    """Keys below `ops/` and `dequant/`."""
    for key, match in record.matching(r"dequant/(.+)"):
        weight = packed_matrix(model, match[1])
        if weight is not None:
            yield key, _kept_rows(np.asarray(weight.decode(jnp.float32)), record[key])
    if "ops/x" not in record:
        return
    x = jnp.asarray(record["ops/x"])
    values, scale = quantise_e4m3(x, LINEAR_BLOCK)
    yield "ops/act_quant128/q", np.asarray(values)
    yield "ops/act_quant128/scale", np.asarray(scale)
    yield "ops/act_quant64_inplace", np.asarray(fake_e4m3(x, KV_BLOCK))
    yield "ops/fp4_act_quant_inplace", np.asarray(fake_e2m1(x, INDEX_BLOCK))
    yield "ops/hadamard_index", np.asarray(hadamard(x[:, : model.config.index_head_dim]))
    quantised = fake_e4m3(x, LINEAR_BLOCK).astype(jnp.float32)
    for key, name in PRODUCTS.items():
        weight = packed_matrix(model, name)
        if weight is not None and weight.shape[-1] == x.shape[-1]:
            yield key, np.asarray(decoded_product(quantised, weight))


def packed_matrix(model: Model, name: str) -> BlockScaled | None:
    """The packed matrix with this official name (without `.weight`), or None if the model has no such matrix."""
    places = {
        one: (entry, leaf[number] if entry.stacked else leaf)
        for entry, leaf in zip(layout(model), jax.tree.leaves(model), strict=True)
        for number, one in enumerate(entry.names)
        if one in (f"{name}.weight", f"{name}.scale")
    }
    if len(places) < 2:
        return None
    entry, payload = places[f"{name}.weight"]
    return BlockScaled(payload, places[f"{name}.scale"][1], "e2m1" if entry.dtype == "I8" else "e4m3")


def _kept_rows(matrix: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """A record keeps a matrix, its first rows or its last: the first if they are equal, else the last."""
    first, last = matrix[: len(kept)], matrix[len(matrix) - len(kept) :]
    return first if np.array_equal(first, kept.astype(np.float32)) else last
