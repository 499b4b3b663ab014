"""`dspark convert`: the drafter of a checkpoint as a GGUF file."""

import time
from pathlib import Path
from typing import Annotated, Literal

from rich.filesize import decimal
from tyro.conf import Positional, arg

from dspark_jax.assets import TINY_V4
from dspark_jax.checkpoint.gguf.convert import convert as convert_drafter
from dspark_jax.checkpoint.gguf.layout import Build, Spelling
from dspark_jax.cli.terminal import RESULT, bytes_bar, print_json
from dspark_jax.errors import RequestError


def convert(
    out: Annotated[Positional[Path], arg(metavar="OUT.gguf")],
    *,
    checkpoint: Annotated[Path, arg(metavar="DIR", help_behavior_hint="(default: the packaged tiny-v4)")] = TINY_V4,
    to: Build,
    naming: Annotated[Literal["entrpi", "upstream"] | None, arg(help_behavior_hint="(default: entrpi)")] = None,
    plain: bool = False,
    overwrite: bool = False,
    json: bool = False,
) -> int:
    """Write the drafter of a checkpoint as a GGUF file for llama.cpp or ds4.

    llama.cpp-bf16 is exact: FP8 becomes BF16, MXFP4 experts pass through. llama.cpp-q8_0 rounds what was FP8 to Q8_0;
    ds4-q2k and ds4-q4k round the experts, too. `dspark verify` says by how much.

    Args:
        out: File to be made.
        checkpoint: Folder with config.json, the index and the drafter's shards.
        to: Program and number types.
        naming: How ds4 files name tensors and keys: as Entrpi's extraction script, or as ds4's own quantiser.
        plain: Round K-quants to nearest without a search for better scales: quicker, and coarser by a tenth.
        overwrite: Take the place of a file that is there already.
        json: Print one JSON object.
    """
    for_llama = to.startswith("llama.cpp")
    if for_llama and naming is not None:
        raise RequestError(
            f"--naming is {naming!r}, which is for ds4; files of llama.cpp have one way to name tensors."
        )
    spelling: Spelling = "llama.cpp" if for_llama else naming or "entrpi"
    start = time.perf_counter()
    with bytes_bar(f"converting to {to}") as progress:
        size = convert_drafter(checkpoint, to, out, spelling, not plain, overwrite, progress)
    result = {"out": str(out), "build": to, "tensor_bytes": size, "seconds": time.perf_counter() - start}
    if json:
        print_json(result)
    else:
        RESULT.print(f"{out}: {decimal(size)} of tensors in {result['seconds']:.1f} s.", soft_wrap=True)
    return 0
