"""From marks in buffers to steps of warps, and the files of a timeline: numbers computed by hand."""

from __future__ import annotations

import ctypes
import dataclasses
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sandbox.core import registry
from sandbox.core.errors import SpecError, UnsupportedProblem
from sandbox.launch.dlpack import HOST
from sandbox.spec import Kernel, Problem, Tile
from sandbox.timeline import mark_buffers, plot, record, recording, report, trace
from sandbox.timeline.mark_buffers import MarkBuffer, MarkBuffers
from sandbox.timeline.record import Step, Timeline, Track

LOAD = Step("wait_load", 0, 40), Step("QK", 40, 60)
TRACKS = Track(1, 0, 3, "warp 0", LOAD, 0), Track(1, 2, 3, "warp 2", LOAD[1:], 5), Track(4, 0, None, "warp 0", LOAD, 1)
FOUND = Timeline("k", Problem(1, 1, 64, 64, 64), Tile(BLOCK_M=64), "a GPU", "cycles", 2 * 10**9, TRACKS, 8,
                 (1e-3, 1.02e-3), True)  # fmt: skip
MARKS = dataclasses.replace(FOUND, unit="marks", rate=None, seconds=None, same=None)


# ---- what is recorded


@pytest.mark.parametrize(
    ("count", "wanted", "expected"),
    [
        (0, None, []),
        (1, None, [0]),
        (4, None, [0, 1, 2, 3]),
        (10, None, [0, 2, 5, 7]),
        (10, [9, 0, 9], [0, 9]),
        (10, [5, 1, 2, 3, 5], [1, 2, 3, 5]),
    ],
)
def test_blocks(count: int, wanted: list[int] | None, expected: list[int]) -> None:
    assert record._blocks(count, wanted) == expected


def test_blocks_that_cannot_be_recorded() -> None:
    for wanted, message in (
        ([1, 2, 3, 4, 5], "5 blocks cannot be recorded at once: at most 4"),
        ([-1], "block -1 does not exist: the grid has 10 blocks, numbers 0 to 9"),
        ([10], "block 10 does not exist: the grid has 10 blocks, numbers 0 to 9"),
    ):
        with pytest.raises(UnsupportedProblem) as refused:
            record._blocks(10, wanted)
        assert str(refused.value) == message


def test_steps_and_their_macros(tmp_path: Path) -> None:
    """In the source and its headers; `done` is 0."""
    (tmp_path / "own.cuh").write_text("TIMELINE(store); TIMELINE(done);")
    (tmp_path / "timeline.cuh").write_text("#define TIMELINE(name)")
    source = tmp_path / "k.cu"
    source.write_text(
        '#include "own.cuh"\n#include "timeline.cuh"\nTIMELINE(load); // TIMELINE(comment)\nMYTIMELINE(x)'
    )
    steps = mark_buffers.steps_of(source)
    assert steps == ("done", "load", "store")
    assert mark_buffers.macros(steps, (2, 3, 4), (5, 6, 7), ("cuda", 0)) == {
        "TIMELINE_MARKS": 2**22, "TIMELINE_BLOCKS": 4, "TIMELINE_STEPS": 16, "TIMELINE_GRID_X": 2,
        "TIMELINE_GRID_Y": 3, "TIMELINE_GRID_Z": 4, "TIMELINE_BLOCK_X": 5, "TIMELINE_BLOCK_Y": 6,
        "TIMELINE_BLOCK_Z": 7, "TIMELINE_STEP_done": 0, "TIMELINE_STEP_load": 1, "TIMELINE_STEP_store": 2,
    }  # fmt: skip
    source.write_text("\n".join(f"TIMELINE(step_{n});" for n in range(15)))
    assert len(mark_buffers.steps_of(source)) == 16
    source.write_text("no marks")
    with pytest.raises(UnsupportedProblem) as refused:
        mark_buffers.steps_of(source)
    assert str(refused.value) == "k.cu has no marks: add the statement `TIMELINE(name);` where a step begins"


def test_kernels_that_precede_are_launched() -> None:
    """Later entry points have marks of their own: their grids are empty."""
    kernel = registry.get("fwd_wgmma")
    assert [entry.launch_first for entry in kernel.then].count(True) >= 1
    problem, tile = Problem(1, 2, 256, 256, 64, dtype="float16"), kernel.tiles[0]
    alone = record._alone(
        dataclasses.replace(kernel, then=(*kernel.then, dataclasses.replace(kernel.then[0], launch_first=False)))
    )
    assert alone.grid(problem, tile) == kernel.grid(problem, tile)
    grids = [entry.grid(problem, tile) for entry in alone.then]
    assert grids == [*(entry.grid(problem, tile) if entry.launch_first else (0, 0, 0) for entry in kernel.then),
                     (0, 0, 0)]  # fmt: skip


def test_the_inputs_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a backward has the results of our own forward; else the reference's."""
    problem = Problem(1, 2, 32, 48, 16, dtype="float16")
    launched: list[str] = []
    results = {"O": np.zeros((1, 2, 32, 16), np.float16), "LSE": np.zeros((1, 2, 32), np.float32)}

    def launch(kernel: Kernel, tile: Tile, problem: Problem, inputs: Any, device: Any) -> SimpleNamespace:
        launched.append(kernel.computes)
        assert {*inputs} == {"Q", "K", "V"}
        return SimpleNamespace(outputs=results)

    monkeypatch.setattr(record.trial, "launch", launch)
    monkeypatch.setattr(record.pipeline, "arch_of", lambda device: (9, 0))
    monkeypatch.setattr(record.pipeline, "tile_on", lambda device, kernel, problem: kernel.tiles[0])
    forward, backward = registry.get("fwd_minimal"), registry.get("bwd_minimal")
    for device in (HOST, ("cuda", 0)):
        assert {*record._inputs(forward, problem, device)} == {"Q", "K", "V"}
    assert {*record._inputs(backward, problem, HOST)} == {"Q", "K", "V", "dO", "O", "LSE"}
    assert launched == []
    found = record._inputs(backward, problem, ("cuda", 0))
    assert launched == ["forward"]
    assert {*found} == {"Q", "K", "V", "dO", "O", "LSE"}
    assert found["O"] is results["O"]
    assert (found["dO"].shape, found["dO"].dtype) == ((1, 2, 32, 16), np.float16)


# ---- buffers


class Buffers:
    """MarkBuffers of a block of 48 threads, which a kernel would fill: the length of a buffer is 1024 bytes."""

    def __init__(self, patch: pytest.MonkeyPatch, blocks: list[int]):
        patch.setitem(mark_buffers.LENGTH, "cpu", 1024)
        self.memory = (ctypes.c_char * ctypes.sizeof(mark_buffers._DeviceBuffers))()
        function = SimpleNamespace(constant=lambda name: ctypes.addressof(self.memory))
        self.made = MarkBuffers(function, (16, 3, 1), blocks, HOST)  # type: ignore[arg-type]
        self.seen = mark_buffers._DeviceBuffers.from_buffer(self.memory)

    def write(self, block: int, warp: int, marks: dict[int, tuple[int, int]], anchor: tuple[int, int, int]) -> None:
        """`marks`: {index in the buffer in units of 16 clocks: (step, clock)}."""
        of_warp = 2 * block + warp
        clocks = self.made._clocks._host
        for place, (step, clock) in marks.items():
            clocks[of_warp * 256 + 16 * place + step] = clock
        self.made._anchors._host[of_warp] = anchor


def test_marks_of_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their clocks, also across 2^32. Marks that are older than a buffer holds are lost; a warp without
    marks is missing."""
    buffers = Buffers(monkeypatch, [3, 7, 9])
    assert [*buffers.seen.blocks] == [3, 7, 9, 2**32 - 1]
    made = buffers.made
    assert (buffers.seen.high << 32) + buffers.seen.low == made._clocks.address
    assert made._clocks.address % 1024 == 0
    assert made._clocks.nbytes == 5 * 2 * 1024
    buffers.write(0, 0, {0: (2, 100), 1: (1, 50), 2: (0, 200)}, (11, 200, 12345))
    buffers.write(0, 1, {0: (1, 90)}, (0, 0, 0))
    buffers.write(1, 1, {0: (1, 5000), 1: (2, 6000 - 1024), 2: (3, 6000), 3: (1, 6000 - 1023)}, (0, 0, 0))
    buffers.write(2, 0, {0: (1, 2**32 - 10), 1: (2, 20), 2: (3, 2**32 - 5)}, (0, 0, 0))
    found = [*made.read()]
    assert [(b.block, b.warp, b.lost, b.anchor) for b in found] == [
        (3, 0, 0, (11, 200, 12345)), (3, 1, 0, None), (7, 1, 1, None), (9, 0, 0, None)
    ]  # fmt: skip
    assert [[(int(m["step"]), int(m["clock"])) for m in b.marks] for b in found] == [
        [(1, 50), (2, 100), (0, 200)], [(1, 90)], [(1, 4977), (1, 5000), (3, 6000)],
        [(1, 2**32 - 10), (3, 2**32 - 5), (2, 20)],
    ]  # fmt: skip
    made.clear()
    assert [*made.read()] == []
    assert made._anchors._host.tobytes().strip(b"\0") == b""


@pytest.mark.parametrize("begin", [2**32 - 64, 2**32 - 1000, 2**33 - 2048, 5, 2**32])
def test_memory_within_four_gibibytes(begin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels add 32-bit offsets to its address."""
    memory = type("Memory", (), {"pointer": begin})
    asked: list[int] = []
    monkeypatch.setattr(mark_buffers.driver, "DeviceMemory", memory)
    monkeypatch.setattr(memory, "__init__", lambda self, size, gpu: asked.append(size), raising=False)
    shared = mark_buffers._Shared(500, np.dtype("u4"), 64, object())  # type: ignore[arg-type]
    assert shared.nbytes == 2000
    assert shared.address % 64 == 0
    assert begin <= shared.address
    assert shared.address + shared.nbytes <= begin + asked[0]
    assert shared.address >> 32 == (shared.address + 1999) >> 32
    assert asked == [2 * 2000 + 64]
    if begin == 2**32:
        assert shared.address == begin


def buffer(block: int, warp: int, marks: list[tuple[int, int]], anchor: Any = None, lost: int = 0) -> MarkBuffer:
    return MarkBuffer(block, warp, np.array(marks, mark_buffers._MARK), lost, anchor)


NAMES = ("done", "load", "multiply")


def test_marks_without_an_end() -> None:
    """The last step of a warp ends with the last mark of its block, and blocks begin at 0."""
    unit = mark_buffers.CLOCKS_A_MARK
    found = [*record._tracks([buffer(0, 0, [(1, unit), (2, 3 * unit)], lost=2), buffer(0, 1, [(1, 2 * unit),
             (1, 6 * unit)]), buffer(2, 0, [(2, 9 * unit), (1, 10 * unit)])], NAMES, None)]  # fmt: skip
    assert [(t.block, t.warp, t.sm, t.lost) for t in found] == [(0, 0, None, 2), (0, 1, None, 0), (2, 0, None, 0)]
    assert [[(s.name, s.begin, s.end) for s in t.steps] for t in found] == [
        [("load", 0, 2), ("multiply", 2, 5)], [("load", 1, 5), ("load", 5, 5)], [("multiply", 0, 1), ("load", 1, 1)]
    ]  # fmt: skip
    assert [t.role for t in found] == ["warp 0", "warp 1", "warp 0"]
    assert [*record._tracks([buffer(0, 0, [(0, 5)])], NAMES, None)] == []
    assert [*record._tracks([], NAMES, 10**9)] == []


def test_roles_are_sets_of_steps() -> None:
    """Over all blocks; consecutive warps are a range."""
    steps = {name: Step(name, 0, 1) for name in "abc"}
    of_warps = {0: "ab", 1: "c", 2: "ab", 3: "ab", 4: "a", 6: "ab", 7: "c"}
    tracks = [Track(0, warp, None, "", tuple(steps[n] for n in names), 0) for warp, names in of_warps.items()]
    tracks.append(Track(1, 4, None, "", (steps["b"],), 0))
    roles = record._roles(tracks)
    assert roles[1] == roles[7] == "warps 1, 7"
    assert {roles[warp] for warp in (0, 2, 3, 4, 6)} == {"warps 0, 2-4, 6"}


@pytest.mark.parametrize(
    ("clock", "earlier", "ticks"),
    [(5, 3, 2), (3, 5, -2), (0, 2**32 - 1, 1), (2**32 - 1, 0, -1), (2**31 - 1, 0, 2**31 - 1), (2**31, 0, -(2**31))],
)
def test_differences_of_clocks(clock: int, earlier: int, ticks: int) -> None:
    assert record._since(clock, earlier) == ticks


# ---- outputs


def test_a_trace(tmp_path: Path) -> None:
    """In microseconds; on the CPU backend a mark is one."""
    at = tmp_path / "new" / "trace.json"
    trace.write(FOUND, at)
    written = json.loads(at.read_text())
    assert written["otherData"] == {"kernel": "k", "problem": "B1 H1 S64 D64 float32", "tile": "BLOCK_M=64",
                                    "device": "a GPU", "unit": "cycles", "lost": 6}  # fmt: skip
    events = written["traceEvents"]
    assert [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"] == [
        (1, 0, "block 1, SM 3"), (1, 0, "warp 0 (warp 0)"), (1, 2, "warp 2 (warp 2)"), (4, 0, "block 4"),
        (4, 0, "warp 0 (warp 0)"),
    ]  # fmt: skip
    steps = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["cat"], e["args"]) for e in steps[:2]] == [
        ("wait_load", "wait", {"cycles": 40}), ("QK", "work", {"cycles": 20})
    ]  # fmt: skip
    assert [(e["ts"], e["dur"]) for e in steps[:2]] == [(0, pytest.approx(0.02)), (pytest.approx(0.02), 0.01)]
    assert [(e["ts"], e["dur"]) for e in [*trace._events(MARKS)][2:4]] == [(0, 40), (40, 20)]


def test_a_recording(tmp_path: Path) -> None:
    at = tmp_path / "new" / "k.json.gz"
    for found in (FOUND, MARKS):
        recording.save(found, at)
        assert recording.load(at) == found
        first = at.read_bytes()
        recording.save(found, at)
        assert at.read_bytes() == first
    data = json.loads(gzip.decompress(at.read_bytes()))
    at.write_bytes(gzip.compress(json.dumps(data | {"format": data["format"] + 1}).encode()))
    reads = f"has format {data['format'] + 1}, this version reads {data['format']}: record it again"
    with pytest.raises(SpecError, match=reads):
        recording.load(at)


def test_shares_of_roles() -> None:
    """By role in the order of warps, the largest share first; a role without ticks has none."""
    idle = Track(0, 5, None, "idle", (Step("QK", 7, 7),), 0)
    rows = report.shares(dataclasses.replace(FOUND, tracks=(idle, TRACKS[1], TRACKS[0], TRACKS[2])))
    assert [(r.role, r.step, r.waits, r.times, r.share, r.mean, r.longest) for r in rows] == [
        ("warp 0", "wait_load", True, 2, pytest.approx(2 / 3), 40, 40), ("warp 0", "QK", False, 2, pytest.approx(1 / 3),
        20, 20), ("warp 2", "QK", False, 1, 1, 20, 20), ("idle", "QK", False, 1, 0, 0, 0)
    ]  # fmt: skip


def test_remarks() -> None:
    assert report.remarks(FOUND) == [
        "longest waits:",
        "block 1 warp 0: 40 cycles in wait_load, from 0 on",
        "block 4 warp 0: 40 cycles in wait_load, from 0 on",
        "marks cost +2.0%: 1 ms without them, 1.02 ms with them",
        "6 marks were overwritten and are not shown: use a smaller problem",
    ]
    none = dataclasses.replace(MARKS, tracks=(dataclasses.replace(TRACKS[1], lost=0),), same=False)
    assert report.remarks(none) == [
        report.ORDER_ONLY, "WRONG: the results with marks differ from those without"
    ]  # fmt: skip
    many = tuple(Step(f"wait_{n % 7}", n * n, n * n + n) for n in range(9))  # wait_0 and wait_1 twice
    tracks = Track(0, 0, None, "", many, 0), Track(0, 1, None, "", many, 0), Track(1, 0, None, "", many[-1:], 0)
    waits = report.longest_waits(dataclasses.replace(FOUND, tracks=tracks))
    found = [(track.block, track.warp, step.ticks) for track, step in waits]
    assert found == [(0, 0, 8), (1, 0, 8), (0, 0, 7), (0, 0, 6), (0, 0, 5)]


def test_how_much_is_plotted() -> None:
    """At most 160 steps of the busiest warp."""

    def until(*counts: int) -> int:
        tracks = tuple(Track(0, w, None, "", tuple(Step("s", 10 * n, 10 * n + 9) for n in range(count)), 0)
                       for w, count in enumerate(counts))  # fmt: skip
        return plot.shown_until(dataclasses.replace(FOUND, tracks=tracks))

    assert (until(), until(3, 5), until(160, 2), until(161, 2), until(200, 170)) == (0, 49, 1599, 1600, 1600)
