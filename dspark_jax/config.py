"""What a checkpoint says it is: `config.json` as frozen dataclasses, checked field by field.

Fields keep their Hugging Face names. Whatever can be derived is derived: layer kinds come from `compress_ratios`, and
so does the number of drafter stages, because `num_nextn_predict_layers` says 1 where three stages are stored.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from dspark_jax.errors import ConfigError
from pallas_kernels.block_scaled import BLOCKS

LayerKind = Literal["sliding", "csa", "hca"]
MarkovHeadKind = Literal["vanilla", "gated", "rnn"]

OVERLAP_RATIO = 4  # the one ratio whose windows overlap and whose entries an indexer selects (CSA)
LARGEST_INTEGER = 2**31 - 1  # sizes and ids are int32 on the device
LARGEST_NUMBER = (2 - 2**-23) * 2.0**127  # and other numbers float32
FP4_GROUP = BLOCKS["e2m1"][1]  # widths of expert matrices must be multiples of it

# Facts of the architecture that a checkpoint states and this code relies on.
FIXED_FIELDS: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "scoring_func": "sqrtsoftplus",
    "expert_dtype": "fp4",
    "hidden_act": "silu",
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
FIXED_QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": list(BLOCKS["e4m3"]),
}
REQUIRED_FIXED = ("model_type", "scoring_func", "expert_dtype")


def halves(ratio: int) -> int:
    """Windows that a token feeds, and so halves of its projection: two where windows overlap."""
    return 2 if ratio == OVERLAP_RATIO else 1


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the layers with compressed entries (`rope_scaling`)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class DrafterConfig:
    """The `dspark_*` fields of the checkpoint's configuration.

    Attributes:
        block_size: drafts per block; the block has as many input slots, the anchor's included.
        noise_token_id: id fed to every slot but the anchor's.
        target_layer_ids: target layers whose outputs are the taps, ascending.
        markov_rank: width of the Markov head.
        markov_head: its kind. Released checkpoints do not say, and have the vanilla one; the others are this package's
            own extension, for drafters trained with it.
    """

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    markov_head: MarkovHeadKind = "vanilla"


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V4 model and, unless `drafter` is None, its DSpark drafter. Field names are those of `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    rope_theta: float
    rope_scaling: RopeScaling
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    max_position_embeddings: int
    eos_token_id: tuple[int, ...]
    drafter: DrafterConfig | None

    @property
    def layer_ratios(self) -> tuple[int, ...]:
        """Compression ratio of each target layer."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each target layer: window only, compressed with an indexer (CSA), or compressed (HCA)."""
        return tuple(_kind(ratio) for ratio in self.layer_ratios)

    @property
    def num_stages(self) -> int:
        """Number of drafter stages stored as `mtp.N`; 0 for a target without a DSpark drafter."""
        return len(self.compress_ratios) - self.num_hidden_layers if self.drafter else 0

    @property
    def taps_width(self) -> int:
        """Channels of the target features that the drafter reads."""
        return len(self.drafter.target_layer_ids) * self.hidden_size if self.drafter else 0

    @property
    def block_size(self) -> int:
        """Drafts per round; 0 without a drafter."""
        return self.drafter.block_size if self.drafter else 0

    @property
    def step_width(self) -> int:
        """Rows per sequence in every decoding step: the anchor and a whole block of drafts."""
        return 1 + self.block_size

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Reads `config.json`.

        Raises:
            ConfigError: the file cannot be read, is not JSON, or is not a configuration this package runs.
        """
        path = Path(path)
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"{path}: cannot be read ({reason}); name a folder that holds config.json.") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is not valid JSON ({error}); fetch the file again.") from error
        return cls.from_dict(raw, source=str(path))

    @classmethod
    def from_dict(cls, raw: Any, source: str = "config") -> "ModelConfig":
        """Builds and checks a configuration from the parsed `config.json`; `source` names it in errors.

        Raises:
            ConfigError: naming the field, the value found and the value expected.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{source}: expected a JSON object, found {type(raw).__name__}.")
        _refuse_other_architectures(raw, source)
        read = _Reader(raw, source)
        values = {field.name: _READERS[field.name](read) for field in dataclasses.fields(cls)}
        config = cls(**values)
        _check_consistency(config, source)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The configuration as a `config.json` that `from_dict` reads back to an equal value."""
        raw = dataclasses.asdict(self)
        drafter = raw.pop("drafter") or {}
        if drafter.get("markov_head") == "vanilla":
            del drafter["markov_head"]  # as released checkpoints have it
        raw["eos_token_id"] = self.eos_token_id[0] if len(self.eos_token_id) == 1 else list(self.eos_token_id)
        raw["rope_scaling"] = {**raw["rope_scaling"], "type": "yarn"}
        raw |= {f"dspark_{name}": value for name, value in drafter.items()}
        raw |= FIXED_FIELDS | {"quantization_config": FIXED_QUANTIZATION | {"activation_scheme": "dynamic"}}
        return json.loads(json.dumps(raw | {"torch_dtype": "bfloat16"}))

    @classmethod
    def tiny(cls, **changes: Any) -> "ModelConfig":
        """A model of a few thousand weights a layer with every layer kind, for tests; `changes` replace raw fields."""
        return cls.from_dict(_TINY | changes, source="ModelConfig.tiny")


_TINY: dict[str, Any] = {
    **FIXED_FIELDS,
    "quantization_config": FIXED_QUANTIZATION,
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 8,
    "compress_ratios": [0, 4, 8, 0, 0],
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    },
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 3,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 95,
    "dspark_target_layer_ids": [0, 1, 2],
    "dspark_markov_rank": 8,
}


def _kind(ratio: int) -> LayerKind:
    if ratio == 0:
        return "sliding"
    return "csa" if ratio == OVERLAP_RATIO else "hca"


def _refuse_other_architectures(raw: Mapping[str, Any], source: str) -> None:
    """Names what a foreign checkpoint is, V4.1 above all, before any field is found missing or odd."""
    named = [str(raw[field]) for field in ("model_type", "architectures") if field in raw]
    squeezed = "".join(named).lower().replace("_", "").replace(".", "").replace("-", "")
    engram = sorted(key for key in raw if "engram" in key.lower())
    ratios = raw.get("compress_ratios")
    short_ratios = sorted({r for r in ratios if type(r) is int and r in (1, 2)}) if isinstance(ratios, list) else []
    if "deepseekv41" in squeezed or engram or short_ratios:
        found = f"compress_ratios with {short_ratios}" if short_ratios else ", ".join(engram or named)
        raise ConfigError(
            f"{source}: found {found}, which belongs to DeepSeek-V4.1, another architecture; "
            "dspark_jax runs DeepSeek-V4 (Flash and Pro) with its DSpark drafter."
        )
    for field, expected in FIXED_FIELDS.items():
        if field in REQUIRED_FIXED and field not in raw:
            raise ConfigError(f"{source}: field {field!r} is missing; expected {expected!r}.")
        if raw.get(field, expected) != expected:
            raise ConfigError(f"{source}: field {field!r} is {raw[field]!r}; dspark_jax runs only {expected!r}.")
    quantization = raw.get("quantization_config")
    if not isinstance(quantization, Mapping):
        raise ConfigError(f"{source}: field 'quantization_config' is missing; expected {FIXED_QUANTIZATION}.")
    for field, expected in FIXED_QUANTIZATION.items():
        if quantization.get(field) != expected:
            found = quantization.get(field, "missing")
            raise ConfigError(f"{source}: field 'quantization_config.{field}' is {found!r}; expected {expected!r}.")


class _Reader:
    """Typed access to one JSON object: every refusal names the field, what was found and what was expected."""

    def __init__(self, raw: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.raw, self.source, self.prefix = raw, source, prefix

    def error(self, name: str, expected: str) -> ConfigError:
        field = f"{self.prefix}{name}"
        if name not in self.raw:
            return ConfigError(f"{self.source}: field {field!r} is missing; expected {expected}.")
        return ConfigError(f"{self.source}: field {field!r} is {self.raw[name]!r}; expected {expected}.")

    def integer(self, name: str, minimum: int = 1) -> int:
        value = self.raw.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= LARGEST_INTEGER:
            raise self.error(name, f"an integer of at least {minimum}")
        return value

    def positive(self, name: str) -> float:
        value = self.raw.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LARGEST_NUMBER:
            raise self.error(name, f"a positive number of at most {LARGEST_NUMBER:.8g}")
        return float(value)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.raw.get(name)
        if not isinstance(value, list) or not value or any(type(v) is not int or v < 0 for v in value):
            raise self.error(name, "a list of non-negative integers")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.raw.get(name)
        ids = value if isinstance(value, list) else [value]
        if any(type(v) is not int or v < 0 for v in ids):
            raise self.error(name, "a token id or a list of token ids")
        return tuple(ids)

    def one_of(self, name: str, choices: tuple[str, ...], default: str) -> Any:
        value = self.raw.get(name, default)
        if value not in choices:
            raise self.error(name, f"one of {', '.join(choices)}")
        return value

    def rope_scaling(self, name: str) -> RopeScaling:
        value = self.raw.get(name)
        if not isinstance(value, Mapping) or value.get("type", value.get("rope_type")) != "yarn":
            raise self.error(name, "an object of type 'yarn'")
        inner = _Reader(value, self.source, f"{name}.")
        return RopeScaling(
            factor=inner.positive("factor"),
            original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
            beta_fast=inner.positive("beta_fast"),
            beta_slow=inner.positive("beta_slow"),
        )

    def drafter(self) -> DrafterConfig | None:
        if not any(key.startswith("dspark_") for key in self.raw):
            return None
        return DrafterConfig(
            block_size=self.integer("dspark_block_size"),
            noise_token_id=self.integer("dspark_noise_token_id", minimum=0),
            target_layer_ids=self.integers("dspark_target_layer_ids"),
            markov_rank=self.integer("dspark_markov_rank"),
            markov_head=self.one_of("dspark_markov_head", get_args(MarkovHeadKind), default="vanilla"),
        )


def _readers() -> dict[str, Callable[[_Reader], Any]]:
    """How each field of ModelConfig is read; the ones not named here are positive integers."""
    special: dict[str, Callable[[_Reader], Any]] = {
        "compress_ratios": lambda read: read.integers("compress_ratios"),
        "rope_scaling": lambda read: read.rope_scaling("rope_scaling"),
        "num_hash_layers": lambda read: read.integer("num_hash_layers", minimum=0),
        "eos_token_id": lambda read: read.token_ids("eos_token_id"),
        "drafter": lambda read: read.drafter(),
    }

    def default(name: str, kind: Any) -> Callable[[_Reader], Any]:
        return (lambda read: read.positive(name)) if kind is float else (lambda read: read.integer(name))

    return {f.name: special.get(f.name) or default(f.name, f.type) for f in dataclasses.fields(ModelConfig)}


_READERS = _readers()


def _check_consistency(c: ModelConfig, source: str) -> None:
    """Relations between fields; the first that fails is named with its values."""
    stage_ratios = c.compress_ratios[c.num_hidden_layers :]
    rules: list[tuple[bool, str, str]] = [
        (len(c.compress_ratios) >= c.num_hidden_layers, "compress_ratios", f"at least {c.num_hidden_layers} entries"),
        (all(r == 0 or r >= OVERLAP_RATIO for r in c.compress_ratios), "compress_ratios", "ratios of 0 or at least 4"),
        (not any(stage_ratios), "compress_ratios", "0 for every drafter stage (the entries past num_hidden_layers)"),
        (
            c.num_attention_heads % c.o_groups == 0,
            "o_groups",
            f"a divisor of num_attention_heads={c.num_attention_heads}",
        ),
        (c.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "an even number"),
        (c.qk_rope_head_dim < c.head_dim, "qk_rope_head_dim", f"less than head_dim={c.head_dim}"),
        (c.qk_rope_head_dim <= c.index_head_dim, "qk_rope_head_dim", f"at most index_head_dim={c.index_head_dim}"),
        (c.index_head_dim.bit_count() == 1, "index_head_dim", "a power of two (Hadamard rotation)"),
        (c.num_experts_per_tok <= c.n_routed_experts, "num_experts_per_tok", f"at most {c.n_routed_experts} experts"),
        (
            c.num_hash_layers <= c.num_hidden_layers,
            "num_hash_layers",
            f"at most num_hidden_layers={c.num_hidden_layers}",
        ),
        (c.hidden_size % FP4_GROUP == 0, "hidden_size", f"a multiple of {FP4_GROUP} (FP4 scale groups)"),
        (c.moe_intermediate_size % FP4_GROUP == 0, "moe_intermediate_size", f"a multiple of {FP4_GROUP}"),
        (all(i < c.vocab_size for i in c.eos_token_id), "eos_token_id", f"ids below vocab_size={c.vocab_size}"),
    ]
    if c.drafter is not None:
        ids = c.drafter.target_layer_ids
        rules += [
            (c.num_stages > 0, "compress_ratios", "an entry for each drafter stage, past those of the target layers"),
            (list(ids) == sorted(set(ids)), "drafter.target_layer_ids", "ascending layer numbers"),
            (max(ids) < c.num_hidden_layers, "drafter.target_layer_ids", f"layers below {c.num_hidden_layers}"),
            (c.drafter.noise_token_id < c.vocab_size, "drafter.noise_token_id", f"an id below {c.vocab_size}"),
        ]
    for holds, field, expected in rules:
        if not holds:
            owner, name = (c.drafter, field.split(".")[1]) if "." in field else (c, field)
            raw_name = f"dspark_{name}" if "." in field else name
            found = getattr(owner, name)
            found = list(found) if isinstance(found, tuple) else found
            raise ConfigError(f"{source}: field {raw_name!r} is {found!r}; expected {expected}.")
