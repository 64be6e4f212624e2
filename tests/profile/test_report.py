"""The report of a profile and of two side by side, from metrics, lines and the IO model."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from project import drawn, printed

from sandbox.core.errors import SandboxError, ToolchainMissing, UnknownKernel
from sandbox.core.source_line import SourceLine
from sandbox.launch import driver
from sandbox.profile import ncu, plot, profiler, report
from sandbox.profile.ncu import HotLine
from sandbox.profile.profiler import Profile, Subject
from sandbox.profile.work import Work
from sandbox.reference import HbmBytes
from sandbox.spec import Problem, Tile

PROBLEM = Problem(1, 12, 1024, 1024, 64, dtype="float16")
SUBJECT = Subject("fwd_mma", PROBLEM, Tile(BLOCK_M=64, BLOCK_N=32), "sm_90a")
WORK = Work(2_000_000_000, HbmBytes({"Q": 1000}, {"O": 500}), HbmBytes({"Q": 1000, "K": 4000}, {"O": 500}))
STALL = "smsp__pcsamp_warps_issue_stalled_"
TIME, READ, SECTORS = "gpu__time_duration.sum", "dram__bytes_read.sum", "lts__t_sectors_srcunit_tex.sum"


def profile(metrics: dict[str, float], *lines: HotLine, work: Work = WORK, **fields: Any) -> Profile:
    made = Profile(dataclasses.replace(SUBJECT, **fields), ncu.Counters(metrics), list(lines), {"device": "a GPU"})
    vars(made)["work"] = work  # cached
    return made


def shown(made: Profile, name: str) -> list[str]:
    """The cells of a measure: its value, and what it is compared with."""
    lines = printed(400, *report.page(made, 120))
    (line,) = [line for line in lines if line.startswith(name)]
    return [cell.strip() for cell in line.removeprefix(name).split("  ") if cell.strip()]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (1e6, "1 MB"),
     (1.234e6, "1.23 MB"), (1e9, "1 GB")],
)  # fmt: skip
def test_bytes(value: float, text: str) -> None:
    assert shown(profile({"dram__bytes_write.sum": value}), "DRAM written")[0] == text


@pytest.mark.parametrize(("value", "text"), [(0, "0.0%"), (0.0994, "9.9%"), (0.1, "10%"), (0.994, "99%")])
def test_shares(value: float, text: str) -> None:
    assert shown(profile({"lts__t_sector_hit_rate.pct": value}), "L2 hits") == [text]


@pytest.mark.parametrize(
    ("read", "served"), [(1000, "100%"), (2000, "75%"), (5000, "0%"), (999, "100%"), (6000, "0%"), (None, None)]
)
def test_what_caches_served(read: float | None, served: str | None) -> None:
    """Of the bytes that the IO model reads more than once; unknown if there are none."""
    metrics = {} if read is None else {READ: read}
    baseline = "compulsory 1 kB; without caches (IO model) 5 kB"
    more = f": caches served {served} of the difference" if served else ""
    assert shown(profile(metrics), "DRAM read")[1] == baseline + more
    once = dataclasses.replace(WORK, model=WORK.least)
    assert shown(profile(metrics, work=once), "DRAM read")[1] == "compulsory 1 kB; without caches (IO model) 1 kB"


def test_baselines() -> None:
    metrics = {TIME: 1e-3, SECTORS: 86, "sm__warps_active.avg.pct_of_peak_sustained_active": 0.119,
               "launch__occupancy_per_block_size": 0.25, "launch__waves_per_multiprocessor": 0.364,
               "device__attribute_multiprocessor_count": 100, "sm__cycles_elapsed.avg.per_second": 1.755e9,
               "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 3,
               "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": 12}  # fmt: skip
    made = profile(metrics)
    assert shown(made, "TFLOP/s") == ["2", "2 GFLOP"]
    assert shown(made, "of the tensor peak") == ["0.3%", "719 TFLOP/s at 1.76 GHz"]
    assert shown(made, "L2 to and from SMs") == [
        "2.75 kB", "IO model 5.5 kB: 0.50 of it (concurrent requests of SMs are merged)"
    ]  # fmt: skip
    assert shown(made, "DRAM written") == ["-", "IO model 500 B (measured: without data still in L2 at the end)"]
    assert shown(made, "occupancy") == ["12%", "at most 25%, 0.36 waves of blocks"]
    assert shown(made, "bank conflicts") == ["3", "25.0% of shared memory's cycles"]
    assert shown(profile(metrics | {"launch__occupancy_per_block_size": 1}), "occupancy")[1].startswith("at most 100%")
    blocks = {"launch__occupancy_per_block_size": 2}  # in older versions a number of warps
    assert shown(profile(metrics | blocks), "occupancy")[1] == "0.36 waves of blocks"
    assert shown(profile({}), "occupancy") == ["-"]
    declared = profile(metrics, work=dataclasses.replace(WORK, declared=True))
    for name, text in (("DRAM read", "5 kB"), ("DRAM written", "500 B"), ("L2 to and from SMs", "5.5 kB")):
        assert shown(declared, name)[1] == f"declared {text}"


def test_stall_reasons() -> None:
    """The six most frequent, with what the warp waits for if it is known."""
    reasons = ("mio_throttle", "barrier", "wait", "new_reason", "membar", "drain", "tex_throttle")
    made = profile({f"{STALL}{reason}": 70.0 - 10 * n for n, reason in enumerate(reasons)})
    text = printed(200, *report.page(made, 120))
    assert text[text.index("Stall reasons by samples") - 1 : -2] == [
        "",
        "Stall reasons by samples",
        " 25%  mio_throttle  waits for room in the queue to shared memory and special functions",
        " 21%  barrier       waits for other warps at a barrier",
        " 18%  wait          waits for the fixed latency of the previous instruction",
        " 14%  new_reason",
        " 11%  membar        waits for a memory fence",
        "7.1%  drain         waits for its last stores before exit",
    ]


def test_the_hottest_lines(tmp_path: Path) -> None:
    """The first eight, with the two most frequent reasons other than that a warp was issued."""
    source = tmp_path / "own.cu"
    source.write_text("\n".join(f"line {n} {'x' * 100}" for n in range(1, 11)))
    lines = [HotLine(SourceLine(str(source), n), 20 - n, {}, 0) for n in range(2, 10)]
    reasons = {"selected": 40, "math": 30, "wait": 5, "barrier": 10}
    first = HotLine(None, 50, reasons, 2048), HotLine(SourceLine(str(source), 1), 38, {"math": 19}, 0)
    text = printed(400, *report.page(profile({f"{STALL}wait": 1}, *first, *lines), 100))
    begin = text.index("Hottest lines")
    assert text[begin - 1] == ""
    assert [row.split() for row in text[begin + 1 : begin + 5]] == [
        ["samples", "line", "code", "reasons", "bank", "conflicts"],
        ["25%", "(no", "line)", "math", "60%,", "barrier", "20%", "2.05", "kB"],
        ["19%", "own.cu:1", "line", "1", "x" * 31, "math", "50%"],
        ["8.8%", "own.cu:2", "line", "2", "x" * 31],
    ]
    assert len(text) == begin + 2 + 8
    narrow = printed(400, *report.page(profile({}, *first, *lines), 80))
    for rows in (narrow, printed(70, *report.page(profile({}, *first, *lines), 80))):  # reasons are folded first
        assert any(f"line 1 {'x' * 17} " in row for row in rows)
    assert not any("nvdisasm" in row for row in (*text, *narrow))


def test_lines_without_samples_need_a_disassembler() -> None:
    conflicts = HotLine(None, 0, {}, 128.0)
    hint = 'source lines need nvdisasm: pip install "attention-sandbox[sass]"'
    assert printed(200, *report.page(profile({f"{STALL}wait": 1}, conflicts), 120))[-1] == hint
    assert hint not in printed(200, *report.page(profile({}, conflicts), 120))


def test_a_comparison() -> None:
    """Stall reasons of both; no change where a value is missing or was 0."""
    a = profile({TIME: 2e-3, READ: 0, "launch__registers_per_thread": 100, f"{STALL}wait": 1, f"{STALL}math": 3})
    b = profile({TIME: 1e-3, READ: 5, f"{STALL}wait": 1, f"{STALL}drain": 1}, version="HEAD")
    rows = {row[:22].strip(): row[22:].split() for row in printed(200, report.comparison(a, b))}
    assert rows["time"] == ["2", "ms", "1", "ms", "-50.0%"]
    assert rows["TFLOP/s"] == ["1", "2", "+100.0%"]
    assert rows["DRAM read"] == ["0", "B", "5", "B"]
    assert rows["registers"] == ["100", "-"]
    assert {name: row for name, row in rows.items() if name.startswith("stalled")} == {
        "stalled: math": ["75%", "-"],
        "stalled: wait": ["25%", "50%", "+100.0%"],
        "stalled: drain": ["-", "50%"],
    }


def test_json() -> None:
    where = SourceLine("/k/own.cu", 3)
    lines = HotLine(where, 5, {"math": 5}, 0.0), HotLine(None, 1, {}, 128.0)
    found = report.as_json(profile({TIME: 1e-3, f"{STALL}wait": 1}, *lines))
    assert json.loads(json.dumps(found["lines"])) == [
        {"file": "/k/own.cu", "line": 3, "samples": 5, "reasons": {"math": 5}, "excess_bytes": 0.0},
        {"file": None, "line": None, "samples": 1, "reasons": {}, "excess_bytes": 128.0},
    ]
    assert found["model_bytes"] == {"read": {"Q": 1000, "K": 4000}, "written": {"O": 500}}
    assert (found["least_bytes"], found["stalls"], found["device"]) == (1500, {"wait": 1.0}, "a GPU")
    assert (found["kernel"], found["arch"], found["version"]) == ("fwd_mma", "sm_90a", "")
    assert (found["measures"]["time"], found["measures"]["DRAM read"]) == (1e-3, None)


def test_a_roofline() -> None:
    """Of profiles with all metrics: measured bytes and those of the IO model, under the highest bandwidth and peak."""
    pytest.importorskip("matplotlib")
    metrics = {TIME: 1e-3, READ: 4e6, "dram__throughput.avg.pct_of_peak_sustained_elapsed": 0.002,
               "launch__sm_count": 100, "sm__cycles_elapsed.avg.per_second": 1.5e9}  # fmt: skip
    a = profile(metrics)
    other = Problem(1, 1, 64, 64, 64, dtype="float16")
    b = profile(metrics | {TIME: 2e-3, "dram__bytes_write.sum": 4e6}, problem=other, arch="sm_80")
    unknown = profile({**metrics, READ: 0})
    lines = drawn(lambda: plot.draw([unknown, a, b], ""))
    assert any(f"'{PROBLEM} on a GPU'" in line for line in lines)
    shown = [line.rpartition("): ")[2] for line in lines if line.startswith("  line")]
    assert shown == [  # 2 TB/s, 614.4 TFLOP/s; 2 GFLOP for 4 MB in 1 ms, and for 8 MB in 2 ms
        "10 307.2 61440; 20 614.4 614.4", "500; 2", "3.6364e+05; 2", "250; 1", "3.6364e+05; 1"
    ]  # fmt: skip
    assert {line.split("'")[1] for line in lines if line.startswith("  text")} == {"614 TFLOP/s", "  2.00 TB/s"}


# ---- profiles


@pytest.mark.parametrize(
    ("arch", "dtype", "each"),
    [("sm_80", "float16", 2048), ("sm_90a", "bfloat16", 4096), ("sm_90a", "float8_e4m3", 8192),
     ("sm_90a", "float32", 256), ("sm_89", "float8_e4m3", 1024), ("sm_120", "float32", 256),
     ("sm_120", "float16", None)],
)  # fmt: skip
def test_the_peak_of_the_tensor_cores(arch: str, dtype: str, each: int | None) -> None:
    """Per cycle and SM; twice as many operations in float8; None on an unknown GPU."""
    metrics = {"launch__sm_count": 10, "sm__cycles_elapsed.avg.per_second": 2e9}
    made = profile(metrics, arch=arch, problem=dataclasses.replace(PROBLEM, dtype=dtype))
    assert made.tensor_peak == (each and pytest.approx(each * 10 * 2e9 * 1e-12))
    for name in metrics:
        less = {other: value for other, value in metrics.items() if other != name}
        assert profile(less, arch=arch, problem=made.subject.problem).tensor_peak is None


def test_speed_is_unknown_without_time_or_products() -> None:
    assert profile({TIME: 2e-3}).tflops == pytest.approx(1)
    assert profile({}).tflops is None
    assert profile({TIME: 2e-3}, work=dataclasses.replace(WORK, flops=0)).tflops is None


def test_labels_of_profiles() -> None:
    tile = str(SUBJECT.tile)
    versions = {"": tile, "HEAD~1": f"HEAD~1 {tile}", "/some/where/other.cu": f"other.cu {tile}"}
    assert {v: dataclasses.replace(SUBJECT, version=v).label for v in versions} == versions


def test_the_subject_on_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is found from every working directory; the tile is the best one for the GPU."""
    monkeypatch.setattr(driver, "device", lambda: SimpleNamespace(arch=(9, 0)))
    asked: list[Any] = []
    monkeypatch.setattr(
        profiler.pipeline, "tile_on", lambda *given, tuned: asked.append((given[0], *given[2:], tuned)) or SUBJECT.tile
    )
    assert profiler.subject("fwd_mma", PROBLEM, None) == dataclasses.replace(SUBJECT, arch="sm_90")
    assert asked == [(("cuda", 0), PROBLEM, None, True)]
    monkeypatch.chdir(tmp_path)
    kernel = profiler.registry.get("fwd_mma")
    (tmp_path / "mine.cu").write_text(kernel.source.read_text())
    monkeypatch.setattr(profiler.listing, "version", lambda kernel, version: kernel)
    assert profiler.subject("fwd_mma", PROBLEM, None, "mine.cu").version == str(tmp_path / "mine.cu")
    assert profiler.subject("fwd_mma", PROBLEM, None, "HEAD").version == "HEAD"
    with pytest.raises(UnknownKernel):
        profiler.subject("fwd_nothing", PROBLEM, None)


def test_a_tool_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: Any, timeout: float, most: int) -> Any:
        raise subprocess.TimeoutExpired(arguments, timeout)

    monkeypatch.setattr(profiler.process, "run", run)
    with pytest.raises(ToolchainMissing, match=r"^ncu did not end within 600 s$"):
        profiler._run(["/opt/ncu", "--version"])


def test_nsight_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of kernels in place of counters; there is no machine code."""
    program = tmp_path / "nsys"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase $1 in stats) echo "Time,Name";; esac\n')
    program.chmod(0o755)
    monkeypatch.setattr(profiler.tools, "find", lambda name: str(program))
    monkeypatch.setattr(profiler.environment, "describe", lambda: {"device": "a GPU"})
    profiler.collect("nsys", SUBJECT, tmp_path / "p")
    with zipfile.ZipFile(tmp_path / "p.zip") as archive:
        assert sorted(archive.namelist()) == ["kernels.csv", "subject.json"]
        assert archive.read("kernels.csv") == b"Time,Name\n"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["profile", "stats"]
    assert calls[1].endswith(f"--force-export=true {tmp_path}/p.nsys-rep")
    with pytest.raises(SandboxError, match="is not a profile of ncu"):
        profiler.read(tmp_path / "p")
