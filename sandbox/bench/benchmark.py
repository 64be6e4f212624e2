"""Times kernels and peers on the same inputs in one interleaved run. Only contenders with a correct result are timed.

Rows are produced one problem at a time, so that an interrupted run keeps its measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from ..core.errors import GpuUnavailable, SandboxError, ToolchainMissing, UnsupportedProblem
from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..engine import pipeline
from ..launch import driver
from ..launch.dlpack import library_of, view
from ..verify.sampled import Verdict, expect, expect_gradients, expect_sequences
from ..verify.scores import visible_pairs
from . import decode, environment, reading, serving
from .grids import GRIDS as GRIDS  # re-exported for `tune` and the command line
from .inputs import BenchInputs, forward_of, make_bench_inputs, torch_dtype
from .peers import Contender, Ready, backward
from .rows import Row, by_problem, problem_of
from .timing import Events, Graphs, Limits, Stopwatch, Timed, Timing, measure, measure_ceilings


class Expectation(Protocol):
    """The expected results on some inputs."""

    def check(self, poison: Callable[[], None], launch: Callable[[], tuple[Any, ...]]) -> Verdict:
        """Compares the outputs of one call, after poisoning them."""


MODES = {"events": Events, "graph": Graphs}
_READ_CEILING = -1  # its key among the contenders' numbers


def kernel_contenders(kernels: Iterable[Kernel], tiles: Sequence[Tile] = ()) -> list[Contender]:
    """Kernels as contenders: one per tile, or one that uses the spec's best tile for each problem."""
    return [_contender(kernel, tile) for kernel in kernels for tile in tiles or (None,)]


def _contender(kernel: Kernel, tile: Tile | None) -> Contender:
    def prepare(
        problem: Problem, q: Any, k: Any, v: Any, dout: Any = None, option_tensors: BenchInputs | None = None
    ) -> Ready:
        import torch

        tensors = {
            "Q": q,
            "K": k,
            "V": v,
            **(option_tensors or {}),
            **_outputs(kernel, q, k, v, dout, problem, option_tensors or {}),
        }
        views = {name: view(x) for name, x in tensors.items()}
        device = views["Q"].device
        chosen = pipeline.tile_on(device, kernel, problem, tile)
        for name, shape in pipeline.scratch_of(kernel, problem, chosen, device).items():
            tensors[name] = q.new_empty(shape, dtype=torch.float32)
            views[name] = view(tensors[name])
        prepared = pipeline.prepare(kernel, chosen, problem, views, device)
        pointers, stream = prepared.pointers(views), library_of(q).stream(device[1])
        results = tuple(tensors[name] for name in kernel.operation.writes)

        def launch() -> tuple[Any, ...]:
            prepared.launch(pointers, stream())
            return results

        def poison() -> None:
            for x in results:
                x.fill_(math.nan)

        arch = prepared.compiled[0].arch if prepared.compiled else ""
        return Ready(launch, poison, str(chosen), arch, keep_alive=tuple(tensors.values()))

    return Contender(f"{kernel.name} {tile}" if tile else kernel.name, prepare, kernel.name)


def _outputs(
    kernel: Kernel, q: Any, k: Any, v: Any, dout: Any, problem: Problem, option_tensors: BenchInputs
) -> dict[str, Any]:
    """The outputs of a kernel; for a backward also its inputs dO, O and LSE, from our own forward."""
    import torch

    if kernel.computes == "forward":
        out = q.new_empty((*q.shape[:3], problem.Dv), dtype=torch_dtype(problem.dtype_of("O")))
        return {"O": out, "LSE": q.new_empty(q.shape[:3], dtype=torch.float32)}
    out, lse = forward_of(problem, q, k, v, option_tensors)
    gradients = (x.new_empty(x.shape) for x in (q, k, v))
    return {"dO": dout, "O": out, "LSE": lse, **dict(zip(("dQ", "dK", "dV"), gradients, strict=True))}


def run(
    kernels: Iterable[Kernel],
    problems: Iterable[Problem],
    peers: Iterable[Contender] = (),
    *,
    tiles: Sequence[Tile] = (),
    computes: str = "forward",
    mode: str = "events",
    limits: Limits | None = None,
    seed: int = 0,
    labels: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Row]:
    """Times every kernel (with each of `tiles`, or with its best tile) and every peer on every problem, on GPU 0.

    computes: "forward" or "backward"; all `kernels` must compute it. mode "events" times single launches after an L2
    flush; "graph" times many launches in a CUDA graph, without host time and without a flush. `seed`: of the inputs;
    `labels`: further values of each row. The rows of one problem are consecutive. Raises GpuUnavailable,
    ToolchainMissing without PyTorch, SandboxError if a contender's error has destroyed the CUDA context, so that the
    run cannot continue.
    """
    need_gpu()
    kernels = list(kernels)
    if odd := [kernel for kernel in kernels if kernel.computes != computes]:
        raise UnsupportedProblem(
            f"{odd[0].name} computes the {odd[0].operation.name}: bench times forward kernels, or with --backward "
            "backward kernels"
        )
    others = map(backward, peers) if computes == "backward" else peers
    contenders = {contender.name: contender for contender in (*kernel_contenders(kernels, tiles), *others)}
    return run_contenders(list(contenders.values()), problems, computes, mode, limits or Limits(), seed, labels)


def need_gpu() -> None:
    """Raises GpuUnavailable without a GPU that PyTorch can use, ToolchainMissing without PyTorch."""
    gpu = driver.device()
    try:
        import torch
    except ImportError as error:
        raise ToolchainMissing(f"bench needs PyTorch, for its tensors and as a peer ({error}): make setup") from error
    if not torch.cuda.is_available():
        raise GpuUnavailable(f"this PyTorch ({torch.__version__}) cannot use {gpu.name}: install a build with CUDA")


def matching_rows(
    rows: Iterable[Mapping[str, Any]],
    problems: Collection[Problem],
    mode: str,
    seed: int = 0,
    computes: str = "forward",
) -> list[dict[str, Any]]:
    """The rows of a file that a run on these problems would reproduce: same commit, GPU, mode and seed."""
    like = {"commit": environment.commit(), "device": driver.device().name, "mode": mode, "seed": seed}
    like["computes"] = computes
    same = (row for row in rows if all(row.get(name) == value for name, value in like.items()))
    return [dict(row) for row in same if problem_of(row) in problems]


def unmeasured(
    rows: Iterable[Mapping[str, Any]], problems: Iterable[Problem], contenders: Collection[Contender]
) -> list[Problem]:
    """The problems for which `rows` lack a contender. All contenders are measured again, in one run, so that their
    times are comparable."""
    there = by_problem(rows)
    return [p for p in problems if not {c.name for c in contenders} <= set(there.get(p, ()))]


def run_contenders(
    contenders: list[Contender], problems: Iterable[Problem], computes: str, mode: str, limits: Limits, seed: int = 0,
    labels: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Row]:  # fmt: skip
    """`run` for contenders that compute `computes`, on a GPU: a peer's backward is `peers.backward(peer)`."""

    def rows(problem: Problem, stopwatch: Stopwatch, setting: Mapping[str, Any]) -> list[Row]:
        inputs = make_inputs(problem, seed, computes=computes)
        return time_contenders(problem, contenders, inputs, stopwatch, limits, {**setting, **labels}, computes)

    return measured(problems, rows, mode, seed)


def measured(problems: Iterable[Any], rows: Callable[..., list[Row]], mode: str, seed: int) -> Iterator[Row]:
    """`rows(problem, stopwatch, setting)` for each problem, with the run's setting and the ceilings of its dtype."""
    import torch

    stopwatch: Stopwatch = MODES[mode](0)
    versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    setting = {"mode": mode, "seed": seed, **environment.describe(), **versions}
    ceilings: dict[str, dict[str, float]] = {}
    for problem in problems:
        if problem.dtype not in ceilings:
            ceilings[problem.dtype] = measure_ceilings(problem.dtype, stopwatch)
        setting |= ceilings[problem.dtype]
        try:
            found = rows(problem, stopwatch, setting)
        except RuntimeError as error:  # raised by PyTorch, for an error of an earlier launch
            raise error if isinstance(error, SandboxError) else SandboxError(f"{problem}: {error}") from error
        yield from found
        torch.cuda.empty_cache()  # the next problem's tensors have other sizes


def make_inputs(problem: Problem, seed: int = 0, device: str = "cuda:0", computes: str = "forward") -> tuple[Any, ...]:
    """q (B, H, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv), and for a backward dout (B, H, Sq, Dv); standard normal. Of
    ragged queries over pages: k and v of the gathered batch."""
    import torch

    p, generator = _with_keys_in_rows(problem), torch.Generator(device).manual_seed(seed)
    queries, keys = (p.batches, p.H, p.rows[0], p.D), (p.batches, p.Hk, p.rows[1], p.D)
    values, results = (*keys[:3], p.Dv), (*queries[:3], p.Dv)
    shapes = (queries, keys, values, *([results] if computes == "backward" else []))
    dtypes = (torch_dtype(p.dtype_of(name)) for name in ("Q", "K", "V", "dO"))
    made = zip(shapes, dtypes, strict=False)
    tensors = tuple(torch.randn(s, generator=generator, device=device).to(dtype) for s, dtype in made)
    return (*tensors[:2], tensors[1][..., : p.Dv], *tensors[3:]) if p.latent else tensors


def _with_keys_in_rows(problem: Problem) -> Problem:
    """The problem whose keys `make_inputs` makes: ragged queries over pages become a ragged batch."""
    return serving.gathered(problem) if problem.ragged and problem.page_size else problem


def expectation(
    problem: Problem, inputs: tuple[Any, ...], computes: str, option_tensors: BenchInputs | None = None
) -> Expectation:
    """The expected results on these inputs, on sampled rows. `option_tensors`: tensors of the options."""
    if problem.ragged:
        own = {name: x for name, x in (option_tensors or {}).items() if name not in ("K", "V", "block_table")}
        return expect_sequences(_with_keys_in_rows(problem), inputs, computes, own)
    if computes == "backward":
        q, k, v, dout = inputs
        return expect_gradients(problem, q, k, v, dout, option_tensors=option_tensors)
    q, k, v = inputs
    return expect(problem, q, k, v, option_tensors=option_tensors)


def time_contenders(
    problem: Problem,
    contenders: Sequence[Contender],
    inputs: tuple[Any, ...],
    stopwatch: Stopwatch,
    limits: Limits,
    setting: Mapping[str, Any],
    computes: str = "forward",
) -> list[Row]:
    """All contenders on one problem: each is checked, the correct ones are timed in turns, and each is checked again.
    For a memory-bound problem, a kernel that only reads as many bytes is timed with them.

    Peers with dropout drop other elements than our kernels. Therefore they are checked with dropout 0.
    """
    if not problem.flops:
        return [
            Row(c.name, c.kernel, problem, None, f"{problem} is empty: there is no work to time", computes=computes,
                setting=dict(setting))
            for c in contenders
        ]  # fmt: skip
    option_tensors = make_bench_inputs(problem, inputs[0])
    if problem.page_size:
        make_pages = serving.make_pages if problem.ragged else decode.make_pages
        option_tensors |= make_pages(problem, *inputs[1:3])
    pairs = visible_pairs(problem, option_tensors)
    expected, of_peers = _expectations(problem, contenders, inputs, computes, option_tensors)
    expectations = [expected if c.kernel else of_peers for c in contenders]
    entries = [
        enter(c, problem, partial(_ready, c, problem, inputs, option_tensors), which, stopwatch)
        for c, which in zip(contenders, expectations, strict=True)
    ]
    nbytes = decode.kv_bytes(problem, pairs) if decode.is_memory_bound(problem, computes) else 0
    return rows_of(
        problem, contenders, entries, expectations, stopwatch, limits, setting, nbytes, computes=computes, pairs=pairs
    )


def rows_of(
    problem: Any,
    contenders: Sequence[Contender],
    entries: Sequence[Entry],
    expectations: Sequence[Expectation],
    stopwatch: Stopwatch,
    limits: Limits,
    setting: Mapping[str, Any],
    nbytes: int = 0,
    **fields: Any,
) -> list[Row]:
    """The rows of contenders that are ready: the correct ones are timed in turns, and each is checked again. `nbytes`:
    a kernel that only reads as many bytes is timed with them; 0: none. `fields`: of every Row."""
    right = {i: entry for i, entry in enumerate(entries) if entry.timed}
    calls = {i: entry.timed for i, entry in right.items() if entry.timed}
    if calls and nbytes:
        data = reading.bytes_to_read(nbytes)
        calls[_READ_CEILING] = stopwatch.ready(reading.reader(data))
    timings = {i: Timing.of(values) for i, values in measure(calls, stopwatch, limits).items()}
    if read := timings.pop(_READ_CEILING, None):
        setting = {**setting, "ceiling_keys_gbps": data.nbytes / read.median * 1e-9}
    fastest = min(timings, key=lambda i: timings[i].median, default=None)
    clocks = None if fastest is None else _clocks_under_load(right[fastest].ready, stopwatch)
    shared = {**setting, "clocks": clocks, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    rows = []
    for i, (contender, entry, expected) in enumerate(zip(contenders, entries, expectations, strict=True)):
        ok, message, verdict, timing = entry.ok, entry.message, entry.verdict, timings.get(i)
        if timing and entry.ready:
            again = _check(expected, entry.ready)
            if again.message:
                ok, message, verdict, timing = False, f"correct before timing, then: {again.message}", again, None
        row = Row(contender.name, contender.kernel, problem, ok, message, timing=timing, setting=shared, **fields)
        if verdict:
            row = replace(row, error=verdict.error, bound=verdict.bound)
        if entry.ready:
            row = replace(row, tile=entry.ready.tile, arch=entry.ready.arch)
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Entry:
    """A contender before timing: whether its result is correct, and how to call it."""

    ok: bool | None
    message: str
    ready: Ready | None = None
    verdict: Verdict | None = None
    timed: Timed | None = None


def _prepared(contender: Contender, problem: Problem, inputs: tuple[Any, ...], option_tensors: BenchInputs) -> Ready:
    return contender.prepare(problem, *inputs, **({} if problem.plain else {"option_tensors": option_tensors}))


def _expectations(
    problem: Problem,
    contenders: Sequence[Contender],
    inputs: tuple[Any, ...],
    computes: str,
    option_tensors: BenchInputs,
) -> tuple[Expectation, Expectation]:
    """(expectation of our kernels, expectation of peers). Peers with dropout drop other elements than our kernels, and
    are checked with dropout 0."""
    expected = expectation(problem, inputs, computes, option_tensors)
    if not problem.dropout or all(contender.kernel for contender in contenders):
        return expected, expected
    return expected, expectation(replace(problem, dropout=0.0), inputs, computes, option_tensors)


def _check(expected: Expectation, ready: Ready) -> Verdict:
    return expected.check(ready.poison, ready.checked or ready.launch)


def _ready(contender: Contender, problem: Problem, inputs: tuple[Any, ...], option_tensors: BenchInputs) -> Ready:
    """The contender on attention's tensors. Raises UnsupportedProblem."""
    if problem.ragged and not (contender.kernel or contender.ragged):
        raise UnsupportedProblem(f"{contender.name}: ragged batches are not supported by this peer")
    if problem.page_size and problem.ragged and not (contender.kernel or contender.paged):
        option_tensors = {**option_tensors, "cu_seqlens_k": serving.offsets_of_keys(problem, inputs[0].device)}
        problem = serving.gathered(problem)
    if problem.page_size and not (contender.kernel or contender.paged):
        raise UnsupportedProblem(f"{contender.name}: paged keys are not supported by this peer")
    ready = _prepared(contender, problem, inputs, option_tensors)
    if problem.dropout and not contender.kernel:
        without = _prepared(contender, replace(problem, dropout=0.0), inputs, option_tensors)
        ready = replace(ready, checked=without.launch)
    return ready


def enter(
    contender: Contender, problem: Any, prepare: Callable[[], Ready], expected: Expectation, stopwatch: Stopwatch
) -> Entry:
    """Prepares a contender, and checks its result."""
    try:
        ready = prepare()
        verdict = _check(expected, ready)
        if verdict.message:
            return Entry(False, verdict.message, ready, verdict)
        return Entry(True, "", ready, verdict, stopwatch.ready(ready.launch))
    except UnsupportedProblem as reason:
        return Entry(None, str(reason))
    except Exception as error:
        if contender.kernel and not isinstance(error, (SandboxError, RuntimeError)):
            raise  # a bug of this package
        try:
            stopwatch.synchronize()
        except Exception:
            raise SandboxError(f"{contender.name} on {problem} destroyed the CUDA context: {error}") from error
        # A peer may run out of memory or not support this GPU (ok is None); an error of our kernel is a failure.
        return Entry(False if contender.kernel else None, f"{contender.name}: {error}")


def _clocks_under_load(ready: Ready | None, stopwatch: Stopwatch) -> dict[str, str] | None:
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(environment.clocks)
        while ready and not reading.done():
            ready.launch()
            stopwatch.synchronize()
        return reading.result()
