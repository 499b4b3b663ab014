"""Operations of transformer layers, each with its meaning in plain jax.numpy, some with a kernel for Hopper GPUs.

Imports jax only and knows no model.
"""
