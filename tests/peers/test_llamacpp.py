"""llama.cpp runs the files that `convert` writes: it takes drafts, loses nothing by them, and drafts what we draft.

The pair is the packaged model; `tiny_target` writes its target, which the package itself does not convert.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from drafting import draft_program
from llamacpp import NORMALISED_OVER, Answer, Round, answer
from oracle import Array, Result, Weights, draft, read_weights, softmax, target
from tiny_target import write_target

import dspark_jax
from dspark_jax import ModelConfig
from dspark_jax.assets import TINY_V4
from dspark_jax.checkpoint.gguf.convert import convert
from dspark_jax.checkpoint.gguf.file import GGUFFile, TensorInfo, Value, write_gguf
from dspark_jax.checkpoint.gguf.layout import Build
from dspark_jax.formats.ggml import F32

pytest.importorskip("xllamacpp", reason="llama.cpp is not here: uv sync --group peers")

CONFIG = ModelConfig.from_file(TINY_V4 / "config.json")
PROMPTS = [
    json.loads(line)["prompt_ids"][:8]  # so short that the answer fills the window
    for line in (TINY_V4 / "prompts.jsonl").read_text().splitlines()[:3]
]
TOLERANCE = 1e-3
BUILDS: tuple[Build, ...] = ("llama.cpp-bf16", "llama.cpp-q8_0")
every_build = pytest.mark.parametrize("build", BUILDS)

ALL_PICKED = 4 * (CONFIG.index_topk + 1) - 1
"""At positions before this one the indexer takes every entry, and a rounding chooses none for another."""

SAME_RULE = CONFIG.sliding_window - CONFIG.block_size
"""With more positions committed, llama.cpp hides the oldest of the window from later slots; the release does not."""


@dataclass(frozen=True)
class Files:
    """The target, the drafters as `convert` writes them, and these in F32: llama.cpp rounds activations to the type
    of the weights that they meet."""

    target: Path
    drafters: dict[Build, Path]
    wide: dict[Build, Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    out = tmp_path_factory.mktemp("llamacpp")
    made = Files(
        target=out / "target.gguf",
        drafters={build: out / f"{build}.gguf" for build in BUILDS},
        wide={build: out / f"{build}-f32.gguf" for build in BUILDS},
    )
    write_target(TINY_V4, made.target)
    for build, file in made.drafters.items():
        convert(TINY_V4, build, file, "llama.cpp")
        widen(file, made.wide[build])
    return made


def widen(file: Path, out: Path, **changed: Value) -> None:
    """The values of a GGUF file, as the package gguf decodes them, in F32; with other metadata of `dflash`."""
    values = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        for tensor in gguf.GGUFReader(file).tensors
    }
    infos = {name: TensorInfo(F32, value.shape) for name, value in values.items()}
    metadata = GGUFFile(file).metadata | {f"dflash.{key}": value for key, value in changed.items()}
    write_gguf(out, metadata, infos, lambda name: [values[name].astype(np.float32)], overwrite=False)


# What the target says ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights() -> Weights:
    return read_weights(TINY_V4)


@pytest.fixture(scope="module")
def alone(files: Files) -> list[Answer]:
    """To each prompt, without a drafter, with every token's log probability."""
    counts = [ALL_PICKED - len(prompt) for prompt in PROMPTS]
    return [
        answer(files.target, None, prompt, count, CONFIG.vocab_size)
        for prompt, count in zip(PROMPTS, counts, strict=True)
    ]


@dataclass(frozen=True)
class Text:
    """A prompt and its answer, and what the oracle makes of them."""

    prompt: int
    tokens: list[int]
    result: Result


@pytest.fixture(scope="module")
def text(alone: list[Answer], weights: Weights) -> Text:
    tokens = PROMPTS[0] + alone[0].tokens
    return Text(len(PROMPTS[0]), tokens, target(CONFIG, weights, tokens))


def test_the_target_is_the_checkpoints(alone: list[Answer], text: Text) -> None:
    expected = np.log(softmax(text.result.logits[text.prompt - 1 : -1], axis=-1))
    for told, row in zip(alone[0].likeliest, expected, strict=True):
        assert len(told) == len(row)
        assert max(abs(row[token] - value) for token, value in told.items()) < TOLERANCE


@every_build
def test_nothing_is_lost_by_drafts(build: Build, files: Files, alone: list[Answer]) -> None:
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        helped = answer(files.target, files.drafters[build], prompt, len(expected.tokens))
        assert helped.tokens == expected.tokens
        assert 0 < helped.accepted < helped.drafted and expected.drafted == 0


# What the drafter says -----------------------------------------------------------------------------------------------


@every_build
def test_drafts_are_ours(build: Build, files: Files, text: Text) -> None:
    """In every round in which both hold the same rule: the drafts, their probabilities, how many are accepted."""
    blocks, _ = drafted(files, files.wide[build], text)
    assert len(blocks) > 10 and sum(block.accepted for block in blocks) > 10
    for block, logits in zip(blocks, our_logits(files.drafters[build], text, blocks), strict=True):
        drafts = logits.argmax(axis=-1)
        assert block.tokens[:, 0].tolist() == drafts.tolist()
        assert difference(block, logits) < TOLERANCE
        follows = text.tokens[position(block, text) + 1 :][: len(drafts)]
        assert block.accepted == np.append(drafts != follows, True).argmax()


def test_behind_a_full_window_it_is_the_rule_that_differs(files: Files, text: Text, weights: Weights) -> None:
    _, blocks = drafted(files, files.wide["llama.cpp-bf16"], text)

    def largest(window_of_slots: bool) -> float:
        starts = [position(block, text) for block in blocks]
        logits = [
            draft(CONFIG, weights, text.result.taps[:start], text.tokens[start], window_of_slots).logits
            for start in starts
        ]
        return max(difference(*pair) for pair in zip(blocks, logits, strict=True))

    assert largest(window_of_slots=True) < TOLERANCE < largest(window_of_slots=False)


def test_wrong_layers_are_seen(files: Files, text: Text, tmp_path: Path) -> None:
    """Layers counted as ds4 counts them, which llama.cpp takes without a word: the probabilities tell."""
    exact, wrong = files.drafters["llama.cpp-bf16"], tmp_path / "wrong.gguf"
    layers = GGUFFile(exact).metadata["dflash.target_layers"]
    widen(exact, wrong, target_layers=layers - np.int32(1))
    blocks, _ = drafted(files, wrong, text)
    ours = our_logits(exact, text, blocks)
    assert max(difference(*pair) for pair in zip(blocks, ours, strict=True)) > 100 * TOLERANCE


def drafted(files: Files, drafter: Path, text: Text) -> tuple[list[Round], list[Round]]:
    """The rounds of the answer: those in which both hold the same rule, and the later ones."""
    found = answer(files.target, drafter, text.tokens[: text.prompt], len(text.tokens) - text.prompt)
    assert found.tokens == text.tokens[text.prompt :]
    same = [block for block in found.rounds if position(block, text) <= SAME_RULE]
    return same, found.rounds[len(same) :]


def position(block: Round, text: Text) -> int:
    """Of its anchor; as many are committed before it."""
    return text.prompt + block.begin


def our_logits(drafter: Path, text: Text, blocks: list[Round]) -> Array:
    """float32 [rounds, slots, V], with the Markov bias."""
    model = dspark_jax.load(TINY_V4, numerics="float32", drafter=drafter)
    context = jnp.array([position(block, text) for block in blocks], jnp.int32)
    taps = jnp.repeat(jnp.asarray(text.result.taps[None], jnp.float32), len(blocks), axis=0)
    anchors = jnp.array(text.tokens, jnp.int32)[context]
    return np.asarray(draft_program(model, model.setting(len(text.tokens)), taps, context, anchors).logits)


def difference(block: Round, logits: Array) -> float:
    """The largest of any probability that the log tells; it tells nothing of slots behind the end of the answer."""
    logits = logits[: len(block.tokens)]
    sums = np.exp(-np.sort(-logits, axis=-1)[:, :NORMALISED_OVER]).sum(axis=-1, keepdims=True)
    ours = np.exp(np.take_along_axis(logits, block.tokens, axis=-1)) / sums
    return float(np.abs(ours - block.probabilities).max())
