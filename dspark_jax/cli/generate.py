"""`dspark generate`: one prompt, completed greedily."""

import time
from pathlib import Path
from typing import Annotated, Literal

from rich.bar import Bar
from rich.table import Table
from tokenizers import Tokenizer
from tyro.conf import Positional, arg

import dspark_jax
from dspark_jax.cli.terminal import RESULT, bytes_bar, print_json, spinner
from dspark_jax.config import ModelConfig
from dspark_jax.decoding.request import check_prompt
from dspark_jax.decoding.statistics import Statistics
from dspark_jax.errors import CheckpointError, RequestError

TOKENIZER_FILE = "tokenizer.json"


def generate(
    prompt: Annotated[Positional[str], arg(metavar="[PROMPT]", help_behavior_hint="(or --prompt-ids)")] = "",
    *,
    checkpoint: Annotated[Path, arg(metavar="DIR")],
    prompt_ids: Annotated[str, arg(metavar="ID,ID,...", help_behavior_hint="(or PROMPT)")] = "",
    max_new_tokens: Annotated[int, arg(metavar="N")] = 64,
    draft_tokens: Annotated[int | None, arg(metavar="K", help_behavior_hint="(default: the trained block)")] = None,
    numerics: Literal["float32", "bfloat16", "official"] = "bfloat16",
    json: bool = False,
) -> int:
    """Complete a prompt greedily; drafting and verification stay on the device.

    Args:
        prompt: Text, taken as it is, without a chat template. Needs the folder's tokenizer.json.
        checkpoint: Folder with config.json, the index and the shards.
        prompt_ids: The prompt as token ids.
        max_new_tokens: Tokens to generate at most; the model's end-of-sequence token stops earlier.
        draft_tokens: Drafts offered in a round; 0 decodes plainly. The tokens are the same whatever it is.
        numerics: float32 for parity with PyTorch, official to quantise activations as DeepSeek serves the model.
        json: Print one JSON object: tokens, text, statistics.
    """
    if max_new_tokens < 0 or (draft_tokens or 0) < 0:
        name, value = ("--max-new-tokens", max_new_tokens) if max_new_tokens < 0 else ("--draft-tokens", draft_tokens)
        raise RequestError(f"{name} is {value}; expected an integer of at least 0.")
    config = ModelConfig.from_file(checkpoint / "config.json")
    tokenizer = read_tokenizer(checkpoint)
    ids = encode_prompt(prompt, prompt_ids, tokenizer, checkpoint, config.vocab_size)

    with bytes_bar("loading weights") as progress:
        model = dspark_jax.load(checkpoint, numerics=numerics, progress=progress)
    start = time.perf_counter()
    with spinner("compiling and generating"):
        done = dspark_jax.generate(model, [ids], max_new_tokens=max_new_tokens, draft_tokens=draft_tokens)
    seconds = time.perf_counter() - start

    [tokens] = done.tokens
    text = tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer else None
    if json:
        print_json(
            {
                "tokens": tokens,
                "text": text,
                "statistics": done.statistics.to_dict(),
                "checkpoint": str(checkpoint),
                "numerics": numerics,
                "seconds_with_compilation": seconds,
            }
        )
    else:
        print(text if text is not None else ",".join(map(str, tokens)))
        print_statistics(done.statistics, len(tokens), seconds)
    return 0


def read_tokenizer(checkpoint: Path) -> Tokenizer | None:
    """The folder's tokenizer, None if it has none.

    Raises:
        CheckpointError: `tokenizer.json` is there but is not a tokenizer.
    """
    path = checkpoint / TOKENIZER_FILE
    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: is not a tokenizer ({error}); fetch the file again.") from error


def encode_prompt(
    prompt: str, prompt_ids: str, tokenizer: Tokenizer | None, checkpoint: Path, vocabulary: int
) -> list[int]:
    """Token ids of the prompt, whichever way it was given.

    Raises:
        RequestError: both ways or none, text without a tokenizer, or ids that are none of this vocabulary.
    """
    if bool(prompt) == bool(prompt_ids):
        given = "both PROMPT and --prompt-ids are given" if prompt else "there is no prompt"
        raise RequestError(f"{given}; give exactly one: a text, or --prompt-ids 1,2,3.")
    if prompt_ids:
        return check_prompt(_parse_ids(prompt_ids), vocabulary, "--prompt-ids")
    if tokenizer is None:
        raise RequestError(
            f"{checkpoint}: has no {TOKENIZER_FILE}, which a text prompt needs; fetch it, or give --prompt-ids 1,2,3."
        )
    # Official prompts spell out their special tokens, the first one included, so none is added.
    return check_prompt(tokenizer.encode(prompt, add_special_tokens=False).ids, vocabulary, "PROMPT")


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RequestError(f"--prompt-ids is {text!r}; expected token ids and commas, such as 1,2,3.") from error


def print_statistics(statistics: Statistics, tokens: int, seconds: float) -> None:
    """A summary, and a bar for each draft position that was offered."""
    s = statistics
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_row("accepted length", f"[bold]{s.accepted_length:.2f}[/] tokens a round, bonus included")
    facts.add_row("rounds", f"{s.rounds}")
    facts.add_row("drafts", f"{s.accepted_drafts} accepted of {s.offered_drafts} offered")
    facts.add_row("time", f"{tokens} tokens in {seconds:.1f} s, compilation included")
    RESULT.print()
    RESULT.print(facts)
    if s.offered_drafts:
        RESULT.print()
        RESULT.print(_positions(s))


def _positions(s: Statistics) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("draft", justify="right")
    table.add_column("prefix acceptance\nper offering round")
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    table.add_column("conditional\nper reached round", justify="right")
    table.add_column(justify="right", style="dim")
    rows = zip(
        s.accepting_rounds,
        s.offering_rounds,
        s.reached_rounds,
        s.prefix_acceptance_per_offering_round,
        s.conditional_acceptance_per_reached_round,
        strict=True,
    )
    for position, (accepting, offering, reached, prefix, conditional) in enumerate(rows, start=1):
        if prefix is not None:
            bar = Bar(1, 0, prefix, width=24, color="cyan")
            table.add_row(
                str(position),
                bar,
                f"{prefix:.0%}",
                f"{accepting}/{offering}",
                "" if conditional is None else f"{conditional:.0%}",
                f"{accepting}/{reached}",
            )
    return table
