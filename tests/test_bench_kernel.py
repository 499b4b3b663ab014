"""`dspark bench bandwidth` and `bench kernel`: what is counted, compared and refused; no test asks for a speed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Dspark

from dspark_jax.bench import bandwidth, operations, peer, timing
from dspark_jax.bench.bandwidth import bench_bandwidth
from dspark_jax.bench.case import Case
from dspark_jax.bench.experts import Down, Experts, GateUp
from dspark_jax.bench.kernel import bench_kernel, chain, program_of, relative_error
from dspark_jax.bench.kernel_report import CaseReport, KernelReport, Measured
from dspark_jax.bench.operations import Fp8Linear, HyperConnection, cases
from dspark_jax.bench.peer import PeerRun, PeerTiming, run_peer
from dspark_jax.bench.sparse import FLASH
from dspark_jax.bench.timing import time_in_turns
from dspark_jax.cli import bench as bench_command
from dspark_jax.errors import RequestError
from dspark_jax.formats import e4m3, mxfp4

SMALL = replace(FLASH, hidden_size=256, moe_intermediate_size=128, n_routed_experts=16)
SMALL_CASES: dict[str, Case] = {
    "mxfp4-gate-up": GateUp(3, 4, SMALL),
    "mxfp4-down": Down(3, 4, SMALL),
    "mxfp4-experts": Experts(2, 12, SMALL),
    "fp8-linear": Fp8Linear(3, (200, 192)),
    "hyper-connection": HyperConnection(3, SMALL),
}
pytestmark = pytest.mark.usefixtures("quick", "in_short")


@pytest.fixture(scope="module")
def in_short() -> Iterator[None]:
    """Little memory is read, and few runs are timed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "BUDGET_SECONDS", 0.02)
        patch.setattr(timing, "QUEUED_SECONDS", 0.001)
        patch.setattr(bandwidth, "SMALL", 1 << 16)
        yield


def bench(*cases: Case, **changes: Any) -> KernelReport:
    return bench_kernel(cases, **{"implementations": ["xla"], "calls": 2, "flushed": 1 << 12, **changes})


def nbytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def drawn(name: str, calls: int = 3) -> tuple[Any, tuple[Any, ...]]:
    return SMALL_CASES[name].draw(jax.random.key(7), calls)


class TestBytes:
    """Against the arrays that a call gets."""

    @pytest.mark.parametrize(("name", "matrices"), [("mxfp4-gate-up", 2), ("mxfp4-down", 1), ("mxfp4-experts", 3)])
    def test_of_experts_those_of_the_live_ones(self, name: str, matrices: int) -> None:
        _, [operands, *_] = drawn(name)
        read = operands.experts[:2] if matrices == 2 else operands.experts[-matrices:]
        case: Any = SMALL_CASES[name]
        assert case.bytes == nbytes(read) * case.live // 16

    def test_of_fp8_a_matrix_and_its_scales(self) -> None:
        _, [matrix, *_] = drawn("fp8-linear")
        assert SMALL_CASES["fp8-linear"].bytes == nbytes(matrix) == 200 * 192 + 2 * 2

    def test_of_a_site_its_projection_and_the_streams_twice(self) -> None:
        (streams, *_), [weights, *_] = drawn("hyper-connection")
        assert SMALL_CASES["hyper-connection"].bytes == weights.fn.nbytes + 2 * streams.nbytes

    def test_at_the_shapes_of_flash(self) -> None:
        sizes = {name: [case.bytes for case in cases(name)] for name in ("mxfp4-gate-up", "mxfp4-down", "fp8-linear")}
        one = 4096 * 4096 * 17 // 32
        assert sizes["mxfp4-gate-up"] == [6 * one, 36 * one, 120 * one]
        assert sizes["mxfp4-down"] == [3 * one, 18 * one, 60 * one]
        assert sizes["fp8-linear"] == [8192 * 4096 + 64 * 32] * 2 + [32768 * 1024 + 256 * 8] * 2

    @pytest.mark.parametrize("name", ["mxfp4-gate-up", "mxfp4-down", "mxfp4-experts"])
    def test_the_peer_gets_as_many(self, name: str) -> None:
        case = SMALL_CASES[name]
        assert case.bytes == sum(out * columns * 17 // 32 for out, columns in case.peer_shapes)


class TestOperands:
    def test_experts_take_turns(self) -> None:
        _, calls = drawn("mxfp4-gate-up", 4)
        assert sorted(np.concatenate([call.numbers for call in calls])) == list(range(16))

    def test_each_live_expert_gets_its_rows(self) -> None:
        x, [call, *_] = drawn("mxfp4-experts")
        assert x.shape == (4, 256) and call.picks.shape == (4, 6)
        assert all(len(set(row)) == 6 for row in call.picks.tolist())
        assert np.unique(call.picks, return_counts=True)[1].tolist() == [2] * 12

    def test_no_two_calls_share_a_matrix(self) -> None:
        _, [one, other, *_] = drawn("fp8-linear")
        assert (one.payload != other.payload).mean() > 0.9

    @pytest.mark.parametrize("name", ["mxfp4-gate-up", "mxfp4-down", "fp8-linear"])
    def test_products_are_a_few_units(self, name: str) -> None:
        case = SMALL_CASES[name]
        x, [operands, *_] = drawn(name)
        assert 0.5 < float(jnp.std(case.reference(x.astype(jnp.float32), operands))) < 10


def test_what_calls_share_is_one_argument() -> None:
    case, (x, operands), flush = SMALL_CASES["mxfp4-experts"], drawn("mxfp4-experts"), jnp.ones(4)
    run = chain(case, partial(case.apply, implementation="xla"))
    program = program_of(run, flush, x, operands)
    assert isinstance(program, partial)
    arrays = jax.tree.leaves(operands)
    assert len(jax.tree.leaves(program.args[2])) == len({id(array) for array in arrays}) < len(arrays)
    np.testing.assert_array_equal(program(), jax.jit(run)(flush, x, operands))


class TestReference:
    """Against NumPy in float64, from the bytes."""

    def test_of_fp8(self) -> None:
        x, [matrix, *_] = drawn("fp8-linear")
        expected = np.asarray(x, np.float64) @ e4m3.dequantise(matrix.payload, matrix.scales).astype(np.float64).T
        found = SMALL_CASES["fp8-linear"].reference(x.astype(jnp.float32), matrix)
        assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-6

    def test_of_gate_up_and_down(self) -> None:
        x, [call, *_] = drawn("mxfp4-gate-up")
        y, [other, *_] = drawn("mxfp4-down")
        hidden = SMALL_CASES["mxfp4-gate-up"].reference(x.astype(jnp.float32), call)
        out = SMALL_CASES["mxfp4-down"].reference(y.astype(jnp.float32), other)
        for g, number in enumerate(call.numbers):
            gate, up = (decoded(matrix, number) @ np.asarray(x[g], np.float64).T for matrix in call.experts[:2])
            gate, up = np.minimum(gate, 10), np.clip(up, -10, 10)
            expected = (gate / (1 + np.exp(-gate)) * up * np.asarray(call.weights[g])).T
            assert np.linalg.norm(hidden[g] - expected) / np.linalg.norm(expected) < 1e-5
            expected = (decoded(other.experts.down, other.numbers[g]) @ np.asarray(y[g], np.float64).T).T
            assert np.linalg.norm(out[g] - expected) / np.linalg.norm(expected) < 1e-6

    def test_relative_error(self) -> None:
        assert relative_error(jnp.array([3.0, 4.4], jnp.bfloat16), jnp.array([3.0, 4.0])) == pytest.approx(
            0.08, rel=0.03
        )


def decoded(matrix: Any, number: jax.Array) -> np.ndarray:
    return mxfp4.dequantise(np.asarray(matrix.payload[number]), np.asarray(matrix.scales[number])).astype(np.float64)


@pytest.fixture(scope="module")
def report() -> KernelReport:
    return bench(*SMALL_CASES.values(), seed=3)


class TestReport:
    def test_every_operation_is_right(self, report: KernelReport) -> None:
        assert report.ok
        assert all(
            0 < case.measured["xla"].error < 4e-3 or case.case.operation == "fp8-linear" for case in report.cases
        )

    def test_json(self, report: KernelReport) -> None:
        told = json.loads(json.dumps(report.to_dict()))
        assert {*told} == {"device", "versions", "seed", "read_bytes_per_second", "peer", "cases", "ok"}
        assert (told["seed"], told["peer"], told["versions"]) == (3, None, {"jax": jax.__version__})
        assert [case["operation"] for case in told["cases"]] == [*SMALL_CASES]
        experts, fp8 = told["cases"][0], told["cases"][3]
        assert {*experts} == {"operation", "rows", "live", "bytes", "measured", "speed_up"}
        assert {*fp8} == {"operation", "rows", "shape", "quantised", "bytes", "measured", "speed_up"}
        measured = fp8["measured"]["xla"]
        assert {*measured} == {
            "seconds", "spread_seconds", "link_seconds", "error", "right", "bytes_per_second", "fraction_of_ceiling",
        }  # fmt: skip
        assert measured["bytes_per_second"] == pytest.approx(fp8["bytes"] / measured["seconds"])
        share = measured["bytes_per_second"] / told["read_bytes_per_second"]
        assert measured["fraction_of_ceiling"] == pytest.approx(share)

    def test_data_are_fresh_every_time(self) -> None:
        one, other = (bench(SMALL_CASES["fp8-linear"]) for _ in range(2))
        assert one.seed != other.seed

    def test_table(self) -> None:
        run = PeerRun({"torch": "2"}, 2e12, [PeerTiming(30e-6, 1e-6)])
        measured = {"mosaic": Measured(20e-6, 1e-6, 2e-6, 1.6e-3), "xla": Measured(500e-6, 1e-6, 2e-6, 5e-3)}
        case = CaseReport(GateUp(8, 6), measured, run.timings[0])  # type: ignore[arg-type]
        report = KernelReport("H200", {"jax": "0.11"}, 1, 4e12, [case], run)
        first, _, _, kernel, xla, humming = str(report).splitlines()
        assert first == "H200, jax 0.11, seed 1: 4 TB/s are read; the peer read 2 TB/s"
        assert kernel.startswith("mxfp4-gate-up, 6 live x 8 rows  mosaic ")
        assert "20.0 1.0 53.5 2.67 TB/s 0.67 1.6e-03 25.00 than xla, 1.50 than humming" in " ".join(kernel.split())
        assert " ".join(xla.split()) == "xla 500.0 1.0 53.5 0.107 TB/s 0.03 5.0e-03 WRONG"
        assert " ".join(humming.split()) == "humming 30.0 1.0 53.5 1.78 TB/s 0.89"
        assert not report.ok


def test_a_wrong_operation_does_not_look_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of the operation as it is called; the reference stays as it is."""
    sound = operations.fp8_linear
    monkeypatch.setattr(operations, "fp8_linear", lambda *arguments: sound(*arguments).at[0, 0].set(9.0))
    report = bench(SMALL_CASES["fp8-linear"])
    assert not report.ok and "WRONG" in str(report)
    monkeypatch.setattr(operations, "fp8_linear", lambda *arguments: sound(*arguments).at[0, 0].set(jnp.nan))
    assert not bench(SMALL_CASES["fp8-linear"]).ok


class TestChain:
    """What is timed is all of the calls, each after the one before."""

    @pytest.mark.parametrize("name", ["fp8-linear", "hyper-connection"])
    def test_every_call_runs_behind_the_one_before(self, name: str) -> None:
        case = SMALL_CASES[name]
        x, operands = drawn(name)
        run = partial(chain(case, partial(case.apply, implementation="xla")), jnp.ones(8))
        spoilt = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0xFF if leaf.dtype == jnp.uint8 else jnp.nan), operands)
        assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(run(x, operands)))
        for call in range(3):
            others = (*operands[:call], spoilt[call], *operands[call + 1 :])
            assert any(np.isnan(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(run(x, others)))

    def test_the_first_waits_for_the_pass_over_other_memory(self) -> None:
        case = SMALL_CASES["hyper-connection"]
        run = chain(case, lambda x, _: x)
        streams, *_ = run(jnp.full(8, jnp.nan), *drawn("hyper-connection"))
        assert np.isnan(np.asarray(streams, np.float32)).all()

    @pytest.mark.parametrize("name", SMALL_CASES)
    def test_lowers_for_a_gpu_at_the_shapes_of_flash(self, name: str) -> None:
        for case in cases(name):  # type: ignore[arg-type]
            arrays = jax.eval_shape(lambda case=case: case.draw(jax.random.key(0), 2))
            run = jax.jit(chain(case, partial(case.apply, implementation="xla")))
            lowered = run.trace(jax.ShapeDtypeStruct((8,), jnp.float32), *arrays).lower(lowering_platforms=("cuda",))
            assert jax.tree.map(jnp.shape, lowered.out_info) == jax.tree.map(jnp.shape, arrays[0])

    def test_programs_take_turns(self) -> None:
        ran: list[str] = []
        times = time_in_turns(lambda: ran.append("a"), lambda: ran.append("b"))
        assert len(times) == 2 and all(timing.seconds > 0 for timing in times)
        turns = "".join(ran)
        assert turns.startswith("aabb") and turns.count("ab") > 5


class TestPeer:
    @pytest.mark.skipif(find_spec("humming") is not None, reason="humming-kernels is here")
    def test_absence_is_a_sentence(self) -> None:
        missing = "No module named 'torch'|torch finds no CUDA device|No module named 'humming'"
        with pytest.raises(RequestError, match=f"^humming-kernels cannot be measured here: ({missing})[^\n]*[.]$"):
            run_peer([SMALL_CASES["mxfp4-gate-up"]])

    @pytest.mark.parametrize("name", ["fp8-linear", "hyper-connection"])
    def test_of_what_it_does_not_have(self, name: str) -> None:
        with pytest.raises(RequestError, match=f"humming-kernels has no {name}; leave --peer out"):
            run_peer([SMALL_CASES[name]])

    def test_its_figures_are_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program = tmp_path / "peer.py"
        program.write_text("""
import json, sys
[asked] = json.loads(sys.argv[1])
assert asked == {"shapes": [[4 * 256, 256], ], "rows": 3}, asked
print("compiling")
print(json.dumps({"versions": {"torch": "2"}, "read_bytes_per_second": 4e9,
                  "timings": [{"seconds": 1.0, "spread_seconds": 0.5}]}))
""")
        monkeypatch.setattr(peer, "peer_humming", SimpleNamespace(__file__=str(program)))
        told = bench(SMALL_CASES["mxfp4-gate-up"], peer=True).to_dict()
        assert told["peer"] == {"versions": {"torch": "2"}, "read_bytes_per_second": 4e9}
        [case] = told["cases"]
        assert case["measured"]["humming"] == {
            "seconds": 1.0,
            "spread_seconds": 0.5,
            "bytes_per_second": case["bytes"],
            "fraction_of_ceiling": case["bytes"] / 4e9,
        }
        assert case["speed_up"] == {"humming": 1 / case["measured"]["xla"]["seconds"]}


class TestCommands:
    def test_bandwidth(self, dspark: Dspark) -> None:
        told = json.loads(dspark("bench", "bandwidth", "--json").out)
        assert {*told} == {"device", "array_bytes", "read", "read_write", "copy", "spread"}
        assert told["array_bytes"] == 1 << 16
        assert {*told["spread"]} == {"read", "read_write", "copy"}
        lines = [line.split()[:3] for line in dspark("bench", "bandwidth").out.splitlines()]
        assert ["read", "and", "write"] in lines and "copy" in [line[0] for line in lines if line]

    def test_both_bytes_of_a_copy_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def second_each(*programs: Any) -> list[SimpleNamespace]:
            return [SimpleNamespace(seconds=1, spread=0, per_second=lambda amount: amount) for _ in programs]

        monkeypatch.setattr(bandwidth, "time_in_turns", second_each)
        report = bench_bandwidth()
        assert (report.read, report.read_write, report.copy) == (1 << 16, 1 << 17, 1 << 17)
        assert bandwidth.copy_bandwidth() == 1 << 17 and bandwidth.read_bandwidth() == 1 << 16

    def test_without_a_gpu(self, dspark: Dspark) -> None:
        ran = dspark("bench", "kernel", "fp8-linear")
        assert (ran.code, ran.out) == (2, "")
        assert "there is no GPU that JAX can use, and kernels are timed on one" in ran.err

    @pytest.mark.parametrize("fault", [0.0, 1.0])
    def test_kernel(self, fault: float, dspark: Dspark, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a CPU that says it is a GPU."""
        sound = operations.fp8_linear
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(operations, "fp8_linear", lambda *arguments: sound(*arguments) + fault)
        monkeypatch.setattr(bandwidth, "LARGE", 1 << 16)
        monkeypatch.setattr(
            bench_command, "bench_kernel", lambda *arguments: bench_kernel(*arguments, calls=2, flushed=1 << 12)
        )
        options = ["--shape", "256x128", "--rows", "2", "--quantised", "--implementation", "xla", "--compare", "xla"]
        ran = dspark("bench", "kernel", "fp8-linear", *options, "--json")
        assert ran.code == bool(fault)
        [case] = json.loads(ran.out)["cases"]
        assert (case["shape"], case["rows"], case["quantised"]) == ([256, 128], 2, True)
        assert {*case["measured"]} == {"xla"}
        assert case["measured"]["xla"]["right"] is not bool(fault)

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            (["fp8-linear", "--live", "6"], "--live is not an option of fp8-linear, but of mxfp4-gate-up, mxfp4-down"),
            (["mxfp4-down", "--shape", "8x8"], "--shape is not an option of mxfp4-down, but of fp8-linear"),
            (["hyper-connection", "--quantised"], "--quantised is not an option of hyper-connection"),
            (["mxfp4-gate-up", "--live", "257"], "257 experts cannot be live; a layer has 1 to 256"),
            (["mxfp4-experts", "--live", "7"], "7 experts cannot be live; rows pick 6 each, so give a multiple of 6"),
            (["mxfp4-down", "--rows", "0"], "rows is 0; expected an integer of at least 1"),
            (["fp8-linear", "--shape", "8192"], "'8192' is no shape of a matrix; expected OUTxIN, such as 8192x4096"),
            (["fp8-linear", "--shape", "0x8"], "OUT is 0; expected an integer of at least 1"),
        ],
    )
    def test_refusals(self, options: list[str], sentence: str, dspark: Dspark) -> None:
        ran = dspark("bench", "kernel", *options)
        assert ran.code == 2 and sentence in " ".join(ran.err.split())


def test_a_kernel_that_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> jax.Array:
        raise ValueError("fp8_linear has no kernel for these operands: no reason.")

    monkeypatch.setattr(operations, "fp8_linear", refuse)
    with pytest.raises(RequestError, match="has no kernel for these operands: no reason"):
        bench(SMALL_CASES["fp8-linear"])


def test_a_measurement_needs_no_more_than_jax_and_flax() -> None:
    """The rest may be lacking on a machine where kernels are timed; flax brings rich and optax."""
    program = """
import sys
sys.modules |= dict.fromkeys(["tyro", "grain", "orbax", "tokenizers", "matplotlib", "torch"])
import dspark_jax.bench.kernel, dspark_jax.bench.bandwidth, dspark_jax.bench.operations
"""
    subprocess.run([sys.executable, "-c", program], check=True)
