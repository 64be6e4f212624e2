"""How fast, beside whom: kernels and peers on the same inputs in one interleaved run, each right before it is timed.

Rows come one problem at a time, so that an interrupted run keeps what it has measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from . import driver, environment
from .choose import choose_tile
from .dlpack import library_of, view
from .errors import GpuUnavailable, SandboxError, ToolchainMissing, UnsupportedProblem
from .peers import Contender, Ready
from .rows import Row
from .run import prepare as prepare_kernel
from .sampled import Expected, Verdict, compare, expect
from .spec import Kernel, Problem, Tile
from .timing import Events, Graphs, Limits, Stopwatch, Timed, Timing, measure

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


def ours(kernel: Kernel, tile: Tile | None = None) -> Contender:
    """A kernel as a contender, by default with the spec's best tile for each problem."""

    def prepare(problem: Problem, q: Any, k: Any, v: Any) -> Ready:
        if kernel.computes != "forward":
            raise UnsupportedProblem(f"{kernel.name}: computes the {kernel.computes}, which bench does not time yet")
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3]).float()
        views = {name: view(x) for name, x in zip(("Q", "K", "V", "O", "LSE"), (q, k, v, out, lse), strict=True)}
        device = views["Q"].device
        chosen = choose_tile(kernel, problem, driver.device(device[1]).arch, tile)
        prepared = prepare_kernel(kernel, chosen, problem, views, device)
        pointers = tuple(views[name].pointer for name in kernel.args if name in views)
        stream = library_of(q).stream(device[1])

        def launch() -> tuple[Any, Any]:
            prepared.launch(pointers, stream())
            return out, lse

        def poison() -> None:
            out.fill_(math.nan)
            lse.fill_(math.nan)

        return Ready(launch, poison, str(chosen), prepared.compiled.arch if prepared.compiled else "")

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
    contenders = [*(ours(kernel, tile) for kernel in kernels for tile in tiles or (None,)), *peers]
    return _measured(list({c.name: c for c in contenders}.values()), problems, mode, limits or Limits(), seed)


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
        yield from compete(problem, contenders, make_inputs(problem, seed), stopwatch, limits, setting)
        torch.cuda.empty_cache()  # the next problem's tensors have other sizes


def make_inputs(problem: Problem, seed: int = 0, device: str = "cuda:0") -> tuple[Any, Any, Any]:
    """q (B, H, Sq, D), k and v (B, Hk, Sk, D), standard normal, contiguous."""
    import torch

    p, generator = problem, torch.Generator(device).manual_seed(seed)
    shapes = ((p.B, p.H, p.Sq, p.D), (p.B, p.Hk, p.Sk, p.D), (p.B, p.Hk, p.Sk, p.D))
    dtype = getattr(torch, p.dtype)
    return tuple(torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes)


def measure_ceilings(dtype: str, stopwatch: Stopwatch, n: int = 8192, nbytes: int = 1 << 30) -> dict[str, float]:
    """What this GPU reaches just now: a matrix product of n³, and a copy, counting bytes read and written."""
    import torch

    kind: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": "cuda:0"}
    a, b, c = torch.randn(n, n, **kind), torch.randn(n, n, **kind), torch.empty(n, n, **kind)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda:0")
    copy = torch.empty_like(source)
    calls = {"product": Timed(partial(torch.matmul, a, b, out=c)), "copy": Timed(partial(copy.copy_, source))}
    samples = measure(calls, stopwatch, Limits(rounds=40, warmup=10))
    seconds = {name: Timing.of(values).median for name, values in samples.items()}
    return {
        "ceiling_tflops": 2 * n**3 / seconds["product"] * 1e-12,
        "ceiling_gbps": 2 * nbytes / seconds["copy"] * 1e-9,
    }


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
    clocks = (
        _clocks_under_load(right[min(timings, key=lambda i: timings[i].median)].ready, stopwatch) if right else None
    )
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
