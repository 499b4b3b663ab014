"""One step of fine-tuning: the loss of the drafter on a batch, its gradient, and the optimiser's move.

    state = initial_state(model, recipe)
    for step in range(recipe.steps):
        state, report = train_step(state, model, examples[step], recipe)
    tuned = release(model, state.parameters)

The target, embedding and LM head are frozen: only the masters in `state` are differentiated. What a step draws at
random depends on the recipe's seed and the step's number, so a state is all that a run needs to go on.
"""

import math
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import optax

from dspark_jax.checkpoint.layout import logical_axes
from dspark_jax.config import LARGEST_INTEGER
from dspark_jax.data.example import Example
from dspark_jax.data.features import target_features
from dspark_jax.decoding.request import SEEDS
from dspark_jax.errors import RequestError
from dspark_jax.model.drafter import confidence_logits
from dspark_jax.model.markov import embed_previous, markov_latents
from dspark_jax.model.model import Model
from dspark_jax.placement import partition_of
from dspark_jax.sharding import sharding_of
from dspark_jax.training.blocks import Blocks, draw_blocks, take
from dspark_jax.training.losses import Metrics, Objective, losses, metrics
from dspark_jax.training.parameters import Parameters, Scope, masters, merge, names_in
from dspark_jax.training.slot_terms import SlotTerms, slot_terms
from dspark_jax.training.teacher_forcing import draft_blocks
from pallas_kernels.partition import Partition


@dataclass(frozen=True)
class Recipe:
    """What a run of fine-tuning depends on besides its model and its data.

    Attributes:
        steps: of the whole run; the schedule ends with it.
        scope: which weights of the drafter are trained.
        anchors: blocks a row.
        learning_rate: the peak, reached after a linear warm-up and left along half a cosine.
        warm_up: part of the steps.
        clip: largest norm of the gradient of all weights.
        weight_decay: decoupled, of matrices, for each unit of the learning rate.
        objective: of the loss.
        rounded: compute with what will be stored of the masters, so that what is exported is what was trained.
        seed: of the anchors.
    """

    steps: int
    scope: Scope = "non_expert"
    anchors: int = 64
    learning_rate: float = 5e-5
    warm_up: float = 0.04
    clip: float = 1.0
    weight_decay: float = 0.0
    objective: Objective = field(default_factory=Objective)
    rounded: bool = True
    seed: int = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainingState:
    """What one step hands to the next, and all that a checkpoint holds.

    Attributes:
        parameters: float32 masters.
        optimiser: optax's state.
        step: int32 [], steps taken.
    """

    parameters: Parameters
    optimiser: optax.OptState
    step: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Report:
    """Of one step: its metrics before the update, float32 norm of the gradient before clipping, and learning rate."""

    metrics: Metrics
    gradient_norm: jax.Array
    learning_rate: jax.Array


# The loss ------------------------------------------------------------------------------------------------------------


def loss_fn(
    parameters: Parameters,
    model: Model,
    example: Example,
    key: jax.Array,
    recipe: Recipe,
    partition: Partition | None = None,
) -> tuple[jax.Array, Metrics]:
    """What is differentiated with respect to `parameters`, and what is logged.

    Args:
        parameters: masters of weights of the drafter.
        model: with a drafter, and with a target unless the example has features.
        example: packed rows need features of their own.
        key: draws the anchors.
        recipe: static.
        partition: how the model lies on a mesh; static, None on one device.

    Returns:
        float32 [] and `Metrics`.
    """
    features = example.features
    if features is None:
        features = target_features(model, example, partition)
    example = Example(example.ids, example.supervised, example.document, jax.lax.stop_gradient(features))
    blocks = draw_blocks(key, example, recipe.anchors, model.config.block_size)
    terms, confidence = score_blocks(
        merge(model, parameters, recipe.rounded), example, blocks, recipe.objective, partition
    )
    total = losses(terms, confidence, blocks.supervised, recipe.objective).total(recipe.objective)
    logged = metrics(terms, confidence, blocks.labels, blocks.supervised, blocks.kept, recipe.objective)
    return total, logged


def score_blocks(
    model: Model, example: Example, blocks: Blocks, objective: Objective, partition: Partition | None = None
) -> tuple[SlotTerms, jax.Array]:
    """The drafter on blocks of an example with features: the terms of its slots, and confidence logits [B, A, g]."""
    weights, features = model.drafter, example.features
    assert weights is not None and features is not None
    setting = model.setting(example.ids.shape[1] + model.config.block_size, partition)
    hidden, normed = draft_blocks(weights, model.vocabulary, example, features, blocks, setting)
    embedding = embed_previous(weights.markov_head, blocks.previous)
    latent = markov_latents(weights.markov_head, normed, embedding)
    terms = slot_terms(weights, model.vocabulary, normed, latent, take(features.hidden, blocks.rows), blocks.labels)
    if not objective.confidence_gradient:
        hidden, embedding = jax.lax.stop_gradient((hidden, embedding))
    return terms, confidence_logits(weights, hidden, embedding)


# Steps ---------------------------------------------------------------------------------------------------------------


def initial_state(model: Model, recipe: Recipe) -> TrainingState:
    """The state before the first step, each weight's master and moments where the weight lies.

    Raises:
        RequestError: no drafter, or a recipe that makes no sense.
    """
    check_recipe(recipe)
    return _initial_state(model, recipe, partition_of(model))


def abstract_state(model: Model, recipe: Recipe) -> TrainingState:
    """The same of a model that may be abstract, with `jax.ShapeDtypeStruct` leaves."""
    return jax.eval_shape(lambda model: _initial_state(model, recipe, None), model)


@partial(jax.jit, static_argnames=("recipe", "partition"))
def _initial_state(model: Model, recipe: Recipe, partition: Partition | None) -> TrainingState:
    parameters = masters(model, names_in(model, recipe.scope))
    state = TrainingState(parameters, optimiser(recipe).init(parameters), jnp.zeros((), jnp.int32))
    return _constrained(state, recipe, partition)


@partial(jax.jit, static_argnames=("recipe", "partition"), donate_argnames="state")
def train_step(
    state: TrainingState, model: Model, example: Example, recipe: Recipe, partition: Partition | None = None
) -> tuple[TrainingState, Report]:
    """One step; `state` is given up. On a mesh, `partition` is `placement.partition_of(model)`."""
    key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    (_, logged), gradients = gradient(state.parameters, model, example, key, recipe, partition)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its own scalars in
        updates, moments = optimiser(recipe).update(gradients, state.optimiser, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        report = Report(logged, optax.tree.norm(gradients), jnp.float32(learning_rate(recipe)(state.step)))
    return _constrained(TrainingState(parameters, moments, state.step + 1), recipe, partition), report


def optimiser(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW behind clipping by the global norm; only what has two axes or more decays."""
    matrices = partial(jax.tree.map, lambda value: value.ndim > 1)
    adamw = optax.adamw(learning_rate(recipe), 0.9, 0.999, eps=1e-8, weight_decay=recipe.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(recipe.clip), adamw)


def learning_rate(recipe: Recipe) -> optax.Schedule:
    """With w = int(warm_up * steps): step s < w takes peak (s + 1) / w, later ones half a cosine that ends at steps.

    The peak comes twice and zero never, as in DeepSpec.
    """
    warm, peak = int(recipe.warm_up * recipe.steps), recipe.learning_rate
    cosine = optax.cosine_decay_schedule(peak, max(recipe.steps - warm, 1))
    if not warm:
        return cosine
    line = optax.linear_schedule(peak / warm, peak, warm - 1) if warm > 1 else optax.constant_schedule(peak)
    return optax.join_schedules([line, cosine], [warm])


def check_recipe(recipe: Recipe) -> None:
    """Refuses numbers that make no sense.

    Raises:
        RequestError: naming the field, what it is and what was expected.
    """
    weights = (recipe.objective.cross_entropy, recipe.objective.l1, recipe.objective.confidence)
    rules: list[tuple[bool, str, object, str]] = [
        (1 <= recipe.steps <= LARGEST_INTEGER, "steps", recipe.steps, "at least 1"),
        (1 <= recipe.anchors <= LARGEST_INTEGER, "anchors", recipe.anchors, "at least 1"),
        (0 <= recipe.learning_rate < math.inf, "learning_rate", recipe.learning_rate, "a number of at least 0"),
        (0 <= recipe.warm_up <= 1, "warm_up", recipe.warm_up, "a part of the steps, 0 to 1"),
        (0 < recipe.clip < math.inf, "clip", recipe.clip, "a positive norm"),
        (0 <= recipe.weight_decay < math.inf, "weight_decay", recipe.weight_decay, "a number of at least 0"),
        (0 <= recipe.objective.decay < math.inf, "decay", recipe.objective.decay, "a number of at least 0"),
        (
            all(w >= 0 for w in weights) and 0 < sum(weights) < math.inf,
            "objective",
            weights,
            "weights of at least 0, not all 0",
        ),
        (0 <= recipe.seed < SEEDS, "seed", recipe.seed, f"an integer from 0 to {SEEDS - 1}"),
    ]
    for holds, name, found, expected in rules:
        if not holds:
            raise RequestError(f"{name} is {found!r}; expected {expected}.")


def _constrained(state: TrainingState, recipe: Recipe, partition: Partition | None) -> TrainingState:
    """Masters and moments kept where their weights lie on the mesh, whatever XLA would choose."""
    if partition is None:
        return state

    def placed(name: str, value: jax.Array) -> jax.Array:
        axes = logical_axes(name) or (None,) * value.ndim
        return jax.lax.with_sharding_constraint(value, sharding_of(partition.mesh, axes, value.shape))

    def all_placed(parameters: Parameters) -> Parameters:
        return {name: placed(name, value) for name, value in parameters.items()}

    names = {name: name for name in state.parameters}
    moments = optax.tree.map_params(optimiser(recipe), lambda value, name: placed(name, value), state.optimiser, names)
    return TrainingState(all_placed(state.parameters), moments, state.step)
