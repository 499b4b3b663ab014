"""Which implementation of an operation runs: plain jax.numpy through XLA, or a Pallas Mosaic GPU kernel."""

import logging
from functools import cache
from typing import Literal

import jax

from pallas_kernels.hopper import MULTIPROCESSORS

Implementation = Literal["xla", "mosaic"]

_log = logging.getLogger(__name__)


def choose(asked: Implementation | None, operation: str, refusal: str | None) -> Implementation:
    """The implementation to run.

    Args:
        asked: None takes the kernel where this machine has a Hopper GPU of full size and the kernel takes the operands,
            and else XLA, saying once why. "mosaic" does not look at the machine, so that kernels lower on any.
        operation: its name.
        refusal: why the kernel does not take these operands, as a clause; None if it does.

    Raises:
        ValueError: "mosaic" was asked for and the kernel refuses, or there is no implementation of that name.
    """
    if asked not in (None, "xla", "mosaic"):
        raise ValueError(f"implementation is {asked!r}; expected 'xla', 'mosaic' or None.")
    if asked == "mosaic" and refusal:
        raise ValueError(f"{operation} has no kernel for these operands: {refusal}; use implementation=None or 'xla'.")
    if asked:
        return asked
    reason = _machine_refusal() or refusal
    if reason:
        _say_once(operation, reason)
    return "xla" if reason else "mosaic"


def _machine_refusal() -> str | None:
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if device.platform != "gpu":
        return "no GPU runs this program"
    if not device.compute_capability.startswith("9."):  # the kernels are made of wgmma, which came and went with Hopper
        return f"the kernels are for Hopper GPUs (compute capability 9.0), and {device.device_kind} is none"
    if device.core_count < MULTIPROCESSORS:  # blocks that are not all there would wait for each other for ever
        return f"the kernels are for GPUs of {MULTIPROCESSORS} multiprocessors, and this one has {device.core_count}"
    return None


@cache
def _say_once(operation: str, reason: str) -> None:
    _log.info("%s runs through XLA: %s.", operation, reason)
