"""The configuration: official and tiny files read as the specification has them; every refusal names its reason."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import pytest

from dspark_jax.config import DrafterConfig, ModelConfig, RopeScaling
from dspark_jax.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"
SOURCE = "somewhere/config.json"
Raw = dict[str, Any]

# config.json of DeepSeek-V4-Flash-0731, all of it
FLASH: Raw = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 43,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 129280,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
DSPARK_FIELDS = [name for name in FLASH if name.startswith("dspark_")]
PRO_RATIOS = [128, 128, *[4, 128] * 29, 4]
PRO_PREVIEW: Raw = {name: value for name, value in FLASH.items() if name not in DSPARK_FIELDS} | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "compress_ratios": [*PRO_RATIOS, 0],
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.5,
}
PRO_0813: Raw = PRO_PREVIEW | {
    "compress_ratios": [*PRO_RATIOS, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [58, 59, 60],
    "dspark_markov_rank": 512,
}
TINY_A: Raw = json.loads((GOLDEN / "tiny-a" / "config.json").read_text())
TINY_B: Raw = json.loads((GOLDEN / "tiny-b" / "config.json").read_text())
TINY: Raw = ModelConfig.tiny().to_dict()
CONFIGS = {
    "flash": FLASH,
    "pro preview": PRO_PREVIEW,
    "pro": PRO_0813,
    "tiny-a": TINY_A,
    "tiny-b": TINY_B,
    "tiny": TINY,
}

# Fields that change nothing here: they may be absent.
INFORMATIONAL = [
    *("architectures", "attention_bias", "attention_dropout", "bos_token_id", "hidden_act", "initializer_range"),
    *("n_shared_experts", "norm_topk_prob", "num_key_value_heads", "num_nextn_predict_layers", "tie_word_embeddings"),
    *("topk_method", "torch_dtype", "transformers_version", "use_cache"),
]


def read(raw: Raw) -> ModelConfig:
    return ModelConfig.from_dict(raw, source=SOURCE)


def refusal(raw: Any) -> str:
    """The sentence with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(raw, source=SOURCE)
    message = str(caught.value)
    assert message.startswith(f"{SOURCE}: ") and message.endswith("."), message
    return message


def without(raw: Raw, path: str) -> Raw:
    """`raw` less one field; a dot leads into an object."""
    outer, _, inner = path.partition(".")
    if inner:
        return raw | {outer: without(raw[outer], inner)}
    return {name: value for name, value in raw.items() if name != outer}


def changed(raw: Raw, path: str, value: Any) -> Raw:
    """`raw` with another value in one field; a dot leads into an object."""
    outer, _, inner = path.partition(".")
    return raw | {outer: changed(raw[outer], inner, value) if inner else value}


@pytest.fixture(params=CONFIGS, name="raw")
def every_config(request: pytest.FixtureRequest) -> Raw:
    return CONFIGS[request.param]


class TestWhatIsRead:
    def test_every_value_is_the_files(self, raw: Raw) -> None:
        config = read(raw)
        plain = set(field.name for field in dataclasses.fields(config)) - {"rope_scaling", "eos_token_id", "drafter"}
        assert {n: getattr(config, n) for n in plain} == {
            n: tuple(raw[n]) if isinstance(raw[n], list) else raw[n] for n in plain
        }
        assert config.eos_token_id == (raw["eos_token_id"],)
        assert dataclasses.asdict(config.rope_scaling) == without(raw["rope_scaling"], "type")
        if "dspark_block_size" in raw:
            drafter = {f"dspark_{name}": value for name, value in dataclasses.asdict(config.drafter).items()}
            assert drafter.pop("dspark_markov_head") == "vanilla"
            assert drafter == {n: tuple(raw[n]) if isinstance(raw[n], list) else raw[n] for n in DSPARK_FIELDS}
        else:
            assert config.drafter is None

    def test_flash(self) -> None:
        config = read(FLASH)
        assert len(config.compress_ratios) == 46 and len(config.layer_ratios) == 43
        places = {
            kind: [i for i, k in enumerate(config.layer_kinds) if k == kind] for kind in ("sliding", "csa", "hca")
        }
        assert places == {"sliding": [0, 1], "csa": list(range(2, 43, 2)), "hca": list(range(3, 42, 2))}
        assert (len(places["csa"]), len(places["hca"])) == (21, 20)
        assert config.num_stages == 3
        assert config.taps_width == 12288  # the input width of main_proj
        assert (config.block_size, config.step_width) == (5, 6)
        assert config.drafter == DrafterConfig(5, 128799, (40, 41, 42), 256)
        assert config.rope_scaling == RopeScaling(16, 65536, 32, 1)

    @pytest.mark.parametrize("raw", [PRO_PREVIEW, PRO_0813], ids=["preview", "0813"])
    def test_pro_has_no_sliding_layer(self, raw: Raw) -> None:
        config = read(raw)
        assert config.layer_kinds == ("hca", "hca", *("csa", "hca") * 29, "csa")
        assert config.layer_ratios == tuple(PRO_RATIOS) and len(config.layer_kinds) == 61

    def test_the_pro_preview_has_no_drafter(self) -> None:
        config = read(PRO_PREVIEW)
        assert len(config.compress_ratios) == 62
        assert (config.drafter, config.num_stages, config.taps_width) == (None, 0, 0)
        assert (config.block_size, config.step_width) == (0, 1)

    def test_pro_0813_has_three_stages(self) -> None:
        config = read(PRO_0813)
        assert (config.num_stages, config.taps_width, config.step_width) == (3, 3 * 7168, 6)
        assert config.drafter == DrafterConfig(5, 128799, (58, 59, 60), 512)

    @pytest.mark.parametrize(
        ("raw", "kinds", "stages"),
        [
            (TINY_A, ("sliding", "csa", "hca", "csa"), 3),
            (TINY_B, ("sliding", "hca", "csa", "csa"), 3),
            (TINY, ("sliding", "csa", "hca"), 2),
        ],
        ids=["tiny-a", "tiny-b", "tiny"],
    )
    def test_tiny_models(self, raw: Raw, kinds: tuple[str, ...], stages: int) -> None:
        config = read(raw)
        assert (config.layer_kinds, config.num_stages, config.step_width) == (kinds, stages, 6)
        assert config.taps_width == 3 * raw["hidden_size"]

    @pytest.mark.parametrize("name", INFORMATIONAL)
    def test_informational_fields_may_be_absent(self, name: str) -> None:
        assert read(without(FLASH, name)) == read(FLASH)

    @pytest.mark.parametrize("value", [0, 1, 2, 7])
    def test_num_nextn_predict_layers_says_nothing_about_the_stages(self, value: int) -> None:
        assert read(FLASH | {"num_nextn_predict_layers": value}) == read(FLASH)

    def test_numbers_may_be_written_as_integers_or_floats(self) -> None:
        assert read(FLASH | {"rope_theta": 10000.0, "swiglu_limit": 10}) == read(FLASH)

    @pytest.mark.parametrize(("value", "ids"), [(1, (1,)), ([1, 7], (1, 7)), ([], ()), (0, (0,))])
    def test_eos_is_an_id_or_a_list(self, value: Any, ids: tuple[int, ...]) -> None:
        assert read(FLASH | {"eos_token_id": value}).eos_token_id == ids

    def test_rope_type_may_carry_its_newer_name(self) -> None:
        newer = without(FLASH, "rope_scaling.type")["rope_scaling"] | {"rope_type": "yarn"}
        assert read(FLASH | {"rope_scaling": newer}) == read(FLASH)

    def test_tiny_takes_changes(self) -> None:
        config = ModelConfig.tiny(compress_ratios=[4, 128, 0, 0], dspark_block_size=3)
        assert config.layer_kinds == ("csa", "hca", "sliding")
        assert (config.num_stages, config.step_width, config.hidden_size) == (1, 4, ModelConfig.tiny().hidden_size)
        with pytest.raises(ConfigError, match=r"ModelConfig.tiny: field 'vocab_size' is 0"):
            ModelConfig.tiny(vocab_size=0)


class TestAsAValue:
    def test_round_trip(self, raw: Raw) -> None:
        config = read(raw)
        written = json.loads(json.dumps(config.to_dict()))
        assert read(written) == config
        assert {name: value for name, value in raw.items() if name in written} == {
            name: value for name, value in written.items() if name in raw
        }

    @pytest.mark.parametrize("eos", [0, [1, 7], []])
    def test_round_trip_of_eos(self, eos: Any) -> None:
        assert read(FLASH | {"eos_token_id": eos}).to_dict()["eos_token_id"] == eos

    def test_the_written_file_states_the_formats(self) -> None:
        written = read(FLASH).to_dict()
        stated = ("architectures", "model_type", "expert_dtype", "scoring_func", "quantization_config", "torch_dtype")
        assert {name: written[name] for name in stated} == {name: FLASH[name] for name in stated}

    def test_a_target_alone_writes_no_dspark_fields(self) -> None:
        assert not [name for name in read(PRO_PREVIEW).to_dict() if name.startswith("dspark_")]

    def test_equal_files_make_one_static_argument(self) -> None:
        traced = []

        def scaled(config: ModelConfig, x: jax.Array) -> jax.Array:
            traced.append(config)
            return x * config.hc_mult

        jitted = jax.jit(scaled, static_argnums=0)
        assert jitted(read(FLASH), 2) == jitted(read(dict(FLASH)), 2) == 8
        assert hash(read(FLASH)) == hash(read(dict(FLASH))) and len(traced) == 1
        assert jitted(read(FLASH | {"hc_mult": 2}), 2) == 4 and len(traced) == 2

    def test_frozen(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            read(FLASH).vocab_size = 1  # type: ignore[misc]


class TestOtherArchitectures:
    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"model_type": "deepseek_v4_1"}, "deepseek_v4_1"),
            ({"model_type": "deepseek_v4.1"}, "deepseek_v4.1"),
            ({"model_type": "DeepSeek-V4.1-Flash"}, "DeepSeek-V4.1-Flash"),
            ({"architectures": ["DeepseekV41ForCausalLM"]}, "DeepseekV41ForCausalLM"),
            ({"architectures": ["DeepseekV4_1ForCausalLM"]}, "DeepseekV4_1ForCausalLM"),
            ({"architectures": "DeepseekV41ForCausalLM"}, "DeepseekV41ForCausalLM"),
            ({"engram_layer_ids": [1, 2]}, "engram_layer_ids"),
            ({"use_Engram": True}, "use_Engram"),
            ({"compress_ratios": [0, 0, *[2, 1] * 19]}, "[1, 2]"),
            ({"compress_ratios": [0, 1, 0, 0]}, "[1]"),
            ({"compress_ratios": [0, 0, *[4, 2] * 20, 4, 0, 0, 0]}, "[2]"),
        ],
    )
    def test_v4_1_is_refused_by_name(self, changes: Raw, named: str) -> None:
        message = refusal(FLASH | changes)
        assert "DeepSeek-V4.1, another architecture" in message and named in message

    def test_v4_1_is_refused_by_name_whatever_else_it_lacks(self) -> None:
        message = refusal({"model_type": "deepseek_v4_1", "hidden_size": 5120, "rms_norm_eps": 1e-20})
        assert "DeepSeek-V4.1" in message and "missing" not in message

    @pytest.mark.parametrize(
        ("field", "value", "expected"),
        [
            ("model_type", "llama", "deepseek_v4"),
            ("model_type", "deepseek_v3", "deepseek_v4"),
            ("model_type", "deepseek_v32", "deepseek_v4"),
            ("model_type", "", "deepseek_v4"),
            ("model_type", None, "deepseek_v4"),
            ("model_type", 4, "deepseek_v4"),
            ("architectures", ["LlamaForCausalLM"], "DeepseekV4ForCausalLM"),
            ("architectures", 5, "DeepseekV4ForCausalLM"),
            ("scoring_func", "sigmoid", "sqrtsoftplus"),
            ("expert_dtype", "fp8", "fp4"),
            ("hidden_act", "gelu", "silu"),
            ("n_shared_experts", 2, "1"),
            ("num_key_value_heads", 8, "1"),
            ("tie_word_embeddings", True, "False"),
            ("attention_bias", True, "False"),
        ],
    )
    def test_another_kind_of_model_is_refused(self, field: str, value: Any, expected: str) -> None:
        message = refusal(FLASH | {field: value})
        assert f"field {field!r} is {value!r}" in message and expected in message

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            *(("quant_method", value) for value in ("awq", None, 8)),
            *(("fmt", value) for value in ("e5m2", "E4M3")),
            *(("scale_fmt", value) for value in ("float32", None)),
            *(("weight_block_size", value) for value in ([64, 128], [128], 128, None, "128x128")),
        ],
    )
    def test_another_quantisation_is_refused(self, field: str, value: Any) -> None:
        message = refusal(changed(FLASH, f"quantization_config.{field}", value))
        expected = FLASH["quantization_config"][field]
        assert f"field 'quantization_config.{field}' is {value!r}; expected {expected!r}" in message

    @pytest.mark.parametrize("value", [None, "fp8", [], 8])
    def test_quantisation_must_be_an_object(self, value: Any) -> None:
        message = refusal(FLASH | {"quantization_config": value})
        assert "quantization_config" in message and "'quant_method': 'fp8'" in message

    def test_the_activation_scheme_is_ours_to_choose(self) -> None:
        assert read(without(FLASH, "quantization_config.activation_scheme")) == read(FLASH)


POSITIVE_INTEGERS = [
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim"),
    *("q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk"),
    *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "hc_mult", "hc_sinkhorn_iters"),
    *("max_position_embeddings", "rope_scaling.original_max_position_embeddings"),
    *("dspark_block_size", "dspark_markov_rank"),
]
NATURALS = ["num_hash_layers", "dspark_noise_token_id"]
POSITIVE_NUMBERS = [
    *("compress_rope_theta", "rope_theta", "routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps"),
    *("rope_scaling.factor", "rope_scaling.beta_fast", "rope_scaling.beta_slow"),
]
LISTS = ["compress_ratios", "dspark_target_layer_ids"]
OBJECTS = ["rope_scaling", "quantization_config"]
NAMES = ["model_type", "scoring_func", "expert_dtype"]
INSIDE = [f"quantization_config.{name}" for name in ("quant_method", "fmt", "scale_fmt", "weight_block_size")]
REQUIRED = [*POSITIVE_INTEGERS, *NATURALS, *POSITIVE_NUMBERS, *LISTS, *OBJECTS, *NAMES, *INSIDE, "eos_token_id"]

NOT_AN_INTEGER: list[Any] = ["4", True, 2.5, 64.0, -1, math.nan, None, [4], {}]
NOT_A_NUMBER: list[Any] = ["1.5", True, -1.0, 0, 0.0, math.nan, math.inf, 3.41e38, 10**400, None, [1.5]]
NOT_A_LIST: list[Any] = ["0, 4", 4, None, [], {}, [0, -4], [0, "4"], [0, 4.0], [0, None], [[0], 4], [False, 4]]
NOT_AN_ID: list[Any] = ["1", True, -1, 1.0, None, {}, [1, "2"], [None], [[1]]]
NOT_YARN: list[Any] = [None, 16, [], {}, {"type": "linear", "factor": 16}, {"factor": 16}]
WRONG = [
    *((field, value) for field in POSITIVE_INTEGERS for value in [*NOT_AN_INTEGER, 0]),
    *((field, value) for field in NATURALS for value in NOT_AN_INTEGER),
    *((field, value) for field in POSITIVE_NUMBERS for value in NOT_A_NUMBER),
    *((field, value) for field in LISTS for value in NOT_A_LIST),
    *(("eos_token_id", value) for value in NOT_AN_ID),
    *(("rope_scaling", value) for value in NOT_YARN),
]


def shortened(value: Any) -> str:
    return str(value)[:24]


class TestFields:
    def test_the_tables_below_name_every_field(self) -> None:
        fields = {field.name for field in dataclasses.fields(ModelConfig)} - {"drafter"}
        fields |= {f"rope_scaling.{field.name}" for field in dataclasses.fields(RopeScaling)}
        fields |= {f"dspark_{field.name}" for field in dataclasses.fields(DrafterConfig)}
        assert fields == set(REQUIRED) - {*NAMES, *INSIDE, "quantization_config"} | {"dspark_markov_head"}
        assert {*REQUIRED, *INFORMATIONAL} >= set(FLASH)

    @pytest.mark.parametrize("field", REQUIRED)
    def test_a_missing_field_is_named(self, field: str) -> None:
        message = refusal(without(FLASH, field))
        assert f"field {field!r} is" in message and "missing" in message and "expected" in message

    @pytest.mark.parametrize(("field", "value"), WRONG, ids=shortened)
    def test_a_wrong_value_is_named(self, field: str, value: Any) -> None:
        message = refusal(changed(FLASH, field, value))
        assert f"field {field!r} is {value!r}; expected" in message

    @pytest.mark.parametrize("kind", ["gated", "rnn"])
    def test_another_markov_head_is_kept(self, kind: str) -> None:
        config = read(FLASH | {"dspark_markov_head": kind})
        assert config.drafter is not None and config.drafter.markov_head == kind
        assert read(config.to_dict()) == config

    def test_the_vanilla_markov_head_is_not_written_down(self) -> None:
        assert "dspark_markov_head" not in read(FLASH | {"dspark_markov_head": "vanilla"}).to_dict()

    @pytest.mark.parametrize("value", ["lstm", None, 1])
    def test_an_unknown_markov_head_is_named(self, value: Any) -> None:
        message = refusal(FLASH | {"dspark_markov_head": value})
        assert f"field 'dspark_markov_head' is {value!r}; expected one of vanilla, gated, rnn" in message

    @pytest.mark.parametrize("raw", [None, [], "deepseek_v4", 4, True])
    def test_the_whole_must_be_an_object(self, raw: Any) -> None:
        assert f"expected a JSON object, found {type(raw).__name__}" in refusal(raw)


class TestConsistency:
    """Each row breaks one relation between fields of the tiny configuration."""

    ROWS: tuple[tuple[str, Any, str], ...] = (
        ("compress_ratios", [0, 4], "at least 3 entries"),
        ("compress_ratios", [0, 3, 8, 0, 0], "0 or at least 4"),
        ("compress_ratios", [0, 4, 8, 4, 0], "0 for every drafter stage"),
        ("compress_ratios", [0, 4, 8, 0, 8], "0 for every drafter stage"),
        ("compress_ratios", [0, 4, 8], "an entry for each drafter stage"),
        ("o_groups", 3, "a divisor of num_attention_heads=4"),
        ("o_groups", 8, "a divisor of num_attention_heads=4"),
        ("qk_rope_head_dim", 7, "an even number"),
        ("qk_rope_head_dim", 32, "less than head_dim=32"),
        ("qk_rope_head_dim", 18, "at most index_head_dim=16"),
        ("index_head_dim", 24, "a power of two"),
        ("num_experts_per_tok", 7, "at most 6 experts"),
        ("num_hash_layers", 4, "at most num_hidden_layers=3"),
        ("hidden_size", 48, "a multiple of 32"),
        ("moe_intermediate_size", 40, "a multiple of 32"),
        ("eos_token_id", 96, "ids below vocab_size=96"),
        ("eos_token_id", [1, 97], "ids below vocab_size=96"),
        ("dspark_target_layer_ids", [0, 2, 1], "ascending layer numbers"),
        ("dspark_target_layer_ids", [0, 1, 1], "ascending layer numbers"),
        ("dspark_target_layer_ids", [1, 2, 3], "layers below 3"),
        ("dspark_noise_token_id", 96, "an id below 96"),
    )

    @pytest.mark.parametrize(("field", "value", "expected"), ROWS)
    def test_a_contradiction_is_named(self, field: str, value: Any, expected: str) -> None:
        message = refusal(TINY | {field: value})
        found = [value] if field == "eos_token_id" and isinstance(value, int) else value
        assert f"field {field!r} is {found!r}; expected" in message and expected in message

    def test_values_at_the_edge_are_accepted(self) -> None:
        edge = {"qk_rope_head_dim": 16, "num_experts_per_tok": 6, "num_hash_layers": 3, "o_groups": 4}
        edge |= {"eos_token_id": 95, "dspark_noise_token_id": 95, "dspark_target_layer_ids": [2], "hidden_size": 32}
        read(TINY | edge)
        read(TINY | {"compress_ratios": [0, 4, 5, 0], "num_hash_layers": 0, "dspark_noise_token_id": 0})


class TestFiles:
    def file_refusal(self, path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            ModelConfig.from_file(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: ") and message.endswith(".")
        return message

    @pytest.mark.parametrize("golden", ["tiny-a", "tiny-b"])
    def test_golden(self, golden: str) -> None:
        path = GOLDEN / golden / "config.json"
        assert ModelConfig.from_file(path) == ModelConfig.from_file(str(path)) == read(CONFIGS[golden])

    def test_absent(self, tmp_path: Path) -> None:
        message = self.file_refusal(tmp_path / "config.json")
        assert "cannot be read (No such file or directory); name a folder that holds config.json" in message

    def test_a_folder(self, tmp_path: Path) -> None:
        assert "cannot be read (Is a directory)" in self.file_refusal(tmp_path)

    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b'{"vocab_size": 1,}', b"\xff\xfe{}", json.dumps(FLASH).encode()[:-9], b"[" * 100_000],
        ids=["empty", "open", "comma", "not utf-8", "cut", "deep"],
    )
    def test_broken(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "config.json"
        path.write_bytes(content)
        message = self.file_refusal(path)
        assert "is not valid JSON (" in message and "fetch the file again" in message

    def test_not_an_object(self, tmp_path: Path) -> None:
        path = tmp_path / "config.json"
        path.write_text("[1]")
        assert "expected a JSON object, found list" in self.file_refusal(path)

    def test_fields_of_a_file_are_refused_with_its_path(self, tmp_path: Path) -> None:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(FLASH | {"vocab_size": "many"}))
        assert "field 'vocab_size' is 'many'" in self.file_refusal(path)
