"""Logs of rounds for tests, made from arrays."""

from typing import Any

import numpy as np

from dspark_jax.evaluation.log import RoundLog


def log_of(
    offered: Any, accepted: Any, confidence: Any = None, block: int = 5, terminated: Any = False, **columns: Any
) -> RoundLog:
    """Each round of a prompt of its own unless `columns` say more."""
    offered, accepted = np.asarray(offered, np.int32), np.asarray(accepted, np.int32)
    rounds = len(offered)
    if confidence is None:
        confidence = np.zeros((rounds, block), np.float32)
    hidden = np.arange(np.shape(confidence)[1]) >= offered[:, None]
    given = {
        "prompt": np.arange(rounds, dtype=np.int32),
        "category": np.full(rounds, ""),
        "begin": np.zeros(rounds, np.int32),
        "tokens": accepted + ~np.broadcast_to(terminated, rounds),
    } | {name: np.asarray(values) for name, values in columns.items()}
    return RoundLog(
        offered=offered, accepted=accepted, confidence=np.where(hidden, np.float32(np.nan), confidence), **given
    )
