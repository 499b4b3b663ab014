"""Who chooses between XLA and a kernel, and what is said about it."""

import logging
import re
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import implementation
from pallas_kernels.implementation import choose

HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200", core_count=132)
SMALL_HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H100 PCIe", core_count=114)
BLACKWELL = SimpleNamespace(platform="gpu", compute_capability="10.0", device_kind="NVIDIA B200")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [request.param])
    implementation._say_once.cache_clear()


@pytest.mark.parametrize("machine", [HOPPER], indirect=True)
@pytest.mark.usefixtures("machine")
def test_a_hopper_gpu_runs_the_kernel_where_it_takes_the_operands(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose(None, "op", None) == "mosaic" and not caplog.records
    assert choose(None, "op", "rows are odd") == "xla"
    assert choose("xla", "op", None) == "xla"
    assert [record.message for record in caplog.records] == ["op runs through XLA: rows are odd."]


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (BLACKWELL, "are for Hopper GPUs .* NVIDIA B200 is none"),
        (SMALL_HOPPER, "are for GPUs of 132 multiprocessors, and this one has 114"),
        (SimpleNamespace(platform="cpu"), "no GPU runs this"),
    ],
    indirect=["machine"],
)
@pytest.mark.usefixtures("machine")
def test_other_machines_run_xla_and_say_so_once(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert [choose(None, "op", None) for _ in range(3)] == ["xla"] * 3
    [record] = caplog.records
    assert record.levelno == logging.INFO and re.search(reason, record.message)


def test_who_asks_for_a_kernel_gets_it_or_a_reason() -> None:
    """On any machine, so that kernels lower on all."""
    assert choose("mosaic", "op", None) == "mosaic"
    with pytest.raises(ValueError, match=r"^op has no kernel for these operands: rows are odd; use"):
        choose("mosaic", "op", "rows are odd")
    with pytest.raises(ValueError, match="implementation is 'triton'; expected 'xla', 'mosaic' or None"):
        choose("triton", "op", None)  # type: ignore[arg-type]


def test_a_default_device_is_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where numbers are checked on the CPU of a machine that has a GPU."""
    monkeypatch.setattr(jax, "devices", lambda: [HOPPER])
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        assert choose(None, "op", None) == "xla"
