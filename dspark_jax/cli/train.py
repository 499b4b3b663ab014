"""`dspark train`: fine-tune a drafter."""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
from rich.filesize import decimal
from rich.table import Table
from tyro.conf import OmitArgPrefixes, arg

from dspark_jax.checkpoint.fingerprint import fingerprint
from dspark_jax.checkpoint.load import load
from dspark_jax.cli.data import AS_USUAL, Reading
from dspark_jax.cli.options import ONE_DEVICE, PACKAGED, Devices, Loading
from dspark_jax.cli.terminal import RESULT, STATUS, bytes_bar, print_json, spinner, training_bar
from dspark_jax.config import LARGEST_INTEGER, ModelConfig
from dspark_jax.data.batches import Batches
from dspark_jax.data.cache_format import bytes_per_token, digest_of, facts_of_run
from dspark_jax.data.cache_reader import FeatureCache
from dspark_jax.data.documents import Documents
from dspark_jax.data.passing import PassingCache
from dspark_jax.errors import RequestError, check_count
from dspark_jax.model.model import PARTS, Model, Part
from dspark_jax.model.numerics import numerics_of
from dspark_jax.training.events import events
from dspark_jax.training.losses import Objective
from dspark_jax.training.memory import step_memory
from dspark_jax.training.parameters import Scope
from dspark_jax.training.run import Record, check_contract, facts_of, read_log
from dspark_jax.training.run import train as run_training
from dspark_jax.training.step import Recipe, check_recipe


@dataclass(frozen=True)
class Learning:
    """What is trained, toward what, and how fast."""

    steps: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: --epochs)")] = None
    """Steps of the whole run."""
    epochs: Annotated[float, arg(metavar="E")] = 1.0
    """Passes over the data, where --steps says nothing."""
    scope: Scope = Recipe.scope
    """heads: Markov and confidence head; non_expert: all but the routed experts; full: the whole drafter."""
    anchors: Annotated[int, arg(metavar="A")] = Recipe.anchors
    """Blocks of each row in a step."""
    learning_rate: Annotated[float, arg(metavar="LR")] = Recipe.learning_rate
    """Its peak; a linear warm-up leads to it, and half a cosine to zero."""
    warm_up: Annotated[float, arg(metavar="PART")] = Recipe.warm_up
    """Part of the steps."""
    weight_decay: Annotated[float, arg(metavar="D")] = Recipe.weight_decay
    """Decoupled."""
    clip: Annotated[float, arg(metavar="NORM")] = Recipe.clip
    """Largest norm of the gradient."""
    cross_entropy: Annotated[float, arg(metavar="W")] = Objective.cross_entropy
    """Weight of the cross-entropy with the next token."""
    l1: Annotated[float, arg(metavar="W")] = Objective.l1
    """Weight of the distance to the target's distribution."""
    confidence: Annotated[float, arg(metavar="W")] = Objective.confidence
    """Weight of the confidence head's cross-entropy with the expected acceptance."""
    decay: Annotated[float, arg(metavar="L")] = Objective.decay
    """Slot k of a block weighs exp(-k / L); 0 weighs all alike."""
    half_distance: bool = Objective.half_distance
    """Take half the distance, as speculators does."""
    confidence_gradient: bool = Objective.confidence_gradient
    """Let the confidence loss move the whole drafter, as the paper does."""
    unrounded: bool = False
    """Compute with float32 masters, not with what will be stored of them; export then rounds what was trained."""
    seed: Annotated[int, arg(metavar="S")] = Recipe.seed
    """Of the order of the data and of the anchors."""

    def recipe(self, steps_per_epoch: int) -> Recipe:
        """Checked.

        Raises:
            RequestError: a number that makes no sense.
        """
        if not 0 < self.epochs <= LARGEST_INTEGER:
            raise RequestError(f"epochs is {self.epochs!r}; expected a positive number.")
        objective = Objective(
            self.cross_entropy, self.l1, self.confidence, self.decay, self.half_distance, self.confidence_gradient
        )
        recipe = Recipe(
            steps=max(round(self.epochs * steps_per_epoch), 1) if self.steps is None else self.steps,
            scope=self.scope,
            anchors=self.anchors,
            learning_rate=self.learning_rate,
            warm_up=self.warm_up,
            clip=self.clip,
            weight_decay=self.weight_decay,
            objective=objective,
            rounded=not self.unrounded,
            seed=self.seed,
        )
        check_recipe(recipe)
        return recipe


GENTLY = Learning()
UNLESS_DRY = "(required unless --dry-run)"


def train(
    *,
    loading: OmitArgPrefixes[Loading] = PACKAGED,
    documents: Annotated[Path | None, arg(metavar="FILE_OR_CACHE", help_behavior_hint=UNLESS_DRY)] = None,
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint=UNLESS_DRY)] = None,
    batch_size: Annotated[int, arg(metavar="B")] = 8,
    packed: bool = False,
    passing: Annotated[int | None, arg(metavar="STEPS", help_behavior_hint="(default: features on the fly)")] = None,
    save_every: Annotated[int, arg(metavar="N")] = 500,
    tensorboard: bool = False,
    dry_run: bool = False,
    row_tokens: Annotated[int | None, arg(metavar="N", help_behavior_hint="(default: the longest document)")] = None,
    learning: OmitArgPrefixes[Learning] = GENTLY,
    reading: OmitArgPrefixes[Reading] = AS_USUAL,
    devices: OmitArgPrefixes[Devices] = ONE_DEVICE,
    json: bool = False,
) -> int:
    """Fine-tune the drafter of a checkpoint on your data.

    Started again after a kill, the command goes on from the last checkpoint in OUT; `dspark export` writes the drafter.

    Args:
        documents: JSON lines (see `dspark data`), or a cache of features, with which the target is not loaded.
        out: Folder of the run.
        batch_size: Rows of a step.
        packed: Let several documents share a row; needs cached features.
        passing: Keep the features of so many steps on disk at a time: captured, trained on, deleted.
        save_every: Steps between two checkpoints.
        tensorboard: Write event files for TensorBoard into OUT, too.
        dry_run: Print the memory of a step with cached features and stop. Needs config.json alone, no --documents.
        row_tokens: Of a row; for --dry-run 2048 unless given.
        json: Print the result as JSON.
    """
    check_count(batch_size, "batch_size")
    if row_tokens is not None:
        check_count(row_tokens, "row_tokens")
    if dry_run:
        if documents or packed or passing is not None or devices != ONE_DEVICE:
            raise RequestError("--dry-run is about one device and cached features; leave the options about data away.")
        return _dry_run(loading, learning, batch_size, row_tokens or 2048, json)
    if documents is None or out is None:
        raise RequestError("training needs --documents and --out; to look at the memory of a step, use --dry-run.")
    cached = documents.is_dir()
    corpus = _corpus(documents, loading, reading)
    length = row_tokens or int(corpus.lengths.max(initial=1))
    data = Batches(corpus, length=length, batch_size=batch_size, packed=packed, seed=learning.seed)
    recipe = learning.recipe(data.steps_per_epoch)
    if packed and not cached and passing is None:
        raise RequestError(
            "--packed needs features from a cache (`dspark data cache`, or --passing), since a target cannot keep the "
            "documents of a row apart."
        )
    if cached and passing is not None:
        raise RequestError(f"--passing makes features of documents, and {documents} is a cache that has them already.")
    check_count(save_every, "save_every")
    facts = _facts(loading, devices, data, passing)
    check_contract(out, facts_of(recipe) | facts)
    with events(out) if tensorboard else nullcontext(lambda record: None) as write:
        parts: tuple[Part, ...] = ("drafter",) if cached else PARTS
        with bytes_bar("loading weights") as progress:
            model = load(loading.checkpoint, loading.numerics, devices.mesh(), parts=parts, progress=progress)
        examples = _passing(model, data, loading, out, passing) if passing is not None else data
        with training_bar(recipe.steps) as bar:

            def report(record: Record) -> None:
                bar(record)
                write(record)

            run_training(model, examples, recipe, out, facts, save_every=save_every, report=report)
    if isinstance(examples, PassingCache):
        examples.delete()
    _print_run(out, recipe, json)
    return 0


def _corpus(documents: Path, loading: Loading, reading: Reading) -> Documents | FeatureCache:
    """The documents of a file, or of a cache that was made by this checkpoint."""
    if not documents.is_dir():
        return reading.documents(documents, loading.checkpoint)
    if reading != AS_USUAL:
        raise RequestError(f"{documents}: is a cache, whose documents are cut already; leave out how to read.")
    config = ModelConfig.from_file(loading.checkpoint / "config.json")
    cache = FeatureCache(documents)
    cache.check_run(facts_of_run(config, fingerprint(loading.checkpoint), loading.numerics))
    return cache


def _passing(model: Model, data: Batches, loading: Loading, out: Path, steps: int) -> PassingCache:
    """The same examples with features that are captured, trained on and deleted; says what that takes first."""
    facts = facts_of_run(model.config, fingerprint(loading.checkpoint), loading.numerics)
    token = bytes_per_token(facts)
    room = token * data.length * data.batch_size * check_count(steps, "passing")
    STATUS.print(f"{token:,} bytes a token: up to {decimal(room)} of features in {out} at a time.", soft_wrap=True)
    return PassingCache(model, data, out / "features", facts, steps=steps, batch_size=data.batch_size)


def _facts(loading: Loading, devices: Devices, data: Batches, passing: int | None) -> dict[str, Any]:
    """What a run depends on besides its recipe. A cache that passes by gives the features of one that stays."""
    corpus, features = data.corpus, "of the step" if passing is None else loading.numerics
    if isinstance(corpus, FeatureCache):
        features = corpus.facts.get("numerics", "unknown")
    known = corpus.facts.get("documents") if isinstance(corpus, FeatureCache) else None
    return {
        "checkpoint": fingerprint(loading.checkpoint),
        "numerics": loading.numerics,
        "features": features,
        "devices": asdict(devices),
        "data": {
            "digest": known or digest_of(corpus[number] for number in range(len(corpus))),
            "row_tokens": data.length,
            "batch_size": data.batch_size,
            "packed": data.packed,
            "seed": data.seed,
        },
    }


def _dry_run(loading: Loading, learning: Learning, batch_size: int, row_tokens: int, json: bool) -> int:
    """Prints what a step takes, from config.json alone."""
    config = ModelConfig.from_file(loading.checkpoint / "config.json")
    recipe = learning.recipe(steps_per_epoch=1)
    with spinner("compiling a step"):
        memory = step_memory(config, numerics_of(loading.numerics), recipe, batch_size, row_tokens)
    if json:
        print_json(asdict(memory) | {"peak": memory.peak, "backend": jax.default_backend()})
        return 0
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, size in (*asdict(memory).items(), ("peak", memory.peak)):
        table.add_row(name, f"[bold]{decimal(size)}[/]" if name == "peak" else decimal(size))
    RESULT.print(table)
    RESULT.print(f"By the compiler of this machine's {jax.default_backend()} backend, for one device.", style="dim")
    return 0


def _print_run(out: Path, recipe: Recipe, json: bool) -> None:
    """The last line of the log."""
    last = read_log(out)[-1]
    if json:
        print_json({"out": str(out), "steps": recipe.steps} | last)
        return
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_row("run", f"{recipe.steps} steps in {out}")
    facts.add_row("loss", f"{last['loss']:.4f}")
    facts.add_row(
        "expected accepted length", f"{last['expected_length']:.2f} sampled, {last['greedy_length']:.2f} greedy"
    )
    RESULT.print(facts)
    RESULT.print("On the last batch, with the text as context. Next: dspark export, dspark evaluate.", style="dim")
