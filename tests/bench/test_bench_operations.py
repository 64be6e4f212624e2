"""`bench` and `tune` of operations, with the CPU backend in place of a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from operation_kernels import kernels_in

from sandbox.bench import benchmark, operations, plot, report
from sandbox.bench.rows import Row, problem_of, read_rows, recorded
from sandbox.bench.timing import Limits, Timed
from sandbox.core import registry
from sandbox.core.errors import UnsupportedProblem
from sandbox.pages import reports
from sandbox.profile.work import work_of_operation
from sandbox.verify.references import ReferenceOutput
from sandbox.verify.suite import suite_of

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with kernels_in(tmp_path_factory.mktemp("kernels")) as path:
        yield path


class Counting:
    """A stopwatch: every call takes 2 ms."""

    def ready(self, launch: Callable[[], object]) -> Timed:
        return Timed(launch)

    def sample(self, timed: Sequence[Timed]) -> list[float]:
        for each in timed:
            each.call()
        return [2e-3 for _ in timed]

    def synchronize(self) -> None:
        pass


SETTING = {"device": "a GPU", "ceiling_tflops": 600.0, "ceiling_gbps": 4000.0, "mode": "events", "commit": "c"}


def rows_of(name: str, shape: str, contenders: Sequence[Any] | None = None) -> list[Row]:
    kernel = registry.get(name)
    problem = suite_of(kernel).problem(kernel, shape, "")
    found = contenders or operations.contenders_of([kernel], (), None)
    limits = Limits(rounds=3, warmup=1)
    return operations.time_contenders(kernel, found, limits, problem, Counting(), SETTING, device="cpu")


def test_a_memory_bound_operation(tmp_path: Path) -> None:
    rows = rows_of("row_softmax", "16,64")
    assert [(row.contender, row.kernel, row.ok) for row in rows] == [
        ("row_softmax", "row_softmax", True), ("torch", "", True)
    ]  # fmt: skip
    nbytes = 2 * 2 * 16 * 64
    assert rows[0].gbps == pytest.approx(nbytes / 2e-3 * 1e-9)
    stored = [*recorded(rows, tmp_path / "rows.jsonl")]
    read = read_rows(tmp_path / "rows.jsonl")
    assert read == json.loads(json.dumps(stored))
    assert problem_of(read[0]) == rows[0].problem
    assert report.unit_of(read) == report.GBPS_OF_ALL
    table = report.bench_table(read, "torch", 200)
    assert table.columns[0].header == "GB/s float16"
    assert "% of a copy at 4000 GB/s" in str(table.caption)
    notes = [str(text) for text in report.notes(read, "torch")]
    assert notes == ["row_softmax : torch, geometric mean of 1 problems: 1.00"]
    pytest.importorskip("matplotlib")
    assert all(path.is_file() for path in plot.draw(read, tmp_path / "plot"))
    pytest.importorskip("jinja2")
    assert "By problem" in reports.bench(read, "torch")


def test_a_compute_bound_operation() -> None:
    rows = rows_of("matmul", "64,64,64")
    assert rows[0].gbps is not None  # this small product is memory-bound
    line = Row("k", "k", rows[0].problem, True, timing=rows[0].timing, work=(2 * 4096**3, 6 * 4096**2), setting=SETTING)
    assert line.gbps is None
    assert line.as_json()["percent_of_ceiling"] == pytest.approx(100 * 2 * 4096**3 / 2e-3 * 1e-12 / 600)


def test_a_wrong_kernel_is_not_timed(folder: Path) -> None:
    kernel = registry.get("row_softmax")
    (right,) = operations.contenders_of([kernel], (), [])

    def wrong(problem: Any, inputs: Any) -> Any:
        ready = right.prepare(problem, inputs)

        def launch() -> tuple[Any, ...]:
            (y,) = ready.launch()
            return (y * 1.05,)

        return operations.Ready(launch, ready.poison)

    (row,) = rows_of("row_softmax", "16,64", [benchmark.Contender("row_softmax", wrong, "row_softmax")])
    assert (row.ok, row.timing) == (False, None)
    assert row.message.startswith("y: error ")


def test_expected_outputs() -> None:
    """A kernel within its bound; a peer within four times that and a unit in the last place of the largest value. The
    verdict is of the output with a fault, or with the largest ratio."""
    values = np.array([1.0, -4.0, np.inf])
    outputs = {"y": ReferenceOutput(values, 0.5), "z": ReferenceOutput(values, 0.25), "n": ReferenceOutput(values, 0.0)}
    poisoned: list[int] = []

    def verdict(y: float, z: float, n: float = 0.0, peers: str = "") -> tuple[float, float, str]:
        got = [torch.tensor([1.0 + error, -4.0, np.inf]) for error in (y, z, n)]
        expected = operations._Expected(outputs, peers)
        found = expected.check(lambda: poisoned.append(1), lambda: tuple(got[: len(poisoned) * 3]))
        poisoned.clear()
        return found.error, found.bound, found.message

    assert verdict(0.5, 0.0) == (0.5, 0.5, "")
    assert verdict(0.25, 0.125 + 0.0625) == (0.1875, 0.25, "")
    assert verdict(0.75, 0.25) == (0.75, 0.5, "y: error 0.75 exceeds its bound 0.5")
    assert verdict(0.0, 0.5) == (0.5, 0.25, "z: error 0.5 exceeds its bound 0.25")
    assert verdict(0.5, 0.25, 0.125) == (0.125, 0.0, "n: error 0.125 exceeds its bound 0")
    ulp = 2**-8  # of 4 in float16
    assert verdict(2.0 + 4 * ulp, 0.0, peers="float16") == (2.0 + 4 * ulp, 4 * (0.5 + ulp), "")
    assert verdict(2.0 + 5 * ulp, 0.0, peers="float16")[2].startswith("y: error 2.02 exceeds its bound 2.02")
    assert verdict(0.0, 0.0, 0.125, peers="float16")[2] == "n: error 0.125 exceeds its bound 0"


def test_poison_of_outputs() -> None:
    """Floating-point outputs become NaN, integers 1; an output that is also an input gets its value again."""
    kernel = registry.get("histogram")
    problem = suite_of(kernel).problem(kernel, "1000", kernel.dtypes[0])
    bench = operations.Bench(kernel, problem, "cpu")
    ready = bench.prepare(kernel.tiles[0])
    first = [x.clone() for x in ready.launch()]
    ready.poison()
    again = ready.launch()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert ready.tile == str(kernel.tiles[0])
    softmax = registry.get("row_softmax")
    made = operations.Bench(softmax, suite_of(softmax).problem(softmax, "16,64", "float16"), "cpu").prepare(
        softmax.tiles[0]
    )
    (y,) = made.launch()
    assert y.isfinite().all()
    made.poison()
    assert y.isnan().all()


def test_contenders() -> None:
    norm, softmax = registry.get("rms_norm"), registry.get("row_softmax")
    names = [c.name for c in operations.contenders_of([norm], norm.tiles, None)]
    assert names == ["rms_norm THREADS=256,PARTS=264", "rms_norm THREADS=128,PARTS=264", "torch"]
    with pytest.raises(UnsupportedProblem, match="peer 'cudnn' is not known: rms_norm has torch"):
        operations.contenders_of([norm], (), ["cudnn"])
    with pytest.raises(UnsupportedProblem, match="rms_norm, row_softmax cannot be timed together"):
        operations.contenders_of([norm, softmax], (), None)


def test_every_peer_computes_the_same() -> None:
    for name, shape in (("rms_norm", "16,64"), ("rms_norm_backward", "16,64"), ("histogram", "1000")):
        for row in rows_of(name, shape):
            assert row.ok, row


def test_declared_bytes() -> None:
    kernel = registry.get("rms_norm_backward")
    problem = suite_of(kernel).problem(kernel, "16,64", "float16")
    find = partial(work_of_operation, kernel.computes, problem=problem)  # type: ignore[arg-type]
    main, total = find(kernel), find(kernel.then[0])
    assert main.least.read == {"dy": 2048, "x": 2048, "w": 256}
    assert (main.least.written, total.least.written) == ({"dx": 2048}, {"dw": 256})
