"""What only a GPU can show. Run `JAX_PLATFORMS=cuda,cpu pytest -n 0 -s tests/test_gpu.py` on a machine that has one."""

import re
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from random_model import random_model
from safetensors.numpy import load_file
from tiny_configs import random_ids

import dspark_jax
from dspark_jax import Request
from dspark_jax.bench.generate import bench_generate
from dspark_jax.bench.report import RUNS
from dspark_jax.bench.workload import Workload
from dspark_jax.config import ModelConfig
from dspark_jax.crosscheck.compare import compare
from dspark_jax.decoding.forward import Forward
from dspark_jax.decoding.programs import finish, start
from dspark_jax.decoding.sampling import Sampling
from dspark_jax.formats import e4m3, mxfp4
from dspark_jax.model.indexer import top_entries
from dspark_jax.model.model import Model
from dspark_jax.model.numerics import PRESETS, Numerics
from dspark_jax.placement import fetch
from pallas_kernels.block_scaled import BlockScaled

TINY_A = GOLDEN / "tiny-a"
pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU, and JAX_PLATFORMS=cuda,cpu")


def test_packed_weights_decode_to_the_bit() -> None:
    """All FP8 codes times all scales, and all FP4 codes times all scales, float32 subnormals included."""
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    codes = np.repeat(np.repeat(finite[None], 256, axis=0), 128, axis=0)
    scales = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 2, axis=1)
    codes = np.pad(codes[: 255 * 128], [(0, 0), (0, 2)])
    ours = jax.jit(BlockScaled.decode)(BlockScaled(jnp.asarray(codes), jnp.asarray(scales), "e4m3"))
    assert np.array_equal(np.asarray(ours).view(np.uint32), e4m3.dequantise(codes, scales).view(np.uint32))

    packed = np.tile(np.arange(16, dtype=np.uint8) | np.arange(15, -1, -1, dtype=np.uint8) << 4, (255, 1))
    scales = np.arange(255, dtype=np.uint8)[:, None]
    ours = jax.jit(BlockScaled.decode)(BlockScaled(jnp.asarray(packed), jnp.asarray(scales), "e2m1"))
    assert np.array_equal(np.asarray(ours).view(np.uint32), mxfp4.dequantise(packed, scales).view(np.uint32))


def test_golden_records_compare_clean(golden: Path) -> None:
    report = compare(golden, golden / "expected.safetensors")
    rows = {row.key: row for row in report.rows}
    for key in ("exact/prefill_logits", "exact/decode/logits", "exact/draft/logits", "inference/short/hc_streams"):
        print(f"\n{golden.name} {key}: max abs {rows[key].max_abs:.1e} relative {rows[key].relative:.1e}", end="")
    assert report.ok, [row for row in report.rows if row.judged and not row.ok]


@pytest.mark.parametrize("numerics", ["float32", "bfloat16", "official"])
def test_every_draft_length_gives_the_same_tokens(golden: Path, numerics: str) -> None:
    model = dspark_jax.load(golden, numerics=numerics)
    recorded = load_file(golden / "expected.safetensors")
    prompts = [recorded[f"exact/{name}/prompt_ids"].tolist() for name in ("greedy", "loop", "loop_tiny")]
    all_tokens = [
        dspark_jax.generate(model, prompts, max_new_tokens=220, draft_tokens=k, stop_ids=()).tokens
        for k in range(model.block_size + 1)
    ]
    assert all(tokens == all_tokens[0] for tokens in all_tokens)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("axis", ["data", "expert", "tensor"])
def test_two_gpus_give_the_logits_of_one(axis: str) -> None:
    model = dspark_jax.load(TINY_A, mesh=dspark_jax.make_mesh(**{axis: 2}))
    ids = random_ids(model.config, 2, 40, seed=0)
    ours, expected = (
        fetch(dspark_jax.forward(m, ids, internals=True, chunk=16)) for m in (model, dspark_jax.load(TINY_A))
    )
    difference = np.abs(ours.logits - expected.logits).max() / np.abs(expected.logits).max()
    print(f"\n{axis}: logits differ by {difference:.1e} relative", end="")
    assert difference <= 1e-5
    for layer, other in zip(ours.seen.layers, expected.seen.layers, strict=True):
        np.testing.assert_array_equal(layer.routing.picks, other.routing.picks)


@pytest.mark.parametrize("numerics", ["float32", "bfloat16"])
def test_a_sampled_row_has_the_same_bits_in_any_company(numerics: str) -> None:
    """One program: alone or among others, in another place, started later; log-probabilities equal to the bit."""
    model = dspark_jax.load(TINY_A, numerics=numerics)
    rng = np.random.default_rng(0)
    requests = [
        Request(
            rng.integers(0, 512, 1 + 3 * i).tolist(),
            40,
            temperature=[1.0, 0.0, 0.7][i % 3],
            top_p=[1.0, 0.9][i % 2],
            seed=i,
            stop_ids=(),
        )
        for i in range(8)
    ]
    done = dict(dspark_jax.stream(model, requests, 3, logprobs=True))
    for order in ([7, 2, 4], [5], [3, 6, 0, 1, 7]):
        again = dict(dspark_jax.stream(model, [requests[i] for i in order], 3, logprobs=True))
        assert [again[number] for number in range(len(order))] == [done[i] for i in order]


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("axis", ["data", "expert", "tensor"])
def test_two_gpus_give_the_tokens_of_one(axis: str) -> None:
    """Greedy and sampled rows; a greedy row may part where two tokens are as good as equal, and then says so."""
    model, alone = dspark_jax.load(TINY_A, mesh=dspark_jax.make_mesh(**{axis: 2})), dspark_jax.load(TINY_A)
    prompts, temperatures = random_ids(model.config, 4, 12, seed=1).tolist(), [0.0, 0.0, 1.0, 0.6]
    ours, expected = (
        dspark_jax.generate(m, prompts, 100, temperature=temperatures, seed=3, stop_ids=()) for m in (model, alone)
    )
    for prompt, temperature, tokens, others in zip(prompts, temperatures, ours.tokens, expected.tokens, strict=True):
        if tokens == others:
            continue
        parted = next(i for i, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1])
        best = np.sort(np.asarray(dspark_jax.forward(alone, [prompt + others[:parted]]).logits)[0, -1])
        print(
            f"\n{axis}: temperature {temperature} parts after {parted} tokens, margin {best[-1] - best[-2]:.1e}", end=""
        )
        assert temperature == 0 and best[-1] - best[-2] < 1e-4


def test_equal_scores_go_to_the_lowest_entry() -> None:
    rng = np.random.default_rng(0)
    entries = rng.integers(0, 3, (1, 4096, 4)).astype(np.float32)
    query, weights = np.ones((1, 1, 1, 4), np.float32), np.ones((1, 1, 1), np.float32)
    picks, _ = jax.jit(top_entries, static_argnums=(4, 5))(
        query, weights, entries, jnp.full((1, 1), 4000, jnp.int32), 512, PRESETS["float32"]
    )
    best = np.lexsort((np.arange(4000), -entries[0, :4000].sum(axis=-1)))[:512]
    assert set(np.asarray(picks).ravel().tolist()) == set(best.tolist())


# Full width ----------------------------------------------------------------------------------------------------------

BATCH, CAPACITY, PROMPT = 2, 4096, 600


@pytest.fixture(scope="module")
def wide() -> Model:
    """Flash's widths and experts with one layer of each kind and one stage, random weights: 14 GB packed."""
    config = ModelConfig.tiny(
        vocab_size=129280,
        hidden_size=4096,
        num_hidden_layers=3,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1024,
        o_groups=8,
        o_lora_rank=1024,
        sliding_window=128,
        compress_ratios=[0, 4, 128, 0],
        rope_scaling={
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        index_n_heads=64,
        index_head_dim=128,
        index_topk=512,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_experts_per_tok=6,
        dspark_noise_token_id=128799,
        dspark_markov_rank=256,
    )
    return random_model(config, "bfloat16")


def begin(model: Model) -> tuple:
    tokens = np.zeros((BATCH, CAPACITY), np.int32)
    tokens[:, :PROMPT] = np.random.default_rng(1).integers(0, 129280, (BATCH, PROMPT))
    lengths = jnp.asarray([PROMPT, PROMPT - 87], jnp.int32)
    setting = model.setting(CAPACITY)
    return setting, start(model, setting, jnp.asarray(tokens), lengths)


def settings(draft_tokens: int, **columns: float) -> Sampling:
    return Sampling.of(BATCH, max_new_tokens=48, draft_tokens=draft_tokens, **columns)


def test_kernels_are_as_near_to_float32_as_xla(wide: Model) -> None:
    """The median over rows: a row whose router picks another expert parts for good, in either implementation."""
    ids = random_ids(wide.config, 2, 40, seed=0)

    def run(numerics: Numerics) -> Forward:
        return fetch(dspark_jax.forward(replace(wide, numerics=numerics), ids, internals=True, chunk=16))

    def error(ours: np.ndarray, exact: np.ndarray) -> float:
        ours, exact = (values.astype(np.float32).reshape(80, -1) for values in (ours, exact))
        return float(np.median(np.linalg.norm(ours - exact, axis=1) / np.linalg.norm(exact, axis=1)))

    exact = run(replace(PRESETS["float32"], implementation="xla"))
    through_xla, kernels = (run(replace(wide.numerics, implementation=name)) for name in ("xla", "mosaic"))
    for name, values in {
        "streams of the first layer": lambda forward: forward.seen.layers[0].streams,
        "logits": lambda forward: forward.logits,
    }.items():
        errors = [error(values(ours), values(exact)) for ours in (through_xla, kernels)]
        print(f"\n{name}: kernels {errors[1]:.1e}, XLA {errors[0]:.1e} from float32", end="")
        assert 0 < errors[1] <= 1.2 * errors[0]


def test_full_width_layers_give_the_same_tokens_for_every_draft_length(wide: Model) -> None:
    tokens, steps = [], []
    for draft_tokens in (0, 1, 3, 5, 0):
        setting, state = begin(wide)
        jax.block_until_ready(state)
        clock = time.perf_counter()
        state = finish(wide, setting, state, settings(draft_tokens))
        tokens.append(np.asarray(state.tokens))
        steps.append((time.perf_counter() - clock) / int(np.asarray(state.counters.rounds).max()))
    print(f"\nfull width, 3 layers and a stage, batch {BATCH}: {steps[-1] * 1e3:.2f} ms a plain step,", end=" ")
    print(f"{steps[3] * 1e3:.2f} ms a round of 5 drafts,", end=" ")
    print(f"peak {jax.devices()[0].memory_stats()['peak_bytes_in_use'] / 1e9:.1f} GB", end="")
    assert all(np.array_equal(one, tokens[0]) for one in tokens)
    assert len(np.unique(tokens[0][0, PROMPT : PROMPT + 48])) > 10, "decoding moves"


def test_sampling_over_the_whole_vocabulary(wide: Model) -> None:
    """The same program greedily, sampled and truncated; each kind draws the same tokens again."""
    kinds = {"greedy": {}, "sampled": {"temperature": 1.0}, "top-p 0.9": {"temperature": 1.0, "top_p": 0.9}}
    for name, columns in kinds.items():
        tokens = []
        for _ in range(3):
            setting, state = begin(wide)
            jax.block_until_ready(state)
            clock = time.perf_counter()
            state = finish(wide, setting, state, settings(5, **columns))
            tokens.append(np.asarray(state.tokens))
            step = (time.perf_counter() - clock) / int(np.asarray(state.counters.rounds).max())
        print(f"\n{name}: {step * 1e3:.2f} ms a round of 5 drafts", end="")
        assert np.array_equal(tokens[0], tokens[1]) and np.array_equal(tokens[0], tokens[2])


def test_bench_at_full_width(wide: Model) -> None:
    report = bench_generate(wide, Workload(8, 64, 48, repeats=2), lambda *_: None)
    for name in RUNS:
        run = getattr(report, name)
        print(f"\n{name}: {run.tokens_per_second:.0f} tokens/s, {run.step_seconds * 1e3:.2f} ms a step", end="")
    assert report.ok


def test_the_compiled_loop_stays_on_the_device_and_copies_no_cache(wide: Model) -> None:
    setting, state = begin(wide)
    clock = time.perf_counter()
    compiled = finish.lower(wide, setting, state, settings(5)).compile()
    text = compiled.as_text()
    print(f"\ncompiled in {time.perf_counter() - clock:.1f} s; temporaries", end=" ")
    print(f"{compiled.memory_analysis().temp_size_in_bytes / 1e9:.2f} GB, {text.count(' fusion(')} fusions", end="")
    assert not re.findall(r"\b(infeed|outfeed|send|recv)\(", text)
    assert not [target for target in re.findall(r'custom_call_target="([^"]+)"', text) if "callback" in target]
    caches = {leaf.shape for leaf in jax.tree.leaves((state.target, state.drafter))}
    copies = [
        tuple(int(size) for size in dims.split(",") if size) for dims in re.findall(r"\[([\d,]*)\]\S* copy\(", text)
    ]
    print("; cache-sized copies:", sorted(caches & set(copies)), end="")
    assert not caches & set(copies)
