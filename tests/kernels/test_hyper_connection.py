"""Hyper-connection sites: every implementation against float64 NumPy, rows that depend on no other, and lowering."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hyper_connection
from pallas_kernels.hyper_connection import Constants, mosaic, reference
from pallas_kernels.hyper_connection.mosaic import Tiling

N, M = 4, 24
CONSTANTS = Constants(norm_eps=1e-6, iterations=20, eps=1e-6)
ON_GPU = jax.default_backend() == "gpu"
TOLERANCE = {"float32": 3e-6, "bfloat16": 3e-3}  # relative, of a whole array

Operands = tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array] | None, jax.Array, jax.Array, jax.Array]


def operands(rows: int, d: int, dtype: Any, update: bool) -> Operands:
    """Random, and different in every run; streams differ in size by orders of magnitude."""
    keys = iter(jax.random.split(jax.random.key(np.random.randint(2**31)), 9))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape)

    streams = (normal(rows, N, d) * jnp.exp(2 * normal(rows, N, 1))).astype(dtype)
    comb = jax.nn.softmax(2 * normal(rows, N, N), axis=-2)
    updates = (normal(rows, d).astype(dtype), 2 * jax.nn.sigmoid(normal(rows, N)), comb)
    fn, base = normal(M, N * d) / d**0.5, normal(M)
    return streams, updates if update else None, fn, base, jnp.array([0.5, 1.5, 2.0])


def written(operands: Operands) -> np.ndarray:
    """The streams after their update, in float64."""
    streams, update, *_ = jax.tree.map(lambda x: np.asarray(x, np.float64), operands)
    if update is None:
        return streams
    y, post, comb = update
    return post[..., None] * y[:, None] + np.einsum("tjk,tjd->tkd", comb, streams)


def mixes(streams: jax.Array, operands: Operands) -> list[np.ndarray]:
    """What is read from `streams` and the mixes for the next update, in float64."""
    streams, fn, base, scale = (np.asarray(x, np.float64) for x in (streams, *operands[2:]))
    flat = streams.reshape(len(streams), -1)
    mixed = flat @ fn.T / np.sqrt((flat**2).mean(axis=-1, keepdims=True) + CONSTANTS.norm_eps)
    logits = mixed * np.repeat(scale, [N, N, N * N]) + base
    shares = 1 / (1 + np.exp(-logits[:, : 2 * N]))
    comb = np.exp(logits[:, 2 * N :]).reshape(-1, N, N)
    comb = comb / comb.sum(axis=2, keepdims=True) + CONSTANTS.eps
    for turn in range(2 * CONSTANTS.iterations - 1):
        comb = comb / (comb.sum(axis=1 + turn % 2, keepdims=True) + CONSTANTS.eps)
    x = np.einsum("tj,tjd->td", shares[:, :N] + CONSTANTS.eps, streams)
    return [x, 2 * shares[:, N:], comb]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run in the interpreter, one block a cluster, for it knows no distributed shared memory."""
    if ON_GPU:
        pytest.skip("a GPU runs the kernel itself")
    monkeypatch.setattr(plgpu, "kernel", functools.partial(plgpu.kernel, interpret=plgpu.InterpretGPUParams()))
    mosaic.site.clear_cache()
    yield
    mosaic.site.clear_cache()


def kernel(operands: Operands, rows: int) -> tuple[jax.Array, ...]:
    """On a GPU with the clusters that models use, in the interpreter with one block."""
    return mosaic.site(*operands, CONSTANTS, Tiling(mosaic.BLOCKS if ON_GPU else 1, rows))


def through_xla(operands: Operands) -> tuple[jax.Array, ...]:
    streams, update, *weights = operands
    if update is None:
        return hyper_connection.read(streams, *weights, CONSTANTS, implementation="xla")
    y, *site = update
    return hyper_connection.write_then_read(y, streams, *site, *weights, CONSTANTS, implementation="xla")


def assert_close(results: tuple[jax.Array, ...], operands: Operands) -> None:
    """Mixes are those of the streams that were written: one that rounds the other way changes them all."""
    *streams, x, post, comb = results
    after = streams[0] if streams else operands[0]
    for result, expected in zip((after, x, post, comb), [written(operands), *mixes(after, operands)], strict=True):
        error = np.linalg.norm(np.asarray(result, np.float64) - expected) / np.linalg.norm(expected)
        assert error < TOLERANCE[result.dtype.name]


def bits(results: tuple[jax.Array, ...], rows: slice) -> list[bytes]:
    return [np.asarray(x[rows]).tobytes() for x in results]


@pytest.mark.parametrize("dtype, update", [(jnp.float32, False), (jnp.bfloat16, True)])
def test_xla_computes_what_numpy_does(dtype: Any, update: bool) -> None:
    case = operands(6, 128, dtype, update)
    assert_close(through_xla(case), case)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "total, rows, dtype, update",
    [(1, 2, jnp.bfloat16, True), (3, 2, jnp.float32, False), (5, 4, jnp.bfloat16, True)],
)
def test_the_kernel_does_too(total: int, rows: int, dtype: Any, update: bool) -> None:
    """Full tiles of rows, cut ones, and fewer rows than a tile has."""
    case = operands(total, 256 if rows == 2 else 128, dtype, update)
    assert_close(kernel(case, rows), case)


@pytest.mark.skipif(not ON_GPU, reason="clusters need a Hopper GPU")
@pytest.mark.parametrize(  # no more: to compile one takes 4 s for 2 rows a cluster and 9 s for 4
    "total, rows, dtype, update",
    [(6, 2, jnp.bfloat16, True), (5, 4, jnp.float32, True), (192, 4, jnp.bfloat16, False)],
)
def test_the_kernel_in_clusters_does_too(total: int, rows: int, dtype: Any, update: bool) -> None:
    case = operands(total, 4096, dtype, update)
    assert_close(kernel(case, rows), case)


@pytest.mark.usefixtures("interpreted")
def test_a_row_depends_on_no_other_and_on_no_tiling() -> None:
    """Alone, among others and among NaN, in another place, and in tiles of another size: the same bits."""
    case = operands(5, 128, jnp.bfloat16, update=True)
    together = kernel(case, 2)
    for row in (0, 3):
        streams, update = jax.tree.map(lambda x, row=row: x.at[:].set(jnp.nan).at[row].set(x[row]), case[:2])
        among_nan = kernel((streams, update, *case[2:]), 2)
        assert bits(among_nan, slice(row, row + 1)) == bits(together, slice(row, row + 1))
        assert all(jnp.isnan(x[1]).all() for x in among_nan)
    flipped = kernel((*jax.tree.map(lambda x: x[::-1], case[:2]), *case[2:]), 2)
    assert bits(tuple(x[::-1] for x in flipped), slice(None)) == bits(together, slice(None))
    assert bits(kernel(case, 4), slice(None)) == bits(together, slice(None))


@pytest.mark.parametrize(
    "total, dtype, update", [(6, jnp.bfloat16, True), (6, jnp.float32, False), (48, jnp.bfloat16, False)]
)
def test_it_lowers_for_cuda_at_the_size_of_flash(total: int, dtype: Any, update: bool) -> None:
    def abstract(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, total, *shape), dtype)

    d, weights = (
        4096,
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands(1, 4096, dtype, False)[2:]),
    )
    streams, y, site = abstract(N, d, dtype=dtype), abstract(d, dtype=dtype), (abstract(N), abstract(N, N))
    ask = {"constants": CONSTANTS, "implementation": "mosaic"}
    if update:
        traced = jax.jit(functools.partial(hyper_connection.write_then_read, **ask)).trace(y, streams, *site, *weights)
    else:
        traced = jax.jit(functools.partial(hyper_connection.read, **ask)).trace(streams, *weights)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_the_kernel_has_the_gradient_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, (y, *site), *weights = operands(2, 1024, jnp.float32, update=True)

    def stand_in(*arguments: Any) -> tuple[jax.Array, ...]:
        """Of the kernel, whose results are right but have no derivative."""
        streams, (y, *site), *weights, constants, _ = jax.lax.stop_gradient(arguments[:-2]) + arguments[-2:]
        return hyper_connection.write_then_read(y, streams, *site, *weights, constants, implementation="xla")

    def loss(implementation: Any, *arguments: jax.Array) -> jax.Array:
        results = hyper_connection.write_then_read(*arguments, CONSTANTS, implementation=implementation)
        return sum(jnp.sum(jnp.sin(x)) for x in results)

    monkeypatch.setattr(mosaic, "site", stand_in)
    arguments = y, streams, *site, *weights
    ours, theirs = (
        jax.jit(jax.grad(functools.partial(loss, name), range(7)))(*arguments) for name in ("mosaic", "xla")
    )
    for one, other in zip(ours, theirs, strict=True):  # as arrays: single values are small differences of large ones
        assert np.linalg.norm(one - other) < 2e-3 * np.linalg.norm(other)


@pytest.mark.parametrize(
    "n, d, reason",
    [(2, 1024, "it takes 4 streams, and these are 2"), (4, 96, "multiples of 1024 channels, and these are 96")],
)
def test_what_the_kernel_cannot_take_is_refused_with_the_reason(n: int, d: int, reason: str) -> None:
    shapes = (1, n, d), ((2 + n) * n, n * d), ((2 + n) * n,), (3,)
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    ask = functools.partial(hyper_connection.read, constants=CONSTANTS)
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(functools.partial(ask, implementation="mosaic"), *operands)
    x, _, _ = jax.eval_shape(ask, *operands)
    assert x.shape == (1, d)


def test_written_streams_are_rounded_once() -> None:
    streams, update, *_ = operands(3, 128, jnp.bfloat16, update=True)
    assert update is not None
    y, post, comb = update
    written = jax.jit(reference.write)(y, streams, post, comb)
    exact = reference.expand(y, streams, post, comb)
    assert bool(jnp.all(written == jax.lax.reduce_precision(exact, 8, 7).astype(jnp.bfloat16)))
