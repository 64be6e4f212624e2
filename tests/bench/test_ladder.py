"""Ladder tables: which rows of a file they use, and which contenders have a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.bench import ladder
from sandbox.bench.rows import Row
from sandbox.bench.timing import Timing
from sandbox.core import registry
from sandbox.core.errors import SpecError
from sandbox.spec import Problem


def row(contender: str, seconds: float | None, D: int = 64, **setting: object) -> dict[str, object]:
    """A row as stored by `bench`; without seconds, the contender does not support the problem."""
    where = {"device": "a GPU", "cuda": "13.0", "commit": "one", "mode": "events", "ceiling_tflops": 700.0} | setting
    timing = Timing(seconds, seconds, seconds, 10, 0.0) if seconds else None
    kernel = contender if contender.startswith("fwd") else ""
    problem = Problem(1, 2, 512, 512, D, dtype="float16")
    return Row(contender, kernel, problem, bool(seconds) or None, timing=timing, setting=where).as_json()


def test_a_table_is_of_one_run() -> None:
    """The table excludes rows of an earlier commit, another GPU or another CUDA version."""
    others: tuple[dict[str, object], ...] = ({"commit": "zero"}, {"device": "another"}, {"cuda": "12"})
    earlier = [row("fwd_mma", 1.0, **setting) for setting in others]
    newest = [row("fwd_mma", 0.5), row("sdpa-flash", 1.0), row("fwd_mma", 0.5, D=128)]
    assert ladder.newest_run([newest[0], *earlier, *newest[1:]]) == newest
    assert ladder.newest_run([]) == []


def test_contenders_without_times_have_no_line() -> None:
    rows = [row("fwd_mma", 0.5), row("sdpa-flash", 1.0), row("fa3", None), row("fa4", 0.25), row("fwd_mma_fp8", None)]
    lines = ladder.ladder_markdown(rows, "sdpa-flash").splitlines()[2:-2]
    assert [line.split("|")[2].strip() for line in lines] == ["`fwd_mma`", "FlashAttention-2", "FlashAttention-4"]
    assert [line.split("|")[-2].strip() for line in lines] == ["2.00", "1.00", "4.00"]
    assert "PyTorch's kernel" in lines[1]
    assert "its authors' package" in lines[2]


def test_a_table_says_what_a_matrix_product_reached() -> None:
    """If it varies, for instance between GPUs, the table has the range."""
    one = [row("fwd_mma", 0.5), row("sdpa-flash", 1.0)]
    assert "reaches 700 in the same run" in ladder.ladder_markdown(one, "sdpa-flash")
    two = [*one, row("fwd_mma", 0.5, D=128, ceiling_tflops=690.4)]
    assert "reaches 690 … 700 in the same run" in ladder.ladder_markdown(two, "sdpa-flash")


def test_a_table_goes_between_its_markers(tmp_path: Path) -> None:
    page, script = tmp_path / "page.md", tmp_path / "experiments" / "003_forward_paper" / "run.py"
    (tmp_path / "docs").mkdir()
    begin, end = "<!-- ladder: written by experiments/003_forward_paper/run.py table -->", "<!-- end of ladder -->"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    ladder.write_table(page, "ladder", script, "new\n")
    assert page.read_text() == f"before\n{begin}\nnew\n{end}\nafter\n"
    with pytest.raises(SpecError, match="no markers for the table"):
        ladder.write_table(page, "another ladder", script, "new\n")
    page.write_text(f"{begin}\nold\n")
    with pytest.raises(SpecError, match="no markers for the table"):
        ladder.write_table(page, "ladder", script, "new\n")
    with pytest.raises(SpecError, match=f"{tmp_path.parent}/run.py is not in a project"):
        ladder.write_table(page, "ladder", tmp_path.parent / "run.py", "new\n")


def test_the_whole_table() -> None:
    """Kernels by their rung, then peers. A contender that was not timed on every problem says so."""
    rows = [row("sdpa-flash", 1.0), row("fwd_mma", 0.5), row("fwd_minimal", 2.0), row("sdpa-flash", 1.0, D=128),
            row("fwd_mma", 0.25, D=128), row("eager", 4.0, D=128)]  # fmt: skip
    speed = {D: 4 * 2 * 512 * 512 * D * 1e-12 for D in (64, 128)}  # TFLOP/s of one second
    kernels = {name: registry.get(name) for name in ("fwd_minimal", "fwd_mma")}
    rungs = {name: f"| {kernel.rung} | `{name}`" for name, kernel in kernels.items()}

    def cells(*seconds: float | None) -> str:
        return " | ".join(f"{speed[D] / s:.3g}" if s else "–" for D, s in zip((64, 128), seconds, strict=True))

    assert ladder.ladder_markdown(rows, "sdpa-flash").splitlines() == [
        "| rung | kernel | idea | D = 64 | D = 128 | relative to FlashAttention-2 |",
        "| --- | --- | --- | --- | --- | --- |",
        f"{rungs['fwd_minimal']} (1 of 2 problems) | {kernels['fwd_minimal'].summary} | {cells(2, None)} | 0.50 / – |",
        f"{rungs['fwd_mma']} | {kernels['fwd_mma'].summary} | {cells(0.5, 0.25)} | 2.00 / 4.00 |",
        f"|  | FlashAttention-2 | PyTorch's kernel | {cells(1, 1)} | 1.00 / 1.00 |",
        f"|  | eager (1 of 2 problems) | PyTorch's kernel | {cells(None, 4)} | – / 0.25 |",
        "",
        (
            "TFLOP/s of the forward, float16, geometric means for each D, 2 problems in total (16k tokens, hidden size "
            "2048, S 512 … 16k, with and without causal mask); a GPU, CUDA 13.0; a matrix product reaches 700 in the "
            "same run."
        ),
    ]
