"""HTML pages: their content, and their behaviour in a browser."""

from __future__ import annotations

import base64
import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from project import check_stored, digest

from sandbox.bench.rows import Row
from sandbox.bench.timing import Timing
from sandbox.cli import cli
from sandbox.core import registry
from sandbox.core.errors import ToolchainMissing, UnsupportedProblem
from sandbox.core.source_line import SourceLine
from sandbox.disassembly import listing
from sandbox.disassembly.listing import Code
from sandbox.pages import disassembly as disassembly_page
from sandbox.pages import history, render, reports, tables
from sandbox.pages import timeline as timeline_page
from sandbox.spec import Problem, Tile
from sandbox.timeline.record import Step, Timeline, Track
from sandbox.toolchain import disassembly
from sandbox.toolchain.disassembly import Instruction
from sandbox.toolchain.nvrtc import Resources
from sandbox.verify.check import Result
from sandbox.watch.history import Version

pytest.importorskip("jinja2")
PROBLEM, TILE = Problem(1, 1, 64, 64, 64, dtype="float16"), Tile(BLOCK_M=64, BLOCK_N=32)
OLD = ["// <script>alert(1)</script>", "int a = 1;", "mma(a);", "gone();", "store(a);"]
NEW = ["// <script>alert(1)</script>", "int a = 1;", "mma(a);", "store(a);", "more();"]
HEADER = ["#pragma once", 'asm("HMMA");']


class Outline(HTMLParser):
    """Every element with its attributes and its direct text."""

    def __init__(self, page: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_data(self, data: str) -> None:
        if self.elements:
            self.elements[-1][2].append(data)


def made(folder: Path, label: str, lines: list[str], texts: dict[int, list[str]]) -> Code:
    """A kernel's code from {line: opcodes}; instructions of a line with "mma" are inlined from a header."""
    folder.mkdir(exist_ok=True)
    source, header = folder / "own.cu", folder / "own.cuh"
    source.write_text("\n".join(lines))
    header.write_text("\n".join(HEADER))
    found: list[Instruction] = []
    for line, opcodes in texts.items():
        where = (SourceLine(str(source), line),)
        if "mma" in lines[line - 1]:
            where = (SourceLine(str(header), 2), *where)
        for opcode in opcodes:
            found.append(Instruction("own", 16 * len(found), opcode, f"{opcode} R1, R2", where, 10 + len(found)))
    return Code(label, "own", "sass", "sm_90a", PROBLEM, TILE, Resources(40, 0, 0, 0, 0), tuple(found), "own.cu")


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Code, Code]:
    old = made(tmp_path / "old", "before", OLD, {2: ["MOV"], 3: ["HMMA"] * 3, 4: ["BAR"], 5: ["STG.E"]})
    new = made(tmp_path / "new", "now", NEW, {2: ["MOV"], 3: ["HMMA"] * 5, 4: ["STG.E"], 5: ["FADD", "FADD"]})
    return old, new


def timeline() -> Timeline:
    steps = (Step("wait_load", 0, 40), Step("QK", 40, 60), Step("softmax", 60, 100))
    tracks_ = tuple(Track(0, warp, 3, "warps 0-1", steps, 0) for warp in range(2))
    return Timeline("own", PROBLEM, TILE, "a GPU", "cycles", 10**9, tracks_, 8, (1e-3, 1.02e-3), True)


def past() -> list[Version]:
    """Three versions; the second is wrong."""
    texts = ["a\nb\nc", "a\nB < 1\nc", "a\nB < 1\nc\nd"]
    stages = ["ok", "wrong", "ok"]
    return [
        Version(n + 1, "2026-01-01 10:00:00", stages[n] == "ok", stages[n], "", "cpu",
                {"registers": 40.0 + n, "error": 0.5}, {"kernels_cu/own.cu": texts[n]})
        for n in range(3)
    ]  # fmt: skip


def every_page(versions: tuple[Code, Code]) -> dict[str, str]:
    results = [Result("own", f"case {n}", PROBLEM, "cpu", ok=n != 1, error=1e-3, bound=2e-3) for n in range(3)]
    return {
        "code": disassembly_page.page([versions[1]]),
        "diff": disassembly_page.page(versions),
        "history": history.page("own", past()),
        "tracks": timeline_page.page(timeline()),
        "check": reports.check(results),
    }


def test_stored_pages(versions: tuple[Code, Code], tmp_path: Path) -> None:
    """Their whole text, without the styles and scripts that are files."""
    old, new = versions
    spilled = dataclasses.replace(new, resources=Resources(44, 0, 0, 8, 4), instructions=new.instructions * 3)
    more = {
        "samples": disassembly_page.page([new], samples={16: 30, 32: 50, 64: 7}),
        "three": disassembly_page.page([old, new]),
        "spilled": disassembly_page.page([spilled]),
        "order": timeline_page.page(dataclasses.replace(timeline(), rate=None, unit="marks", seconds=None, same=False)),
        "one": history.page("own", past()[:1]),
        "bench": reports.bench([row.as_json() for row in bench_rows()], "sdpa"),
    }
    lines, pages = [], every_page(versions)
    for name, page in {**pages, **more}.items():
        text = re.sub(r"<(style|script)>.*?</\1>|base64,[^\"]*", "", page, flags=re.DOTALL)
        its = [line.strip() for line in text.replace(str(tmp_path), "…").splitlines() if line.strip()]
        lines += [f"---- {name}", *(its if name in pages else [digest(its)])]
    check_stored("pages.txt", lines)


def bench_rows() -> list[Row]:
    setting = {"device": "a GPU", "mode": "events", "commit": "c", "ceiling_tflops": 700.0}
    timing = Timing(1e-5, 0.9e-5, 1.2e-5, 20, 0.01)
    return [
        Row(name, name if name == "own" else "", PROBLEM, True, timing=timing, setting=setting)
        for name in ("own", "sdpa")
    ]


def test_pages_are_self_contained(versions: tuple[Code, Code]) -> None:
    for name, page in every_page(versions).items():
        for tag, attributes, _ in Outline(page).elements:
            for attribute in ("src", "href", "xlink:href", "srcset"):
                address = attributes.get(attribute)
                assert address is None or address.startswith(("#", "data:")), f"{name}: {tag} {address}"
            assert tag not in ("link", "base", "iframe"), name
        assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\s*\(", page), name
        assert "prefers-color-scheme: dark" in page
        assert page.startswith("<!doctype html>")


def test_a_page_is_written_to_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "page.html"
    render.write(path, "\ud800 é")
    assert path.read_text(encoding="utf-8") == r"\ud800 é"


def test_texts_are_escaped_and_not_run(versions: tuple[Code, Code]) -> None:
    page = disassembly_page.page([versions[1]])
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "B &lt; 1" in history.page("own", past())
    assert "</script>" not in str(render._environment().filters["data"]("</script>"))


def rows(page: str) -> tuple[dict[str, dict[str, Any]], list[list[str]]]:
    """({id of a source row: its class, figure and text}, the source rows of each instruction)."""
    source: dict[str, dict[str, Any]] = {}
    instructions = []
    elements = Outline(page).elements
    for n, (tag, attributes, _) in enumerate(elements):
        kind = (attributes.get("class") or "").split()
        if tag == "div" and kind[:1] == ["s"]:
            number, figure, text = ("".join(e[2]).rstrip() for e in elements[n + 1 : n + 4])
            own = {
                "number": number,
                "figure": figure,
                "text": text,
                "change": kind[1:],
                "style": attributes.get("style"),
            }
            source[(attributes["id"] or "")[1:]] = own
        if tag == "div" and kind[:1] == ["i"]:
            instructions.append((attributes["data-l"] or "").split())
    return source, instructions


def test_lines_and_instructions_are_linked(versions: tuple[Code, Code]) -> None:
    source, instructions = rows(disassembly_page.page([versions[1]]))
    texts = [[source[line]["text"] for line in lines] for lines in instructions]
    assert texts == [["int a = 1;"], *[["mma(a);", 'asm("HMMA");']] * 5, ["store(a);"], *[["more();"]] * 2]
    assert [row["figure"] for row in source.values()] == ["", "1", "5", "1", "2", "", ""]
    assert [row["style"] for row in source.values()][2] == "--h:1.00"


def test_heat_is_by_samples_of_a_profile(versions: tuple[Code, Code]) -> None:
    source, _ = rows(disassembly_page.page([versions[1]], samples={0: 10, 16: 20, 7 * 16: 70}))
    assert [row["figure"] for row in source.values()][:5] == ["", "10.0%", "20.0%", "", "70.0%"]
    assert source["4"]["style"] == "--h:1.00"


def test_two_versions_share_unchanged_lines(versions: tuple[Code, Code]) -> None:
    page = disassembly_page.page(versions)
    source, instructions = rows(page)
    own = [row for row in source.values() if row["text"] in {*OLD, *NEW}]
    assert [(row["text"], row["change"], row["figure"]) for row in own[1:]] == [
        ("int a = 1;", [], "1"),
        ("mma(a);", [], "3 → 5"),
        ("gone();", ["remove"], "1 → 0"),
        ("store(a);", [], "1"),
        ("more();", ["add"], "0 → 2"),
    ]
    assert len(instructions) == 6 + 9
    assert instructions[1] == instructions[7]  # the first HMMA of each
    assert page.count("<polyline") == 2


def test_the_history_shows_changes_of_each_version() -> None:
    page = history.page("own", past())
    assert page.index('id="v3"') < page.index('id="v2"') < page.index('id="v1"')
    assert "-b\n" in page
    assert "+d\n" in page
    assert page.count('data-v="2" class="wrong"') == 2  # registers, error
    assert "The first version." in page
    assert "No version has figures yet." in history.page("own", [])


@pytest.mark.parametrize("values", [(40.0, 42.0, 41.0), (0.5, 0.25, 0.4), (7.0, 7000.0, 3000.0)])
def test_a_curve_reaches_from_its_lowest_to_its_highest_value(values: tuple[float, ...]) -> None:
    versions = [dataclasses.replace(v, figures={"registers": value}) for v, value in zip(past(), values, strict=True)]
    (curve,) = history._curves(versions, "cpu")
    low, high = history._HEIGHT - history._EDGE, history._EDGE
    at = {value: point.y for value, point in zip(values, curve["points"], strict=True)}
    assert (at[min(values)], at[max(values)]) == (low, high)
    assert high < at[values[2]] < low
    assert [p.x for p in curve["points"]] == [history._EDGE, history._WIDTH / 2, history._WIDTH - history._EDGE]


def test_conversion_of_terminal_tables() -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("kernel")
    table.add_column("time", justify="right")
    table.add_row("own", Text("12 ms", "bold red"))
    found = tables.of_terminal(table, "times")
    assert [(c.head, c.right) for c in found.columns] == [("kernel", False), ("time", True)]
    assert found.rows == [[tables.Cell("own"), tables.Cell("12 ms", "bad")]]


def test_heads_and_looks_of_terminal_tables() -> None:
    """A line break in a head becomes a blank, after a hyphen nothing. The look of a cell is that of its first word."""
    from rich.table import Table
    from rich.text import Text

    table = Table("TFLOP/s\nfloat16", "sdpa-\nflash", "fwd_\nmma", "")
    later = Text("12 ms slow")
    later.stylize("red", 6)
    both = Text("12 ms slow", "bold")
    both.stylize("green", 0, 2)
    table.add_row(later, both, Text("x", "dim"), "3")
    found = tables.of_terminal(table, "times")
    assert [c.head for c in found.columns] == ["TFLOP/s float16", "sdpa-flash", "fwd_mma", ""]
    assert [cell.look for cell in found.rows[0]] == ["", "good", "faint", ""]
    assert [cell.text for cell in found.rows[0]] == ["12 ms slow", "12 ms slow", "x", "3"]
    assert (found.heading, found.caption, found.sortable) == ("times", "times", True)
    bare = Table("", "", show_header=False)
    bare.add_row("a", "b")
    assert tables.of_terminal(bare, "measures").sortable is False


def test_pictures() -> None:
    """The SVG of two files, as base64; none if there is nothing to draw."""

    def draw(prefix: Path) -> list[Path]:
        paths = [prefix.with_suffix(suffix) for suffix in (".png", ".svg")]
        for path in paths:
            path.write_text(path.suffix)
        return paths

    def refuse(prefix: Path) -> list[Path]:
        raise UnsupportedProblem("there is nothing to plot")

    assert tables.drawn(draw) == f"data:image/svg+xml;base64,{base64.b64encode(b'.svg').decode()}"
    assert tables.drawn(refuse) == ""


def test_curves_of_the_history() -> None:
    """Of the latest version's setting; an instruction count that never changed has none."""
    figures = [{"HMMA": 4.0, "registers": 40.0}, {"registers": 42.0}, {"HMMA": 4.0, "LDG": 1.0},
               {"LDG": 3.0, "error": 1.0}, {}]  # fmt: skip
    versions = [dataclasses.replace(past()[0], number=n, figures=f) for n, f in enumerate(figures)]
    versions.insert(0, dataclasses.replace(versions[1], setting="another", figures={"registers": 7.0}))
    latest = dataclasses.replace(versions[-1], setting="another")
    curves = {c["title"]: c for c in history._curves([*versions, latest], "cpu")}
    assert [*curves] == ["LDG", "error / bound", "registers"]
    assert [(p.number, p.text, p.x) for p in curves["registers"]["points"]] == [(0, "40", 5), (1, "42", 235)]
    assert [(p.x, p.y) for p in curves["error / bound"]["points"]] == [(5, 43)]
    assert curves["LDG"]["line"] == "5.0,43.0 235.0,5.0"
    assert [curves["LDG"][name] for name in ("low", "high", "last")] == ["1", "3", "3"]
    page = history.page("own", [*versions, latest])
    assert "7 versions; curves: cpu" in page
    assert "1 version;" in history.page("own", versions[1:2])


def test_changes_of_files_that_come_and_go() -> None:
    before, after = {"a.cu": "1\n2\n", "gone.cuh": "x"}, {"a.cu": "1\n3\n", "new.cuh": "y"}
    assert [*history._changes(None, after)] == []
    assert [*history._changes(after, after)] == []
    assert [*history._changes(before, after)] == [
        ("head", "a.cu"), ("head", "@@ -1,2 +1,2 @@"), ("", " 1"), ("remove", "-2"), ("add", "+3"),
        ("head", "gone.cuh"), ("head", "@@ -1 +0,0 @@"), ("remove", "-x"),
        ("head", "new.cuh"), ("head", "@@ -0,0 +1 @@"), ("add", "+y"),
    ]  # fmt: skip


def test_curves_of_live_registers() -> None:
    """The maximum of each of at most a thousand sections; the highest of all versions reaches the top."""

    def points(live: list[int | None], most: int) -> list[tuple[float, float]]:
        instructions = tuple(Instruction("k", 16 * n, "NOP", "NOP", (), count) for n, count in enumerate(live))
        code = Code("", "k", "sass", "sm_90a", PROBLEM, TILE, Resources(40, 0, 0, 0, 0), instructions, "k.cu")
        shown = [point.split(",") for point in disassembly_page._curve(code, most).split()]
        return [(float(x), float(y)) for x, y in shown]

    assert points([0, 10, None], 10) == [(0, 58), (500, 2), (1000, 58)]
    assert points([5], 10) == [(0, 30)]
    assert points([], 10) == []
    assert len(points([1] * 1000, 1)) == 1000
    long = points([1, 5, 2] * 500 + [7], 10)
    assert len(long) == 751
    assert long[0] == (0, 30)
    assert long[1][0] == pytest.approx(1000 / 750, abs=0.05)
    assert long[-1] == (1000, 18.8)


def test_lines_of_other_headers(tmp_path: Path) -> None:
    """Only those with code, without text where the file is shorter or missing."""
    (tmp_path / "own.cu").write_text("first\nsecond")
    (tmp_path / "cuda_fp16.hpp").write_text("one\ntwo\nthree")
    places = [("own.cu", 2), ("cuda_fp16.hpp", 3), ("cuda_fp16.hpp", 2), ("cuda_fp16.hpp", 4), ("missing.cuh", 5)]
    instructions = tuple(
        Instruction("own", 16 * n, "FADD", "FADD R1", (SourceLine(str(tmp_path / name), line),), None)
        for n, (name, line) in enumerate(places)
    )
    code = Code("", "own", "sass", "sm_90a", PROBLEM, TILE, Resources(40, 0, 0, 0, 0), instructions, "own.cu")
    assert disassembly_page._texts(code, [code]) == {
        "own.cu": {1: "first", 2: "second"}, "cuda_fp16.hpp": {2: "two", 3: "three", 4: ""}, "missing.cuh": {5: ""}
    }  # fmt: skip
    page = disassembly_page.page([code])
    assert "<polyline" not in page


def test_two_versions_whose_source_has_another_name(versions: tuple[Code, Code], tmp_path: Path) -> None:
    """They share the unchanged lines."""
    old = made(tmp_path / "old", "before", OLD, {2: ["MOV"], 5: ["STG.E"]})
    (tmp_path / "old" / "own.cu").rename(tmp_path / "old" / "former.cu")
    moved = [
        dataclasses.replace(
            i, where=tuple(SourceLine(at.file.replace("own.cu", "former.cu"), at.line) for at in i.where)
        )
        for i in old.instructions
    ]
    old = dataclasses.replace(old, source="former.cu", instructions=tuple(moved))
    source, instructions = rows(disassembly_page.page([old, versions[1]]))
    assert [(row["text"], row["change"]) for row in source.values() if row["text"] in OLD[1:]] == [
        ("int a = 1;", []), ("mma(a);", []), ("gone();", ["remove"]), ("store(a);", [])
    ]  # fmt: skip
    assert [source[lines[0]]["text"] for lines in instructions[:2]] == ["int a = 1;", "store(a);"]


def test_failures_come_first(versions: tuple[Code, Code]) -> None:
    page = every_page(versions)["check"]
    assert page.index("Failures") < page.index('">case 1<') < page.index('">case 0<')


def test_the_error_without_jinja2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    render._environment.cache_clear()
    with pytest.raises(ToolchainMissing, match=r"attention-sandbox\[html\]"):
        history.page("own", [])
    render._environment.cache_clear()


def test_commands_write_pages(tmp_path: Path) -> None:
    if not disassembly.available():
        pytest.skip("no nvdisasm")
    place = tmp_path / "page.html"
    done = CliRunner().invoke(cli, ["sass", "fwd_minimal", "--arch", "sm_80", "--html", str(place)])
    assert done.exit_code == 0, done.output
    assert "fwd_minimal: machine code for sm_80" in place.read_text()
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(cli, ["watch", "fwd_minimal", "--html", str(tmp_path / "file" / "page.html")])
    assert done.exit_code == 2  # before any work is done
    assert "page.html" in done.output


def test_the_page_of_bench(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    setting = {"device": "a GPU", "cuda": "13.0", "mode": "events", "ceiling_tflops": 700.0}
    rows = []
    for S in (512, 1024, 2048):
        problem = Problem(4, 2, S, S, 64, dtype="float16")
        for name, kernel, tflops in (("fwd_mma", "fwd_mma", S / 4), ("sdpa-flash", "", 200)):
            seconds = problem.flops / tflops * 1e-12
            timing = Timing(seconds, seconds, seconds, 10, 0.0)
            rows.append(Row(name, kernel, problem, True, timing=timing, setting=setting).as_json())
    page = reports.bench(rows, None)
    assert page.count("<tr>") - 1 == 3
    assert "512 " in page
    assert page.count('src="data:image/svg+xml;base64,') == 1


# ---- in a browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no playwright: pip install attention-sandbox[browser]"
    )
    if not CHROMIUM:
        pytest.skip("no Chromium on PATH")
    with playwright.sync_playwright() as started:
        folder = tmp_path_factory.mktemp("chromium")
        context = started.chromium.launch_persistent_context(
            folder, executable_path=CHROMIUM, headless=True, args=FLAGS, viewport={"width": 1400, "height": 800}
        )
        yield context
        context.close()


def opened(browser: Any, place: Path, page: str) -> Any:
    """The page in a tab. An error in its script fails the test."""
    place.write_text(page)
    tab = browser.new_page()
    tab.on("pageerror", lambda error: pytest.fail(f"{place.name}: {error}"))
    tab.on("request", lambda request: request.url.startswith(("file:", "data:")) or pytest.fail(request.url))
    tab.goto(place.as_uri())
    return tab


def lit(tab: Any) -> list[str]:
    return [text.strip() for text in tab.locator(".lit code").all_text_contents()]


def test_hovering_highlights_lines_and_instructions(browser: Any, versions: tuple[Code, Code], tmp_path: Path) -> None:
    tab = opened(browser, tmp_path / "code.html", disassembly_page.page([versions[1]]))
    tab.hover("text=mma(a);")
    assert lit(tab) == ["HMMA R1, R2"] * 5
    assert tab.locator(".from code").all_text_contents() == ["mma(a);"]
    assert tab.locator("#status").text_content() == "own.cu:3: 5 instructions, at most 15 registers live"
    tab.hover("text=STG.E R1, R2")
    assert lit(tab)[:1] == ["store(a);"]
    assert "from own.cu:4; 16 registers live" in tab.locator("#status").text_content()
    tab.hover(".i >> nth=1")
    assert tab.locator("summary.lit").count() == 1  # the header is folded; its summary is highlighted instead
    tab.close()


def test_keyboard_navigation(browser: Any, versions: tuple[Code, Code], tmp_path: Path) -> None:
    tab = opened(browser, tmp_path / "diff.html", disassembly_page.page(versions))
    focused = "document.activeElement.querySelector('code').textContent"
    tab.locator(".s[tabindex='0']").focus()
    assert tab.evaluate(focused) == "gone();"  # the initial position is the first change
    tab.keyboard.press("ArrowUp")
    assert tab.evaluate(focused) == "mma(a);"
    assert lit(tab).count("HMMA R1, R2") == 3 + 5
    assert tab.locator("#status").text_content().startswith("own.cu:3: 3 → 5 instructions")
    tab.keyboard.press("Enter")
    assert tab.evaluate(focused) == "HMMA R1, R2"
    tab.keyboard.press("Escape")
    assert lit(tab) == []
    assert tab.locator("section[aria-label]").count() == 3
    tab.close()


def test_a_page_opens_at_the_hottest_line(browser: Any, tmp_path: Path) -> None:
    lines = [f"int x{n};" for n in range(300)]
    found = made(tmp_path / "long", "now", lines, {n: ["MOV"] * (90 if n == 200 else 2) for n in range(1, 300)})
    tab = opened(browser, tmp_path / "long.html", disassembly_page.page([found]))
    for row in (".s:has(code:text-is('int x199;'))", ".i >> nth=398"):  # and its first instruction
        assert 0 < tab.locator(row).bounding_box()["y"] < 800, row
    tab.close()


def test_a_click_on_a_point_opens_the_version(browser: Any, tmp_path: Path) -> None:
    tab = opened(browser, tmp_path / "history.html", history.page("own", past()))
    assert not tab.locator("#v2 pre").is_visible()
    tab.get_by_label("version 2: 41").click()
    assert tab.locator("#v2 pre").is_visible()
    assert "B < 1" in tab.locator("#v2 .add").text_content()
    assert tab.evaluate("document.activeElement.closest('details').id") == "v2"
    tab.close()


def test_sorting_by_a_column(browser: Any, versions: tuple[Code, Code], tmp_path: Path) -> None:
    tab = opened(browser, tmp_path / "check.html", every_page(versions)["check"])
    first = "tbody tr:first-child td:nth-child(2)"
    assert tab.text_content(first) == "case 1"
    tab.get_by_role("button", name="case").click()
    assert tab.text_content(first) == "case 0"
    assert tab.locator("th[aria-sort='ascending']").count() == 1
    tab.close()


def test_zooming_of_the_tracks(browser: Any, tmp_path: Path) -> None:
    tab = opened(browser, tmp_path / "tracks.html", timeline_page.page(timeline()))
    box = tab.locator("canvas").bounding_box()
    tab.mouse.move(box["x"] + 130 + (box["width"] - 130) / 2, box["y"] + 10)
    assert tab.locator("#status").text_content() == "block 0 (SM 3) warp 0: QK, 20 cycles from 40 on"
    tab.locator("canvas").focus()
    tab.keyboard.press("+")
    assert tab.locator("#status").text_content() == "from 20 to 80 cycles"
    tab.close()


def test_contrast_of_text(browser: Any, versions: tuple[Code, Code], tmp_path: Path) -> None:
    """A contrast of at least 4.5 between text and background, light and dark (WCAG 1.4.3)."""
    ratio = """([ink, paper]) => {
      const luminance = name => {
        const probe = document.createElement("span");
        probe.style.color = `var(${name})`;
        document.body.append(probe);
        const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255);
        const [r, g, b] = parts.map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const [a, b] = [luminance(ink), luminance(paper)].sort((x, y) => y - x);
      return (a + 0.05) / (b + 0.05);
    }"""
    tab = opened(browser, tmp_path / "code.html", disassembly_page.page(versions))
    pairs = [
        (ink, paper) for ink in ("--ink", "--faint", "--link", "--good", "--bad") for paper in ("--paper", "--raised")
    ]
    pairs += [("--ink", paper) for paper in ("--lit", "--add", "--remove", "--hot")]
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        low = {(scheme, *pair): found for pair in pairs if (found := tab.evaluate(ratio, [*pair])) < 4.5}
        assert low == {}
    tab.close()


def test_a_large_page_loads_quickly(browser: Any, tmp_path: Path) -> None:
    """fwd_wgmma's machine code: under 3 MB, loaded within a second (best of three attempts)."""
    if not disassembly.available():
        pytest.skip("no nvdisasm")
    problem = dataclasses.replace(PROBLEM, Sq=256, Sk=256)  # a variant that other tests also compile
    page = disassembly_page.page([listing.translate(registry.get("fwd_wgmma"), "sass", problem, arch="sm_90a")])
    assert len(page.encode()) < 3e6
    tab = opened(browser, tmp_path / "large.html", page)
    times = []
    for _ in range(3):
        tab.reload()
        times.append(tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
    assert min(times) < 1000, times
    if folder := os.environ.get("SANDBOX_SCREENSHOTS"):  # for manual inspection
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            tab.hover(".s[style] >> nth=20")
            tab.screenshot(path=Path(folder) / f"code-{scheme}.png")
    tab.close()
