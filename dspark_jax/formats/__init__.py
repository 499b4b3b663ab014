"""Number formats of checkpoints, on the host: numpy in, numpy out.

One module a format, to be used through its name (`e4m3.decode`, `mxfp4.quantise`):

* `e8m0`: the scales, powers of two in a byte;
* `e4m3`: FP8 values, and matrices of them with one scale for 128 x 128 elements;
* `mxfp4`: FP4 (e2m1) values, two a byte, and matrices of them with one scale for 32 columns; also as blocks of GGUF;
* `q8_0`, `q4_k`, `q2_k`: blocks of GGUF along the last axis, encoded to the bytes that ggml makes;
* `narrow`: what of float32 fits bfloat16 and float16.

The device has codecs of its own (`pallas_kernels.number_formats`), made from integers; these are made from ldexp,
tables and ml_dtypes. Neither calls the other, so each checks the other in the tests.
"""

from dspark_jax.formats import e4m3, e8m0, mxfp4, narrow, q2_k, q4_k, q8_0

__all__ = ["e4m3", "e8m0", "mxfp4", "narrow", "q2_k", "q4_k", "q8_0"]
