"""`humming-kernels`, another package's products with MXFP4 weights, timed on as many bytes in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dspark_jax.bench import peer_humming
from dspark_jax.bench.case import Case
from dspark_jax.errors import RequestError


@dataclass(frozen=True)
class PeerTiming:
    """Of products with dense matrices, one after the other: seconds of all of them, and their spread (quartiles)."""

    seconds: float
    spread_seconds: float


@dataclass(frozen=True)
class PeerRun:
    """One process of the peer.

    Attributes:
        versions: of its packages.
        ceiling: bytes a second that it reads in a sum over a large array.
        timings: of each case.
    """

    versions: dict[str, str]
    ceiling: float
    timings: Sequence[PeerTiming]


def run_peer(cases: Sequence[Case]) -> PeerRun:
    """Times the peer, in a process of its own: two packages do not share the memory of a GPU well.

    Raises:
        RequestError: it has no product for a case, or cannot run here; the message says what is missing.
    """
    for case in cases:
        if not case.peer_shapes:
            raise RequestError(f"humming-kernels has no {case.operation}; leave --peer out.")
    asked = json.dumps([{"shapes": case.peer_shapes, "rows": case.rows} for case in cases])
    # By its path and with -P, so that neither this package nor its neighbours in the folder are imported.
    command = [sys.executable, "-P", peer_humming.__file__, asked]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise RequestError(f"humming-kernels cannot be measured here: {last}")
    told = json.loads(ran.stdout.splitlines()[-1])
    timings = [PeerTiming(**timing) for timing in told["timings"]]
    return PeerRun(told["versions"], told["read_bytes_per_second"], timings)
