"""`dspark bench`: how fast this machine loads a checkpoint, generates and runs its kernels, and what bounds that."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import jax
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from tyro.conf import OmitArgPrefixes, Positional, arg

from dspark_jax.bench.bandwidth import BandwidthReport, bench_bandwidth
from dspark_jax.bench.case import Operation, Shape
from dspark_jax.bench.convert import ENCODERS, STACK, ConvertReport, Format, bench_convert
from dspark_jax.bench.generate import bench_generate
from dspark_jax.bench.kernel import bench_kernel
from dspark_jax.bench.load import LoadReport, bench_load
from dspark_jax.bench.operations import cases
from dspark_jax.bench.prompts import read_prompts
from dspark_jax.bench.report import Against, GenerateReport
from dspark_jax.bench.sparse import sparse_checkpoint
from dspark_jax.bench.workload import Workload
from dspark_jax.cli.options import ONE_DEVICE, PACKAGED_PAIR, UNLESS_ASKED, Devices, Drafting
from dspark_jax.cli.terminal import RESULT, bytes_bar, print_json, print_warning, spinner, steps_bar
from dspark_jax.config import ModelConfig
from dspark_jax.decoding.request import SETTINGS, check_request
from dspark_jax.errors import RequestError, check_count
from dspark_jax.jobs.prompts import FIELDS, PromptReader
from dspark_jax.jobs.text import Text as TextCoding
from dspark_jax.model.model import abstract_model
from dspark_jax.model.numerics import numerics_of
from pallas_kernels.implementation import Implementation


def load(
    *,
    checkpoint: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(or --synthetic-gb)")] = None,
    synthetic_gb: Annotated[float | None, arg(metavar="GB", help_behavior_hint="(or --checkpoint)")] = None,
    devices: OmitArgPrefixes[Devices] = ONE_DEVICE,
    json: bool = False,
) -> int:
    """Load a checkpoint between two plain reads of its files; tell speed and host memory.

    Args:
        checkpoint: Folder with config.json, the index and the shards.
        synthetic_gb: Instead, a temporary cut of DeepSeek-V4-Flash of this size, zeros that take no room on the disk.
        json: Print one JSON object.
    """
    if (checkpoint is None) == (synthetic_gb is None):
        given = "neither is given" if checkpoint is None else "both are given"
        raise RequestError(f"{given}; give exactly one: --checkpoint DIR, or --synthetic-gb 4.")
    source = nullcontext(checkpoint) if checkpoint else sparse_checkpoint((synthetic_gb or 0) * 1e9)
    with source as directory, bytes_bar("reading, loading, reading") as progress:
        report = bench_load(directory, progress, devices.mesh())
    if json:
        print_json({"checkpoint": str(checkpoint) if checkpoint else None} | report.to_dict())
    else:
        print_load(report)
    return 0


def print_load(report: LoadReport) -> None:
    """Three passes over the files, and the memory of the second."""
    passes = _table("pass", "seconds", "per second", "of the second read")
    for name, seconds in (
        ("first read", report.first_read_seconds),
        ("load", report.load_seconds),
        ("second read", report.read_seconds),
    ):
        share = report.read_seconds / seconds
        passes.add_row(name, f"{seconds:.2f}", decimal(round(report.file_bytes / seconds)), f"{share:.0%}")
    RESULT.print(passes)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_row("files", decimal(report.file_bytes))
    facts.add_row(
        "arrays",
        f"{decimal(report.array_bytes)} on {report.devices} x {report.device}, "
        f"the largest {decimal(report.largest_array_bytes)}",
    )
    if report.peak_anonymous_bytes is None or report.overhead_bytes is None:
        facts.add_row("host memory", "not told by this system")
    else:
        facts.add_row("peak of anonymous host memory", decimal(report.peak_anonymous_bytes))
        facts.add_row("beside the arrays in it", f"{max(report.overhead_bytes, 0) / 1e9:.2f} GB")
    RESULT.print()
    RESULT.print(facts)


def generate(
    *,
    loading: OmitArgPrefixes[Drafting] = PACKAGED_PAIR,
    devices: OmitArgPrefixes[Devices] = ONE_DEVICE,
    prompts: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: random ids)")] = None,
    prompt_tokens: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: 128)")] = None,
    batch_size: Annotated[int, arg(metavar="B")] = 1,
    max_new_tokens: Annotated[int, arg(metavar="N")] = 128,
    draft_tokens: Annotated[int | None, arg(metavar="K", help_behavior_hint="(default: the trained block)")] = None,
    temperature: Annotated[float, arg(metavar="T")] = 0.0,
    repeats: Annotated[int, arg(metavar="R")] = 5,
    json: bool = False,
) -> int:
    """Decode the same prompts plainly, plainly at width 1, and speculatively, in one run.

    A trained model should be given --prompts of the kind that it was trained for: how many drafts it accepts after
    random ids says nothing. Exit code 1 if greedy tokens depend on the drafts.

    Args:
        prompts: JSON lines as `dspark generate --prompts` reads them, without settings of their own; all of them run,
            a batch after the other, and fill every batch.
        prompt_tokens: Ids of each random prompt.
        batch_size: Sequences that run side by side.
        max_new_tokens: Tokens to generate for each; nothing stops a sequence earlier.
        draft_tokens: Drafts offered in a round of the speculative run.
        temperature: 0 decodes greedily.
        repeats: Timed repetitions, after a batch to warm up; medians are told.
        json: Print one JSON object.
    """
    if prompts and prompt_tokens is not None:
        raise RequestError("--prompts and --prompt-tokens are both given; a file's prompts are as long as they are.")
    tokens = Workload.prompt_tokens if prompt_tokens is None else prompt_tokens
    workload = Workload(batch_size, tokens, max_new_tokens, draft_tokens, temperature, repeats)
    if prompts:
        workload = replace(workload, prompts=_prompts(prompts, workload, loading))
    with bytes_bar("loading weights") as progress:
        model = loading.model(devices, progress)
    with steps_bar("bench") as begin:
        report = bench_generate(model, workload, begin)
    if json:
        drafter = str(loading.drafter) if loading.drafter else None
        source = {"drafter": drafter, "prompts": str(prompts) if prompts else None}
        print_json({"checkpoint": str(loading.checkpoint), "numerics": loading.numerics} | source | report.to_dict())
    else:
        print_generate(report)
    return 0 if report.ok else 1


def _prompts(path: Path, workload: Workload, loading: Drafting) -> list[list[int]]:
    config = ModelConfig.from_file(loading.checkpoint / "config.json")
    model = abstract_model(config, numerics_of(loading.numerics))
    checked = check_request(workload.request([0], workload.draft_tokens), model, "prompt")
    settings = {name: getattr(checked, name) for name in SETTINGS}
    reader = PromptReader(settings, 1, UNLESS_ASKED.thinking, TextCoding.of(loading.checkpoint), model)
    prompts, ignored = read_prompts(path, reader)
    if ignored:
        print_warning(f"{path}: not known, and ignored: {', '.join(ignored)}; a line may have {', '.join(FIELDS)}.")
    return prompts


def print_generate(report: GenerateReport) -> None:
    """A column for each way to decode, and what follows for speculation."""
    w, runs = report.workload, [report.plain, report.plain_width_1, report.speculative]
    mesh = ", mesh of " + " x ".join(f"{axis} {size}" for axis, size in report.mesh.items()) if report.mesh else ""
    prompt = "-".join(map(str, sorted(set(w.prompt_lengths))))
    RESULT.print(
        f"{w.sequences} x ({prompt} + {w.max_new_tokens}) tokens in batches of {w.batch_size} on {report.device}{mesh}"
    )
    kind = "random prompts" if w.prompts is None else "given prompts"
    RESULT.print(f"{kind}; median of {w.repeats}; decoding is timed without prefill and compilation\n", style="dim")
    table = _table("", "plain", "plain at width 1", "speculative")
    for name, told in (
        ("tokens/s", [f"{run.tokens_per_second:,.1f}" for run in runs]),
        ("ms a step", [f"{run.step_seconds * 1e3:,.2f}" for run in runs]),
        ("rows a step, drafts", [f"{run.step_width}, {run.draft_tokens}" for run in runs]),
        ("accepted length", [f"{run.statistics.accepted_length:.2f}" for run in runs]),
        ("prefill tokens/s", [f"{run.prefill_tokens_per_second:,.0f}" for run in runs]),
        ("compiled in", [f"{run.compile_seconds:.1f} s" for run in runs]),
        ("share of the ceiling", [f"{report.speed_per_ceiling(run):.2g}" for run in runs[:2]]),
    ):
        table.add_row(name, *told)
    RESULT.print(table)
    RESULT.print(
        f"\nceiling: {decimal(round(report.plain_step_bytes))} of weights a plain step, at the "
        f"{decimal(round(report.copy_bytes_per_second))}/s of a copy {report.least_step_seconds * 1e3:.3g} ms\n",
        style="dim",
    )
    others = [report.against_plain, report.against_plain_width_1]
    table = _table("speculative against", "plain", "plain at width 1")
    for name, told in (
        ("speed-up", [f"{other.speed_up:.2f}" for other in others]),
        ("a round in plain steps", [f"{other.round_cost:.2f}" for other in others]),
        ("pays above an accepted length of", [f"{other.break_even_accepted_length:.2f}" for other in others]),
    ):
        table.add_row(name, *told)
    table.add_row("tokens", *(_agreement(other, w.sequences, other is others[0]) for other in others))
    if any(other.first_difference is not None for other in others):
        places = [other.first_difference for other in others]
        table.add_row("first difference", *("" if place is None else f"new token {place}" for place in places))
    RESULT.print(table)


def _agreement(against: Against, sequences: int, must_agree: bool) -> Text:
    if against.equal_sequences is None:
        return Text("sampled", style="dim")
    if against.equal_sequences == sequences:
        return Text("✓ equal", style="green")
    told = f"{against.equal_sequences} of {sequences} equal"
    return Text(f"✗ {told}", style="bold red") if must_agree else Text(told)


def bandwidth(*, json: bool = False) -> int:
    """Read, change and copy a large array: the ceiling of everything that is bound by memory.

    Args:
        json: Print one JSON object.
    """
    with spinner("reading, changing, copying"):
        report = bench_bandwidth()
    if json:
        print_json(report.to_dict())
    else:
        print_bandwidth(report)
    return 0


def print_bandwidth(report: BandwidthReport) -> None:
    """A line for each pass."""
    RESULT.print(f"{decimal(report.array_bytes)} on {report.device}; read and written bytes both count\n")
    table = _table("pass", "per second", "quartiles apart")
    for name, spread in report.spread.items():
        table.add_row(name.replace("_", " and "), decimal(round(getattr(report, name))), f"{spread:.1%}")
    RESULT.print(table)


def convert(
    *,
    format: Annotated[tuple[Format, ...], arg(metavar="F ...", help_behavior_hint="(default: all)")] = (),
    json: bool = False,
) -> int:
    """Encode Gaussian weights into block formats of GGUF on the CPU, beside a copy of them in the same run.

    Args:
        format: Any of q2_k, q4_k and q8_0.
        json: Print one JSON object.
    """
    with spinner("encoding"):
        report = bench_convert(tuple(dict.fromkeys(format)) or tuple(ENCODERS))
    if json:
        print_json(report.to_dict())
    else:
        print_convert(report)
    return 0


def print_convert(report: ConvertReport) -> None:
    """A line for each format."""
    RESULT.print(f"a stack is {' x '.join(map(str, STACK))} values; a copy makes ", end="")
    RESULT.print(f"{report.copy_values_per_second / 1e6:,.0f} million float32 values a second\n")
    table = _table("format", "million values/s", "a stack", "of plain rounding", "of a copy", "quartiles apart")
    for speed in report.speeds:
        plain = speed.plain_values_per_second
        table.add_row(
            speed.format,
            f"{speed.values_per_second / 1e6:,.1f}",
            f"{speed.stack_seconds:,.0f} s",
            "-" if plain is None else f"{speed.values_per_second / plain:.1%}",
            f"{speed.values_per_second / report.copy_values_per_second:.1%}",
            f"{speed.spread:.1%}",
        )
    RESULT.print(table)


def kernel(
    operation: Annotated[Positional[Operation], arg(metavar="OP")],
    *,
    live: Annotated[tuple[int, ...], arg(metavar="E ...", help_behavior_hint="(default: 6 36 120)")] = (),
    rows: Annotated[tuple[int, ...], arg(metavar="N ...", help_behavior_hint="(default: 8 an expert, else 1 6)")] = (),
    shape: Annotated[
        tuple[str, ...], arg(metavar="OUTxIN ...", help_behavior_hint="(default: 8192x4096 32768x1024)")
    ] = (),
    quantised: bool = False,
    implementation: Implementation = "mosaic",
    compare: Annotated[Literal["xla"] | None, arg(metavar="xla", help_behavior_hint="(default: none)")] = None,
    peer: Annotated[Literal["humming"] | None, arg(metavar="humming", help_behavior_hint="(default: none)")] = None,
    json: bool = False,
) -> int:
    """Time an operation at shapes of DeepSeek-V4-Flash against the speed at which this GPU reads, in the same run.

    Every result is compared with a float32 reference on random data of the run. Exit code 1 if one is wrong.

    Args:
        operation: One of mxfp4-gate-up, mxfp4-down, mxfp4-experts (a whole layer), fp8-linear and hyper-connection.
        live: Experts of the layer that are live; for a whole layer a multiple of 6, which each token picks.
        rows: Token rows; of each live expert, where there are experts, so that a layer has live * rows / 6 tokens.
        shape: Of the matrices of fp8-linear.
        quantised: Rows of FP8 matrices go through E4M3 first.
        implementation: The Pallas kernel, or what XLA makes of the reference.
        compare: Time this implementation, too.
        peer: Time the package humming-kernels on MXFP4 matrices of as many bytes, too.
        json: Print one JSON object.
    """
    wanted = cases(operation, live, rows, [_shape(text) for text in shape], quantised)
    if jax.default_backend() != "gpu":
        raise RequestError(
            "there is no GPU that JAX can use, and kernels are timed on one; on a machine that has one, "
            "`uv sync --extra cuda` installs what JAX needs for it."
        )
    implementations = list(dict.fromkeys([implementation, compare or implementation]))
    with steps_bar("bench") as begin:
        report = bench_kernel(wanted, implementations, peer is not None, begin)
    if json:
        print_json(report.to_dict())
    else:
        RESULT.print(str(report), soft_wrap=True, markup=False)
    return 0 if report.ok else 1


def _shape(text: str) -> Shape:
    try:
        out, columns = map(int, text.split("x"))
    except ValueError:
        raise RequestError(f"{text!r} is no shape of a matrix; expected OUTxIN, such as 8192x4096.") from None
    return check_count(out, "OUT"), check_count(columns, "IN")


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True)
    for header in numbers:
        table.add_column(header, justify="right")
    return table
