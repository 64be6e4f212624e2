"""The timeline: marks that compile to nothing by default, the recorded steps, and the outputs."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from project import SEED, check_stored, drawn, printed

from sandbox.cli import cli
from sandbox.core import registry
from sandbox.core.errors import SpecError, UnsupportedProblem
from sandbox.engine import pipeline
from sandbox.engine.choose import choose_tile
from sandbox.launch import driver
from sandbox.launch.dlpack import HOST
from sandbox.pages import timeline
from sandbox.spec import Kernel, Problem, Tile
from sandbox.timeline import mark_buffers, plot, record, recording, report, trace
from sandbox.toolchain import nvrtc

PROBLEM = Problem(1, 1, 256, 256, 64, dtype="float16")
_MARK = re.compile(r"TIMELINE\(\w+\);")


def recorded(kernel: Kernel, problem: Problem = PROBLEM, **options) -> record.Timeline:
    return record.record(kernel, problem, choose_tile(kernel, problem, None), HOST, **options)


@pytest.fixture(scope="module")
def mma() -> record.Timeline:
    return recorded(registry.get("fwd_mma"))


def test_a_block_beyond_the_grid() -> None:
    with pytest.raises(UnsupportedProblem, match="block 99 does not exist: the grid has 1 block, number 0"):
        record._blocks(1, [99])
    with pytest.raises(UnsupportedProblem, match="block 2 does not exist: the grid has 2 blocks, numbers 0 to 1"):
        record._blocks(2, [2])


def test_marks_compile_to_nothing_by_default(tmp_path: Path) -> None:
    """The cubin is bitwise equal to that of a copy without marks. One randomly chosen kernel."""
    supported = {
        name: kernel for name, kernel in registry.kernels().items() if not kernel.why_unsupported(PROBLEM, (9, 0))
    }
    names = [name for name, kernel in supported.items() if _MARK.search(kernel.source.read_text())]
    assert {"fwd_mma", "fwd_wgmma", "bwd_mma", "bwd_wgmma"} <= {*names}
    name = random.Random(SEED).choice(names)
    kernel = registry.get(name)
    tile = choose_tile(kernel, PROBLEM, (9, 0))
    text, copy, defines = kernel.source.read_text(), tmp_path / kernel.source.name, kernel.defines(PROBLEM, tile)
    cubins = []
    for version in (text, _MARK.sub("", text)):
        copy.write_text(version)
        cubins.append(nvrtc.compile(copy, name, pipeline.arch_name(kernel, (9, 0)), defines).cubin)
    assert cubins[0] == cubins[1]


@pytest.mark.parametrize("causal", [None, "bottom-right"])
@pytest.mark.sampled(2)
def test_marks_do_not_spill_in_the_hopper_backward(causal: str | None) -> None:
    """Its warps use all registers: an additional or misplaced mark would spill."""
    kernel, problem = registry.get("bwd_wgmma"), Problem(4, 16, 4096, 4096, 128, dtype="float16", causal=causal)
    tile = choose_tile(kernel, problem, (9, 0))
    macros = mark_buffers.macros(
        mark_buffers.steps_of(kernel.source), kernel.grid(problem, tile), kernel.block(tile), ("cuda", 0)
    )
    defines = {**kernel.defines(problem, tile), **macros}
    used = nvrtc.compile(kernel.source, kernel.name, "sm_90a", defines).resources
    assert (used.spill_stores, used.spill_loads) == (0, 0)


def test_marks_are_compiled_in_on_request(tmp_path: Path) -> None:
    kernel = registry.get("fwd_minimal")
    copy = tmp_path / kernel.source.name
    copy.write_text(_marked(kernel.source.read_text()))
    tile = kernel.tiles[0]
    defines = kernel.defines(PROBLEM, tile)
    marks = mark_buffers.macros(mark_buffers.steps_of(copy), (2, 3, 4), kernel.block(tile), ("cuda", 0))
    ptx = [nvrtc.compile(copy, kernel.name, "sm_80", {**defines, **more}).ptx for more in ({}, marks)]
    assert ["%clock" in text for text in ptx] == [False, True]
    assert "sandbox_timeline" in ptx[1]


def _marked(text: str) -> str:
    line = "        __syncthreads();  // every row has used"
    assert line in text
    return text.replace(line, f"        TIMELINE(tile);\n{line}")


def test_one_mark_is_enough_for_a_timeline(tmp_path: Path) -> None:
    kernel = registry.get("fwd_minimal")
    own = dataclasses.replace(kernel, source=tmp_path / kernel.source.name)
    own.source.write_text(_marked(kernel.source.read_text()))
    found = recorded(own, blocks=[1])
    tile = choose_tile(own, PROBLEM, None)
    assert {(track.block, len(track.steps)) for track in found.tracks} == {(1, PROBLEM.Sk // tile.BLOCK_N)}
    assert {step.name for track in found.tracks for step in track.steps} == {"tile"}
    assert len(found.tracks) == tile.BLOCK_M // 32
    with pytest.raises(UnsupportedProblem, match="has no marks"):
        recorded(kernel)


def test_block_numbers_in_a_grid_of_three_dimensions(tmp_path: Path) -> None:
    kernel = registry.get("fwd_minimal")
    own = dataclasses.replace(kernel, source=tmp_path / kernel.source.name)
    own.source.write_text(_marked(kernel.source.read_text()))
    problem = Problem(2, 2, 64, 64, 16, dtype="float16")
    last = math.prod(own.grid(problem, choose_tile(own, problem, None))) - 1
    assert {track.block for track in recorded(own, problem, blocks=[last]).tracks} == {last}


def test_too_many_steps_are_rejected(tmp_path: Path) -> None:
    source = tmp_path / "many.cu"
    source.write_text("\n".join(f"TIMELINE(step_{n});" for n in range(mark_buffers.MOST_STEPS)))
    with pytest.raises(UnsupportedProblem, match="has 16 steps: at most 15, without done, are supported"):
        mark_buffers.steps_of(source)
    source.write_text(source.read_text().replace("step_7", "done"))
    assert mark_buffers.steps_of(source)[0] == "done"


def test_steps_of_a_warp_are_in_the_order_of_the_kernel(mma: record.Timeline) -> None:
    assert mma.unit == "marks"
    assert mma.seconds is None
    assert mma.same is True
    assert [(track.block, track.warp) for track in mma.tracks] == [
        (block, warp) for block in (0, 1) for warp in range(4)
    ]
    step = ["QK", "softmax", "PV"]
    tile = ["wait_load", "load", *step * (mma.tile.BLOCK_N // mma.tile.SUB_N)]
    for track in mma.tracks:
        assert [s.name for s in track.steps] == tile * (PROBLEM.Sk // mma.tile.BLOCK_N) + ["store"]
        assert track.role == "warps 0-3"
        assert all(a.end == b.begin for a, b in zip(track.steps, track.steps[1:], strict=False))


def test_marks_of_a_block_have_distinct_ticks(mma: record.Timeline) -> None:
    for block in (0, 1):
        begins = sorted(step.begin for track in mma.tracks if track.block == block for step in track.steps)
        assert len(begins) == len({*begins})
        assert begins[0] == 0


def test_roles_of_warps() -> None:
    found = recorded(registry.get("fwd_wgmma"), dataclasses.replace(PROBLEM, Sq=64), blocks=[0])
    steps = {role: {step.name for track in found.tracks if track.role == role for step in track.steps} for role in
             {track.role for track in found.tracks}}  # fmt: skip
    assert steps.pop("warp 0") == {"wait_empty", "load"}
    assert steps.pop("warp 1") == {"wait_empty_Q", "load_Q"}
    assert {"wait_barrier", "multiply", "softmax", "store"} <= set.union(*steps.values())


def test_steps_of_a_later_entry_are_excluded(tmp_path: Path) -> None:
    kernel = registry.get("bwd_minimal")
    own = dataclasses.replace(kernel, source=tmp_path / kernel.source.name)
    first, second = (f"    extern __shared__ __align__(16) float smem[];\n    TIMELINE({name});\n" for name in "ab")
    before, _, between, _, after = re.split(r"( *extern __shared__ .*\n)", kernel.source.read_text())
    own.source.write_text(before + first + between + second + after)
    found = recorded(own)
    assert {step.name for track in found.tracks for step in track.steps} == {"a"}
    assert found.same is True


def test_the_last_marks_are_kept_if_there_is_no_room(mma: record.Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 16  # marks of a block
    monkeypatch.setitem(mark_buffers.LENGTH, "cpu", mark_buffers.CLOCKS_A_MARK * room)
    found = recorded(registry.get("fwd_mma"))
    whole = {(track.block, track.warp): [step.name for step in track.steps] for track in mma.tracks}
    for block in (0, 1):
        tracks = [track for track in found.tracks if track.block == block]
        for track in tracks:
            assert [step.name for step in track.steps] == whole[block, track.warp][-len(track.steps) :]
        assert room - 4 <= sum(len(track.steps) for track in tracks) <= room  # the last mark is not a step
        assert max(step.end for track in tracks for step in track.steps) < room
    assert found.lost > 0
    assert any("were overwritten" in text for text in report.remarks(found))


def test_clocks_wrap_at_32_bits() -> None:
    """Two blocks with their own clocks. One clock wraps around, and warp 1 began before warp 0."""

    def buffer(block: int, warp: int, clocks: list[int], nanoseconds: int) -> mark_buffers.MarkBuffer:
        marks = np.array(
            [(step, clock % 2**32) for step, clock in zip((1, 2, 0), clocks, strict=True)], mark_buffers._MARK
        )
        return mark_buffers.MarkBuffer(block, warp, marks, 0, (7 + block, clocks[-1] % 2**32, nanoseconds))

    written = [
        buffer(0, 0, [50, 60, 90], 1040),
        buffer(0, 1, [-50, 20, 150], 1100),
        buffer(3, 0, [5000, 5010, 5030], 1000),
    ]
    found = [*record._tracks(written, ("done", "load", "multiply"), 10**9)]
    assert [(track.block, track.sm) for track in found] == [(0, 7), (0, 7), (3, 10)]
    # block 0 began at 1040 ns - (90 + 50) cycles of 1 ns, block 3 at 1000 ns - 30 cycles
    assert [[step.begin for step in track.steps] for track in found] == [[100, 110], [0, 70], [70, 80]]
    assert [track.steps[-1].end for track in found] == [140, 200, 100]


def test_shares_add_up_and_waits_are_identified(mma: record.Timeline) -> None:
    rows = report.shares(mma)
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert [row.step for row in rows if row.waits] == ["wait_load"]
    (track, longest), *_ = report.longest_waits(mma)
    assert longest.ticks == max(row.longest for row in rows if row.waits)
    assert longest in track.steps


def test_the_trace_event_format(mma: record.Timeline, tmp_path: Path) -> None:
    trace.write(mma, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [e for e in events if e["ph"] == "X"]
    assert len(steps) == sum(len(track.steps) for track in mma.tracks)
    assert {e["pid"] for e in steps} == {0, 1}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"block 0, SM 0", "block 1, SM 0"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in steps)


def test_the_plot_of_a_range(mma: record.Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = plot.draw(mma, tmp_path / "tracks", (0, 40))
    assert [path.suffix for path in paths] == [".png", ".svg"]
    assert "softmax" in paths[1].read_text() or paths[1].stat().st_size > 5000  # text may be drawn as outlines
    with pytest.raises(UnsupportedProblem, match="no warp has a step"):
        plot.draw(mma, tmp_path / "none", (10**6, 10**6 + 1))


def test_stored_report_and_plot() -> None:
    """The whole text of a timeline with two roles, timed and not, and what is drawn of it."""
    pytest.importorskip("matplotlib")
    step = record.Step
    load = tuple(step(name, 10 * n, 10 * n + 4 + n) for n, name in enumerate(("wait_empty", "load") * 90))
    math = tuple(step(name, 7 * n, 7 * n + 7) for n, name in enumerate(("wait_full", "S", "softmax", "O") * 3))
    tracks = (record.Track(0, 0, 3, "load", load, 0), record.Track(0, 4, 3, "math", math, 2),
              record.Track(2, 4, None, "math", math[1:5], 0))  # fmt: skip
    problem, tile = Problem(1, 1, 64, 64, 64), Tile(BLOCK_M=64)
    timed = record.Timeline("k", problem, tile, "GPU", "cycles", 10**9, tracks, 7, (1e-3, 1.25e-3), False)
    marks = dataclasses.replace(timed, unit="marks", rate=None, seconds=None, same=None, tracks=tracks[1:])
    lines: list[str] = []
    for found in (timed, marks):
        lines += printed(100, report.headline(found), report.heading(found), report.shares_table(found))
        lines += [*report.remarks(found), str(plot.shown_until(found)), str(plot.colours(found))]
        lines += drawn(lambda found=found: plot.draw(found, ""))  # type: ignore[misc]
    lines += drawn(lambda: plot.draw(timed, "", (3, 40)))
    check_stored("timeline.txt", lines)


def test_blocks_without_work() -> None:
    """The grid has an upper bound of the blocks that key_lengths need."""
    kernel = registry.get("fwd_latent_wgmma")
    problem = Problem(1, 16, 1, 512, 576, Hk=1, Dv=512, dtype="float16", latent=True, key_lengths=True)
    count = math.prod(kernel.grid(problem, choose_tile(kernel, problem, None)))
    found = recorded(kernel, problem, blocks=[0, count - 1])
    assert {track.block for track in found.tracks} == {0}
    assert f"block {count - 1}: no marks, as no work was assigned" in report.remarks(found)
    with pytest.raises(UnsupportedProblem, match=f"block {count - 1}: no marks, as no work was assigned"):
        recorded(kernel, problem, blocks=[count - 1])


def test_the_order_of_marks_is_not_called_time(mma: record.Timeline) -> None:
    """On the CPU backend ticks are the order of marks; on a GPU they are cycles."""
    page = timeline.page(mma)
    assert "Order of the steps (marks, not time)" in page
    assert "Share of marks by step" in page
    assert not any(text in page for text in ("Time by step", "Share of time", "longest waits"))
    timed = timeline.page(dataclasses.replace(mma, rate=10**9, unit="cycles", seconds=(1e-3, 1e-3)))
    assert all(text in timed for text in ("Time by step", "Share of time", "longest waits"))


def test_the_command_prints_waits_and_tracks(tmp_path: Path) -> None:
    run = lambda *more: CliRunner().invoke(  # noqa: E731
        cli, ["timeline", "fwd_mma", "--shape", "1,1,256,64", "--backend", "cpu", *more]
    )
    shown = run()
    assert shown.exit_code == 0, shown.output
    assert "waits with the most marks" in shown.output
    assert "wait_load" in shown.output
    found = json.loads(run("--json", "--blocks", "1", "--trace", str(tmp_path / "t.json")).stdout)
    assert {track["block"] for track in found["tracks"]} == {1}
    assert found["same"] is True
    assert (tmp_path / "t.json").is_file()
    assert run("--blocks", "7").exit_code == 2
    assert run("--between", "5").exit_code == 2


def test_a_recording_is_shown_without_its_kernel(mma: record.Timeline, tmp_path: Path) -> None:
    path = tmp_path / "mma.json.gz"
    recording.save(mma, path)
    assert recording.load(path) == mma
    page = tmp_path / "mma.html"
    done = CliRunner().invoke(cli, ["timeline", "--show", str(path), "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert report.headline(mma).split(":")[0] in done.output.replace("\n", " ")
    assert page.read_text() == timeline.page(mma)
    for arguments, message in (
        (["fwd_mma", "--show", str(path)], "either a KERNEL"),
        ([], "either a KERNEL"),
        (["--show", __file__], "is not a recording"),
    ):
        done = CliRunner().invoke(cli, ["timeline", *arguments])
        assert done.exit_code != 0
        assert message in f"{done.output} {done.exception}"
    for content in (path.read_bytes()[:-20], gzip.compress(b'{"format": 1}')):
        path.write_bytes(content)
        with pytest.raises(SpecError, match="not a recording"):
            recording.load(path)


@pytest.mark.gpu
def test_marks_cost_little_on_a_gpu() -> None:
    kernel = registry.get("fwd_wgmma")
    if driver.device().arch != (9, 0):
        pytest.skip("fwd_wgmma is of Hopper")
    problem = Problem(4, 16, 4096, 4096, 128, dtype="float16")
    found = record.record(kernel, problem, choose_tile(kernel, problem, (9, 0)), ("cuda", 0))
    assert found.same is True
    assert found.slowdown is not None
    assert found.slowdown < 0.05
    assert found.lost == 0
    assert {"warp 0", "warp 1"} < {track.role for track in found.tracks}
    assert len({track.sm for track in found.tracks}) == 4  # a block stays on its SM
