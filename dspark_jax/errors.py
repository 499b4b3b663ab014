"""Errors for the person at the keyboard: each message says what was wrong, where, what was expected and what to do."""

from typing import Any


class DsparkError(ValueError):
    """Base of every error that dspark_jax raises about its input; the command line prints it as one sentence."""


class ConfigError(DsparkError):
    """`config.json` is not a configuration that this package can run."""


class CheckpointError(DsparkError):
    """A checkpoint file is missing, damaged, or does not hold what its configuration promises."""


class CacheError(DsparkError):
    """A cache of target features is damaged, unfinished, in use, or was made for another run."""


class RunError(DsparkError):
    """A folder holds no run of training, another one, or one that is in use."""


class RequestError(DsparkError):
    """A call or a command line asks for something impossible, such as a token id outside the vocabulary."""


class CorpusError(DsparkError):
    """A file of prepared training text is not what it should be."""


class NotFiniteError(DsparkError):
    """Not finite: the target's logits, so that no token could be chosen, or the loss of a step of training."""


class CalibrationError(DsparkError):
    """A file of confidence temperatures is damaged, or belongs to another model."""


class SilentDrafterError(DsparkError):
    """The drafter was on and allowed to offer drafts, and offered none in the whole generation."""


def check_count(value: Any, name: str) -> int:
    """`value` as an integer of at least 1.

    Raises:
        RequestError: it is none.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 1:
        raise RequestError(f"{name} is {value!r}; expected an integer of at least 1.")
    return int(value)
