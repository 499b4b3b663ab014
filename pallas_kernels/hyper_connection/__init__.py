"""Manifold-constrained hyper-connections (mHC): how a layer reads from, and writes to, n residual streams."""

from pallas_kernels.hyper_connection.reference import collapse, expand, head_weights, mixes, split_mixes

__all__ = ["collapse", "expand", "head_weights", "mixes", "split_mixes"]
