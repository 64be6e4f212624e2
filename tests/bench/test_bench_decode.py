"""The grid `decode`: bytes of keys a second, their table and plot, and keys in pages."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sandbox.bench import contest, decode, plot, report
from sandbox.bench.rows import Row
from sandbox.bench.timing import Timing
from sandbox.core import registry
from sandbox.reference import gather_pages
from sandbox.spec import Problem

FEW = Problem(2, 8, 1, 4096, 128, Hk=2, dtype="bfloat16")
BYTES = 2 * 2 * 4096 * 256 * 2
SETTING = {"ceiling_tflops": 700.0, "ceiling_read_gbps": 4000.0, "device": "GPU", "commit": "abc", "mode": "events"}


def row(name: str, problem: Problem, seconds: float, **more: Any) -> Row:
    timing = Timing(seconds, seconds * 0.9, seconds * 1.1, 20, 0.01)
    return Row(name, name if name.startswith("fwd") else "", problem, True, timing=timing, setting=SETTING, **more)


def test_bytes_a_second_of_what_counts() -> None:
    """Of half of the keys half the bytes; of many queries, and of a backward, none are told."""
    found = row("fwd_x", FEW, 1e-5).as_json()
    assert found["gbps"] == pytest.approx(BYTES / 1e-5 * 1e-9)
    assert found["percent_of_ceiling"] == pytest.approx(found["gbps"] / 40)
    half = dataclasses.replace(FEW, key_lengths=True)
    assert row("fwd_x", half, 1e-5, pairs=2 * 8 * 2048).gbps == pytest.approx(found["gbps"] / 2)
    assert row("fwd_x", dataclasses.replace(FEW, Sq=512), 1e-5).gbps is None
    assert row("fwd_x", FEW, 1e-5, computes="backward").gbps is None


def test_the_grid_is_a_matter_of_reading() -> None:
    grid = contest.GRIDS["decode"]("bfloat16")
    kernel = registry.get("fwd_decode")
    assert all(decode.reads_keys(p) and kernel.refuses(p, (9, 0)) is None for p in grid)
    assert {p.page_size for p in grid} == {*decode.PAGE_SIZES}


def test_table_and_plot(tmp_path: Path) -> None:
    problems = [FEW, dataclasses.replace(FEW, Sk=65536)]
    rows = [row(name, p, p.Sk * 1e-9).as_json() for p in problems for name in ("fwd_x", "sdpa")]
    assert report.unit_of(rows) == report.GBPS
    table = report.bench_table(rows, "sdpa", 200)
    assert table.columns[0].header.startswith(report.GBPS)
    assert "2048  51%" in str(next(iter(table.columns[1].cells)))
    assert "reading 4000 GB/s" in str(table.caption)
    svg = plot.draw(rows, tmp_path / "decode")[1].read_text()
    assert "GB/s of keys and values" in svg
    assert "reading, 4000" in svg
    dense = row("fwd_x", Problem(1, 8, 4096, 4096, 128, dtype="bfloat16"), 1e-3).as_json()
    assert report.unit_of([*rows, dense]) == "TFLOP/s"


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_keys_in_pages(dtype: str) -> None:
    """The same keys, wherever their pages lie."""
    torch = pytest.importorskip("torch")
    p = Problem(2, 2, 1, 64, 8, page_size=16, pages=11, dtype="float16")
    k, v = (torch.randn(2, 2, 64, 8).to(getattr(torch, dtype)) for _ in "kv")
    found = decode.in_pages(p, k, v)
    for name, x in (("K", k), ("V", v)):
        pages = found[name].transpose(1, 2).float().numpy()
        assert pages.shape == (11, 16, 2, 8)
        assert np.array_equal(gather_pages(pages, found["block_table"].numpy(), np.array([64, 64])), x.float().numpy())
