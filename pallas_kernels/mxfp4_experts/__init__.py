"""Routed SwiGLU experts with packed MXFP4 weights."""

from pallas_kernels.mxfp4_experts.operation import mxfp4_experts
from pallas_kernels.mxfp4_experts.reference import Matrices, swiglu

__all__ = ["Matrices", "mxfp4_experts", "swiglu"]
