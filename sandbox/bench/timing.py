"""GPU times of launches: interleaved sampling of several contenders, with a noise estimate.

A sample is the GPU time between two events of one stream. Events have a resolution of about 0.5 µs: launches of a few
microseconds are better timed by `Graphs`, which times many launches together.
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
_LEAD = 600_000  # cycles (about 0.3 ms) of GPU sleep before a sample, so that the host can queue the calls
_GRAPH_SECONDS = 2e-3  # target duration of a graph's launches
_SHORT = 0.05  # seconds: a longer launch needs only one warm-up


@dataclass(frozen=True)
class Limits:
    """When to stop sampling a contender: at low noise, or after a number of rounds or seconds."""

    noise: float = 0.01  # see Timing.noise
    rounds: int = 100
    seconds: float = 0.5  # of GPU time for each contender
    noise_samples: int = 10  # samples required before the noise criterion applies
    min_samples: int = 3  # samples to take regardless of their time
    slow: float = 0.5  # seconds: a launch that takes longer is sampled once
    warmup: int = 5


@dataclass(frozen=True)
class Timing:
    """Median and quartiles in seconds. `noise` is the half-width of the median's 95% interval relative to the median,
    1.57·(q3 − q1)/√samples (McGill, Tukey and Larsen 1978); inf for fewer than three samples."""

    median: float
    q1: float
    q3: float
    samples: int
    noise: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """The statistics of at least one sample."""
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
    """A timing method: `ready` prepares a launch, `sample` calls each once, in order -> seconds per launch."""

    def ready(self, launch: Callable[[], object]) -> Timed: ...
    def sample(self, timed: Sequence[Timed]) -> list[float]: ...
    def synchronize(self) -> None: ...


def measure(contenders: Mapping[Name, Timed], stopwatch: Stopwatch, limits: Limits) -> dict[Name, list[float]]:
    """Seconds per launch, sampled in rounds: in each round every contender that needs more samples is called once, and
    each round starts with another contender. The first rounds are warm-up."""

    def one_round(names: Sequence[Name]) -> dict[Name, float]:
        return dict(zip(names, stopwatch.sample([contenders[name] for name in names]), strict=True))

    first = one_round(list(contenders))
    samples = {name: [seconds] if seconds >= limits.slow else [] for name, seconds in first.items()}
    short = [name for name, seconds in first.items() if seconds < _SHORT]
    for _ in range(limits.warmup - 1 if short else 0):
        one_round(short)
    rounds = 0
    while True:
        names = [name for name in contenders if _may_go_on(samples[name], contenders[name].launches, limits)]
        if all(_settled(samples[name], limits) for name in names):  # also if `names` is empty
            return samples
        start = rounds % len(names)
        for name, seconds in one_round(names[start:] + names[:start]).items():
            samples[name].append(seconds)
        rounds += 1


def _may_go_on(samples: list[float], launches: int, limits: Limits) -> bool:
    if samples and samples[0] >= limits.slow:
        return False
    return len(samples) < limits.min_samples or (
        len(samples) < limits.rounds and sum(samples) * launches < limits.seconds
    )  # fmt: skip


def _settled(samples: list[float], limits: Limits) -> bool:
    return len(samples) >= limits.noise_samples and Timing.of(samples).noise <= limits.noise


class Events:
    """Single launches between CUDA events, each after an L2 flush.

    The flush only reads. After one that writes, L2 is full of modified lines, which are written back during the timed
    launch: 8 to 10 µs on an H200 (experiments/028_serving).
    """

    def __init__(self, ordinal: int = 0):
        import torch

        self._torch = torch
        l2 = torch.cuda.get_device_properties(ordinal).L2_cache_size
        self._scratch = torch.zeros(max(2 * l2, _FLUSH) // 4, dtype=torch.float32, device=f"cuda:{ordinal}")

    def ready(self, launch: Callable[[], object]) -> Timed:
        """The launch itself."""
        return Timed(launch)

    def sample(self, timed: Sequence[Timed]) -> list[float]:
        """Calls each once; the host does not wait for the GPU between the calls."""
        marks = []
        for each in timed:
            self._torch.cuda._sleep(_LEAD)
            self._scratch.amax()
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
    """Replays of CUDA graphs with many launches each: without host time between launches, but also without an L2 flush,
    because a flush inside the graph would be timed."""

    def ready(self, launch: Callable[[], object]) -> Timed:
        """Captures a graph, after a warm-up on the capturing stream. Raises RuntimeError if the launch cannot be
        captured."""
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
    """Current ceilings of this GPU: a matrix product of n³; a copy, counting bytes read and written; and reading."""
    import torch

    kind: dict[str, Any] = {"device": "cuda:0", "dtype": torch.bfloat16 if dtype in FLOAT8 else getattr(torch, dtype)}
    a, b, c = torch.randn(n, n, **kind), torch.randn(n, n, **kind), torch.empty(n, n, **kind)
    multiply: Callable[[], object] = partial(torch.matmul, a, b, out=c)
    if dtype in FLOAT8:  # always e4m3: PyTorch does not multiply e5m2 by e5m2
        one, (x, y) = torch.ones((), device="cuda:0"), (m.to(torch.float8_e4m3fn) for m in (a, b))
        multiply = partial(torch._scaled_mm, x, y.t(), one, one, out_dtype=torch.bfloat16)
    source = reading.bytes_to_read(nbytes)
    copy = torch.empty_like(source)
    calls = {"product": Timed(multiply), "copy": Timed(partial(copy.copy_, source))}
    calls["read"] = Timed(reading.reader(source))
    samples = measure(calls, stopwatch, Limits(rounds=40, warmup=10))
    return ceilings_of({name: Timing.of(values).median for name, values in samples.items()}, n, nbytes)


def ceilings_of(seconds: Mapping[str, float], n: int, nbytes: int) -> dict[str, float]:
    """The ceilings for the seconds of a product of n³, a copy of `nbytes` and reading `nbytes`."""
    return {
        "ceiling_tflops": 2 * n**3 / seconds["product"] * 1e-12,
        "ceiling_gbps": 2 * nbytes / seconds["copy"] * 1e-9,
        "ceiling_read_gbps": nbytes / seconds["read"] * 1e-9,
    }
