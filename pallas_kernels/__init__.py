"""Operations of transformer layers, each with its meaning in plain jax.numpy. Imports jax only and knows no model."""
