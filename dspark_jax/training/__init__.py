"""Fine-tuning the drafter: blocks and masks, losses, the step, the loop and its checkpoints.

Names are imported from the files that have them, so that whoever only generates loads none of it:

from dspark_jax.training.step import Recipe, initial_state, train_step  # pure functions; `step` shows the loop
from dspark_jax.training.losses import Objective
from dspark_jax.training.parameters import release  # masters back into a model that generates
from dspark_jax.training.export import export  # and into a checkpoint in the official layout
from dspark_jax.training.run import train  # the loop in a folder, which goes on after a kill; imports orbax
from dspark_jax.data.batches import Batches  # documents to examples; imports grain
"""
