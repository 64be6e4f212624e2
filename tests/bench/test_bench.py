"""`bench` without a GPU: statistics, interleaving, grids, the check on samples, rows, tables, plots. One test runs it
on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from project import ROOT, check_stored, digest, drawn, has_stored_options, printed

from sandbox import attention_forward, attention_paged, attention_varlen, cli
from sandbox.bench import benchmark, decode, documents, environment, peers, plot, rows, sampled_shapes, serving
from sandbox.bench import report as bench_report
from sandbox.bench.flex import flex_modifications
from sandbox.bench.inputs import asked_of
from sandbox.bench.rows import Row
from sandbox.bench.timing import Events, Graphs, Limits, Timed, Timing, ceilings_of, measure
from sandbox.core import jsonl, registry
from sandbox.core.errors import GpuUnavailable, SandboxError, UnsupportedProblem
from sandbox.launch import driver
from sandbox.reference import attention, lse_bound, naive, output_bound
from sandbox.spec import Problem, Score
from sandbox.verify import sampled
from sandbox.verify.cases import Case, make_inputs
from sandbox.verify.scores import score_inputs

SMALL = Problem(1, 2, 48, 48, 16, dtype="float16")


class Stopwatch:
    """A stopwatch without a GPU: `seconds[name]` has the samples; `order` records the calls of each round."""

    def __init__(self, seconds: dict[str, Iterator[float]] | None = None):
        self.seconds, self.order = seconds or {}, []

    def ready(self, launch: Any) -> Timed:
        return Timed(launch)

    def sample(self, timed: Sequence[Timed]) -> list[float]:
        names = [each.call() for each in timed]
        self.order.append(names)
        return [next(self.seconds[name]) if name in self.seconds else 1e-3 for name in names]  # type: ignore[index]

    def synchronize(self) -> None:
        pass


def alternating(value: float, spread: float) -> Iterator[float]:
    while True:
        yield value * (1 - spread)
        yield value * (1 + spread)


# ---- statistics and interleaving


def test_quartiles_and_noise() -> None:
    timing = Timing.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (timing.q1, timing.median, timing.q3, timing.samples) == (2, 3, 4, 5)
    assert timing.noise == pytest.approx(1.57 * 2 / math.sqrt(5) / 3)
    assert Timing.of([2.0] * 10).noise == 0
    assert Timing.of([2.0]).noise == Timing.of([1.0, 3.0]).noise == math.inf


def run_measure(limits: Limits | None = None, **seconds: Iterator[float]) -> tuple[dict[str, list[float]], list]:
    stopwatch = Stopwatch(seconds)
    contenders = {name: Timed(lambda name=name: name) for name in seconds}
    return measure(contenders, stopwatch, limits or Limits()), stopwatch.order


def test_contenders_are_interleaved_and_the_first_changes() -> None:
    quiet = {name: alternating(1e-3, 0.001) for name in "abc"}
    samples, order = run_measure(Limits(warmup=4, noise_samples=6), **quiet)
    assert order[:4] == [["a", "b", "c"]] * 4  # warm-up, which does not count
    assert order[4:8] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys("abc", 6)


def test_sampling_stops_at_low_noise_or_after_all_rounds() -> None:
    samples, _ = run_measure(quiet=alternating(1e-3, 0.001), loud=alternating(1e-3, 0.3))
    assert len(samples["loud"]) == len(samples["quiet"]) == Limits().rounds
    samples, _ = run_measure(quiet=alternating(1e-3, 0.001), middling=alternating(1e-3, 0.02))
    assert len(samples["middling"]) == 39  # the first number of which 1.57 * 0.04 / 1.02 / sqrt(n) is at most 1%
    assert Timing.of(samples["middling"]).noise <= 0.01 < Timing.of(samples["middling"][:38]).noise
    samples, _ = run_measure(Limits(noise=0.015), middling=alternating(1e-3, 0.02))
    assert len(samples["middling"]) == 17


def test_slow_contenders_get_fewer_samples() -> None:
    limits = Limits(seconds=0.5, slow=0.5, min_samples=3)
    samples, _ = run_measure(
        limits, fast=alternating(1e-3, 0.1), slow=alternating(0.1, 0.05), slower=alternating(0.3, 0.1),
        slowest=alternating(2.0, 0.1),
    )  # fmt: skip
    assert {name: len(values) for name, values in samples.items()} == {
        "fast": 100,
        "slow": 5,
        "slower": 3,
        "slowest": 1,  # its first launch, which is warm-up for the others
    }


def test_seconds_count_for_every_launch_of_a_sample() -> None:
    """The time limit counts the launches inside a graph."""
    stopwatch = Stopwatch({name: alternating(1e-3, 0.1) for name in "ab"})
    contenders = {"a": Timed(lambda: "a"), "b": Timed(lambda: "b", launches=100)}
    samples = measure(contenders, stopwatch, Limits(seconds=0.5, rounds=50))
    assert {name: len(values) for name, values in samples.items()} == {"a": 50, "b": 5}


def test_fewer_rounds_than_the_least_number_of_samples() -> None:
    samples, _ = run_measure(Limits(rounds=2, min_samples=5), loud=alternating(1e-3, 0.3))
    assert len(samples["loud"]) == 5


def test_units_of_the_ceilings() -> None:
    """Two operations in each term of the product; a copy reads and writes each byte."""
    found = ceilings_of({"product": 4e-3, "copy": 1e-3, "read": 5e-4}, n=1000, nbytes=10**9)
    expected = {"ceiling_tflops": 0.5, "ceiling_gbps": 2000.0, "ceiling_read_gbps": 2000.0}
    assert found == pytest.approx(expected)


def test_no_contenders() -> None:
    assert run_measure() == ({}, [[]])


class FakeTorch:
    """Records the PyTorch calls of `Events` and `Graphs`; every launch takes `ms`."""

    def __init__(self, ms: float) -> None:
        log = self.log = []

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                log.append("event")
                self.launches = log.count("launch")

            def elapsed_time(self, after: Any) -> float:
                assert log[-1] == "synchronize", "an event that may not have been reached"
                return (after.launches - self.launches) * ms

        class Graph:
            def replay(self) -> None:
                log.extend(["launch"] * self.launches)

        @contextlib.contextmanager
        def capture(graph: Any) -> Iterator[None]:
            before = log.count("launch")
            yield
            graph.launches = log.count("launch") - before
            log.append("captured")

        synchronize = partial(log.append, "synchronize")
        stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=synchronize)
        self.cuda = SimpleNamespace(
            Event=Event, CUDAGraph=Graph, graph=capture, Stream=lambda: stream, current_stream=lambda: stream,
            stream=contextlib.nullcontext, synchronize=synchronize, _sleep=lambda cycles: log.append("sleep"),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "ms", "launches"),
    [
        (Events, 0.25, 1),
        (Graphs, 0.25, 8),
        (Graphs, 5.0, 1),
        (Graphs, 1.3, 2),
        (Graphs, 0.001, 100),
        (Graphs, 0.0, 100),
    ],
)
def test_what_lies_between_two_events(kind: type, ms: float, launches: int) -> None:
    """A graph has as many launches as take 2 ms, at most 100."""
    torch = FakeTorch(ms)
    stopwatch = kind.__new__(kind)
    stopwatch._torch = torch
    stopwatch._scratch = SimpleNamespace(amax=partial(torch.log.append, "flush"))
    timed = [stopwatch.ready(partial(torch.log.append, "launch")) for _ in range(2)]
    assert [each.launches for each in timed] == [launches] * 2
    del torch.log[:]
    assert stopwatch.sample(timed) == pytest.approx([ms * 1e-3] * 2)
    assert torch.log == ["sleep", "flush", "event", *["launch"] * launches, "event"] * 2 + ["synchronize"]


# ---- grids


def test_grids() -> None:
    paper = benchmark.GRIDS["paper"]("bfloat16")
    assert len(set(paper)) == 36
    assert {p.B * p.Sq for p in paper} == {16384}
    assert {p.H * p.D for p in paper} == {2048}
    assert {p.D for p in paper} == {64, 128, 256}
    assert {p.causal for p in paper} == {False, "bottom-right"}
    assert {p.Sq for p in paper} == {512 << n for n in range(6)}
    assert {(p.B, p.H, p.D) for p in benchmark.GRIDS["tutorial"]("float16")} == {(4, 32, 64)}
    for name, grid in benchmark.GRIDS.items():
        problems = grid("float16")
        assert all(p.dtype == "float16" for p in problems), name
        assert name in ("decode", "real", "latent", "serving") or all(p.Sq == p.Sk for p in problems), name


@pytest.mark.parametrize("name", [name for name in sampled_shapes.SAMPLED if name != "serving"])
def test_sampled_shapes(name: str) -> None:
    """They cover what fixed shapes do not, and fit into the memory of a GPU."""
    problems = sampled_shapes.sampled(name, 300, 1, "bfloat16")
    assert problems == sampled_shapes.sampled(name, 300, 1, "bfloat16")
    assert not {*problems} & {*sampled_shapes.sampled(name, 300, 2, "bfloat16")}
    assert {p.D for p in problems} == {64, 96, 128, 256}
    assert {p.group for p in problems} == {*range(1, 9)}
    assert all(8 <= p.H <= 64 and p.dtype == "bfloat16" for p in problems)
    multiples = [p.Sk % 64 == 0 for p in problems]
    assert sum(multiples) < 20
    assert 60 < statistics.median(p.Sk for p in problems) < 40_000
    heads = [p.H * p.D * (p.rows[0] if p.ragged else p.Sq) for p in problems]  # of one sequence, or of a ragged batch
    assert all(n <= (2**26 if p.ragged else 2**28) for n, p in zip(heads, problems, strict=True))
    assert all(p.batches * p.Hk * p.rows[1] * p.D <= 2**30 for p in problems)


def test_four_distributions_of_lengths() -> None:
    """One long sequence and many short ones; equal lengths; Zipf; log-uniform."""
    problems = sampled_shapes.sampled("ragged", 200, 1, "float16")
    lengths = [sorted(n for n, _ in p.lengths) for p in problems]
    long, equal = (sum(test(n) for n in lengths) for test in (lambda n: n[-1] > 8 * n[-2], lambda n: n[0] == n[-1]))
    zipf = sum(abs(n[-1] / n[-3] - 3) < 0.1 for n in lengths)
    assert all(30 < count < 80 for count in (long, equal, zipf)), (long, equal, zipf)
    assert {p.causal for p in problems} == {False, "bottom-right"}


def test_sampled_decoding_is_memory_bound() -> None:
    problems = sampled_shapes.sampled("decode", 200, 1, "float16")
    assert all(decode.is_memory_bound(p, "forward") for p in problems)
    assert {p.Sq for p in problems} == {*range(1, 17)}
    assert 20 < sum(p.key_lengths for p in problems) < 80


def test_sampled_batches_of_a_server() -> None:
    """Single tokens and chunks, in any order, over pages that hold no other keys, and fit into the memory of a GPU."""
    problems = sampled_shapes.sampled("serving", 200, 1, "float16")
    assert problems == sampled_shapes.sampled("serving", 200, 1, "float16")
    assert {(p.H, p.Hk, p.D) for p in problems} == {*serving.HEADS}
    assert {p.page_size for p in problems} == {*serving.PAGE_SIZES}
    assert {min(p.B, 64) for p in problems} >= {1, 2, 3, 64}
    chunks = [sorted((n for n, _ in p.lengths if n > 1), reverse=True) for p in problems]
    assert {len(found) for found in chunks} == {0, 1, 2, 3, 4}
    assert max(found[0] for found in chunks if found) > 4096
    assert all(128 <= keys <= 32768 and queries <= keys for p in problems for queries, keys in p.lengths)
    assert all(sum(keys for _, keys in p.lengths) * p.Hk * p.D <= 2**29 for p in problems)
    assert any(p.lengths[0][0] == 1 < p.lengths[-1][0] for p in problems if p.B > 1)
    assert all(p.pages == sum(-(-keys // p.page_size) for _, keys in p.lengths) for p in problems)


# ---- the reference on samples


def tensors(problem: Problem, seed: int = 0) -> tuple[Any, ...]:
    torch = pytest.importorskip("torch")
    arrays = make_inputs(Case("normal", dataclasses.replace(problem, dtype="float32")), seed)
    return tuple(torch.from_numpy(x).to(getattr(torch, problem.dtype)) for x in arrays)


def as_float64(x: Any) -> np.ndarray:
    return x.float().numpy().astype(np.float64)


PROBLEMS = [
    Problem(2, 4, 300, 300, 16, dtype="float16"),
    Problem(2, 4, 300, 300, 16, Hk=2, dtype="bfloat16", causal="bottom-right"),
    Problem(3, 3, 150, 410, 8, causal="bottom-right"),
    Problem(1, 1, 410, 150, 8, causal="bottom-right"),  # the first rows see no key
    Problem(2, 2, 410, 150, 8, causal="top-left"),  # the last rows see every key
    Problem(1, 2, 150, 410, 8, causal="top-left"),
    Problem(1, 2, 33, 7, 8, causal="bottom-right"),
    Problem(1, 1, 1, 1, 8, causal="top-left", scale=0.5),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_sampled_reference_is_the_full_reference(problem: Problem, seed: int) -> None:
    q, k, v = tensors(problem)
    expected = sampled.expect(problem, q, k, v, seed)
    inputs = [as_float64(x) for x in (q, k, v)]
    out, lse = attention(*inputs, causal=problem.causal, scale=problem.scale)
    heads = tuple(np.array(expected.heads).T)
    covered = np.zeros(problem.Sq, bool)
    for strip in expected.strips:
        rows_ = slice(strip.start, strip.stop)
        covered[rows_] = True
        np.testing.assert_allclose(strip.out[:, 0], out[heads][:, rows_], rtol=0, atol=1e-13)
        np.testing.assert_allclose(strip.lse[:, 0], lse[heads][:, rows_], rtol=0, atol=1e-12)
        assert 0 < strip.bound < 0.1
    assert covered[0]
    assert covered[-1]
    assert covered.all() or covered.sum() >= 3 * sampled.ROWS
    assert (0, 0) in expected.heads
    assert (problem.B - 1, problem.H - 1) in expected.heads


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_right_results_pass(problem: Problem) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = tensors(problem)
    expected = sampled.expect(problem, q, k, v)
    inputs = [x.float().numpy() for x in (q, k, v)]
    plain = naive(*inputs, causal=problem.causal, scale=problem.scale, dtype=problem.dtype)
    _, lse = attention(*inputs, causal=problem.causal, scale=problem.scale)
    verdict = sampled.compare(expected, torch.from_numpy(plain), torch.from_numpy(lse.astype(np.float32)))
    assert verdict.message == ""
    assert verdict.error <= verdict.bound


def test_wrong_results_do_not() -> None:
    """Also errors below the bound of the largest outputs, those of the first causal rows; and NaN outside of the
    sample."""
    torch = pytest.importorskip("torch")
    S = 1024
    problem = Problem(1, 8, S, S, 16, dtype="float16", causal="bottom-right")
    q, k, v = tensors(problem)
    expected = sampled.expect(problem, q, k, v)
    exact, lse = (torch.from_numpy(x) for x in attention(*map(as_float64, (q, k, v)), causal=True))
    right = exact.half()
    assert sampled.compare(expected, right, lse).message == ""
    late = right.clone()
    late[:, :, S // 2 :] *= 1.006
    plain = naive(*(x.float().numpy() for x in (q, k, v)), causal=True, dtype="float16")
    assert (late - exact).abs().max() < output_bound(exact.numpy(), plain, "float16")  # one bound for all rows
    assert "bound" in sampled.compare(expected, late, lse).message
    sampled_rows = {i for strip in expected.strips for i in range(strip.start, strip.stop)}
    spot = right.clone()
    spot[0, 1, next(i for i in range(S) if i not in sampled_rows), 3] = math.nan
    verdict = sampled.compare(expected, spot, lse)
    assert (verdict.error, "not finite" in verdict.message) == (math.inf, True)
    tolerance = float(lse_bound(np.zeros(1), "float16")[0])
    assert "LSE" in sampled.compare(expected, right, lse + 20 * tolerance).message


# ---- contenders, on the CPU


def contender(name: str, factor: float = 1.0, kernel: str = "", break_after: int = 10**9) -> peers.Contender:
    """Plain attention times `factor`; from call `break_after` on it writes nothing."""

    def prepare(problem: Problem, q: Any, k: Any, v: Any) -> peers.Ready:
        eager, calls = peers.PEERS["eager"].prepare(problem, q, k, v), []
        out = q.clone()

        def launch() -> tuple[Any, Any]:
            calls.append(1)
            if len(calls) < break_after:
                out.copy_(eager.launch()[0] * factor)
            return out, None

        return peers.Ready(launch, lambda: out.fill_(math.nan), tile="T=1", arch="sm_90")

    return peers.Contender(name, prepare, kernel)


def test_work_that_a_mask_hides_does_not_count() -> None:
    """In the TFLOP/s of both kernels and peers."""
    problem = dataclasses.replace(SMALL, key_lengths=True)

    def prepare(problem: Problem, q: Any, k: Any, v: Any, option_tensors: Any) -> peers.Ready:
        out = attention_forward(q, k, v, **asked_of(problem, option_tensors))
        return peers.Ready(lambda: out, lambda: None)

    found, _ = time_contenders(*(peers.Contender(name, prepare, name) for name in ("", "k")), problem=problem)
    pairs = problem.H * problem.Sq * int(score_inputs(problem)["key_lengths"].sum())
    assert 0 < pairs < problem.B * problem.H * problem.Sq * problem.Sk
    for row in found:
        assert row.tflops == pytest.approx(4 * pairs * problem.D / 1e-3 * 1e-12), row.message


def refusing(error: Exception, kernel: str = "") -> peers.Contender:
    def prepare(problem: Problem, q: Any, k: Any, v: Any) -> peers.Ready:
        raise error

    return peers.Contender("refusing", prepare, kernel)


class Counting(Stopwatch):
    """Counts the calls of all contenders."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def sample(self, timed: Sequence[Timed]) -> list[float]:
        self.calls += sum(each.call() is not None for each in timed)
        return [1e-3] * len(timed)


def time_contenders(*contenders: peers.Contender, problem: Problem = SMALL) -> tuple[list[Row], Counting]:
    stopwatch = Counting()
    setting = {"mode": "events", "ceiling_tflops": 1.0, "commit": "abc"}
    return benchmark.time_contenders(problem, contenders, tensors(problem), stopwatch, Limits(), setting), stopwatch


def test_a_wrong_contender_gets_no_time() -> None:
    found, stopwatch = time_contenders(contender("right", kernel="right"), contender("wrong", 1.05))
    right, wrong = (row.as_json() for row in found)
    assert right["ok"] is True
    assert right["ms"] == pytest.approx(1)
    assert right["tflops"] == pytest.approx(SMALL.flops / 1e-3 * 1e-12)
    assert right["percent_of_ceiling"] == pytest.approx(100 * right["tflops"])
    assert (right["kind"], right["tile"], right["arch"], right["samples"]) == ("kernel", "T=1", "sm_90", 10)
    assert wrong["ok"] is False
    assert wrong["ms"] is wrong["tflops"] is wrong["samples"] is None
    assert wrong["error"] > wrong["bound"]
    assert "bound" in wrong["message"]
    assert stopwatch.calls == Limits().warmup + Limits().noise_samples  # of the right one alone


def test_the_read_ceiling_is_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the bytes of keys and values, and is called as often as the contender; only for memory-bound
    problems."""
    sizes: list[int] = []
    monkeypatch.setattr(benchmark.reading, "bytes_to_read", lambda n: sizes.append(n) or SimpleNamespace(nbytes=n))
    monkeypatch.setattr(benchmark.reading, "reader", lambda data: lambda: "read")
    (row,), stopwatch = time_contenders(
        contender("k", kernel="k"), problem=Problem(1, 4, 1, 64, 16, Hk=2, dtype="float16")
    )
    assert sizes == [2 * 64 * 2 * 16 * 2]
    assert row.setting["ceiling_keys_gbps"] == pytest.approx(sizes[0] / 1e-3 * 1e-9)
    assert row.as_json()["percent_of_ceiling"] == pytest.approx(100)
    assert stopwatch.calls == 2 * (Limits().warmup + Limits().noise_samples)
    (row,), _ = time_contenders(contender("k", kernel="k"))
    assert sizes[1:] == []
    assert "ceiling_keys_gbps" not in row.setting


def test_a_contender_that_breaks_while_it_is_timed_loses_its_time() -> None:
    (row,), _ = time_contenders(contender("breaks", break_after=5))
    assert row.ok is False
    assert row.timing is None
    assert row.message.startswith("correct before timing, then: ")
    assert row.as_json()["error"] is None  # infinite, which JSON cannot say


def test_refusals_and_failures_are_rows() -> None:
    (refused, right), _ = time_contenders(refusing(UnsupportedProblem("no")), contender("right"))
    assert (refused.ok, refused.message, right.ok) == (None, "no", True)
    (peer,), _ = time_contenders(refusing(MemoryError("too much")))
    assert (peer.ok, peer.message) == (None, "refusing: too much")
    (ours,), _ = time_contenders(refusing(RuntimeError("broken"), kernel="k"))
    assert (ours.ok, ours.message) == (False, "refusing: broken")
    with pytest.raises(KeyError):  # a bug of this package is not a result
        time_contenders(refusing(KeyError("oops"), kernel="k"))


def dropping(name: str, **changed: Any) -> peers.Contender:
    """Our attention on the CPU backend as a kernel contender; `changed`: options that it uses instead."""

    def prepare(problem: Problem, q: Any, k: Any, v: Any, option_tensors: Any = None) -> peers.Ready:
        options = {**asked_of(problem, option_tensors), **changed}
        return peers.Ready(lambda: attention_forward(q, k, v, **options), lambda: None)

    return peers.Contender(name, prepare, name)


def test_our_dropout_is_compared_and_a_peers_call_without_it() -> None:
    problem = dataclasses.replace(SMALL, dropout=0.4)
    kernels = dropping("right"), dropping("forgetful", dropout=0.0), dropping("other", seed=1)
    found, _ = time_contenders(*kernels, peers.PEERS["sdpa-math"], peers.PEERS["eager"], problem=problem)
    assert [row.ok for row in found] == [True, False, False, True, None]


def test_a_peer_drops_while_it_is_timed() -> None:
    problem = dataclasses.replace(SMALL, dropout=0.4)
    inputs = tensors(problem)
    ready = peers.PEERS["sdpa-math"].prepare(problem, *inputs, option_tensors={})
    assert (ready.launch()[0] != ready.launch()[0]).any()


def test_an_empty_problem_is_refused() -> None:
    (row,), _ = time_contenders(contender("c"), problem=Problem(1, 1, 0, 5, 16))
    assert row.ok is None


MASKED = [
    SMALL,
    dataclasses.replace(SMALL, causal="bottom-right"),
    Problem(1, 4, 40, 40, 16, Hk=2, dtype="bfloat16", causal="top-left"),
    Problem(1, 2, 20, 33, 16, causal="bottom-right"),
    Problem(1, 2, 20, 33, 16, causal="top-left"),
]


@pytest.mark.parametrize("problem", MASKED, ids=str)
@pytest.mark.parametrize("name", ["sdpa-math", "sdpa-flash", "eager"])
def test_peers_are_right_or_refuse(name: str, problem: Problem) -> None:
    (row,), _ = time_contenders(peers.PEERS[name], problem=problem)
    if name.startswith("sdpa") and problem.causal == "bottom-right" and problem.Sq != problem.Sk:
        assert row.ok is None
        assert "Sq=20" in row.message
    else:
        assert row.ok is True or (name == "sdpa-flash" and row.ok is None), row


@pytest.mark.parametrize("name", ["eager", "flex"])
@pytest.mark.parametrize(
    ("Sq", "causal", "taken"), [(48, "bottom-right", True), (49, False, True), (49, "bottom-right", False)]
)
def test_a_causal_mask_with_more_queries_than_keys_is_refused(
    name: str, Sq: int, causal: Any, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    flex = SimpleNamespace(flex_attention=None, create_block_mask=lambda *given, **options: None)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", flex)
    monkeypatch.setitem(vars(torch), "_dynamo", SimpleNamespace(reset=lambda: None))  # its import takes seconds
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    problem = dataclasses.replace(SMALL, Sq=Sq, causal=causal)
    if taken:
        assert peers.PEERS[name].prepare(problem, *tensors(problem))
    else:
        with pytest.raises(UnsupportedProblem, match=f"{name}: causal with Sq=49 > Sk=48 is not supported"):
            peers.PEERS[name].prepare(problem, *tensors(problem))


@pytest.mark.parametrize(
    ("name", "H", "heads", "gqa"),
    [
        ("sdpa-efficient", 4, 4, None),  # it has no grouped heads: keys and values are repeated
        ("sdpa-flash", 4, 2, True),
        ("sdpa-efficient", 2, 2, None),
        ("sdpa-flash", 2, 2, None),
    ],
)
def test_grouped_heads_of_sdpa(name: str, H: int, heads: int, gqa: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, **options: calls.append((k, v, options.get("enable_gqa"))),
    )
    problem = dataclasses.replace(SMALL, H=H)
    q, k, v = tensors(problem)
    peers.PEERS[name].prepare(problem, q, k, v).launch()
    for *given, enabled in calls:
        assert enabled is gqa
        for x, own in zip(given, (k, v), strict=True):
            assert torch.equal(x, own.repeat_interleave(heads // 2, 1))


def test_a_refusal_of_sdpa_says_why() -> None:
    pytest.importorskip("torch")
    with pytest.raises(UnsupportedProblem, match=r"sdpa-cudnn: .{10}"):
        peers.PEERS["sdpa-cudnn"].prepare(SMALL, *tensors(SMALL))


def test_flash_attention_packages_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    fa2, fa3, fa4 = peers.get(str(ROOT / "sandbox" / "bench" / "flash_attention_peers.py"))

    def fake(q: Any, k: Any, v: Any, causal: bool, softmax_scale: float) -> Any:
        inputs = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *inputs, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2), "lse"

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=lambda *a, **k: fake(*a, **k)[0]))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=fake))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    problem = Problem(2, 4, 40, 40, 16, Hk=2, dtype="bfloat16", causal="bottom-right")
    found, _ = time_contenders(fa2, fa3, fa4, problem=problem)
    assert [r.ok for r in found] == [True, True, None]
    assert "install" in found[2].message
    (refused,), _ = time_contenders(fa3, problem=dataclasses.replace(problem, softcap=5.0, bias=(1, 1, 40, 40)))
    assert "bias, softcap not supported" in refused.message

    def windowed(q: Any, k: Any, v: Any, causal: bool, softmax_scale: float, window_size: Any = (-1, -1)) -> Any:
        assert window_size == (7, -1)
        i = torch.arange(40)
        seen = i[None] >= i[:, None] - window_size[0]
        inputs = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, seen, scale=softmax_scale, enable_gqa=True)
        return out.transpose(1, 2)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=windowed))
    (right,), _ = time_contenders(fa2, problem=dataclasses.replace(problem, causal=False, window=(7, None)))
    assert right.ok


def test_ragged_queries_over_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages hold the keys of the gathered batch, on which peers without pages are timed; packages with a page table
    receive it."""
    torch = pytest.importorskip("torch")
    lengths = ((1, 40), (9, 9), (3, 33))
    problem = serving.of_lengths(lengths, 4, 2, 16, 16, dtype="float16")
    inputs = benchmark.make_inputs(problem, device="cpu")
    assert [tuple(x.shape) for x in inputs] == [(1, 4, 13, 16), (1, 2, 82, 16), (1, 2, 82, 16)]
    tables = []

    def varlen(
        q: Any, k: Any, v: Any, causal: bool, softmax_scale: float, cu_seqlens_q: Any, max_seqlen_q: int,
        max_seqlen_k: int, cu_seqlens_k: Any = None, page_table: Any = None, seqused_k: Any = None,
    ) -> Any:  # fmt: skip
        tables.append(page_table)
        if page_table is None:
            options = {"causal": causal, "scale": softmax_scale}
            return attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
        return attention_paged(q, k, v, page_table, seqused_k, cu_seqlens_q=cu_seqlens_q, causal=causal)

    def without_pages(*given: Any, cu_seqlens_k: Any, **options: Any) -> Any:
        return varlen(*given, cu_seqlens_k=cu_seqlens_k, **options)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=without_pages))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_varlen_func=without_pages))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_varlen_func=varlen))
    others = [*peers.get(str(ROOT / "sandbox" / "bench" / "flash_attention_peers.py")), peers.PEERS["sdpa-math"]]
    setting = {"mode": "events", "ceiling_tflops": 1.0, "commit": "abc"}
    found = benchmark.time_contenders(problem, others, inputs, Counting(), Limits(), setting)
    assert [r.ok for r in found] == [True, None, True, None], [r.message for r in found]
    assert "pages are not supported by this package" in found[1].message
    assert "ragged batches are not supported by this peer" in found[3].message
    assert {None} < {x if x is None else tuple(x.shape) for x in tables} == {None, (3, 3)}
    pages = serving.make_pages(problem, *inputs[1:])
    table, ends = pages["block_table"], [0, 40, 49, 82]
    assert (table >= 0).sum() == problem.pages == 7
    for name, x in zip("KV", inputs[1:], strict=True):
        for b, (first, end) in enumerate(itertools.pairwise(ends)):
            rows_of = pages[name].transpose(1, 2)[table[b, : -(-(end - first) // 16)].long()].flatten(0, 1)
            assert torch.equal(rows_of[: end - first], x[0, :, first:end].transpose(0, 1))


# ---- rows


def row(name: str, problem: Problem, seconds: float | None = 1e-3, kernel: str = "", **more: Any) -> Row:
    setting = {
        "mode": "events", "seed": 0, "commit": "abc", "device": "GPU", "ceiling_tflops": 5.0, "ceiling_gbps": 3.0,
        "cuda": "13.0", "clocks": {"clocks.sm": "1700 MHz"},
    }  # fmt: skip
    timing = seconds and Timing(seconds, seconds * 0.9, seconds * 1.1, 20, 0.01)
    return Row(name, kernel, problem, more.pop("ok", True), timing=timing or None, setting={**setting, **more})


def grid_rows() -> list[dict[str, Any]]:
    found = []
    for p in benchmark.GRIDS["paper"]("float16"):
        found.append(row("fwd_x", p, p.flops / 2e12, kernel="fwd_x"))
        found.append(row("sdpa-flash", p, p.flops / (4e12 if p.D == 64 else 1e12)))
    return [r.as_json() for r in found]


def test_rows_survive_an_interrupt_and_resume(tmp_path: Path) -> None:
    problems = benchmark.GRIDS["tutorial"]("float16")
    path = tmp_path / "rows.jsonl"

    def interrupted() -> Iterator[Row]:
        yield row("a", problems[0])
        yield row("b", problems[0])
        yield row("a", problems[1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(rows.recorded(interrupted(), path))
    kept = rows.read_rows(path)
    assert [(r["contender"], r["Sq"]) for r in kept] == [("a", 1024), ("b", 1024), ("a", 2048)]
    a, b = contender("a"), contender("b")
    assert benchmark.unmeasured(kept, problems, [a, b]) == problems[1:]
    assert benchmark.unmeasured(kept, problems, [a]) == problems[2:]
    path.write_text(path.read_text()[:-30])  # the power failed
    assert len(rows.read_rows(path)) == 2
    list(rows.recorded([row("c", problems[0])], path))
    assert [r["contender"] for r in rows.read_rows(path)] == ["a", "b", "c"]
    assert rows.read_rows(tmp_path / "none") == []
    with jsonl.locked(path) as file:  # by another process that writes the same file
        file.seek(0, 2)
        file.write(b'{"contender": "d", "half')
        file.flush()
        writer = threading.Thread(target=lambda: list(rows.recorded([row("e", problems[0])], path)))
        writer.start()
        time.sleep(0.3)
        file.write(b'": 1}\n')
    writer.join()
    assert [r["contender"] for r in rows.read_rows(path)] == ["a", "b", "c", "d", "e"]
    for line, content in ((1, b"rubbish\n{}\n"), (1, b"hello"), (1, b"[1]"), (2, b"{}\n3"), (1, b"\x89PNG\n")):
        path.write_bytes(content)
        with pytest.raises(UnsupportedProblem, match=f"line {line}, is not a row in JSON"):
            rows.read_rows(path)


def test_two_dirty_trees_are_two_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--resume` uses only rows of the same source state."""

    def git(*arguments: str) -> None:
        command = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *arguments)
        subprocess.run(command, check=True, capture_output=True)

    (tmp_path / "sandbox/bench").mkdir(parents=True)
    source = tmp_path / "sandbox/bench/environment.py"
    monkeypatch.setattr(environment, "__file__", str(source))
    source.write_text("1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    states = [environment.commit()]
    for text in ("2\n", "3\n"):
        source.write_text(text)
        states.append(environment.commit())
    (tmp_path / "kernels_cu").mkdir()
    for text in ("new", "newer"):
        (tmp_path / "kernels_cu/fwd_new.cu").write_text(text)
        states.append(environment.commit())
    assert len({*states}) == len(states)
    assert [state.partition("+")[0] for state in states if state] == [states[0]] * 5
    source.write_text("1\n")
    (tmp_path / "kernels_cu/fwd_new.cu").unlink()
    assert environment.commit() == states[0]


def test_a_problem_comes_back_from_its_row() -> None:
    for problem in PROBLEMS:
        assert rows.problem_of(json.loads(json.dumps(row("a", problem).as_json()))) == problem


def test_speed_is_of_the_median() -> None:
    timed = dataclasses.replace(row("a", SMALL), timing=Timing(2e-3, 1e-3, 4e-3, 10, 0.1))
    assert timed.tflops == pytest.approx(SMALL.flops / 2e-3 * 1e-12)
    backward = dataclasses.replace(timed, computes="backward")
    assert backward.tflops == pytest.approx(2.5 * timed.tflops)
    assert dataclasses.replace(timed, pairs=100).tflops == pytest.approx(4 * 100 * SMALL.D / 2e-3 * 1e-12)
    assert (timed.as_json()["ms"], timed.as_json()["q1_ms"], timed.as_json()["q3_ms"]) == (2, 1, 4)


# ---- tables and plots


def test_ratios_are_of_one_run() -> None:
    found = grid_rows()
    assert bench_report.pick_peer(found) == "sdpa-flash"
    ratios = bench_report.ratios(found, "sdpa-flash")["fwd_x"]
    assert {D: (round(mean, 3), n) for D, (mean, n) in ratios.items()} == {64: (0.5, 12), 128: (2, 12), 256: (2, 12)}
    for r in found[::2]:
        r["commit"] = "other"
    assert list(bench_report.ratios(found, "sdpa-flash")) == ["sdpa-flash"]  # to itself
    with pytest.raises(UnsupportedProblem):
        bench_report.pick_peer(found, "eager")


def test_table_and_notes() -> None:
    from rich.console import Console

    p, causal = SMALL, dataclasses.replace(SMALL, causal="bottom-right")
    wrong = dataclasses.replace(
        row("fwd_x", causal, None, "fwd_x", ok=False), message="error 1 > 0.1", error=1, bound=0.1
    )
    refused = dataclasses.replace(row("sdpa-flash", causal, None, ok=None), message="sdpa-flash: not this one")
    found = [row("sdpa-flash", p, 2e-6).as_json(), row("fwd_x", p, 1e-6, "fwd_x").as_json(), wrong.as_json()]
    found.append(refused.as_json())
    for width in (80, 200):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(bench_report.bench_table(found, "sdpa-flash", width))
        for note in bench_report.notes(found, "sdpa-flash"):
            console.print(note)
        text = console.export_text()
        for wanted in (
            "WRONG",
            "2.00",
            f"{p.flops / 1e-6 * 1e-12:.1f}",
            "1700 MHz",
            "skip",
            "0.1",
            "not this one",
        ):
            assert wanted in text, (width, wanted)


def test_how_fast_the_chosen_kernels_are() -> None:
    """Relative to the fastest kernel, and to the fastest peer; without problems of which only one kernel was timed."""
    p, long, alone = (dataclasses.replace(SMALL, Sk=SMALL.Sk * n) for n in (1, 2, 3))
    found = [
        *(row("fwd_x", p, 2e-6, "fwd_x"), row("fwd_y", p, 1e-6, "fwd_y"), row("a", p, 3e-6), row("b", p, 8e-6)),
        *(row("fwd_x", long, 4e-6, "fwd_x"), row("fwd_y", long, 5e-6, "fwd_y"), row("a", long, None, ok=None)),
        *(row("fwd_x", alone, 1e-6, "fwd_x"), row("a", alone, 1e-6)),
    ]
    said = [str(text) for text in bench_report.choices([r.as_json() for r in found], lambda problem: "fwd_x")]
    assert said == [
        f"attention's choice : the fastest kernel, geometric mean of 2 problems: 0.71; lowest 0.50 on {p}",
        f"attention's choice : the fastest peer, geometric mean of 1 problem: 1.50; lowest 1.50 on {p}",
    ]


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, svg = plot.draw(grid_rows(), tmp_path / "a" / "paper")
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert int.from_bytes(png.read_bytes()[16:20], "big") == 1000  # pixels wide
    text = svg.read_text()
    for label in ("fwd_x", "sdpa-flash", "matrix product, 5", "D = 128, causal", "D = 64, no mask", "16k", "GPU"):
        assert f"<!-- {label}" in text or label in text, label
    assert "<dc:date>" not in text
    again = plot.draw(grid_rows(), tmp_path / "again")
    assert [file.read_bytes() for file in again] == [png.read_bytes(), svg.read_bytes()]
    both = [*grid_rows(), row("fwd_x", Problem(1, 1, 512, 512, 64, dtype="float32"), kernel="fwd_x").as_json()]
    assert "fwd_x float32" in plot.draw(both, tmp_path / "two")[1].read_text()
    with pytest.raises(UnsupportedProblem, match="nothing to plot"):
        plot.draw([row("a", SMALL, None, ok=None).as_json()], tmp_path / "none")


def test_stored_tables_and_plots() -> None:
    """Their whole text, numbers and styles."""
    pytest.importorskip("matplotlib")
    rows = grid_rows()
    failed = dataclasses.replace(row("fwd_y", SMALL, None, "fwd_y", ok=False), message="fwd_y: error 1.5 at 3")
    wrong = dataclasses.replace(row("fwd_y", SMALL, None, "fwd_y", ok=False), message="wrong", error=1, bound=0.1)
    skipped = dataclasses.replace(row("eager", SMALL, None, ok=None), message="eager: no")
    others = [
        r.as_json() for r in (failed, wrong, skipped, row("fwd_y", dataclasses.replace(SMALL, Sk=64), 0.02, "fwd_y"))
    ]
    lines = []
    for found in (rows[:12], [*rows[10:30], *others], others):
        for width in (60, 79, 80, 110, 200):
            peer = bench_report.pick_peer(found)
            lines += printed(width, bench_report.bench_table(found, peer, width), *bench_report.notes(found, peer))
    lines += [bench_report.times(ratio) for ratio in (0.0994, 0.0996, 0.1, 1.005, 12.0)]
    check_stored("bench/tables.txt", lines)
    both = [*rows, row("fwd_x", Problem(1, 1, 512, 512, 64, dtype="float32"), kernel="fwd_x").as_json()]
    check_stored("bench/plots.txt", [*drawn(lambda: plot.draw(rows, "")), *drawn(lambda: plot.draw(both, ""))])


def test_stored_grids() -> None:
    """Every problem of each grid, and of samples."""
    lines = []
    found = {name: [*filter(has_stored_options, grid("float16"))] for name, grid in benchmark.GRIDS.items()}
    found |= {f"sampled {name}": sampled_shapes.sampled(name, 24, 7, "bfloat16") for name in sampled_shapes.SAMPLED}
    for name, problems in found.items():
        texts = [*map(str, problems)]
        lines += [f"{name} {text}"[:400] for text in (*texts[:1], *texts[-1:], digest(texts))]
    check_stored("bench/grids.txt", lines)


# ---- the command


def invoke(*args: str) -> Any:
    return CliRunner().invoke(cli.cli, ["bench", *args], catch_exceptions=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(ordinal: int = 0) -> Any:
        raise GpuUnavailable("no GPU here")

    monkeypatch.setattr(driver, "device", unavailable)


@pytest.mark.usefixtures("no_gpu")
def test_command_without_a_gpu(tmp_path: Path) -> None:
    result = invoke("fwd_minimal")
    assert (result.exit_code, "no GPU here" in result.output) == (1, True)
    for wrong in (("--peers", "sdpa-flesh"), ("--shape", "1,2"), ("--tile", "X"), ("nothing",), ("--grid", "none")):
        assert invoke(*wrong).exit_code == 2, wrong
    assert invoke("--show", str(tmp_path / "none.jsonl")).exit_code == 2


def test_command_shows_many_contenders_in_parts(tmp_path: Path) -> None:
    """Each part has the whole problem in its first column; only one that is wider than the terminal is folded."""
    wide, names = "x + " + " + ".join(["j"] * 40), [f"contender {n}" for n in range(20)]
    for expression, widths in (("", ((60, 7), (120, 3), (1000, 1))), (wide, ((60, 20), (1000, 1)))):
        problem = dataclasses.replace(SMALL, score=Score(expression) if expression else None)
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row(name, problem, kernel=name).as_json()) + "\n" for name in names))
        for width, parts in widths:
            shown = CliRunner(env={"COLUMNS": str(width)}).invoke(cli.cli, ["bench", "--show", str(file)]).stdout
            table = shown.partition("GPU")[0].splitlines()
            assert max(map(len, table)) <= width
            assert sum(line.startswith("B1 H2 S48 D16 ") for line in table) == parts
            assert [name for name in names if not any(name in line for line in table)] == []


@pytest.mark.usefixtures("no_gpu")
def test_command_shows_stored_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in grid_rows()))
    result = invoke("--show", str(file), "--plot", str(tmp_path / "figure"))
    assert result.exit_code == 0
    for wanted in ("D64 0.50, D128 2.00, D256 2.00", "lowest 0.50 on B32", "B32 H32 S512 D64", "figure.png"):
        assert wanted in result.output
    assert (tmp_path / "figure.svg").exists()
    assert json.loads(invoke("--show", str(file), "--json").stdout) == grid_rows()


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"a": 1}\n', (), "line 1, is not a row of bench: it has no 'contender' (bench --out writes such rows)"),
        ("", (), "has no rows of the forward\n"),
        ("hello", (), "line 1, is not a row in JSON: 'hello'"),
        ("backward", (), "has no rows of the forward, but 1 of the backward: pass --backward"),
        ("forward", ("--backward",), "has no rows of the backward, but 1 of the forward: omit --backward"),
        ("forward without B", (), "line 1, is not a row of bench: it has no 'B'"),
    ],
)
def test_command_refuses_to_show_other_files(
    content: str, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    file, computes = tmp_path / "rows.jsonl", content.partition(" ")[0]
    if computes in ("forward", "backward"):
        stored = dataclasses.replace(row("a", SMALL), computes=computes).as_json()
        content = json.dumps({name: x for name, x in stored.items() if name != content[-1]})
    file.write_text(content)
    for more in ((), ("--json",)):
        result = invoke("--show", str(file), *options, *more)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr


def test_command_keeps_what_it_has_when_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def one_row(kernels: Any, problems: Any, contenders: Any, **options: Any) -> Iterator[Row]:
        requested.append((list(problems), [peer.name for peer in contenders], options))
        yield row("fwd_minimal", problems[0], kernel="fwd_minimal")
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "run", one_row)
    file = tmp_path / "rows.jsonl"
    shapes = ("--shape", "1,2,64,16", "--shape", "1,4/2,32,48,16", "--causal", "--dtype", "bfloat16")
    result = invoke("fwd_minimal", *shapes, "--peers", "eager,sdpa-math", "--mode", "graph", "--out", str(file))
    assert result.exit_code == 1
    assert "interrupted" in result.output
    assert "B1 H2 S64 D16" in result.output
    assert len(rows.read_rows(file)) == 1
    problems, names, options = requested[0]
    assert problems[1] == Problem(1, 4, 32, 48, 16, Hk=2, dtype="bfloat16", causal="bottom-right")
    assert names == ["eager", "sdpa-math"]
    assert options["mode"] == "graph"


def test_command_keeps_what_it_has_when_a_fault_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(kernels: Any, problems: Any, contenders: Any, **options: Any) -> Iterator[Row]:
        yield row("fwd_minimal", problems[0], kernel="fwd_minimal")
        raise SandboxError("the context is lost")

    monkeypatch.setattr(benchmark, "run", fails)
    result = invoke("fwd_minimal", "--peers", "none", "--out", str(tmp_path / "rows.jsonl"))
    assert result.exit_code == 1
    assert "the context is lost" in result.output
    assert "B8 H12 S128 D64" in result.output
    assert len(rows.read_rows(tmp_path / "rows.jsonl")) == 1


@pytest.mark.parametrize(("verdicts", "status"), [((True, None), 0), ((None, None), 2), ((True, False), 1)])
def test_exit_status(verdicts: tuple, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(kernels: Any, problems: Any, contenders: Any, **options: Any) -> Iterator[Row]:
        for problem, ok in zip(problems, verdicts, strict=False):
            yield row("fwd_minimal", problem, 1e-3 if ok else None, kernel="fwd_minimal", ok=ok)
            yield row("eager", problem)

    monkeypatch.setattr(benchmark, "run", ends)
    assert invoke("fwd_minimal", "--peers", "eager").exit_code == status
    assert invoke("fwd_minimal", "--peers", "eager", "--against", "sdpa-flash").exit_code == 2


def test_command_samples_a_grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With another seed in each run, which is printed, and with which the run can be repeated."""
    requested = []

    def record(kernels: Any, problems: Any, contenders: Any, **options: Any) -> Iterator[Row]:
        requested.append((list(problems), options["seed"], options["labels"]))
        return iter([row("fwd_minimal", problems[0], kernel="fwd_minimal")])

    monkeypatch.setattr(benchmark, "run", record)
    ragged = ("fwd_minimal", "--peers", "none", "--grid", "ragged")
    first, second = (invoke(*ragged) for _ in range(2))
    assert requested[0][0] != requested[1][0]
    problems, seed, labels = requested[0]
    assert len(problems) == sampled_shapes.DEFAULT_COUNT
    assert labels == {"grid": "ragged", "sampled": len(problems)}
    assert f"grid ragged: 20 sampled problems, --seed {seed}" in first.output
    assert f"--seed {requested[1][1]}" in second.output
    invoke(*ragged, "--sample", "5", "--seed", str(seed))
    assert requested[2][0] == problems[:5]
    invoke(*ragged, "--sample", "0")
    assert requested[3] == (benchmark.GRIDS["ragged"]("float16"), 0, {"grid": "ragged", "sampled": 0})
    out = ("--out", str(tmp_path / "rows.jsonl"), "--resume")
    for options, message in (
        ((*ragged, *out), "--resume needs the --seed of the earlier run"),
        (("--grid", "paper", "--sample", "3"), "the problems of paper are fixed"),
        (("--shape", "1,1,64,64", "--sample", "3"), "--sample 3 needs --grid ragged or decode or real"),
    ):
        result = invoke(*options)
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", " ").split())
    assert len(requested) == 4


def test_command_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def record(kernels: Any, problems: Any, contenders: Any, **options: Any) -> Iterator[Row]:
        requested.append(list(problems))
        return iter(row("fwd_minimal", p, kernel="fwd_minimal") for p in problems[:1])

    monkeypatch.setattr(benchmark, "run", record)
    monkeypatch.setattr(benchmark.environment, "commit", lambda: "abc")
    monkeypatch.setattr(driver, "device", lambda ordinal=0: type("Gpu", (), {"name": "GPU"}))
    command = ("fwd_minimal", "--grid", "gpt2", "--peers", "none", "--out", str(tmp_path / "rows.jsonl"), "--resume")
    for left in (4, 3, 2):
        result = invoke(*command)
        assert result.exit_code == 0, result.output
        assert len(requested[-1]) == left
    assert result.output.count("B8 H12") == 3  # with the rows of the runs before
    invoke(*command, "--mode", "graph")
    assert len(requested[-1]) == 4
    monkeypatch.setattr(benchmark.environment, "commit", lambda: "def")
    invoke(*command)
    assert len(requested[-1]) == 4
    assert invoke("--resume").exit_code == 2


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["events", "graph"])
def test_on_a_gpu(mode: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    problems = [Problem(2, 4, 512, 512, 64, dtype="float16", causal=c) for c in (False, "bottom-right")]  # type: ignore[arg-type]
    others = [peers.PEERS[name] for name in peers.DEFAULT]
    found = list(benchmark.run([registry.get("fwd_minimal")], problems, others, mode=mode, limits=Limits(rounds=20)))
    assert len(found) == 2 * 6
    for r in found:
        line = r.as_json()
        assert r.ok is not False, line
        assert r.ok or r.contender.startswith("sdpa"), line
        if r.ok:
            assert 0 < line["q1_ms"] <= line["ms"] <= line["q3_ms"]
            assert 0 < line["percent_of_ceiling"] < 100
            assert line["device"]
            assert line["cuda"]
    assert 100 < found[0].setting["ceiling_gbps"] < 20000


@pytest.mark.parametrize("mask", [{"causal": "bottom-right"}, {"window": (4, None)}, {"alibi": (1, 2)}])
def test_flex_refuses_key_lengths_with_a_diagonal_that_depends_on_them(mask: dict[str, Any]) -> None:
    problem = Problem(1, 2, 8, 8, 16, key_lengths=True, **mask)
    with pytest.raises(UnsupportedProblem, match="the diagonal depends on the key length"):
        flex_modifications(problem, {})


def test_flex_has_key_lengths_and_a_top_left_diagonal() -> None:
    problem = Problem(1, 2, 4, 8, 16, key_lengths=True, causal="top-left")
    _, mask = flex_modifications(problem, {"key_lengths": np.array([6])})
    assert mask is not None
    assert [[bool(mask(0, 0, i, j)) for j in range(8)] for i in range(4)] == np.tri(4, 8, dtype=bool).tolist()


@pytest.mark.parametrize("Sk", [0, 1, 8, 20, 64])
def test_eight_documents_of_equal_length(Sk: int) -> None:
    """Up to rounding; a query sees its document only."""
    problem = Problem(1, 1, Sk, Sk, 8)
    score = documents.score(problem)
    expected = [8 * j // Sk for j in range(Sk)]
    assert score.tensors["doc"].tolist() == expected
    assert score.tensors["doc"].dtype == np.int32
    i, j = np.arange(Sk)[:, None], np.arange(Sk)[None]
    same = np.array(expected)[i] == np.array(expected)[j]
    np.testing.assert_array_equal(score.evaluate(np.zeros((Sk, Sk)), 0, 0, i, j, Sk, Sk)[2], same)
    nothing, mask = documents.flex(problem, {"score.doc": score.tensors["doc"]})
    assert nothing is None
    np.testing.assert_array_equal(mask(0, 0, i, j), same)
