"""Routed SwiGLU experts with packed MXFP4 weights."""

from pallas_kernels.mxfp4_experts.reference import mxfp4_experts

__all__ = ["mxfp4_experts"]
