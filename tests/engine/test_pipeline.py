"""A source with a compile error is compiled again after an edit, in the same process, without a reload; the fast
compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sandbox.core import registry
from sandbox.core.errors import CompileError, NoFastCompilation
from sandbox.core.kernel import Kernel
from sandbox.cpu import compiler
from sandbox.engine import pipeline
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Problem
from sandbox.toolchain import nvrtc
from sandbox.toolchain.nvrtc import Compiled, Resources
from sandbox.verify import check
from sandbox.verify.cases import Case

PROBLEM = Problem(1, 1, 8, 8, 8)
COMPILED = Compiled("fwd_minimal", "sm_90a", b"", "", "", Resources(32, 0, 0, 0, 0), (), 0.1, False)


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Kernel]:
    """A function that returns a kernel, after appending text to its source or to one of its headers."""
    original = registry.get("fwd_minimal")
    (tmp_path / "include").mkdir()
    (tmp_path / "elsewhere").mkdir()
    places = {
        "source": tmp_path / "k.cu",
        "header": tmp_path / "include/own.cuh",
        "environment": tmp_path / "elsewhere/other.cuh",
    }
    monkeypatch.setenv("CPATH", str(tmp_path / "elsewhere"))

    def edit(place: str, text: str) -> Kernel:
        for path in places.values():
            path.write_text("")
        included = '#include "own.cuh"\n#include "other.cuh"\n' + original.source.read_text()
        places["source"].write_text(included)
        with places[place].open("a") as file:
            file.write(text)
        return dataclasses.replace(original, source=places["source"])

    return edit


def load(kernel: Kernel) -> pipeline.Loaded:
    return pipeline.load(kernel, kernel.tiles[0], PROBLEM, HOST)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    made, really = [], compiler.run

    def run(*arguments):
        made.append(arguments[-1])
        return really(*arguments)

    monkeypatch.setattr(compiler, "run", run)
    return made


@pytest.mark.parametrize("place", ["source", "header", "environment"])
def test_a_source_that_was_broken_and_then_fixed_is_loaded(
    place: str, edited: Callable[[str, str], Kernel], compilations: list[Path]
) -> None:
    broken = edited(place, "#error broken\n")
    for _ in range(3):
        with pytest.raises(CompileError, match="#error broken"):
            load(broken)
    assert len([path for path in compilations if path == broken.source]) == 1  # the others were remembered
    edited(place, "#error still broken\n")
    with pytest.raises(CompileError, match="#error still broken"):
        load(broken)
    assert load(edited(place, "// fixed\n")).functions


def test_a_source_whose_headers_are_not_known_is_compiled_again(edited: Callable[[str, str], Kernel]) -> None:
    """An #include whose name is a macro: an edit of the header cannot be detected."""
    computed = '#define HEADER "own.cuh"\n#include HEADER\n'
    broken = edited("source", computed + "#error broken\n")
    with pytest.raises(CompileError, match="#error broken"):
        load(broken)
    assert load(edited("source", computed)).functions


def test_a_source_that_is_fixed_while_it_compiles_is_loaded(
    edited: Callable[[str, str], Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, really = edited("source", "#error broken\n"), compiler.run

    def slow(*arguments):
        try:
            really(*arguments)
        finally:
            if arguments[-1] == broken.source:  # not the runtime, which is compiled first
                edited("source", "// fixed\n")

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "run", slow)
        with pytest.raises(CompileError, match="#error broken"):
            load(broken)
    assert load(broken).functions


def test_a_source_that_is_missing_is_named(tmp_path: Path) -> None:
    gone = dataclasses.replace(registry.get("fwd_minimal"), source=tmp_path / "gone.cu")
    for _ in range(2):
        with pytest.raises((CompileError, FileNotFoundError), match=r"gone\.cu"):
            load(gone)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device for which kernels are compiled, but not loaded."""
    gpu = SimpleNamespace(arch=(9, 0), name="fake", sm_count=132)
    monkeypatch.setattr(pipeline.driver, "device", lambda *ordinal: gpu)
    monkeypatch.setattr(pipeline.driver, "CudaFunction", lambda cubin, *where: cubin)
    pipeline.forget()
    yield ("cuda", 0)
    pipeline.forget()


def test_fast_and_full_compilation_are_separate(fake_gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name in ("compile", "compile_fast"):
        monkeypatch.setattr(nvrtc, name, lambda *args, name=name, **kw: (used.append(name), COMPILED)[1])
    kernel = registry.get("fwd_minimal")
    monkeypatch.setattr(pipeline.parameters, "check_arguments", lambda *args: None)
    for fast in (False, True, True, False):
        pipeline.load(kernel, kernel.tiles[0], PROBLEM, fake_gpu, fast)
    assert used == ["compile", "compile_fast"]


@pytest.mark.parametrize(("registers", "launchable"), [(168, True), (176, False)])
def test_too_many_registers_need_the_full_compilation(
    registers: int, launchable: bool, fake_gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """65536 registers: at most 168 for each of 384 threads."""
    resources = dataclasses.replace(COMPILED.resources, registers=registers)
    made = dataclasses.replace(COMPILED, resources=resources)
    monkeypatch.setattr(nvrtc, "compile_fast", lambda *args, **kw: made)
    monkeypatch.setattr(pipeline.parameters, "check_arguments", lambda *args: None)
    kernel = dataclasses.replace(registry.get("fwd_minimal"), block=lambda tile: (384, 1, 1))
    if launchable:
        assert pipeline.load(kernel, kernel.tiles[0], PROBLEM, fake_gpu, fast=True).functions
    else:
        with pytest.raises(NoFastCompilation, match=r"fwd_minimal cannot be launched .*: 176 registers, 384 threads"):
            pipeline.load(kernel, kernel.tiles[0], PROBLEM, fake_gpu, fast=True)


def test_a_fast_compilation_has_no_figures() -> None:
    """Neither times nor registers, on either backend."""
    case = Case("small", Problem(1, 1, 8, 8, 16, dtype="float16"))
    fast, full = (check.verify(registry.get("fwd_minimal"), case, HOST, report=True, fast=f) for f in (True, False))
    assert (fast.ok, fast.error) == (True, full.error)
    assert (fast.seconds, fast.tflops, fast.resources, fast.smem, fast.compile_seconds) == (None,) * 5
    assert full.seconds > 0
