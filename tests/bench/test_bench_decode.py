"""The grid `decode`: GB/s of keys and values, their table and plot, and paged keys."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from project import check_stored, drawn, printed

from sandbox.bench import benchmark, decode, latent, peers, plot, reading, report
from sandbox.bench.inputs import make_bench_inputs
from sandbox.bench.rows import Row
from sandbox.bench.timing import Events, Limits, Timed, Timing, measure
from sandbox.core import registry
from sandbox.core.errors import UnsupportedProblem
from sandbox.core.operation import OperationProblem
from sandbox.reference import gather_pages
from sandbox.spec import Problem

FEW = Problem(2, 8, 1, 4096, 128, Hk=2, dtype="bfloat16")
BYTES = 2 * 2 * 4096 * 256 * 2
CEILINGS = {"ceiling_tflops": 700.0, "ceiling_read_gbps": 4100.0, "ceiling_keys_gbps": 4000.0}
SETTING = {**CEILINGS, "device": "GPU", "commit": "abc", "mode": "events"}


def row(name: str, problem: Problem, seconds: float, **more: Any) -> Row:
    timing = Timing(seconds, seconds * 0.9, seconds * 1.1, 20, 0.01)
    return Row(name, name if name.startswith("fwd") else "", problem, True, timing=timing, setting=SETTING, **more)


def test_bytes_a_second_of_what_counts() -> None:
    """Half of the keys are half of the bytes. Problems with many queries and backwards have no GB/s."""
    found = row("fwd_x", FEW, 1e-5).as_json()
    assert found["gbps"] == pytest.approx(BYTES / 1e-5 * 1e-9)
    assert found["percent_of_ceiling"] == pytest.approx(found["gbps"] / 40)
    half = dataclasses.replace(FEW, key_lengths=True)
    assert row("fwd_x", half, 1e-5, pairs=2 * 8 * 2048).gbps == pytest.approx(found["gbps"] / 2)
    assert row("fwd_x", dataclasses.replace(FEW, Sq=512), 1e-5).gbps is None
    assert row("fwd_x", FEW, 1e-5, computes="backward").gbps is None


def test_the_grid_is_memory_bound() -> None:
    grid = benchmark.GRIDS["decode"]("bfloat16")
    kernel = registry.get("fwd_decode")
    assert all(decode.is_memory_bound(p, "forward") and kernel.why_unsupported(p, (9, 0)) is None for p in grid)
    assert {p.page_size for p in grid} == {*decode.PAGE_SIZES}


def test_reading(run_cuda) -> None:
    """The kernel reads every word exactly once."""
    data = np.random.default_rng(0).integers(0, 2**32, 3 * reading.BLOCK_BYTES // 4, np.uint32)
    sums = np.zeros(3 * reading.THREADS // 32, np.uint32)
    text = reading.SOURCE.read_text()
    run_cuda(text, "read_all", data, sums, grid=3, block=reading.THREADS, defines=reading.DEFINES)
    assert sums.sum(dtype=np.uint32) == data.sum(dtype=np.uint32)


def test_bytes_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of 64 KiB, up to a maximum."""
    pytest.importorskip("torch")
    block = 64 << 10
    for nbytes, size in ((1, block), (block, block), (block + 1, 2 * block)):
        assert reading.bytes_to_read(nbytes, "cpu").nbytes == size
    monkeypatch.setattr(reading, "MAX_BYTES", 2 * block - 1)
    assert reading.bytes_to_read(10 * block, "cpu").nbytes == 2 * block


@pytest.mark.gpu
def test_nothing_reads_faster_than_reading() -> None:
    """PyTorch's sum is not faster than the read ceiling, which is timed in turns with the contenders."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    data = reading.bytes_to_read(256 << 20)
    calls = {"own": Timed(reading.reader(data)), "sum": Timed(partial(torch.sum, data.view(torch.float32)))}
    own, theirs = (Timing.of(x).median for x in measure(calls, Events(), Limits()).values())
    assert own <= 1.02 * theirs
    (found,) = benchmark.run([registry.get("fwd_decode")], [FEW], limits=Limits(rounds=20))
    assert 0 < found.as_json()["percent_of_ceiling"] < 102


def test_table_and_plot(tmp_path: Path) -> None:
    problems = [FEW, dataclasses.replace(FEW, Sk=65536)]
    rows = [row(name, p, p.Sk * 1e-9).as_json() for p in problems for name in ("fwd_x", "sdpa")]
    assert report.unit_of(rows) == report.GBPS
    table = report.bench_table(rows, "sdpa", 200)
    assert table.columns[0].header.startswith(report.GBPS)
    assert "2048  51%" in str(next(iter(table.columns[1].cells)))
    assert "1 GiB is read at 4100 GB/s" in str(table.caption)
    assert [str(cell) for cell in table.columns[3].cells] == ["4000", "4000"]
    svg = plot.draw(rows, tmp_path / "decode")[1].read_text()
    assert "GB/s of keys and values" in svg
    assert "reading 1 GiB, 4100" in svg
    assert "reading as many bytes" in svg
    dense = row("fwd_x", Problem(1, 8, 4096, 4096, 128, dtype="bfloat16"), 1e-3).as_json()
    assert report.unit_of([*rows, dense]) == "TFLOP/s"


@pytest.mark.parametrize(
    ("fields", "computes", "bound"),
    [
        ({"Sq": 1, "Sk": 128}, "forward", True),  # 4 rows for each key head
        ({"Sq": 1, "Sk": 127}, "forward", False),
        ({"Sq": 2, "Sk": 256}, "forward", True),
        ({"Sq": 2, "Sk": 255}, "forward", False),
        ({"Sq": 0, "Sk": 128}, "forward", False),
        ({"Sq": 1, "Sk": 128}, "backward", False),
        ({"B": 0, "Sq": 0, "Sk": 0, "lengths": ((1, 4096),)}, "forward", False),
    ],
)
def test_what_is_memory_bound(fields: dict[str, Any], computes: str, bound: bool) -> None:
    """At least 32 keys for each row of a key head."""
    assert decode.is_memory_bound(dataclasses.replace(FEW, **fields), computes) is bound


def test_bytes_of_keys_and_values() -> None:
    """Of K with D and V with Dv, in the dtype of the keys; `pairs`: the visible ones."""
    p = dataclasses.replace(FEW, Dv=64, Sq=3)
    assert decode.kv_bytes(p, None) == 2 * 4096 * 2 * (128 + 64) * 2
    assert decode.kv_bytes(p, 8 * 3 * 100) == 100 * 2 * (128 + 64) * 2
    assert decode.kv_bytes(dataclasses.replace(p, kv_dtype="float8_e4m3"), None) == 2 * 4096 * 2 * (128 + 64)


def test_pages_are_not_shared() -> None:
    torch = pytest.importorskip("torch")
    p = Problem(2, 2, 1, 64, 8, page_size=16, pages=7, dtype="float16")
    with pytest.raises(UnsupportedProblem, match=r"pages=7 is not supported for .*does not share pages and needs 8"):
        decode.make_pages(p, *[torch.zeros(2, 2, 64, 8)] * 2)


def test_stored_tables_and_plots_of_bytes() -> None:
    """Of a grid that is memory-bound, and of operations."""
    pytest.importorskip("matplotlib")
    setting = {"device": "GPU", "mode": "graph", "ceiling_gbps": 4000.0, "ceiling_tflops": 700.0}
    decoding = [
        dataclasses.replace(row(name, dataclasses.replace(FEW, Sk=Sk, dtype=dtype), Sk * 1e-9), setting=own).as_json()
        for Sk, dtype, own in ((65536, "bfloat16", SETTING), (4096, "float16", setting), (8192, "float16", SETTING))
        for name in ("sdpa", "fwd_x")
    ]
    problems = [OperationProblem("softmax", (("N", n),), "float16") for n in (64, 128)]
    operation = [
        Row(name, name if name == "mine" else "", p, True, timing=Timing(n * 1e-6, n * 1e-6, n * 1e-6, 9, 0.0),
            computes="softmax", work=work, setting=setting).as_json()
        for n, p in enumerate(problems, 1)
        for name, work in (("torch", (10, 10**9)), ("mine", (10, 10**9)))
    ]  # fmt: skip
    product = [{**line, "gbps": None} for line in operation]
    lines: list[str] = []
    for rows in (decoding, decoding[:4], operation, product):
        peer = report.pick_peer(rows)
        for width in (60, 200):
            lines += printed(width, report.bench_table(rows, peer, width), *report.notes(rows, peer))
        lines += drawn(lambda rows=rows: plot.draw(rows, ""))  # type: ignore[misc]
    check_stored("bench/bytes.txt", lines)


@pytest.mark.parametrize(
    ("work", "gbps", "percent"),
    [
        ((0, 4000), 4.0, 50.0),  # 1 µs each: of 8 GB/s
        ((1000, 4000), 4.0, 50.0),  # 0.001 TFLOP/s of 0.004
        ((2000, 4000), None, 50.0),  # as long: its operations count
        ((1996, 4000), 4.0, 50.0),
        ((4000, 4000), None, 100.0),
    ],
)
def test_what_bounds_an_operation(work: tuple[int, int], gbps: float | None, percent: float) -> None:
    setting = {"ceiling_tflops": 0.004, "ceiling_gbps": 8.0}
    timing = Timing(1e-6, 1e-6, 1e-6, 9, 0.0)
    found = Row("k", "k", FEW, True, timing=timing, work=work, setting=setting)
    assert found.gbps == (gbps and pytest.approx(gbps))
    assert found.tflops == pytest.approx(work[0] * 1e-6)
    assert found.as_json()["percent_of_ceiling"] == pytest.approx(percent)
    assert dataclasses.replace(found, timing=None).gbps is None
    assert dataclasses.replace(found, setting={}).as_json()["percent_of_ceiling"] is None


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_make_pages(dtype: str) -> None:
    """The pages contain the same keys."""
    torch = pytest.importorskip("torch")
    p = Problem(2, 2, 1, 64, 8, page_size=16, pages=11, dtype="float16")
    k, v = (torch.randn(2, 2, 64, 8).to(getattr(torch, dtype)) for _ in "kv")
    found = decode.make_pages(p, k, v)
    for name, x in (("K", k), ("V", v)):
        pages = found[name].transpose(1, 2).float().numpy()
        assert pages.shape == (11, 16, 2, 8)
        assert np.array_equal(gather_pages(pages, found["block_table"].numpy(), np.array([64, 64])), x.float().numpy())


def test_latent_keys() -> None:
    """K and V are one tensor, whose bytes count once; all sequences have Sk keys."""
    torch = pytest.importorskip("torch")
    grid = benchmark.GRIDS["latent"]("bfloat16")
    kernel = registry.get("fwd_latent_wgmma")
    assert all(kernel.why_unsupported(p, (9, 0)) is None for p in grid)
    assert [decode.is_memory_bound(p, "forward") for p in grid] == [p.H <= 64 for p in grid]
    p = dataclasses.replace(grid[-1], B=2, Sk=128, pages=0)
    assert decode.kv_bytes(p, None) == 2 * 128 * 576 * 2
    q, k, v = benchmark.make_inputs(p, device="cpu")
    pages, options = decode.make_pages(p, k, v), make_bench_inputs(p, q)
    for keys, values in ((k, v), (pages["K"], pages["V"])):
        assert (values.data_ptr(), values.shape[3]) == (keys.data_ptr(), 512)
    assert options["key_lengths"].tolist() == [128, 128]
    assert torch.equal(pages["K"][pages["block_table"][1].long()].transpose(1, 2).reshape(1, 1, 128, 576), k[1:])


def test_flash_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of its package, and the reasons why it is not timed."""
    torch = pytest.importorskip("torch")
    p = dataclasses.replace(latent.problems("bfloat16")[-1], B=2, Sk=128, pages=0)
    q, k, v = benchmark.make_inputs(p, device="cpu")
    options = {**make_bench_inputs(p, q), **decode.make_pages(p, k, v)}
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    with pytest.raises(UnsupportedProblem, match="flash_mla cannot be imported"):
        peers.get("flash-mla")[0].prepare(p, q, k, v, option_tensors=options)
    with pytest.raises(UnsupportedProblem, match="it takes latent attention with D=576, Dv=512"):
        peers.get("flash-mla")[0].prepare(dataclasses.replace(p, D=512), q, k, v, option_tensors=options)
    called: list[Any] = []

    def decoded(queries: Any, pages: Any, *others: Any, **named: Any) -> tuple[Any, None]:
        called[:] = [queries.shape, pages.shape, others[2:], named]
        return queries[..., :512], None

    package = SimpleNamespace(flash_mla_with_kvcache=decoded, get_mla_metadata=lambda: ("schedule", None))
    monkeypatch.setitem(sys.modules, "flash_mla", package)
    ready = peers.get("flash-mla")[0].prepare(p, q, k, v, option_tensors=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_full", lambda x, shape, value: called.append((tuple(shape), repr(value))))
        ready.poison()
    assert called[-1] == ((2, 16, 1, 512), "nan")  # of O
    out, _ = ready.launch()
    assert torch.equal(out, q[..., :512])
    named = {"softmax_scale": p.scale, "causal": False, "use_legacy": True}
    assert called == [(2, 1, 16, 576), (4, 64, 1, 576), (512, "schedule"), named]
