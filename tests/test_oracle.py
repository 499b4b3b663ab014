"""The oracle against the golden numbers of the reference code, the check vectors of the specification, and itself.

The golden runs fix what the model computes. The random models at the end hold the oracle to the rules of visibility in
other configurations: a window of one token, ratios that never fire, one stream, one stage, all experts, no context.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from oracle import (
    OVERLAP_RATIO,
    Array,
    Result,
    Weights,
    draft,
    greedy,
    hc_mixes,
    hc_split,
    main_features,
    margins,
    read_weights,
    rope,
    rope_frequencies,
    target,
    top,
)
from safetensors.numpy import load_file

from dspark_jax.config import ModelConfig, RopeScaling

TOLERANCE = 3e-4


@dataclass(frozen=True)
class Golden:
    """A golden folder, and the oracle's evaluation of its main run: the prompt and the forced tokens after it."""

    config: ModelConfig
    weights: Weights
    expected: dict[str, Array]
    main: Result

    def __getitem__(self, key: str) -> Array:
        return self.expected[f"exact/{key}"]

    def target(self, *keys: str) -> Result:
        return target(self.config, self.weights, np.concatenate([self[key] for key in keys]))

    def layers(self, ratio: int) -> list[int]:
        return [layer for layer, r in enumerate(self.config.layer_ratios) if r == ratio]


@cache
def load(name: str) -> Golden:
    folder = Path(__file__).parent / "golden" / name
    config, weights = ModelConfig.from_file(folder / "config.json"), read_weights(folder)
    expected = load_file(folder / "expected.safetensors")
    ids = np.concatenate([expected["exact/prompt_ids"], expected["exact/decode/forced_ids"]])
    return Golden(config, weights, expected, target(config, weights, ids))


@pytest.fixture(params=["tiny-a", "tiny-b"])
def golden(request: pytest.FixtureRequest) -> Golden:
    return load(request.param)


def assert_close(key: str, actual: Array, expected: Array) -> None:
    assert actual.shape == expected.shape, key
    deviation = np.abs(actual - expected).max()
    assert deviation < TOLERANCE, f"{key} is off by {deviation:.2e}"


# Golden runs ---------------------------------------------------------------------------------------------------------


def test_weights_are_dequantised_exactly(golden: Golden) -> None:
    pieces = {key.removeprefix("dequant/"): v for key, v in golden.expected.items() if key.startswith("dequant/")}
    assert len(pieces) == 4
    for name, piece in pieces.items():
        whole = golden.weights[name]
        rows = whole[: len(piece)] if ".experts." in name else whole[-len(piece) :]
        np.testing.assert_array_equal(rows, piece.astype(float), err_msg=name)


def test_main_run(golden: Golden) -> None:
    split = len(golden["prompt_ids"])
    assert_close("prefill_logits", golden.main.logits[:split], golden["prefill_logits"])
    assert_close("prefill_main_hidden", golden.main.taps[:split], golden["prefill_main_hidden"])
    assert_close("decode/logits", golden.main.logits[split:], golden["decode/logits"])
    decoded = golden["decode/main_hidden"]
    assert_close("decode/main_hidden", golden.main.taps[split : split + len(decoded)], decoded)


def test_router(golden: Golden) -> None:
    split = len(golden["prompt_ids"])
    for layer in range(golden.config.num_hidden_layers):
        picks = golden[f"router/layer{layer}/indices"]
        np.testing.assert_array_equal(golden.main.router_picks[layer, :split], picks)
        weights = golden[f"router/layer{layer}/weights"]
        assert_close("router/weights", golden.main.router_weights[layer, :split], weights)
        assert np.isinf(golden.main.router_margin[layer]).all() == (layer < golden.config.num_hash_layers)


def test_indexer(golden: Golden) -> None:
    layers = golden.layers(OVERLAP_RATIO)
    assert list(golden.main.index_picks) == list(golden.main.index_margin) == layers and layers
    for layer in layers:
        key = f"indexer/layer{layer}"
        rows = np.concatenate([golden[f"{key}/prefill_topk"], golden[f"{key}/decode_topk"]])
        assert golden.main.index_picks[layer] == [{int(w) for w in row if w >= 0} for row in rows]
        picks_all = np.array([(t + 1) // OVERLAP_RATIO <= golden.config.index_topk for t in range(len(rows))])
        np.testing.assert_array_equal(np.isinf(golden.main.index_margin[layer]), picks_all)


@pytest.mark.parametrize(("name", "router", "indexer"), [("tiny-a", 5.4e-4, 1.3e-3), ("tiny-b", 2.5e-4, 4.0e-3)])
def test_smallest_gaps(name: str, router: float, indexer: float) -> None:
    """As the folders' README files give them for the forced run; nothing else depends on the scale of index scores."""
    main = load(name).main
    assert main.router_margin.min() == pytest.approx(router, rel=0.02)
    assert min(margin.min() for margin in main.index_margin.values()) == pytest.approx(indexer, rel=0.02)


def test_short_run(golden: Golden) -> None:
    short = golden.target("short/prompt_ids")
    assert_close("short/hc_streams", short.streams, golden["short/hc_streams"])
    assert_close("short/hc_head_out", short.collapsed, golden["short/hc_head_out"])
    assert_close("short/logits_last", short.logits[-1], golden["short/logits_last"])

    scale, base = golden["sinkhorn/scale"], golden["sinkhorn/base"]
    mixes = hc_mixes(short.streams[0], golden.weights["layers.1.hc_attn_fn"], golden.config.rms_norm_eps)
    assert_close("sinkhorn/mixes", mixes, golden["sinkhorn/mixes"])
    np.testing.assert_array_equal(golden.weights["layers.1.hc_attn_scale"], scale)
    np.testing.assert_array_equal(golden.weights["layers.1.hc_attn_base"], base)
    parts = hc_split(golden.config, golden["sinkhorn/mixes"].astype(float), scale, base)
    for name, part in zip(("pre", "post", "comb"), parts, strict=True):
        assert_close(f"sinkhorn/{name}", part, golden[f"sinkhorn/{name}"])


def test_prompt_shorter_than_every_window(golden: Golden) -> None:
    run = golden.target("tiny/prompt_ids", "tiny/forced_ids")
    split = len(golden["tiny/prompt_ids"])
    assert_close("tiny/prefill_logits", run.logits[:split], golden["tiny/prefill_logits"])
    assert_close("tiny/decode_logits", run.logits[split:], golden["tiny/decode_logits"])


def test_greedy(golden: Golden) -> None:
    prompt, tokens = golden["greedy/prompt_ids"], golden["greedy/tokens"]
    logits = golden.target("greedy/prompt_ids", "greedy/tokens").logits[len(prompt) - 1 : -1]
    np.testing.assert_array_equal(logits.argmax(1), tokens)
    assert_close("greedy/margins", margins(logits), golden["greedy/margins"])

    ids, gaps = greedy(golden.config, golden.weights, prompt.tolist(), 6)
    assert ids == tokens[:6].tolist()
    assert_close("greedy/margins", np.array(gaps), golden["greedy/margins"][:6])


def test_drafter(golden: Golden) -> None:
    starts, anchors = golden["draft/start_pos"], golden["draft/anchor_ids"]
    ids = np.concatenate([golden["prompt_ids"], golden["decode/forced_ids"], golden.main.logits[-1:].argmax(1)])
    np.testing.assert_array_equal(ids[starts + 1], anchors)
    assert_close("draft/main_hidden", golden.main.taps[starts], golden["draft/main_hidden"])
    features = main_features(golden.config, golden.weights, golden["draft/main_hidden"].astype(float))
    assert_close("draft/main_x", features, golden["draft/main_x"])

    drafts = [
        draft(golden.config, golden.weights, golden.main.taps[: p + 1], int(anchor))
        for p, anchor in zip(starts, anchors, strict=True)
    ]
    output = np.stack([np.append(anchor, d.ids) for anchor, d in zip(anchors, drafts, strict=True)])
    np.testing.assert_array_equal(output, golden["draft/output_ids"])
    for field in ("base_logits", "logits", "confidence"):
        assert_close(f"draft/{field}", np.stack([getattr(d, field) for d in drafts]), golden[f"draft/{field}"])
    assert_close("draft/first_stages", drafts[0].stages, golden["draft/first_stages"])
    assert_close("draft/first_hidden", drafts[0].hidden, golden["draft/first_hidden"])
    assert_close("draft/last_stages", drafts[-1].stages, golden["draft/last_stages"])


@pytest.mark.parametrize("loop", ["loop", "loop_tiny"])
def test_speculative_loop(golden: Golden, loop: str) -> None:
    """The stream is plain greedy decoding, and every round's drafts and accepted count follow from one pass over it."""
    start = len(golden[f"{loop}/prompt_ids"])
    run = golden.target(f"{loop}/prompt_ids", f"{loop}/stream")
    choices = run.logits.argmax(1)
    np.testing.assert_array_equal(choices[start - 1 : -1], golden[f"{loop}/stream"])

    ids = np.concatenate([golden[f"{loop}/prompt_ids"], golden[f"{loop}/stream"], choices[-1:]])
    p = start
    for number, recorded in enumerate(golden[f"{loop}/output_ids"]):
        assert p == golden[f"{loop}/start_pos"][number] and recorded[0] == ids[p + 1]
        result = draft(golden.config, golden.weights, run.taps[: p + 1], int(recorded[0]))
        np.testing.assert_array_equal(result.ids, recorded[1:])
        assert_close(f"{loop}/confidence", result.confidence, golden[f"{loop}/confidence"][number])
        truth = ids[p + 2 :][: len(result.ids)]
        accepted = int((np.cumsum(result.ids[: len(truth)] != truth) == 0).sum())
        assert accepted == golden[f"{loop}/accepted"][number]
        assert ids[p + 2 + accepted] == golden[f"{loop}/bonus_ids"][number]
        p += accepted + 1


# Check vectors of the specification ----------------------------------------------------------------------------------


def test_sinkhorn_vectors() -> None:
    i = np.arange(24)
    mixes, base = np.sin(0.37 * i)[None], 0.3 * np.cos(0.11 * i)
    pre, post, comb = hc_split(ModelConfig.tiny(), mixes, np.array([0.5, 1.5, 2.0]), base)
    np.testing.assert_allclose(pre[0], [0.5744435, 0.6175115, 0.6524708, 0.6751709], atol=1e-7)
    np.testing.assert_allclose(post[0], [1.7077312, 1.6904604, 1.6143775, 1.4626831], atol=1e-7)
    rows = [
        [0.5082967, 0.2900052, 0.1386407, 0.0630564],
        [0.2013578, 0.2235565, 0.2591948, 0.3158898],
        [0.0660344, 0.1613300, 0.3143158, 0.4583188],
        [0.2243100, 0.3251073, 0.2878477, 0.1627339],
    ]
    np.testing.assert_allclose(comb[0], rows, atol=1e-7)


def test_rope_vectors() -> None:
    config = dataclasses.replace(
        ModelConfig.tiny(), qk_rope_head_dim=64, rope_scaling=RopeScaling(16.0, 65536, 32.0, 1.0)
    )
    plain, yarn = rope_frequencies(config, 0), rope_frequencies(config, OVERLAP_RATIO)
    np.testing.assert_allclose(plain[[1, 15, 31]], [0.749894, 1.333522e-2, 1.333521e-4], rtol=1e-6)
    expected = [1, 0.687656, 5.286857e-3, 3.635539e-3, 2.265625e-3, 2.969778e-4, 5.372312e-6, 5.680529e-7]
    np.testing.assert_allclose(yarn[[0, 1, 14, 15, 16, 20, 25, 31]], expected, rtol=1e-6)
    frequencies = np.append(yarn[[16, 20, 31]], plain[[1, 15]])
    unit = np.tile([1.0, 0.0], (1, len(frequencies)))
    turned = rope(unit, np.array([1999]), frequencies)[0]
    np.testing.assert_allclose(turned[0::2], [-0.1823784, 0.8288996, 0.9999993, -0.8781781, 0.0464259], atol=2e-7)
    np.testing.assert_allclose(turned[1::2], [-0.9832284, 0.5593973, 0.0011355, -0.4783338, 0.9989218], atol=2e-7)
    far = rope(unit, np.array([900_001]), frequencies)[0]  # where the float32 rounding of the angle is plain to see
    np.testing.assert_allclose(far[0::2], np.cos((np.float32(900_001) * frequencies).astype(float)), atol=1e-7)
    assert np.abs(far[0::2] - np.cos(900_001 * frequencies.astype(float))).max() > 1e-4


def test_ties_go_to_the_lowest_index() -> None:
    picks, margin = top(np.array([1.0, 3.0, 3.0, 0.0, 3.0, -0.0]), 2)
    assert picks.tolist() == [1, 2] and margin == 0
    assert top(np.array([0.0, -0.0, 1.0]), 2)[0].tolist() == [0, 2]
    assert top(np.array([]), 0)[1] == np.inf


# Other configurations ------------------------------------------------------------------------------------------------

CONFIGS = {
    "tiny": ModelConfig.tiny(),
    "narrow": ModelConfig.tiny(
        sliding_window=1,
        compress_ratios=[4, 0, 5, 0],
        hc_mult=1,
        hc_sinkhorn_iters=1,
        index_topk=1,
        num_experts_per_tok=1,
        num_hash_layers=0,
        dspark_block_size=1,
        dspark_target_layer_ids=[1],
        dspark_markov_rank=1,
    ),
    "wide": ModelConfig.tiny(
        sliding_window=128,
        compress_ratios=[128, 4, 16, 0, 0, 0, 0],
        hc_mult=2,
        index_topk=100,
        num_experts_per_tok=6,
        num_hash_layers=3,
        dspark_block_size=9,
        dspark_target_layer_ids=[0, 2],
    ),
}


def random_weights(c: ModelConfig, seed: int = 0) -> Weights:
    """A model without structure, every tensor that the oracle reads and nothing else."""
    rng = np.random.default_rng(seed)
    d, heads, width, mixes = c.hidden_size, c.num_attention_heads, c.head_dim, c.hc_mult * (c.hc_mult + 2)
    inner, streams = c.moe_intermediate_size, c.hc_mult * c.hidden_size
    collapse = {"hc_head_fn": (c.hc_mult, streams), "hc_head_base": (c.hc_mult,), "hc_head_scale": (1,), "norm": (d,)}
    shapes: dict[str, tuple[int, ...]] = {"embed": (c.vocab_size, d), "head": (c.vocab_size, d), **collapse}

    def compressor(prefix: str, ratio: int, size: int) -> None:
        wide = size * (2 if ratio == OVERLAP_RATIO else 1)
        shapes.update({f"{prefix}.wkv": (wide, d), f"{prefix}.wgate": (wide, d), f"{prefix}.norm": (size,)})
        shapes[f"{prefix}.ape"] = (ratio, wide)

    layers = [f"layers.{layer}" for layer in range(c.num_hidden_layers)] + [f"mtp.{s}" for s in range(c.num_stages)]
    for number, (layer, ratio) in enumerate(zip(layers, c.compress_ratios, strict=True)):
        attn = f"{layer}.attn"
        shapes |= {
            f"{attn}.attn_sink": (heads,),
            f"{attn}.wq_a": (c.q_lora_rank, d),
            f"{attn}.q_norm": (c.q_lora_rank,),
            f"{attn}.wq_b": (heads * width, c.q_lora_rank),
            f"{attn}.wkv": (width, d),
            f"{attn}.kv_norm": (width,),
            f"{attn}.wo_a": (c.o_groups * c.o_lora_rank, heads * width // c.o_groups),
            f"{attn}.wo_b": (d, c.o_groups * c.o_lora_rank),
            f"{layer}.ffn.gate": (c.n_routed_experts, d),
        }
        for site in ("attn", "ffn"):
            shapes |= {f"{layer}.hc_{site}_fn": (mixes, streams), f"{layer}.hc_{site}_base": (mixes,)}
            shapes |= {f"{layer}.hc_{site}_scale": (3,), f"{layer}.{site}_norm": (d,)}
        for expert in ["shared_experts", *(f"experts.{e}" for e in range(c.n_routed_experts))]:
            name = f"{layer}.ffn.{expert}"
            shapes |= {f"{name}.w1": (inner, d), f"{name}.w2": (d, inner), f"{name}.w3": (inner, d)}
        if number >= c.num_hash_layers:
            shapes[f"{layer}.ffn.gate.bias"] = (c.n_routed_experts,)
        if ratio:
            compressor(f"{attn}.compressor", ratio, width)
        if ratio == OVERLAP_RATIO:
            compressor(f"{attn}.indexer.compressor", ratio, c.index_head_dim)
            shapes[f"{attn}.indexer.wq_b"] = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            shapes[f"{attn}.indexer.weights_proj"] = (c.index_n_heads, d)
    if c.drafter:
        shapes |= {"mtp.0.main_proj": (d, c.taps_width), "mtp.0.main_norm": (d,)}
        last, rank = layers[-1], c.drafter.markov_rank
        shapes |= {f"{last}.{key}": shape for key, shape in collapse.items()}
        shapes |= {f"{last}.markov_head.markov_w{side}": (c.vocab_size, rank) for side in (1, 2)}
        shapes[f"{last}.confidence_head.proj"] = (1, d + rank)

    def draw(name: str, shape: tuple[int, ...]) -> Array:
        noise = rng.standard_normal(shape)
        return 1 + 0.1 * noise if name.endswith("norm") else noise / np.sqrt(shape[-1] if len(shape) > 1 else 4)

    weights = {name: draw(name, shape) for name, shape in shapes.items()}
    for layer in layers[: c.num_hash_layers]:
        table = rng.random((c.vocab_size, c.n_routed_experts)).argsort(1)[:, : c.num_experts_per_tok]
        weights[f"{layer}.ffn.gate.tid2eid"] = table
    return weights


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> tuple[ModelConfig, Weights]:
    return CONFIGS[request.param], random_weights(CONFIGS[request.param])


def test_nothing_depends_on_later_tokens(model: tuple[ModelConfig, Weights]) -> None:
    config, weights = model
    ids = np.random.default_rng(1).integers(config.vocab_size, size=140)
    whole = target(config, weights, ids)
    assert whole.taps.shape == (len(ids), config.taps_width)
    for length in (1, 3, 4, 5, 8, 9, 127, 128, 139):
        part = target(config, weights, ids[:length])
        np.testing.assert_allclose(part.logits, whole.logits[:length], atol=1e-9)
        np.testing.assert_allclose(part.streams, whole.streams[:, :length], atol=1e-9)
        np.testing.assert_array_equal(part.router_picks, whole.router_picks[:, :length])
        for layer, picks in part.index_picks.items():
            assert picks == whole.index_picks[layer][:length]
            assert [len(p) for p in picks] == [min(config.index_topk, (t + 1) // 4) for t in range(length)]


def test_how_far_back_a_token_reaches() -> None:
    """Token 0 is changed: three windows of 8 in a row forget it after position 21, a compressed layer never does."""
    ids = np.arange(40)
    changed = np.append(90, ids[1:])
    for ratios, reached in (([0, 0, 0, 0, 0], 3 * 7 + 1), ([0, 0, 8, 0, 0], len(ids))):
        config = ModelConfig.tiny(compress_ratios=ratios, num_hash_layers=0)
        weights = random_weights(config)
        gap = np.abs(target(config, weights, ids).logits - target(config, weights, changed).logits).max(1)
        np.testing.assert_array_equal(gap > 1e-9, np.arange(len(ids)) < reached)


def test_what_a_draft_depends_on(model: tuple[ModelConfig, Weights]) -> None:
    config, weights = model
    assert config.drafter is not None
    window = config.sliding_window
    rng = np.random.default_rng(2)
    taps = rng.standard_normal((window + 3, config.taps_width))
    reference = draft(config, weights, taps, 7)
    assert reference.stages.shape == (config.num_stages, config.block_size, config.hc_mult, config.hidden_size)

    for row, matters in ((2, False), (3, True), (len(taps) - 1, True)):
        other = taps.copy()
        other[row] += 1
        assert (draft(config, weights, other, 7).base_logits != reference.base_logits).any() == matters

    for length in (0, 1, len(taps)):
        result = draft(config, weights, taps[:length], 7)
        np.testing.assert_array_equal(result.ids, result.logits.argmax(1))
        previous = weights[f"mtp.{config.num_stages - 1}.markov_head.markov_w1"][np.append(7, result.ids[:-1])]
        bias = previous @ weights[f"mtp.{config.num_stages - 1}.markov_head.markov_w2"].T
        np.testing.assert_allclose(result.logits - result.base_logits, bias, atol=1e-12)

    if config.block_size > 1:  # the noise token is fed to the later slots only, and slot 0 sees them
        noise = dataclasses.replace(config.drafter, noise_token_id=11)
        result = draft(dataclasses.replace(config, drafter=noise), weights, taps, 7)
        assert (result.hidden[0] != reference.hidden[0]).any()
