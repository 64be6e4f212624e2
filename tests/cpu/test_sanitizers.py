"""The CPU backend under sanitizers: they report errors with their line, and have no false positives."""

from __future__ import annotations

import ctypes
import dataclasses
import platform
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from project import SEED, dtype_of, kernel_copy

from sandbox.core import registry
from sandbox.cpu import compiler
from sandbox.cpu import instrumented as sanitize
from sandbox.cpu.build import Sanitizer
from sandbox.cpu.instrumented import Fill, Report
from sandbox.engine.choose import choose_tile
from sandbox.spec import Kernel, Problem, Tile
from sandbox.toolchain.nvrtc import INCLUDE_DIR
from sandbox.toolchain.sources import included_files
from sandbox.verify import sanitize as verifying
from sandbox.verify import suite
from sandbox.verify.cases import Case, inputs_of
from sandbox.verify.sanitize import HOST_TOOLS, launch_on_host, on_host, small_problems, small_tile

KERNELS = list(registry.kernels().values())
pytestmark = pytest.mark.skipif("ziglang" in compiler.find().command, reason="the ziglang package has no sanitizers")
both = pytest.mark.parametrize("sanitizer", ["address", "thread"])
needs_fentry = pytest.mark.skipif(
    platform.machine() != "x86_64" or not compiler.find().is_gcc, reason="-mfentry is GCC's, on x86-64"
)
HALF = "#include <cuda_fp16.h>\n"

SOURCE = registry.get("fwd_minimal").source
LINES = SOURCE.read_text().splitlines()
BARRIERS = [number for number, line in enumerate(LINES, 1) if "__syncthreads()" in line]


@pytest.mark.parametrize(
    ("sanitizer", "grid", "workers"),
    [
        ("thread", (5, 1, 1), 5),
        ("thread", (1, 5, 1), 5),
        ("thread", (1, 1, 5), 5),
        ("thread", (2, 3, 4), 24),
        ("thread", (100, 1, 1), 64),
        ("address", (5, 1, 1), 1),
    ],
)
def test_each_block_has_a_thread_under_threadsanitizer(
    sanitizer: Sanitizer, grid: tuple[int, int, int], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without, races between blocks are not found."""
    launched: list[tuple[int, ...]] = []
    program = SimpleNamespace(path=Path("p"))
    monkeypatch.setattr(sanitize.build, "program", lambda *given: (program, program))
    monkeypatch.setattr(sanitize, "_launch", lambda numbers, *given: launched.append(numbers) or b"")
    monkeypatch.setattr(
        sanitize.process, "run", lambda *given, **how: SimpleNamespace(returncode=1, stdout="", stderr="")
    )
    sanitize.run(sanitizer, SOURCE, "k", {}, grid, (32, 1, 1), 0, [], {}, cluster=2, order=7)
    (numbers,) = launched
    assert numbers == (*grid, 32, 1, 1, 2, 0, workers, 7, Fill.NANS)


def ragged(kernel: Kernel) -> Problem:
    """Causal, lengths that no tile divides, 3 x 2 blocks, two query heads to a key/value head."""
    return small_problems(kernel, small_tile(kernel))[0]


def run_kernel(sanitizer: Sanitizer, kernel: Kernel, problem: Problem, source: Path | None = None) -> Report:
    """One launch of a kernel, or of a changed copy of its source."""
    changed = dataclasses.replace(kernel, source=source or kernel.source)
    return launch_on_host(sanitizer, changed, problem, small_tile(kernel))[0]


def changed(tmp_path: Path, change: Callable[[str], str], of: Path = SOURCE) -> Path:
    """A copy of a kernel's source with one change that keeps the line numbers."""
    before = of.read_text()
    after = change(before)
    assert after != before
    assert after.count("\n") == before.count("\n")
    copy = tmp_path / of.name
    copy.write_text(after)
    return copy


# The address sanitizer finds most faults, in the least time.
TOOLS = [pytest.param(tool, marks=pytest.mark.sampled(3 if tool == "address" else 12)) for tool in HOST_TOOLS]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.sampled(6)
def test_every_kernel_is_clean(kernel: Kernel, tool: str) -> None:
    """A ragged causal problem of several blocks, and one of whole tiles. "address" tests the first, "thread" both,
    the other tools a random one of the two."""
    tile = small_tile(kernel)
    problems = small_problems(kernel, tile)
    assert problems
    if tool == "address":
        problems = problems[:1]
    elif tool != "thread":
        problems = [random.Random(f"{SEED} {kernel.name} {tool}").choice(problems)]
    for problem in problems:
        found = on_host(tool, kernel, problem, tile, timeout=60)
        assert found.clean or (tool == "orders" and not kernel.deterministic), found.text or found
        assert found.findings == ()


def test_a_load_by_the_warp_that_runs_last_is_no_deadlock() -> None:
    """In a shuffled order a warp may issue a TMA load in the step in which all others already wait."""
    kernel = registry.get("fwd_wgmma_invariant")
    problem = Problem(1, 10, 10, 96, 64, Hk=2, dtype="bfloat16", causal="bottom-right", invariant=True)
    found = on_host("orders", kernel, problem, choose_tile(kernel, problem, (9, 0)), timeout=60)
    assert found.clean, found.text or found


def test_a_tile_in_two_pages_reads_no_entry_behind_the_block_table() -> None:
    """Three pages, and tiles of 32 keys: the second half of the last one has no page."""
    tile = Tile(BLOCK_M=16, BLOCK_N=32, WARPS=4, STAGES=2, BLOCKS=132, CLUSTER=1)
    problem = Problem(1, 2, 1, 48, 64, dtype="float16", page_size=16)
    found = on_host("address", registry.get("fwd_decode"), problem, tile, timeout=60)
    assert found.clean, found.text or found


@pytest.mark.parametrize("number", BARRIERS)
def test_each_barrier_is_needed(number: int, tmp_path: Path) -> None:
    """Without it ThreadSanitizer reports a race between a load into a tile and its use."""

    def without(text: str) -> str:
        lines = text.splitlines(keepends=True)
        lines[number - 1] = lines[number - 1].replace("__syncthreads();", "")
        return "".join(lines)

    kernel = registry.get("fwd_minimal")
    report = run_kernel("thread", kernel, ragged(kernel), changed(tmp_path, without))
    assert not report.clean
    assert "data race" in report.text
    named = {line for name, line in report.lines if name == "fwd_minimal.cu"}
    loads = {i for i, line in enumerate(LINES, 1) if "load_tile<" in line}
    uses = {i for i, line in enumerate(LINES, 1) if re.search(r"[+*] [KV]_smem\[", line)}
    assert loads
    assert uses
    assert named & loads, report.text
    assert named & uses, report.text


BACKWARD_BARRIERS = [
    (name, number)
    for name in ("bwd_minimal", "bwd_block2d")
    for number, line in enumerate(registry.get(name).source.read_text().splitlines(), 1)
    if re.search(r"__sync(threads|warp)\(\);", line)
]


@pytest.mark.parametrize(("name", "number"), BACKWARD_BARRIERS)
@pytest.mark.sampled(4)
def test_each_barrier_of_a_backward_is_needed(name: str, number: int, tmp_path: Path) -> None:
    """Without this block or warp barrier an entry of the kernel has a race."""
    kernel = registry.get(name)

    def without(text: str) -> str:
        lines = text.splitlines(keepends=True)
        lines[number - 1] = re.sub(r"__sync(threads|warp)\(\);", "", lines[number - 1])
        return "".join(lines)

    source = changed(tmp_path, without, kernel.source)
    report = run_kernel("thread", kernel, ragged(kernel), source)
    assert "data race" in report.text, report.text


def test_an_out_of_bounds_row_is_reported(tmp_path: Path) -> None:
    kernel = registry.get("fwd_minimal")
    old = "query_row < head.Sq ?"
    (line,) = [i for i, text in enumerate(LINES, 1) if old in text]
    source = changed(tmp_path, lambda text: text.replace(old, "query_row <= head.Sq ?"))
    report = run_kernel("address", kernel, Problem(1, 1, 33, 40, 16), source)
    assert "heap-buffer-overflow" in report.text
    assert ("fwd_minimal.cu", line) in report.lines


UNWRITTEN = {  # parts of V in fwd_wgmma_fp8, which transpose warps write
    "transposed before the load completes": (
        "VPipeline::wait(base, i);",
        "",
        "shared memory read before",
    ),
    "partly transposed": (
        "transpose_V<TRANSPOSE_WARPS,",
        "transpose_V<2 * TRANSPOSE_WARPS,",
        "wgmma reads shared memory + ",
    ),
}


@pytest.mark.parametrize("case", UNWRITTEN)
def test_tma_and_wgmma_operands_must_be_written(case: str, tmp_path: Path) -> None:
    """A pending TMA load, and a partly written operand of wgmma."""
    old, new, message = UNWRITTEN[case]
    kernel = registry.get("fwd_wgmma_fp8")
    source = kernel_copy(kernel, tmp_path, "fwd_load_fp8.cuh", lambda text: text.replace(old, new))
    report = run_kernel("uninitialised", kernel, Problem(1, 1, 64, 64, 64, dtype="float8_e4m3"), source)
    assert message in report.text, report.text
    assert "before anything was written there" in report.text


def test_a_warp_that_lags_behind_is_waited_for() -> None:
    """With a shuffled order one warp lags: transpose warps must wait until it has consumed the previous V tile."""
    kernel = registry.get("fwd_wgmma_fp8")
    tile = small_tile(kernel)
    problem = Problem(2, 1, tile["BLOCK_M"], 5 * tile["BLOCK_N"], 32, dtype="float8_e4m3")
    found = on_host("orders", kernel, problem, tile, timeout=60)
    assert found.clean, found.findings


def test_consumers_that_lag_behind_are_waited_for() -> None:
    """One block with four work tiles: V of the next one is loaded when both consumers have read the previous V. With
    one key tile per head nothing is added to dQ: the result does not depend on the order of threads."""
    kernel = dataclasses.replace(registry.get("bwd_wgmma_persistent"), deterministic=True)
    tile = Tile(**{**kernel.tiles[0], "BLOCKS": 1})
    found = on_host("orders", kernel, Problem(1, 4, 130, 100, 40, dtype="float16"), tile, timeout=60)
    assert found.clean, found.findings


def test_all_lanes_have_read_a_work_tile() -> None:
    """Keys in pages, which the lanes of a warp load: the next work tile of the block overwrites this one."""
    problem = Problem(3, 4, 70, 160, 64, Hk=2, dtype="float16", causal="bottom-right", page_size=16, pages=40)
    tile = Tile(BLOCK_M=64, BLOCK_N=64, STAGES=2, BLOCKS=1)
    found = on_host("thread", registry.get("fwd_wgmma"), problem, tile, timeout=60)
    assert found.clean, found.findings


@pytest.mark.parametrize(
    ("name", "dtype", "loads"), [("fwd_wgmma_fp8", "float8_e4m3", {"LOADS": 2}), ("fwd_wgmma_stream_k", "float16", {})]
)
def test_partial_sums_of_other_blocks_are_waited_for(name: str, dtype: str, loads: dict[str, int]) -> None:
    """A work tile whose keys two blocks share (stream-K)."""
    kernel, problem = registry.get(name), Problem(1, 1, 64, 832, 32, dtype=dtype)
    tile = Tile(BLOCK_M=64, BLOCK_N=64, STAGES=2, BLOCKS=2, **loads)
    assert kernel.numbers["full_wave_tiles"](problem, tile) == 0
    report = launch_on_host("thread", kernel, problem, tile)[0]
    assert report.clean, report.text
    in_any_order = on_host("orders", kernel, problem, tile, timeout=60)
    assert in_any_order.clean, in_any_order.findings


@pytest.mark.parametrize("tool", ["thread", "uninitialised"])
@pytest.mark.parametrize("D", [64, 256])
def test_parts_of_work_tiles_are_clean(tool: Sanitizer, D: int) -> None:
    """bwd_wgmma_stream_k with work tiles that are split, and others that are not."""
    kernel, problem = registry.get("bwd_wgmma_stream_k"), Problem(1, 2, 330, 300, D, dtype="float16")
    tile = Tile(BLOCK_M=64, BLOCK_N=64 if D > 128 else 128, STAGES=2, BLOCKS=4)
    assert 0 < kernel.numbers["full_wave_tiles"](problem, tile) < kernel.grid(problem, tile)[0]
    report = launch_on_host(tool, kernel, problem, tile)[0]
    assert report.clean, report.text


@pytest.mark.parametrize("sent", [True, False])
def test_data_sent_in_a_cluster_must_be_written(sent: bool, tmp_path: Path) -> None:
    """Data in shared memory that another block of the cluster wrote."""
    kernel, problem = registry.get("fwd_decode"), Problem(1, 4, 1, 100, 32, Hk=2, dtype="float16")
    tile = Tile(BLOCK_M=16, BLOCK_N=16, WARPS=2, STAGES=2, BLOCKS=1, CLUSTER=2)
    condition = "r < valid_rows" if sent else "r < 0"
    source = kernel_copy(
        kernel,
        tmp_path,
        "decode_epilogue.cuh",
        lambda text: text.replace("if (stores) store_sums", f"if ({condition}) store_sums"),
    )
    report = launch_on_host("uninitialised", dataclasses.replace(kernel, source=source), problem, tile)[0]
    assert report.clean is sent, report.text
    assert sent or "shared memory read before anything was written there" in report.text


@pytest.mark.parametrize("fenced", [True, False])
def test_data_that_tma_overwrites_must_be_fenced(fenced: bool, tmp_path: Path) -> None:
    """Results of a split in the stages of K and V, into which the keys of the next one are loaded."""
    kernel = registry.get("fwd_decode")
    problem = Problem(3, 1, 1, 4800, 128, dtype="bfloat16", kv_dtype="float8_e4m3", page_size=48)
    tile = Tile(BLOCK_M=32, BLOCK_N=32, WARPS=8, STAGES=3, BLOCKS=1, CLUSTER=1)
    fence = "release_results() { fence_proxy_async(); }"
    change = (lambda text: text + "\n") if fenced else (lambda text: text.replace(fence, "release_results() {}"))
    source = kernel_copy(kernel, tmp_path, "decode_load_tma.cuh", change)
    report = launch_on_host("uninitialised", dataclasses.replace(kernel, source=source), problem, tile)[0]
    assert report.clean is fenced, report.text
    assert fenced or "wrote data that a TMA load overwrites and did not call fence_proxy_async" in report.text


def fences(name: str) -> list[tuple[str, int]]:
    """(file, line) of each call of fence_proxy_async in a kernel's source and headers."""
    return [
        (path.name, number)
        for path in included_files(registry.get(name).source, (INCLUDE_DIR,))[0]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "fence_proxy_async();" in line
    ]


def own_fences(name: str) -> list[tuple[str, int]]:
    """Those that bwd_wgmma does not have. Without the one of a block map, which these problems do not have."""
    return [f for f in fences(name) if f not in fences("bwd_wgmma") and f[0] != "block_sparse.cuh"]


FENCES = [("bwd_wgmma", *fence) for fence in fences("bwd_wgmma")] + [
    (name, *random.Random(f"{SEED} {name}").choice(own_fences(name)))
    for name in ("fwd_wgmma", "fwd_wgmma_fp8", "fwd_decode_wgmma", "bwd_wgmma_head", "bwd_wgmma_persistent")
]


@pytest.mark.parametrize(("name", "file", "number"), FENCES)
@pytest.mark.sampled(12)
def test_each_proxy_fence_is_needed(name: str, file: str, number: int, tmp_path: Path) -> None:
    """Without it a read by TMA or wgmma is reported, for head widths of 64, 256, or 192 and 128."""

    def without(text: str) -> str:
        lines = text.splitlines(keepends=True)
        lines[number - 1] = lines[number - 1].replace("fence_proxy_async();", "")
        return "".join(lines)

    kernel = registry.get(name)
    unfenced = dataclasses.replace(kernel, source=kernel_copy(kernel, tmp_path, file, without))
    dtype = dtype_of(kernel)
    for D, Dv in ((64, 64), (256, 256), (192, 128)):
        problem = Problem(1, 2, 257, 131, D, Hk=1, Dv=Dv, dtype=dtype, causal="bottom-right")
        if kernel.why_unsupported(problem):
            continue
        report, _ = launch_on_host("uninitialised", unfenced, problem, choose_tile(kernel, problem, None))
        if not report.clean:
            assert "fence_proxy_async" in report.text
            return
    raise AssertionError("the missing fence is not reported")


def test_many_pending_boxes() -> None:
    """Several fibers grow the runtime's list of TMA loads: not a race of the kernel."""
    kernel, problem = registry.get("fwd_wgmma"), Problem(1, 1, 131, 85, 256, dtype="float16")
    tile = Tile(BLOCK_M=128, BLOCK_N=80, STAGES=2, BLOCKS=1)
    report = launch_on_host("thread", kernel, problem, tile)[0]
    assert report.clean, report.text


PAGED = Problem(2, 4, 3, 160, 64, Hk=2, dtype="float16", causal="bottom-right", page_size=16, pages=25)
RAGGED = Problem(0, 2, 0, 0, 64, dtype="float16", lengths=((40, 40), (20, 20)))
RAGGED_PAGED = Problem(0, 4, 0, 0, 64, Hk=2, dtype="float16", lengths=((40, 50), (20, 60)), page_size=1)
SHORTENED = Problem(2, 2, 20, 40, 32, dtype="float16", key_lengths=True)
INVALID_INDICES: list[tuple[str, Problem, dict[str, Any]]] = [
    ("fwd_decode", PAGED, {"block_table": {(0, 0): 10**6, (1, 1): -(10**6)}, "key_lengths": {...: 160}}),
    ("fwd_decode", PAGED, {"block_table": {(1, 1): -(10**6)}, "key_lengths": {...: 160}}),
    *((name, RAGGED, {"cu_seqlens_q": {...: offsets}}) for name in ("fwd_mma", "bwd_wgmma")
      for offsets in ((0, 50, 70), (-20, 40, 60))),
    *((name, RAGGED, {"cu_seqlens_k": {...: offsets}}) for name in ("fwd_minimal", "bwd_mma")
      for offsets in ((0, 50, 70), (-20, 40, 60))),
    ("fwd_minimal", SHORTENED, {"key_lengths": {...: (10**6, -(10**6))}}),
    ("fwd_mma", SHORTENED, {"key_lengths": {...: (10**6, -(10**6))}}),
    ("fwd_decode", PAGED, {"key_lengths": {...: (10**6, -(10**6))}}),
    *((name, problem, {"key_lengths": {...: (10**6, -(10**6))}, "block_table": {(0, 1): 10**6}})
      for name, problem in (("fwd_mma", PAGED), ("fwd_block2d", RAGGED_PAGED), ("fwd_decode", RAGGED_PAGED))),
    *(("fwd_mma", RAGGED_PAGED, {"cu_seqlens_q": {...: offsets}}) for offsets in ((0, 50, 70), (-20, 40, 60))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "problem", "invalid"), INVALID_INDICES)
@pytest.mark.sampled(24)
def test_indices_outside_of_the_tensors_are_clamped(
    name: str, problem: Problem, invalid: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invalid page numbers, offsets and lengths in kernels without checks, as on a GPU."""

    def bad_inputs(computes: str, case: Case) -> dict[str, np.ndarray]:
        inputs = {array: numbers.copy() for array, numbers in inputs_of(computes, case).items()}
        for array, places in invalid.items():
            for place, number in places.items():
                inputs[array][place] = number
        return inputs

    monkeypatch.setattr(suite, "inputs_of", bad_inputs)
    kernel = registry.get(name)
    unchecked = dataclasses.replace(kernel, macros={**kernel.macros, "CHECKED_KERNELS": 0})
    report, _ = launch_on_host("address", unchecked, problem, choose_tile(kernel, problem, None))
    assert report.clean, report.text


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.ragged], ids=lambda kernel: kernel.name)
@pytest.mark.sampled(30)
def test_ragged_batches_stay_in_bounds(kernel: Kernel) -> None:
    """Blocks without a tile, sequences without queries or keys, and an option for each sequence."""
    lengths = ((40, 70), (0, 20), (33, 0), (20, 20))
    options = {"alibi": (4, 2)} if kernel.computes != "preprocess" else {}
    problem = Problem(0, 2, 0, 0, 64, Hk=1, dtype=dtype_of(kernel), lengths=lengths, causal="bottom-right", **options)
    report, _ = launch_on_host("address", kernel, problem, choose_tile(kernel, problem, None))
    assert report.clean, report.text


def test_tensors_of_the_score_are_buffers_too() -> None:
    """Tensors of the score are allocated with their exact size."""
    problem = Problem(1, 2, 33, 40, 16, alibi=(2,), bias=(1, 2, 33, 40), mask=(1, 1, 33, 40), key_lengths=True)
    report = run_kernel("address", registry.get("fwd_minimal"), problem)
    assert report.clean, report.text


def test_an_out_of_bounds_read_in_a_header_is_reported(tmp_path: Path) -> None:
    """In a copy of score_mod.cuh next to a copy of the kernel, which comes first in the include path."""
    header = SOURCE.parent / "include" / "score_mod.cuh"
    old = "score.slopes[b * score.slopes_stride_b + h * score.slopes_stride_h]"
    (line,) = [i for i, text in enumerate(header.read_text().splitlines(), 1) if old in text]
    changed(tmp_path, lambda text: text.replace(old, "score.slopes[h + 1]"), header)
    kernel = registry.get("fwd_minimal")
    source = tmp_path / SOURCE.name
    source.write_text(SOURCE.read_text())
    report = run_kernel("address", kernel, Problem(1, 1, 33, 40, 16, alibi=(1,)), source)
    assert "heap-buffer-overflow" in report.text
    assert ("score_mod.cuh", line) in report.lines, report.text
    assert any(name == "fwd_minimal.cu" and "const Head head(" in LINES[at - 1] for name, at in report.lines)


@both
def test_a_return_above_a_barrier(sanitizer: Sanitizer, tmp_path: Path) -> None:
    """Only the error of the barrier is reported."""
    old = "    float m = -INF"
    source = changed(tmp_path, lambda text: text.replace(old, "    if (query_row >= head.Sq) return;" + old))
    kernel = registry.get("fwd_minimal")
    report = run_kernel(sanitizer, kernel, ragged(kernel), source)
    assert not report.clean
    assert "Sanitizer" not in report.text
    assert "barrier not reached by every thread" in report.text
    assert ("fwd_minimal.cu", BARRIERS[0]) in report.lines
    assert "returned" in report.text


def run_text(
    tmp_path: Path, sanitizer: Sanitizer, text: str, *buffers: np.ndarray, grid: int = 1, block: int = 32,
    smem: int = 0, **options: Any,
) -> Report:  # fmt: skip
    """A kernel called `k` in k.cu, on these arrays."""
    source = tmp_path / "k.cu"
    source.write_text(text)
    arguments = [ctypes.c_void_p() for _ in buffers]
    return sanitize.run(
        sanitizer,
        source,
        "k",
        {},
        (grid, 1, 1),
        (block, 1, 1),
        smem,
        arguments,
        {(i, 0): buffer for i, buffer in enumerate(buffers)},
        **options,
    )


def line_of(text: str) -> tuple[str, int]:
    """The location of the comment HERE."""
    return ("k.cu", next(i for i, line in enumerate(text.splitlines(), 1) if "// HERE" in line))


# Two groups of copies; the second one is used.
COPY = """#define DTYPE_float32 1
        #define HEAD_DIM 16
        #include "ptx.cuh"
        extern "C" __global__ void k(float* out) {{
            __shared__ __align__(16) float a[192], b[192];
            __shared__ volatile float sum[48];
            cp_async_16(smem_address(&a[4 * threadIdx.x]), out, true);
            cp_async_commit();
            cp_async_16(smem_address(&b[4 * threadIdx.x]), out, true);
            cp_async_commit();
            {wait}
            sum[threadIdx.x] = a[4 * threadIdx.x];
            sum[threadIdx.x] = b[4 * threadIdx.x];  // HERE
        }}"""

BROKEN = {
    "write past dynamic shared memory": (
        "address",
        """extern "C" __global__ void k(float* out) {
            extern __shared__ float a[];
            a[threadIdx.x + 1] = 1.0f;  // HERE
            __syncthreads();
            out[threadIdx.x] = a[threadIdx.x];
        }""",
    ),
    "write past static shared memory": (
        "address",
        """extern "C" __global__ void k(float* out) {
            __shared__ float a[32];
            a[threadIdx.x + 1] = 1.0f;  // HERE
            __syncthreads();
            out[threadIdx.x] = a[threadIdx.x];
        }""",
    ),
    "write past a local array": (
        "address",
        """extern "C" __global__ void k(float* out) {
            float a[8];
            for (int i = 0; i <= int(threadIdx.x); ++i) a[i] = i;  // HERE
            out[threadIdx.x] = a[threadIdx.x % 8];
        }""",
    ),
    "misaligned vector": (
        "address",
        """extern "C" __global__ void k(float* out) {
            reinterpret_cast<float4*>(out + 1)[0].x = 1.0f;  // HERE
        }""",
    ),
    "shift too far": (
        "undefined",
        """extern "C" __global__ void k(float* out) {
            out[threadIdx.x] = 1 << (threadIdx.x + 1);  // HERE
        }""",
    ),
    "unwritten static shared memory": (
        "uninitialised",
        """extern "C" __global__ void k(float* out) {
            __shared__ float a[32];
            if (threadIdx.x != 7) a[threadIdx.x] = 1.0f;
            __syncthreads();
            out[threadIdx.x] = a[31 - threadIdx.x];  // HERE
        }""",
    ),
    "dynamic shared memory that the previous block wrote": (
        "uninitialised",
        """extern "C" __global__ void k(float* out) {
            extern __shared__ float a[];
            if (blockIdx.x == 0) a[threadIdx.x] = 1.0f;
            __syncthreads();
            out[threadIdx.x] = a[threadIdx.x];  // HERE
        }""",
    ),
    "half of a vector unwritten": (
        "uninitialised",
        """extern "C" __global__ void k(float* out) {
            __shared__ __align__(16) float a[128];
            a[4 * threadIdx.x] = a[4 * threadIdx.x + 1] = a[4 * threadIdx.x + 2] = 1.0f;
            const float4 v = *reinterpret_cast<float4*>(&a[4 * threadIdx.x]);  // HERE
            out[threadIdx.x] = v.x + v.y + v.z + v.w;
        }""",
    ),
    "destination of a pending copy": (
        "address",
        COPY.format(wait="cp_async_wait<1>();"),
    ),
    "unwritten destination of a pending copy": (
        "uninitialised",
        COPY.format(wait="cp_async_wait<1>();"),
    ),
    "bulk store of unwritten floats": (
        "uninitialised",
        """#define DTYPE_float16 1
        #define HEAD_DIM 64
        #define RAGGED 0
        #include "hopper.cuh"
        extern "C" __global__ void k(float* out) {
            extern __shared__ __align__(16) float a[];
            if (threadIdx.x) return;
            a[0] = a[1] = a[2] = 1.0f;
            bulk_store(out, smem_address(a), 16);  // HERE
            tma_store_commit();
            tma_store_wait_complete();
        }""",
    ),
    "race between blocks": (
        "thread",
        """extern "C" __global__ void k(float* out) {
            for (int i = 0; i < 300000; ++i)  // long enough for a second worker to start
                if (threadIdx.x == 0) out[0] += 1.0f;  // HERE
        }""",
    ),
    "race between threads without a barrier": (
        "thread",
        """extern "C" __global__ void k(float* out) {
            if (blockIdx.x == 0) out[threadIdx.x / 2] = threadIdx.x;  // HERE
        }""",
    ),
    "race that a shuffle does not order": (
        "thread",
        """extern "C" __global__ void k(float* out) {
            __shared__ float a[32];
            a[threadIdx.x] = 1.0f;
            const float v = __shfl_xor_sync(~0u, 1.0f, 1);
            if (blockIdx.x == 0) out[threadIdx.x] = v + a[threadIdx.x ^ 1];  // HERE
        }""",
    ),
    "race between halves of a warp that synchronise separately": (
        "thread",
        """extern "C" __global__ void k(float* out) {
            __shared__ float a[32];
            const unsigned half = threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u;
            __syncwarp(half);
            a[threadIdx.x] = 1.0f;
            __syncwarp(half);
            if (blockIdx.x == 0) out[threadIdx.x] = a[threadIdx.x ^ 16];  // HERE
        }""",
    ),
    "race with what follows the next __syncwarp": (
        "thread",
        """extern "C" __global__ void k(float* out) {
            __shared__ float a;
            __syncwarp();
            if (threadIdx.x == 0) a = 1.0f;
            if (threadIdx.x == 1 && blockIdx.x == 0) out[0] = a;  // HERE
            __syncwarp();
        }""",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_errors_are_found(name: str, tmp_path: Path) -> None:
    sanitizer, text = BROKEN[name]
    out = np.zeros(32, np.float32)
    report = run_text(tmp_path, sanitizer, text, out, grid=2, smem=4 * 32)
    assert not report.clean
    assert line_of(text) in report.lines, report.text


CLEAN = {
    "copies with a wait": COPY.format(wait="cp_async_wait<0>();"),
    "copies that are not waited for, and the next block": """
        #define DTYPE_float32 1
        #define HEAD_DIM 16
        #include "ptx.cuh"
        extern "C" __global__ void k(float* out) {
            __shared__ __align__(16) float a[192];
            if (blockIdx.x == 0) cp_async_16(smem_address(&a[4 * threadIdx.x]), out, true);
            else a[4 * threadIdx.x] = 1.0f;
        }""",
    "atomics": """extern "C" __global__ void k(float* out) { atomicAdd(&out[0], 1.0f); }""",
    "the last block computes the sum": """
        extern "C" __global__ void k(float* out) {
            __shared__ bool last;
            if (threadIdx.x == 0) {
                out[1 + blockIdx.x] = 1.0f + blockIdx.x;
                __threadfence();
                last = atomicAdd(reinterpret_cast<unsigned*>(&out[31]), 1u) == gridDim.x - 1;
                __threadfence();
                if (last)
                    for (int b = 0; b < gridDim.x; ++b) out[0] += out[1 + b];
            }
        }""",
    "shared memory reused by every block": """
        extern "C" __global__ void k(float* out) {
            extern __shared__ float a[];
            __shared__ float b[48];
            a[threadIdx.x] = b[threadIdx.x] = threadIdx.x;
            __syncthreads();
            if (threadIdx.x < 2) out[blockIdx.x * 2 + threadIdx.x] = a[47 - threadIdx.x] + b[47 - threadIdx.x];
        }""",
    "groups within a warp": """
        extern "C" __global__ void k(float* out) {
            __shared__ float a[48];
            const int t = threadIdx.x;
            const unsigned mine = t % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
            for (int i = 0; i < 5; ++i) {
                if (t % 32 < 16) __syncwarp(mine);
                a[t] = i;
                __syncwarp(mine);
                const float v = a[t ^ 1];
                __syncwarp();
                a[t ^ 1] = v;
                __syncwarp(mine);
            }
            if (blockIdx.x == 0 && t < 32) out[t] = a[t];
        }""",
}


LOCALS = {  # reads of uninitialised local variables
    "of the kernel": """extern "C" __global__ void k(float* out) {
            float x[4];
            out[threadIdx.x] = x[threadIdx.x % 4];  // HERE
        }""",
    "of a function called after another": """
        __device__ __noinline__ float first(int i) { float x[4] = {1.0f, 1.0f, 1.0f, 1.0f}; return x[i]; }
        __device__ __noinline__ float second(int i) {
            float x[4];
            return x[i];  // HERE
        }
        extern "C" __global__ void k(float* out) {
            out[threadIdx.x] = first(threadIdx.x % 4);
            out[threadIdx.x] = second(threadIdx.x % 4);
        }""",
    "in a structure": """
        struct Pair { __half a; __half b; float x[2]; };
        extern "C" __global__ void k(float* out) {
            Pair pair;
            pair.a = __half(1.0f);
            out[threadIdx.x] = pair.x[threadIdx.x % 2];  // HERE
        }""",
}


@needs_fentry
@pytest.mark.parametrize("name", LOCALS)
def test_uninitialised_locals_are_filled(name: str, tmp_path: Path) -> None:
    """With NaN or zeros; with REPORTED_NANS a read is reported."""
    out = np.ones(32, np.float32)
    run = lambda stack: run_text(tmp_path, "uninitialised", HALF + LOCALS[name], out, stack=stack)  # noqa: E731
    assert np.isnan(run(Fill.NANS).contents[0]).all()
    assert (run(Fill.ZEROS).contents[0] == 0).all()
    report = run(Fill.REPORTED_NANS)
    assert "a local array read before anything was written there" in report.text
    assert line_of(HALF + LOCALS[name]) in report.lines


def test_an_initialised_local_is_no_finding(tmp_path: Path) -> None:
    text = """extern "C" __global__ void k(float* out) {
            float x[4];
            for (int i = 0; i < 4; ++i) x[i] = i;
            out[threadIdx.x] = x[threadIdx.x % 4];
        }"""
    for stack in Fill:
        report = run_text(tmp_path, "uninitialised", text, np.zeros(32, np.float32), stack=stack)
        assert report.clean, report.text
        assert np.array_equal(report.contents[0], np.arange(32) % 4)


@pytest.mark.parametrize("sanitizer", ["address", "undefined", "thread", "uninitialised"])
@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.sampled(4)
def test_nothing_is_found(name: str, sanitizer: Sanitizer, tmp_path: Path) -> None:
    out = np.zeros(32, np.float32)
    report = run_text(tmp_path, sanitizer, CLEAN[name], out, grid=15, block=48, smem=4 * 48)
    assert report.clean, report.text


@pytest.mark.complete
def test_many_blocks_of_1024_threads(tmp_path: Path) -> None:
    """More threads than ThreadSanitizer supports if all blocks ran concurrently."""
    text = 'extern "C" __global__ void k(float* out) { __syncthreads(); if (threadIdx.x == 0) out[blockIdx.x] = 1.0f; }'
    report = run_text(tmp_path, "thread", text, np.zeros(9, np.float32), grid=9, block=1024)
    assert report.clean, report.text


@pytest.mark.parametrize("tool", ["address", "thread"])
@pytest.mark.sampled(2)
def test_gradients_of_bias_and_sink(tool: Sanitizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The additional entry points of the preprocess kernel: the blocks of one sum tiles in shared memory."""
    kernel, made = registry.get("bwd_preprocess"), verifying.trial.outputs_and_scratch
    problem = Problem(1, 2, 70, 90, 16, Hk=1, dtype="float16", causal="bottom-right", bias=(1, 1, 1, 90), sink=True)
    gradients = {"dbias": (problem.bias, "float16"), "dsink": ((2,), "float32")}
    monkeypatch.setattr(verifying.trial, "outputs_and_scratch", lambda *of: {**made(*of), **gradients})
    report, arrays = launch_on_host(tool, kernel, problem, small_tile(kernel))
    assert report.clean, report.text
    assert all(np.count_nonzero(arrays[name]) for name in gradients)
