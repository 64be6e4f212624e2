"""NVRTC without a GPU: resource usage of small kernels, error messages, and cache keys."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cuda.pathfinder
import pytest

import sandbox
from sandbox.core import registry
from sandbox.core.errors import (
    CompileError,
    NoFastCompilation,
    SandboxError,
    SpecError,
    ToolchainMissing,
    UnsupportedProblem,
)
from sandbox.toolchain import cache, nvrtc, sources

SCALE = 'extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= FACTOR; }\n'

SPILLS = """
extern "C" __global__ void BOUNDS spills(float* x) {  // with 1024 threads: 65536 / 1024 = 64 registers for 128 floats
    float a[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) a[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 128; ++i) x[i * 1024 + threadIdx.x] = a[127 - i] * a[i];
}
"""

SEVERAL = """
__device__ __noinline__ float pick(float x, int n) {
    float a[16];
    for (int i = 0; i < 16; ++i) a[i] = x * i;
    return a[n & 15];
}
extern "C" __global__ void shared_memory(float* x, int n) {  // 256 * 4 B = 1 KiB
    __shared__ float tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[(threadIdx.x + n) & 255];
}
extern "C" __global__ void calls(float* x, int n) { x[threadIdx.x] = pick(x[0], n); }
extern "C" __global__ void stack(float* x, int n) {  // indexed by a variable, 64 * 4 B cannot be in registers
    float a[64];
    for (int i = 0; i < 64; ++i) a[i] = x[i];
    for (int i = 0; i < n; ++i) a[(i * 7) & 63] += a[n & 63];
    x[0] = a[n & 63];
}
__global__ void not_extern_c(int unused) {}
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "k.cu") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


# ---- resources


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_120"])
def test_resources_of_known_kernels(write, arch: str) -> None:
    source = write(SEVERAL)
    r = nvrtc.compile(source, "shared_memory", arch).resources
    assert (r.smem_static, r.stack, r.spill_stores, r.spill_loads) == (1024, 0, 0, 0)
    assert 4 <= r.registers <= 32
    r = nvrtc.compile(source, "stack", arch).resources
    assert (r.smem_static, r.stack, r.spill_stores, r.spill_loads) == (0, 256, 0, 0)


def test_spills(write) -> None:
    source = write(SPILLS)
    r = nvrtc.compile(source, "spills", "sm_90a", {"BOUNDS": "__launch_bounds__(1024)"}).resources
    assert r.registers == 64
    assert r.spill_stores > 0
    assert r.spill_loads > 0
    tighter = nvrtc.compile(source, "spills", "sm_90a", {"BOUNDS": ""}, options=("--maxrregcount=32",)).resources
    assert tighter.registers == 32
    assert tighter.spill_stores > r.spill_stores
    r = nvrtc.compile(source, "spills", "sm_90a", {"BOUNDS": "__launch_bounds__(256)"}).resources
    assert (r.registers > 64, r.spill_stores, r.spill_loads) == (True, 0, 0)


# A log of NVRTC 12.9 for sm_90a; 13 writes the same text.
LOG_OF_12_9 = """\
/home/me/k.cu(11): warning #177-D: variable "never_used" was declared but never referenced
  __global__ void mangled(int unused) { int never_used; }
                                            ^

Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"

ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in 'first'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z7mangledi' for 'sm_90a'
ptxas info    : Function properties for _Z7mangledi
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 4 registers, used 0 barriers
ptxas info    : Compile time = 0.978 ms
ptxas info    : Compiling entry function 'spill' for 'sm_90a'
ptxas info    : Function properties for spill
ptxas         .     40 bytes stack frame, 44 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 40 bytes cumulative stack size
ptxas info    : Compile time = 13.234 ms
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 1024 bytes smem, 364 bytes cmem[0]
ptxas info    : Compile time = 1.081 ms
"""
WARNINGS = (
    '/home/me/k.cu(11): warning #177-D: variable "never_used" was declared but never referenced',
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in 'first'",
)
HELPER = """\
ptxas info    : Function properties for _Z6helperfi
ptxas         .     64 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
"""


@pytest.mark.parametrize(
    ("entry", "expected"),
    [("_Z7mangledi", (4, 0, 0, 0, 0)), ("spill", (64, 0, 40, 44, 48)), ("first", (10, 1024, 0, 0, 0))],
)
def test_parsing_a_log_of_several_entries(entry: str, expected: tuple[int, ...]) -> None:
    assert nvrtc.parse_resources(LOG_OF_12_9, entry, Path("k.cu")) == nvrtc.Resources(*expected, WARNINGS)


def test_spills_of_a_function_that_was_not_inlined_are_not_hidden() -> None:
    r = nvrtc.parse_resources(LOG_OF_12_9 + HELPER, "first", Path("k.cu"))
    assert (r.stack, r.spill_stores, r.spill_loads) == (0, 4, 8)


@pytest.mark.parametrize("entry", ["firs", "irst", "mangled", "_Z6helperfi", "x.*"])
def test_entry_names_must_match_completely(entry: str) -> None:
    with pytest.raises(CompileError, match="its entry points are: _Z7mangledi, spill, first "):
        nvrtc.parse_resources(LOG_OF_12_9 + HELPER, entry, Path("k.cu"))


def test_parsing_an_empty_log() -> None:
    with pytest.raises(CompileError, match=r"k\.cu has no entry point f; its entry points are: none"):
        nvrtc.parse_resources("", "f", Path("k.cu"))


def test_a_warning_is_kept_also_in_the_cache(write) -> None:
    source = write('extern "C" __global__ void k() { int never_used; }\n')
    for cached in (False, True):
        compiled = nvrtc.compile(source, "k", "sm_90a")
        assert compiled.cached is cached
        (warning,) = compiled.resources.warnings
        assert f"{source}(1): warning" in warning
        assert "never_used" in warning


# ---- messages


def test_a_compile_error_shows_file_line_and_excerpt(write) -> None:
    source = write('extern "C" __global__ void k(float* x) {\n    x[0] = undeclared + 1;\n}\n')
    with pytest.raises(CompileError) as caught:
        nvrtc.compile(source, "k", "sm_90a", {"BLOCK_M": 64})
    message, error = str(caught.value), caught.value
    assert f"NVRTC {nvrtc.version()} refused {source}" in message
    assert f'{source}(2): error: identifier "undeclared" is undefined' in message
    assert "    x[0] = undeclared + 1;\n             ^" in message  # the excerpt, and the caret below the name
    assert "options: --gpu-architecture=sm_90a " in message
    assert "-DBLOCK_M=64" in message
    assert (error.source, "-DBLOCK_M=64" in error.options) == (str(source), True)
    assert "undeclared" in error.log


def test_an_error_in_a_header_names_the_header(write) -> None:
    header = write("int x = undeclared;\n", "h.cuh")
    source = write('#include "h.cuh"\nextern "C" __global__ void k() {}\n')
    with pytest.raises(CompileError, match=rf"{header}\(1\): error"):
        nvrtc.compile(source, "k", "sm_90a")


def test_an_unknown_entry_lists_the_existing_ones(write) -> None:
    source = write(SEVERAL)
    with pytest.raises(
        CompileError, match=r'no entry point not_extern_c; its entry points are: .*shared_memory.*extern "C"'
    ):
        nvrtc.compile(source, "not_extern_c", "sm_90a")


def test_a_missing_source(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"gone\.cu: no such file"):
        nvrtc.compile(tmp_path / "gone.cu", "k", "sm_90a")
    with pytest.raises(CompileError, match=f"{tmp_path}: no such file"):
        nvrtc.compile(tmp_path, "k", "sm_90a")


def test_a_source_that_an_editor_replaces(write, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is missing when NVRTC shall have it."""
    source = write(SCALE)
    monkeypatch.setattr(sources, "fingerprint", lambda *_: source.unlink())
    with pytest.raises(CompileError, match=f"{source}: no such file"):
        nvrtc.compile(source, "scale", "sm_90a", {"FACTOR": 2})


@pytest.mark.parametrize("name", ['a"b.cu', "a\\b.cu", "a\udcffb.cu"])
def test_a_source_with_an_unsupported_path(write, name: str) -> None:
    with pytest.raises(CompileError, match=r"NVRTC cannot compile .*: its path .*; move it to another folder"):
        nvrtc.compile(write(SCALE, name), "scale", "sm_90a", {"FACTOR": 2})


@pytest.mark.parametrize("arch", ["sm_20", "sm_90b", "90", "", "sm_75a", "compute_90"])
def test_an_arch_that_nvrtc_cannot_target(write, arch: str) -> None:
    with pytest.raises(UnsupportedProblem, match=f"arch {arch} is not supported by NVRTC {nvrtc.version()}: .*sm_90a"):
        nvrtc.compile(write(SCALE), "scale", arch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_100f", "sm_120a"])
def test_specific_archs_need_no_gpu(write, arch: str) -> None:
    compiled = nvrtc.compile(write(SCALE), "scale", arch, {"FACTOR": 2})
    assert compiled.cubin[:4] == b"\x7fELF"
    assert f".target {arch}" in compiled.ptx


def test_source_in_latin_1(tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_bytes(b'// caf\xe9\nextern "C" __global__ void k() {}\n')
    assert nvrtc.compile(source, "k", "sm_90a").cubin


# ---- the cache


def test_a_second_compile_is_a_hit_and_equal(write) -> None:
    source = write(SCALE)
    first, second = (nvrtc.compile(source, "scale", "sm_90a", {"FACTOR": 2}) for _ in range(2))
    assert (first.cached, second.cached) == (False, True)
    assert (first.cubin, first.ptx, first.log, first.resources) == (
        second.cubin,
        second.ptx,
        second.log,
        second.resources,
    )
    assert (first.options, first.seconds) == (second.options, second.seconds)


def test_the_entries_of_a_source_are_compiled_once(write) -> None:
    source = write(SEVERAL)
    first, second, again = (nvrtc.compile(source, entry, "sm_90a") for entry in ("stack", "shared_memory", "stack"))
    assert [c.cached for c in (first, second, again)] == [False, True, True]
    assert (first.cubin, first.resources) == (again.cubin, again.resources)
    assert (second.entry, second.cubin) == ("shared_memory", first.cubin)
    assert (second.resources.smem_static, first.resources.smem_static) == (1024, 0)
    worst = nvrtc.Resources.worst([first.resources, second.resources])
    assert (worst.smem_static, worst.stack) == (1024, first.resources.stack)
    with pytest.raises(CompileError, match="no entry point missing"):
        nvrtc.compile(source, "missing", "sm_90a")


def test_the_key_depends_on_all_inputs(write) -> None:
    source = write(SCALE)
    variants = [
        {"arch": "sm_90a", "defines": {"FACTOR": 2}},
        {"arch": "sm_90a", "defines": {"FACTOR": 3}},
        {"arch": "sm_90a", "defines": {"FACTOR": 2, "MORE": 1}},
        {"arch": "sm_90", "defines": {"FACTOR": 2}},
        {"arch": "sm_90a", "defines": {"FACTOR": 2}, "options": ("--use_fast_math",)},
    ]
    assert not any(nvrtc.compile(source, "scale", **variant).cached for variant in variants)
    assert all(nvrtc.compile(source, "scale", **variant).cached for variant in variants)


def test_the_key_depends_on_the_library(write, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = write(SCALE), nvrtc._library()
    nvrtc.compile(source, "scale", "sm_90a", {"FACTOR": 2})
    newer = type(library)(**{**vars(library), "identity": "another build"})
    folders = nvrtc.include_dirs()
    monkeypatch.setattr(nvrtc, "_library", lambda: newer)
    monkeypatch.setattr(nvrtc, "include_dirs", lambda: folders)
    assert not nvrtc.compile(source, "scale", "sm_90a", {"FACTOR": 2}).cached


def test_editing_a_header_compiles_anew(write) -> None:
    write("#define FACTOR 2\n", "deep.cuh")
    write('#include "deep.cuh"\n', "h.cuh")
    source = write('#include "h.cuh"\n' + SCALE)
    first = nvrtc.compile(source, "scale", "sm_90a")
    write("#define FACTOR 3\n", "deep.cuh")
    second = nvrtc.compile(source, "scale", "sm_90a")
    assert not second.cached
    assert second.cubin != first.cubin
    write("#define FACTOR 2\n", "deep.cuh")
    assert nvrtc.compile(source, "scale", "sm_90a").cached


def test_a_computed_include_is_compiled_each_time(write) -> None:
    write("#define FACTOR 2\n", "h.cuh")
    source = write("#include HEADER\n" + SCALE)
    assert [nvrtc.compile(source, "scale", "sm_90a", {"HEADER": '"h.cuh"'}).cached for _ in range(2)] == [False, False]


def test_an_edit_during_the_compile_is_not_stored_under_the_old_text(write, monkeypatch: pytest.MonkeyPatch) -> None:
    source, really = write(SCALE.replace("FACTOR", "2")), nvrtc._compile

    def edit_first(*args):
        write(SCALE.replace("FACTOR", "3"))
        return really(*args)

    with monkeypatch.context() as patched:
        patched.setattr(nvrtc, "_compile", edit_first)
        by_three = nvrtc.compile(source, "scale", "sm_90a")
    write(SCALE.replace("FACTOR", "2"))
    by_two = nvrtc.compile(source, "scale", "sm_90a")
    assert not by_two.cached
    assert by_two.ptx != by_three.ptx


def test_a_damaged_cubin_is_rebuilt(write, own_cache: Path) -> None:
    source = write(SCALE)
    nvrtc.compile(source, "scale", "sm_90a", {"FACTOR": 2})
    (entry,) = (own_cache / listed.key for listed in cache.entries())
    (entry / "cubin").write_bytes(b"\x7fELF and nothing more")
    again = nvrtc.compile(source, "scale", "sm_90a", {"FACTOR": 2})
    assert not again.cached
    assert len(again.cubin) > 1000
    assert nvrtc.compile(source, "scale", "sm_90a", {"FACTOR": 2}).cached


@pytest.mark.parametrize("field", ["log", "seconds"])
def test_a_record_without_a_field_is_rebuilt(write, own_cache: Path, field: str) -> None:
    """An entry written by another version of this package."""
    source = write(SCALE)
    nvrtc.compile(source, "scale", "sm_90a", {"FACTOR": 2})
    (file,) = (own_cache / listed.key / "entry.json" for listed in cache.entries())
    recorded = json.loads(file.read_text())
    del recorded["meta"][field]
    file.write_text(json.dumps(recorded))
    assert [nvrtc.compile(source, "scale", "sm_90a", {"FACTOR": 2}).cached for _ in range(2)] == [False, True]


def test_a_refused_source_is_not_cached(write, own_cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(CompileError):
            nvrtc.compile(write("nonsense\n"), "k", "sm_90a")
    assert list(cache.entries()) == []


def test_a_cache_that_is_deleted_while_in_use(write, own_cache: Path) -> None:
    """For example with `rm -rf`. NVRTC 13 also stores its headers there."""
    source = write("#include <cuda_fp16.h>\n" + SCALE)
    nvrtc.compile(source, "scale", "sm_90a", {"FACTOR": 2})
    for path in sorted(own_cache.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    own_cache.rmdir()
    assert not nvrtc.compile(source, "scale", "sm_90a", {"FACTOR": 2}).cached


def test_two_processes_compile_the_same_at_once(write, own_cache: Path) -> None:
    """With an empty cache, into which NVRTC 13 also unpacks its headers."""
    source = write("#include <cuda_fp16.h>\n" + SCALE)
    script = (
        "from pathlib import Path; from sandbox.toolchain import nvrtc\n"
        f"c = nvrtc.compile(Path({str(source)!r}), 'scale', 'sm_90a', {{'FACTOR': 2}})\n"
        "print(len(c.cubin), c.resources.registers)\n"
    )
    runs = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs[0] == outputs[1]
    assert len(list(cache.entries())) == 1
    assert [path.name for path in own_cache.iterdir() if path.name.startswith(".")] == []


# ---- missing software


def test_headers_of_another_major_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would compile to wrong code."""
    (tmp_path / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  11080\n")
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", lambda name: str(tmp_path))
    nvrtc._installed_headers.cache_clear()
    for version, package in (("12.9", "nvidia-cuda-runtime-cu12"), ("13.0", "nvidia-cuda-runtime==13.*")):
        with pytest.raises(ToolchainMissing) as caught:
            nvrtc._installed_headers(version)
        assert f"headers in {tmp_path} are for CUDA 11, NVRTC is {version}" in str(caught.value)
        assert f'pip install "{package}"' in str(caught.value)
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", lambda name: None)
    with pytest.raises(ToolchainMissing, match=r"CUDA headers .* for NVRTC 12\.9 are missing: pip install"):
        nvrtc._installed_headers("12.9")
    nvrtc._installed_headers.cache_clear()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ImportError("no", name="cuda.bindings"),
            r"NVRTC's Python bindings are missing \(cuda.bindings\): pip install",
        ),
        (RuntimeError("no libnvrtc.so"), r"the NVRTC library is missing: pip install [^\n]*\n\(no libnvrtc.so\)$"),
    ],
)
def test_a_missing_part_of_nvrtc(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise error

    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", load)
    with pytest.raises(ToolchainMissing, match=message):
        nvrtc._library.__wrapped__()


def test_headers_of_the_same_major_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", lambda name: str(tmp_path))
    header = tmp_path / "cuda_runtime_api.h"
    for text, version, found in (
        ("#define CUDART_VERSION 13000\n", "13.2", "13"), ("#define  CUDART_VERSION\t12090\n", "12.4", "12"),
        ("#define CUDART_VERSION 12999\n", "13.0", "12"), ("nothing\n", "13.0", "unknown"),
    ):  # fmt: skip
        header.write_text(text)
        nvrtc._installed_headers.cache_clear()
        if version.startswith(found):
            assert nvrtc._installed_headers(version) == tmp_path
        else:
            with pytest.raises(
                ToolchainMissing, match=f"are for CUDA {found}, NVRTC is 13.0: install headers of the same"
            ):
                nvrtc._installed_headers(version)
    nvrtc._installed_headers.cache_clear()


@pytest.mark.parametrize(("version", "bundled"), [("12.9", False), ("13.2", False), ("13.3", True), ("14.0", True)])
def test_nvrtc_bundles_headers_from_13_3_on(version: str, bundled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    library = dataclasses.replace(nvrtc._library(), version=version)
    monkeypatch.setattr(nvrtc, "_library", lambda: library)
    monkeypatch.setattr(nvrtc, "_bundled_headers", lambda its: Path("bundled"))
    monkeypatch.setattr(nvrtc, "_installed_headers", lambda its: Path(f"installed {its}"))
    assert nvrtc.include_dirs() == (Path("bundled") if bundled else Path(f"installed {version}"),)


def test_bundled_headers_are_unpacked_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a folder of the cache for each NVRTC; no remains are left, also not of a failure."""
    library = nvrtc._library()
    given: list[list[str]] = []

    def run(api: object, text: bytes, name: str, flags: list[str]) -> None:
        given.append([*flags])
        (Path(flags[1].partition("=")[2]) / written[0]).write_text("")

    monkeypatch.setattr(nvrtc, "_run", run)
    written = ["no.h"]
    with pytest.raises(ToolchainMissing, match=r"^NVRTC \(.*\) did not unpack its bundled headers into "):
        nvrtc._bundled_headers(library)
    assert list(cache.directory().iterdir()) == []
    written[0] = "cuda_fp16.h"
    places = [nvrtc._bundled_headers(library) for _ in range(2)]
    assert places[0] == places[1]
    assert len(given) == 2
    assert given[0][0] == "--gpu-architecture=sm_90"
    other = nvrtc._bundled_headers(dataclasses.replace(library, identity="another build"))
    assert sorted(cache.directory().iterdir()) == sorted((places[0], other))
    assert cache._UNPACKED.fullmatch(other.name)
    (other / "cuda_fp16.h").unlink()
    other.rmdir()

    def lost(path: Path, target: Path) -> None:
        if there:
            target.mkdir()
        raise OSError("not empty")

    monkeypatch.setattr(Path, "rename", lost)
    there = True  # another process was faster
    assert nvrtc._bundled_headers(dataclasses.replace(library, identity="another build")) == other
    there = False
    with pytest.raises(OSError, match="not empty"):
        nvrtc._bundled_headers(dataclasses.replace(library, identity="a third build"))


class FakeNvrtc:
    """The bindings: each program is compiled to `status` and `texts`."""

    nvrtcResult = SimpleNamespace(NVRTC_SUCCESS=0)

    def __init__(self, version: tuple[int, int] = (13, 0), status: object = 0, **texts: bytes):
        self.status, self.destroyed = status, 0
        self.texts = {"ProgramLog": b"", "CUBIN": b"\0cubin\0", "PTX": b"ptx\0", **texts}
        self.nvrtcVersion = lambda: (0, *version)
        self.nvrtcGetSupportedArchs = lambda: (0, [75, 89, 90, 99, 100, 121])
        self.nvrtcCreateProgram = lambda text, name, *headers: (0, (text, name, headers))

    def nvrtcCompileProgram(self, program: object, count: int, flags: list[bytes]) -> tuple[object]:
        assert program == (b"text", b"k.cu", (0, None, None))
        assert (count, flags) == (2, [b"-a", b"-b"])
        return (self.status,)

    def nvrtcDestroyProgram(self, program: object) -> None:
        self.destroyed += 1

    def __getattr__(self, name: str) -> object:
        what = name.removeprefix("nvrtcGet").removesuffix("Size")
        text = self.texts[what]
        if name.endswith("Size"):
            return lambda program: (0, len(text))
        return lambda program, buffer: ctypes.memmove(id(buffer) + bytes.__basicsize__ - 1, text, len(text))


def test_a_program_of_nvrtc() -> None:
    """The log without its end, the PTX without its terminating zero; no cubin if NVRTC refuses the text."""
    fake = FakeNvrtc(ProgramLog=b"some \xff warning \n\0")
    assert nvrtc._run(fake, b"text", "k.cu", ("-a", "-b")) == (b"\0cubin\0", "ptx", "some \ufffd warning")
    refused = SimpleNamespace(name="NVRTC_ERROR_COMPILATION")
    for log, said in ((b"no\n\0", "no"), (b"\n\0", "NVRTC_ERROR_COMPILATION")):
        failing = FakeNvrtc(status=refused, ProgramLog=log)
        assert nvrtc._run(failing, b"text", "k.cu", ("-a", "-b")) == (b"", "", said)
        assert failing.destroyed == 1
    assert fake.destroyed == 1


@pytest.mark.parametrize(
    ("version", "own_cache_of_nvrtc"), [((12, 8), False), ((12, 9), True), ((13, 0), True), ((11, 10), False)]
)
def test_the_library(
    version: tuple[int, int], own_cache_of_nvrtc: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its architectures: "a" exists from sm_90 on, "f" from sm_100 on. Its own cache, from 12.9 on, is disabled."""
    bindings = pytest.importorskip("cuda.bindings")
    file = tmp_path / "libnvrtc.so"
    file.write_bytes(b"12345")
    os.utime(file, ns=(7, 7))
    monkeypatch.setattr(cuda.pathfinder, "load_nvidia_dynamic_lib", lambda name: SimpleNamespace(abs_path=str(file)))
    monkeypatch.setattr(bindings, "nvrtc", FakeNvrtc(version))
    library = nvrtc._library.__wrapped__()
    name = f"{version[0]}.{version[1]}"
    assert (library.version, library.identity) == (name, f"{name} libnvrtc.so 5 7")
    assert library.no_cache == (("--no-cache",) if own_cache_of_nvrtc else ())
    assert library.archs == (
        "sm_75", "sm_89", "sm_90", "sm_99", "sm_100", "sm_121",
        "sm_90a", "sm_99a", "sm_100a", "sm_100f", "sm_121a", "sm_121f",
    )  # fmt: skip


def test_a_refusal_without_a_reason(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_run", lambda *args: (b"", "", " \n"))
    with pytest.raises(CompileError, match=r"^NVRTC .* refused .*k\.cu\n\nNVRTC gave no reason\n\noptions: -a -b$"):
        nvrtc._compile(write(SCALE), ("-a", "-b"))


def test_the_worst_of_several_entries() -> None:
    """Each number by itself, and every warning once."""
    one, other = nvrtc.Resources(40, 8, 0, 4, 12, ("a", "b")), nvrtc.Resources(32, 16, 8, 0, 16, ("b", "c"))
    assert nvrtc.Resources.worst(iter([one, other])) == nvrtc.Resources(40, 16, 8, 4, 16, ("a", "b", "c"))
    assert nvrtc.Resources.worst([one]) == one


BLOCKED = """
import importlib.abc, json, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith({package!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
import sandbox
from sandbox.core.errors import ToolchainMissing
try:
    sandbox.compile("fwd_minimal")
except ToolchainMissing as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.parametrize("package", ["cuda", "cuda.bindings", "cuda.pathfinder"])
def test_without_the_bindings(package: str) -> None:
    """The package imports without CUDA, and reports what to install when it is needed."""
    script = BLOCKED.format(package=package)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    message = json.loads(done.stdout)
    assert "NVRTC's Python bindings are missing (cuda" in message
    assert 'pip install "attention-sandbox[nvrtc12]"' in message


# ---- sandbox.compile


def test_public_compile() -> None:
    compiled = sandbox.compile("fwd_minimal", D=64, dtype="bfloat16", causal=True, arch="sm_90a", tile=None)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert ".entry fwd_minimal" in compiled.ptx
    assert "registers" in compiled.log
    assert compiled.resources.registers > 16
    for tile in (sandbox.Tile(BLOCK_M=32, BLOCK_N=16), "BLOCK_M=32,BLOCK_N=16", {"BLOCK_M": 32, "BLOCK_N": 16}):
        assert "-DBLOCK_N=16" in sandbox.compile("fwd_minimal", D=64, arch="sm_80", tile=tile).options


def test_public_compile_of_an_operation() -> None:
    """For the first of its `shapes`: the sizes of append_kv must agree, so that not all can be 1024."""
    operation = registry.get("append_kv").operation
    assert operation.example == operation.shapes[0]
    assert sandbox.compile("append_kv", arch="sm_80").resources.registers > 0
    with pytest.raises(SpecError, match=f"must be B,N,n,.*,page_rows,Hk,D,Dv, such as {operation.example}$"):
        operation.problem("1,2,64,64", "float16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "sm_42"}, 'arch "sm_42" is not supported'),
        ({"arch": "sm_70"}, 'arch "sm_70" is not supported'),
        ({"arch": 90}, 'arch=90 must be text, such as "sm_90a"'),
        ({"kernel": 3}, "kernel 3 is not known: the kernels are"),
        ({"kernel": ["fwd_mma"]}, r"kernel \['fwd_mma'\] is not known: did you mean fwd_mma\? the kernels are"),
        ({"D": 512}, "D=512 is not supported"),
        ({"D": 0}, "D=0 must be an integer >= 1"),
        ({"dtype": "float64"}, "dtype='float64' is not supported"),
        ({"causal": "left"}, "causal='left' is not known"),
        ({"tile": "BLOCK_M=64"}, "tile BLOCK_M=64 lacks BLOCK_N: set all numbers, such as BLOCK_M="),
        ({"D": 256, "arch": "sm_75"}, r"shared memory at D=256, and sm_75 has 65536"),
    ],
)
def test_public_compile_rejects(options: dict, message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        sandbox.compile(**{"kernel": "fwd_minimal", "arch": "sm_90a", **options})


def test_nvrtc_searches_only_the_folders_of_the_scan(write) -> None:
    """NVRTC searches the folder of the including file, then the include path, but not the folder of the main source."""
    source = write('#include "sub/a.cuh"\nextern "C" __global__ void k() { static_assert(A + B == 3); }\n')
    (source.parent / "sub").mkdir()
    write('#include "b.cuh"\n#define A 1\n', "sub/a.cuh")
    write("#define B 2\n", "sub/b.cuh")
    nvrtc.compile(source, "k", "sm_90a")
    files, _ = sources.included_files(source.resolve(), (nvrtc.INCLUDE_DIR,))
    assert sorted(path.name for path in files) == ["a.cuh", "b.cuh", "k.cu"]
    write("#define B 2\n", "b.cuh")
    for line in ("#include <b.cuh>", '#include "b.cuh"'):
        (source.parent / "sub/b.cuh").unlink(missing_ok=True)
        write(f"{line}\n#define A 1\n", "sub/a.cuh")
        with pytest.raises(CompileError, match="cannot open source file"):
            nvrtc.compile(source, "k", "sm_90a")


needs_fast = pytest.mark.skipif(not nvrtc._has_fast_compilation(), reason="this NVRTC has no fast compilation")


@needs_fast
def test_the_fast_compilation(write) -> None:
    """Another cubin, under its own key in the cache."""
    source, defines = write(SPILLS), {"BOUNDS": "__launch_bounds__(1024)"}
    full = nvrtc.compile(source, "spills", "sm_90a", defines)
    fast = nvrtc.compile_fast(source, "spills", "sm_90a", defines)
    assert "--Ofast-compile=mid" in fast.options
    assert "-lineinfo" not in fast.options
    assert not fast.cached
    assert fast.cubin != full.cubin
    assert nvrtc.compile_fast(source, "spills", "sm_90a", defines).cached
    assert nvrtc.compile(source, "spills", "sm_90a", defines).cubin == full.cubin


@needs_fast
def test_setmaxnreg_needs_the_full_compilation(write) -> None:
    """The fast one ignores it."""
    source = write('extern "C" __global__ void k() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }')
    with pytest.raises(NoFastCompilation, match=r"^k uses setmaxnreg, which --Ofast-compile=mid ignores"):
        nvrtc.compile_fast(source, "k", "sm_90a")


def test_an_nvrtc_without_the_option(write, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of CUDA 12."""
    monkeypatch.setattr(nvrtc, "_FAST", "--no-such-option")
    nvrtc._has_fast_compilation.cache_clear()
    try:
        with pytest.raises(NoFastCompilation, match="has no option --no-such-option"):
            nvrtc.compile_fast(write(SCALE), "scale", "sm_90a", {"FACTOR": 2})
    finally:
        nvrtc._has_fast_compilation.cache_clear()
