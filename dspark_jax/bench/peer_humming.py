"""Times `humming-kernels` on dense MXFP4 matrices. A program, not a module to import: it needs torch, and a GPU.

python peer_humming.py '[{"shapes": [[24576, 4096]], "rows": 6}]' prints JSON.
"""

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

CEILING_BYTES = 1 << 31
ROTATED_BYTES = 1 << 28  # of weights pass between two uses of a matrix, several times any L2
FEWEST_CALLS = 20
WARM, TIMED = 3, 25


def main(asked: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that is asked for: seconds of the products with `shapes`, one after the other, of `rows` rows."""
    values = torch.ones(CEILING_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    read, _ = seconds(values.sum)
    del values
    return {
        "versions": {"torch": torch.__version__, "humming-kernels": humming.__version__},
        "read_bytes_per_second": CEILING_BYTES / read,
        "timings": [dict(zip(("seconds", "spread_seconds"), time_products(**one), strict=True)) for one in asked],
    }


def time_products(shapes: list[list[int]], rows: int) -> tuple[float, float]:
    """Seconds of a product with each matrix, weights rotating inside one CUDA graph."""
    size = sum(out * columns * 17 // 32 for out, columns in shapes)
    copies = 2 + ROTATED_BYTES // size
    rounds = -(-FEWEST_CALLS // copies)
    inputs = {columns: torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") for _, columns in shapes}
    layers = [[(layer(*shape), inputs[shape[1]]) for shape in shapes] for _ in range(copies)]

    def products() -> None:
        for matrices in layers:
            for product, x in matrices:
                product(x)

    products()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            products()
    middle, spread = seconds(graph.replay)
    return middle / (rounds * copies), spread / (rounds * copies)


def layer(out: int, columns: int) -> Any:
    """Random MXFP4 weights in the peer's own layout."""
    made = HummingLayer(
        shape_n=out, shape_k=columns, weight_config={"quant_method": "mxfp4"}, torch_dtype=torch.bfloat16
    ).cuda()
    weight = torch.randint(0, 256, (out, columns // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(118, 124, (out, columns // 32), dtype=torch.uint8, device="cuda")
    made.load_from_tensors({"weight": weight, "weight_scale": scales})
    made.transform()
    return made


def seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """Median seconds by the device's clock, warm, and the distance of the quartiles; all runs are queued at once."""
    for _ in range(WARM):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) * 1e-3 for before, after in pairwise(marks)]
    first, _, third = quantiles(times, n=4)
    return median(times), third - first


if __name__ == "__main__":
    try:
        import torch

        if not torch.cuda.is_available():
            sys.exit("torch finds no CUDA device; the peer needs one.")
        import humming
        from humming.layer import HummingLayer
    except ImportError as missing:
        sys.exit(f"{missing}; install torch with CUDA, and humming-kernels.")
    print(json.dumps(main(json.loads(sys.argv[1]))))
