"""The CPU backend under AddressSanitizer and ThreadSanitizer: they find what is wrong, by line, and nothing else."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sandbox import choose, dlpack, registry
from sandbox.arguments import ARGUMENTS, ArgumentBlock
from sandbox.cases import Case, make_inputs
from sandbox.cpu import compiler, sanitize
from sandbox.cpu.build import Sanitizer
from sandbox.cpu.sanitize import Report
from sandbox.spec import Kernel, Problem, Tile

KERNELS = [kernel for kernel in registry.kernels().values() if kernel.computes == "forward"]
pytestmark = pytest.mark.skipif("ziglang" in compiler.find().command, reason="the ziglang package has no sanitizers")
both = pytest.mark.parametrize("sanitizer", ["address", "thread"])

SOURCE = registry.get("fwd_minimal").source
LINES = SOURCE.read_text().splitlines()
BARRIERS = [number for number, line in enumerate(LINES, 1) if "__syncthreads()" in line]


def ragged(kernel: Kernel) -> Problem:
    """Causal, lengths that no tile divides, 3 x 2 blocks, two query heads to a key/value head."""
    tile = smallest_tile(kernel)
    Sq, Sk = 2 * tile.get("BLOCK_M", 64) + 3, 2 * tile.get("BLOCK_N", 64) + 5
    return Problem(1, 2, Sq, Sk, 16, Hk=1, dtype=kernel.dtypes[-1], causal="bottom-right")


def smallest_tile(kernel: Kernel) -> Tile:
    return min(kernel.tiles, key=lambda tile: np.prod(list(tile.values())))


def run_forward(sanitizer: Sanitizer, kernel: Kernel, problem: Problem, source: Path | None = None) -> Report:
    """One launch of a kernel, or of a changed copy of its source, in buffers of exact size."""
    tile = choose.choose_tile(kernel, problem, None, smallest_tile(kernel))
    q, k, v = map(np.ascontiguousarray, make_inputs(Case("sanitize", problem)))
    arrays = {"Q": q, "K": k, "V": v, "O": np.zeros_like(q), "LSE": np.zeros(q.shape[:3], np.float32)}
    arguments = ArgumentBlock(kernel, problem, tile, {name: dlpack.view(array) for name, array in arrays.items()})
    buffers = {i: arrays[ARGUMENTS[name].tensor] for i, name in enumerate(kernel.args) if ARGUMENTS[name].tensor}
    return sanitize.run(
        sanitizer, source or kernel.source, kernel.name, kernel.defines(problem, tile), kernel.grid(problem, tile),
        kernel.block(tile), kernel.smem_bytes(problem, tile), arguments.values, buffers,
    )  # fmt: skip


def changed(tmp_path: Path, change: Callable[[str], str], of: Path = SOURCE) -> Path:
    """A copy of a kernel's source with one thing changed; its line numbers stay."""
    before = of.read_text()
    after = change(before)
    assert after != before
    assert after.count("\n") == before.count("\n")
    copy = tmp_path / of.name
    copy.write_text(after)
    return copy


@both
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_is_clean(kernel: Kernel, sanitizer: Sanitizer) -> None:
    """On a ragged causal problem of several blocks, and on whole tiles."""
    tile = smallest_tile(kernel)
    whole = Problem(2, 1, tile.get("BLOCK_M", 64), 2 * tile.get("BLOCK_N", 64), 32, dtype=kernel.dtypes[0])
    for problem in (ragged(kernel), whole):
        if choose.refuses_tile(kernel, problem, tile, None) or kernel.refuses(problem, None):
            continue
        report = run_forward(sanitizer, kernel, problem)
        assert report.clean, report.text
        assert report.lines == ()


@pytest.mark.parametrize("number", BARRIERS)
def test_each_barrier_is_needed(number: int, tmp_path: Path) -> None:
    """Without it, ThreadSanitizer names a load into the tile, or the use of it, beside the missing barrier."""

    def without(text: str) -> str:
        lines = text.splitlines(keepends=True)
        lines[number - 1] = lines[number - 1].replace("__syncthreads();", "")
        return "".join(lines)

    kernel = registry.get("fwd_minimal")
    report = run_forward("thread", kernel, ragged(kernel), changed(tmp_path, without))
    assert not report.clean
    assert "data race" in report.text
    named = {line for name, line in report.lines if name == "fwd_minimal.cu"}
    loads = {i for i, line in enumerate(LINES, 1) if "load_tile<" in line}
    uses = {i for i, line in enumerate(LINES, 1) if re.search(r"[+*] [KV]_smem\[", line)}
    assert loads
    assert uses
    assert named & loads, report.text
    assert named & uses, report.text


def test_a_row_too_far_is_named(tmp_path: Path) -> None:
    kernel = registry.get("fwd_minimal")
    old = "query_row < score.Sq ?"
    (line,) = [i for i, text in enumerate(LINES, 1) if old in text]
    source = changed(tmp_path, lambda text: text.replace(old, "query_row <= score.Sq ?"))
    report = run_forward("address", kernel, Problem(1, 1, 33, 40, 16), source)
    assert "heap-buffer-overflow" in report.text
    assert ("fwd_minimal.cu", line) in report.lines


def test_a_row_too_far_in_a_header_is_named(tmp_path: Path) -> None:
    """In a copy of common.cuh beside a copy of the kernel, which is found first."""
    header = SOURCE.parent / "include" / "common.cuh"
    old = "tile[i] = row < S ?"
    (line,) = [i for i, text in enumerate(header.read_text().splitlines(), 1) if old in text]
    changed(tmp_path, lambda text: text.replace(old, "tile[i] = row <= S ?"), header)
    kernel = registry.get("fwd_minimal")
    source = tmp_path / SOURCE.name
    source.write_text(SOURCE.read_text())
    report = run_forward("address", kernel, Problem(1, 1, 33, 40, 16), source)
    assert ("common.cuh", line) in report.lines, report.text
    assert any(name == "fwd_minimal.cu" and "load_tile<" in LINES[at - 1] for name, at in report.lines)


@both
def test_a_return_above_a_barrier(sanitizer: Sanitizer, tmp_path: Path) -> None:
    """The barrier's own error comes through, and no other."""
    old = "    float m = -INF"
    source = changed(tmp_path, lambda text: text.replace(old, "    if (query_row >= score.Sq) return;" + old))
    kernel = registry.get("fwd_minimal")
    report = run_forward(sanitizer, kernel, ragged(kernel), source)
    assert not report.clean
    assert "Sanitizer" not in report.text
    assert "barrier not reached by every thread" in report.text
    assert ("fwd_minimal.cu", BARRIERS[0]) in report.lines
    assert "returned" in report.text


def run_text(
    tmp_path: Path, sanitizer: Sanitizer, text: str, *buffers: np.ndarray, grid: int = 1, block: int = 32, smem: int = 0
) -> Report:
    """A kernel called `k` in k.cu, on these arrays."""
    source = tmp_path / "k.cu"
    source.write_text(text)
    arguments = [ctypes.c_void_p() for _ in buffers]
    return sanitize.run(
        sanitizer, source, "k", {}, (grid, 1, 1), (block, 1, 1), smem, arguments, dict(enumerate(buffers))
    )


def line_of(text: str) -> tuple[str, int]:
    """Where the comment HERE stands."""
    return ("k.cu", next(i for i, line in enumerate(text.splitlines(), 1) if "// HERE" in line))


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
    "race between blocks": (
        "thread",
        """extern "C" __global__ void k(float* out) {
            if (threadIdx.x == 0) out[0] += 1.0f;  // HERE
        }""",
    ),
    "race between threads that never meet": (
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
    "race between the halves of a warp that synchronise apart": (
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
def test_it_is_found(name: str, tmp_path: Path) -> None:
    sanitizer, text = BROKEN[name]
    out = np.zeros(32, np.float32)
    report = run_text(tmp_path, sanitizer, text, out, grid=2, smem=4 * 32)
    assert not report.clean
    assert line_of(text) in report.lines, report.text


CLEAN = {
    "atomics": """extern "C" __global__ void k(float* out) { atomicAdd(&out[0], 1.0f); }""",
    "the last block sums up": """
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
    "shared memory that every block uses anew": """
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


@both
@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found(name: str, sanitizer: Sanitizer, tmp_path: Path) -> None:
    out = np.zeros(32, np.float32)
    report = run_text(tmp_path, sanitizer, CLEAN[name], out, grid=15, block=48, smem=4 * 48)
    assert report.clean, report.text


def test_many_blocks_of_1024_threads(tmp_path: Path) -> None:
    """More threads than ThreadSanitizer can tell apart, were each block's run at once."""
    text = 'extern "C" __global__ void k(float* out) { __syncthreads(); if (threadIdx.x == 0) out[blockIdx.x] = 1.0f; }'
    report = run_text(tmp_path, "thread", text, np.zeros(20, np.float32), grid=20, block=1024)
    assert report.clean, report.text
