"""The command line: what it prints and where, exit codes, and the facts that `inspect` derives."""

import json
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from conftest import Dspark
from test_config import FLASH

from dspark_jax.checkpoint.layout import layout
from dspark_jax.cli import crosscheck, facts
from dspark_jax.config import ModelConfig
from dspark_jax.crosscheck.compare import Report, Row
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import numerics_of

GOLDEN = Path(__file__).parent / "golden"
TINY_A = str(GOLDEN / "tiny-a")
EXPERT_BYTES = 13_369_344  # three packed FP4 matrices and their scales in Flash


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Flash's config.json and nothing else."""
    folder = tmp_path_factory.mktemp("flash")
    (folder / "config.json").write_text(json.dumps(FLASH))
    return folder


@pytest.mark.usefixtures("quick")
def test_generate(folder: Path, dspark: Dspark) -> None:
    """One compilation serves both ways to give a prompt and both ways to print, so one test has them all."""
    as_json = ("--json", "--max-new-tokens", "24", "--checkpoint")
    from_text = dspark("generate", "w7 w8 w9", *as_json, str(folder))
    from_ids = dspark("generate", "--prompt-ids", "7, 8,9", *as_json, TINY_A)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for_people = dspark(
            "generate", "w7 w8 w9", "--max-new-tokens", "24", "--checkpoint", str(folder), "--draft-tokens", "9"
        )

    result = json.loads(from_text.out)
    tokens, statistics = result["tokens"], result["statistics"]
    assert (from_text.code, from_text.err) == (0, "")
    assert from_text.out.count("\n") == 1
    assert len(tokens) == 24
    assert result["text"] == " ".join(f"w{token}" for token in tokens if token != 1)
    assert statistics["accepted_length"] == len(tokens) / statistics["rounds"] > 1
    assert result["finish_reason"] == "length"
    assert result["settings"]["numerics"] == "bfloat16"
    assert result["settings"]["prompt_tokens"] == 3

    without_tokenizer = json.loads(from_ids.out)
    assert without_tokenizer["text"] is None
    assert without_tokenizer["tokens"] == tokens

    assert for_people.code == 0
    assert for_people.out.startswith(result["text"] + "\n")
    assert f"{statistics['accepted_length']:.2f} tokens a round, bonus included" in for_people.out
    offered = zip(statistics["accepting_rounds"], statistics["offering_rounds"], strict=True)
    assert all(f" {accepting}/{offering} " in for_people.out for accepting, offering in offered)
    assert for_people.err == ("dspark: warning: draft_tokens 9 is more than the trained block of 5; 5 are used\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prompt-ids", "1,x"], "--prompt-ids is '1,x'; expected token ids and commas, such as 1,2,3."),
        (["--prompt-ids", "1,,2"], "--prompt-ids is '1,,2'; expected"),
        (["--prompt-ids", "1,-2"], "prompt_ids: token id -2 is outside the vocabulary; expected 0 to 511."),
        (["--prompt-ids", "512"], "prompt_ids: token id 512 is outside the vocabulary; expected 0 to 511."),
        (["--prompt-ids", "1", "--max-new-tokens", "-3"], "max_new_tokens is -3; expected an integer of at least 0."),
        (["--prompt-ids", "1", "--draft-tokens", "-1"], "draft_tokens is -1; expected an integer of at least 0."),
        ([], "there is no prompt; give exactly one: a text, --prompt-ids 1,2,3, --messages FILE or --prompts FILE."),
        ([""], "there is no prompt; give exactly one"),
        (["w1", "--prompt-ids", "1"], "PROMPT and --prompt-ids are given; give exactly one"),
        (["--prompts", "x.jsonl"], "--prompts FILE and --out FILE belong together; give both, or neither."),
        (["w1", "--top-p", "1.5"], "top_p is 1.5; expected a number from 0 to 1."),
        (["w1", "--temperature", "-1"], "temperature is -1.0; expected a number of at least 0."),
        (["--prompt-ids", "1", "--samples", "0"], "samples is 0; expected an integer of at least 1."),
        (["--messages", "nowhere.json"], "nowhere.json"),
        (["--prompts", "x.jsonl", "--out", "./x.jsonl"], "x.jsonl: holds the prompts; name another file"),
        (["w1"], "has no tokenizer.json, which a text prompt needs; fetch it, or give token ids."),
    ],
)
def test_generate_refuses_in_one_line(arguments: list[str], complaint: str, dspark: Dspark) -> None:
    ran = dspark("generate", *arguments, "--checkpoint", TINY_A)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("dspark: ")
    assert complaint in ran.err
    assert ran.err.count("\n") == 1


def test_generate_refuses_text_of_no_tokens(folder: Path, dspark: Dspark) -> None:
    ran = dspark("generate", "  ", "--checkpoint", str(folder))
    assert (ran.code, ran.err) == (2, "dspark: prompt is empty; give at least one token id.\n")


def test_unreadable_folder(tmp_path: Path, dspark: Dspark) -> None:
    for command in (["generate", "--prompt-ids", "1"], ["inspect"]):
        ran = dspark(*command, "--checkpoint", str(tmp_path / "nowhere"))
        assert (ran.code, ran.out) == (2, "")
        assert "config.json: cannot be read (No such file or directory)" in ran.err


def test_broken_tokenizer(folder: Path, tmp_path: Path, dspark: Dspark) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    ran = dspark("generate", "w1", "--checkpoint", str(tmp_path))
    assert ran.code == 2
    assert f"{tmp_path / 'tokenizer.json'}: is not a tokenizer" in ran.err


def test_help_has_a_line_for_each_command(dspark: Dspark) -> None:
    ran = dspark("--help")
    assert ran.code == 0
    assert "Examples:" in ran.out
    for command in ("generate", "evaluate", "data", "train", "export", "inspect", "crosscheck", "bench"):
        assert f"• {command} " in ran.out
        assert dspark(command, "--help").code == 0


def test_process_exit_codes() -> None:
    """As the shell sees it: the installed script, its exit code, and no traceback."""
    script = Path(sysconfig.get_path("scripts")) / "dspark"
    command = [str(script), "generate", "--prompt-ids", "1,x", "--checkpoint", TINY_A]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "dspark: --prompt-ids is '1,x'; expected token ids and commas, such as 1,2,3.\n"


def test_inspect_flash_from_config_alone(flash: Path, dspark: Dspark) -> None:
    arrays = len(jax.live_arrays())
    ran = dspark("inspect", "--checkpoint", str(flash), "--json")
    assert len(jax.live_arrays()) == arrays
    assert (ran.code, ran.err, ran.out.count("\n")) == (0, "", 1)

    told = json.loads(ran.out)
    tensors = told["tensors"]
    assert (tensors["tensors"], tensors["bytes"]) == (72_317, 166_878_536_440)
    assert {dtype: amount["tensors"] for dtype, amount in tensors["by_dtype"].items()} == {
        "I8": 35_328,
        "F8_E8M0": 35_718,
        "F8_E4M3": 390,
        "BF16": 445,
        "F32": 433,
        "I64": 3,
    }
    kinds = tensors["by_kind"]
    assert list(kinds) == list(facts.KINDS)
    assert (kinds["drafter"]["tensors"], kinds["drafter"]["bytes"]) == (4_705, 10_862_838_300)
    assert kinds["routed experts"]["bytes"] == 43 * 256 * EXPERT_BYTES
    for group in (tensors, *kinds.values()):
        assert sum(amount["bytes"] for amount in group["by_dtype"].values()) == group["bytes"]
    assert sum(group["tensors"] for group in kinds.values()) == tensors["tensors"]
    assert told["layer_kinds"] == ["sliding"] * 2 + ["csa", "hca"] * 20 + ["csa"]
    assert told["drafter_stages"] == 3
    assert round(told["parameters"]["drafter"] / 1e9, 3) == 19.846
    assert told["files"]["complete"] is None


def test_inspect_reads_well(flash: Path, dspark: Dspark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    ran = dspark("inspect", "--checkpoint", str(flash))
    assert ran.code == 0
    assert "attention     ··" + "CH" * 20 + "C" in ran.out
    assert "hash routing  ###" in ran.out
    assert "drafter taps  " + " " * 40 + "^^^" in ran.out
    assert "166,878,536,440 bytes" in ran.out


def test_inspect_without_a_drafter(tmp_path: Path, dspark: Dspark) -> None:
    target = {name: value for name, value in FLASH.items() if not name.startswith("dspark_")}
    (tmp_path / "config.json").write_text(json.dumps(target))
    told = json.loads(dspark("inspect", "--checkpoint", str(tmp_path), "--json").out)
    assert told["tensors"]["tensors"] == 72_317 - 4_705
    assert (told["parameters"]["drafter"], told["drafter_stages"]) == (0, 0)
    ran = dspark("inspect", "--checkpoint", str(tmp_path))
    assert ran.out.startswith("DeepSeek-V4 without a drafter")
    assert "taps" not in ran.out


def test_inspect_checks_the_files(folder: Path, tmp_path: Path, dspark: Dspark) -> None:
    whole = json.loads(dspark("inspect", "--checkpoint", str(folder), "--json").out)
    assert whole["files"]["complete"] is True

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    shard = broken / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    ran = dspark("inspect", "--checkpoint", str(broken), "--json")
    told = json.loads(ran.out)
    assert (ran.code, told["files"]["complete"]) == (1, False)
    assert shard.name in told["files"]["message"]
    assert told["tensors"] == whole["tensors"]

    loading = dspark("generate", "--prompt-ids", "1", "--checkpoint", str(broken))
    assert (loading.code, loading.err) == (2, f"dspark: {told['files']['message']}\n")


def test_caches_and_devices_of_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_dict(FLASH)
    entries = layout(abstract_model(config, numerics_of("bfloat16")))
    token_tables = 3 * 129280 * 6 * 4  # int64 on disk, int32 in memory
    whole = facts.weight_bytes_per_device(entries, 1)
    assert whole == 166_878_536_440 - token_tables
    experts = 46 * 256 * EXPERT_BYTES
    assert facts.weight_bytes_per_device(entries, 4) == whole - experts + experts // 4

    million = facts.cache_bytes(config, 2**20)
    entry_bytes = 2**20 * (21 / 4 * (512 + 128) + 20 / 128 * 512) * 2  # CSA with indexer, HCA
    assert entry_bytes < million < 1.01 * entry_bytes

    monkeypatch.setattr(facts, "device_memory", lambda devices: 150_000_000_000)
    two = facts.measure_memory(config, entries, jax.devices()[:2])
    assert [context.positions for context in two.contexts] == [4096, 65536, 2**20]
    assert [context.devices_needed for context in two.contexts] == [2, 2, 2]
    assert two.contexts[-1].sequences == (150_000_000_000 - (whole - experts // 2)) // million
    three = facts.measure_memory(config, entries, jax.devices()[:3])
    assert three.devices_used == 2
    one = facts.measure_memory(config, entries, jax.devices()[:1])
    assert [context.sequences for context in one.contexts] == [0, 0, 0]


def report(ok: bool) -> Report:
    wrong = Row("exact/logits_of_a_wrong_shape", float("nan"), float("nan"), 3e-4, True, ok, "shapes differ")
    return Report((wrong, Row("inference/logits", 1.5, 0.1, 3e-4, False, True, "")), ["extra/key"])


def test_crosscheck_prints_rows_and_fails_on_a_mismatch(dspark: Dspark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    asked: list[Path] = []

    def compare(directory: Path, record: Path, progress: Callable[[str, int, int], None]) -> Report:
        asked[:] = [directory, record]
        progress("loading", 0, 1)
        return report(ok=False)

    monkeypatch.setattr(crosscheck, "compare_record", compare)
    arguments = ("crosscheck", "compare", "--checkpoint", "DIR", "--record", "FILE")
    ran = dspark(*arguments)
    assert asked == [Path("DIR"), Path("FILE")]
    assert (ran.code, ran.err) == (1, "")
    assert "✗ differs" in ran.out
    assert "not judged" in ran.out
    assert "not compared: extra/key" in ran.out
    assert "✗ 1 of 1 differ (1 judged, 1 reported, 1 not compared)" in ran.out

    as_json = json.loads(dspark(*arguments, "--json").out, parse_constant=pytest.fail)
    assert as_json["rows"][0]["max_abs"] is None

    monkeypatch.setattr(crosscheck, "compare_record", lambda *_: report(ok=True))
    ran = dspark(*arguments)
    assert (ran.code, "✓ all agree (1 judged" in ran.out) == (0, True)

    monkeypatch.setattr(crosscheck, "compare_record", lambda *_: Report((), ["extra/key"]))
    ran = dspark(*arguments)
    assert (ran.code, "✗ the record holds nothing to judge" in ran.out) == (1, True)
