"""A `.cu` file -> a library (or, for a sanitizer, a program) that executes it on the CPU, cached like a cubin."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .. import cache, sources
from ..nvrtc import INCLUDE_DIR
from . import compiler as host
from .compiler import HostCompiler

HERE = Path(__file__).resolve().parent
INCLUDE_DIRS = (HERE / "include", INCLUDE_DIR)  # the twins first: cuda_fp16.h, and any header of the same name
Sanitizer = Literal["address", "thread"]

_OPTIONS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-march=native", "-fno-strict-aliasing", "-pthread")
# Fibers have small stacks of their own, and frames must be walkable for a report.
_SANITIZE = {
    "address": ("-fsanitize=address,bounds", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-DSANDBOX_ASAN"),
    "thread": ("-fsanitize=thread", "-fno-omit-frame-pointer", "-DSANDBOX_TSAN"),
}
_DYNAMIC = re.compile(r"extern\s+__shared__[^;{}()\[\]]*(?:\([^;{}()]*\)[^;{}()\[\]]*)*?\b(\w+)\s*\[\s*\]\s*;")


@dataclass(frozen=True)
class Built:
    """One built object: `path` of the library or program; `seconds` it took when it was built; `cached`."""

    path: Path
    seconds: float
    cached: bool


def library(source: Path, entry: str, defines: Mapping[str, object]) -> Built:
    """The shared library of one kernel. Raises CompileError, ToolchainMissing."""
    compiler = host.find()
    runtime = _build(compiler, "runtime.so", HERE / "runtime.cpp", _runtime_text(), ("-shared", *_OPTIONS))
    return _build(
        compiler,
        f"{entry}.so",
        source.resolve(),
        translation_unit(source.resolve(), entry),
        ("-shared", *_kernel_options(compiler, defines)),
        link=(str(runtime.path),),
    )


def program(source: Path, entry: str, defines: Mapping[str, object], sanitizer: Sanitizer) -> Built:
    """A program that runs one launch of the kernel, read from a file, under a sanitizer (see main.cpp)."""
    compiler = host.find()
    text = translation_unit(source.resolve(), entry)
    instrumented = _SANITIZE[sanitizer]
    # The runtime and main() only talk to the tool; they are not instrumented themselves.
    plain = tuple(option for option in instrumented if option.startswith("-D"))
    runtime = f'{_runtime_text()}#include "{HERE / "main.cpp"}"\n'
    objects = _build(compiler, "runtime.o", HERE / "main.cpp", runtime, ("-c", *_OPTIONS, *plain))
    built = _build(
        compiler,
        entry,
        source.resolve(),
        text,
        (*_kernel_options(compiler, defines), *instrumented, "-O1"),
        link=(str(objects.path),),
    )
    built.path.chmod(0o700)
    return built


def translation_unit(source: Path, entry: str) -> str:
    """The C++ around the unmodified `.cu`: the shim before it; the entry and its dynamic shared memory after it."""
    names = dict.fromkeys(_DYNAMIC.findall(source.read_text()))
    return "\n".join(
        (
            '#include "cuda_cpu.h"',
            f'#include "{source}"',
            "alignas(1024) thread_local char sandbox_dynamic_smem[cpu::MAX_DYNAMIC_SMEM];",
            'extern "C" char* sandbox_dynamic_smem_address() { return sandbox_dynamic_smem; }',
            *(f"SANDBOX_DYNAMIC({name})" for name in names),
            f"SANDBOX_ENTRY({entry})",
            "",
        )
    )


def _runtime_text() -> str:
    return f'#include "{HERE / "runtime.cpp"}"\n'


def _kernel_options(compiler: HostCompiler, defines: Mapping[str, object]) -> tuple[str, ...]:
    return (
        *_OPTIONS,
        # `extern thread_local` arrays are plain memory: no call to an initialiser on each use
        *(("-fno-extern-tls-init",) if compiler.is_gcc else ()),
        *(f"-D{name}={value}" for name, value in defines.items()),
        *(f"-I{folder}" for folder in INCLUDE_DIRS),
    )


def _build(
    compiler: HostCompiler, name: str, source: Path, text: str, options: tuple[str, ...], link: tuple[str, ...] = ()
) -> Built:
    """Compile `text`, which stands around `source`, into one cached file called `name`."""
    fingerprints = [sources.fingerprint(path, INCLUDE_DIRS) for path in (source, INCLUDE_DIRS[0] / "cuda_cpu.h")]
    if source.parent == HERE:
        fingerprints.append(sources.fingerprint(HERE / "runtime.cpp", ()))
    key = cache.make_key(
        kind="cpu", source=fingerprints, text=text, options=options, link=link, compiler=compiler.identity
    )
    if None not in fingerprints and (found := cache.get(key)):
        return Built(found.path / name, found.meta["seconds"], True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / name
        host.run(compiler, (*options, "-x", "c++", "-", "-x", "none", *link, "-o", str(made)), text, source)
        content = made.read_bytes()
    seconds = time.perf_counter() - start
    entry = cache.put(key, {name: content}, {"name": f"{name} cpu", "seconds": seconds})
    return Built(entry.path / name, seconds, False)
