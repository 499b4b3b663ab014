"""tiny-v4: its corpus, tokenizer, configuration, and the numbers it is judged by."""

import json
from pathlib import Path

import numpy as np
import pytest
from random_model import random_model
from tokenizers import Tokenizer

from dspark_jax.checkpoint.layout import layout
from dspark_jax.checkpoint.tokenizer import encode_text, read_tokenizer
from dspark_jax.config import ModelConfig
from dspark_jax.decoding.forward import forward
from dspark_jax.errors import CorpusError
from dspark_jax.model.model import Model, abstract_model
from dspark_jax.model.numerics import PRESETS
from dspark_jax.training.tiny_v4 import corpus, tokens
from dspark_jax.training.tiny_v4.evaluate import RULES, bits, picks_by
from dspark_jax.training.tiny_v4.recipe import CONFIG, LARGEST_FOLDER, VOCAB_SIZE
from dspark_jax.training.tiny_v4.tokenizer import BEGIN, END, NOISE, SPECIAL, train_tokenizer

ODD_TEXTS = ["", " ", "\n\n\t x", "def f(a):\r\n    return 'é漢\U0001f600'\n", "\x00\x7f\ufeff", "a  b   c\n", "ﬁ Å ½"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small standard library with everything that is left out of a corpus."""
    folder = tmp_path_factory.mktemp("library")
    files = {
        "site-packages/other.py": "x = 1",
        "encodings/cp1.py": "table = 1",
        "lib2to3/pytree.py": "old = 1",
        "test/test_lib2to3/pytree.py": "old = 2",
        "html/entities.py": "names = 1",
        "_sysconfigdata__linux_.py": "built = 1",
        "empty.py": "\n",
        "copy_of_a.py": "first = 1\n",
        "notes.txt": "no source",
        "a.py": "first = 1\n",
    }
    for number in range(60):
        files[f"module{number}.py"] = f"def function_{number}(value):\n    return value + {number}\n" * 5
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "latin.py").write_bytes(b"# \xe9\n")
    return folder


@pytest.fixture(scope="module")
def prepared(library: Path) -> tokens.TokenisedCorpus:
    return tokens.tokenise(corpus.collect(library), 300)


@pytest.fixture(scope="module")
def tokenizer(library: Path) -> Tokenizer:
    return train_tokenizer(corpus.collect(library).texts("train"), 300)


class TestCorpus:
    def test_files_are_read_once_in_order_and_what_is_no_language_is_left_out(self, library: Path) -> None:
        found = [file.path for file in corpus.collect(library).files]
        assert found == sorted(["a.py", *(f"module{number}.py" for number in range(60))])

    def test_a_module_its_accelerator_and_its_tests_are_on_one_side(self) -> None:
        for paths in (
            ["decimal.py", "_pydecimal.py", "test/test_decimal.py"],
            ["json/decoder.py", "json/__init__.py", "test/test_json/test_decode.py"],
            ["pickle.py", "test/pickletester.py", "test/test_pickle.py"],
        ):
            assert len({corpus.family(path) for path in paths}) == 1
            assert len({corpus.split_of(path) for path in paths}) == 1

    def test_sides_have_their_shares(self) -> None:
        sides = [corpus.split_of(f"module{number}.py") for number in range(4000)]
        assert {side: round(sides.count(side) / 4000, 2) for side in corpus.SPLITS} == {
            "train": 0.9,
            "validation": pytest.approx(0.05, abs=0.011),
            "test": pytest.approx(0.05, abs=0.011),
        }
        # A file stays where it is: these sides were told to the model that ships.
        assert [corpus.split_of(path) for path in ("io.py", "argparse.py", "math.py")] == ["test", "train", "test"]

    def test_the_digest_sees_every_text_and_path(self) -> None:
        def digest(*files: tuple[str, str]) -> object:
            found = corpus.Corpus(tuple(corpus.SourceFile(*file, split="train") for file in files))
            return found.provenance["sha256"]

        cases = [(("a", "bc"),), (("ab", "c"),), (("a", "bd"),), (("a", "b"), ("c", "")), (("c", ""), ("a", "b"))]
        assert len({digest(*case) for case in cases}) == len(cases)

    def test_the_running_interpreter_has_one(self) -> None:
        found = corpus.collect()
        paths = {file.path for file in found.files}
        assert {"argparse.py", "json/decoder.py"} < paths
        assert not any(path.startswith(("site-packages", "encodings", "lib2to3")) for path in paths)
        assert found.provenance["licence"] == "PSF-2.0"

    def test_beginnings_are_functions_and_classes_of_some_length(self) -> None:
        long = "\n".join(["    value += 1"] * 20)
        text = f"import os\n@wrapped\ndef first(value):\n{long}\nclass Second:\n{long}\ndef short(): pass\n"
        found = list(corpus.beginnings([text, "print 'old'"]))
        assert [source.split("(")[0].split(":")[0] for source in found] == ["def first", "class Second"]


class TestTokenizer:
    @pytest.mark.parametrize("text", ODD_TEXTS)
    def test_every_text_comes_back(self, tokenizer: Tokenizer, text: str) -> None:
        assert tokenizer.decode(encode_text(text, tokenizer), skip_special_tokens=False) == text

    def test_random_text_comes_back(self, tokenizer: Tokenizer) -> None:
        rng = np.random.default_rng(0)
        for _ in range(50):
            text = rng.integers(0, 0x800, 40).astype(np.uint32).tobytes().decode("utf-32-le")
            assert tokenizer.decode(encode_text(text, tokenizer), skip_special_tokens=False) == text

    def test_special_tokens_have_the_ids_of_the_configuration(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        found = read_tokenizer(tmp_path)
        assert found is not None and found.get_vocab_size() == 300
        assert [found.token_to_id(token) for token in SPECIAL] == [BEGIN, END, NOISE] == [0, 1, 2]
        assert (CONFIG.eos_token_id, CONFIG.drafter.noise_token_id) == ((END,), NOISE)  # type: ignore[union-attr]
        assert "def" in found.get_vocab() and len(encode_text("def function_", found)) < 6


class TestTokens:
    def test_a_stream_has_every_file_between_begin_and_end(
        self, prepared: tokens.TokenisedCorpus, library: Path
    ) -> None:
        tokenizer = Tokenizer.from_str(prepared.tokenizer)
        for split, stream in prepared.streams.items():
            texts = corpus.collect(library).texts(split)
            inner = np.split(stream, np.flatnonzero(stream == BEGIN))[1:]
            assert [int(part[-1]) for part in inner] == [END] * len(texts)
            assert [tokenizer.decode(part[1:-1].tolist()) for part in inner] == texts
            assert prepared.text_bytes(stream) == sum(len(text.encode()) for text in texts)

    def test_bytes_of_odd_text_are_counted_as_utf8(self, prepared: tokens.TokenisedCorpus) -> None:
        tokenizer = Tokenizer.from_str(prepared.tokenizer)
        for text in ODD_TEXTS:
            ids = np.array([BEGIN, *encode_text(text, tokenizer), END])
            assert prepared.text_bytes(ids) == len(text.encode())

    def test_a_file_of_them_is_read_back(self, prepared: tokens.TokenisedCorpus, tmp_path: Path) -> None:
        path = tmp_path / "corpus.npz"
        tokens.write(prepared, path)
        found = tokens.read(path)
        for split, stream in prepared.streams.items():
            assert found.streams[split].dtype == np.uint16
            np.testing.assert_array_equal(found.streams[split], stream)
        assert (found.tokenizer, found.beginnings, found.provenance) == (
            prepared.tokenizer,
            prepared.beginnings,
            prepared.provenance,
        )
        assert [file.name for file in tmp_path.iterdir()] == ["corpus.npz"]

    def test_another_file_is_refused(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "other.npz", x=np.zeros(3))
        (tmp_path / "text.npz").write_text("text")
        for name in ("other.npz", "text.npz", "absent.npz"):
            with pytest.raises(CorpusError, match=name):
                tokens.read(tmp_path / name)


class TestRecipe:
    def test_the_folder_is_small_enough(self) -> None:
        entries = layout(abstract_model(CONFIG, PRESETS["bfloat16"]))
        headers = 200 * sum(len(entry.names) for entry in entries)  # and the index, generously
        assert sum(entry.stored_bytes for entry in entries) + headers + 60_000 < LARGEST_FOLDER

    def test_it_has_every_kind_of_layer_and_the_drafter_reads_the_last_three(self) -> None:
        assert set(CONFIG.layer_kinds) == {"sliding", "csa", "hca"}
        assert CONFIG.num_stages == 2 and CONFIG.block_size == 5 and CONFIG.vocab_size == VOCAB_SIZE
        assert CONFIG.drafter is not None and CONFIG.drafter.target_layer_ids == (3, 4, 5)
        assert ModelConfig.from_dict(json.loads(json.dumps(CONFIG.to_dict()))) == CONFIG


@pytest.fixture(scope="module")
def model() -> Model:
    """One layer with an indexer."""
    config = ModelConfig.tiny(compress_ratios=[4, 0], num_hidden_layers=1, dspark_target_layer_ids=[0])
    return random_model(config, parts=("target",))


class TestBits:
    def test_every_token_is_predicted_once_from_half_a_row_at_least(self, model: Model) -> None:
        stream = np.random.default_rng(0).integers(0, 96, 75).astype(np.uint16)
        counts, spent = zip(*bits(model, stream, row_tokens=16, batch=3), strict=True)
        assert sum(counts) == 74
        padded = np.concatenate([stream, np.zeros(16)]).astype(np.int32)
        expected = 0.0
        for start in range(0, 72, 8):
            row = np.tile(padded[start : start + 16], (3, 1))  # the shape of a batch above, so nothing is compiled anew
            logits = np.asarray(forward(model, row).logits[0], np.float64)
            for place in range(0 if start == 0 else 8, 16):
                if start + place + 1 < 75:
                    token = padded[start + place + 1]
                    expected += np.log2(np.exp(logits[place]).sum()) - logits[place][token] / np.log(2)
        assert sum(spent) == pytest.approx(expected, rel=1e-5)

    def test_a_stream_shorter_than_a_row(self, model: Model) -> None:
        assert [count for count, _ in bits(model, np.arange(5, dtype=np.uint16), row_tokens=16, batch=3)] == [4]

    @pytest.mark.parametrize("rule", ["recent"])
    def test_other_picks_are_read_inside_the_block_only(self, model: Model, rule: str) -> None:
        ids = np.random.default_rng(1).integers(0, 96, (1, 40))

        def seen() -> np.ndarray:
            out = forward(model, ids, internals=True)
            assert out.seen is not None
            return np.asarray(out.seen.layers[0].index_picks)[0]

        with picks_by(rule):
            found = seen()
        for row, count in zip(found, (np.arange(40) + 1) // 4, strict=True):
            kept = [entry for entry in row.tolist() if entry >= 0]
            assert len(kept) == len(set(kept)) == min(count, 3) and all(entry < count for entry in kept)
            if rule == "recent":
                assert kept == list(range(count - 1, count - 1 - len(kept), -1))
        if rule == "random":
            assert (found != seen()).any()  # the model's own, again


def test_every_rule_likes_each_entry_differently() -> None:
    likings = {rule: np.broadcast_to(prefer(9, (2, 3)), (2, 3, 9)) for rule, prefer in RULES.items()}
    assert all(len(set(liking[1, 2].tolist())) == 9 for liking in likings.values())
    assert np.argsort(likings["recent"][0, 0]).tolist() == np.argsort(-likings["oldest"][0, 0]).tolist()
