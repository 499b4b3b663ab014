"""Pre-training of a target: its loss, the balance of its router, and the optimiser's steps.

The loss is the mean cross-entropy of the next token through the same `target_step` that decodes, over whole rows from
an empty cache, and beside it the divergence from which the indexer learns. Which entries and which experts are picked
has no derivative: the indexer's scores follow the shares of attention that its picks got, and the router's biases move
toward equal load.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax

from dspark_jax.model.cache import target_cache
from dspark_jax.model.model import Model
from dspark_jax.model.moe import Routing
from dspark_jax.model.rows import Rows
from dspark_jax.model.target import LayerSeen, lm_logits, target_step
from dspark_jax.training.parameters import Parameters, merge
from dspark_jax.training.step import TrainingState

LOWEST = -1e30  # in the place of minus infinity, whose derivative is none


@dataclass(frozen=True)
class Plan:
    """How a target is trained.

    Attributes:
        batch: rows of a step.
        row_tokens: tokens of a row that have a label.
        peak: largest learning rate, reached after `warm_up` steps; from there a cosine leads to zero.
        warm_up: steps.
        decay: decoupled weight decay of matrices, for each unit of the learning rate.
        clip: largest norm of the gradient of all weights.
        balance: step of the router's biases.
        seed: of the initial weights and of the order of rows.
    """

    batch: int
    row_tokens: int
    peak: float = 2e-3
    warm_up: int = 200
    decay: float = 0.1
    clip: float = 1.0
    balance: float = 1e-3
    seed: int = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Losses:
    """What a step is judged by.

    Attributes:
        cross_entropy: float32 [], nats a token.
        indexer: float32 [], nats a token and layer with an indexer.
        loads: by layer, float32 [E], the share of all picks that each expert got; sums to one.
    """

    cross_entropy: jax.Array
    indexer: jax.Array
    loads: tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Report:
    """Of one step: its losses before the update, the norm of the gradient before clipping, and the learning rate."""

    losses: Losses
    gradient_norm: jax.Array
    rate: jax.Array


# The loss ------------------------------------------------------------------------------------------------------------


def target_loss(parameters: Parameters, model: Model, ids: jax.Array) -> tuple[jax.Array, Losses]:
    """What is differentiated, and its parts.

    Args:
        parameters: masters of weights of the target and the vocabulary.
        model: with a target; the weights that have no master stay as they are.
        ids: int32 [B, T + 1]; every token but the first is a label.
    """
    model = merge(model, parameters)
    assert model.target is not None
    batch, length = ids.shape[0], ids.shape[1] - 1
    rows = Rows(ids[:, :-1], jnp.zeros(batch, jnp.int32), jnp.full(batch, length, jnp.int32))
    cache = target_cache(model.config, model.numerics, batch, capacity=length, width=1)
    step = target_step(model.target, model.vocabulary, rows, cache, model.setting(length))
    logits = lm_logits(model.vocabulary, step.hidden)
    losses = Losses(
        jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])),
        _mean([index_divergence(layer) for layer in step.seen.layers if layer.index_picks is not None]),
        tuple(expert_load(layer.routing, model.config.n_routed_experts) for layer in step.seen.layers),
    )
    return losses.cross_entropy + losses.indexer, losses


def index_divergence(seen: LayerSeen) -> jax.Array:
    """KL(p || q) of a layer, mean over tokens: p are the shares of attention that the picks got, summed over heads and
    normalised, and q is the softmax of their scores (DeepSeek-V3.2, arXiv:2512.02556, the sparse stage).

    Only the scores have a derivative. A token without picks adds nothing.
    """
    assert seen.index_picks is not None and seen.index_scores is not None and seen.index_shares is not None
    usable = seen.index_picks >= 0
    shares = jnp.sum(jax.lax.stop_gradient(seen.index_shares), axis=2)
    shares = shares / jnp.maximum(jnp.sum(shares, axis=-1, keepdims=True), 1e-9)
    predicted = jax.nn.log_softmax(jnp.where(usable, seen.index_scores, LOWEST), axis=-1)
    return jnp.mean(jnp.sum(-jax.scipy.special.entr(shares) - shares * predicted, axis=-1))


def expert_load(routing: Routing, experts: int) -> jax.Array:
    """The share of all picks that each expert got: float32 [E]."""
    return jnp.mean(jax.nn.one_hot(routing.picks, experts, dtype=jnp.float32), axis=(0, 1, 2))


def _mean(values: list[jax.Array]) -> jax.Array:
    return jnp.mean(jnp.stack(values)) if values else jnp.zeros(())


# Steps ---------------------------------------------------------------------------------------------------------------


def initial_state(parameters: Parameters, plan: Plan) -> TrainingState:
    """The state before the first step; its masters are copies, for steps give them up."""
    parameters = jax.tree.map(jnp.copy, parameters)
    return TrainingState(parameters, optimiser(plan).init(parameters), jnp.zeros((), jnp.int32))


def optimiser(plan: Plan) -> optax.GradientTransformation:
    """AdamW without its learning rate: clipping, moments, and decay of what has two axes or more.

    A gradient that is not finite moves nothing; a hundred of them in a row do.
    """
    matrices = partial(jax.tree.map, lambda value: value.ndim > 1)
    adam = optax.chain(
        optax.clip_by_global_norm(plan.clip),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(plan.decay, matrices),
    )
    return optax.apply_if_finite(adam, max_consecutive_errors=100)


def learning_rate(step: jax.Array, total: jax.Array, plan: Plan) -> jax.Array:
    """The rate of a step, counted from 0: a line up to the peak, then half a cosine that reaches zero at `total`.

    `total` is traced, so that it can be chosen once a step has been timed without compiling anew.
    """
    warm = (step + 1) / plan.warm_up
    progress = jnp.clip((step - plan.warm_up) / jnp.maximum(total - plan.warm_up, 1), 0, 1)
    return plan.peak * jnp.minimum(warm, 0.5 * (1 + jnp.cos(jnp.pi * progress)))


def train_step(
    state: TrainingState, model: Model, ids: jax.Array, total: jax.Array, plan: Plan
) -> tuple[TrainingState, Report]:
    """One step on int32 [B, T + 1] tokens."""
    (_, losses), gradients = jax.value_and_grad(target_loss, has_aux=True)(state.parameters, model, ids)
    rate = learning_rate(state.step.astype(jnp.float32), total, plan)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its own scalars in
        updates, moments = optimiser(plan).update(gradients, state.optimiser, state.parameters)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(gradient)) for gradient in gradients.values()))
    parameters = {name: value - rate * updates[name] for name, value in state.parameters.items()}
    parameters = balanced(parameters, losses.loads, plan.balance)
    return TrainingState(parameters, moments, state.step + 1), Report(losses, norm, rate)


def balanced(parameters: Parameters, loads: Iterable[jax.Array], step: float) -> Parameters:
    """Router biases one step up for experts with less than their part of the load, and one down for those with more.

    Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing", arXiv:2408.15664. A bias has no gradient, as it only
    decides picks, so the optimiser leaves it alone. Layers that route by token id have none.
    """
    biases = {f"target.layers.{number}.ffn.gate.bias": load for number, load in enumerate(loads)}
    moved = {
        name: parameters[name] + step * jnp.sign(1 / load.shape[0] - load)
        for name, load in biases.items()
        if name in parameters
    }
    return parameters | moved


@partial(jax.jit, static_argnames=("plan", "count"), donate_argnames="state")
def train_steps(
    state: TrainingState, model: Model, stream: jax.Array, total: jax.Array, plan: Plan, count: int
) -> tuple[TrainingState, Report]:
    """`count` steps in one program, so that a small model does not wait for the host; reports are stacked.

    Args:
        stream: integers [N], the tokens of all documents one after the other.
        total: float32 [], steps of the whole training.
    """

    def one(state: TrainingState, _: None) -> tuple[TrainingState, Report]:
        return train_step(state, model, rows_of_step(stream, state.step, plan), total, plan)

    return jax.lax.scan(one, state, length=count)


def rows_of_step(stream: jax.Array, step: jax.Array, plan: Plan) -> jax.Array:
    """The rows of a step, a function of the seed and the step's number alone: int32 [B, T + 1].

    An epoch cuts the stream into rows, from another offset each time, and shuffles them; no label comes twice in it.
    """
    length, batch = plan.row_tokens, plan.batch
    rows = (len(stream) - 1) // length - 1  # one is given up for the offset
    epoch, number = jnp.divmod(step, rows // batch)
    offset_key, order_key = jax.random.split(jax.random.fold_in(jax.random.key(plan.seed), epoch))
    offset = jax.random.randint(offset_key, (), 0, length)
    order = jax.random.permutation(order_key, rows)
    first = offset + length * jax.lax.dynamic_slice_in_dim(order, number * batch, batch)
    return stream[first[:, None] + jnp.arange(length + 1)].astype(jnp.int32)
