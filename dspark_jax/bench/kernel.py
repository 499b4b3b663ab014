"""How long operations take, beside the bytes that they must read and the speed at which this device reads.

print(bench_kernel(cases("mxfp4-gate-up", live=[6, 36]), ["mosaic", "xla"]))
"""

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.bench.bandwidth import read_all, read_bandwidth
from dspark_jax.bench.case import Case, waiting
from dspark_jax.bench.kernel_report import CaseReport, KernelReport, Measured
from dspark_jax.bench.peer import run_peer
from dspark_jax.bench.timing import time_in_turns
from dspark_jax.errors import RequestError
from pallas_kernels.implementation import Implementation

CALLS = 20
FLUSHED = 1 << 29
"""Bytes that are read before each chain: many times any L2, and longer than the host needs to queue it."""

Call = Callable[[Any, Any], Any]

Progress = Callable[[str, int, int], None]
"""Called with the name of the work that begins, the pieces of work done, and the pieces in all."""


def bench_kernel(
    cases: Sequence[Case],
    implementations: Sequence[Implementation] = ("mosaic",),
    peer: bool = False,
    progress: Progress = lambda *_: None,
    seed: int | None = None,
    calls: int = CALLS,
    flushed: int = FLUSHED,
) -> KernelReport:
    """Times calls that wait for each other inside one program, and checks one of them against the reference.

    A chain of calls begins with a pass over an array that no cache holds, and every call has operands of its own. The
    same chain without its calls is timed in turns with it and taken off, and with it the launch of the program and
    what makes a call wait for the one before.

    Args:
        cases: what to time; see `dspark_jax.bench.operations.cases`.
        implementations: each is timed; comparisons are those of the first one.
        peer: times `humming-kernels` on as many bytes, too, before anything else, in a process of its own.
        seed: of all random data; None for fresh data.
        calls: in a chain.
        flushed: bytes of the array.

    Raises:
        RequestError: an implementation does not take the operands; or the peer cannot run here, or has no such product.
    """
    work = peer + 1 + len(cases) * len(implementations)
    done = iter(range(work))

    def begin(what: str) -> None:
        progress(what, next(done), work)

    peer_run = None
    if peer:
        begin("humming-kernels")
        peer_run = run_peer(cases)
    begin("read ceiling")
    ceiling = read_bandwidth()
    seed = secrets.randbits(32) if seed is None else seed
    reports = []
    for number, case in enumerate(cases):
        operands = case.draw(jax.random.fold_in(jax.random.key(seed), number), calls)
        flush = jnp.ones(flushed // 4, jnp.float32)
        measured: dict[Implementation, Measured] = {}
        for implementation in implementations:
            begin(f"{case.operation}, {case}, {implementation}")
            measured[implementation] = _measure(case, implementation, flush, *operands)
        reports.append(CaseReport(case, measured, peer_run.timings[number] if peer_run else None))
    return KernelReport(
        device=jax.devices()[0].device_kind,
        versions={"jax": jax.__version__},
        seed=seed,
        read_bytes_per_second=ceiling,
        cases=reports,
        peer=peer_run,
    )


def _measure(
    case: Case, implementation: Implementation, flush: jax.Array, x: Any, operands: tuple[Any, ...]
) -> Measured:
    call = partial(case.apply, implementation=implementation)
    reference = jax.jit(case.reference, compiler_options={"xla_gpu_autotune_level": 0})  # it runs once
    try:
        error = relative_error(jax.jit(call)(x, operands[-1]), reference(_exact(x), operands[-1]))
    except ValueError as refusal:
        raise RequestError(str(refusal)) from refusal

    programs = (program_of(chain(case, each), flush, x, operands) for each in (call, lambda x, _: x))
    whole, rest = time_in_turns(*programs)
    return Measured(
        seconds=(whole.seconds - rest.seconds) / len(operands),
        spread_seconds=whole.spread / len(operands),
        link_seconds=rest.seconds / len(operands),
        error=error,
    )


def program_of(run: Callable[..., Any], flush: jax.Array, x: Any, operands: tuple[Any, ...]) -> Callable[[], Any]:
    """A chain, compiled, in which what several calls share is one argument: for hundreds the host is too slow."""
    leaves, tree = jax.tree.flatten(operands)
    different = {id(leaf): leaf for leaf in leaves}

    @jax.jit
    def program(flush: jax.Array, x: Any, different: dict[int, jax.Array]) -> Any:
        return run(flush, x, jax.tree.unflatten(tree, [different[id(leaf)] for leaf in leaves]))

    return partial(program, flush, x, different)


def chain(case: Case, call: Call) -> Callable[[jax.Array, Any, tuple[Any, ...]], Any]:
    """A function of an array to read at first, of the first input, and of the operands of every call in turn."""

    def run(flush: jax.Array, x: Any, operands: tuple[Any, ...]) -> Any:
        leaves, tree = jax.tree.flatten(x)
        x = jax.tree.unflatten(tree, [waiting(leaves[0], read_all(flush)), *leaves[1:]])
        for own in operands:
            x = case.next_input(x, call(x, own))
        return x

    return run


def _exact[Tree](x: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), x)


@jax.jit
def _relative_error(y: Any, reference: Any) -> jax.Array:
    def of_leaf(y: jax.Array, reference: jax.Array) -> jax.Array:
        return jnp.linalg.norm((y - reference).ravel()) / jnp.linalg.norm(reference.ravel())

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(of_leaf, _exact(y), reference))))


def relative_error(y: Any, reference: Any) -> float:
    """||y - reference|| / ||reference|| in float32, of the array of a pytree where it is largest."""
    return float(_relative_error(y, reference))
