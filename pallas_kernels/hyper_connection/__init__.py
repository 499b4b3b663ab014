"""Manifold-constrained hyper-connections (mHC): how a layer reads from, and writes to, n residual streams."""

from pallas_kernels.hyper_connection.operation import read, write_then_read
from pallas_kernels.hyper_connection.reference import (
    Constants,
    collapse,
    expand,
    head_weights,
    mixes,
    split_mixes,
    write,
)

__all__ = [
    "Constants",
    "collapse",
    "expand",
    "head_weights",
    "mixes",
    "read",
    "split_mixes",
    "write",
    "write_then_read",
]
