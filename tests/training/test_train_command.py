"""`dspark train` and `dspark export`: from documents to a checkpoint that generates, over an interruption."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Dspark
from random_model import random_model
from training_case import BLOCK, VOCABULARY, tiny

import dspark_jax
from dspark_jax.checkpoint.folder import CheckpointFolder
from dspark_jax.cli import train as command
from dspark_jax.data.document import Document
from dspark_jax.data.documents import Documents

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a drafter that remembers its drafts; `test_step.py` has the gated one."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    dspark_jax.save(random_model(tiny(dspark_markov_head="rnn")), folder)
    return folder


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine documents, of which two fill a batch."""
    path, rng = tmp_path_factory.mktemp("documents") / "documents.jsonl", np.random.default_rng(0)
    rows = [{"ids": rng.integers(0, VOCABULARY, size).tolist()} for size in (20, 24, 16, 18, 24, 20, 22, 17, 24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@contextmanager
def interrupting_bar(steps: int) -> Iterator[Callable[[Any], None]]:
    """Something ends the command in the sixth step, between two checkpoints."""

    def report(record: dict[str, Any]) -> None:
        if record["step"] == 5:
            signal.raise_signal(signal.SIGTERM)

    yield report


def test_from_documents_to_a_drafter_that_generates_over_an_interruption(
    checkpoint: Path, documents: Path, dspark: Dspark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    source = ("--checkpoint", str(checkpoint))
    recipe = ("--scope", "heads", "--epochs", "2", "--anchors", "4", "--learning-rate", "0.01", "--json")
    train = ("train", *source, "--documents", str(documents), "--batch-size", "2", "--save-every", "3", *recipe)

    with monkeypatch.context() as patched:
        patched.setattr(command, "training_bar", interrupting_bar)
        stopped = dspark(*train, "--out", str(out))
    assert (stopped.code, stopped.out) == (130, "") and "interrupted." in stopped.err
    early = dspark("export", *source, "--run", str(out), "--out", str(tmp_path / "early"), "--json")
    assert json.loads(early.out)["steps_taken"] == 3

    ran = dspark(*train, "--out", str(out), "--tensorboard")
    assert (ran.code, ran.err) == (0, "")
    assert list(out.glob("events.out.tfevents.*"))
    alone = dspark(*train, "--out", str(undisturbed))
    summary = json.loads(ran.out)
    assert summary["steps"] == 8 and summary["step"] == 7, "two epochs of four batches; the ninth document is left out"
    assert summary | {"out": None} == json.loads(alone.out) | {"out": None}
    assert (out / "metrics.jsonl").read_bytes() == (undisturbed / "metrics.jsonl").read_bytes()
    changed = dspark(*train, "--out", str(out), "--decay", "5")
    assert changed.code == 2 and "has recipe.objective.decay 4.0 and this one 5.0" in changed.err

    exported = dspark("export", *source, "--run", str(out), "--out", str(tmp_path / "tuned"), "--json")
    assert json.loads(exported.out) == {"out": str(tmp_path / "tuned"), "steps_taken": 8, "trained_tensors": 5}
    provenance = json.loads((tmp_path / "tuned" / "training.json").read_text())
    assert provenance["steps_taken"] == 8 and provenance["recipe"]["scope"] == "heads"
    old, new = (CheckpointFolder.open(folder) for folder in (checkpoint, tmp_path / "tuned"))
    moved = {name for name in old.names if old.read(name).tobytes() != new.read(name).tobytes()}
    assert {name.split(".", 2)[2] for name in moved} == {
        "confidence_head.proj.weight",
        "markov_head.joint_proj.bias",
        "markov_head.joint_proj.weight",
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
    }
    foreign = dspark(
        "export", "--run", str(out), "--out", str(tmp_path / "other"), "--checkpoint", str(tmp_path / "tuned")
    )
    assert foreign.code == 2 and f"{out}: was trained from the checkpoint with fingerprint" in foreign.err
    occupied = dspark("export", *source, "--run", str(out), "--out", str(tmp_path / "tuned"))
    assert occupied.code == 2 and "tuned: is not empty" in occupied.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["early", "run", "tuned", "undisturbed"]

    prompt = ("--prompt-ids", "5,6,7", "--max-new-tokens", "12", "--json")
    tuned, untuned = (
        json.loads(dspark("generate", "--checkpoint", str(folder), *prompt).out)
        for folder in (tmp_path / "tuned", checkpoint)
    )
    assert tuned["tokens"] == untuned["tokens"] and len(tuned["tokens"]) == 12, "the target is what it was"


def test_memory_is_bounded_by_chunks_and_experts_stay_packed(dspark: Dspark, tmp_path: Path) -> None:
    """From config.json alone; the numbers are the compiler's."""
    anchors, experts, words = 256, 8192, 120_001
    config = tiny(vocab_size=words, n_routed_experts=experts, moe_intermediate_size=256)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    size = ("--batch-size", "1", "--row-tokens", "300", "--anchors", str(anchors), "--scope", "heads")
    ran = dspark("train", "--checkpoint", str(tmp_path), "--dry-run", "--json", *size)
    assert (ran.code, ran.err) == (0, "")
    memory = json.loads(ran.out)
    assert memory["temporary"] < anchors * BLOCK * words * 4 / 2, "half of one float32 tensor of slots and words"
    assert memory["temporary"] < experts * 256 * 64 * 2, "one stack of experts in bfloat16"
    assert memory["state"] == 3 * 4 * (2 * 8 * words + 64 + 8) + 4 * 3, "masters, two moments, and three counters"
    assert memory["example"] == 300 * (4 + 1 + 4 + 2 * 2 * 64)
    assert memory["peak"] == sum(memory[part] for part in ("model", "state", "example", "temporary"))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--out", "x"], "training needs --documents and --out; to look at the memory of a step, use --dry-run."),
        (["--documents", "x"], "training needs --documents and --out"),
        (["--documents", "nowhere.jsonl", "--out", "x"], "nowhere.jsonl: cannot be read (No such file or directory)"),
        (["--documents", "FILE", "--out", "x", "--packed"], "--packed needs features from a cache"),
        (["--documents", "FILE", "--out", "x", "--batch-size", "0"], "batch_size is 0; expected an integer"),
        (["--documents", "FILE", "--out", "x", "--batch-size", "10"], "9 documents fill 9 rows, and a batch has 10"),
        (["--documents", "FILE", "--out", "x", "--steps", "0"], "steps is 0; expected at least 1."),
        (["--documents", "FILE", "--out", "x", "--epochs", "-1"], "epochs is -1.0; expected a positive number."),
        (
            ["--documents", "FILE", "--out", "x", "--seed", "-1"],
            "seed is -1; expected an integer from 0 to 4294967295.",
        ),
        (
            ["--documents", "FILE", "--out", "x", "--min-supervised", "25"],
            "none of its 9 rows has 25 supervised tokens",
        ),
        (["--documents", "FOLDER", "--out", "x"], "manifest.json"),
        (["--dry-run", "--row-tokens", "0"], "row_tokens is 0; expected an integer of at least 1."),
        (["--dry-run", "--clip", "0"], "clip is 0.0; expected a positive norm."),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_weights_are_loaded(
    checkpoint: Path,
    documents: Path,
    dspark: Dspark,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "load", None)
    places = {"FILE": str(documents), "FOLDER": str(documents.parent)}
    ran = dspark("train", "--checkpoint", str(checkpoint), *(places.get(word, word) for word in arguments))
    assert (ran.code, ran.out) == (2, "")
    assert complaint in ran.err and ran.err.startswith("dspark: ") and ran.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_cache_has_no_use_for_passing(
    checkpoint: Path, documents: Path, dspark: Dspark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = Documents([Document(np.arange(9, dtype=np.int32), np.ones(9, bool))] * 9, rows=9, truncated=0, dropped=0)
    monkeypatch.setattr(command, "_corpus", lambda *_: cached)
    ran = dspark("train", "--checkpoint", str(checkpoint), "--documents", str(tmp_path), "--out", "x", "--passing", "2")
    assert ran.code == 2 and f"{tmp_path} is a cache that has them already." in ran.err


def test_options_that_would_do_nothing_are_refused(dspark: Dspark, tmp_path: Path) -> None:
    ran = dspark("train", "--dry-run", "--packed")
    assert ran.code == 2 and "--dry-run is about one device and cached features" in ran.err
    ran = dspark("train", "--documents", str(tmp_path), "--out", "x", "--max-length", "9")
    assert ran.code == 2 and "is a cache, whose documents are cut already" in ran.err


def test_export_needs_a_run(checkpoint: Path, dspark: Dspark, tmp_path: Path) -> None:
    ran = dspark("export", "--checkpoint", str(checkpoint), "--run", str(tmp_path), "--out", str(tmp_path / "out"))
    assert (
        ran.code == 2 and "run.json: cannot be read (No such file or directory); name the folder of a run." in ran.err
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "train",
            [
                "Fine-tune the drafter of a checkpoint on your data.",
                "--scope {heads,non_expert,full}",
                "--anchors A",
                "--decay L",
                "--confidence-gradient",
                "--dry-run",
                "(default: the packaged tiny-v4)",
                "(default: --epochs)",
            ],
        ),
        (
            "export",
            ["Write a trained drafter back as a checkpoint that `dspark generate` loads.", "--run DIR", "--out DIR"],
        ),
    ],
)
def test_help(dspark: Dspark, name: str, lines: list[str]) -> None:
    ran = dspark(name, "--help")
    assert ran.code == 0
    told = " ".join(ran.out.replace("│", " ").split())
    assert [line for line in lines if line not in told] == []
