"""Routed SwiGLU experts with packed MXFP4 weights."""

from pallas_kernels.mxfp4_experts.reference import Matrices, mxfp4_experts, swiglu

__all__ = ["Matrices", "mxfp4_experts", "swiglu"]
