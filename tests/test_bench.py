"""`dspark bench`: what the figures mean and that they belong together; no test asks how fast anything is."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import pytest
from random_model import random_model
from test_config import FLASH as OFFICIAL_FLASH
from tiny_configs import CONFIGS
from tokenizers import Tokenizer

from dspark_jax import Model, ModelConfig, load, save
from dspark_jax.assets import TINY_V4
from dspark_jax.bench import generate as bench_generate_module
from dspark_jax.bench import sparse
from dspark_jax.bench.generate import Programs, Timed, bench_generate
from dspark_jax.bench.load import LoadReport, bench_load
from dspark_jax.bench.memory import anonymous_bytes
from dspark_jax.bench.report import GenerateReport
from dspark_jax.bench.workload import Workload
from dspark_jax.checkpoint import load as load_module
from dspark_jax.checkpoint.folder import CheckpointFolder
from dspark_jax.cli import bench as bench_command
from dspark_jax.cli import main
from dspark_jax.cli.options import Drafting
from dspark_jax.decoding.generation import Generation
from dspark_jax.decoding.statistics import Counters
from dspark_jax.errors import RequestError
from dspark_jax.training.tiny_v4.recipe import LARGEST_FOLDER

TINY_A = Path(__file__).parent / "golden" / "tiny-a"
BOUND = 10**9  # bytes of host memory that loading may take beside the arrays

LOAD_FIELDS = {
    "checkpoint": str,
    "device": str,
    "devices": int,
    "file_bytes": int,
    "first_read_seconds": float,
    "load_seconds": float,
    "read_seconds": float,
    "array_bytes": int,
    "host_array_bytes": int,
    "largest_array_bytes": int,
    "peak_anonymous_bytes": int,
    "overhead_bytes": int,
    "load_bytes_per_second": float,
    "read_bytes_per_second": float,
    "load_speed_per_read_speed": float,
}
RUN_FIELDS = {
    "step_width": int,
    "draft_tokens": int,
    "compile_seconds": float,
    "prefill_seconds": list,
    "decode_seconds": list,
    "prefill_tokens": int,
    "new_tokens": int,
    "steps": int,
    "occupancy": float,
    "statistics": dict,
    "step_seconds": float,
    "tokens_per_second": float,
    "prefill_tokens_per_second": float,
}
AGAINST_FIELDS = {
    "speed_up": float,
    "round_cost": float,
    "break_even_accepted_length": float,
    "equal_sequences": int,
    "first_difference": type(None),
}
GENERATE_FIELDS = {
    "mesh": type(None),
    "checkpoint": str,
    "drafter": type(None),
    "prompts": str,
    "numerics": str,
    "device": str,
    "workload": dict,
    "capacity": int,
    "plain": dict,
    "plain_width_1": dict,
    "speculative": dict,
    "against_plain": dict,
    "against_plain_width_1": dict,
    "plain_step_bytes": float,
    "copy_bytes_per_second": float,
    "ok": bool,
    "least_step_seconds": float,
}


def types(value: dict[str, Any]) -> dict[str, type]:
    return {name: type(item) for name, item in value.items()}


def available_bytes() -> int:
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


needs_proc = pytest.mark.skipif(anonymous_bytes() is None, reason="no /proc here that tells anonymous memory")


class TestLoad:
    @needs_proc
    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "load", "--checkpoint", str(TINY_A), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert types(told) == LOAD_FIELDS
        assert told["file_bytes"] == sum(file.stat().st_size for file in TINY_A.glob("model-*.safetensors"))
        sizes = [leaf.nbytes for leaf in jax.tree.leaves(load(TINY_A))]
        assert (told["array_bytes"], told["largest_array_bytes"]) == (sum(sizes), max(sizes))
        assert told["host_array_bytes"] == told["array_bytes"]
        assert told["overhead_bytes"] == told["peak_anonymous_bytes"] - told["array_bytes"]
        assert told["load_bytes_per_second"] == told["file_bytes"] / told["load_seconds"]
        assert told["read_bytes_per_second"] == told["file_bytes"] / told["read_seconds"]
        assert told["load_speed_per_read_speed"] == told["read_seconds"] / told["load_seconds"]

    @pytest.mark.parametrize("told", [5_250_000_000, None])
    def test_table(self, told: int | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        report = LoadReport("cpu", 1, 4 * 10**9, 8.0, 4.0, 2.0, 4 * 10**9, 4 * 10**9, 10**9, told)
        monkeypatch.setattr(bench_command, "bench_load", lambda *_: report)
        assert main(["bench", "load", "--checkpoint", str(TINY_A)]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["first", "read", "8.00", "500.0", "MB", "25%"] in lines
        assert ["load", "4.00", "1.0", "GB", "50%"] in lines
        assert ["second", "read", "2.00", "2.0", "GB", "100%"] in lines
        memory = "beside the arrays in it 1.25 GB" if told else "host memory not told by this system"
        assert memory.split() in lines

    def test_on_a_mesh(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Four CPUs split the experts, and share one buffer of everything else."""
        options = ["--expert", "4", "--checkpoint", str(TINY_A), "--json"]
        assert main(["bench", "load", *options]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["devices"] == 4
        assert told["array_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(load(TINY_A)))
        assert told["host_array_bytes"] == told["array_bytes"]

    def test_on_a_gpu_no_array_is_in_host_memory(self) -> None:
        report = LoadReport("gpu", 1, 10, 1.0, 1.0, 1.0, 10, host_array_bytes=0, largest_array_bytes=5,
                            peak_anonymous_bytes=7)  # fmt: skip
        assert report.overhead_bytes == 7

    @pytest.mark.parametrize("arguments", [[], ["--checkpoint", str(TINY_A), "--synthetic-gb", "4"]])
    def test_one_source(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "load", *arguments]) == 2
        assert "give exactly one: --checkpoint DIR, or --synthetic-gb 4." in capsys.readouterr().err


class TestMemory:
    @needs_proc
    def test_of_four_gigabytes(self) -> None:
        """In a process of its own, as a user would: other tests' memory does not count."""
        if available_bytes() < 8 * 10**9:
            pytest.skip("less than 8 GB of memory are available")
        program = "import jax, sys; from dspark_jax.cli import main; jax.config.update('jax_platforms', 'cpu'); main()"
        command = [sys.executable, "-c", program, "bench", "load", "--synthetic-gb", "4", "--json"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        told = json.loads(ran.stdout)
        assert told["checkpoint"] is None
        assert min(told["file_bytes"], told["array_bytes"]) > 4 * 10**9
        assert told["host_array_bytes"] == told["array_bytes"]
        assert 0.95 * told["array_bytes"] < told["peak_anonymous_bytes"] <= told["array_bytes"] + BOUND

    @needs_proc
    def test_a_copy_beside_the_arrays_is_seen(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sparse.write_sparse(tmp_path, ModelConfig.tiny(vocab_size=10**6))
        sound = bench_load(tmp_path, lambda done, total: None)
        assert sound.array_bytes > 250e6
        assert sound.overhead_bytes is not None and sound.overhead_bytes < sound.array_bytes / 4

        kept, read_leaf = [], load_module.read_leaf

        def hoarding(*arguments: Any) -> jax.Array:
            leaf = read_leaf(*arguments)
            kept.append(np.array(leaf))
            return leaf

        monkeypatch.setattr(load_module, "read_leaf", hoarding)
        faulty = bench_load(tmp_path, lambda done, total: None)
        assert faulty.overhead_bytes is not None and faulty.overhead_bytes > sound.array_bytes * 3 / 4


class TestSparse:
    def test_the_whole_of_flash_is_flash(self) -> None:
        assert ModelConfig.from_dict(OFFICIAL_FLASH) == sparse.FLASH
        assert sparse.stored_bytes(sparse.FLASH) == 166_878_536_440
        assert sparse.cut_flash(166_878_536_440) == sparse.FLASH

    @pytest.mark.parametrize("size", [4 * 10**9, 30 * 10**9])
    def test_a_cut_is_just_as_large_as_asked_for(self, size: int) -> None:
        config = sparse.cut_flash(size)
        assert ModelConfig.from_dict(config.to_dict()) == config
        assert set(config.layer_kinds) == {"sliding", "csa", "hca"}
        fewer = replace(config, n_routed_experts=config.n_routed_experts - 1)
        assert sparse.stored_bytes(fewer) < size <= sparse.stored_bytes(config)

    @pytest.mark.parametrize("size", [1, 3 * 10**9, 10**12, math.inf, math.nan])
    def test_what_cannot_be_cut_is_refused(self, size: float) -> None:
        with pytest.raises(RequestError, match=r"cannot be cut out of Flash; expected 3\.87 to 166\.88 GB"):
            sparse.cut_flash(size)

    def test_the_folder_is_whole_and_empty_and_goes_away(self) -> None:
        with sparse.sparse_checkpoint(4 * 10**9) as directory:
            folder = CheckpointFolder.open(directory)
            files = list(directory.iterdir())
            assert sum(file.stat().st_size for file in files) > 4 * 10**9
            assert sum(file.stat().st_blocks * 512 for file in files) < 4 * 10**6
            names = {name for name in folder.names if folder.info(name)}
            assert json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"].keys() == names
        assert not directory.exists()

    def test_it_loads_as_zeros(self, tmp_path: Path) -> None:
        config = ModelConfig.tiny()
        sparse.write_sparse(tmp_path, config)
        model = load(tmp_path)
        assert model.config == config
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(model))


def prompt_file(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.usefixtures("quick")
def test_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One measurement of a model of three blocks, printed in every way, since it compiles four programs."""
    save(random_model(CONFIGS["two-streams"]), tmp_path / "model")
    reports: list[GenerateReport] = []
    monkeypatch.setattr(bench_command, "bench_generate", lambda *a: reports.append(bench_generate(*a)) or reports[-1])
    ran: list[Timed] = []
    run = Programs.run
    monkeypatch.setattr(Programs, "run", lambda *arguments: ran.append(run(*arguments)) or ran[-1])
    prompts = [np.random.default_rng(length).integers(0, 96, length).tolist() for length in (9, 4, 1, 6)]
    file = prompt_file(tmp_path, *({"id": number, "prompt_ids": ids} for number, ids in enumerate(prompts)))
    arguments = ["bench", "generate", "--checkpoint", str(tmp_path / "model"), "--batch-size", "2"]
    arguments += ["--prompts", str(file), "--max-new-tokens", "12", "--repeats", "3"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert types(told) == GENERATE_FIELDS
    assert told["prompts"] == str(file)
    assert told["workload"].items() >= {"prompts": "given", "sequences": 4, "shortest_prompt": 1}.items()
    assert len(ran) == 3 * (1 + 3 * 2)  # three runs: a batch to warm up, then two batches in each of three repetitions
    for number, timed in enumerate(ran[3:]):
        for row, prompt in enumerate(prompts[number % 2 * 2 :][:2]):
            assert timed.generation.tokens[row, : len(prompt)].tolist() == prompt
            assert timed.generation.length[row] == len(prompt) + 12
    plain, narrow, speculative = (told[name] for name in ("plain", "plain_width_1", "speculative"))
    assert types(speculative) == RUN_FIELDS
    assert types(plain) == types(narrow) == RUN_FIELDS | {"speed_per_ceiling": float}
    assert [run["step_width"] for run in (plain, narrow, speculative)] == [4, 1, 4]
    assert [run["draft_tokens"] for run in (plain, narrow, speculative)] == [0, 0, 3]
    for run in (plain, narrow, speculative):
        assert (run["prefill_tokens"], run["new_tokens"]) == (8 + 3 + 0 + 5, 4 * 12)
        assert len(run["prefill_seconds"]) == len(run["decode_seconds"]) == 3
        assert run["tokens_per_second"] == 48 / median(run["decode_seconds"])
        assert run["step_seconds"] == median(run["decode_seconds"]) / run["steps"]
        assert run["statistics"]["rounds"] == pytest.approx(2 * run["steps"] * run["occupancy"])
    assert [(run["steps"], run["statistics"]["offered_drafts"]) for run in (plain, narrow)] == [(24, 0), (24, 0)]
    assert speculative["statistics"]["offered_drafts"] > 0
    assert told["ok"] and told["against_plain"]["equal_sequences"] == 4

    for run, against in ((plain, told["against_plain"]), (narrow, told["against_plain_width_1"])):
        assert types(against) == AGAINST_FIELDS | {"first_difference": type(against["first_difference"])}
        length, occupancy = speculative["statistics"]["accepted_length"], speculative["occupancy"]
        assert against["round_cost"] == speculative["step_seconds"] / run["step_seconds"]
        assert against["speed_up"] == pytest.approx(length * occupancy / against["round_cost"])
        assert (against["speed_up"] > 1) == (length > against["break_even_accepted_length"])
        assert run["speed_per_ceiling"] == told["least_step_seconds"] / run["step_seconds"]
    assert told["least_step_seconds"] == told["plain_step_bytes"] / told["copy_bytes_per_second"]

    monkeypatch.setattr(bench_command, "bench_generate", lambda *_: reports[0])
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "4 x (1-9 + 12) tokens in batches of 2 on cpu\ngiven prompts; " in out
    assert f"{speculative['statistics']['accepted_length']:.2f}" in out
    assert "✓ equal" in out

    differing = replace(reports[0].against_plain, equal_sequences=1, first_difference=7)
    monkeypatch.setattr(bench_command, "bench_generate", lambda *_: replace(reports[0], against_plain=differing))
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "✗ 1 of 4 equal" in out and "new token 7" in out


@pytest.fixture(scope="module")
def tiny_a() -> Model:
    return load(TINY_A)


class FakePrograms:
    """Takes the seconds it is told to, and generates what it is told to, for batches of two with three new tokens."""

    seconds: dict[tuple[int, bool], list[float]]
    tokens: dict[tuple[int, bool], list[list[int]]]
    capacity, compile_seconds = 64, 1.0

    def __init__(self, model: Model, batches: Any) -> None:
        self.model = model

    def run(self, requests: Any) -> Timed:
        way = (self.model.step_width, requests[0].draft_tokens > 0)
        length = np.array([len(request.prompt) for request in requests])
        tokens = np.zeros((2, 8), np.int32)
        for row, new in enumerate(self.tokens[way]):
            tokens[row, length[row] : length[row] + 3] = new
        counters = jax.tree.map(np.asarray, Counters.zeros(2, self.model.block_size))
        rounds = np.array([3, 3]) if not way[1] else np.array([3, 1]) if requests[0].seed else np.array([1, 2])
        counters = replace(counters, rounds=rounds, bonus=rounds)
        if way[1]:  # of five drafts in the one round of the first sequence two are accepted, of the second's one
            accepted = np.arange(5) < np.array([[2], [1]])
            counters = replace(counters, allowed_rounds=rounds, offered=counters.offered + 1, accepted=accepted)
        yes = np.array([True, True])
        generation = Generation(tokens, length, length + 3, ~yes, yes, None, None, counters)  # type: ignore[arg-type]
        return Timed(0.5, self.seconds[way].pop(0), generation)


PLAIN, NARROW, DRAFTS = (6, False), (1, False), (6, True)


class TestArithmetic:
    @pytest.fixture(autouse=True)
    def fakes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        same = [[1, 2, 3], [4, 5, 6]]
        FakePrograms.tokens = {PLAIN: same, NARROW: same, DRAFTS: same}
        FakePrograms.seconds = {PLAIN: [99, 3, 6, 2.4], NARROW: [99, 2, 1.5, 1.8], DRAFTS: [99, 4, 5, 6]}
        monkeypatch.setattr(bench_generate_module, "Programs", FakePrograms)
        monkeypatch.setattr(bench_generate_module, "copy_bandwidth", lambda: 1e9)

    def bench(self, model: Model, **changes: Any) -> GenerateReport:
        self.told: list[tuple[str, int, int]] = []
        workload = Workload(2, 4, 3, **{"repeats": 3, **changes})
        return bench_generate(model, workload, lambda *step: self.told.append(step))

    def test_the_median_without_the_warm_up(self, tiny_a: Model) -> None:
        report = self.bench(tiny_a)
        plain, narrow, speculative = report.plain, report.plain_width_1, report.speculative
        assert [run.decode_seconds[0] for run in (plain, narrow, speculative)] == [3, 2, 4]
        assert [run.tokens_per_second for run in (plain, narrow)] == [2, pytest.approx(6 / 1.8)]
        assert [run.steps for run in (plain, narrow, speculative)] == [3, 3, 2]
        assert (speculative.occupancy, speculative.statistics.accepted_length) == (0.75, 2)
        assert speculative.prefill_tokens_per_second == 2 * 3 / 0.5
        against = report.against_plain
        assert (against.round_cost, against.speed_up) == (2.5 / 1.0, 3 / 5)
        assert against.break_even_accepted_length == pytest.approx(2.5 / 0.75)
        assert [done for _, done, _ in self.told] == list(range(15))
        assert {total for *_, total in self.told} == {15}

    def test_the_sums_over_batches(self, tiny_a: Model) -> None:
        """Two batches: of the second the speculative run takes three rounds, so places are empty in both."""
        FakePrograms.seconds = {PLAIN: [99, 1, 2, 7, 7], NARROW: [99, 1, 1, 3, 3], DRAFTS: [99, 2, 3, 4, 4]}
        report = self.bench(tiny_a, repeats=2, prompts=[[1] * 4, [2] * 5, [3] * 3, [4] * 2])
        plain, speculative = report.plain, report.speculative
        assert [run.decode_seconds for run in (plain, speculative)] == [[3, 14], [5, 8]]
        assert plain.prefill_seconds == [1, 1]
        assert [(run.steps, run.new_tokens, run.prefill_tokens) for run in (plain, speculative)] == [
            (6, 12, 10),
            (5, 12, 10),
        ]
        assert (plain.occupancy, speculative.occupancy) == (1, 7 / 10)
        assert speculative.statistics.rounds == 7
        against = report.against_plain
        assert against.round_cost == pytest.approx((6.5 / 5) / (8.5 / 6))
        assert against.speed_up == pytest.approx(8.5 / 6.5)
        assert (report.ok, against.equal_sequences, against.first_difference) == (True, 4, None)
        assert [done for _, done, _ in self.told] == list(range(18))
        assert {total for *_, total in self.told} == {18}

    def test_a_difference_is_told_by_the_new_token(self, tiny_a: Model) -> None:
        FakePrograms.seconds = {way: [1.0] * 3 for way in (PLAIN, NARROW, DRAFTS)}
        FakePrograms.tokens[DRAFTS] = [[1, 2, 3], [4, 5, 7]]
        report = self.bench(tiny_a, repeats=1, prompts=[[1] * 4, [2] * 5, [3] * 3, [4] * 2])
        assert not report.ok
        assert (report.against_plain.equal_sequences, report.against_plain.first_difference) == (2, 2)

    def test_tokens_that_depend_on_drafts_fail(self, tiny_a: Model) -> None:
        FakePrograms.tokens[DRAFTS] = [[1, 2, 3], [4, 5, 7]]
        report = self.bench(tiny_a)
        assert not report.ok
        assert (report.against_plain.equal_sequences, report.against_plain.first_difference) == (1, 2)

    def test_tokens_of_width_1_may_differ(self, tiny_a: Model) -> None:
        FakePrograms.tokens[NARROW] = [[1, 0, 0], [4, 5, 7]]
        report = self.bench(tiny_a)
        assert report.ok
        assert (report.against_plain_width_1.equal_sequences, report.against_plain_width_1.first_difference) == (0, 1)

    def test_sampled_tokens_are_not_compared(self, tiny_a: Model) -> None:
        FakePrograms.tokens[DRAFTS] = [[7, 7, 7], [7, 7, 7]]
        report = self.bench(tiny_a, temperature=1.0)
        assert report.ok
        assert {*asdict(report.against_plain).values()} > {None}

    def test_bytes_of_a_plain_step(self, tiny_a: Model) -> None:
        """From the files themselves: two sequences wake 1 - (3/4)^2 of eight experts, two of them each."""
        folder = CheckpointFolder.open(TINY_A)
        sizes = {name: folder.info(name).stop - folder.info(name).start for name in folder.names}
        read = {name: size for name, size in sizes.items() if not name.startswith(("embed.", "mtp."))}
        read = {name: size for name, size in read.items() if "tid2eid" not in name}
        experts = sum(size for name, size in read.items() if ".experts." in name)
        assert self.bench(tiny_a).plain_step_bytes == pytest.approx(sum(read.values()) - experts * (3 / 4) ** 2)

    def test_a_checkpoint_without_drafter_is_refused(self, tiny_a: Model) -> None:
        with pytest.raises(RequestError, match="has no drafter, so there is nothing to compare"):
            self.bench(replace(tiny_a, drafter=None))


@pytest.mark.parametrize("option", ["batch-size", "prompt-tokens", "max-new-tokens", "draft-tokens", "repeats"])
def test_nothing_is_loaded_for_a_number_below_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "generate", "--checkpoint", "nowhere", f"--{option}", "0"]) == 2
    assert f"{option.replace('-', '_')} is 0; expected an integer of at least 1." in capsys.readouterr().err


class TestWorkload:
    def test_random_prompts(self, tiny_a: Model) -> None:
        workload = Workload(3, 50, 7, seed=5)
        [batch] = workload.batches(tiny_a, 0)
        assert [(len(request.prompt), request.stop_ids) for request in batch] == [(50, [])] * 3
        assert len({*batch[0].prompt, *batch[1].prompt}) > 50
        assert workload.batches(tiny_a, 0) == [batch]
        assert workload.batches(tiny_a, 2) == [tuple(replace(request, draft_tokens=2) for request in batch)]
        told = workload.to_dict()
        assert told["prompts"] == "random"
        assert (told["sequences"], told["shortest_prompt"], told["longest_prompt"]) == (3, 50, 50)

    def test_given_prompts(self, tiny_a: Model) -> None:
        workload = Workload(2, max_new_tokens=9, seed=5, prompts=[[1], [2, 3], [4], [5, 6, 7]])
        batches = workload.batches(tiny_a, None)
        assert [[request.prompt for request in batch] for batch in batches] == [[[1], [2, 3]], [[4], [5, 6, 7]]]
        assert [request.seed for batch in batches for request in batch] == [5, 6, 7, 8]
        told = workload.to_dict()
        assert (told["sequences"], told["shortest_prompt"], told["longest_prompt"]) == (4, 1, 3)
        assert "prompt_tokens" not in told

    @pytest.mark.parametrize("batch_size", [2, 3, 8])
    def test_a_batch_that_is_not_full_is_refused(self, batch_size: int) -> None:
        with pytest.raises(RequestError, match=f"5 prompts do not fill batches of {batch_size}, and empty places"):
            Workload(batch_size, prompts=[[1]] * 5)

    def test_no_prompt_is_refused(self, tiny_a: Model) -> None:
        with pytest.raises(RequestError, match="there is no prompt"):
            bench_generate(tiny_a, Workload(prompts=[]), lambda *_: None)


class TestPrompts:
    """What is wrong with a file of prompts is told before weights are loaded."""

    @pytest.fixture
    def bench(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
        def run(*rows: dict[str, Any], more: tuple[str, ...] = ()) -> int:
            path = prompt_file(tmp_path, *rows)
            return main(["bench", "generate", "--checkpoint", str(TINY_A), "--prompts", str(path), *more])

        def refuse(*_: Any, **__: Any) -> Model:
            raise RequestError("weights are loaded")

        monkeypatch.setattr(Drafting, "model", refuse)
        return run

    @pytest.mark.parametrize(
        "own", [{"temperature": 0.5}, {"max_new_tokens": 7}, {"seed": 1}, {"stop_ids": [1]}, {"samples": 2}]
    )
    def test_settings_of_a_line_are_refused(
        self, own: dict[str, Any], bench: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert bench({"id": "a", "prompt_ids": [1]}, {"id": "b", "prompt_ids": [2], **own}) == 2
        [name] = own
        assert f"the line of id 'b' has its own {name}, and a measurement" in capsys.readouterr().err

    def test_settings_that_are_the_command_s_pass(
        self, bench: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        line = {"id": "a", "prompt_ids": [1], "category": "maths", "temperature": 0.5, "max_new_tokens": 7, "note": 1}
        assert bench(line, more=("--temperature", "0.5", "--max-new-tokens", "7")) == 2
        warning, refusal = capsys.readouterr().err.splitlines()
        assert "not known, and ignored: note;" in warning
        assert refusal == "dspark: weights are loaded"

    def test_batches_that_are_not_full(self, bench: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
        assert bench({"id": "a", "prompt_ids": [1]}, more=("--batch-size", "2")) == 2
        assert "1 prompts do not fill batches of 2" in capsys.readouterr().err

    def test_lengths_belong_to_random_prompts(
        self, bench: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert bench({"id": "a", "prompt_ids": [1]}, more=("--prompt-tokens", "5")) == 2
        assert "--prompts and --prompt-tokens are both given" in capsys.readouterr().err


def test_the_packaged_prompts_are_beginnings_of_code_in_the_packaged_model_s_tokens() -> None:
    rows = [json.loads(line) for line in (TINY_V4 / "prompts.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.from_file(str(TINY_V4 / "tokenizer.json"))
    assert len({row["id"] for row in rows}) == 16
    for row in rows:
        assert len(row["prompt_ids"]) == 64
        text = tokenizer.decode(row["prompt_ids"], skip_special_tokens=False)
        assert text.startswith({"function": "def ", "class": "class "}[row["category"]])
        assert tokenizer.encode(text, add_special_tokens=False).ids[:60] == row["prompt_ids"][:60]
    assert sum(file.stat().st_size for file in TINY_V4.iterdir()) <= LARGEST_FOLDER
