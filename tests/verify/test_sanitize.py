"""`sanitize`: each injected fault is found by the right tool, with its line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from project import in_project, kernel_copy

from sandbox.cli import cli
from sandbox.core import registry
from sandbox.core.errors import ToolchainMissing, UnsupportedProblem
from sandbox.core.score import Score, TensorLike
from sandbox.core.source_line import SourceLine
from sandbox.cpu import compiler
from sandbox.cpu.instrumented import Fill, Report
from sandbox.engine import pipeline
from sandbox.engine.choose import choose_tile
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Causal, Kernel, Problem, Tile
from sandbox.toolchain import tools
from sandbox.toolchain.nvrtc import INCLUDE_DIR
from sandbox.toolchain.sources import included_files
from sandbox.verify import compute_sanitizer, findings, sanitize
from sandbox.verify.cases import Case
from sandbox.verify.findings import Finding

needs_sanitizers = pytest.mark.skipif("ziglang" in compiler.find().command, reason="the ziglang package has none")

# fault: (kernel, text to replace, its replacement, tool, what it says, text of a line that it names, or of several)
FAULTS = {
    "race": (
        "fwd_minimal", "__syncthreads();  // the tile is complete", "// the tile is complete", "thread",
        "data race: ", "S_rmem[j] += q * K_smem",
    ),
    "order": (
        "fwd_minimal", "__syncthreads();  // the tile is complete", "// the tile is complete", "orders",
        "O depends on the order of threads", "",
    ),
    "out of bounds": (
        "fwd_minimal", "query_row < head.Sq ? to_float", "query_row <= head.Sq ? to_float", "address",
        "read of 2 bytes, 0 bytes past the end of Q (1, 2, 67, 16) of 2 bytes each in block (2,1,0) thread (3,0,0)",
        "query_row <= head.Sq ? to_float",
    ),
    "beyond shared memory": (
        "fwd_minimal", "Q_smem + HEAD_DIM * BLOCK_M;", "Q_smem + 1 + HEAD_DIM * BLOCK_M;", "address",
        "shared memory, write of 4 bytes, 0 bytes past the end of its 6144 bytes in block (0,0,0) thread (31,0,0)",
        "HEAD_DIM_V>(V_smem, head.key_view(V)",
    ),
    "array of a thread": (
        "fwd_minimal", "float m = -INF, l = 0.0f;",
        ("float a[4]; for (int j = 0; j <= score.Sq / 32 + 2; ++j) "
         "reinterpret_cast<volatile float*>(a)[j] = 0.0f; float m = -INF, l = a[0];"), "address",
        "stack-buffer-overflow, write of 4 bytes, in block (0,0,0) thread (0,0,0)", "(a)[j] = 0.0f;",
    ),
    "uninitialised shared memory": (
        "fwd_minimal", "O_smem[d * BLOCK_M + t] = 0.0f;", ";", "uninitialised",
        "shared memory read before anything was written there", "float o = alpha * O_smem",
    ),
    "uninitialised local variable": (
        "fwd_minimal", "float m = -INF, l = 0.0f;", "float m = -INF, l;", "uninitialised",
        "O depends on uninitialised local variables", "",
    ),
    "uninitialised local array": (
        "fwd_block2d", "l[ROWS] = {}", "l[ROWS]", "uninitialised",
        "O depends on uninitialised local variables", "l[i] *= alpha;",
    ),
    "uninitialised member of a local structure": (
        "fwd_mma", "l[mt][0] = l[mt][1] = 0.0f;", "l[mt][0] = 0.0f;", "uninitialised",
        "O depends on uninitialised local variables", "",
    ),
    "missing wait": (
        "fwd_mma", "        cp_async_wait<0>();\n        __syncthreads();  // all threads have loaded",
        "        __syncthreads();  // all threads have loaded", "address",
        "shared memory used while a cp.async to it by thread 0 has not been waited for",
        "offsets.Q.load(state.Q[", "ldmatrix_x4(Q, tile",
    ),
    "deleted barrier": (
        "fwd_mma", "__syncthreads();  // all threads have loaded tile j", "// all threads have loaded tile j", "thread",
        "against previous write of 8 bytes at fwd_mma.cu",
        "cp_async_tile<BLOCK_N, K_COLUMNS, THREADS>(stage, K_rows", "mma_ABt_step(S, Q, K_smem",
    ),
    "uninitialised, by ldmatrix": (
        "fwd_mma", "            tiles.load_next(j);\n", "", "uninitialised",
        "shared memory read before anything was written there", "mma_ABt_step(S, Q, K_smem", "ldmatrix_x4(B, B_tile",
    ),
    "out of bounds, by cp.async": (
        "fwd_mma", "Q.stride_s, m0, head.Sq);", "Q.stride_s, m0, head.Sq + 16);", "address",
        "out of bounds, read of 16 bytes", "m0, head.Sq + 16);",
    ),
    "divergent barrier": (
        "fwd_minimal", "    float m = -INF", "    if (query_row >= head.Sq) return; float m = -INF", "thread",
        "barrier not reached by every thread of the block", "__syncthreads();",
    ),
    "undefined": (
        "fwd_minimal", "float m = -INF, l = 0.0f;", "float m = -INF, l = 0.0f * (1 << (t + 31));", "undefined",
        "shift exponent 32 is too large for 32-bit type 'int'", "(1 << (t + 31))",
    ),
    "endless": (
        "fwd_minimal", "float m = -INF, l = 0.0f;", "float m = -INF, l = 0.0f; while (score.Sq) asm volatile(\"\");",
        "orders", "did not finish within 0.5 s", "",
    ),
    "printing without end": (
        "fwd_minimal", "float m = -INF, l = 0.0f;", "float m = -INF, l = 0.0f; while (score.Sq) printf(\"%d\\n\", t);",
        "address", "fwd_minimal printed more than 16 MiB and was ended (a printf in a loop?)", "",
    ),
    "race, then printing without end": (
        "fwd_minimal", "-INF, l = 0.0f;",
        "-INF, l = 0.0f; __shared__ int raced; raced = t; __syncthreads(); for (;;) printf(\"%d\\n\", raced);",
        "thread", "data race", "raced = t;",
    ),
}  # fmt: skip


@needs_sanitizers
def test_a_lane_that_waits_late_for_a_key_tile_that_only_other_consumers_see() -> None:
    """Rows 195 and more: consumer 1 has three rows, consumer 2 none. Five key tiles fill each stage again, the first
    one twice."""
    kernel = registry.get("fwd_wgmma")
    tile, problem = (
        Tile(BLOCK_M=192, BLOCK_N=96, STAGES=2, BLOCKS=132),
        Problem(1, 2, 195, 389, 64, Hk=1, dtype="float16"),
    )
    found = sanitize.on_host("orders", kernel, problem, tile, timeout=60)
    assert found.clean, found


@needs_sanitizers
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(2)
def test_a_fault_is_found_on_the_cpu(fault: str, tmp_path: Path) -> None:
    name, old, new, tool, what, *lines = FAULTS[fault]
    kernel = registry.get(name)
    files = included_files(kernel.source, (INCLUDE_DIR,))[0]
    file = next(path.name for path in files if old in path.read_text())
    source = kernel_copy(kernel, tmp_path, file, lambda text: text.replace(old, new))
    changed = dataclasses.replace(kernel, source=source)
    tile = sanitize.small_tile(kernel)
    problem = sanitize.small_problems(kernel, tile)[0]
    found = sanitize.on_host(tool, changed, problem, tile, timeout=0.5 if fault == "endless" else 60)
    assert found.clean is False
    said = [f for f in found.findings if what in f.what]
    assert said, found
    named = [place for f in said for place in f.places]
    assert all(any(line in place.text() for place in named) for line in lines if line), said
    assert all(place.file.endswith((".cu", ".cuh")) and "/cpu/" not in place.file for place in named)


@needs_sanitizers
def test_a_lane_that_arrives_for_its_warp_waits_for_it(tmp_path: Path) -> None:
    """The race detector of the CPU backend reports a race in bwd_wgmma without this barrier, and none with it."""
    kernel, barrier = registry.get("bwd_wgmma"), "__syncwarp();  // all lanes have read the stage"
    problem = Problem(1, 1, 257, 128, 64, dtype="float16")
    source = kernel_copy(kernel, tmp_path, "bwd_wgmma_steps.cuh", lambda text: text.replace(barrier, "//"))
    changed = dataclasses.replace(kernel, source=source)
    with_it, without = (sanitize.on_host("thread", k, problem, kernel.tiles[1], 100) for k in (kernel, changed))
    assert with_it.clean, with_it
    assert [f for f in without.findings if re.search("against previous read of [48] bytes at bwd_", f.what)], without


@needs_sanitizers
def test_a_stray_store_is_no_race(tmp_path: Path) -> None:
    """It overwrites the next block's rows: the finding is the out-of-bounds store, not a race."""
    kernel = registry.get("fwd_minimal")
    changed = dataclasses.replace(kernel, source=tmp_path / "fwd_minimal.cu")
    text = kernel.source.read_text()
    changed.source.write_text(text.replace("if (query_row >= head.Sq) return;", "if (query_row > head.Sq) return;"))
    looked = sanitize.inspect(changed, HOST, tile=sanitize.small_tile(kernel))
    found = {r.tool: r for r in itertools.islice(looked, len(sanitize.HOST_TOOLS))}
    assert found["address"].clean is False
    assert [found[tool].clean for tool in ("thread", "orders")] == [None, None]
    assert "a store out of bounds" in found["thread"].message


LARGE = ("query_row < head.Sq ? to_float", "query_row < head.Sq + (BLOCK_M == 64) ? to_float")


@pytest.mark.parametrize("causal", [False, "bottom-right"])
def test_tiles_of_either_mask_are_shipped(causal: Causal) -> None:
    """They differ for large head dimensions."""
    kernel, problem = registry.get("fwd_wgmma_fp8"), Problem(1, 2, 4096, 4096, 256, dtype="float8_e4m3", causal=causal)
    assert choose_tile(kernel, problem, (9, 0)) in dict(sanitize.shipped_tiles(kernel, (9, 0)))


@needs_sanitizers
@pytest.mark.parametrize("command", ["sanitize", "watch"])
@pytest.mark.sampled(2)
def test_shipped_tiles_are_examined(command: str, project_copy: Path) -> None:
    """A fault that occurs only with the shipped tile, not with the smallest one."""
    assert sanitize.small_tile(registry.get("fwd_minimal")).BLOCK_M == 32
    source = project_copy / "kernels_cu" / "fwd_minimal.cu"
    source.write_text(source.read_text().replace(*LARGE))
    options = ("--once",) if command == "watch" else ()
    done = in_project(project_copy, "sandbox", command, "fwd_minimal", "--backend", "cpu", *options)
    assert done.returncode == 1
    (line,) = [n for n, text in enumerate(source.read_text().splitlines(), 1) if LARGE[1] in text]
    assert f"fwd_minimal.cu:{line}" in done.stdout
    assert "out of bounds, read of 2 bytes" in done.stdout
    assert command == "watch" or done.stdout.count("clean") >= 2 * len(sanitize.HOST_TOOLS)  # two small problems


@needs_sanitizers
def test_the_command(project_copy: Path) -> None:
    source = project_copy / "kernels_cu" / "fwd_minimal.cu"
    command = ("sandbox", "sanitize", "fwd_minimal", "--backend", "cpu", "--shape", "1,2,70,70,16")
    done = in_project(project_copy, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("clean") == len(sanitize.HOST_TOOLS)
    source.write_text(source.read_text().replace("O_smem[d * BLOCK_M + t] = 0.0f;", ";"))
    (line,) = [n for n, text in enumerate(source.read_text().splitlines(), 1) if "float o = alpha" in text]
    done = in_project(project_copy, *command)
    assert done.returncode == 1
    assert f"      fwd_minimal.cu:{line}  float o = alpha * O_smem[d * BLOCK_M + t];" in done.stdout.splitlines()
    rows = json.loads(in_project(project_copy, *command, "--json").stdout)
    wrong, *_ = [row for row in rows if row["tool"] == "uninitialised"]
    assert (wrong["clean"], wrong["findings"][0]["places"][0]) == (False, {"file": str(source), "line": line})


def test_a_tool_that_is_missing_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "find", lambda name: None)
    with pytest.raises(ToolchainMissing, match=r"compute-sanitizer is neither on the PATH nor in .* CUDA toolkit"):
        next(sanitize.inspect(registry.get("fwd_minimal"), ("cuda", 0)))


# ---- what compute-sanitizer writes (its user manual has examples of each tool)

MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 2 bytes
=========     at fwd_minimal+0x1a0 in /w/kernels_cu/include/tensor.cuh:41
=========     by thread (3,0,0) in block (2,0,0)
=========     Address 0x7f1a02400a06 is out of bounds
=========     and is 7 bytes after the nearest allocation at 0x7f1a02400000 of size 2,560 bytes
=========     Device Frame:fwd_minimal+0x150 in /w/kernels_cu/fwd_minimal.cu:40
=========
========= Invalid __global__ read of size 2 bytes
=========     at fwd_minimal+0x1a0 in /w/kernels_cu/include/tensor.cuh:41
=========     by thread (4,0,0) in block (2,0,0)
=========     Address 0x7f1a02400a08 is out of bounds
=========     Device Frame:fwd_minimal+0x150 in /w/kernels_cu/fwd_minimal.cu:40
=========
Traceback (most recent call last):
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at fwd_minimal+0x8a0 in /w/kernels_cu/fwd_minimal.cu:40
=========     and Read access at fwd_minimal+0xb10 in /w/kernels_cu/fwd_minimal.cu:48 [4096 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
SYNCCHECK = """========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at fwd_minimal+0x3d0 in /w/kernels_cu/fwd_minimal.cu:39
=========     by thread (3,0,0) in block (2,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
CLEAN = """========= COMPUTE-SANITIZER
========= ERROR SUMMARY: 0 errors
"""


def test_memcheck_is_read() -> None:
    (found,) = findings.parse_compute_sanitizer(MEMCHECK)
    assert found.what.startswith("Invalid __global__ read of size 2 bytes, by thread (3,0,0) in block (2,0,0), Address")
    assert found.places == (
        SourceLine("/w/kernels_cu/include/tensor.cuh", 41),
        SourceLine("/w/kernels_cu/fwd_minimal.cu", 40),
    )


def test_racecheck_is_read() -> None:
    (found,) = findings.parse_compute_sanitizer(RACECHECK)
    assert found.what == (
        "Race reported between Write access at fwd_minimal+0x8a0 in fwd_minimal.cu:40, "
        "and Read access at fwd_minimal+0xb10 in fwd_minimal.cu:48 [4096 hazards]"
    )
    assert [place.line for place in found.places] == [40, 48]


def test_files_without_folders_are_found() -> None:
    """In the format of compute-sanitizer 2025."""
    here = registry.FOLDER
    bare = RACECHECK.replace("/w/kernels_cu/", "").replace("fwd_minimal.cu:48", "tensor.cuh:41")
    (found,) = findings.parse_compute_sanitizer(bare, (here, here / "include"))
    assert found.places == (
        SourceLine(str(here / "fwd_minimal.cu"), 40),
        SourceLine(str(here / "include" / "tensor.cuh"), 41),
    )
    assert " in fwd_minimal.cu:40, and Read access" in found.what


def test_synccheck_is_read() -> None:
    (found,) = findings.parse_compute_sanitizer(SYNCCHECK)
    assert "Divergent thread(s)" in found.what
    assert [str(place) for place in found.places] == ["fwd_minimal.cu:39"]


def test_nothing_is_read() -> None:
    assert findings.parse_compute_sanitizer(CLEAN) == []


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, status: int) -> None:
    """A fake compute-sanitizer that prints `text`."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


TRACEBACK = 'Traceback (most recent call last):\n  File "/x/driver.py", line 64, in _call\n    raise error\nbroken\n'


@pytest.mark.parametrize(
    ("text", "status", "clean"),
    [(MEMCHECK, 91, False), (CLEAN, 91, False), (CLEAN, 0, True), (TRACEBACK, 1, None)],
)
def test_the_tool_decides(
    text: str, status: int, clean: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, monkeypatch, text, status)
    kernel = registry.get("fwd_minimal")
    tile = sanitize.small_tile(kernel)
    found = sanitize.on_gpu("memcheck", kernel, sanitize.small_problems(kernel, tile)[0], tile, 20)
    assert found.clean is clean
    assert bool(found.findings) is (clean is False)
    assert (clean is None) is ("ended with status 1:\nTraceback (most recent call last):\nbroken" in found.message)


def test_a_checker_whose_kernel_prints_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings before the limit are reported, too."""
    fake(tmp_path, monkeypatch, MEMCHECK + "END\nyes\ncat <<'END'\n", 91)
    kernel = registry.get("fwd_minimal")
    tile = sanitize.small_tile(kernel)
    found = sanitize.on_gpu("memcheck", kernel, sanitize.small_problems(kernel, tile)[0], tile, 60)
    assert found.clean is False
    reported, printed = (finding.what for finding in found.findings)
    assert reported == findings.parse_compute_sanitizer(MEMCHECK)[0].what
    assert printed == "the kernel under memcheck printed more than 16 MiB and was ended (a printf in a loop?)"


@pytest.mark.gpu
@pytest.mark.skipif(not tools.find("compute-sanitizer"), reason="compute-sanitizer is not installed")
@pytest.mark.parametrize(("fault", "tool"), [("race", "racecheck"), ("out of bounds", "memcheck")])
def test_a_fault_is_found_on_a_gpu(fault: str, tool: str, project_copy: Path) -> None:
    """Except threads that return before a barrier: the hardware and synccheck allow it, the CPU backend does not."""
    name, old, new, _, _, line = FAULTS[fault]
    source = project_copy / "kernels_cu" / f"{name}.cu"
    source.write_text(source.read_text().replace(old, new))
    done = in_project(project_copy, "sandbox", "sanitize", name, "--backend", "cuda", "--json")
    assert done.returncode == 1, done.stderr
    found = [f for row in json.loads(done.stdout) if row["tool"] == tool for f in row["findings"]]
    lines = source.read_text().splitlines()
    named = [lines[p["line"] - 1] for f in found for p in f["places"] if p["file"] == str(source)]
    assert any(line in text for text in named), found


@pytest.mark.gpu
@pytest.mark.skipif(not tools.find("compute-sanitizer"), reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", compute_sanitizer.TOOLS)
def test_a_shipped_kernel_is_clean_on_a_gpu(tool: str) -> None:
    for name in ("fwd_minimal", "fwd_mma"):
        kernel = registry.get(name)
        tile = sanitize.small_tile(kernel)
        for problem in sanitize.small_problems(kernel, tile):
            found = sanitize.on_gpu(tool, kernel, problem, tile, 120)
            assert found.clean, found.text or found.message


def sanitized(*options: str) -> Result:
    return CliRunner().invoke(cli, ["sanitize", "fwd_minimal", "--backend", "cpu", *options])


def test_a_problem_without_blocks() -> None:
    empty = Problem(1, 1, 0, 16, 64, dtype="float16")
    with pytest.raises(UnsupportedProblem, match="it has no blocks to launch"):
        next(sanitize.inspect(registry.get("fwd_minimal"), HOST, problem=empty))


@needs_sanitizers
def test_a_problem_of_ones_own() -> None:
    rows = json.loads(sanitized("--shape", "1,1,40,16", "--causal", "--json").stdout)
    assert [row["tool"] for row in rows] == list(sanitize.HOST_TOOLS)
    problem, tile = Problem(1, 1, 40, 40, 16, dtype="float16", causal="bottom-right"), rows[0]["tile"]
    assert all((row["problem"], row["tile"]) == (problem.as_json(), tile) for row in rows)
    assert set(tile) == {"BLOCK_M", "BLOCK_N"}
    assert all(row["clean"] for row in rows)
    assert sanitized("--causal").exit_code == 2


SCORES = {  # the Score of a file -> (the tool that reports it, its sentence, the line of the file); "": clean
    "read beyond a tensor": (
        """score = sandbox.Score(
            "x - slope(j + 1)",
            tensors={"slope": np.ones(40, np.float32)},
        )""",
        "address", "out of bounds, read of 4 bytes, in the Score's score: x - slope(j + 1)", 4,
    ),
    "read beyond a tensor, in a mask of several lines": (
        """score = sandbox.Score(mask='''j <= i
            && document(i) == document(j - 1)''', tensors={"document": np.ones(40, np.int32)})""",
        "address", "out of bounds, read of 4 bytes, in the Score's mask: && document(i) == document(j - 1)", 4,
    ),
    "undefined": (
        """score = sandbox.Score("x + (1 << (j + 1))")""",
        "undefined",
        "shift exponent 32 is too large for 32-bit type 'int', in the Score's score: x + (1 << (j + 1))", 3,
    ),
    "none": ("""score = sandbox.Score("x - slope(j)", tensors={"slope": np.ones(40, np.float32)})""", "", "", 0),
}  # fmt: skip


@needs_sanitizers
@pytest.mark.parametrize("mistake", SCORES)
@pytest.mark.sampled(2)
def test_a_mistake_in_a_score_is_found_in_its_file(mistake: str, tmp_path: Path) -> None:
    text, tool, sentence, line = SCORES[mistake]
    file = tmp_path / "own.py"
    file.write_text(f"import numpy as np\nimport sandbox\n{text}\n")
    rows = json.loads(sanitized("--shape", "1,1,40,16", "--score", str(file), "--json").stdout)
    assert len(rows) == len(sanitize.HOST_TOOLS)
    found = {row["tool"]: row["findings"] for row in rows if row["clean"] is not True}
    assert [*found] == ([tool] if tool else [])
    for (finding,) in found.values():
        said, _, expression = sentence.partition(", in the Score's ")  # between them may stand which tensor, and where
        assert finding["what"].startswith(said)
        assert finding["what"].endswith(f", in the Score's {expression}")
        assert {"file": str(file), "line": line} in finding["places"]


def test_the_line_of_a_score_that_compute_sanitizer_names(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text('import sandbox\nscore = sandbox.Score("x + slope(h)", tensors={"slope": [1.0]})\n')
    text = MEMCHECK.replace("/w/kernels_cu/include/tensor.cuh:41", "score:1")
    score = Score("x + slope(h)", tensors={"slope": TensorLike((1,), "float32")}, file=str(file))
    (found,) = findings.parse_compute_sanitizer(findings.resolve_expressions(text, score)[0])
    assert found.places == (SourceLine(str(file), 2), SourceLine("/w/kernels_cu/fwd_minimal.cu", 40))


# ---- which launches are made, and what follows from their results; without a launch

MINIMAL = registry.get("fwd_minimal")
SMALL = sanitize.small_tile(MINIMAL)
TINY = Problem(1, 1, 40, 40, 16, dtype="float16")
CLEAN_REPORT = Report(True, "", ())
RUNTIME_ERROR = Report(False, f"{MINIMAL.source}:7:1: runtime error: no", ())


def inspected(monkeypatch: pytest.MonkeyPatch, device: Device = HOST, what: str = "", **how: Any) -> list[Any]:
    """(tool, tile, problem, clean, message) of each inspection; `what`: the finding of "address"."""

    def examine(tool: str, kernel: Kernel, problem: Problem, tile: Tile, timeout: float) -> sanitize.Inspection:
        wrong = what and tool == "address" and problem == sanitize.small_problems(MINIMAL, SMALL)[0]
        found = (Finding(what),) if wrong else ()
        return sanitize.Inspection(kernel.name, problem, tile, tool, not found, found, f"{timeout:g} s")

    monkeypatch.setattr(sanitize, "on_host" if device == HOST else "on_gpu", examine)
    monkeypatch.setattr(sanitize.pipeline, "load", lambda *given: None)
    monkeypatch.setattr(sanitize.pipeline, "arch_of", lambda device: None if device == HOST else (9, 0))
    monkeypatch.setattr(sanitize.tools, "need", lambda name: name)
    found = sanitize.inspect(MINIMAL, device, **how)
    return [(i.tool, i.tile, i.problem, i.clean, i.message) for i in found]


@pytest.mark.parametrize("device", [HOST, ("cuda", 0)])
def test_every_tool_on_small_problems_and_shipped_tiles(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    tools_of = [*(sanitize.HOST_TOOLS if device == HOST else compute_sanitizer.TOOLS)]
    arch = None if device == HOST else (9, 0)
    pairs = [(SMALL, p) for p in sanitize.small_problems(MINIMAL, SMALL)] + sanitize.shipped_tiles(MINIMAL, arch)
    assert len(pairs) > 2
    expected = [(tool, tile, p, True, "120 s") for tile, p in pairs for tool in tools_of]
    assert inspected(monkeypatch, device) == expected


def test_a_tile_or_a_problem_of_ones_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile(BLOCK_M=64, BLOCK_N=16)
    own = sanitize.small_problems(MINIMAL, tile)
    assert [row[1:3] for row in inspected(monkeypatch, tile=tile, timeout=3)][:: len(sanitize.HOST_TOOLS)] == [
        (tile, p) for p in own
    ]
    rows = inspected(monkeypatch, problem=TINY, timeout=3)
    assert [row[0] for row in rows] == [*sanitize.HOST_TOOLS]
    assert {row[1:] for row in rows} == {(pipeline.tile_on(HOST, MINIMAL, TINY), TINY, True, "3 s")}
    assert {row[1] for row in inspected(monkeypatch, problem=TINY, tile=tile)} == {tile}


@pytest.mark.parametrize(
    ("what", "skipped"),
    [("out of bounds, write of 4 bytes", ["thread", "orders"]), ("out of bounds, read of 4 bytes", []), ("", [])],
)
def test_what_a_stray_store_explains(what: str, skipped: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same problem only."""
    rows = inspected(monkeypatch, what=what)
    none = [(n, row[0], row[4]) for n, row in enumerate(rows) if row[3] is None]
    said = "skipped: a store out of bounds, which must be fixed first, looks like a race"
    tools_of = [*sanitize.HOST_TOOLS]
    assert none == [(tools_of.index(tool), tool, said) for tool in skipped]


def test_no_small_problem_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "small_problems", lambda *given: [])
    tile = Tile(BLOCK_M=64, BLOCK_N=16)
    with pytest.raises(UnsupportedProblem, match=f"fwd_minimal: tile {tile} supports none of the small problems"):
        inspected(monkeypatch, tile=tile)


class Launches:
    """In place of `sanitize.launch_on_host`: each report and the tensors, and what was requested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *results: tuple[Report, list[float]]):
        self.requested: list[Any] = []
        self._results = iter(results)
        monkeypatch.setattr(sanitize, "launch_on_host", self)

    def __call__(self, sanitizer: str, *given: Any, **how: Any) -> tuple[Report, dict[str, np.ndarray]]:
        assert given == (MINIMAL, TINY, SMALL)
        self.requested.append((sanitizer, how))
        report, numbers = next(self._results)
        return report, {"Q": np.zeros(2, np.float16), "O": np.array(numbers, np.float32).reshape(2, -1)}


def on_host(tool: str) -> sanitize.Inspection:
    return sanitize.on_host(tool, MINIMAL, TINY, SMALL, 5)


@pytest.mark.parametrize(
    ("shuffled", "what"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 4]], ""),
        ([[1, 2, 0, 4], [1, 2, 3, 4]], "1 of 4 elements differ between ascending order and shuffle 1, first at (1, 0)"),
        ([[1, 2, 3, 4], [0, 2, 3, 0]], "2 of 4 elements differ between ascending order and shuffle 2, first at (0, 0)"),
    ],
)
def test_orders_are_compared(shuffled: list[list[float]], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch, *((CLEAN_REPORT, numbers) for numbers in ([1, 2, 3, 4], *shuffled)))
    found = on_host("orders")
    assert launches.requested == [("none", {"order": n, "timeout": 5}) for n in (0, 1, 2)]
    assert (found.clean, found.tool, found.problem) == (not what, "orders", TINY)
    assert found.findings == ((Finding(f"O depends on the order of threads: {what}"),) if what else ())


def test_an_order_in_which_the_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch, *((report, [1, 2]) for report in (CLEAN_REPORT, RUNTIME_ERROR, CLEAN_REPORT)))
    assert on_host("orders").findings == (Finding("no", (SourceLine(str(MINIMAL.source), 7),)),)
    assert len(launches.requested) == 3


def test_orders_of_a_kernel_with_atomics() -> None:
    kernel = dataclasses.replace(MINIMAL, deterministic=False, invariant_to=())
    found = sanitize.on_host("orders", kernel, TINY, SMALL, 5)
    assert (found.clean, found.message) == (None, "skipped: the kernel sums with atomics, in any order")


@pytest.mark.parametrize("tool", ["address", "undefined", "thread", "uninitialised"])
def test_a_report_becomes_findings(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch, (RUNTIME_ERROR, [1, 2]))
    found = on_host(tool)
    assert launches.requested == [(tool, {"timeout": 5})]
    assert (found.clean, found.text) == (False, RUNTIME_ERROR.text)
    assert found.findings == (Finding("no", (SourceLine(str(MINIMAL.source), 7),)),)


@pytest.mark.parametrize(
    ("zeros", "read", "findings_of"),
    [
        ([1, 2, 3, 4], None, ()),
        ([1, 2, 3, 5], RUNTIME_ERROR, (7,)),
        ([1, 2, 3, 5], CLEAN_REPORT, ()),  # the read is not detected
    ],
)
def test_local_variables_are_compared(
    zeros: list[float], read: Report | None, findings_of: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [(CLEAN_REPORT, [1, 2, 3, 4]), (CLEAN_REPORT, zeros), *([(read, zeros)] if read else [])]
    launches = Launches(monkeypatch, *results)
    found = on_host("uninitialised")
    stacks: list[dict[str, Any]] = [{}, {"stack": Fill.ZEROS}, {"stack": Fill.REPORTED_NANS}]
    assert launches.requested == [("uninitialised", {"timeout": 5, **how}) for how in stacks[: len(results)]]
    differ = "1 of 4 elements differ between NaN and 0 in them, first at (1, 1)"
    what = f"O depends on uninitialised local variables: {differ}"
    places = tuple(SourceLine(str(MINIMAL.source), line) for line in findings_of)
    assert found.findings == ((Finding(what, places),) if read else ())
    assert found.clean is (read is None)


def test_bits_are_compared() -> None:
    """NaN equals the same NaN; −0 is not 0."""
    some, others = {"O": np.array([np.nan, 0.0])}, {"O": np.array([np.nan, -0.0])}
    assert sanitize._difference("x", "a and b", some, some) == ""
    assert sanitize._difference("x", "a and b", some, others) == (
        "O depends on x: 1 of 2 elements differ between a and b, first at (1,)"
    )


@pytest.mark.parametrize("tool", sanitize.HOST_TOOLS)
def test_a_sanitizer_that_is_missing(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*given: Any, **how: Any) -> Any:
        raise ToolchainMissing("there is none")

    monkeypatch.setattr(sanitize, "launch_on_host", launch)
    found = on_host(tool)
    assert (found.clean, found.message, found.findings, found.tool) == (None, "there is none", (), tool)


class Runs:
    """In place of `instrumented.run`: the entries that were launched, with all arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: str = ""):
        self.launched: list[tuple[Any, ...]] = []
        self.read: list[list[float]] = []  # the first number of each array
        self._failing = failing
        monkeypatch.setattr(sanitize.host, "run", self)

    def __call__(self, sanitizer: str, source: Path, entry: str, defines: Any, grid: Any, block: Any, smem: int,
                 arguments: Any, buffers: dict[Any, np.ndarray], **how: Any) -> Report:  # fmt: skip
        self.launched.append((sanitizer, entry, grid, block, smem, how))
        self.read.append([float(x.flat[0]) for x in buffers.values()])
        if entry == self._failing:
            return Report(False, f"{entry}: 0 bytes past the end of buffer 1 in block (0,0,0)", ())
        return Report(True, entry, (), tuple(x + n + 1 for n, x in enumerate(buffers.values())))


BACKWARD = registry.get("bwd_mma")


@pytest.mark.parametrize("failing", ["", "bwd_mma", "bwd_mma_postprocess"])
def test_every_entry_is_launched_until_one_fails(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, each with what the earlier ones wrote."""
    runs, problem = Runs(monkeypatch, failing), sanitize.small_problems(BACKWARD, BACKWARD.tiles[0])[0]
    how = {"order": 3, "stack": Fill.ZEROS, "timeout": 7.0}
    report, left = sanitize.launch_on_host("address", BACKWARD, problem, BACKWARD.tiles[0], **how)  # type: ignore[arg-type]
    entries = [entry.name for entry in BACKWARD.entries]
    made = entries[: entries.index(failing) + 1] if failing else entries
    assert [launched[1] for launched in runs.launched] == made
    first, tile = BACKWARD.entries[0], BACKWARD.tiles[0]
    sanitizer, _, grid, block, smem, given = runs.launched[0]
    assert (sanitizer, grid, block) == ("address", first.grid(problem, tile), first.block(tile))
    assert smem == first.smem_bytes(problem, tile) > 0
    assert given.items() >= how.items()
    assert report.clean is not bool(failing)
    values = {name: float(x.flat[0]) for name, x in sanitize.suite_of(BACKWARD).inputs(Case("x", problem)).items()}
    for entry, read in zip(BACKWARD.entries, runs.read, strict=False):
        names = [name for name in entry.args if name in left]
        assert read == pytest.approx([values.get(name, 0) for name in names], rel=0.01), entry.name
        if entry.name != failing:
            values |= {name: values.get(name, 0) + n + 1 for n, name in enumerate(names)}
    named = f"{names[1]} {left[names[1]].shape} of 2 bytes each"
    assert report.text == (f"{failing}: 0 bytes past the end of {named} in block (0,0,0)" if failing else made[-1])
    assert {"Q", "K", "V", "dO", "dQ", "dK", "dV", "dQ_accum"} <= {*left}


def test_a_launch_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, of the problem that the parent process names."""
    given: list[Any] = []
    monkeypatch.setattr(sanitize.trial, "launch", lambda *arguments: given.append(arguments))
    monkeypatch.setattr(sanitize.compute_sanitizer, "run", lambda *arguments: given.append(arguments) or ([], "text"))
    found = sanitize.on_gpu("memcheck", MINIMAL, TINY, SMALL, 5)
    assert (found.clean, found.findings, found.text) == (True, (), "text")
    tool, command, timeout, cwd, folders, score = given.pop()
    assert (tool, timeout, cwd, score) == ("memcheck", 5, registry.FOLDER.parent, None)
    assert (registry.FOLDER in folders, folders[-1]) == (True, registry.FOLDER / "include")
    sanitize.launch(command[-1])
    ((kernel, tile, problem, inputs, device),) = given
    assert (kernel.name, tile, problem, device) == ("fwd_minimal", SMALL, TINY, ("cuda", 0))
    assert {*inputs} == {"Q", "K", "V"}
