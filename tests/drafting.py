"""The drafter of a model on given features of the target."""

from functools import partial

import jax
import jax.numpy as jnp
from conftest import QUICK

from dspark_jax import Model
from dspark_jax.model.cache import drafter_cache
from dspark_jax.model.drafter import DraftStep, draft_step, remember
from dspark_jax.model.rows import Rows, Setting


@partial(jax.jit, compiler_options=QUICK)
def draft_program(model: Model, setting: Setting, taps: jax.Array, context: jax.Array, anchor: jax.Array) -> DraftStep:
    """Drafts from `anchor` [B] behind the first `context` [B] positions of `taps` [B, T, w]."""
    assert model.drafter is not None
    rows = Rows(jnp.zeros(taps.shape[:2], jnp.int32), jnp.zeros_like(context), context)
    cache = drafter_cache(model.config, model.numerics, len(taps))
    cache = remember(model.drafter, cache, taps, rows, setting)
    return draft_step(model.drafter, model.vocabulary, cache, anchor, context, jnp.ones(len(taps), bool), setting)
