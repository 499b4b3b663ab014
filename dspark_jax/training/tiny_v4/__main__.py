"""`python -m dspark_jax.training.tiny_v4 COMMAND`: reproduces tiny-v4; results on stdout as JSON."""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dspark_jax.data.example import Example
from dspark_jax.training.tiny_v4 import corpus, domain, ngram, tokens
from dspark_jax.training.tiny_v4.recipe import CONFIG, ROW_TOKENS, VOCAB_SIZE


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command."""
    options = _parser().parse_args(arguments)
    options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dspark_jax.training.tiny_v4", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, about: str, reads_corpus: bool = True) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=about, description=about)
        one.set_defaults(run=run)
        if reads_corpus:
            one.add_argument("--corpus", type=Path, required=True, help="file written by the command 'corpus'")
        return one

    one = command("corpus", _corpus, "collects the standard library, trains the tokenizer, writes the tokens", False)
    one.add_argument("--out", type=Path, required=True)
    one = command("ngram", _ngram, "bits per byte of the n-gram baseline")
    one.add_argument("--length", type=int, default=5)
    one.add_argument("--split", choices=corpus.SPLITS, default="test")
    one = command("target", _target, "trains the target and writes OUT/checkpoint and OUT/metrics.jsonl")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--minutes", type=float, default=8.0, help="of the whole run, compiling included")
    one.add_argument("--steps", type=int, help="take so many instead of what fits into the time")
    one.add_argument("--batch", type=int, default=64, help="rows of a step")
    one.add_argument("--peak", type=float, default=2e-3, help="largest learning rate")
    one = command("drafter", _drafter, "trains the drafter of a target and writes OUT/checkpoint and OUT/metrics.jsonl")
    one.add_argument("--target", type=Path, required=True, help="checkpoint written by the command 'target'")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--steps", type=int, default=8000)
    one.add_argument("--batch", type=int, default=64, help="rows of a step")
    one.add_argument("--written", type=int, default=16384, help="rows that the target writes first")
    one.add_argument("--side-by-side", type=int, default=1024, help="of them at a time")
    one.add_argument("--peak", type=float, default=2e-3, help="largest learning rate")
    one = command("evaluate", _evaluate, "bits per byte of a checkpoint, with its own picks or others")
    one.add_argument("--checkpoint", type=Path, required=True)
    one.add_argument("--split", choices=corpus.SPLITS, default="test")
    one.add_argument("--picks", choices=("learnt", "recent", "oldest", "random"), default="learnt")
    one.add_argument("--numerics", default="bfloat16")
    one.add_argument("--tokens", type=int, help="only the first so many of the split")
    one = command("along-text", _along_text, "accepted length of a checkpoint's drafter along given text", False)
    one.add_argument("--checkpoint", type=Path, required=True)
    one.add_argument("--corpus", type=Path, help="file written by the command 'corpus'")
    one.add_argument("--documents", type=Path, help="JSON lines in its place, as `dspark train` reads them")
    one.add_argument("--split", choices=corpus.SPLITS, default="test")
    one.add_argument("--numerics", default="bfloat16")
    one.add_argument("--batch", type=int, default=8, help="rows side by side")
    one = command("prompts", _prompts, "writes held-out beginnings of functions and classes, one a line")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--prompt-tokens", type=int, default=64)
    one = command("domain", _domain, "collects character tables as a new domain to fine-tune the drafter on", False)
    one.add_argument("--out", type=Path, required=True, help="folder for text.jsonl, prompts.jsonl and held-out.jsonl")
    one.add_argument(
        "--encodings", type=Path, help="folder of the package `encodings` instead of the interpreter's own"
    )
    return parser


def _corpus(options: argparse.Namespace) -> None:
    prepared = tokens.tokenise(corpus.collect(), VOCAB_SIZE)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    tokens.write(prepared, options.out)
    counts = {split: len(stream) for split, stream in prepared.streams.items()}
    _print({**prepared.provenance, "tokens": counts})


def _ngram(options: argparse.Namespace) -> None:
    prepared = tokens.read(options.corpus)
    model = ngram.train(prepared.streams["train"], options.length, VOCAB_SIZE)
    stream = prepared.streams[options.split]
    size = prepared.text_bytes(stream)
    _print({"length": options.length, "bytes": size, "bits_per_byte": ngram.bits(model, stream) / size})


def _target(options: argparse.Namespace) -> None:
    from dspark_jax.model.numerics import numerics_of
    from dspark_jax.training.tiny_v4.initialise import initial_model
    from dspark_jax.training.tiny_v4.pretrain import Plan
    from dspark_jax.training.tiny_v4.train_target import CHECKPOINT, METRICS, Budget, append_to, train_target
    from dspark_jax.training.tiny_v4.train_target import write_checkpoint as write

    prepared = tokens.read(options.corpus)
    options.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(options.batch, ROW_TOKENS, options.peak)
    model = initial_model(CONFIG, numerics_of("bfloat16"), plan.seed)
    streams = prepared.streams["train"], prepared.streams["validation"]
    log = append_to(options.out / METRICS)
    model = train_target(model, *streams, plan, Budget(options.steps, 60 * options.minutes), log)
    write(model, prepared.tokenizer, options.out / CHECKPOINT)


def _drafter(options: argparse.Namespace) -> None:
    from dspark_jax.checkpoint.load import load
    from dspark_jax.training.tiny_v4.train_drafter import DrafterPlan, train_drafter
    from dspark_jax.training.tiny_v4.train_target import CHECKPOINT, METRICS, append_to
    from dspark_jax.training.tiny_v4.train_target import write_checkpoint as write

    prepared = tokens.read(options.corpus)
    options.out.mkdir(parents=True, exist_ok=True)
    plan = DrafterPlan(
        steps=options.steps,
        batch=options.batch,
        written=options.written,
        side_by_side=options.side_by_side,
        learning_rate=options.peak,
    )
    model = load(options.target, "bfloat16")
    streams = prepared.streams["train"], prepared.streams["validation"]
    model = train_drafter(model, *streams, plan, append_to(options.out / METRICS))
    write(model, prepared.tokenizer, options.out / CHECKPOINT)


def _evaluate(options: argparse.Namespace) -> None:
    from dspark_jax.checkpoint.load import load
    from dspark_jax.training.tiny_v4.evaluate import bits, picks_by

    prepared = tokens.read(options.corpus)
    model = load(options.checkpoint, options.numerics, parts=("target",))
    stream = prepared.streams[options.split][: options.tokens]
    with contextlib.nullcontext() if options.picks == "learnt" else picks_by(options.picks):
        spent = [some for _, some in bits(model, stream, ROW_TOKENS)]
    size = prepared.text_bytes(stream)
    _print({"picks": options.picks, "bytes": size, "bits_per_byte": sum(spent) / size})


def _along_text(options: argparse.Namespace) -> None:
    from dspark_jax.checkpoint.load import load
    from dspark_jax.evaluation.along_text import along_text, rows_of

    if (options.corpus is None) == (options.documents is None):
        raise SystemExit("give one of --corpus and --documents")
    if options.corpus:
        rows = rows_of(tokens.read(options.corpus).streams[options.split], ROW_TOKENS, options.batch)
    else:
        rows = _batches(options.documents, options.checkpoint, options.batch)
    _print(dataclasses.asdict(along_text(load(options.checkpoint, options.numerics), rows)))


def _batches(documents: Path, checkpoint: Path, batch: int) -> Iterator[Example]:
    """All documents of a file once, but for those that do not fill a batch at the end."""
    from dspark_jax.config import ModelConfig
    from dspark_jax.data.batches import Batches
    from dspark_jax.data.documents import DocumentReader
    from dspark_jax.jobs.text import Text

    config = ModelConfig.from_file(checkpoint / "config.json")
    reader = DocumentReader(Text.of(checkpoint), config.vocab_size, config.eos_token_id[0], max_length=ROW_TOKENS)
    found = reader.read(documents)
    batches = Batches(found, length=int(found.lengths.max()), batch_size=batch)
    return (batches[step] for step in range(batches.steps_per_epoch))


def _prompts(options: argparse.Namespace) -> None:
    from tokenizers import Tokenizer

    prepared = tokens.read(options.corpus)
    tokenizer = Tokenizer.from_str(prepared.tokenizer)
    begun = (tokenizer.encode(text, add_special_tokens=False).ids for text in prepared.beginnings)
    cut = [ids[: options.prompt_tokens] for ids in begun if len(ids) > options.prompt_tokens]
    lines = (json.dumps({"id": f"test-{number}", "prompt_ids": ids}) for number, ids in enumerate(cut))
    options.out.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    _print({"prompts": len(cut)})


def _domain(options: argparse.Namespace) -> None:
    _print(domain.write(domain.collect(options.encodings), options.out))


def _print(value: object) -> None:
    json.dump(value, sys.stdout)
    print()


if __name__ == "__main__":
    main()
