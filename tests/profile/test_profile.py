"""Profiling: the command line, parsing of Nsight Compute's pages, and the report. All numbers are invented."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from project import check_stored, drawn, printed

from sandbox.bench import environment
from sandbox.cli import cli
from sandbox.core import registry, source_line
from sandbox.core.errors import GpuUnavailable, ToolchainMissing, UnsupportedProblem
from sandbox.core.source_line import SourceLine
from sandbox.engine import pipeline
from sandbox.launch import driver
from sandbox.profile import ncu, profiler
from sandbox.profile import plot as profile_plot
from sandbox.profile import report as profile_report
from sandbox.profile.profiler import Profile, Subject
from sandbox.spec import Problem, Tile
from sandbox.toolchain import disassembly

PROBLEM = Problem(1, 12, 1024, 1024, 64, dtype="float16")
TILE = Tile(BLOCK_M=128, BLOCK_N=128, SUB_N=32, WARPS=4, MIN_BLOCKS=2)
SUBJECT = Subject("fwd_mma", PROBLEM, TILE, "sm_90a")
OTHER_VERSION = r"p\.zip is not a profile of ncu by this version of this package: profile again"
METRICS = {  # name: (unit, value)
    "gpu__time_duration.sum": ("nsecond", "27,000"),
    "dram__bytes_read.sum": ("byte", "4,800,000"),
    "dram__bytes_write.sum": ("byte", "100,000"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "5.5"),
    "lts__t_sectors_srcunit_tex.sum": ("sector", "890,000"),
    "lts__t_sector_hit_rate.pct": ("%", "88.5"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": ("", "1,000,000"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": ("", "15,000"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": ("", "5,000"),
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": ("%", "41.0"),
    "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active": ("%", "20.5"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "11.9"),
    "sm__cycles_elapsed.avg.per_second": ("cycle/second", "1,755,000,000"),
    "device__attribute_multiprocessor_count": ("", "132"),
    "launch__registers_per_thread": ("register/thread", "240"),
    "launch__waves_per_multiprocessor": ("", "0.36"),
    "smsp__pcsamp_warps_issue_stalled_long_scoreboard": ("", "100"),
    "smsp__pcsamp_warps_issue_stalled_math_pipe_throttle": ("", "300"),
    "smsp__pcsamp_warps_issue_stalled_math_pipe_throttle_not_issued": ("", "290"),
    "smsp__pcsamp_warps_issue_stalled_selected": ("", "500"),
    "smsp__pcsamp_warps_issue_stalled_sleeping": ("", "0"),
    "launch__func_cache_config": ("", "CachePreferNone"),
}


def raw_page(metrics: dict[str, tuple[str, str]] | None = None, kernel: str = "fwd_mma") -> str:
    """Output of `ncu --import … --page raw --csv --print-units base`; the first launch is another kernel's."""
    chosen = METRICS if metrics is None else metrics
    head = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
    quoted = lambda row: ",".join(f'"{cell}"' for cell in row)  # noqa: E731
    values = [value for _, value in chosen.values()]
    return "\n".join(
        (
            "==PROF== Connected to process 7",
            quoted([*head, *chosen]),
            quoted([""] * len(head) + [unit for unit, _ in chosen.values()]),
            quoted(["0", "7", "python", "localhost", "elementwise_kernel(int)", "1", "7", *("1" for _ in chosen)]),
            quoted(["1", "7", "python", "localhost", kernel, "1", "7", *values]),
        )
    )


def instruction(address: int, line: int) -> disassembly.Instruction:
    return disassembly.Instruction("k", address, "FFMA", "FFMA", (SourceLine("/k/k.cu", line),))


SOURCE_PAGE = "\n".join(
    (
        '"Kernel Name","k"',
        (
            '"Address","Source","Warp Stall Sampling (All Samples)","L1 Wavefronts Shared Excessive",'
            '"stall_math","stall_selected","stall_math (Not Issued)"'
        ),
        '"7f00000100","FFMA R1, R1, R1, R1","30","0","20","10","20"',
        '"7f00000110","LDS R1, [R2]","40","1,000","0","5","0"',
        '"7f00000120","FFMA R1, R1, R1, R1","20","0","15","0","15"',
        '"7f00000130","NOP","0","0","0","0","0"',
    )
)


# ---- reading


@pytest.mark.parametrize(("count", "registers"), [("240", 240), (None, 0)])
def test_the_registers_of_a_profile(
    count: str | None, registers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 if ncu did not count them."""
    name = "launch__registers_per_thread"
    metrics = {key: value for key, value in METRICS.items() if key != name}
    counters = ncu.parse_raw(raw_page(metrics | ({name: ("", count)} if count else {})), "fwd_mma")
    monkeypatch.setattr(profiler, "_read_subject", lambda prefix: (SUBJECT, {}, counters, SOURCE_PAGE))
    monkeypatch.setattr(profiler, "_instructions", lambda prefix, subject: [instruction(0, 3)])
    found = profiler.executed(tmp_path / "p")
    assert found
    assert found[0].resources.registers == registers
    assert found[1] == {0: 30, 16: 40, 32: 20}


def test_the_raw_page() -> None:
    c = ncu.parse_raw(raw_page(), "fwd_mma")
    assert c.seconds == pytest.approx(27e-6)
    assert (c.dram_read, c.dram_written) == (4.8e6, 1e5)
    assert c.dram_peak == pytest.approx(4.9e6 / 27e-6 / 0.055)
    assert c.l2_bytes == 890_000 * 32
    assert c.l2_hits == pytest.approx(0.885)
    assert c.smem_bytes == 128e6
    assert c.bank_conflicts == 20_000
    assert c.tensor_active == pytest.approx(0.41)
    assert c.occupancy == pytest.approx(0.119)
    assert c.clock == pytest.approx(1.755e9)
    assert c.stalls == {"math_pipe_throttle": 0.75, "long_scoreboard": 0.25}
    assert "launch__func_cache_config" not in c.metrics


@pytest.mark.parametrize("name", [n for n in METRICS if not n.startswith(("smsp__pcsamp", "launch__"))])
def test_a_missing_metric_is_unknown_and_not_zero(name: str) -> None:
    whole, less = (Profile(SUBJECT, ncu.parse_raw(raw_page(m), "fwd_mma"), [], {}) for m in (
        METRICS, {n: value for n, value in METRICS.items() if n != name}
    ))  # fmt: skip
    for (what, value, _), (_, then, _) in zip(profile_report.MEASURES, profile_report.MEASURES, strict=True):
        now = then(less)
        assert now is None or now > 0, what
        assert value(whole) is not None
    assert list(profile_report.page(less, 120))


def counters(**metrics: str | float) -> ncu.Counters:
    """Of a raw page with these metrics, without units."""
    return ncu.parse_raw(raw_page({name: ("", str(value)) for name, value in metrics.items()}), "fwd_mma")


def test_other_stall_metrics() -> None:
    """Without samples. Warps that issue do not stall."""
    name = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    values = {"wait": 0.1, "barrier_not_issued": 0.3, "selected": 1, "drain": 0}
    found = counters(**{name.format(reason): value for reason, value in values.items()}).stalls
    assert found == pytest.approx({"barrier": 0.75, "wait": 0.25})
    assert [*found] == ["barrier", "wait"]  # most frequent first


UNITS = {
    "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12, "second": 1, "msecond": 1e-3, "ms": 1e-3,
    "usecond": 1e-6, "us": 1e-6, "nsecond": 1e-9, "ns": 1e-9, "%": 1e-2, "cycle/usecond": 1e6, "Mhz": 1e6,
    "cycle/nsecond": 1e9, "Ghz": 1e9, "Kbyte/second": 1e3, "Mbyte/second": 1e6, "Gbyte/second": 1e9,
    "Tbyte/second": 1e12,
}  # fmt: skip


def test_units() -> None:
    c = ncu.parse_raw(raw_page({f"in {unit}": (unit, "1,500.5") for unit in UNITS}), "fwd_mma")
    found = {unit: c.metrics[f"in {unit}"] for unit in UNITS}
    assert found == {unit: 1500.5 * factor for unit, factor in UNITS.items()}


@pytest.mark.parametrize(
    ("metrics", "measure", "value"),
    [
        ({"gpu__time_duration_measured_user.sum": 2}, "seconds", 2),
        ({"gpu__time_duration_measured_user.sum": 2, "gpu__time_duration.sum": 3}, "seconds", 3),
        ({"l1tex__m_xbar2l1tex_read_bytes.sum": 5}, "l2_bytes", 5),
        ({"l1tex__m_xbar2l1tex_read_bytes.sum": 5, "l1tex__m_l1tex2xbar_write_bytes.sum": 6}, "l2_bytes", 11),
        ({"l1tex__m_xbar2l1tex_read_bytes.sum": 5, "lts__t_sectors_srcunit_tex.sum": 0}, "l2_bytes", 0),
        ({"lts__average_t_sector_hit_rate.pct": 0.5}, "l2_hits", 0.5),
        ({"smsp__l1tex_data_pipe_lsu_wavefronts_mem_shared.sum": 3}, "smem_bytes", 384),
        ({f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{op}.sum": 10**i
          for i, op in enumerate(("ld", "st", "ldsm", "atom", "red"))}, "bank_conflicts", 11111),
        ({"l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 7,
          "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": 3}, "bank_conflicts", 7),
        ({"l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 3,
          "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": 12}, "conflict_share", 0.25),
        ({"l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 3}, "conflict_share", None),
        ({"l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": 3,
          "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": 0}, "conflict_share", None),
        ({"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": 0.25,
          "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": 0.5,
          "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active_but_other": 0.9}, "tensor_active", 0.5),
        ({"smsp__cycles_elapsed.avg.per_second": 2, "gpc__cycles_elapsed.avg.per_second": 3}, "clock", 2),
        ({"gpc__cycles_elapsed.avg.per_second": 3}, "clock", 3),
        ({"dram__bytes_read.sum": 4, "gpu__time_duration.sum": 2,
          "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": 0.5}, "dram_peak", 4),
        ({"dram__bytes_read.sum": 4, "gpu__time_duration.sum": 2,
          "dram__throughput.avg.pct_of_peak_sustained_elapsed": 0}, "dram_peak", None),
        ({"smsp__pcsamp_warps_issue_stalled_selected": 4}, "stalls", {}),
        ({}, "stalls", {}),
    ],
)  # fmt: skip
def test_metrics_of_other_versions(metrics: dict[str, float], measure: str, value: object) -> None:
    """The first of several names for the same; sums of those that exist; None if it cannot be computed."""
    assert getattr(counters(**metrics), measure) == value


def test_messages_between_the_rows_of_a_page() -> None:
    """Rows may also be longer than the header."""
    names, units, *launches = raw_page().splitlines()[1:]
    rows = [names, "a message,of,ncu", f"{units},", "==WARNING== a text", *(f"{row},more" for row in launches)]
    c = ncu.parse_raw("\n".join(["a,longer,message,before", "Kernel Name,k", *rows]), "fwd_mma")
    assert (c.seconds, c.dram_read) == (pytest.approx(27e-6), 4.8e6)


@pytest.mark.parametrize("text", ["", "==ERROR== nothing", raw_page(kernel="fwd_mma_other")])
def test_a_report_without_the_kernel(text: str) -> None:
    with pytest.raises(UnsupportedProblem) as refused:
        ncu.parse_raw(text, "fwd_mma")
    others = 2 if "fwd_mma_other" in text else 0
    assert str(refused.value) == f"the report has no launch of fwd_mma, but {others} launches of other kernels"


def test_the_source_page() -> None:
    code = [instruction(0x00, 7), instruction(0x10, 9), instruction(0x20, 7)]
    at = {line: SourceLine("/k/k.cu", line) for line in (7, 9)}
    assert ncu.parse_source(SOURCE_PAGE, code) == [
        ncu.HotLine(at[7], 50, {"math": 35, "selected": 10}, 0),
        ncu.HotLine(at[9], 40, {"selected": 5}, 128_000),
    ]
    assert ncu.parse_source("", code) == []
    assert ncu.parse_samples(SOURCE_PAGE) == {0x00: 30, 0x10: 40, 0x20: 20}
    assert ncu.parse_samples("") == {}


@pytest.mark.parametrize("samples", ["Warp Stall Sampling (All Cycles)", "# Samples"])
def test_the_source_page_of_other_versions(samples: str) -> None:
    """Addresses have a prefix; a row has none; the first instructions have no samples, and the last has no line."""
    page = "\n".join(
        (
            f'"Address","Source","{samples}","L1 Wavefronts Shared Excessive"',
            '"0x1f0","NOP","0","0"',
            '"","a label","7","7"',
            '"0x200","LDS","0","3"',
            '"0x210","FFMA","1,000","0"',
            '"0x220","EXIT","2000","0","more"',
        )
    )
    assert ncu.parse_samples(page) == {0x20: 1000, 0x30: 2000}
    where = SourceLine("/k/k.cu", 7), SourceLine("/k/k.cu", 9)
    assert ncu.parse_source(page, [instruction(0x00, 8), instruction(0x10, 7), instruction(0x20, 9)]) == [
        ncu.HotLine(None, 2000, {}, 0), ncu.HotLine(where[1], 1000, {}, 0), ncu.HotLine(where[0], 0, {}, 3 * 128)
    ]  # fmt: skip
    assert ncu.parse_samples(f'"Address","Source","{samples}"\n"100","NOP","5"') == {0: 5}
    without = page.replace(samples, "Other")
    assert ncu.parse_samples(without) == {}
    assert ncu.parse_source(without, [instruction(0x10, 7)]) == [ncu.HotLine(where[0], 0, {}, 3 * 128)]


# ---- the command


def test_the_command() -> None:
    words = profiler.command("ncu", SUBJECT, Path("out/p"))
    assert words[0].endswith("ncu")
    text = " ".join(words)
    for part in (
        "--set full", "--import-source yes", "--clock-control none", "--profile-from-start off", "--launch-count 1",
        "--kernel-name regex:^fwd_mma$", "--export out/p", "-m sandbox.profile.target",
    ):  # fmt: skip
        assert part in text
    assert Subject.loads(words[-1]) == SUBJECT
    text = " ".join(profiler.command("nsys", SUBJECT, Path("out/p")))
    assert "--capture-range=cudaProfilerApi" in text
    assert "--trace=cuda,nvtx" in text


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["profile", *arguments], env={"COLUMNS": None}, prog_name="sandbox")


def test_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs no tool and no GPU, and writes nothing."""
    monkeypatch.setattr(profiler.tools, "find", lambda name: None)
    shown = call("fwd_mma", "--shape", "1,2,64,64", "--causal", "--tile", str(TILE), "--dry-run")
    assert shown.exit_code == 0
    words = shlex.split(shown.stdout)
    assert words[0] == "ncu"
    subject = Subject.loads(words[-1])
    assert (subject.tile, subject.problem.causal) == (TILE, "bottom-right")
    two = call("fwd_mma", "--compare", "HEAD", str(TILE), "--dry-run").stdout.splitlines()
    assert [Subject.loads(shlex.split(line)[-1]).version for line in two] == ["HEAD", ""]


def test_dry_run_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A valid tile is chosen as with a GPU; --json prints JSON."""
    monkeypatch.setattr(driver, "available", lambda: False)
    printed = json.loads(call("fwd_mma", "--shape", "1,2,64,256", "--dry-run", "--json").stdout)
    (command,) = printed["commands"]
    subject = Subject.loads(command[-1])
    assert registry.get("fwd_mma").why_tile_unsupported(subject.problem, subject.tile, (9, 0)) is None
    kept = registry.FOLDER.parent / ".sandbox" / "profiles"  # independent of the working directory
    assert Path(command[command.index("--export") + 1]).parent == kept
    refused = call("fwd_mma", "--shape", "1,2,64,60", "--dry-run")
    assert refused.exit_code == 2
    assert "multiple of 8" in refused.stderr


def fake_tool(folder: Path, name: str, script: str) -> str:
    """A script that replaces a tool."""
    program = folder / name
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_a_profile_is_stored_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raw.csv").write_text(raw_page())
    (tmp_path / "source.csv").write_text("")
    script = f'for page; do :; done\ncase $page in raw|source) cat "{tmp_path}/$page.csv";; esac\n'
    program = fake_tool(tmp_path, "ncu", script)
    find = disassembly.tools.find
    monkeypatch.setattr(profiler.tools, "find", lambda name: program if name == "ncu" else find(name))
    monkeypatch.setattr(environment, "describe", lambda: {"device": "a GPU"})
    profiler.collect("ncu", SUBJECT, tmp_path / "kept" / "p")
    monkeypatch.setattr(pipeline, "compile_problem", lambda *given: pytest.fail("what is kept is what ran"))
    profile = profiler.read(tmp_path / "kept" / "p")
    assert profile.subject == SUBJECT
    assert profile.counters.dram_read == 4.8e6
    assert profile.where == {"device": "a GPU"}
    assert not [*(tmp_path / "kept").glob("p.zip.*")]
    prefix = tmp_path / "kept" / "p"
    subject, raw, source, cubin, sources = (
        x.decode(errors="replace")
        for x in profiler.stored(prefix, "subject.json", "raw.csv", "source.csv", "cubin", "sources.json")
    )
    pages = {"raw.csv": raw, "source.csv": source, "cubin": cubin, "sources.json": sources}
    for damaged in (subject.replace('"entry"', '"other"'), subject.replace('"where"', '"other"'), "hello", None):
        profiler.store(prefix, pages | ({"subject.json": damaged} if damaged else {}))
        with pytest.raises(UnsupportedProblem, match=OTHER_VERSION):
            profiler.read(prefix)
    Path(f"{prefix}.zip").write_text("hello")
    with pytest.raises(UnsupportedProblem, match=OTHER_VERSION):
        profiler.read(prefix)
    with pytest.raises(
        UnsupportedProblem, match=r"no stored profile has the prefix .*kept/q: .*kept/q\.zip does not exist"
    ):
        profiler.read(tmp_path / "kept" / "q")


def test_the_source_is_that_of_the_profiled_version(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine that does not have the files, or has others."""
    monkeypatch.setattr(source_line, "_recorded", {})
    subject, raw, source, cubin, sources = profiler.stored(
        kept, "subject.json", "raw.csv", "source.csv", "cubin", "sources.json"
    )
    texts = json.loads(sources)
    assert {Path(file).name for file in texts} >= {"fwd_mma.cu", "ptx.cuh"}
    edited = {file: text.replace("\n", " // edited\n") for file, text in texts.items()}
    pages = {"subject.json": subject, "raw.csv": raw, "source.csv": source, "cubin": cubin}
    profiler.store(kept, pages | {"sources.json": json.dumps(edited)})
    lines = [line for line in call("fwd_mma", "--show", str(kept)).stdout.splitlines() if ".cu:" in line]
    assert lines
    assert all("// edited" in line for line in lines)


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1", GpuUnavailable,
         "may not read the GPU's performance counters: run as root, or set NVreg_RestrictProfilingToAdminUsers=0"),
        ("echo '==ERROR== LibraryNotLoaded' >&2; exit 9", ToolchainMissing, r"ncu ended with status 9:\n==ERROR== Lib"),
        ("echo '==WARNING== No kernels were profiled.'", UnsupportedProblem, "ncu found no launch of fwd_mma"),
    ],
)  # fmt: skip
def test_failures_of_the_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: type[Exception], message: str
) -> None:
    program = fake_tool(tmp_path, "ncu", script)
    monkeypatch.setattr(profiler.tools, "find", lambda name: program)
    with pytest.raises(error, match=message):
        profiler.collect("ncu", SUBJECT, tmp_path / "p")


def test_without_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler.tools, "find", lambda name: None)
    with pytest.raises(ToolchainMissing, match=r"nsys is neither on the PATH nor in .*: install Nsight Systems"):
        profiler.collect("nsys", SUBJECT, tmp_path / "p")


# ---- the page


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A stored profile with samples at the addresses of the real machine code: 10 per product, 1 per barrier."""
    prefix = tmp_path / "p"
    compiled = pipeline.compile("fwd_mma", 64, "float16", False, "sm_90a", TILE)
    code = disassembly.sass(compiled.cubin) if disassembly.available() else ()
    rows = ['"Address","Source","Warp Stall Sampling (All Samples)","stall_math","stall_barrier"']
    for i in code:
        samples = 10 if i.opcode.startswith("HMMA") else 1 if i.opcode.startswith("BAR") else 0
        math_, barrier = (samples, 0) if samples == 10 else (0, samples)
        rows.append(f'"0x{0x7F0000 + i.address:x}","{i.text}","{samples}","{math_}","{barrier}"')
    subject = json.dumps(json.loads(SUBJECT.dumps()) | {"where": {"device": "a GPU"}})
    pages = {"subject.json": subject, "raw.csv": raw_page(), "source.csv": "\n".join(rows)}
    profiler.store(prefix, pages | profiler._code(compiled.cubin))
    return prefix


def test_measures_and_io_model(kept: Path) -> None:
    profile = profiler.read(kept)
    tensor = 12 * 1024 * 64 * 2  # bytes of Q, or K, V, O
    assert profile.work.least.total == 4 * tensor + 4 * 12 * 1024
    assert profile.work.model.read == {"Q": tensor, "K": 8 * tensor, "V": 8 * tensor}
    assert profile.tflops == pytest.approx(4 * 12 * 1024 * 1024 * 64 / 27e-6 * 1e-12)
    assert profile.tensor_peak == pytest.approx(4096 * 132 * 1.755e-3)


def test_the_report_shows_source_lines(kept: Path) -> None:
    shown = call("fwd_mma", "--show", str(kept))
    assert (shown.exit_code, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    (time,) = [line for line in lines if line.startswith("time")]
    assert "27 µs" in time
    (read,) = [line for line in lines if line.startswith("DRAM read")]
    assert "4.8 MB" in read
    assert "compulsory 4.72 MB; without caches (IO model) 26.7 MB: caches served 100% of the difference" in read
    assert any("math_pipe_throttle" in line and "75%" in line for line in lines)
    if disassembly.available():
        source = registry.get("fwd_mma").source.read_text().splitlines()
        hot = [line.split() for line in lines if "fwd_mma.cu:" in line]
        numbers = [int(word.split(":")[1]) for words in hot for word in words if word.startswith("fwd_mma.cu:")]
        assert "mma_AB" in source[numbers[0] - 1]  # Q K^T or P V: ptxas may give a few of a call to another line
        assert source[numbers[0] - 1].strip()[:24] in shown.stdout  # including brackets
        assert "__syncthreads" in source[numbers[-1] - 1]
        assert hot[0][0].endswith("%")
        assert hot[0][-2:] == ["math", "100%"]


def test_comparison_json_and_roofline(kept: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown = call("fwd_mma", "--show", str(kept), "--show", str(kept), "--plot", str(tmp_path / "roof"))
    assert shown.exit_code == 0
    assert "stalled: math_pipe_throttle" in shown.stdout
    assert "+0.0%" in shown.stdout
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")
    (row,) = json.loads(call("fwd_mma", "--show", str(kept), "--json").stdout)
    assert row["measures"]["DRAM read"] == 4.8e6
    assert math.isclose(sum(row["model_bytes"]["read"].values()), 17 * 12 * 1024 * 64 * 2)
    bare = Profile(SUBJECT, ncu.Counters({}), [], {})
    assert list(profile_report.page(bare, 80))
    with pytest.raises(UnsupportedProblem, match="a roofline needs matrix products, time"):
        profile_plot.draw([bare], tmp_path / "none")


def test_stored_reports(kept: Path) -> None:
    """Their whole text: of a profile, of one without metrics, of two, and the roofline."""
    pytest.importorskip("matplotlib")
    profile, bare = profiler.read(kept), Profile(SUBJECT, ncu.Counters({}), [], {})
    slower = dict(METRICS) | {"gpu__time_duration.sum": ("nsecond", "31,500"), "dram__bytes_read.sum": ("byte", "999")}
    other = dataclasses.replace(bare, counters=ncu.parse_raw(raw_page(slower), "fwd_mma"))
    whole = dataclasses.replace(profile, lines=[])
    lines = [line for each in (whole, bare, other) for line in printed(120, *profile_report.page(each, 120))]
    lines += printed(100, profile_report.comparison(whole, other), profile_report.comparison(other, bare))
    lines += drawn(lambda: profile_plot.draw([whole, bare], ""))
    check_stored("profile.txt", lines)


def test_the_html_page_shows_the_samples(kept: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    if not disassembly.available():
        pytest.skip("no nvdisasm")
    place = tmp_path / "p.html"
    assert call("fwd_mma", "--show", str(kept), "--html", str(place)).exit_code == 0
    page = place.read_text()
    lines = re.findall(r'class="s"[^>]*--h:([\d.]+)"><i>\d+</i><em>([\d.]+)%</em><code>(.*)</code>', page)
    assert sum(float(share) for _, share, _ in lines) == pytest.approx(100, abs=0.5)
    assert next(text.strip() for heat, _, text in lines if heat == "1.00").startswith("mma_AB")
    assert "math_pipe_throttle" in page
    assert "27 µs" in page
    assert call("fwd_mma", "--show", str(kept), "--show", str(kept), "--html", str(place)).exit_code == 0
    assert "stalled: math_pipe_throttle" in place.read_text()


@pytest.mark.gpu
@pytest.mark.skipif(profiler.tools.find("ncu") is None, reason="ncu is not installed")
def test_profiling_on_a_gpu(tmp_path: Path) -> None:
    """Measured bytes are at least the minimum; hot lines belong to the kernel."""
    kernel = registry.get("fwd_mma")
    if driver.device().arch < kernel.min_arch:
        pytest.skip("fwd_mma needs a newer GPU")
    subject = profiler.subject(kernel.name, Problem(2, 16, 2048, 2048, 64, dtype="float16"), TILE)
    try:
        profiler.collect("ncu", subject, tmp_path / "p")
    except (GpuUnavailable, ToolchainMissing) as error:
        pytest.skip(str(error).splitlines()[0])
    profile = profiler.read(tmp_path / "p")
    c = profile.counters
    assert c.seconds
    assert 0 < c.seconds < 0.1
    assert c.dram_read
    least = sum(profile.work.least.read.values())
    assert 0.75 * least < c.dram_read < sum(profile.work.model.read.values())
    assert c.l2_bytes
    # An H100 merges concurrent L2 requests of neighbouring SMs: 0.63 and 0.80 of the model were observed.
    assert 0.4 * profile.work.model.total < c.l2_bytes < 1.1 * profile.work.model.total
    assert c.stalls
    assert (tmp_path / "p.ncu-rep").is_file()
    if disassembly.available():
        assert {Path(line.where.file).name for line in profile.lines[:5] if line.where} == {"fwd_mma.cu"}
