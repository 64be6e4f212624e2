"""Machine code and PTX: instructions, source lines, classes, and differences between two versions."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from project import ROOT, check_stored, in_project, new_kernel, printed
from rich.table import Table

import sandbox
from sandbox.cli import cli
from sandbox.core import registry
from sandbox.core.errors import HistoryError, SpecError, ToolchainMissing, UnknownKernel, UnsupportedProblem
from sandbox.core.source_line import SourceLine
from sandbox.disassembly import costs, listing, report
from sandbox.spec import Problem, Tile
from sandbox.toolchain import disassembly, tools
from sandbox.toolchain.arch import Occupancy
from sandbox.toolchain.disassembly import Instruction
from sandbox.toolchain.nvrtc import Resources
from sandbox.verify.report import WIDE
from sandbox.watch.history import History, read_texts

sys.path.insert(0, str(ROOT / "scripts"))
import machine_code

needs_nvdisasm = pytest.mark.skipif(not disassembly.available(), reason="nvdisasm is not installed")
SMALL = ("fwd_minimal", "--shape", "1,1,1,16")
TILE = Tile(BLOCK_M=32, BLOCK_N=16)
PROBLEM = Problem(1, 1, 1, 1, 16, dtype="float16")

LISTING = """
\t.headerflags\t@"EF_CUDA_SM90"
//--------------------- .text.fwd_x             --------------------------
\t.section\t.text.fwd_x,"ax",@progbits
fwd_x:
.text.fwd_x:
\t//## File "/k/fwd_x.cu", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t//## File "/k/include/ptx.cuh", line 66 inlined at "/k/fwd_x.cu", line 9
\t//## File "/k/fwd_x.cu", line 9
        /*0010*/              @!PT LDS RZ, [RZ] ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R19+0x800], desc[UR8][R4.64], !P3 ;
        /*0030*/               @P0 LDG.E.U16.CONSTANT R2, desc[UR4][R2.64] ;
\t//## File "/k/fwd_x.cu", line 9
        /*0040*/                   HMMA.16816.F32 R4, R8, R12, R4 ;  // |  196  |   2    |    5   |         |
        /*0050*/                   STG.E desc[UR4][R2.64], R5 ;
.L_x_1:
        /*0060*/             @!UP0 BRA `(.L_x_1) ;
"""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, env={"COLUMNS": None}, prog_name="sandbox")


# ---- reading


def test_stored_reports() -> None:
    """The whole text of a listing, its summary, and the differences of two."""
    found = tuple(disassembly.parse_sass(LISTING))
    code = listing.Code("a", "fwd_x", "sass", "sm_90", PROBLEM, TILE, Resources(40, 8, 0, 4, 12), found, "fwd_x.cu")
    more = tuple(dataclasses.replace(i, live=i.address) for i in (*found[:4], *found[2:]))
    other = dataclasses.replace(code, label="b=1,c=2", resources=Resources(44, 0, 0, 0, 0), instructions=more)
    parts: list[object] = []
    for each, after in ((code, other), (other, code), (code, code)):
        parts += [report.headline(each), report.listing(each), report.summary_table(each), *report.live_lines(each)]
        parts += [report.changes_table(each, after), *report.changed_line_texts(each, after)]
    lines = [
        json.dumps(listing.as_json(other), default=str),
        json.dumps(listing.changes_as_json(code, other), default=str),
    ]
    check_stored("disassembly.txt", [*printed(110, *parts), *lines])


def test_at_most_five_lines_with_live_registers() -> None:
    class Peaks:
        live_peaks = {SourceLine(f"/k/{n}.cu", n): n for n in range(9, 0, -1)}  # noqa: RUF012

    lines = [str(line) for line in report.live_lines(Peaks())]  # type: ignore[arg-type]
    assert [line.split()[:4] for line in lines] == [[str(n), "registers", "live", "at"] for n in range(9, 4, -1)]


def test_a_listing() -> None:
    found = list(disassembly.parse_sass(LISTING))
    assert [i.address for i in found] == [0, 16, 32, 48, 64, 80, 96]
    assert {i.function for i in found} == {"fwd_x"}
    assert found[2].text == "LDGSTS.E.BYPASS.128 [R19+0x800], desc[UR8][R4.64], !P3"
    assert found[2].where == (SourceLine("/k/include/ptx.cuh", 66), SourceLine("/k/fwd_x.cu", 9))
    assert found[2].line == SourceLine("/k/fwd_x.cu", 9)  # the line that calls the header's function
    assert found[4].where == (SourceLine("/k/fwd_x.cu", 9),)
    assert dataclasses.replace(found[2], where=()).line is None
    only_headers = dataclasses.replace(found[2], where=(SourceLine("/k/a.cuh", 1), SourceLine("/k/b.cuh", 2)))
    assert only_headers.line == SourceLine("/k/a.cuh", 1)
    assert [i.live for i in found] == [None, None, None, None, 196, None, None]
    assert disassembly.counts(found) == {
        "LDC": 1, "NOP": 1, "LDGSTS.128": 1, "LDG.16": 1, "HMMA": 1, "STG.32": 1, "BRA": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [("HGMMA", "tensor cores"), ("mma.f", "tensor cores"), ("LDSM", "shared memory"), ("STL", "local memory"),
     ("ld.shared.v4", "shared memory"), ("st.local", "local memory"), ("LDG.128", "global memory"),
     ("BAR", "synchronisation"), ("cp.async.cg", "global memory"), ("MUFU", "special functions"),
     ("ex2.f", "special functions"), ("add.f", "floating point"), ("add", "integers and moves"),
     ("IMAD", "integers and moves"), ("ld.param", "integers and moves")],
)  # fmt: skip
def test_kinds(name: str, kind: str) -> None:
    assert disassembly.kind(name) == kind
    assert list(disassembly.by_kind({name: 3})) == [kind]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("LDG.E R1, [R2]", "LDG.32"),
        ("LDG.E.128 R4, [R2]", "LDG.128"),
        ("LDG.E.S8 R4, [R2]", "LDG.8"),
        ("STG.E.U16 [R2], R4", "STG.16"),
        ("LDGSTS.E.BYPASS.64 [R2], R4", "LDGSTS.64"),
        ("HMMA.16816.F32 R4, R4", "HMMA"),
        ("LDS.128 R4, [R2]", "LDS"),
        ("@!PT LDS RZ, [RZ]", "NOP"),
        ("@!UPT UIADD3 UR4, UR4", "NOP"),
        ("@PT LDS RZ, [RZ]", "LDS"),
        ("@!P1 BRA `(.L)", "BRA"),
        ("ld.global.nc.v4.f32 {%f1}, [%rd1]", "ld.global.v4"),
        ("st.shared.u32 [%r1], %r2", "st.shared"),
        ("ld.param.u64 %rd1, [p]", "ld.param"),
        ("ld.b32 %r1, [%rd1]", "ld"),
        ("red.global.add.f32 [%rd1], %f1", "red.global"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16", "cp.async.cg"),
        ("cp.async.commit_group", "cp.async.commit_group"),
        ("add.f32 %f1, %f2, %f3", "add.f"),
        ("add.s32 %r1, %r2, %r3", "add"),
        ("fma.rn.bf16 %h1, %h2", "fma.f"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}", "mma.f"),
        ("cvt.rn.f16x2.f32 %r1", "cvt.f"),
        ("mul.f64 %d1", "mul.f"),
        ("neg.f16x2 %r1", "neg.f"),
        ("ret", "ret"),
    ],
)
def test_classes_of_instructions(text: str, name: str) -> None:
    """Global memory by the width of a lane's access; floating point of PTX by its dtype."""
    predicate = text.startswith("@")
    opcode = text.split()[predicate]
    assert disassembly.opcode_class(disassembly.Instruction("k", 0, opcode, text)) == name


def test_counts_are_sorted() -> None:
    """Classes by frequency, kinds in their own order, without those that do not occur."""
    made = [
        disassembly.Instruction("k", 0, opcode, opcode) for opcode in ("NOP", "FFMA", "HMMA", "FFMA", "FADD", "FFMA")
    ]
    counted = disassembly.counts(iter(made))
    assert list(counted.items()) == [("FFMA", 3), ("NOP", 1), ("HMMA", 1), ("FADD", 1)]
    assert list(disassembly.by_kind(counted).items()) == [
        ("tensor cores", {"HMMA": 1}), ("floating point", {"FFMA": 3, "FADD": 1}), ("nothing", {"NOP": 1}),
    ]  # fmt: skip
    assert disassembly.by_kind({}) == {}
    assert disassembly.kind("ld.const.v2") == "integers and moves"


PTX = """
.file 1 "/k/k.cu"
\t.file\t2 "/k/a.cuh"
.visible .entry first(
  .param .u64 p
)
{
\t.loc\t1 7 3
\tld.param.u64 \t%rd1, [p];
\t.loc\t2 4 1, function_name $L__info, inlined_at 1 9 5
\t@%p1 add.s32 \t%r1, %r1,  1;
\t.loc\t2 5 1, function_name $L__info, inlined_at 2 4 1
\t@!%p12 bra \t$L__BB0_2;
\t.loc\t1 0 3
$L__BB0_2:
\tret;
\t.loc\t3 8 1
\tbar.sync 0;
}
.func (.param .b32 out) second(.param .b32 in)
{
\t.loc\t2 6 1, function_name $L__info, inlined_at 2 4 1
\tret;
}
"""


def test_a_listing_of_ptx() -> None:
    """Inlined calls from the innermost on; line 0 and unknown files are no source line."""
    k, a = (lambda n: SourceLine("/k/k.cu", n)), (lambda n: SourceLine("/k/a.cuh", n))
    found = [(i.function, i.address, i.opcode, i.text, i.where) for i in disassembly.ptx(PTX)]
    assert found == [
        ("first", 9, "ld.param.u64", "ld.param.u64 %rd1, [p]", (k(7),)),
        ("first", 11, "add.s32", "@%p1 add.s32 %r1, %r1, 1", (a(4), k(9))),
        ("first", 13, "bra", "@!%p12 bra $L__BB0_2", (a(5), a(4), k(9))),
        ("first", 16, "ret", "ret", ()),
        ("first", 18, "bar.sync", "bar.sync 0", ()),
        ("second", 23, "ret", "ret", (a(6), a(4))),
    ]


def test_live_registers_if_nvdisasm_reports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not for cubins of CUDA 12."""
    asked: list[tuple[str, ...]] = []
    old = [False]

    def nvdisasm(cubin: bytes, *options: str) -> str:
        asked.append(options)
        if old[0] and "-lrm" in options:
            raise ToolchainMissing("too old")
        return LISTING if "-lrm" in options else LISTING.replace("|  196  |", "|       |")

    monkeypatch.setattr(disassembly, "_nvdisasm", nvdisasm)
    assert [i.live for i in disassembly.sass(b"cubin")] == [None, None, None, None, 196, None, None]
    assert [i.where for i in disassembly.sass(b"")] == [i.where for i in disassembly.parse_sass(LISTING)]
    assert asked[:2] == [("-gi",), ("-lrm", "count")]
    old[0] = True
    assert [i.live for i in disassembly.sass(b"cubin")] == [None] * 7


def test_a_disassembler_that_fails(tmp_path: Path) -> None:
    """The last 300 characters of its message. Its output is kept for the next call."""
    program = tmp_path / "nvdisasm"
    program.write_text(f"#!/bin/sh\necho {'x' * 400} >&2\nexit 1\n")
    program.chmod(0o700)
    with pytest.raises(ToolchainMissing) as caught:
        disassembly._listing(str(program), b"cubin", ())
    assert str(caught.value) == (
        f"{program} cannot read the cubin: {'x' * 300} (install a newer one: {tools.REMEDIES['nvdisasm']})"
    )
    program.write_text('#!/bin/sh\necho "$1 $2"; cat "$3"\n')
    assert disassembly._listing(str(program), b"cubin", ("-gi",)) == "-c -gi\ncubin"
    program.unlink()
    assert disassembly._listing(str(program), b"cubin", ("-gi",)) == "-c -gi\ncubin"


@needs_nvdisasm
def test_machine_code_of_a_kernel() -> None:
    compiled = sandbox.compile("fwd_mma", D=64, arch="sm_90a")
    found = disassembly.sass(compiled.cubin)
    counted = disassembly.opcode_counts(compiled.cubin)
    assert counted == disassembly.counts(found)
    assert counted["HMMA"] > 0
    assert counted["LDSM"] > 0
    assert counted["LDGSTS.128"] > 0
    source = registry.get("fwd_mma").source
    lines = source.read_text().splitlines()
    assert {Path(i.line.file) for i in found if i.line} == {source}
    # Where two neighbouring instructions have the same line number in different files, the line table of the cubin
    # keeps the first file: some HMMA appear in another header.
    called = [i.line for i in found if i.opcode.startswith("HMMA") and i.where[0].file.endswith("/ptx.cuh")]
    assert 2 * len(called) > counted["HMMA"]
    for line in called:
        assert line
        assert "mma_AB" in lines[line.line - 1]
    peaks = {i.live for i in found} - {None}
    assert not peaks or max(peaks) <= compiled.resources.registers


def test_ptx_of_a_kernel() -> None:
    found = disassembly.ptx(sandbox.compile("fwd_mma", D=64, arch="sm_90a").ptx)
    source = registry.get("fwd_mma").source
    lines = source.read_text().splitlines()
    calls = [i for i in found if i.opcode.startswith("mma.sync")]
    assert len(calls) > 100
    for i in calls:
        assert i.function == "fwd_mma"
        assert i.line
        assert Path(i.line.file) == source  # through three inlined functions of headers
        assert "mma_AB" in lines[i.line.line - 1]


def test_without_a_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "find", lambda name: None)
    assert disassembly.opcode_counts(b"") == {}
    with pytest.raises(ToolchainMissing, match=r"nvdisasm is neither on the PATH nor in .*: pip install "):
        disassembly.sass(b"")


@needs_nvdisasm
def test_an_invalid_cubin() -> None:
    with pytest.raises(ToolchainMissing, match=r"nvdisasm cannot read the cubin: "):
        disassembly.sass(b"not a cubin")


# ---- two versions


def test_a_version_of_watch(project_copy: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """The kernel, its headers and its spec are those of the save, not of later edits."""
    of_project = registry.get("fwd_minimal")  # before the folder changes, because the registry caches it
    monkeypatch.setattr(registry, "FOLDER", project_copy / "kernels_cu")
    kernel = sandbox.Kernel(**{**vars(of_project), "source": registry.FOLDER / "fwd_minimal.cu"})
    header, seen = registry.FOLDER / "include/tensor.cuh", History(kernel)
    seen.append(read_texts(kernel) or {}, ok=True, stage="ok")
    after = listing.translate(kernel, "ptx", PROBLEM, tile=TILE)
    header.write_text("#error edited since\n")
    before = listing.translate(listing.version(kernel, "history:1"), "ptx", PROBLEM, tile=TILE)
    assert before.instructions[0].where[0].file.startswith(str(own_cache))
    assert before.counts == after.counts
    with pytest.raises(HistoryError, match="fwd_minimal has no version 2: there are 1 to 1"):
        listing.version(kernel, "history:2")


def test_an_old_spec_that_exits_is_an_error(own_cache: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "kernels_cu").mkdir(parents=True)
        (folder / "kernels_cu/fwd_minimal.py").write_text("raise SystemExit(1)\n")

    with pytest.raises(SpecError, match=r"fwd_minimal\.py, line 1: SystemExit: 1: exit would end the program"):
        listing._unpacked(registry.get("fwd_minimal"), "0" * 40, write, "revision HEAD")


def test_a_revision(project_copy: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    """The kernel, its headers and its spec are those of the revision, not of later edits."""
    git = lambda *arguments: subprocess.run(  # noqa: E731
        ("git", "-c", "user.name=n", "-c", "user.email=e", *arguments),
        cwd=project_copy,
        check=True,
        capture_output=True,
    )
    folder = project_copy / "kernels_cu"
    source, header = folder / "fwd_minimal.cu", folder / "include/tensor.cuh"
    header.write_text("#define OF_THE_REVISION\n" + header.read_text())
    source.write_text(source.read_text() + "#ifndef OF_THE_REVISION\n#error another header\n#endif\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "before")
    source.write_text("#include <nowhere.h>\n" + source.read_text())
    header.write_text("#error edited since\n")
    kernel = registry.get("fwd_minimal")
    monkeypatch.setattr(registry, "FOLDER", folder)
    old = listing.version(kernel, "HEAD")
    assert old.source.is_relative_to(own_cache)
    before = listing.translate(old, "ptx", PROBLEM, tile=TILE, label="HEAD")
    after = listing.translate(kernel, "ptx", PROBLEM, tile=TILE)
    assert before.counts == after.counts
    assert listing.changed_lines(before, after) == []
    assert listing.changed_classes(before, after) == {}
    with pytest.raises(UnknownKernel, match="fwd_x is not in revision HEAD"):
        listing.version(sandbox.Kernel(**{**vars(old), "name": "fwd_x"}), "HEAD")
    with pytest.raises(
        UnsupportedProblem,
        match=r"'v9' is not a tile \(.*\), a \.cu file, history:N, or a git revision of ",
    ):
        listing.version(old, "v9")
    done = in_project(project_copy, "sandbox", "cache", "clear", "--json")
    assert json.loads(done.stdout)["directory"] == str(own_cache)
    assert list(own_cache.iterdir()) == []


def test_differences_after_an_edit(project_copy: Path) -> None:
    source = project_copy / "kernels_cu/fwd_minimal.cu"
    edited = project_copy / "kernels_cu/edited.cu"
    text = source.read_text()
    assert text.count("__syncthreads();") >= 2
    edited.write_text("// one line more\n" + text.replace("__syncthreads();", "__syncthreads(), __syncthreads();", 1))
    kernel = registry.get("fwd_minimal")
    before, after = (
        listing.translate(sandbox.Kernel(**{**vars(kernel), "source": file}), "ptx", PROBLEM, tile=TILE)
        for file in (source, edited)
    )
    assert listing.changed_classes(before, after)["bar"] == (2, 3)


def test_a_copy_under_another_name(project_copy: Path) -> None:
    """A copy by `new kernel` with one edited line differs in that line only."""
    new_kernel(project_copy, "mine")
    source = project_copy / "kernels_cu/mine.cu"
    text = source.read_text()
    assert "const float alpha = expf(m - shift);" in text
    source.write_text(text.replace("const float alpha = expf(m - shift);", "const float alpha = expf(m * shift);"))
    command = ("sandbox", "ptx", "fwd_minimal", "-D", "16", "--diff", str(source))
    done = in_project(project_copy, *command, "--json")
    changed = json.loads(done.stdout)["lines"]
    assert [(line["file"], line["text"]) for line in changed if "(m - shift)" in line["text"]]
    assert {line["text"].replace("m * shift", "m - shift") for line in changed} == {
        "const float alpha = expf(m - shift);"
    }
    head = in_project(project_copy, *command).stdout
    assert re.search(rf"{source} +fwd_minimal.cu +change", head)
    back = in_project(project_copy, "sandbox", "ptx", "bwd_minimal_dq", "-D", "16", "--diff",
                      str(project_copy / "kernels_cu/bwd_minimal.cu"))  # fmt: skip
    assert back.returncode == 0, back.stderr


def test_lines_are_matched_by_their_text(tmp_path: Path) -> None:
    def version(text: str, opcodes: dict[int, str]) -> listing.Code:
        folder = tmp_path / str(len(text))
        folder.mkdir()
        (folder / "k.cu").write_text(text)
        at = {line: SourceLine(str(folder / "k.cu"), line) for line in opcodes}
        found = tuple(disassembly.Instruction("k", 0, o, o, (at[line],)) for line, o in opcodes.items())
        return listing.Code("", "k", "sass", "sm_90a", "", "", None, found)  # type: ignore[arg-type]

    before = version("a;\nb;\nb;\n", {1: "FFMA", 2: "LDS", 3: "LDS"})
    after = version("// new\na;\nb;\nb;\nc;\n", {2: "FFMA", 3: "LDS", 4: "STS", 5: "BAR"})
    assert listing.changed_lines(before, after) == [
        listing.LineChange("k.cu", 4, "b;", {"LDS": 1}, {"STS": 1}),
        listing.LineChange("k.cu", 5, "c;", {}, {"BAR": 1}),
    ]


# ---- the command line


@needs_nvdisasm
def test_sass_command() -> None:
    shown = call("sass", *SMALL)
    assert (shown.exit_code, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    store = next(n for n, line in enumerate(lines) if "STS" in line)
    header = next(line for line in reversed(lines[:store]) if line.startswith("fwd_minimal.cu:"))
    assert "_smem" in header
    assert any(line.startswith("shared memory ") and "LDS " in line for line in lines)
    (parsed,) = [json.loads(call("sass", *SMALL, "--json").stdout)]
    assert parsed["counts"]["BAR"] == 2
    assert sum(parsed["counts"].values()) == len(parsed["instructions"])
    assert {"function", "address", "text", "file", "line", "live"} == set(parsed["instructions"][0])
    assert len(call("sass", *SMALL, "--summary").stdout.splitlines()) < 30
    summary = json.loads(call("sass", *SMALL, "--summary", "--json").stdout)
    assert summary == {name: value for name, value in parsed.items() if name != "instructions"}


@needs_nvdisasm
def test_kernels_with_several_entry_points() -> None:
    """Each entry point has its own code and registers."""
    read = lambda name: json.loads(call("sass", name, "--shape", "1,1,1,64", "--json").stdout)  # noqa: E731
    main, converting = read("bwd_mma"), read("bwd_mma_postprocess")
    assert {i["function"] for i in main["instructions"]} == {"bwd_mma"}
    assert {i["function"] for i in converting["instructions"]} == {"bwd_mma_postprocess"}
    assert main["resources"]["registers"] > 3 * converting["resources"]["registers"]
    assert not any(name.startswith("HMMA") for name in converting["counts"])
    with pytest.raises(UnknownKernel, match="fwd_mma has no entry point fwd_mma_dq: it has fwd_mma"):
        registry.get("fwd_mma").entry("fwd_mma_dq")


def test_ptx_command_and_a_diff_of_tiles() -> None:
    options = ("ptx", *SMALL, "--tile", "BLOCK_M=32,BLOCK_N=32", "--diff", "BLOCK_M=32,BLOCK_N=16")
    shown = call(*options)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "BLOCK_N=16  BLOCK_N=32" in shown.stdout
    assert "fma.f" in shown.stdout
    parsed = json.loads(call(*options, "--json").stdout)
    before, after = parsed["classes"]["fma.f"]
    assert after > before > 0
    assert parsed["before"]["tile"] == {"BLOCK_M": 32, "BLOCK_N": 16}
    assert any("fmaf" in line["text"] or "*" in line["text"] for line in parsed["lines"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sass", "fwd_minimall"), "did you mean fwd_minimal?"),
        (
            ("sass", *SMALL, "--diff", "no-such-revision"),
            "'no-such-revision' is not a tile (BLOCK_M=64,…), a .cu file, history:N, or a git",
        ),
        (("ptx", *SMALL, "--arch", "sm_42"), 'arch "sm_42" is not supported'),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_records_of_machine_code_may_have_several_results_of_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compiler is not deterministic: problems are equal if they have a result in common."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_text(json.dumps({"old D64": ["1", "2"], "old D64 #2": ["1", "3"], "old D128": ["4"]}))
    after.write_text(json.dumps({"new D64": ["1", "0"], "new D64 #2": ["1", "3"], "new D128": ["4"]}))
    assert machine_code.compare(before, after, {"old": "new"})
    after.write_text(json.dumps({"new D64": ["1", "0"], "new D128": ["4"]}))
    assert not machine_code.compare(before, after, {"old": "new"})
    assert "differs: new D64\n2 problems compared, 1 differ" in capsys.readouterr().out


# ---- the text of two versions


def code_of(label: str, opcodes: dict[str, int], file: str = "/k/fwd_x.cu", **fields: Any) -> listing.Code:
    """Each opcode so many times, in a line of its own of a file that does not exist."""
    at = {name: (SourceLine(file, n),) for n, name in enumerate(opcodes, 1)}
    found = [Instruction("fwd_x", 16, name, name, at[name]) for name, count in opcodes.items() for _ in range(count)]
    resources = fields.pop("resources", Resources(40, 0, 0, 0, 0))
    given: tuple[Any, ...] = (label, "fwd_x", "sass", "sm_90", PROBLEM, TILE, resources, tuple(found), "fwd_x.cu")
    return dataclasses.replace(listing.Code(*given), **fields)


def rows_of(table: Table) -> list[list[str]]:
    return [list(map(str, row)) for row in zip(*(column.cells for column in table.columns), strict=True)]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (40, 44, "+4 (+10%)"),
        (44, 40, "-4 (-9%)"),
        (4, 4, "="),
        (0, 0, "="),
        (0, 5, "+5"),
        (5, 0, "-5"),
        (1, 2, "+1 (+100%)"),
    ],
)
def test_a_change_of_a_number(old: int, new: int, text: str) -> None:
    assert report._change(old, new) == text


def test_the_table_of_two_versions() -> None:
    """Numbers that both lack are left out; opcode classes by the size of their change."""
    before = code_of("a", {"FFMA": 3, "LDS": 2, "BAR": 1}, resources=Resources(40, 0, 0, 3, 4))
    after = code_of("b=1,c=2", {"FFMA": 1, "LDS": 2, "STS": 1}, resources=Resources(44, 0, 0, 0, 0))
    shown = report.changes_table(before, after)
    assert [column.header for column in shown.columns] == ["", "a", "b=1\nc=2", "change"]
    assert rows_of(shown) == [
        ["registers", "40", "44", "+4 (+10%)"],
        ["bytes spilled", "7", "0", "-7"],
        ["instructions", "6", "4", "-2 (-33%)"],
        ["FFMA", "3", "1", "-2 (-67%)"],
        ["BAR", "1", "0", "-1"],
        ["STS", "0", "1", "+1"],
    ]


def test_the_lines_of_two_versions() -> None:
    before = code_of("a", {"FFMA": 3, "LDS": 2, "BAR": 1})
    after = code_of("b", {"FFMA": 1, "LDS": 2, "BAR": 1, "STS": 1})
    changes = [listing.LineChange("k.cu", 4, "x = y;", {"FFMA": 3, "LDS": 1}, {"FFMA": 1, "LDS": 1, "BAR": 1}),
               listing.LineChange("k.cu", 5, "gone;", {"FFMA": 3}, {}),
               listing.LineChange("k.cu", 6, "new;", {}, {"STS.32": 1})]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "changed_lines", lambda *given: changes if given == (before, after) else [])
        texts = [text.plain for text in report.changed_line_texts(before, after)]
    assert texts == [
        "k.cu:4  x = y;\n    FFMA 3 → 1, BAR 0 → 1",
        "k.cu:5  (only before)  gone;\n    FFMA 3 → 0",
        "k.cu:6  (only after)  new;\n    STS.32 0 → 1",
    ]


def test_the_summary_of_a_listing() -> None:
    shown = report.summary_table(code_of("a", {"FFMA": 3, "HMMA": 4, "FADD": 1}))
    assert [column.header for column in shown.columns] == ["kind", "8", "share", "classes"]
    assert [column.justify for column in shown.columns] == ["left", "right", "right", "left"]
    assert rows_of(shown) == [
        ["tensor cores", "4", "50%", "HMMA 4"],
        ["floating point", "4", "50%", "FFMA 3  FADD 1"],
    ]


@pytest.mark.parametrize(
    ("stores", "loads", "text"), [(0, 0, ""), (3, 4, ", 7 bytes spilled"), (0, 4, ", 4 bytes spilled")]
)
def test_the_headline(stores: int, loads: int, text: str) -> None:
    code = code_of("a", {"FFMA": 3}, resources=Resources(40, 0, 9, stores, loads))
    assert report.headline(code).plain == f"fwd_x D16 float16 sm_90 BLOCK_M=32,BLOCK_N=16: 40 registers{text}"


def test_instructions_below_their_lines(tmp_path: Path) -> None:
    """A line is repeated if another one came between; addresses of machine code are hexadecimal."""
    source, header = tmp_path / "k.cu", tmp_path / "k.cuh"
    source.write_text("one;\n  two;\n")
    header.write_text("header;\n")
    one, two = SourceLine(str(source), 1), SourceLine(str(source), 2)
    inlined = (SourceLine(str(header), 1), two)
    places = [(one,), (one,), (two,), inlined, (one,), ()]
    found = tuple(Instruction("k", 26, f"OP{n}", f"OP{n} R{n}", where) for n, where in enumerate(places))
    code = code_of("a", {}, instructions=(dataclasses.replace(found[0], live=7), *found[1:]))
    assert report.listing(code).plain.splitlines() == [
        "k.cu:1  one;", f"  0001a  {'OP0 R0':<76}   7 live", "  0001a  OP1 R1", "k.cu:2  two;", "  0001a  OP2 R2",
        "k.cu:2  by k.cuh:1  two;", "  0001a  OP3 R3", "k.cu:1  one;", "  0001a  OP4 R4", "(no source line)",
        "  0001a  OP5 R5",
    ]  # fmt: skip
    ptx = dataclasses.replace(code, language="ptx")
    assert report.listing(ptx).plain.splitlines()[2] == "     26  OP1 R1"


def test_the_most_live_registers_of_a_line() -> None:
    """The maximum over its instructions, the highest line first; instructions without a line do not count."""
    first, second = SourceLine("/k/a.cu", 1), SourceLine("/k/a.cu", 2)
    lives = [(first, 5), (second, 9), (first, 7), (first, None), (second, 0), (None, 99)]
    found = tuple(Instruction("k", 0, "OP", "OP", (at,) if at else (), live) for at, live in lives)
    code = code_of("a", {}, instructions=found)
    assert [*code.live_peaks.items()] == [(second, 9), (first, 7)]
    assert code_of("a", {"FFMA": 1}).live_peaks == {}
    rows = rows_of(report.changes_table(code, code_of("b", {"OP": 6})))
    assert ["most registers live", "9", "0", "-9"] in rows


def test_a_listing_as_json() -> None:
    code = code_of("a", {"FFMA": 2})
    bare = dataclasses.replace(code, instructions=(*code.instructions, Instruction("k", 3, "BAR", "BAR", ())))
    found = listing.as_json(bare)
    assert found["counts"] == {"FFMA": 2, "BAR": 1}
    assert found["instructions"][1:] == [
        {"function": "fwd_x", "address": 16, "text": "FFMA", "live": None, "file": "/k/fwd_x.cu", "line": 1},
        {"function": "k", "address": 3, "text": "BAR", "live": None, "file": None, "line": None},
    ]
    sides = listing.changes_as_json(code, bare)
    assert (sides["before"]["instructions"], sides["after"]["instructions"]) == (2, 3)
    assert sides["classes"] == {"BAR": (0, 1)}


def test_classes_by_the_size_of_their_change() -> None:
    before, after = code_of("a", {"FFMA": 3, "BAR": 1, "LDC": 9}), code_of("b", {"FFMA": 5, "LDC": 9, "BRA": 4})
    assert [*listing.changed_classes(before, after).items()] == [("BRA", (0, 4)), ("FFMA", (3, 5)), ("BAR", (1, 0))]


def entries(*names: str) -> str:
    return "".join(f'extern "C" __global__ void {name}(float* x) {{ x[0] = 1; }}\n' for name in names)


@pytest.mark.parametrize(
    ("kernel", "there", "names"),
    [
        ("fwd_minimal", ["mine"], ["mine"]),
        ("fwd_minimal", ["fwd_minimal"], ["fwd_minimal"]),
        ("fwd_minimal", ["mine", "other"], ["fwd_minimal"]),
        ("fwd_minimal", [], ["fwd_minimal"]),
        ("bwd_mma", ["mine_postprocess", "mine"], ["mine", "mine_postprocess"]),
        ("bwd_mma", ["mine"], ["bwd_mma", "bwd_mma_postprocess"]),
        ("bwd_mma", ["mine", "bwd_mma"], ["bwd_mma", "bwd_mma_postprocess"]),
        ("bwd_mma", ["mine", "mine_postprocess", "mine_too"], ["bwd_mma", "bwd_mma_postprocess"]),
    ],
)
def test_entry_points_of_another_file(kernel: str, there: list[str], names: list[str], tmp_path: Path) -> None:
    """Those of a renamed copy, if it has as many."""
    file = tmp_path / "mine.cu"
    if there:
        file.write_text(entries(*there))
    found = listing.version(registry.get(kernel), str(file))
    assert [entry.name for entry in found.entries] == names
    assert found.source == file


# ---- resources of tiles


@pytest.mark.parametrize(
    ("fields", "cells"),
    [
        ({}, ["40", "97 KiB", "2", "12%", "500 ms", "registers"]),
        ({"cached": True}, ["40", "97 KiB", "2", "12%", "cached", "registers"]),
        ({"resources": Resources(40, 1024, 0, 4, 8)}, ["40 +12", "97 KiB", "2", "12%", "500 ms", "registers"]),
        ({"resources": None}, None),
        ({"occupancy": None}, None),
        ({"smem_dynamic": None}, None),
        ({"smem_dynamic": 0}, ["40", "1 KiB", "2", "12%", "500 ms", "registers"]),
    ],
)
def test_the_table_of_compile(fields: dict[str, Any], cells: list[str] | None) -> None:
    """Two lines per tile on a narrow terminal; tiles without numbers are left out."""
    usual: dict[str, Any] = {
        "resources": Resources(40, 1024, 0, 0, 0), "smem_dynamic": 98304,
        "occupancy": Occupancy(2, 0.125, "registers"), "seconds": 0.5, "cached": False,
    }  # fmt: skip
    cost = costs.Cost("fwd_x", PROBLEM, TILE, "sm_90", True, **{**usual, **fields})
    wide, narrow = (costs.compiled_table([cost], width) for width in (WIDE, WIDE - 1))
    heads = ["kernel", "problem", "arch", "tile", "regs", "smem", "blocks/SM", "occupancy", "compile", "limited by"]
    assert [column.header for column in wide.columns] == heads
    assert [column.justify for column in wide.columns] == ["left"] * 4 + ["right"] * 5 + ["left"]
    assert [column.no_wrap for column in wide.columns] == [name == "tile" for name in heads]
    assert bool(wide.caption) is bool(narrow.caption) is ("+12" in str(cells))
    if cells is None:
        assert rows_of(wide) == rows_of(narrow) == []
        return
    regs, smem, blocks, share, compiling, limit = cells
    assert rows_of(wide) == [["fwd_x", PROBLEM.variant, "sm_90", str(TILE), *cells]]
    assert rows_of(narrow) == [
        [f"fwd_x sm_90\n{PROBLEM.variant}", "BLOCK_M=32\nBLOCK_N=16", f"{regs}\n{smem}", blocks, compiling,
         f"{share}\n{limit}"]
    ]  # fmt: skip
