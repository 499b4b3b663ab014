"""Block-scaled FP8 matrix times rows."""

from pallas_kernels.fp8_linear.operation import fp8_linear, grouped_fp8_linear

__all__ = ["fp8_linear", "grouped_fp8_linear"]
