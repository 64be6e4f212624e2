"""How long a launch takes on a GPU: samples, what they are worth, and contenders that take turns.

A sample is the GPU time between two events of one stream. Events resolve some 0.5 µs, so that a launch of a few
microseconds is better timed by `Graphs`, which divides the time of many.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from ..core.dtypes import FLOAT8
from . import reading

Name = TypeVar("Name", bound=Hashable)
_FLUSH = 256 << 20  # bytes: twice any L2 there is
_LEAD = 600_000  # cycles, some 0.3 ms, that the GPU idles before a sample, in which the host gets ahead of it
_GRAPH_SECONDS = 2e-3  # a graph replays as many launches as fit in this
_BRIEF = 0.05  # seconds: a longer launch is warm after one


@dataclass(frozen=True)
class Limits:
    """When to stop sampling: a contender's noise is low enough, or it had its rounds or its seconds."""

    noise: float = 0.01  # see Timing.noise
    rounds: int = 100
    seconds: float = 0.5  # of GPU time for each contender
    noise_samples: int = 10  # samples before the noise is believed
    min_samples: int = 3  # samples, however long they take
    slow: float = 0.5  # seconds: one launch this long is the only sample
    warmup: int = 5


@dataclass(frozen=True)
class Timing:
    """Median and quartiles in seconds. `noise` is the half-width of the median's 95% interval relative to the median,
    1.57·(q3 − q1)/√samples (McGill, Tukey and Larsen 1978); inf where fewer than three samples say nothing."""

    median: float
    q1: float
    q3: float
    samples: int
    noise: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Of at least one sample."""
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0], 1, math.inf)
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        half_width = 1.57 * (q3 - q1) / math.sqrt(len(samples))
        return cls(median, q1, q3, len(samples), half_width / median if len(samples) > 2 and median else math.inf)


class Timed(NamedTuple):
    """A call that makes `launches` launches."""

    call: Callable[[], object]
    launches: int = 1


class Stopwatch(Protocol):
    """One way to time: `ready` prepares a launch for it, `sample` calls each once, in order -> seconds a launch."""

    def ready(self, launch: Callable[[], object]) -> Timed: ...
    def sample(self, timed: Sequence[Timed]) -> list[float]: ...
    def synchronize(self) -> None: ...


def measure(contenders: Mapping[Name, Timed], stopwatch: Stopwatch, limits: Limits) -> dict[Name, list[float]]:
    """Seconds a launch, sampled in rounds: every contender that needs more has one turn in each, and each round begins
    with another of them. The first rounds warm up and do not count."""

    def one_round(names: Sequence[Name]) -> dict[Name, float]:
        return dict(zip(names, stopwatch.sample([contenders[name] for name in names]), strict=True))

    first = one_round(list(contenders))
    samples = {name: [seconds] if seconds >= limits.slow else [] for name, seconds in first.items()}
    brief = [name for name, seconds in first.items() if seconds < _BRIEF]
    for _ in range(limits.warmup - 1 if brief else 0):
        one_round(brief)
    turn = 0
    while True:
        names = [name for name in contenders if _may_go_on(samples[name], contenders[name].launches, limits)]
        if all(_settled(samples[name], limits) for name in names):  # also when nobody is left
            return samples
        start = turn % len(names)
        for name, seconds in one_round(names[start:] + names[:start]).items():
            samples[name].append(seconds)
        turn += 1


def _may_go_on(samples: list[float], launches: int, limits: Limits) -> bool:
    if samples and samples[0] >= limits.slow:
        return False
    return len(samples) < limits.min_samples or (
        len(samples) < limits.rounds and sum(samples) * launches < limits.seconds
    )  # fmt: skip


def _settled(samples: list[float], limits: Limits) -> bool:
    return len(samples) >= limits.noise_samples and Timing.of(samples).noise <= limits.noise


class Events:
    """Single launches between CUDA events, each after writing more than L2 holds."""

    def __init__(self, ordinal: int = 0):
        import torch

        self._torch = torch
        l2 = torch.cuda.get_device_properties(ordinal).L2_cache_size
        self._scratch = torch.empty(max(2 * l2, _FLUSH), dtype=torch.int8, device=f"cuda:{ordinal}")

    def ready(self, launch: Callable[[], object]) -> Timed:
        """As it is."""
        return Timed(launch)

    def sample(self, timed: Sequence[Timed]) -> list[float]:
        """One call of each, queued without waiting for the GPU in between."""
        marks = []
        for each in timed:
            self._torch.cuda._sleep(_LEAD)
            self._scratch.zero_()
            marks.append(self._between_events(each.call))
        self.synchronize()
        return [
            before.elapsed_time(after) * 1e-3 / each.launches
            for (before, after), each in zip(marks, timed, strict=True)
        ]

    def _between_events(self, call: Callable[[], object]) -> tuple[Any, Any]:
        before, after = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        return before, after

    def synchronize(self) -> None:
        """Wait for all work; an error of an earlier launch is raised here."""
        self._torch.cuda.synchronize()


class Graphs(Events):
    """Replays of CUDA graphs that hold many launches each: no host time in between, but what L2 keeps it keeps, since
    a flush inside of the graph would be timed with it."""

    def ready(self, launch: Callable[[], object]) -> Timed:
        """Captured; the stream that captures warms up first. Raises RuntimeError for what cannot be captured."""
        torch, aside = self._torch, self._torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            launch()
            before, after = self._between_events(launch)
            aside.synchronize()
            seconds = before.elapsed_time(after) * 1e-3
        torch.cuda.current_stream().wait_stream(aside)
        launches = max(1, min(100, round(_GRAPH_SECONDS / max(seconds, 1e-6))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(launches):
                launch()
        return Timed(graph.replay, launches)


def measure_ceilings(dtype: str, stopwatch: Stopwatch, n: int = 8192, nbytes: int = 1 << 30) -> dict[str, float]:
    """What this GPU reaches just now: a matrix product of n³; a copy, counting bytes read and written; and reading."""
    import torch

    kind: dict[str, Any] = {"device": "cuda:0", "dtype": torch.bfloat16 if dtype in FLOAT8 else getattr(torch, dtype)}
    a, b, c = torch.randn(n, n, **kind), torch.randn(n, n, **kind), torch.empty(n, n, **kind)
    multiply: Callable[[], object] = partial(torch.matmul, a, b, out=c)
    if dtype in FLOAT8:  # e4m3, whatever the problem has: nobody multiplies e5m2 by e5m2
        one, (x, y) = torch.ones((), device="cuda:0"), (m.to(torch.float8_e4m3fn) for m in (a, b))
        multiply = partial(torch._scaled_mm, x, y.t(), one, one, out_dtype=torch.bfloat16)
    source = reading.bytes_to_read(nbytes)
    copy = torch.empty_like(source)
    calls = {"product": Timed(multiply), "copy": Timed(partial(copy.copy_, source))}
    calls["read"] = Timed(reading.reader(source))
    samples = measure(calls, stopwatch, Limits(rounds=40, warmup=10))
    seconds = {name: Timing.of(values).median for name, values in samples.items()}
    return {
        "ceiling_tflops": 2 * n**3 / seconds["product"] * 1e-12,
        "ceiling_gbps": 2 * nbytes / seconds["copy"] * 1e-9,
        "ceiling_read_gbps": nbytes / seconds["read"] * 1e-9,
    }
