"""Compiles a `.cu` file to a library (for a sanitizer: and a program) for the CPU, cached like a cubin."""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import re
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..core import log
from ..core.errors import CompileError, ToolchainMissing
from ..core.files import refused_path
from ..toolchain import cache, nvrtc, sources
from ..toolchain.nvrtc import INCLUDE_DIR
from . import compiler as host
from .compiler import HostCompiler

HERE = Path(__file__).resolve().parent
CPU_HEADERS = HERE / "include"
Sanitizer = Literal["address", "undefined", "thread", "uninitialised", "none"]

_OPTIONS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-march=native", "-fno-strict-aliasing", "-pthread")
# Reports need frame pointers to walk the stacks of fibers.
_SANITIZE = {
    "address": (
        "-fsanitize=address,bounds,alignment",
        "-fno-sanitize-recover=all",
        "-fno-omit-frame-pointer",
        "-DSANDBOX_ASAN",
    ),
    "undefined": ("-fsanitize=undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    "thread": ("-fsanitize=thread", "-fno-omit-frame-pointer", "-DSANDBOX_TSAN"),
    # The Linux kernel's variant: a call at each load and store, and no library. The runtime defines the functions.
    "uninitialised": (
        "-fsanitize=kernel-address",
        "--param=asan-instrumentation-with-call-threshold=0",
        "--param=asan-stack=0",
        "--param=asan-globals=0",
        "-DSANDBOX_SHADOW",
        "-O0",  # an optimised load may lose its line number, and a local variable its stack slot
    ),
    "none": (),
}
# For the kernel only: a call at the beginning of each function, so that the runtime can fill its frame.
# (-ftrivial-auto-var-init=pattern fills locals of optimised code too, but GCC 12 then misaligns stack arrays of leaf
# functions, and its pattern is not NaN.)
_CALL_AT_ENTRY = ("-pg", "-mfentry") if platform.machine() == "x86_64" else ()
_BOUNDS = re.compile(r"\b__launch_bounds__\s*\(")
# extern __shared__ __align__(16) float smem[];  the specifiers may be in any order
_DYNAMIC = re.compile(r"\bextern\b(?=[^;{}\[]*\b__shared__\b)[^;{}\[]*?(\w+)\s*\[\s*\]\s*;")


@dataclass(frozen=True)
class Built:
    """One compiled file: `path` of the library or program, compile time in `seconds`, whether it was `cached`."""

    path: Path
    seconds: float
    cached: bool


def library(source: Path, entries: Sequence[str], defines: Mapping[str, object], folders: Sequence[Path] = ()) -> Built:
    """The shared library of one kernel with all its entry points. `folders`: additional include directories.

    The file exists while the caller has the cache `in_use`. Raises CompileError, ToolchainMissing.
    """
    compiler = host.find()
    with cache.in_use():  # the linker reads a cached file
        runtime = _build(compiler, "runtime.so", HERE / "runtime.cpp", _runtime_text(), ("-shared", *_OPTIONS))
        # Linked even if unused, for sandbox_launch. Undefined symbols are an error at link time, not at load time.
        link = ("-Wl,--no-as-needed", str(runtime.path), "-Wl,-z,defs")
        return _kernel(compiler, source, entries, _kernel_options(compiler, source, defines, folders), link, folders)


def program(
    source: Path, entry: str, defines: Mapping[str, object], sanitizer: Sanitizer, folders: Sequence[Path] = ()
) -> tuple[Built, Built]:
    """A program that executes one launch under a sanitizer (see main.cpp), and the kernel library for it.

    They are separate files so that the kernel's TLS block contains only its shared memory. Both exist while the caller
    has the cache `in_use`. Raises CompileError, ToolchainMissing.
    """
    compiler = host.find()
    if "ziglang" in compiler.command:
        raise ToolchainMissing(
            "sanitizers are not supported with the ziglang package, which lacks their libraries: "
            "apt-get install g++, or set CXX"
        )
    if sanitizer == "uninitialised" and not compiler.is_gcc:
        raise ToolchainMissing("detection of uninitialised shared memory requires GCC: apt-get install g++")
    instrumented = _SANITIZE[sanitizer]
    # The runtime and main() call the sanitizer's interface; they are not instrumented.
    text = f"{_runtime_text()}#include <main.cpp>\n"
    plain = (*_OPTIONS, *(option for option in instrumented if option.startswith("-D")))
    objects = _build(compiler, "main.o", HERE / "main.cpp", text, ("-c", *plain))
    runner = _build(
        compiler, sanitizer, HERE / "main.cpp", "", (*_OPTIONS, *instrumented, "-rdynamic"), (str(objects.path), "-ldl")
    )
    runner.path.chmod(0o700)
    options = (*_kernel_options(compiler, source, defines, folders), "-Og", *instrumented)
    if sanitizer == "uninitialised":
        options += _CALL_AT_ENTRY
    return runner, _kernel(compiler, source, (entry,), options, folders=folders)


def _kernel(
    compiler: HostCompiler, source: Path, entries: Sequence[str], options: tuple[str, ...], link: tuple[str, ...] = (),
    folders: Sequence[Path] = (),
) -> Built:  # fmt: skip
    source = source.resolve()
    text = translation_unit(source, entries)
    try:
        return _build(compiler, f"{entries[0]}.so", source, text, ("-shared", *options), link, folders)
    except CompileError as error:
        if (missing := _missing_entry(error.log, entries)) is None:
            raise
        files, _ = sources.included_files(source, searched(source, folders))
        found = (name for file in files for name in sources.entry_points(file))
        message = nvrtc.no_entry_point(source, missing, found)
        raise CompileError(message, source=str(source), options=options, log=error.log) from None


def _missing_entry(log: str, entries: Sequence[str]) -> str | None:
    """The first entry point that the `.cu` does not declare, if the compiler reports no other error."""
    said = re.compile(rf"\W({'|'.join(entries)})\W was not declared|undeclared identifier \W({'|'.join(entries)})\W")
    errors = [said.search(line) for line in re.findall(r"\berror: (.*)", log)]
    return errors[0][1] or errors[0][2] if errors and errors[0] and all(errors) else None


def translation_unit(source: Path, entries: Sequence[str]) -> str:
    """The translation unit: cuda_cpu.h, the unmodified `.cu`, its dynamic shared memory and its entry points.

    Raises CompileError for a path that cannot be included.
    """
    if reason := refused_path(source):
        message = f"the host compiler cannot include {str(source)!r}: {reason}; move it to another folder"
        raise CompileError(message, source=str(source), options=(), log=reason)
    files, _ = sources.included_files(source, searched(source))
    texts = [sources.code_of(file) for file in files]
    names = dict.fromkeys(name for text in texts for name in _DYNAMIC.findall(text))
    return "\n".join(
        (
            '#include "cuda_cpu.h"',
            f'#include "{source}"',
            "alignas(1024) thread_local char sandbox_dynamic_smem[cpu::MAX_DYNAMIC_SMEM];",
            'extern "C" char* sandbox_dynamic_smem_address() { return sandbox_dynamic_smem; }',
            *(f"SANDBOX_DYNAMIC({name})" for name in names),
            *(f"SANDBOX_ENTRY({entry}, {_launch_bound(texts, entry)})" for entry in entries),
            "",
        )
    )


def _launch_bound(texts: Sequence[str], entry: str) -> str:
    """The thread count in an entry's __launch_bounds__, as an expression of the `.cu`. "0" if there is none, or if
    several definitions have different bounds."""
    renamed = (re.findall(rf"^[ \t]*#[ \t]*define\s+(\w+)\s+{entry}[ \t]*$", text, re.MULTILINE) for text in texts)
    declared = re.compile(rf"[^;{{}}]*?\b(?:{'|'.join([entry, *itertools.chain.from_iterable(renamed)])})\s*\(")
    found: dict[str, None] = {}
    for text in texts:
        for begin in _BOUNDS.finditer(text):
            arguments, end = sources.split_arguments(text, begin.end())
            if declared.match(text, end):
                found[arguments[0].strip()] = None
    return f"({next(iter(found))})" if len(found) == 1 else "0"


def include_dirs(source: Path) -> tuple[Path, ...]:
    """Include directories in order: headers of the CPU backend (cuda_fp16.h, and replacements of PTX headers),
    `include` next to the source, `kernels_cu/include`."""
    return tuple(dict.fromkeys((CPU_HEADERS, source.parent / "include", INCLUDE_DIR)))


def searched(source: Path, folders: Sequence[Path] = ()) -> tuple[Path, ...]:
    """All directories for headers of `source` except the system's: `include_dirs`, `folders`, and those that
    environment variables of the host compiler add."""
    return (*include_dirs(source), *folders, *host.extra_folders())


def _runtime_text() -> str:
    portable = "#define SANDBOX_PORTABLE_FIBERS\n" if os.environ.get("SANDBOX_PORTABLE_FIBERS") == "1" else ""
    return f"{portable}#include <runtime.cpp>\n"


def _kernel_options(
    compiler: HostCompiler, source: Path, defines: Mapping[str, object], folders: Sequence[Path] = ()
) -> tuple[str, ...]:
    return (
        *_OPTIONS,
        "-Og",  # half the compile time of -O2, and launches that take a quarter longer
        *shlex.split(os.environ.get("SANDBOX_CPU_FLAGS", "")),
        "-UNDEBUG",  # zig defines it; a kernel's assert must be checked, as with NVRTC
        # `extern thread_local` arrays need no initialiser call at each use. By default static shared memory of an
        # inline function is one variable per process: that of the library loaded first, whose tile may be smaller.
        *(("-fno-extern-tls-init", "-fno-gnu-unique") if compiler.is_gcc else ()),
        *(f"-D{name}={value}" for name, value in defines.items()),
        *(f"-I{folder}" for folder in (*include_dirs(source), *folders)),
    )


def _build(
    compiler: HostCompiler, name: str, source: Path, text: str, options: tuple[str, ...], link: tuple[str, ...] = (),
    folders: Sequence[Path] = (),
) -> Built:  # fmt: skip
    """Compile `text`, which includes `source`, to one cached file `name`. The runtime is the same file for all copies
    of the project: its key does not contain their paths."""
    is_runtime = source.parent == HERE

    def inputs() -> list[str | None]:
        files = [source, CPU_HEADERS / "cuda_cpu.h", *([HERE / "runtime.cpp"] if is_runtime else [])]
        base = HERE if is_runtime else None
        return [sources.fingerprint(path, searched(source, folders), base) for path in files]

    parts = {"kind": "cpu", "text": text, "options": options, "link": link, "compiler": compiler.identity}
    fingerprints = inputs()
    key = cache.make_key(source=fingerprints, **parts)
    if None not in fingerprints and (found := cache.get(key, (name,), {"seconds": float})):
        log.logger.log(log.COMPILING, "%s: in the cache, %s", name, found.path)
        return Built(found.path / name, found.meta["seconds"], True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / name
        found_in = (f"-I{HERE}",) if is_runtime else ()
        host.run(compiler, (*options, *found_in, "-x", "c++", "-", "-x", "none", *link, "-o", str(made)), text, source)
        content = made.read_bytes()
    seconds = time.perf_counter() - start
    line = " ".join((*compiler.command, *options))
    log.logger.log(log.COMPILING, "%s: compiled in %.2f s with %s", name, seconds, line)
    if None in fingerprints or fingerprints != inputs():  # unknown, or edited during compilation: key by content
        fingerprints = [hashlib.sha256(content).hexdigest()]
    key = cache.make_key(source=fingerprints, **parts)
    entry = cache.put(key, {name: content}, {"name": f"{name} cpu", "seconds": seconds})
    return Built(entry.path / name, seconds, False)
