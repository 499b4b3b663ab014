"""llama.cpp, as the wheel xllamacpp has it, in a process of its own: what it does not take aborts the process.

It answers with tokens and how many drafts were accepted. The drafts themselves, and the probabilities of the three
likeliest tokens at each, it tells in its log.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 120
LOG_OF_DRAFTS = 5  # verbosity
NORMALISED_OVER = 10
"""Probabilities in the log are of the so many likeliest tokens."""

_CANDIDATE = re.compile(r"draft candidate +(\d+), pos +(\d+): +(\d+) \( *([\d.]+)\)")
_ACCEPTED = re.compile(r"accepted +(\d+)/ *\d+ draft tokens, new")


@dataclass(frozen=True)
class Round:
    """A block of drafts.

    Attributes:
        begin: new tokens that were committed before the one that it begins with.
        accepted: drafts that the target took.
        tokens: int [slots, 3], the likeliest at each slot; the first is the draft.
        probabilities: float [slots, 3], theirs, to three decimals.
    """

    begin: int
    accepted: int
    tokens: np.ndarray
    probabilities: np.ndarray


@dataclass(frozen=True)
class Answer:
    """What followed a prompt.

    Attributes:
        tokens: new ones.
        likeliest: for each of them, token -> log probability of as many as were asked for.
        drafted, accepted: numbers of drafts.
        rounds: of drafts, but for the last, of which the log does not say how many were accepted.
    """

    tokens: list[int]
    likeliest: list[dict[int, float]]
    drafted: int
    accepted: int
    rounds: list[Round]


def answer(target: Path, drafter: Path | None, prompt: Sequence[int], count: int, likeliest: int = 1) -> Answer:
    """`count` greedy tokens behind a prompt."""
    job = [str(target), str(drafter or ""), prompt, count, likeliest]
    ran = subprocess.run(
        [sys.executable, __file__, json.dumps(job)], capture_output=True, text=True, errors="replace", timeout=SECONDS
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    told = json.loads(ran.stdout)
    tokens = told["choices"][0]["logprobs"]["content"]
    return Answer(
        tokens=[token["id"] for token in tokens],
        likeliest=[{top["id"]: top["logprob"] for top in token["top_logprobs"]} for token in tokens],
        drafted=told["timings"].get("draft_n", 0),
        accepted=told["timings"].get("draft_n_accepted", 0),
        rounds=list(_rounds(ran.stderr)),
    )


def _rounds(log: str) -> Iterator[Round]:
    candidates = np.array([match.groups() for match in _CANDIDATE.finditer(log)], np.float64).reshape(-1, 3, 4)
    slots, begin = candidates[:, 0, 1].astype(int), 0
    blocks = np.split(candidates, np.flatnonzero(slots == 0)[1:])
    accepted = [int(match[1]) for match in _ACCEPTED.finditer(log)]
    for block, count in zip(blocks, accepted, strict=False):
        yield Round(begin, count, block[..., 2].astype(int), block[..., 3])
        begin += 1 + count


def _main(target: str, drafter: str, prompt: list[int], count: int, likeliest: int) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    draft = params.speculative.draft
    params.model.path = target
    if drafter:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK]
        draft.mparams.path, draft.n_max, draft.p_min = drafter, 16, 0.0  # as many as a block has, whatever it is worth
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for side in (params, draft):
        side.cache_type_k = side.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        side.cpuparams.n_threads = side.cpuparams_batch.n_threads = 1
        side.n_gpu_layers = 0
    params.n_ctx, params.verbosity = 512, LOG_OF_DRAFTS
    params.no_extra_bufts = True  # or it repacks weights for which it then has no product
    params.warmup = params.fit_params = params.ui = False
    request: dict[str, Any] = {"prompt": prompt, "max_tokens": count, "logprobs": likeliest, "ignore_eos": True}
    print(json.dumps(xllamacpp.Server(params).handle_completions(request | {"samplers": ["top_k"], "top_k": 1})))


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
