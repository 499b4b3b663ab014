"""`dspark inspect`: what a checkpoint is, what it holds, and where it fits."""

from pathlib import Path
from typing import Annotated

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from dspark_jax.assets import TINY_V4
from dspark_jax.cli.facts import Amount, Files, Inspection, Memory, Parameters, Tensors, inspect_folder
from dspark_jax.cli.gguf_facts import inspect_gguf, print_gguf
from dspark_jax.cli.terminal import RESULT, print_json
from dspark_jax.config import LayerKind, ModelConfig

SYMBOLS: dict[LayerKind, tuple[str, str]] = {"sliding": ("·", "dim"), "csa": ("C", "cyan"), "hca": ("H", "magenta")}

MEMORY_NOTE = (
    "Weights and caches only; activations and temporaries come on top. More devices share the routed experts, and each "
    "holds the rest."
)


def inspect(
    file: Annotated[Positional[Path | None], arg(metavar="FILE.gguf", help_behavior_hint="(or a checkpoint)")] = None,
    *,
    checkpoint: Annotated[Path, arg(metavar="DIR", help_behavior_hint="(default: the packaged tiny-v4)")] = TINY_V4,
    json: bool = False,
) -> int:
    """Show what a checkpoint is, what it holds, and what fits on the devices.

    Args:
        file: Instead, a GGUF file: its metadata and its tensors.
        checkpoint: Folder with config.json, which is enough; shards, if any, are checked (exit code 1 if one is wrong).
        json: Print the same facts as one JSON object.
    """
    if file:
        held = inspect_gguf(file)
        if json:
            print_json(held.to_dict())
        else:
            print_gguf(held)
        return 0
    facts = inspect_folder(checkpoint)
    if json:
        print_json(facts.to_dict())
    else:
        print_facts(facts)
    return 1 if facts.files.complete is False else 0


def print_facts(facts: Inspection) -> None:
    """The facts, as sections of a page."""
    kind = "DeepSeek-V4 with a DSpark drafter" if facts.config.drafter else "DeepSeek-V4 without a drafter"
    RESULT.print(Text.assemble((kind, "bold"), "  ", (facts.checkpoint, "dim")), soft_wrap=True)
    sections: list[tuple[str, list[RenderableType]]] = [
        ("", [_model(facts.config, facts.parameters)]),
        ("Layers", [_layers(facts.config)]),
        ("Tensors on disk", [_tensors(facts.tensors), Text(), _files(facts.files)]),
        ("Memory", [_devices(facts.memory), Text(), _contexts(facts.memory), Text(MEMORY_NOTE, style="dim")]),
    ]
    for title, parts in sections:
        RESULT.print(Text(f"\n{title}" if title else "", style="bold"))
        for part in parts:
            RESULT.print(part)


def _model(c: ModelConfig, parameters: Parameters) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_row(
        "target",
        f"{_count(parameters.target)} parameters, {_count(parameters.target_active)} active for each token",
    )
    table.add_row("layers", f"{c.num_hidden_layers}, width {c.hidden_size:,} in {c.hc_mult} streams")
    table.add_row(
        "experts",
        f"{c.n_routed_experts} a layer, {c.num_experts_per_tok} for each token and a shared one, "
        f"width {c.moe_intermediate_size:,}",
    )
    table.add_row(
        "attention",
        f"{c.num_attention_heads} heads of {c.head_dim}, window {c.sliding_window}, {c.index_topk} entries picked",
    )
    table.add_row("limits", f"{c.max_position_embeddings:,} positions, {c.vocab_size:,} token ids")
    if c.drafter:
        table.add_row(
            "drafter",
            f"{_count(parameters.drafter)} parameters; {c.num_stages} stages, blocks of {c.block_size}, "
            f"Markov rank {c.drafter.markov_rank}",
        )
    return table


def _layers(c: ModelConfig) -> Table:
    """One character for each layer."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    count = c.num_hidden_layers
    table.add_row("layer", Text("".join(f"{first:<10}" for first in range(0, count, 10)).rstrip(), style="dim"))
    table.add_row("attention", Text.assemble(*(SYMBOLS[kind] for kind in c.layer_kinds)))
    if c.num_hash_layers:
        table.add_row("hash routing", Text("#" * c.num_hash_layers, style="yellow"))
    if c.drafter:
        taps = "".join("^" if layer in c.drafter.target_layer_ids else " " for layer in range(count))
        table.add_row("drafter taps", Text(taps, style="green"))
    table.add_row("", _legend(c))
    return table


def _legend(c: ModelConfig) -> Text:
    names = {"sliding": "window only", "csa": "CSA", "hca": "HCA"}
    parts: list[str | tuple[str, str]] = []
    for kind, symbol in SYMBOLS.items():
        ratios = [ratio for ratio, own in zip(c.layer_ratios, c.layer_kinds, strict=True) if own == kind]
        if ratios:
            compression = " 1:" + "/".join(map(str, sorted(set(ratios)))) if any(ratios) else ""
            parts += [symbol, f" {len(ratios)} {names[kind]}{compression}   "]
    return Text.assemble(*parts)


def _tensors(tensors: Tensors) -> Table:
    table = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_footer=True, footer_style="bold"
    )
    table.add_column("kind", footer="total")
    table.add_column("tensors", justify="right", footer=f"{tensors.tensors:,}")
    table.add_column("bytes", justify="right", footer=decimal(tensors.bytes))
    table.add_column("share", justify="right")
    table.add_column("dtypes", footer=f"{tensors.bytes:,} bytes")

    def add_row(name: str, amount: Amount, dtypes: str) -> None:
        share = f"{amount.bytes / tensors.bytes:.1%}"
        table.add_row(name, f"{amount.tensors:,}", decimal(amount.bytes), share, dtypes)

    for kind, group in tensors.by_kind.items():
        add_row(kind, group, ", ".join(group.by_dtype))
    table.add_row()
    for dtype, amount in tensors.by_dtype.items():
        add_row(dtype, amount, "")
    return table


def _files(files: Files) -> Text:
    style, mark = {True: ("green", "✓ "), False: ("bold red", "✗ "), None: ("yellow", "")}[files.complete]
    return Text(mark + files.message, style=style)


def _devices(memory: Memory) -> Text:
    here = f"{memory.devices} {memory.device} device{'s' if memory.devices > 1 else ''}"
    split = f", {decimal(memory.weight_bytes_per_device)} on each device" if memory.devices_used > 1 else ""
    return Text(
        f"Weights take {decimal(memory.weight_bytes)}{split}. Here: {here} of {decimal(memory.bytes_per_device)}."
    )


def _contexts(memory: Memory) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for header in ("context", "cache of a sequence", "devices needed", "sequences that fit here"):
        table.add_column(header, justify="right")
    for context in memory.contexts:
        needed, fit = context.devices_needed, context.sequences
        table.add_row(
            f"{context.positions:,}",
            decimal(context.cache_bytes),
            "larger ones" if needed is None else str(needed),
            Text(f"{fit:,}", style="green" if fit else "red"),
        )
    return table


def _count(parameters: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if parameters >= unit:
            return f"{parameters / unit:.1f} {name}"
    return f"{parameters:,}"
