"""Masters: which weights they are, that a model with them computes what is released, and what their gradients are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import QUICK
from random_model import random_model

from dspark_jax.config import ModelConfig
from dspark_jax.decoding.forward import forward
from dspark_jax.errors import RequestError
from dspark_jax.formats import mxfp4
from dspark_jax.model.drafter import main_features
from dspark_jax.model.model import Model
from dspark_jax.training.parameters import Scope, masters, merge, names_in, release, weights_of
from pallas_kernels.block_scaled import BLOCKS, BlockScaled, Format, Master, encode


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(ModelConfig.tiny())


@pytest.fixture(scope="module")
def drafter() -> Model:
    return random_model(ModelConfig.tiny(), parts=("drafter",))


class TestEncoding:
    @pytest.mark.parametrize("format", BLOCKS)
    @pytest.mark.parametrize("shape", [(130, 160), (3, 4, 64)])
    def test_every_value_goes_to_the_nearest_of_its_grid(self, format: Format, shape: tuple[int, ...]) -> None:
        values = jax.random.normal(jax.random.key(1), shape) * jnp.exp(3 * jax.random.normal(jax.random.key(2), shape))
        found = np.asarray(encode(values, format).decode())
        block_rows, block_columns = BLOCKS[format]
        for index in np.ndindex(*shape[:-2], -(-shape[-2] // block_rows), -(-shape[-1] // block_columns)):
            rows = slice(index[-2] * block_rows, (index[-2] + 1) * block_rows)
            columns = slice(index[-1] * block_columns, (index[-1] + 1) * block_columns)
            block = np.asarray(values)[*index[:-2], rows, columns].astype(np.float64)
            np.testing.assert_array_equal(found[*index[:-2], rows, columns], nearest(block, format))

    @pytest.mark.parametrize("format", BLOCKS)
    def test_what_was_decoded_encodes_to_the_same_numbers(self, format: Format) -> None:
        codes = jax.random.randint(jax.random.key(3), (4, 128, 256), 0, 0x7F).astype(jnp.uint8)
        payload = codes if format == "e4m3" else codes[..., :128] | (codes[..., 128:] << 4)
        shape = (4, 1, 2) if format == "e4m3" else (4, 128, 8)
        scales = jax.random.randint(jax.random.key(4), shape, 10, 240).astype(jnp.uint8)
        matrix = BlockScaled(payload, scales, format)
        np.testing.assert_array_equal(encode(matrix.decode(), format).decode(), matrix.decode())

    @pytest.mark.parametrize("format", BLOCKS)
    def test_the_largest_value_of_a_block_may_use_the_whole_grid(self, format: Format) -> None:
        largest = {"e4m3": 448.0, "e2m1": 6.0}[format]
        row = jnp.zeros((1, 32)).at[0, 3].set(-largest / 1024)
        assert encode(row, format).scales.item() == 127 - 10
        assert encode(row, format).decode()[0, 3] == -largest / 1024
        assert encode(jnp.zeros((1, 32)), format).decode().tolist() == [[0.0] * 32]

    def test_it_stores_what_the_codec_of_the_host_stores(self) -> None:
        values = jax.random.normal(jax.random.key(5), (64, 96))
        payload, scales = mxfp4.quantise(np.asarray(values))
        np.testing.assert_array_equal(encode(values, "e2m1").payload, payload.view(np.uint8))
        np.testing.assert_array_equal(encode(values, "e2m1").scales, scales)


def nearest(block: np.ndarray, format: Format) -> np.ndarray:
    """By exhaustion: the grid of the smallest power of two that holds the block, ties to the even code."""
    if format == "e2m1":
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    else:
        codes = np.arange(127)
        exponent, fraction = codes >> 3, (codes & 7) / 8
        grid = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7))
    scale = next(2.0**e for e in range(-126, 128) if np.abs(block).max() <= grid[-1] * 2.0**e)
    distance = np.abs(np.abs(block)[..., None] / scale - grid)
    tied = distance == distance.min(axis=-1, keepdims=True)
    best = np.where(tied.sum(axis=-1) == 1, tied.argmax(axis=-1), (tied & (np.arange(len(grid)) % 2 == 0)).argmax(-1))
    return (np.sign(block) * grid[best] * scale).astype(np.float32)


class TestScopes:
    def test_each_holds_the_one_before(self, drafter: Model) -> None:
        heads, non_expert, full = (set(names_in(drafter, scope)) for scope in ("heads", "non_expert", "full"))
        assert heads == {"drafter.markov_head.markov_w1", "drafter.markov_head.markov_w2", "drafter.confidence"}
        assert heads < non_expert < full
        assert full - non_expert == {f"drafter.stages.{s}.ffn.experts.w{w}" for s in range(2) for w in (1, 2, 3)}

    def test_full_is_every_weight_of_the_drafter_and_none_of_the_target(self, model: Model) -> None:
        drafter = {name for name, _ in weights_of(model) if name.startswith("drafter.")}
        assert set(names_in(model, "full")) == drafter

    def test_no_drafter_and_no_scope_are_refused(self) -> None:
        target = random_model(ModelConfig.tiny(), parts=("target",))
        with pytest.raises(RequestError, match="needs a drafter"):
            names_in(target, "heads")
        with pytest.raises(RequestError, match="scope is 'all'"):
            names_in(target, "all")  # type: ignore[arg-type]


class TestMergeAndRelease:
    def test_untouched_masters_give_the_model_that_they_came_from(self, drafter: Model) -> None:
        released = release(drafter, masters(drafter, names_in(drafter, "full")))
        for (name, before), (_, after) in zip(weights_of(drafter), weights_of(released), strict=True):
            np.testing.assert_array_equal(numbers(before.get_value()), numbers(after.get_value()), err_msg=name)
            assert jax.tree.map(lambda a: (a.shape, a.dtype), before.get_value()) == jax.tree.map(
                lambda a: (a.shape, a.dtype), after.get_value()
            )

    @pytest.mark.parametrize("scope", ["heads", "full"])
    def test_what_is_released_computes_what_was_trained(self, drafter: Model, scope: Scope) -> None:
        names = names_in(drafter, scope)
        moved = {
            name: master + 0.01 * jnp.std(master) * jax.random.normal(jax.random.key(n), master.shape)
            for n, (name, master) in enumerate(masters(drafter, names).items())
        }
        trained, released = merge(drafter, moved), release(drafter, moved)
        for (name, one), (_, other) in zip(weights_of(trained), weights_of(released), strict=True):
            np.testing.assert_array_equal(numbers(one.get_value()), numbers(other.get_value()), err_msg=name)

    def test_a_merged_model_is_a_model(self, model: Model) -> None:
        merged = merge(model, masters(model, [name for name, _ in weights_of(model) if "layers.0" in name]))
        ids = [[5, 6, 7, 8]]
        np.testing.assert_array_equal(forward(merged, ids).logits, forward(model, ids).logits)

    def test_gradients_pass_straight_through_the_rounding(self, drafter: Model) -> None:
        taps = jax.random.normal(jax.random.key(0), (1, 3, drafter.config.taps_width))
        setting = drafter.setting(16)

        @lambda f: jax.jit(f, compiler_options=QUICK)
        @jax.grad
        def slope(parameters: dict[str, jax.Array]) -> jax.Array:
            weights = merge(drafter, parameters).drafter
            assert weights is not None
            return jnp.sum(main_features(weights, taps, setting))

        parameters = masters(drafter, ["drafter.main_proj", "drafter.main_norm"])
        found = slope(parameters)
        assert set(found) == set(parameters)
        dense = jax.grad(lambda proj: jnp.sum(plain_features(proj, parameters["drafter.main_norm"], taps)))
        np.testing.assert_allclose(found["drafter.main_proj"], dense(parameters["drafter.main_proj"]), atol=1e-5)

    def test_frozen_packed_weights_pass_gradients_to_their_input(self, drafter: Model) -> None:
        setting = drafter.setting(16)
        assert drafter.drafter is not None
        weights = drafter.drafter
        taps = jax.random.normal(jax.random.key(0), (1, 1, drafter.config.taps_width))
        slope = jax.grad(lambda taps: jnp.sum(main_features(weights, taps, setting)))(taps)
        dense = jax.grad(
            lambda taps: jnp.sum(
                plain_features(weights.main_proj.get_value().decode(), weights.main_norm[...].astype(jnp.float32), taps)
            )
        )(taps)
        assert jnp.any(slope != 0)
        np.testing.assert_allclose(slope, dense, atol=1e-5)


def plain_features(projection: jax.Array, norm: jax.Array, taps: jax.Array) -> jax.Array:
    x = taps @ projection.T
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * norm


def numbers(value: jax.Array | BlockScaled | Master) -> np.ndarray:
    return np.asarray(value.decode() if isinstance(value, BlockScaled | Master) else value, np.float32)
