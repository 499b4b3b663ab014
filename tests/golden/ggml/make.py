"""Writes `blocks.safetensors`: what the libggml-base at the path in the first argument makes of rows of 256 values."""

import ctypes
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

TYPES = {"q8_0": (8, 272), "q2_k": (10, 84), "q4_k": (12, 144), "mxfp4": (39, 136)}  # ggml's number, bytes of a row


def rows() -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(20260731)
    gaussian = random.standard_normal(256)
    fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[random.integers(0, 8, 256)] * random.choice([-1, 1], 256)
    made = {
        "gaussian": 0.02 * gaussian,
        "decoded mxfp4": np.ldexp(fp4, random.integers(-9, -5, 8).repeat(32)),
        "zeros": np.zeros(256),
        "minus zeros": -np.zeros(256),
        "one large": np.where(np.arange(256) == 77, -6e4, 0.02 * gaussian),
        "one alone": np.where(np.arange(256) == 77, 0.3, 0),
        "subnormal": 1e-39 * gaussian,
        "negative": -np.abs(gaussian),
        "constant negative": np.full(256, -0.3),
        "constant positive": np.full(256, 0.3),
        "constant groups": gaussian[::16].repeat(16),
        "scales below normal float16": 1e-6 * gaussian,
        "scales below float16": 1e-9 * gaussian,
        "groups differ in their last bits": -gaussian[::16].repeat(16) * (1 + random.integers(0, 4, 256) * 2.0**-23),
        "groups of every size": gaussian * np.ldexp(1.0, random.integers(-30, 10, 16)).repeat(16),
        # Chosen: one trial more or less in the search of Q2_K or of Q4_K makes other bytes.
        "last trials": -np.abs(np.random.default_rng(484).standard_normal(256)),
    }
    return {name: values.astype(np.float32) for name, values in made.items()}


def main() -> None:
    quantize = ctypes.CDLL(sys.argv[1]).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    values = np.stack([*rows().values()])
    tensors = {"values": values}
    for name, (number, size) in TYPES.items():
        tensors[name] = np.empty((len(values), size), np.uint8)
        written = quantize(number, values.ctypes.data, tensors[name].ctypes.data, 0, *values.shape, None)
        assert written == tensors[name].size
    save_file(tensors, Path(__file__).parent / "blocks.safetensors", {"rows": "\n".join(rows())})


if __name__ == "__main__":
    main()
