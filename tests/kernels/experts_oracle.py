"""Operands of the layer of experts, and what it is in float64, from the bytes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.block_scaled import BlockScaled
from pallas_kernels.mxfp4_experts import Matrices

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
LIMIT = 3.0  # which the products of these operands often pass
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([MAGNITUDES, -MAGNITUDES])


class Rows(NamedTuple):
    x: jax.Array
    picks: jax.Array
    weights: jax.Array
    live: jax.Array


def rows_of(random: np.random.Generator, picks: Any, width: int, live: Any = True) -> Rows:
    """Of sizes that differ, one with an outlier; dead ones are NaN."""
    picks = np.asarray(picks, np.int32)
    live = np.broadcast_to(live, len(picks))
    x = random.standard_normal((len(picks), width)) * np.exp2(random.integers(-3, 1, (len(picks), 1)))
    x[-1, 3] = 30
    x[~live] = np.nan
    weights = random.uniform(0.1, 1, picks.shape).astype(np.float32)
    return Rows(*map(jnp.asarray, (x.astype(BF16), picks, weights, live)))


def matrices(random: np.random.Generator, experts: int, width: int, hidden: int) -> Matrices:
    """Random bytes, with scales under which products are of the size of 1."""

    def stack(out: int, columns: int) -> BlockScaled:
        payload = random.integers(0, 256, (experts, out, columns // 2), np.uint8)
        scales = random.integers(119, 124, (experts, out, columns // 32)).astype(np.uint8)
        return BlockScaled(jnp.asarray(payload), jnp.asarray(scales), "e2m1")

    return Matrices(stack(hidden, width), stack(hidden, width), stack(width, hidden))


def numbers(matrix: BlockScaled, dtype: Any = np.float64) -> np.ndarray:
    """[..., out, in], from the bytes."""
    payload, scales = np.asarray(matrix.payload), np.asarray(matrix.scales)
    codes = np.stack([payload & 15, payload >> 4], axis=-1).reshape(*scales.shape, 32)
    values = E2M1.astype(dtype)[codes] * np.ldexp(1.0, scales.astype(int) - 127).astype(dtype)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def rounded(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(BF16).astype(np.float64)


def seen(x: np.ndarray, quantised: bool) -> np.ndarray:
    """What a matrix sees of bfloat16 rows, float64."""
    if not quantised:
        return x.astype(np.float64)
    blocks = x.astype(np.float64).reshape(len(x), x.shape[1] // 128, 128)
    largest = np.maximum(np.abs(blocks).max(axis=-1, keepdims=True), 1e-4)
    scale = np.exp2(np.ceil(np.log2(largest / 448)))
    return ((blocks / scale).astype(E4M3).astype(np.float64) * scale).reshape(x.shape)


def hidden_of(
    rows: Rows, gate: np.ndarray, up: np.ndarray, quantised: bool = False, rounds: bool | None = None
) -> np.ndarray:
    """float64 [N, k, f], zeros for pairs that are none; `rounds` gate and up as the kernel does where `quantised`."""
    rounds = quantised if rounds is None else rounds
    x, picks, weights, live = map(np.asarray, rows)
    x = seen(x, quantised)
    hidden = np.zeros((*picks.shape, gate.shape[1]))
    for expert in range(len(gate)):
        row, pick = np.nonzero((picks == expert) & live[:, None])
        g, u = (x[row] @ matrix[expert].astype(np.float64).T for matrix in (gate, up))
        g, u = (rounded(g), rounded(u)) if rounds else (g, u)
        g, u = np.minimum(g, LIMIT), np.clip(u, -LIMIT, LIMIT)
        hidden[row, pick] = rounded(weights[row, pick, None] * g / (1 + np.exp(-g)) * u)
    return hidden


def outputs_of(rows: Rows, hidden: np.ndarray, down: np.ndarray, quantised: bool = False) -> np.ndarray:
    """float64 [N, k, d] of the hidden vectors of live pairs, rounded too."""
    out = np.zeros((*hidden.shape[:2], down.shape[1]))
    for expert in range(len(down)):
        row, pick = np.nonzero((np.asarray(rows.picks) == expert) & np.asarray(rows.live)[:, None])
        out[row, pick] = rounded(seen(hidden[row, pick], quantised) @ down[expert].astype(np.float64).T)
    return out


def errors(got: Any, want: np.ndarray) -> np.ndarray:
    """Of each vector, relative to its norm."""
    norms = np.linalg.norm(want, axis=-1)
    return np.linalg.norm(np.asarray(got, np.float64) - want, axis=-1) / np.where(norms == 0, 1, norms)


def error(got: Any, want: np.ndarray) -> float:
    """Of the worst vector."""
    return float(np.max(errors(got, want)))


def typical_error(got: Any, want: np.ndarray) -> float:
    """Root mean square over vectors: in one, the largest number may lie between two of bfloat16 and go either way."""
    return float(np.sqrt(np.mean(errors(got, want) ** 2)))


def of_pairs(out: Any, rows: Rows) -> np.ndarray:
    """[N, k, ...] of what a kernel gives for pairs."""
    return np.asarray(out).reshape(*rows.picks.shape, -1)
