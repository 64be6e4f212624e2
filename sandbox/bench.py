"""How fast, beside whom: kernels and peers on the same inputs in one interleaved run, each right before it is timed.

Rows come one problem at a time, so that an interrupted run keeps what it has measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from . import driver, environment
from .choose import choose_tile
from .dlpack import library_of, view
from .errors import GpuUnavailable, SandboxError, ToolchainMissing, UnsupportedProblem
from .peers import Contender, Ready
from .rows import Row, by_problem, problem_of
from .run import prepare as prepare_kernel
from .sampled import Expected, Verdict, compare, expect
from .spec import Kernel, Problem, Tile
from .timing import Events, Graphs, Limits, Stopwatch, Timed, Timing, measure, measure_ceilings

MODES = {"events": Events, "graph": Graphs}
_MASKS = (False, "bottom-right")


def _paper(dtype: str) -> list[Problem]:
    """The grid of the FlashAttention-2 and -3 papers: 16k tokens, hidden size 2048."""
    return [
        Problem(16384 // S, 2048 // D, S, S, D, dtype=dtype, causal=causal)  # type: ignore[arg-type]
        for D, causal, S in itertools.product((64, 128, 256), _MASKS, (512, 1024, 2048, 4096, 8192, 16384))
    ]


def _gpt2(dtype: str) -> list[Problem]:
    """GPT-2 small in training: 12 heads of 64, causal, 8 sequences up to its full context."""
    return [Problem(8, 12, S, S, 64, dtype=dtype, causal="bottom-right") for S in (128, 256, 512, 1024)]


def _tutorial(dtype: str) -> list[Problem]:
    """What Triton's fused-attention tutorial times."""
    return [
        Problem(4, 32, S, S, 64, dtype=dtype, causal=causal)  # type: ignore[arg-type]
        for causal, S in itertools.product(_MASKS, (1024, 2048, 4096, 8192, 16384))
    ]


GRIDS: dict[str, Callable[[str], list[Problem]]] = {"paper": _paper, "gpt2": _gpt2, "tutorial": _tutorial}


# ---- measuring


def ours(kernels: Iterable[Kernel], tiles: Sequence[Tile] = ()) -> list[Contender]:
    """Kernels as contenders: one for each tile, or one with the spec's best tile for each problem."""
    return [_contender(kernel, tile) for kernel in kernels for tile in tiles or (None,)]


def _contender(kernel: Kernel, tile: Tile | None) -> Contender:
    def prepare(problem: Problem, q: Any, k: Any, v: Any) -> Ready:
        if kernel.computes != "forward":
            raise UnsupportedProblem(f"{kernel.name}: computes the {kernel.computes}, which bench does not time yet")
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3]).float()
        views = {name: view(x) for name, x in zip(("Q", "K", "V", "O", "LSE"), (q, k, v, out, lse), strict=True)}
        device = views["Q"].device
        chosen = choose_tile(kernel, problem, driver.device(device[1]).arch, tile)
        prepared = prepare_kernel(kernel, chosen, problem, views, device)
        pointers = prepared.pointers(views)
        stream = library_of(q).stream(device[1])

        def launch() -> tuple[Any, Any]:
            prepared.launch(pointers, stream())
            return out, lse

        def poison() -> None:
            out.fill_(math.nan)
            lse.fill_(math.nan)

        return Ready(launch, poison, str(chosen), prepared.compiled[0].arch if prepared.compiled else "")

    return Contender(f"{kernel.name} {tile}" if tile else kernel.name, prepare, kernel.name)


def run(
    kernels: Iterable[Kernel],
    problems: Iterable[Problem],
    peers: Iterable[Contender] = (),
    *,
    tiles: Sequence[Tile] = (),
    mode: str = "events",
    limits: Limits | None = None,
    seed: int = 0,
) -> Iterator[Row]:
    """Times every kernel (with every one of `tiles`, else with its best) and every peer on every problem, on GPU 0.

    mode "events" times single launches after an L2 flush, "graph" many in a CUDA graph, without host time or flush.
    The rows of a problem come together. Raises GpuUnavailable, ToolchainMissing without PyTorch, SandboxError when a
    contender's fault has ended the GPU's context, so that nothing after it could run.
    """
    gpu = driver.device()
    try:
        import torch
    except ImportError as error:
        raise ToolchainMissing(f"bench needs PyTorch, for its tensors and as a peer ({error}): make setup") from error
    if not torch.cuda.is_available():
        raise GpuUnavailable(f"this PyTorch ({torch.__version__}) cannot use {gpu.name}: install a build with CUDA")
    contenders = {contender.name: contender for contender in (*ours(kernels, tiles), *peers)}
    return _measured(list(contenders.values()), problems, mode, limits or Limits(), seed)


def stored(
    rows: Iterable[Mapping[str, Any]], problems: Collection[Problem], mode: str, seed: int = 0
) -> list[dict[str, Any]]:
    """Of a file's rows, those on these problems that a run would make again: same commit, GPU 0, mode and seed."""
    like = {"commit": environment.commit(), "device": driver.device().name, "mode": mode, "seed": seed}
    same = (row for row in rows if all(row.get(name) == value for name, value in like.items()))
    return [dict(row) for row in same if problem_of(row) in problems]


def unmeasured(
    rows: Iterable[Mapping[str, Any]], problems: Iterable[Problem], contenders: Collection[Contender]
) -> list[Problem]:
    """The problems for which `rows` lack a contender: times to compare come from one run."""
    there = by_problem(rows)
    return [p for p in problems if not {c.name for c in contenders} <= set(there.get(p, ()))]


def _measured(
    contenders: list[Contender], problems: Iterable[Problem], mode: str, limits: Limits, seed: int
) -> Iterator[Row]:
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
            rows = compete(problem, contenders, make_inputs(problem, seed), stopwatch, limits, setting)
        except RuntimeError as error:  # PyTorch's, of a fault that showed up only now
            raise error if isinstance(error, SandboxError) else SandboxError(f"{problem}: {error}") from error
        yield from rows
        torch.cuda.empty_cache()  # the next problem's tensors have other sizes


def make_inputs(problem: Problem, seed: int = 0, device: str = "cuda:0") -> tuple[Any, Any, Any]:
    """q (B, H, Sq, D), k and v (B, Hk, Sk, D), standard normal, contiguous."""
    import torch

    p, generator = problem, torch.Generator(device).manual_seed(seed)
    shapes = ((p.B, p.H, p.Sq, p.D), (p.B, p.Hk, p.Sk, p.D), (p.B, p.Hk, p.Sk, p.D))
    dtype = getattr(torch, p.dtype)
    return tuple(torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes)


def compete(
    problem: Problem,
    contenders: Sequence[Contender],
    inputs: tuple[Any, Any, Any],
    stopwatch: Stopwatch,
    limits: Limits,
    setting: Mapping[str, Any],
) -> list[Row]:
    """Everybody on one problem: checked, those that are right timed in turns, checked again."""
    if not problem.flops:
        return [
            Row(c.name, c.kernel, problem, None, f"{problem} asks for no work to time", setting=dict(setting))
            for c in contenders
        ]
    expected = expect(problem, *inputs)
    entries = [_enter(c, problem, inputs, expected, stopwatch) for c in contenders]
    right = {i: entry for i, entry in enumerate(entries) if entry.timed}
    samples = measure({i: entry.timed for i, entry in right.items() if entry.timed}, stopwatch, limits)
    timings = {i: Timing.of(values) for i, values in samples.items()}
    fastest = min(timings, key=lambda i: timings[i].median, default=None)
    clocks = None if fastest is None else _clocks_under_load(right[fastest].ready, stopwatch)
    shared = {**setting, "clocks": clocks, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    rows = []
    for i, (contender, entry) in enumerate(zip(contenders, entries, strict=True)):
        ok, message, verdict, timing = entry.ok, entry.message, entry.verdict, timings.get(i)
        if timing and entry.ready:
            again = check(entry.ready, expected)
            if again.message:
                ok, message, verdict, timing = False, f"right at first, after timing: {again.message}", again, None
        row = Row(contender.name, contender.kernel, problem, ok, message, timing=timing, setting=shared)
        if verdict:
            row = replace(row, error=verdict.error, bound=verdict.bound)
        if entry.ready:
            row = replace(row, tile=entry.ready.tile, arch=entry.ready.arch)
        rows.append(row)
    return rows


@dataclass(frozen=True)
class _Entry:
    ok: bool | None
    message: str
    ready: Ready | None = None
    verdict: Verdict | None = None
    timed: Timed | None = None


def check(ready: Ready, expected: Expected) -> Verdict:
    """One call on poisoned outputs, compared."""
    ready.poison()
    return compare(expected, *ready.launch())


def _enter(
    contender: Contender, problem: Problem, inputs: tuple[Any, Any, Any], expected: Expected, stopwatch: Stopwatch
) -> _Entry:
    try:
        ready = contender.prepare(problem, *inputs)
        verdict = check(ready, expected)
        if verdict.message:
            return _Entry(False, verdict.message, ready, verdict)
        return _Entry(True, "", ready, verdict, stopwatch.ready(ready.launch))
    except UnsupportedProblem as refusal:
        return _Entry(None, str(refusal))
    except Exception as error:
        if contender.kernel and not isinstance(error, (SandboxError, RuntimeError)):
            raise  # a mistake of this package
        try:
            stopwatch.synchronize()
        except Exception:
            raise SandboxError(f"{contender.name} on {problem} ended the GPU's context: {error}") from error
        # A peer may lack memory, or not be made for this GPU; a kernel of ours has to work.
        return _Entry(False if contender.kernel else None, f"{contender.name}: {error}")


def _clocks_under_load(ready: Ready | None, stopwatch: Stopwatch) -> dict[str, str] | None:
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(environment.clocks)
        while ready and not reading.done():
            ready.launch()
            stopwatch.synchronize()
        return reading.result()
