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

from sandbox.bench import benchmark, decode, latent, peers, plot, reading, report
from sandbox.bench.inputs import make_bench_inputs
from sandbox.bench.rows import Row
from sandbox.bench.timing import Events, Limits, Timed, Timing, measure
from sandbox.core import registry
from sandbox.core.errors import UnsupportedProblem
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
