"""States addressed by position: chunks, rollbacks and neighbours change nothing that a later token can see.

Each configuration compiles two programs: a decoding step of WIDTH rows, which writes its rings and then reads them, and
a prefill step of CHUNK rows, more than any ring holds. All else is data: who starts where, and how many rows live.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracle import OVERLAP_RATIO, Array, Weights, margins, target
from random_model import random_model
from tiny_configs import CONFIGS, NEAR_TIE, TOLERANCE, oracle_weights, random_ids, smallest_margins

from dspark_jax import Model, ModelConfig
from dspark_jax.model import cache as cache_module
from dspark_jax.model.cache import (
    DrafterCache,
    TargetCache,
    drafter_cache,
    ring_positions,
    target_cache,
    write,
    write_ring,
)
from dspark_jax.model.drafter import DraftStep, draft_step, remember
from dspark_jax.model.rows import Rows, Setting
from dspark_jax.model.target import lm_logits, target_step

BATCH, WIDTH, CHUNK, CAPACITY = 8, 8, 144, 288
WITH_DRAFTER = [name for name, config in CONFIGS.items() if config.drafter]

State = dict[str, Array]
few = settings(max_examples=4, derandomize=True, deadline=None, database=None, phases=[Phase.generate])


# Programs ------------------------------------------------------------------------------------------------------------


@jax.jit
def target_program(
    model: Model, setting: Setting, rows: Rows, cache: TargetCache
) -> tuple[jax.Array, jax.Array, TargetCache]:
    assert model.target is not None
    step = target_step(model.target, model.vocabulary, rows, cache, setting)
    return lm_logits(model.vocabulary, step.hidden), step.taps, step.cache


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # takes longer to compile than to run
def drafter_program(
    model: Model, setting: Setting, rows: Rows, taps: jax.Array, cache: DrafterCache, anchor: jax.Array
) -> tuple[DrafterCache, DraftStep]:
    """Remembers the live rows, then drafts from `anchor` at the position after them."""
    assert model.drafter is not None
    cache = remember(model.drafter, cache, taps, rows, setting)
    live = jnp.ones(rows.count.shape, bool)
    return cache, draft_step(model.drafter, model.vocabulary, cache, anchor, rows.last + 1, live, setting)


@dataclass
class Tally:
    """Compared cases, and those among them whose difference a near-tie explains."""

    compared: int = 0
    discarded: int = 0


@dataclass(frozen=True)
class Step:
    """Logits and taps [B, T, ...] side by side, and the cache after the step."""

    outputs: Array
    cache: TargetCache


@dataclass(frozen=True, repr=False)
class Lab:
    """One model, the programs it runs in, and how cases of it are judged."""

    config: ModelConfig
    model: Model
    setting: Setting
    weights: Weights
    tally: Tally

    def empty(self, width: int = WIDTH) -> TargetCache:
        return target_cache(self.config, self.model.numerics, BATCH, CAPACITY, width)

    def run(self, cache: TargetCache, ids: Array, start: Array, count: Array) -> Step:
        logits, taps, cache = target_program(self.model, self.setting, rows_of(ids, start, count), cache)
        return Step(np.concatenate([logits, taps], axis=-1), cache)

    def feed(self, cache: TargetCache, tokens: Array, start: Array, count: Array, width: int = WIDTH) -> Step:
        """The tokens at start ... start + count - 1 of each sequence."""
        return self.run(cache, rows_at(tokens, start, width), start, count)

    def prefill(self, tokens: Array, length: Array) -> TargetCache:
        cache, start = self.empty(), np.zeros_like(length)
        while (start < length).any():
            count = np.clip(length - start, 0, CHUNK)
            cache = self.feed(cache, tokens, start, count, CHUNK).cache
            start = start + count
        return cache

    def single_steps(self, cache: TargetCache, tokens: Array, start: Array, stop: Array) -> Step:
        """One token at a time from `start` to `stop`; outputs [B, T, ...] of the longest stretch, zero where unused."""
        outputs = []
        for number in range(max(1, (stop - start).max())):
            step = self.feed(cache, tokens, start + number, (start + number < stop).astype(np.int32))
            cache = step.cache
            outputs.append(np.where((start + number < stop)[:, None], step.outputs[:, 0], 0))
        return Step(np.stack(outputs, axis=1), cache)

    def judge(self, what: str, wrong: Array, tokens: Array, first: Array, stop: Array) -> None:
        """Fails for a wrong row whose choices between `first` and `stop` had clear margins, and counts the others."""
        self.tally.compared += len(wrong)
        for row in np.flatnonzero(wrong):
            gaps = smallest_margins(target(self.config, self.weights, tokens[row, : stop[row]]))[first[row] :]
            assert gaps.min() < NEAR_TIE, f"{what}: row {row}, positions {first[row]} to {stop[row]}"
            self.tally.discarded += 1


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    tally = Tally()
    yield tally
    assert tally.discarded <= 0.05 * tally.compared, tally


def make_lab(name: str, tmp_path_factory: pytest.TempPathFactory, tally: Tally) -> Lab:
    model = random_model(CONFIGS[name])
    weights = oracle_weights(model, tmp_path_factory.mktemp("state") / name)
    return Lab(model.config, model, model.setting(CAPACITY), weights, tally)


@pytest.fixture(scope="module", params=CONFIGS)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tally: Tally) -> Lab:
    return make_lab(request.param, tmp_path_factory, tally)


def rows_of(ids: Array, start: Array, count: Array) -> Rows:
    return Rows(*(jnp.asarray(values, jnp.int32) for values in (ids, start, count)))


def rows_at(tokens: Array, start: Array, width: int) -> Array:
    """tokens[b, start[b] ... start[b] + width - 1], with any id behind the end."""
    at = np.minimum(start[:, None] + np.arange(width), tokens.shape[1] - 1)
    return np.take_along_axis(tokens, at, axis=1)


# What can be seen ----------------------------------------------------------------------------------------------------


def visible_state(cache: TargetCache, length: Array, config: ModelConfig) -> State:
    """All that tokens at positions `length` [B] and later may read, by position; everything else is zero."""
    state = {}
    for number, (layer, ratio) in enumerate(zip(cache.layers, config.layer_ratios, strict=True)):
        state[f"{number}/window"] = held(layer.window, length - config.sliding_window + 1, length)
        for name in ("attention", "index"):
            part = getattr(layer, name)
            if part is not None:
                entries = np.asarray(part.entries)
                state[f"{number}/{name}/ring"] = held(part.ring, first_pooled(length, ratio), length)
                seen = np.arange(entries.shape[1]) < (length // ratio)[:, None]
                state[f"{number}/{name}/entries"] = np.where(seen[..., None], entries, 0)
    return state


def first_pooled(length: Array, ratio: int) -> Array:
    """The first position whose row is pooled into an entry that `length` tokens have not completed."""
    return length // ratio * ratio - (ratio if ratio == OVERLAP_RATIO else 0)


def held(ring: jax.Array, first: Array, stop: Array) -> Array:
    """What a ring holds for positions first ... stop - 1, the newest in front, zero where there is none."""
    values = np.asarray(ring).reshape(*ring.shape[:2], -1)
    position = stop[:, None] - 1 - np.arange(values.shape[1])
    rows = np.take_along_axis(values, (position % values.shape[1])[..., None], axis=1)
    return np.where((position >= np.maximum(first, 0)[:, None])[..., None], rows, 0)


def differs(actual: Array, expected: Array) -> Array:
    """bool [B]: rows with a value off by more than the tolerance, or none at all."""
    width = min(actual.shape[1], expected.shape[1])  # rings of another size hold more rows that nobody needs
    assert not actual[:, width:].any() and not expected[:, width:].any()
    close = np.abs(actual[:, :width] - expected[:, :width]) <= TOLERANCE
    return ~close.reshape(len(close), -1).all(axis=1)


def state_differs(actual: State, expected: State) -> Array:
    assert actual.keys() == expected.keys()
    return np.any([differs(actual[key], expected[key]) for key in actual], axis=0)


def live_rows(outputs: Array, count: Array) -> Array:
    """Outputs [B, T, ...] of the first `count` rows; zero behind them."""
    return np.where((np.arange(outputs.shape[1]) < count[:, None])[..., None], outputs, 0)


def leaves_of(cache: TargetCache | DrafterCache) -> list[Array]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(cache)]


# Chunks --------------------------------------------------------------------------------------------------------------


def per_row[T](values: st.SearchStrategy[T]) -> st.SearchStrategy[list[T]]:
    return st.lists(values, min_size=BATCH, max_size=BATCH)


seeds = st.integers(0, 999)
calls = st.tuples(st.sampled_from([WIDTH, CHUNK]), per_row(st.integers(0, CHUNK)))


def in_chunks(lab: Lab, tokens: Array, length: Array, plan: Iterable[tuple[int, Array]]) -> Step:
    """Runs steps of the planned widths and counts; outputs [B, CHUNK, ...] by position."""
    cache, start, outputs = lab.empty(), np.zeros_like(length), None
    for width, wanted in plan:
        count = np.minimum(wanted, length - start)
        step = lab.feed(cache, tokens, start, count, width)
        outputs = np.zeros((BATCH, CHUNK, step.outputs.shape[-1])) if outputs is None else outputs
        for row in range(BATCH):
            outputs[row, start[row] : start[row] + count[row]] = step.outputs[row, : count[row]]
        cache, start = step.cache, start + count
    assert outputs is not None and (start == length).all()
    return Step(outputs, cache)


def check_chunks(lab: Lab, seed: int, length: Array, plan: list[tuple[int, Array]]) -> None:
    tokens = random_ids(lab.config, BATCH, CHUNK, seed=seed)
    whole = lab.feed(lab.empty(), tokens, np.zeros_like(length), length, CHUNK)
    parts = in_chunks(lab, tokens, length, [*plan, (CHUNK, np.full(BATCH, CHUNK))])
    wrong = differs(parts.outputs, live_rows(whole.outputs, length))
    wrong |= state_differs(*(visible_state(step.cache, length, lab.config) for step in (parts, whole)))
    lab.judge("chunks", wrong, tokens, np.zeros_like(length), length)


@few
@given(seed=seeds, length=per_row(st.integers(1, CHUNK)), plan=st.lists(calls, min_size=1, max_size=4))
def test_any_chunks_give_the_same_result(lab: Lab, seed: int, length: list[int], plan: list) -> None:
    plan = [(width, np.array(counts) % (width + 1)) for width, counts in plan]
    check_chunks(lab, seed, np.array(length), plan)


def test_single_tokens_and_chunks_longer_than_every_ring(lab: Lab) -> None:
    length = CHUNK - np.arange(BATCH)
    ones = [(WIDTH, np.ones(BATCH, int))]
    largest_ring = max(span + WIDTH - 1 for span in (lab.config.sliding_window, *lab.config.layer_ratios))
    assert largest_ring < 136 < CHUNK
    check_chunks(lab, 1, length, [(CHUNK, 100 + np.arange(BATCH)), *ones * 44])
    check_chunks(lab, 2, length, [*ones * 9, (CHUNK, np.full(BATCH, 136))])


# Rollbacks -----------------------------------------------------------------------------------------------------------


def verify(lab: Lab, cache: TargetCache, tokens: Array, start: Array, offered: Array, kept: Array, seed: int) -> Step:
    """A step of `offered` rows: the first `kept` are the true tokens, the others wrong ones."""
    true = rows_at(tokens, start, WIDTH)
    wrong = (
        true + random_ids(lab.config, *true.shape, seed=seed) % (lab.config.vocab_size - 1) + 1
    ) % lab.config.vocab_size
    return lab.run(cache, np.where(np.arange(WIDTH) < kept[:, None], true, wrong), start, offered)


starts = st.one_of(st.integers(0, 24), st.integers(116, 140), st.integers(240, 256))
rounds = st.tuples(seeds, per_row(st.tuples(st.integers(0, WIDTH), st.integers(0, WIDTH - 1))))


@few
@given(seed=seeds, start=per_row(starts), plan=st.lists(rounds, min_size=2, max_size=4))
def test_any_rollbacks_leave_the_state_of_single_steps(lab: Lab, seed: int, start: list[int], plan: list) -> None:
    """Rows that offer nothing take no part in a round, and rounds follow rounds on what rejected rows left behind."""
    tokens = random_ids(lab.config, BATCH, CAPACITY, seed=seed)
    first = length = np.array(start)
    rolled = plain = lab.prefill(tokens, length)
    full = np.full(BATCH, WIDTH)
    for number, counts in [*plan, (0, [(WIDTH, WIDTH - 1)] * BATCH)]:
        offered, kept = np.array(counts).T
        kept = np.where(offered > 0, kept % np.maximum(offered, 1) + 1, 0)
        step = verify(lab, rolled, tokens, length, offered, kept, number)
        reference = lab.single_steps(plain, tokens, length, length + kept)
        rolled, plain, length = step.cache, reference.cache, length + kept
        width = reference.outputs.shape[1]
        wrong = differs(live_rows(step.outputs, kept)[:, :width], reference.outputs)
        wrong |= state_differs(*(visible_state(cache, length, lab.config) for cache in (rolled, plain)))
        lab.judge("rollback", wrong, tokens, first, length)
    following = [lab.feed(cache, tokens, length, full).outputs for cache in (rolled, plain)]
    lab.judge("after rollbacks", differs(*following), tokens, first, length + WIDTH)


def test_rollback_at_every_phase(lab: Lab) -> None:
    """From each of 128 successive positions, across two multiples of 128, a step of eight rows keeps one to eight."""
    tokens, each = random_ids(lab.config, BATCH, CAPACITY, seed=3), 128 // BATCH
    first = 124 + each * np.arange(BATCH)
    base, full, one = lab.prefill(tokens, first), np.full(BATCH, WIDTH), np.ones(BATCH, int)
    for start in (first + phase for phase in range(each)):
        plain = [Step(np.zeros(0), base)]
        for keep in range(1, WIDTH + 1):
            plain.append(lab.feed(plain[-1].cache, tokens, start + keep - 1, one))
            step = verify(lab, base, tokens, start, full, keep * one, seed=keep)
            wrong = differs(step.outputs[:, keep - 1 : keep], plain[-1].outputs[:, :1])
            wrong |= state_differs(*(visible_state(s.cache, start + keep, lab.config) for s in (step, plain[-1])))
            lab.judge(f"keep {keep}", wrong, tokens, first, start + keep)
        base = plain[1].cache


# Sizes of the rings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shorter", "kept"), [(0, True), (1, False)])
@pytest.mark.parametrize("span", [3, 8, 128])
def test_rings_have_no_slot_to_spare(span: int, shorter: int, kept: bool) -> None:
    """A full step is rejected but for its first row, then written again and read: are `span` positions there?"""
    size, start = span + WIDTH - 1 - shorter, 200
    ring = jnp.asarray(ring_positions(size, jnp.array([start - 1])), jnp.float32)
    for first, sign in ((start, -1), (start + 1, 1)):
        rows = rows_of(np.zeros((1, WIDTH)), np.array([first]), np.array([WIDTH]))
        signs = jnp.where(jnp.arange(WIDTH) == 0, 1, sign)
        ring = write_ring(ring, rows, (rows.positions * signs).astype(jnp.float32))
    positions = np.asarray(ring)[0].astype(int)
    needed = start + 1 - np.arange(span)
    assert np.isin(needed, positions).all() == kept


def test_short_rings_lose_what_a_rollback_needs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The planted fault: rings for steps of six rows, and a step of eight of which one is kept.

    In rings that are one row too short a step reads the old ring and its own rows behind it, for which they are just
    long enough; so the first size that fails is two rows too short.
    """
    lab = make_lab("two-streams", tmp_path_factory, Tally())
    tokens = random_ids(lab.config, BATCH, CAPACITY, seed=4)
    start = 124 + np.arange(BATCH)
    states = []
    for width in (WIDTH, WIDTH - 2):
        cache = shortened(lab.prefill(tokens, start), lab.empty(width), start)
        step = verify(lab, cache, tokens, start, np.full(BATCH, WIDTH), np.ones(BATCH, int), seed=0)
        states.append(visible_state(step.cache, start + 1, lab.config))
    plain = lab.feed(lab.prefill(tokens, start), tokens, start, np.ones(BATCH, int))
    reference = visible_state(plain.cache, start + 1, lab.config)
    assert not state_differs(states[0], reference).any()
    lost = {key: differs(states[1][key], reference[key]) for key in reference}
    for key, rows in lost.items():
        ratio = lab.config.layer_ratios[int(key[0])]
        if key.endswith("window"):
            assert rows.all()
        elif key.endswith("ring"):  # the row before a window closes needs all of its span
            np.testing.assert_array_equal(rows, (start + 2) % ratio == 0)
        else:
            assert not rows.any()


def shortened(cache: TargetCache, template: TargetCache, length: Array) -> TargetCache:
    """The newest positions of every ring of `cache`, in the rings of `template`."""

    def copy(ring: jax.Array, like: jax.Array) -> jax.Array:
        if ring.shape == like.shape:
            return ring
        positions = np.asarray(ring_positions(like.shape[1], jnp.asarray(length - 1, jnp.int32)))
        return jnp.asarray(np.asarray(ring)[np.arange(BATCH)[:, None], positions % ring.shape[1]])

    return jax.tree.map(copy, cache, template)


def test_kept_rows_have_slots_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scatter promises unique indices, and no result on a CPU tells if they are not; 17 live rows, ring of six."""
    calls = []
    monkeypatch.setattr(cache_module, "write", lambda *arguments: calls.append(arguments))
    write_ring(jnp.zeros((1, 6)), rows_of(np.zeros((1, 20)), np.array([9]), np.array([17])), jnp.zeros((1, 20)))
    ((_, slots, _, keep),) = calls
    assert np.flatnonzero(keep[0]).tolist() == [*range(11, 17)]
    assert sorted(slots[keep].tolist()) == [*range(6)]


def test_one_row_is_written_like_many() -> None:
    cache, slot, value = jnp.zeros((1, 4, 2)), jnp.array([[2]]), jnp.ones((1, 1, 2))
    for keep in (True, False):
        written = write(cache, slot, value, jnp.array([[keep]]))
        np.testing.assert_array_equal(written[0, :, 0], [0, 0, float(keep), 0])


# Neighbours and leftovers --------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Scene:
    """A prefilled batch of uneven lengths in the middle of decoding."""

    tokens: Array
    length: Array
    cache: TargetCache


@pytest.fixture(scope="module")
def scene(lab: Lab) -> Scene:
    tokens = random_ids(lab.config, BATCH, CAPACITY, seed=5)
    length = np.array([0, 1, 4, 30, 119, 126, 131, CAPACITY - WIDTH])
    return Scene(tokens, length, lab.prefill(tokens, length))


@pytest.mark.parametrize("width", [WIDTH, CHUNK])
def test_dead_rows_write_nothing_and_their_ids_do_not_matter(lab: Lab, scene: Scene, width: int) -> None:
    count = np.array([3, 8, 0, 1, 0, 5, 7, 8])
    ids = rows_at(scene.tokens, scene.length, width)
    dead = np.arange(width) >= count[:, None]
    odd_ids = np.where(dead, np.resize([-1, lab.config.vocab_size + 7, 0], ids.shape), ids)
    step, odd = (lab.run(scene.cache, chosen, scene.length, count) for chosen in (ids, odd_ids))
    np.testing.assert_array_equal(live_rows(odd.outputs, count), live_rows(step.outputs, count))
    for before, after, odd_after in zip(*map(leaves_of, (scene.cache, step.cache, odd.cache)), strict=True):
        np.testing.assert_array_equal(after[count == 0], before[count == 0])
        np.testing.assert_array_equal(odd_after, after)


def test_a_row_is_untouched_by_what_its_neighbours_hold(lab: Lab, scene: Scene) -> None:
    """Some sequences stay as they are, the others get other tokens, lengths and counts, from the prefill on."""
    same = np.isin(np.arange(BATCH), [1, 4, 7])
    other = random_ids(lab.config, BATCH, CAPACITY, seed=6)
    tokens = np.where(same[:, None], scene.tokens, other)
    length = np.where(same, scene.length, np.roll(scene.length, 5))
    busy = np.where(same, WIDTH, np.arange(BATCH) % (WIDTH + 1))
    crowd = lab.feed(lab.prefill(tokens, length), tokens, length, busy)
    quiet = lab.feed(scene.cache, scene.tokens, scene.length, np.full(BATCH, WIDTH))
    np.testing.assert_array_equal(crowd.outputs[same], quiet.outputs[same])
    for left, right in zip(leaves_of(crowd.cache), leaves_of(quiet.cache), strict=True):
        np.testing.assert_array_equal(left[same], right[same])


def test_a_row_has_the_same_bits_wherever_it_is_in_a_step(lab: Lab, scene: Scene) -> None:
    """Why plain and speculative decoding emit the same tokens: one step of eight rows against eight of one."""
    full = np.full(BATCH, WIDTH)
    at_once = lab.feed(scene.cache, scene.tokens, scene.length, full)
    one_by_one = lab.single_steps(scene.cache, scene.tokens, scene.length, scene.length + full)
    np.testing.assert_array_equal(at_once.outputs, one_by_one.outputs)
    for left, right in zip(leaves_of(at_once.cache), leaves_of(one_by_one.cache), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_rollback_leaves_the_other_rows_untouched(lab: Lab, scene: Scene) -> None:
    """Even rows have all their drafts rejected, or none; odd rows have the same bits, and so has the step after."""
    even = np.arange(BATCH) % 2 == 0
    full = np.full(BATCH, WIDTH)
    results = []
    for kept in (np.full(BATCH, 2), np.where(even, 1, 2)):
        first = verify(lab, scene.cache, scene.tokens, scene.length, full, kept, seed=7)
        later = verify(lab, first.cache, scene.tokens, scene.length + kept, np.minimum(full, 6), full, seed=8)
        results.append([first.outputs, later.outputs[:, :6], *leaves_of(later.cache)])
    for left, right in zip(*results, strict=True):
        np.testing.assert_array_equal(left[~even], right[~even])
    assert (results[0][0][even] != results[1][0][even]).any()


def test_what_stale_slots_hold_does_not_matter(lab: Lab, scene: Scene) -> None:
    """Every slot that no token may see is filled with a huge number; the next step has the same bits."""
    full = np.full(BATCH, WIDTH)
    stale = with_stale_slots(lab, scene, 1e6)
    steps = [lab.feed(cache, scene.tokens, scene.length, full) for cache in (scene.cache, stale)]
    np.testing.assert_array_equal(steps[0].outputs, steps[1].outputs)
    states = [visible_state(step.cache, scene.length + WIDTH, lab.config) for step in steps]
    for key in states[0]:
        np.testing.assert_array_equal(states[0][key], states[1][key])


def with_stale_slots(lab: Lab, scene: Scene, value: float) -> TargetCache:
    """The scene's cache with `value` in each slot that `visible_state` leaves out, found by numbering all slots."""
    leaves, structure = jax.tree.flatten(scene.cache)
    ends = np.cumsum([leaf.size for leaf in leaves])
    numbers = [np.arange(end - leaf.size, end).reshape(leaf.shape) + 1 for leaf, end in zip(leaves, ends, strict=True)]
    state = visible_state(jax.tree.unflatten(structure, numbers), scene.length, lab.config)
    seen = np.concatenate([part.ravel() for part in state.values()])
    kept = [np.where(np.isin(n, seen), leaf, np.float32(value)) for n, leaf in zip(numbers, leaves, strict=True)]
    return jax.tree.unflatten(structure, map(jnp.asarray, kept))


# The drafter's context -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class DraftLab:
    """A model with a drafter, and features of a target that never ran."""

    model: Model
    setting: Setting
    tally: Tally

    def empty(self) -> DrafterCache:
        return drafter_cache(self.model.config, self.model.numerics, BATCH)

    def run(
        self, cache: DrafterCache, taps: Array, start: Array, count: Array, anchor: Array
    ) -> tuple[DrafterCache, DraftStep]:
        at = np.minimum(start[:, None] + np.arange(WIDTH), taps.shape[1] - 1)
        rows = rows_of(np.zeros((BATCH, WIDTH)), start, count)
        chosen = jnp.asarray(np.take_along_axis(taps, at[..., None], axis=1))
        return drafter_program(self.model, self.setting, rows, chosen, cache, jnp.asarray(anchor))


@pytest.fixture(scope="module", params=WITH_DRAFTER)
def drafts(request: pytest.FixtureRequest, tally: Tally) -> DraftLab:
    model = random_model(CONFIGS[request.param])
    return DraftLab(model, model.setting(CAPACITY), tally)


@few
@given(seed=seeds, plan=st.lists(per_row(st.integers(0, WIDTH)), min_size=1, max_size=6))
def test_the_drafter_remembers_many_rows_like_single_ones(drafts: DraftLab, seed: int, plan: list) -> None:
    rng = np.random.default_rng(seed)
    taps = rng.standard_normal((BATCH, WIDTH * len(plan), drafts.model.config.taps_width), np.float32)
    many = single = drafts.empty()
    start = np.zeros(BATCH, int)
    for counts in map(np.array, plan):
        anchor = random_ids(drafts.model.config, BATCH, seed=seed + start[0])
        many, expected = drafts.run(many, taps, start, counts, anchor)
        for number in range(counts.max()):
            single, _ = drafts.run(single, taps, np.minimum(start + number, start + counts), number < counts, anchor)
        start = start + counts
        single, actual = drafts.run(single, taps, start, np.zeros(BATCH, int), anchor)
        judge_drafts(drafts.tally, expected, actual)


def judge_drafts(tally: Tally, expected: DraftStep, actual: DraftStep) -> None:
    wrong = (np.asarray(expected.ids) != np.asarray(actual.ids)).any(axis=1)
    for name in ("logits", "base_logits", "confidence", "hidden"):
        wrong |= differs(*(np.asarray(getattr(step, name)) for step in (actual, expected)))
    tally.compared += len(wrong)
    tally.discarded += int(wrong.sum())
    assert (margins(np.asarray(expected.logits))[wrong].min(axis=1) < NEAR_TIE).all()
