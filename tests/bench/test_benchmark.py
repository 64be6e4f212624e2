"""`bench`: kernels as contenders, what ends a run, and which rows a run continues."""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from test_bench import SMALL, Counting, Stopwatch, contender, refusing, tensors, time_contenders

from sandbox.bench import benchmark, environment, peers
from sandbox.bench.rows import Row
from sandbox.bench.timing import Limits, Timed
from sandbox.core import registry
from sandbox.core.errors import GpuUnavailable, SandboxError, ToolchainMissing, UnsupportedProblem
from sandbox.engine import pipeline
from sandbox.launch import driver
from sandbox.launch.dlpack import HOST
from sandbox.spec import Problem, Tile

torch = pytest.importorskip("torch")
FORWARD, BACKWARD = registry.get("fwd_minimal"), registry.get("bwd_minimal")
TILES = [Tile(BLOCK_M=32, BLOCK_N=16), Tile(BLOCK_M=32, BLOCK_N=32)]


# ---- kernels


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on the CPU backend."""
    monkeypatch.setattr(benchmark, "library_of", lambda x: SimpleNamespace(stream=lambda ordinal: int))


@pytest.mark.usefixtures("on_cpu")
def test_kernels_are_contenders() -> None:
    """One for each tile, or one with the best tile of each problem."""
    found = benchmark.kernel_contenders([FORWARD], TILES)
    assert [c.name for c in found] == [f"fwd_minimal {tile}" for tile in TILES]
    found += benchmark.kernel_contenders([FORWARD, registry.get("fwd_mma")])
    assert [(c.name, c.kernel) for c in found[2:]] == [("fwd_minimal", "fwd_minimal"), ("fwd_mma", "fwd_mma")]
    problem = dataclasses.replace(SMALL, Hk=1, alibi=(2,), Dv=8)
    rows, _ = time_contenders(found[1], found[2], problem=problem)
    assert [row.ok for row in rows] == [True] * 2, [row.message for row in rows]
    assert [row.tile for row in rows] == [str(tile) for tile in (TILES[1], pipeline.tile_on(HOST, FORWARD, problem))]


@pytest.mark.usefixtures("on_cpu")
def test_what_a_kernel_does_not_write_is_nan() -> None:
    ready = benchmark.kernel_contenders([FORWARD])[0].prepare(SMALL, *tensors(SMALL))
    out, lse = ready.launch()
    assert out.isfinite().all()
    ready.poison()
    assert out.isnan().all()
    assert lse.isnan().all()
    assert ready.launch()[0] is out
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_of_a_backward() -> None:
    inputs = *tensors(SMALL), tensors(SMALL, 1)[0]
    peer = peers.backward(peers.PEERS["sdpa-math"])
    contenders = [*benchmark.kernel_contenders([BACKWARD]), peer]
    rows = benchmark.time_contenders(SMALL, contenders, inputs, Counting(), Limits(), {}, "backward")
    assert [(row.ok, row.computes) for row in rows] == [(True, "backward")] * 2, [row.message for row in rows]


# ---- one problem


def test_an_empty_problem_has_rows_without_times() -> None:
    problem = Problem(1, 1, 0, 5, 16)
    rows, stopwatch = time_contenders(contender("a", kernel="k"), contender("b"), problem=problem)
    assert [(row.contender, row.kernel, row.ok, row.message) for row in rows] == [
        (name, kernel, None, f"{problem} is empty: there is no work to time")
        for name, kernel in (("a", "k"), ("b", ""))
    ]
    assert rows[0].setting["commit"] == "abc"
    assert stopwatch.calls == 0


class Broken(Counting):
    """A stopwatch of a CUDA context that an error has destroyed."""

    def synchronize(self) -> None:
        raise RuntimeError("illegal address")


def test_an_error_that_destroys_the_context_ends_the_run() -> None:
    with pytest.raises(SandboxError, match=r"^refusing on B1 H2 S48 D16 float16 destroyed the CUDA context: oops$"):
        benchmark.enter(refusing(RuntimeError("oops")), SMALL, lambda: refusing(RuntimeError("oops")).prepare(
            SMALL, None, None, None), SimpleNamespace(), Broken())  # fmt: skip


@pytest.mark.parametrize("error", [SandboxError("why"), RuntimeError("why")])
@pytest.mark.parametrize(("kernel", "ok"), [("k", False), ("", None)])
def test_the_error_of_a_contender(error: Exception, kernel: str, ok: bool | None) -> None:
    (row,), _ = time_contenders(refusing(error, kernel))
    assert (row.ok, row.message) == (ok, "refusing: why")


def test_clocks_are_read_while_the_fastest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def clocks() -> dict[str, str]:
        while len(launched) < 3:
            pass
        return {"clocks.sm": "1980 MHz"}

    class Timer(Stopwatch):
        def sample(self, timed: Sequence[Timed]) -> list[float]:
            return [{"slow": 2e-3, "fast": 1e-3}[str(each.call())] for each in timed]

    def entry(name: str) -> benchmark.Entry:
        ready = peers.Ready(lambda: launched.append(name) or (name,), lambda: None)  # type: ignore[func-returns-value]
        return benchmark.Entry(True, "", ready, timed=Timed(lambda: name))

    monkeypatch.setattr(environment, "clocks", clocks)
    named = [contender("slow"), contender("fast")]
    right = SimpleNamespace(check=lambda poison, launch: SimpleNamespace(message="", error=0.0, bound=1.0))
    rows = benchmark.rows_of(SMALL, named, [entry("slow"), entry("fast")], [right, right], Timer(), Limits(), {})
    assert [row.setting["clocks"] for row in rows] == [{"clocks.sm": "1980 MHz"}] * 2
    assert {*launched} == {"fast"}
    assert [row.timing and row.timing.median for row in rows] == [2e-3, 1e-3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"B": 0, "Sq": 0, "Sk": 0, "lengths": ((3, 4), (5, 5))}, "ragged batches are not supported by this peer"),
        ({"Sk": 64, "page_size": 16}, "paged keys are not supported by this peer"),
    ],
)
def test_peers_that_lack_a_layout(options: dict[str, Any], message: str) -> None:
    problem = dataclasses.replace(SMALL, **options)
    of_peer = peers.Contender("c", lambda *inputs, **options: "ready")  # type: ignore[arg-type, return-value]
    with pytest.raises(UnsupportedProblem, match=f"^c: {message}$"):
        benchmark._ready(of_peer, problem, (torch.zeros(1),), {})
    for other in ({"kernel": "k"}, {"ragged": True, "paged": True}):
        able = dataclasses.replace(of_peer, **other)  # type: ignore[arg-type]
        assert benchmark._ready(able, problem, (torch.zeros(1),), {}) == "ready"


def test_inputs() -> None:
    """The same for the same seed, standard normal, in the dtypes of the tensors."""
    p = Problem(2, 4, 30, 50, 16, Hk=2, Dv=8, dtype="bfloat16")
    found = benchmark.make_inputs(p, 3, "cpu", "backward")
    assert [tuple(x.shape) for x in found] == [(2, 4, 30, 16), (2, 2, 50, 16), (2, 2, 50, 8), (2, 4, 30, 8)]
    assert {x.dtype for x in found} == {torch.bfloat16}
    forward = benchmark.make_inputs(p, 3, "cpu")
    assert len(forward) == 3
    assert all(torch.equal(a, b) for a, b in zip(forward, found, strict=False))
    assert not torch.equal(benchmark.make_inputs(p, 4, "cpu")[0], found[0])
    assert abs(float(found[0].float().std()) - 1) < 0.1
    latent = dataclasses.replace(p, H=16, Hk=1, D=32, Dv=16, page_size=16, Sk=64, latent=True)
    _, k, v = benchmark.make_inputs(latent, device="cpu")
    assert torch.equal(v, k[..., :16])
    assert v.data_ptr() == k.data_ptr()


# ---- a run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of which only the name is needed."""
    monkeypatch.setattr(driver, "device", lambda ordinal=0: SimpleNamespace(name="a GPU"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(environment, "describe", lambda: {"commit": "abc", "device": "a GPU"})
    monkeypatch.setattr(environment, "commit", lambda: "abc")


@pytest.mark.usefixtures("gpu")
def test_what_a_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark.need_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(GpuUnavailable, match=r"this PyTorch \(.+\) cannot use a GPU: install a build with CUDA"):
        benchmark.need_gpu()
    imported = builtins.__import__

    def without_torch(name: str, *given: Any) -> Any:
        if name == "torch":
            raise ImportError("no torch")
        return imported(name, *given)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(ToolchainMissing, match=r"^bench needs PyTorch, .* \(no torch\): make setup$"):
        benchmark.need_gpu()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("computes", ["forward", "backward"])
def test_the_contenders_of_a_run(computes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with each tile, then peers, of a backward through autograd; each once."""
    asked: list[Any] = []
    monkeypatch.setattr(peers, "backward", lambda peer: dataclasses.replace(peer, name=f"backward of {peer.name}"))
    monkeypatch.setattr(benchmark, "backward", peers.backward)
    monkeypatch.setattr(benchmark, "run_contenders", lambda *given: asked.append(given) or iter(()))
    kernel, eager = (FORWARD, BACKWARD)[computes == "backward"], peers.PEERS["eager"]
    benchmark.run([kernel], [SMALL], [eager, eager], tiles=TILES, computes=computes, mode="graph", seed=3,
                  labels={"a": 1})  # fmt: skip
    [(contenders, *rest)] = asked
    peer = "backward of eager" if computes == "backward" else "eager"
    assert [c.name for c in contenders] == [*(f"{kernel.name} {tile}" for tile in TILES), peer]
    assert rest == [[SMALL], computes, "graph", Limits(), 3, {"a": 1}]
    with pytest.raises(UnsupportedProblem, match=r"bench times forward kernels, or with --backward backward kernels$"):
        benchmark.run([kernel, BACKWARD if kernel is FORWARD else FORWARD], [SMALL], computes=computes)


@pytest.mark.usefixtures("gpu")
def test_the_setting_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings are measured once for each dtype."""
    ceilings: list[str] = []

    def measure_ceilings(dtype: str, stopwatch: Any) -> dict[str, float]:
        ceilings.append(dtype)
        return {"ceiling_tflops": float(len(ceilings))}

    monkeypatch.setitem(benchmark.MODES, "graph", lambda ordinal: f"stopwatch of {ordinal}")
    monkeypatch.setattr(benchmark, "measure_ceilings", measure_ceilings)
    monkeypatch.setattr(benchmark, "make_inputs", lambda *given, computes: (*given, computes))
    seen: list[Any] = []

    def rows(
        problem: Any, contenders: Any, inputs: Any, stopwatch: Any, limits: Any, setting: Any, computes: str
    ) -> Any:
        seen.append((problem, contenders, inputs, stopwatch, limits, dict(setting), computes))
        return [problem.dtype, problem.Sq]

    monkeypatch.setattr(benchmark, "time_contenders", rows)
    problems = [SMALL, dataclasses.replace(SMALL, dtype="float32"), dataclasses.replace(SMALL, Sq=49)]
    contenders = [contender("c")]
    found = benchmark.run_contenders(contenders, problems, "backward", "graph", Limits(rounds=7), 5, {"label": "x"})
    assert [*found] == ["float16", 48, "float32", 48, "float16", 49]
    assert ceilings == ["float16", "float32"]
    versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    common = {"mode": "graph", "seed": 5, "commit": "abc", "device": "a GPU", **versions, "label": "x"}
    assert seen == [
        (p, contenders, (p, 5, "backward"), "stopwatch of 0", Limits(rounds=7), {**common, "ceiling_tflops": top},
         "backward")
        for p, top in zip(problems, (1.0, 2.0, 1.0), strict=True)
    ]  # fmt: skip


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("error", "message"),
    [(RuntimeError("lost"), f"{SMALL}: lost"), (UnsupportedProblem("why"), "why"), (SandboxError("why"), "why")],
)
def test_an_error_between_problems(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(benchmark.MODES, "events", lambda ordinal: None)
    monkeypatch.setattr(benchmark, "measure_ceilings", lambda *given: {})

    def rows(problem: Any, stopwatch: Any, setting: Any) -> list[Row]:
        raise error

    with pytest.raises(SandboxError) as failed:
        [*benchmark.measured([SMALL], rows, "events", 0)]
    assert str(failed.value) == message


@pytest.mark.usefixtures("gpu")
def test_rows_that_a_run_would_reproduce() -> None:
    """The same commit, GPU, mode, seed, computation, and one of the problems."""
    like = {"commit": "abc", "device": "a GPU", "mode": "graph", "seed": 2, "computes": "backward"}
    stored = {**Row("a", "", SMALL, None).as_json(), **like}
    other = dataclasses.replace(SMALL, Sq=49)
    rows = [stored, *({**stored, name: "x"} for name in like), {**stored, "Sq": 49}]
    assert benchmark.matching_rows(rows, [SMALL], "graph", 2, "backward") == [stored]
    assert benchmark.matching_rows(rows, [SMALL, other], "graph", 2, "backward") == [stored, rows[-1]]
    assert benchmark.matching_rows(rows, [SMALL], "graph", 2) == []
    zero = {**stored, "seed": 0, "computes": "forward"}
    assert benchmark.matching_rows([*rows, zero], [SMALL], "graph") == [zero]
