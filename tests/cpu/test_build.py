"""What the host compiler is called with, and the launches of its programs; nothing is compiled."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sandbox.core import process
from sandbox.core.errors import CompileError, LaunchError, SpecError, ToolchainMissing
from sandbox.core.score import Score, TensorLike
from sandbox.cpu import build, compiler, expressions, instrumented
from sandbox.cpu.instrumented import Fill
from sandbox.cpu.launch import CpuFunction, workers

GCC = compiler.HostCompiler(("g++",), "g++: Free Software Foundation")
CLANG = compiler.HostCompiler(("clang++",), "clang++: clang")


# ---- the translation unit


@pytest.mark.parametrize(
    ("log", "missing"),
    [
        ("k.cu:1:2: error: 'g' was not declared in this scope\n", "g"),
        ("k.cu:1:2: error: use of undeclared identifier 'f'\nk.cu:2:2: error: 'g' was not declared\n", "f"),
        ("k.cu:1:2: error: 'h' was not declared in this scope\n", None),
        ("k.cu:1:2: error: 'g' was not declared in this scope\nk.cu:9:2: error: expected ';'\n", None),
        ("k.cu:9:2: error: expected ';'\nk.cu:1:2: error: 'g' was not declared in this scope\n", None),
        ("k.cu:1:2: warning: 'g' was not declared in this scope\n", None),
        ("", None),
    ],
)
def test_an_entry_that_is_not_declared(log: str, missing: str | None) -> None:
    """It is named only if the compiler reports nothing else."""
    assert build._missing_entry(log, ("f", "g")) == missing


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("__global__ void __launch_bounds__(64) f(int* x) {}", "(64)"),
        ("__global__ __launch_bounds__(BLOCK_M * (2), 1) void f(int* x) {}", "(BLOCK_M * (2))"),
        ("__global__ void __launch_bounds__(64) f(int*);\n__global__ void __launch_bounds__( 64 ) f(int*) {}", "(64)"),
        ("__global__ void __launch_bounds__(64) f(int*);\n__global__ void __launch_bounds__(32) f(int*) {}", "0"),
        ("#define g f\n__global__ void __launch_bounds__(32) g(int* x) {}", "(32)"),
        ("#define g ff\n__global__ void __launch_bounds__(32) g(int* x) {}", "0"),
        ("__global__ void __launch_bounds__(64) ff(int* x) {}", "0"),
        ("__global__ void __launch_bounds__(64) g(int* x) { f(x); }", "0"),
        ("__global__ void f(int* x) {}", "0"),
    ],
)
def test_the_launch_bounds_of_an_entry(text: str, bound: str) -> None:
    assert build._launch_bound([text], "f") == bound
    assert build._launch_bound(["", text], "f") == bound


def test_a_translation_unit(tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text(
        "// extern __shared__ int none[];\nextern __shared__ __align__(16) float a[];\n"
        'extern "C" __global__ void __launch_bounds__(32) f() { __shared__ extern int b [ ] ; }\n'
        "__shared__ int fixed[3];\nextern __shared__ float a[];\n"
    )
    lines = build.translation_unit(source, ["f", "f_more"]).splitlines()
    assert lines[:2] == ['#include "cuda_cpu.h"', f'#include "{source}"']
    assert lines[4:] == ["SANDBOX_DYNAMIC(a)", "SANDBOX_ENTRY(f, (32))", "SANDBOX_ENTRY(f_more, 0)"]


@pytest.mark.parametrize("found", [GCC, CLANG], ids=["g++", "clang++"])
def test_options(found: compiler.HostCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDBOX_CPU_FLAGS", raising=False)
    options = build._kernel_options(found, Path("/p/k.cu"), {"N": 3, "M": "x"}, [Path("/more")])
    of_gcc = {"-fno-extern-tls-init", "-fno-gnu-unique"}
    assert of_gcc & {*options} == (of_gcc if found is GCC else set())
    assert options[-6:] == (
        "-DN=3", "-DM=x", f"-I{build.CPU_HEADERS}", "-I/p/include", f"-I{build.INCLUDE_DIR}", "-I/more",
    )  # fmt: skip
    assert "-UNDEBUG" in options
    beside = build.INCLUDE_DIR.parent / "k.cu"
    assert build.include_dirs(beside) == (build.CPU_HEADERS, build.INCLUDE_DIR)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """The arguments of each compilation after the compiler; none is made."""
    made: list[tuple[Any, ...]] = []

    def record(found: Any, name: str, source: Path, text: str, options: Any, link: Any = (), folders: Any = ()) -> Any:
        made.append((name, source, text, options, link, folders))
        (tmp_path / name).touch()
        return build.Built(tmp_path / name, 0.0, False)

    monkeypatch.setattr(build, "_build", record)
    monkeypatch.setattr(compiler, "find", lambda: GCC)
    return made


@pytest.mark.parametrize(
    ("sanitizer", "defined"),
    [("address", ["-DSANDBOX_ASAN"]), ("undefined", []), ("thread", ["-DSANDBOX_TSAN"]),
     ("uninitialised", ["-DSANDBOX_SHADOW"]), ("none", [])],
)  # fmt: skip
def test_what_a_sanitizer_instruments(
    sanitizer: build.Sanitizer, defined: list[str], built: list[Any], tmp_path: Path
) -> None:
    """The kernel and the program around it; not the runtime, which only knows which sanitizer it is."""
    source = tmp_path / "k.cu"
    source.write_text('extern "C" __global__ void k() {}')
    runner, kernel = build.program(source, "k", {"N": 3}, sanitizer, [Path("/more")])
    runtime, program, library = built
    own = set(build._SANITIZE[sanitizer])
    assert [runtime[0], program[0], library[0]] == ["main.o", sanitizer, "k.so"]
    assert (runner.path.name, kernel.path.name, runner.path.stat().st_mode & 0o777) == (sanitizer, "k.so", 0o700)
    assert runtime[2].endswith("#include <runtime.cpp>\n#include <main.cpp>\n")
    assert [option for option in runtime[3] if option.startswith("-D")] == defined
    assert own & {*runtime[3]} == {*defined}
    assert own <= {*program[3]}
    assert {"-rdynamic", *build._OPTIONS} <= {*program[3]}
    assert program[4] == (str(tmp_path / "main.o"), "-ldl")
    assert own | {"-shared", "-DN=3", "-I/more"} <= {*library[3]}
    assert set(build._CALL_AT_ENTRY) & {*library[3]} == (
        set(build._CALL_AT_ENTRY) if sanitizer == "uninitialised" else set()
    )
    assert (library[4], library[5]) == ((), [Path("/more")])


def test_a_library(built: list[Any], tmp_path: Path) -> None:
    """It is linked with the runtime; a symbol that is missing is an error of the linker."""
    source = tmp_path / "k.cu"
    source.write_text('extern "C" __global__ void k() {}')
    build.library(source, ["k", "k_more"], {})
    runtime, library = built
    assert (runtime[0], runtime[1], runtime[3]) == (
        "runtime.so", build.HERE / "runtime.cpp", ("-shared", *build._OPTIONS),
    )  # fmt: skip
    assert library[4] == ("-Wl,--no-as-needed", str(tmp_path / "runtime.so"), "-Wl,-z,defs")


def test_uninitialised_memory_needs_gcc(built: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find", lambda: CLANG)
    with pytest.raises(ToolchainMissing, match=r"^detection of uninitialised shared memory requires GCC"):
        build.program(tmp_path / "k.cu", "k", {}, "uninitialised")
    assert not built


def test_a_compiler_that_prints_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has what it printed first."""

    def flood(command: Any, **options: Any) -> None:
        raise process.TooMuchOutput("it printed more than 16 MiB", head="k.cu:1: error: no")

    monkeypatch.setattr(process, "run", flood)
    with pytest.raises(CompileError) as caught:
        compiler.run(GCC, ("-O2", "-DX=a b"), "text", Path("k.cu"))
    assert str(caught.value) == (
        "g++ refused k.cu\n\nk.cu:1: error: no\nit printed more than 16 MiB\n\noptions: -O2 '-DX=a b'"
    )
    assert (caught.value.source, caught.value.options) == ("k.cu", ("-O2", "-DX=a b"))


def test_a_source_that_is_edited_while_it_compiles(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was compiled is not found for the text of before, nor for that of after."""
    source, compiled, after = tmp_path / "k.cu", [], [""]

    def run(found: Any, options: tuple[str, ...], text: str, path: Path) -> None:
        compiled.append(source.read_text())
        Path(options[-1]).write_text(compiled[-1])
        source.write_text(after[0])

    monkeypatch.setattr(compiler, "run", run)
    for before, later in (("one", "two"), ("one", "one"), ("two", "two"), ("two", "two")):
        source.write_text(before)
        after[0] = later
        found = build._build(GCC, "k.so", source, "", ("-O2",))
        assert found.path.read_text() == before
    assert compiled == ["one", "one", "two"]
    assert found.cached


# ---- a launch in a process of its own

Done = Callable[[list[str], bytes], Any]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Commands and launch files of `launch`; what a process does is the first element, a function."""
    found: list[Any] = [None]
    programs = SimpleNamespace(path=Path("/c/runner")), SimpleNamespace(path=Path("/c/k.so"))
    monkeypatch.setattr(build, "program", lambda *arguments: programs)
    monkeypatch.setattr(instrumented, "_fixed_layout", lambda: ("setarch", "-R"))

    def run(command: list[str], timeout: float, env: dict[str, str]) -> Any:
        content = Path(command[-1]).read_bytes()
        found.append((command, content, timeout, {name: env[name] for name in env if name.endswith("SAN_OPTIONS")}))
        return found[0](command, content)

    monkeypatch.setattr(process, "run", run)
    return found


def launch(**options: Any) -> instrumented.Report:
    arguments = [ctypes.c_void_p(0), ctypes.c_int32(5), ctypes.c_void_p(0)]
    buffers = {(0, 0): np.arange(3, dtype=np.float32), (2, 8): np.array([[1, 2]], np.int16)}
    return instrumented.run("thread", Path("k.cu"), "k", {}, (2, 1, 3), (32, 2, 1), 7, arguments, buffers, **options)


def finished(status: int, out: str = "", err: str = "") -> Any:
    return subprocess.CompletedProcess((), status, out, err)


def test_the_launch_file_and_the_results(launched: list[Any]) -> None:
    def work(command: list[str], content: bytes) -> Any:
        Path(command[-1]).write_bytes(np.float32([7, 8, 9]).tobytes() + np.int16([3, 4]).tobytes())
        return finished(0, "printed\n", "and this\n")

    launched[0] = work
    report = launch(cluster=2, order=9, stack=Fill.REPORTED_NANS, timeout=3.0)
    command, content, timeout, environment = launched[1]
    assert (command[:-1], timeout) == (["setarch", "-R", "/c/runner", "/c/k.so", "k"], 3.0)
    assert environment == instrumented._OPTIONS
    # grid, block, cluster, shared memory, threads, order, stack, buffers, arguments
    head = struct.pack("13q", 2, 1, 3, 32, 2, 1, 2, 7, 6, 9, 2, 2, 3)
    arguments = struct.pack("qq", 8, 0) + struct.pack("=qi", 4, 5) + struct.pack("qq", 8, 0)
    first = struct.pack("3q", 0, 0, 12) + np.arange(3, dtype=np.float32).tobytes()
    assert content == head + arguments + first + struct.pack("3q", 2, 8, 4) + np.int16([1, 2]).tobytes()
    assert (report.clean, report.text, report.lines) == (True, "and this\nprinted", ())
    assert [x.tolist() for x in report.contents] == [[7, 8, 9], [[3, 4]]]


def test_reports_of_a_launch(launched: list[Any]) -> None:
    """Places in the kernel's files, each once; the signal, if nothing else is known."""
    text = "race at /p/k.cu:7 and /p/include/a-b.cuh:12 and k.cu:7 and x.cpp:3"
    launched[0] = lambda *_: finished(66, "", text)
    report = launch()
    assert (report.clean, report.text, report.lines, report.contents) == (
        False,
        text,
        (("k.cu", 7), ("a-b.cuh", 12)),
        (),
    )
    launched[0] = lambda *_: finished(-11)
    assert launch() == instrumented.Report(False, "k was terminated by SIGSEGV", ())
    launched[0] = lambda *_: finished(-11, "why")
    assert launch().text == "why"

    def late(*_: Any) -> None:
        raise subprocess.TimeoutExpired((), 1)

    launched[0] = late
    assert launch(timeout=0.5) == instrumented.Report(False, "k did not finish within 0.5 s: does it end?", ())

    def flood(*_: Any) -> None:
        raise process.TooMuchOutput("too much", head=head)

    launched[0], head = flood, "many lines"
    assert launch() == instrumented.Report(False, "k printed more than 16 MiB and was ended (a printf in a loop?)", ())
    for head in ("WARNING: ThreadSanitizer: data race k.cu:3", "k.cu:3:4: runtime error: no"):
        assert launch() == instrumented.Report(False, head, (("k.cu", 3),))


def test_addresses_in_reports_become_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A return address is after its call; frames of other libraries are left out."""
    asked: list[list[str]] = []

    def addr2line(command: list[str], **options: Any) -> Any:
        asked.append(command)
        return finished(0, "/p/k.cu:7 (discriminator 2)\n/p/k.cu:9\n")

    monkeypatch.setattr(subprocess, "run", addr2line)
    assert instrumented._symbolized("no frames") == "no frames"
    assert not asked
    text = "unwritten element\nof smem\n    in /c/k.so+0x10\n    in /c/libc.so+0x30\n    in /c/k.so+0xff\nmore\n"
    assert instrumented._symbolized(text) == "unwritten element\nof smem\n    at /p/k.cu:7\n    at /p/k.cu:9"
    assert asked == [["addr2line", "-i", "-e", "/c/k.so", "0xf", "0xfe"]]


@pytest.mark.parametrize(
    ("there", "status", "command"),
    [("/bin/setarch", 0, ("setarch", "-R")), ("/bin/setarch", 1, ()), (None, 0, ())],
)
def test_the_layout_of_memory_is_fixed_where_it_can_be(
    there: str | None, status: int, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instrumented.shutil, "which", lambda name: there)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: finished(status))
    assert instrumented._fixed_layout.__wrapped__() == command


# ---- a launch in this process


class Loaded:
    """A library whose launches are recorded; `error` is the message of the next one."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.error = b""

    def sandbox_launch(self, description: Any) -> int:
        found = description._obj
        self.launched.append(
            ([*found.grid], [*found.block], found.cluster, found.smem_bytes, found.workers, found.order)
        )
        message = ctypes.c_void_p.from_buffer(found, type(found).error.offset)
        ctypes.memmove(message.value, self.error + b"\0", len(self.error) + 1)
        return len(self.error)


def function(loaded: Loaded, max_threads: int = 0) -> CpuFunction:
    made = object.__new__(CpuFunction)
    made.entry, made._run, made.max_threads = "f", loaded.sandbox_launch, max_threads
    made._entry = made._smem = ctypes.c_void_p(0)
    return made


def test_a_launch_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", "3")
    loaded = Loaded()
    slots = [ctypes.c_void_p(), ctypes.c_void_p()]
    arguments: Any = SimpleNamespace(table=(ctypes.c_void_p * 2)(), slots=slots)
    launch = function(loaded).launcher((4, 2, 1), (32, 32, 1), 227 * 1024, arguments, cluster=2)
    launch((5, 6))
    assert [slot.value for slot in slots] == [5, 6]
    assert loaded.launched == [([4, 2, 1], [32, 32, 1], 2, 227 * 1024, 3, 0)]
    loaded.error = b"no \xff"
    with pytest.raises(LaunchError, match=r"^f on the CPU backend: no \ufffd$"):
        launch((5, 6))
    with pytest.raises(ValueError, match="shorter"):
        launch((5,))


@pytest.mark.parametrize(
    ("grid", "block", "smem", "cluster", "message"),
    [
        ((1, 1, 1), (32, 1, 1), 227 * 1024 + 1, 1, "f: 232449 bytes of shared memory exceed 232448"),
        ((1, 1, 1), (1025, 1, 1), 0, 1, r"f: a block \(1025, 1, 1\) is not supported: it must have 1 to 1024 threads"),
        ((1, 1, 1), (32, 0, 1), 0, 1, r"f: a block \(32, 0, 1\) is not supported: it must have 1 to 1024 threads"),
        ((1, 1, 1), (65, 1, 1), 0, 1, r"f: a block of 65 threads, \(65, 1, 1\), exceeds its __launch_bounds__\(64\)"),
        ((3, 2, 1), (32, 1, 1), 0, 2, r"f: a grid \(3, 2, 1\) is not of whole clusters of 2 blocks along x"),
        ((0, 1, 1), (32, 1, 1), 0, 1, r"f: a grid \(0, 1, 1\) has no blocks"),
        ((1, 1, 0), (32, 1, 1), 0, 1, r"f: a grid \(1, 1, 0\) has no blocks"),
    ],
)
def test_launches_that_are_not_supported(
    grid: tuple[int, int, int], block: tuple[int, int, int], smem: int, cluster: int, message: str
) -> None:
    arguments: Any = SimpleNamespace(table=(ctypes.c_void_p * 1)(), slots=[])
    bound = 64 if block[0] == 65 else 0
    with pytest.raises(SpecError, match=message):
        function(Loaded(), bound).launcher(grid, block, smem, arguments, cluster=cluster)(())


@pytest.mark.parametrize(("value", "count"), [("0", 1), ("1", 1), ("7", 7), ("", 2), (None, 2)])
def test_threads_of_a_launch(value: str | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDBOX_CPU_WORKERS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5})
    if value is not None:
        monkeypatch.setenv("SANDBOX_CPU_WORKERS", value)
    assert workers() == count
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", "-1")
    with pytest.raises(
        SpecError, match=r"^SANDBOX_CPU_WORKERS=-1 is not supported: it must be the number of OS threads"
    ):
        workers()


# ---- expressions of a Score


def test_a_score_of_no_elements_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "_function", lambda score: pytest.fail("compiled"))
    empty, one = np.zeros((0, 3)), np.zeros((1, 1))
    found = expressions.evaluate(Score("x + 1"), empty, 0, 0, np.zeros((0, 1)), np.zeros((1, 3)), 0, 3)
    assert [(x.shape, x.dtype) for x in found] == [((0, 3), np.float64), ((0, 3), np.float64), ((0, 3), np.bool_)]
    without = Score("x + t(0)", tensors={"t": TensorLike((1,), "float32")})
    with pytest.raises(
        SpecError, match=r"^Score: tensor t has no data: it was loaded from a file that stores only its"
    ):
        expressions.evaluate(without, one, 0, 0, one, one, 1, 1)


def test_tensors_of_a_score_are_passed_with_their_strides() -> None:
    array = np.zeros((4, 6), np.float16)[:, ::2]
    value = expressions._snippet({"t": array, "u": np.zeros(3, np.float32)})
    assert (value.t, [*value.t_strides], [*value.u_strides]) == (array.ctypes.data, [6, 2], [1])
    assert ctypes.sizeof(expressions._snippet({})) == 4
    assert ctypes.sizeof(value) == 8 + 16 + 8 + 8
