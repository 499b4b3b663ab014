"""The feature cache on disk: DeepSpec's bytes, kills at any moment, and files that somebody damaged."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dspark_jax.config import ModelConfig
from dspark_jax.data.cache_format import bytes_per_token, digest_of, facts_of_run
from dspark_jax.data.cache_reader import FeatureCache
from dspark_jax.data.cache_writer import CacheWriter
from dspark_jax.data.document import Document
from dspark_jax.data.example import Features
from dspark_jax.errors import CacheError

GOLDEN = Path(__file__).parents[1] / "golden" / "training"
OFFICIAL = GOLDEN / "target_cache"
SHARD_BYTES = 450  # between 420 bytes, the two samples that share the last golden shard, and the 504 of the first two

LAYERS, WIDTH = 2, 6
FACTS = {"target_layer_ids": [0, 2], "hidden_size": WIDTH, "model_fingerprint": "a", "vocab_size": 50}


def documents(count: int, seed: int = 0) -> list[Document]:
    rng = np.random.default_rng(seed)

    def features(length: int, width: int) -> np.ndarray:
        return rng.standard_normal((length, width), np.float32).astype(ml_dtypes.bfloat16)

    def document(length: int) -> Document:
        ids, supervised = rng.integers(0, 50, length, np.int32), rng.random(length) < 0.5
        return Document(ids, supervised, Features(features(length, LAYERS * WIDTH), features(length, WIDTH)))

    return [document(int(length)) for length in rng.integers(1, 12, count)]


def write(directory: Path, some: list[Document], facts: dict | None = None, shard_bytes: int = SHARD_BYTES) -> None:
    facts = (facts or FACTS) | {"documents": digest_of(some)}
    with CacheWriter(directory, facts, shard_bytes) as writer:
        for document in some[writer.samples :]:
            writer.append(document)
        if not writer.finished:
            writer.finish()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def assert_same(document: Document, other: Document) -> None:
    assert document.features is not None and other.features is not None
    for value, expected in (
        (document.ids, other.ids),
        (document.supervised, other.supervised),
        (document.features.taps, other.features.taps),
        (document.features.hidden, other.features.hidden),
    ):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)


# DeepSpec's files ----------------------------------------------------------------------------------------------------


def test_a_cache_of_deepspec_is_read() -> None:
    cache, expected = FeatureCache(OFFICIAL), load_file(GOLDEN / "target_cache_expected.safetensors")
    assert len(cache) == 5 and cache.lengths.tolist() == [7, 5, 9, 4, 6]
    for number in range(5):
        golden = Document(
            expected[f"{number}/input_ids"],
            expected[f"{number}/loss_mask"].astype(bool),
            Features(
                expected[f"{number}/target_hidden_states"],
                expected[f"{number}/target_last_hidden_states"],
            ),
        )
        assert_same(cache[number], golden)
    cache.check_documents()


def test_it_is_written_byte_for_byte(tmp_path: Path) -> None:
    cache = FeatureCache(OFFICIAL)
    with CacheWriter(tmp_path, cache.facts, SHARD_BYTES) as writer:
        for number in range(len(cache)):
            writer.append(cache[number])
        writer.finish()
    assert contents(tmp_path) == contents(OFFICIAL)


def test_a_token_of_flash_takes_32_8_kilobytes() -> None:
    assert bytes_per_token({"target_layer_ids": [40, 41, 42], "hidden_size": 4096}) == 32_774


# Kills ---------------------------------------------------------------------------------------------------------------

KILLED = """
import os, sys
from pathlib import Path
sys.path[:0] = {path!r}
import test_cache
from dspark_jax.data import cache_writer

folder, happened, moment = Path(sys.argv[1]), 0, 0

def count():
    global happened
    happened += 1
    if happened == moment:
        os._exit(9)

def torn(file, content):  # killed before, in the middle of, or behind the bytes
    count()
    os.write(file, content[: len(content) // 2])
    count()
    os.write(file, content[len(content) // 2 :])
    count()

def replaced(path, content, replace=cache_writer.replace):
    count()
    replace(path, content)
    count()

cache_writer._write, cache_writer.replace = torn, replaced
status = None
while status != 0:
    moment += 1
    child = os.fork()
    if not child:
        test_cache.write(folder / str(moment), test_cache.documents(4))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
print(moment)
"""


def test_a_writer_killed_at_any_moment_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """A process that forks a writer for each moment, and kills it then; what is left, we go on with."""
    write(tmp_path / "undisturbed", documents(4))
    undisturbed = contents(tmp_path / "undisturbed")
    assert len(undisturbed) > 3, "several shards"
    code = KILLED.format(path=[*sys.path, str(Path(__file__).parent), str(Path(__file__).parents[1])])
    ran = subprocess.run([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, check=True)
    moments = int(ran.stdout)
    assert moments > 4 * 6, "three in each write of four samples and their records"
    for moment in range(1, moments):
        killed = tmp_path / str(moment)
        write(killed, documents(4))
        assert contents(killed) == undisturbed


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_a_kill_leaves_is_cut_back_to_whole_samples(data: st.DataObject, tmp_path_factory) -> None:
    """The files of an unfinished cache, cut anywhere (the index never ahead of the shards by more than the cut)."""
    folder, some = tmp_path_factory.mktemp("cache"), documents(6)
    write(folder / "whole", some)
    with CacheWriter(folder / "torn", FACTS | {"documents": digest_of(some)}, SHARD_BYTES) as writer:
        for document in some[: data.draw(st.integers(0, 6), "samples")]:
            writer.append(document)
    for name in sorted(path.name for path in (folder / "torn").iterdir() if path.name != "writing.json"):
        if data.draw(st.booleans(), f"{name} is torn"):
            size = (folder / "torn" / name).stat().st_size
            os.truncate(folder / "torn" / name, data.draw(st.integers(0, size), name))
    write(folder / "torn", some)
    assert contents(folder / "torn") == contents(folder / "whole")


def test_an_unfinished_cache_is_not_read(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, FACTS, SHARD_BYTES) as writer:
        writer.append(documents(1)[0])
    with pytest.raises(CacheError, match=r"has no manifest.json, so it is unfinished; start"):
        FeatureCache(tmp_path)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, FACTS), pytest.raises(CacheError, match="is being written by another process"):
        CacheWriter(tmp_path, FACTS)
    CacheWriter(tmp_path, FACTS).__exit__(None, None, None)


@pytest.mark.parametrize("finished", [True, False])
def test_the_cache_of_another_run_is_not_gone_on_with(finished: bool, tmp_path: Path) -> None:
    some = documents(4)
    if finished:
        write(tmp_path, some)
    else:
        with CacheWriter(tmp_path, FACTS | {"documents": digest_of(some)}, SHARD_BYTES) as writer:
            writer.append(some[0])
    before = contents(tmp_path)
    with pytest.raises(CacheError, match="has model_fingerprint 'a' and this run 'b'; name the cache"):
        write(tmp_path, some, FACTS | {"model_fingerprint": "b"})
    with pytest.raises(CacheError, match="has documents '"):
        write(tmp_path, some[::-1])
    assert contents(tmp_path) == before
    write(tmp_path, some)


def test_who_goes_on_may_call_the_files_otherwise(tmp_path: Path) -> None:
    some, names = documents(4), FACTS | {"source_jsonl_paths": ["data.jsonl"]}
    write(tmp_path / "undisturbed", some, names)
    with CacheWriter(tmp_path / "cache", names | {"documents": digest_of(some)}, SHARD_BYTES) as writer:
        writer.append(some[0])
    for _ in range(2):  # unfinished, and finished
        write(tmp_path / "cache", some, FACTS | {"source_jsonl_paths": ["./data.jsonl"]})
        assert contents(tmp_path / "cache") == contents(tmp_path / "undisturbed")


def test_a_folder_with_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CacheError, match="is not empty and holds no feature cache"):
        write(tmp_path, documents(1))
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


def test_features_of_other_shapes_are_refused(tmp_path: Path) -> None:
    document = documents(1)[0]
    assert document.features is not None
    exchanged = Document(document.ids, document.supervised, Features(document.features.hidden, document.features.taps))
    with CacheWriter(tmp_path, FACTS) as writer, pytest.raises(CacheError, match="features have the shapes"):
        writer.append(exchanged)


def test_a_run_with_another_model_is_refused(tmp_path: Path) -> None:
    config = ModelConfig.tiny(vocab_size=50, dspark_noise_token_id=49, dspark_target_layer_ids=[0, 2])
    facts = facts_of_run(config, "a", "bfloat16") | {"hidden_size": WIDTH}
    write(tmp_path, documents(2))
    cache = FeatureCache(tmp_path)
    cache.check_run(facts)
    cache.check_run(facts | {"numerics": "official"})
    for field, other in (
        ("model_fingerprint", "b"),
        ("target_layer_ids", [0, 1]),
        ("hidden_size", 8),
        ("vocab_size", 51),
    ):
        with pytest.raises(CacheError, match=f"has {field} .* and this run .*{other if field == 'vocab_size' else ''}"):
            cache.check_run(facts | {field: other})
    with pytest.raises(CacheError, match="has model_fingerprint None and this run 'a'"):
        FeatureCache(OFFICIAL).check_run(facts)


def swap_records(folder: Path) -> None:
    index = (folder / "samples.idx").read_bytes()
    (folder / "samples.idx").write_bytes(index[56:112] + index[:56] + index[112:])


def exchange_shards(folder: Path) -> None:
    (folder / "shard-00000.bin").rename(folder / "x")
    (folder / "shard-00002.bin").rename(folder / "shard-00000.bin")
    (folder / "x").rename(folder / "shard-00002.bin")


def edit_manifest(**fields: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | fields))

    return edit


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda folder: os.truncate(folder / "shard-00003.bin", 419), "shard-00003.bin: has 419 bytes; .* says 420"),
        (lambda folder: os.truncate(folder / "samples.idx", 279), "samples.idx: has 279 bytes; expected a multiple"),
        (lambda folder: os.truncate(folder / "samples.idx", 224), "num_samples is 5; samples.idx has 4"),
        (swap_records, "samples.idx: record 0 is .*; expected samples numbered from 0"),
        (exchange_shards, "shard-00000.bin: has 378 bytes; samples.idx says 294"),
        (lambda folder: (folder / "shard-00001.bin").unlink(), "shard-00001.bin: cannot be read"),
        (lambda folder: (folder / "samples.idx").unlink(), "samples.idx: cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json: is not JSON"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json: is list; expected an object"),
        (edit_manifest(version=1), "manifest.json: version is 1; expected 2"),
        (edit_manifest(hidden_dtype="float32"), "hidden_dtype is 'float32'; expected 'bfloat16'"),
        (edit_manifest(hidden_size=7), "samples.idx: record 0 is"),
        (edit_manifest(hidden_size=0), "hidden_size is 0; expected an integer of at least 1"),
        (edit_manifest(target_layer_ids=[2, 0]), r"target_layer_ids is \[2, 0\]; expected ascending integers"),
        (edit_manifest(target_layer_ids=[0]), "samples.idx: record "),
        (edit_manifest(shards=[]), r"shards is \[\]; samples.idx has"),
        (edit_manifest(num_shards=3), "num_shards is 3; samples.idx has 4"),
    ],
)
def test_damage_is_named(damage: Callable[[Path], None], complaint: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(OFFICIAL, folder)
    damage(folder)
    with pytest.raises(CacheError, match=complaint):
        FeatureCache(folder)


def test_bytes_that_no_writer_writes_are_named(tmp_path: Path) -> None:
    write(tmp_path, [Document(d.ids, d.supervised, d.features) for d in documents(3)])
    row = FeatureCache(tmp_path).records[1]
    path = tmp_path / f"shard-{row['shard']:05d}.bin"
    whole = bytearray(path.read_bytes())
    for field, byte in (("supervised", 2), ("ids", 200)):
        torn = whole.copy()
        torn[int(row[field])] = byte
        path.write_bytes(torn)
        with pytest.raises(CacheError, match="sample 1 has ids outside the vocabulary, or a loss mask"):
            FeatureCache(tmp_path)[1]


def test_exchanged_documents_are_found(tmp_path: Path) -> None:
    """Two documents of one length, each in a shard of its own: nothing but the digest tells."""
    same = [document for document in documents(40) if len(document) == 9][:2]
    write(tmp_path, same, shard_bytes=1)
    FeatureCache(tmp_path).check_documents()
    first, second = (tmp_path / f"shard-0000{shard}.bin" for shard in (0, 1))
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    with pytest.raises(CacheError, match="shards are damaged or exchanged"):
        FeatureCache(tmp_path).check_documents()
