"""`dspark data describe`: what is in a file of training data or a cache of features."""

from pathlib import Path
from typing import Annotated, Any

from rich.bar import Bar
from rich.filesize import decimal
from rich.table import Table
from tyro.conf import OmitArgPrefixes, Positional, arg

from dspark_jax.assets import TINY_V4
from dspark_jax.checkpoint.fingerprint import fingerprint
from dspark_jax.cli.data import AS_USUAL, Reading, grid
from dspark_jax.cli.terminal import RESULT, print_json, spinner
from dspark_jax.config import ModelConfig
from dspark_jax.data.cache_format import bytes_per_token, facts_of_run
from dspark_jax.data.cache_reader import FeatureCache
from dspark_jax.data.describe import Description
from dspark_jax.data.describe import describe as describe_documents


def describe(
    source: Annotated[Positional[Path], arg(metavar="FILE_OR_CACHE")],
    *,
    checkpoint: Annotated[
        Path | None, arg(metavar="DIR", help_behavior_hint="(of a file: the packaged tiny-v4)")
    ] = None,
    reading: OmitArgPrefixes[Reading] = AS_USUAL,
    json: bool = False,
) -> int:
    """Show what a file of training data or a cache of features holds; a cache is checked on the way.

    Args:
        source: JSON lines, or the folder of a cache.
        checkpoint: Whose tokenizer reads the file; whose cache it must be.
        json: Print the same as one JSON object.
    """
    if source.is_dir():
        description, more = _describe_cache(source, checkpoint)
    else:
        documents = reading.documents(source, checkpoint or TINY_V4)
        description = describe_documents(documents, reading.max_length)
        more = {"rows": documents.rows, "truncated": documents.truncated, "dropped": documents.dropped}
    if json:
        print_json(description.to_dict() | more)
    else:
        _print_description(description, more)
    return 0


def _describe_cache(folder: Path, checkpoint: Path | None) -> tuple[Description, dict[str, Any]]:
    found = FeatureCache(folder)
    if checkpoint is not None:
        config = ModelConfig.from_file(checkpoint / "config.json")
        found.check_run(facts_of_run(config, fingerprint(checkpoint), numerics=""))
    with spinner("reading ids and masks"):
        found.check_documents()
        description = describe_documents(
            found, max(found.facts.get("max_length", 0), int(found.lengths.max(initial=0)))
        )
    more = {"bytes": found.bytes, "bytes_per_token": bytes_per_token(found.facts), "written_with": found.facts}
    return description, more


def _print_description(d: Description, more: dict[str, Any]) -> None:
    """The facts, a histogram of lengths, and what is known of the run that wrote a cache."""
    facts = grid()
    facts.add_row("documents", f"{d.documents:,}, {d.shortest:,} to {d.longest:,} tokens, median {d.median:,.0f}")
    facts.add_row("tokens", f"{d.tokens:,}, {d.supervised / d.tokens:.1%} supervised")
    facts.add_row("anchors", f"{d.anchors:,} tokens that a block can start from")
    facts.add_row("padded", f"{d.rows_padded:,} rows of {d.row_length:,} tokens, {d.padding_padded:.1%} padding")
    facts.add_row("packed", f"{d.rows_packed:,} rows of {d.row_length:,} tokens, {d.padding_packed:.1%} padding")
    if "rows" in more:
        facts.add_row(
            "file", f"{more['rows']:,} rows; {more['truncated']:,} documents cut, {more['dropped']:,} dropped"
        )
    if "bytes" in more:
        facts.add_row("cache", f"{decimal(more['bytes'])}, {more['bytes_per_token']:,} bytes a token")
    RESULT.print(facts)
    RESULT.print()
    most = max(bin.documents for bin in d.histogram)
    lengths = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    lengths.add_column("tokens", justify="right")
    lengths.add_column("documents")
    lengths.add_column(justify="right")
    for bin in d.histogram:
        bar = Bar(most, 0, bin.documents, width=24, color="cyan")
        lengths.add_row(f"{bin.first:,} to {bin.last:,}", bar, f"{bin.documents:,}")
    RESULT.print(lengths)
    if "written_with" in more:
        facts = grid()
        for name, value in more["written_with"].items():
            facts.add_row(name, str(value))
        RESULT.print("\n[bold]Written with[/]")
        RESULT.print(facts)
