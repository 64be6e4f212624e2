"""Tables of stored rows for pages of Markdown, and rows of kernels that have been renamed since."""

from __future__ import annotations

import json
from pathlib import Path

from sandbox.bench import markdown, rows
from sandbox.bench.rows import Row
from sandbox.bench.timing import Timing
from sandbox.spec import Problem


def row(contender: str, problem: Problem, tflops: float | None, ok: bool | None = True) -> dict[str, object]:
    setting = {"device": "a GPU", "cuda": "13.0", "ceiling_tflops": 700.0}
    seconds = problem.flops / tflops * 1e-12 if tflops else 0.0
    timing = Timing(seconds, seconds, seconds, 10, 0.0) if tflops else None
    kernel = contender if contender.startswith("fwd") else ""
    return Row(contender, kernel, problem, ok, bound=1.0, timing=timing, setting=setting).as_json()


def problem(S: int, D: int = 64, causal: bool = False) -> Problem:
    return Problem(1, 2, S, S, D, dtype="float16", causal="bottom-right" if causal else False)


def test_points_are_relative_to_the_fastest_peer() -> None:
    found = [
        *(row("fwd_x", problem(S, 64, causal), 300) for S in (512, 1024) for causal in (False, True)),
        *(row("sdpa-cudnn", problem(S, 64, causal), 200) for S in (512, 1024) for causal in (False, True)),
        row("fa4", problem(1024, 64, True), 250),
        row("fwd_x", problem(512, 128), 300),  # no peer has a time
    ]
    lines = markdown.points_markdown(found, "fwd_x", ["sdpa-cudnn", "fa4"]).splitlines()
    assert lines[0] == "| `fwd_x` | S = 512 | S = 1k | mean |"
    assert lines[2:4] == ["| D = 64 | 1.50 | 1.50 | 1.500 |", "| D = 64, causal | 1.50 | 1.20 | 1.342 |"]
    assert "fastest of cuDNN, FlashAttention-4 in the same run" in lines[-1]
    assert "all 4 points 1.419; smallest 1.200." in lines[-1]


def test_rows_of_the_chosen_kernel() -> None:
    found = [
        *(row(name, problem(S), 300) for S in (512, 1024) for name in ("fwd_x", "fwd_y", "fa4")),
        row("fwd_x", problem(2048), 300),  # attention chooses fwd_y, which was not measured
    ]
    chosen = markdown.of_chosen(found, lambda p: "fwd_x" if p.Sq == 512 else "fwd_y")
    assert [(r["contender"], r["kernel"], r["Sq"]) for r in chosen] == [
        ("attention", "fwd_x", 512), ("fa4", "", 512), ("attention", "fwd_y", 1024), ("fa4", "", 1024),
    ]  # fmt: skip


def test_problems_have_a_line_each() -> None:
    found = [
        row("fwd_x", problem(512), 300),
        row("sdpa-cudnn", problem(512), 200),
        row("fwd_x", problem(1024), 300),
        row("sdpa-cudnn", problem(1024), None, ok=False),
        row("sdpa-cudnn", problem(2048), None, ok=None),
    ]
    lines = markdown.problems_markdown(found, ["fwd_x", "sdpa-cudnn"]).splitlines()
    assert lines[0] == "| problem | `fwd_x` | cuDNN |"
    assert [line.split("|")[2:4] for line in lines[2:5]] == [
        [" **300** ", " 200 "],
        [" **300** ", " wrong "],
        [" – ", " – "],
    ]
    assert "a matrix product reaches 700 TFLOP/s in float16" in lines[-1]
    assert "| **0.4** |" in markdown.problems_markdown([row("fwd_x", problem(512), 300)], ["fwd_x", "a"], True)


def test_the_whole_table_of_points() -> None:
    found = [
        row("fwd_x", problem(512, 128), 300), row("fa3", problem(512, 128), 400), row("fwd_x", problem(1536), 300),
        row("fa3", problem(1536), 200), row("fwd_x", problem(1024), 300), row("fa3", problem(1024), None, ok=None),
    ]  # fmt: skip
    assert markdown.points_markdown(found, "fwd_x", ["fa3"]).splitlines() == [
        "| `fwd_x` | S = 512 | S = 1536 | mean |",
        "| --- | --- | --- | --- |",
        "| D = 64 | – | 1.50 | 1.500 |",
        "| D = 128 | 0.75 | – | 0.750 |",
        "",
        (
            "Speed of `fwd_x` relative to FlashAttention-3 in the same run. Geometric means: D = 64 1.500, D = 128 "
            "0.750, all 2 points 1.061; smallest 0.750."
        ),
    ]


def test_the_whole_table_of_problems() -> None:
    """Of one contender nothing is bold. A failure is not called wrong."""
    other = Problem(1, 2, 512, 512, 64, dtype="bfloat16")
    failed = row("fa3", problem(1024), None, ok=False) | {"bound": None}
    found = [row("fa3", problem(512), 300), failed, row("fa3", other, 200) | {"ceiling_tflops": 650.4},
             row("fa3", problem(2048), 100) | {"ceiling_tflops": 690.0}]  # fmt: skip
    assert markdown.problems_markdown(found, ["fa3"]).splitlines() == [
        "| problem | FlashAttention-3 |",
        "| --- | --- |",
        "| B1 H2 S512 D64 float16 | 300 |",
        "| B1 H2 S1024 D64 float16 | – |",
        "| B1 H2 S512 D64 bfloat16 | 200 |",
        "| B1 H2 S2048 D64 float16 | 100 |",
        "",
        (
            "TFLOP/s, median of interleaved launches; a GPU, CUDA 13.0; a matrix product reaches 690 … 700 TFLOP/s in "
            "float16 and 650 TFLOP/s in bfloat16."
        ),
    ]
    (line,) = [x for x in markdown.problems_markdown(found, ["fa3", "fwd_x"], True).splitlines() if "bfloat16 |" in x]
    assert line == f"| B1 H2 S512 D64 bfloat16 | **{other.flops / 200 * 1e-6:.1f}** | – |"
    assert markdown.problems_markdown(found, ["fa3"], True).splitlines()[-1].startswith("µs, median")


def test_rows_of_a_kernel_that_was_renamed(tmp_path: Path) -> None:
    old, tile = "_".join(("bwd", "stays")), "BLOCK_M=64"
    stored = [{"contender": f"{old} {tile}", "kernel": old}, {"contender": "sdpa-cudnn", "kernel": ""}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in stored))
    expected = {"contender": f"bwd_wgmma_persistent {tile}", "kernel": "bwd_wgmma_persistent"}
    assert rows.read_rows(file) == [expected, stored[1]]
