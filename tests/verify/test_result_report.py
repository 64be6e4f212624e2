"""Results as text: numbers, verdicts, sentences, and tables that are too wide for the terminal."""

from __future__ import annotations

import math
from typing import Any

import pytest
from project import printed
from rich.table import Table

from sandbox.core.problem import Problem
from sandbox.core.tile import Tile
from sandbox.toolchain.nvrtc import Resources
from sandbox.verify import report
from sandbox.verify.cases import GIVEN
from sandbox.verify.check import Result
from sandbox.verify.error_map import ErrorMap

PROBLEM = Problem(1, 1, 1, 1, 16)


def result(ok: bool | None = True, **fields: Any) -> Result:
    return Result(**{"kernel": "k", "case": "one", "problem": PROBLEM, "backend": "cpu", "ok": ok, **fields})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9994e-3, "999 µs"), (0.9996e-3, "1 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (999.4, "999 s"),
     (1e-9, "0.001 µs"), (999.6, "1000 s")],
)  # fmt: skip
def test_units_of_times(seconds: float, text: str) -> None:
    assert report.si_time(seconds) == text


@pytest.mark.parametrize(("nbytes", "text"), [(None, "-"), (0, "0 KiB"), (1024, "1 KiB"), (232448, "227 KiB")])
def test_bytes(nbytes: int | None, text: str) -> None:
    assert report.kib(nbytes) == text


@pytest.mark.parametrize(
    ("error", "bound", "text"),
    [
        (1e-3, 2e-3, "1.0e-3 <= 2.0e-3"),
        (2e-3, 2e-3, "2.0e-3 <= 2.0e-3"),
        (2.1e-3, 2e-3, "2.1e-3 > 2.0e-3"),
        (1e-12, 3e12, "1.0e-12 <= 3.0e+12"),
        (1e5, 0.0, "1.0e+5 > 0.0e+0"),
        (math.inf, 1.0, "inf > 1.0e+0"),
        (math.nan, 1.0, "nan > 1.0e+0"),
        (None, 1.0, "-"),
        (1.0, None, "-"),
    ],
)
def test_error_and_bound(error: float | None, bound: float | None, text: str) -> None:
    assert report.errors_shown(result(error=error, bound=bound)) == text


@pytest.mark.parametrize(
    ("ok", "error", "text"),
    [(True, 0.0, "ok"), (False, 0.0, "WRONG"), (False, None, "FAIL"), (None, None, "skip"), (None, 1.0, "skip")],
)
def test_verdicts(ok: bool | None, error: float | None, text: str) -> None:
    assert report.verdict(result(ok, error=error)).plain == text


@pytest.mark.parametrize(
    ("resources", "lost", "text"),
    [
        (None, 0, "-"),
        (Resources(40, 0, 0, 0, 0), 0, "40"),
        (Resources(40, 0, 0, 4, 8), 12, "40 +12"),
        (Resources(40, 0, 16, 4, 8), 12, "40 +12"),  # the stack has the spilled registers
        (Resources(40, 0, 16, 0, 0), 16, "40 +16"),
    ],
)
def test_registers(resources: Resources | None, lost: int, text: str) -> None:
    assert report.registers(resources).plain == text
    assert report.slow(resources) == lost


def test_columns_of_a_table() -> None:
    shown = report.table("name", "count", right=["count"], caption="a caption")
    shown.add_row("one", "7")
    shown.add_row("another", "1000")
    assert printed(40, shown) == ["name     count", "one          7", "another   1000", "a caption"]


# ---- tables in parts


def wide(first: str = "problem 1") -> Table:
    """Columns of 9, 4, 6 and 5 characters."""
    shown = Table(box=None, pad_edge=False, caption="below")
    shown.add_column("problem")
    for name in ("aaaa", "b", "two\nlines"):
        shown.add_column(name, justify="right", no_wrap=name == "b")
    shown.add_row(first, "1", "222222", "3")
    shown.add_row("", "", "4", "")
    return shown


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (30, [["aaaa", "b", "two\nlines"]]),  # 9 + 2 + 4 + 2 + 6 + 2 + 5
        (29, [["aaaa", "b"], ["two\nlines"]]),
        (23, [["aaaa", "b"], ["two\nlines"]]),
        (22, [["aaaa"], ["b"], ["two\nlines"]]),
        (13, [["aaaa"], ["b"], ["two\nlines"]]),
        (1, [["aaaa"], ["b"], ["two\nlines"]]),
    ],
)
def test_as_many_columns_as_fit(width: int, columns: list[list[str]]) -> None:
    parts = report.in_parts(wide(), width)
    assert [[column.header for column in part.columns] for part in parts] == [["problem", *names] for names in columns]
    for part in parts:
        assert [*part.columns[0].cells] == ["problem 1", ""]
    assert [column.justify for column in parts[0].columns] == ["left", "right", "right", "right"][: len(columns[0]) + 1]
    cells = [[*column.cells] for part in parts for column in part.columns[1:]]
    assert cells == [["1", ""], ["222222", "4"], ["3", ""]]


def test_the_first_column_has_two_thirds_of_the_width() -> None:
    first, *_ = report.in_parts(wide("a problem with many sizes"), 21)
    assert first.columns[0].min_width == 14
    assert printed(21, first)[1:] == ["a problem with      1", "many sizes", ""]
    assert [len(part.columns) for part in report.in_parts(wide("a problem with many sizes"), 21)] == [2, 2, 2]


def test_a_table_of_one_column_is_not_divided() -> None:
    one = report.table("problem")
    one.add_row("a problem with many sizes")
    assert report.in_parts(one, 10) == [one]


# ---- sentences


def where(text: str) -> ErrorMap:
    return ErrorMap("O", 1, 1, (0,), (0,), (), text, 1, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"ok": True, "message": "a remark"}, "a remark"),
        ({"ok": True, "error": 1.0, "message": "a remark"}, "a remark"),
        ({"message": "it stops"}, "it stops"),
        ({"error": 0.5, "bound": 0.25, "tensor": "O"}, "O error 5.0e-1 against a bound of 2.5e-1"),
        (
            {"error": 0.5, "bound": 0.25, "tensor": "O", "lse_excess": 0.0, "message": "also"},
            "O error 5.0e-1 against a bound of 2.5e-1; LSE ok; also",
        ),
        (
            {"error": 0.5, "bound": 0.25, "tensor": "O", "lse_excess": 0.125},
            "O error 5.0e-1 against a bound of 2.5e-1; LSE exceeds its bound by 1.2e-1",
        ),
        (
            {"error": 0.5, "bound": 0.25, "tensor": "dQ", "cause": "a cause", "where": where("everywhere")},
            "dQ error 5.0e-1 against a bound of 2.5e-1\na cause\neverywhere",
        ),
        (
            {"error": 0.5, "bound": 0.25, "tensor": "dQ", "where": where("everywhere")},
            "dQ error 5.0e-1 against a bound of 2.5e-1\neverywhere",
        ),
    ],
)
def test_the_reason_of_a_result(fields: dict[str, Any], text: str) -> None:
    assert report.reason(result(**{"ok": False, **fields})) == text


@pytest.mark.parametrize(
    ("count", "names"),
    [(1, "c0"), (4, "c0, c1, c2, c3"), (5, "c0, c1, c2, c3 and 1 more"), (7, "c0, c1, c2, c3 and 3 more")],
)
def test_cases_with_the_same_failure(count: int, names: str) -> None:
    same = [result(False, case=f"c{n}", message="k: it stops") for n in range(count)]
    (text,) = report.failures([*same, result()])
    assert text.plain == f"FAIL k on {names} [cpu]: it stops"
    assert report.counts([*same, result(), result(None)]) == (
        f"1 ok, {count} wrong or failed ({names}), 1 not supported"
    )


def test_failures_and_notes() -> None:
    found = [
        result(False, message="one"),
        result(True, message="a remark"),
        result(None, case=GIVEN, message="k: no such thing"),
        result(False, kernel="other", message="one"),
        result(False, error=1.0, bound=0.5, tensor="O"),
        result(False, case="two", message="one"),
    ]
    assert [text.plain for text in report.failures(found)] == [
        "FAIL k on one, two [cpu]: one",
        "note k on one [cpu]: a remark",
        f"note k on {PROBLEM} [cpu]: no such thing",
        "FAIL other on one [cpu]: one",
        "WRONG k on one [cpu]: O error 1.0e+0 against a bound of 5.0e-1",
    ]
    assert [*report.failures([result()])] == []


def test_counts_of_correct_cases() -> None:
    assert report.counts([]) == "0 ok, 0 wrong or failed, 0 not supported"
    assert report.counts([result(), result(), result(None)]) == "2 ok, 0 wrong or failed, 1 not supported"


def test_hints() -> None:
    """One for each kernel."""
    found = [result(False, sanitize=True), result(False, sanitize=True), result(False, kernel="other")]
    (text,) = report.hints(found)
    said = "sanitize k --backend cpu looks for races, missing waits, accesses out of bounds, by line"
    assert text.plain == f"hint {said}"


@pytest.mark.parametrize(
    ("fields", "notes"),
    [
        ([{"arch": "sm_80"}, {"arch": "sm_90a"}, {"arch": "sm_80"}], ["sm_80, sm_90a"]),
        ([{"arch": "sm_80", "backend": "cuda"}, {}], []),
        ([{"resources": Resources(40, 0, 0, 4, 0)}], [report.SLOW]),
        ([{"resources": Resources(40, 0, 0, 0, 0)}], []),
    ],
)
def test_notes_below_the_table(fields: list[dict[str, Any]], notes: list[str]) -> None:
    found = [text.plain for text in report.notes([result(**each) for each in fields])]
    expected = [
        note if note == report.SLOW else f"cpu: times of an emulation; regs and smem of NVRTC's code for {note}"
        for note in notes
    ]
    assert found == expected


# ---- the table of results

FULL: dict[str, Any] = {
    "tile": Tile(BLOCK_M=64), "arch": "sm_80", "compile_seconds": 0.2, "resources": Resources(40, 0, 0, 0, 0),
    "smem": 2048, "error": 1e-3, "bound": 2e-3, "seconds": 0.003, "tflops": 12.345,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "cells"),
    [
        ({"backend": "cuda"}, ["40", "2 KiB", "200 ms", "1.0e-3 <= 2.0e-3", "3 ms", "12.35"]),
        ({"tflops": None}, ["40", "2 KiB", "200 ms", "1.0e-3 <= 2.0e-3", "3 ms", "emulated"]),
        ({"tflops": None, "backend": "cuda"}, ["40", "2 KiB", "200 ms", "1.0e-3 <= 2.0e-3", "3 ms", "-"]),
        ({"tflops": None, "seconds": None, "cached": True}, ["40", "2 KiB", "cached", "1.0e-3 <= 2.0e-3", "-", "-"]),
        (
            {"resources": None, "smem": None, "compile_seconds": None},
            ["-", "-", "-", "1.0e-3 <= 2.0e-3", "3 ms", "12.35"],
        ),
    ],
)
def test_cells_of_a_result(fields: dict[str, Any], cells: list[str]) -> None:
    shown = report.results_table([result(**{**FULL, **fields})], report.WIDE)
    assert [str(column) for (column,) in (c.cells for c in shown.columns)] == ["k", "one", str(PROBLEM), *cells, "ok"]
    shown = report.results_table([result(**{**FULL, **fields})], report.WIDE - 1)
    regs, smem, compiling, error, time, speed = cells
    assert [str(column) for (column,) in (c.cells for c in shown.columns)] == [
        f"k one\n{PROBLEM}", f"{regs}\n{smem}", compiling, error.replace(" <=", "\n<="), f"{time}\n{speed}", "ok",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "width", "widths"),
    [
        ("one", 200, [6, 4, len(str(PROBLEM))]),  # at least the title: later lines have none
        ("n" * 30, 200, [6, 24, len(str(PROBLEM))]),  # at most 24
        ("one", 100, [len(str(PROBLEM))]),
        ("n" * 98, 100, [100 - (9 + 7 + 9 + 8) - 5 - 2 * 5]),
        ("n" * 98, 10, [1]),
    ],
)
def test_columns_are_wide_enough_for_expected_results(case: str, width: int, widths: list[int]) -> None:
    shown = report.results_table([result(case="a")], width, expected=[result(case=case)])
    assert [column.min_width for column in shown.columns][: len(widths)] == widths
    assert shown.columns[-2].min_width == 8
    assert report.results_table([result()], width).columns[-2].min_width is None
    assert not report.results_table([result()], width, head=False).show_header
