"""NVRTC: compiles a `.cu` with macros for an architecture to cubin, PTX and resource usage. Needs no GPU or driver.

The program's name is the absolute path of its file, so that error messages, disassembly and Nsight find the source.
Results are cached on disk, keyed by the content of the source and of all included headers, the options, and the NVRTC
library.
"""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..core import log
from ..core.errors import CompileError, NoFastCompilation, ToolchainMissing, UnsupportedProblem
from ..core.files import refused_path
from . import cache, sources

INSTALL = 'pip install "attention-sandbox[nvrtc12]" (driver 525 or later) or "[nvrtc13]" (driver 580 or later)'
_USED = re.compile(r"Compiling entry function '(\w+)'(?:(?!Compiling entry).)*?\b(Used \d+ registers[^\n]*)", re.DOTALL)
_PROPERTIES = re.compile(
    r"Function properties for (\w+)\n[^\n]*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z])(\d+)\s+(?:\.ptr\b[^,\[]*?)?\w+(?:\[(\d+)\])?\s*(?:,|$)"
)
_WARNING = re.compile(r"\bwarning\b(?!-)|\bC75\d\d\b", re.IGNORECASE)  # C75xx: ptxas serialises wgmma
_FAST = "--Ofast-compile=mid"  # "min" is as slow as full optimisation, "max" no faster than "mid" for large kernels
_LINES = "-lineinfo"  # 4% of the time of a fast compilation, whose lines are not shown
INCLUDE_DIR = Path(__file__).resolve().parent.parent.parent / "kernels_cu" / "include"


@dataclass(frozen=True)
class Resources:
    """Resource usage of one entry point as reported by ptxas. smem_static: bytes per block."""

    registers: int
    smem_static: int
    stack: int  # bytes per thread
    spill_stores: int  # bytes per thread
    spill_loads: int  # bytes per thread
    warnings: tuple[str, ...] = ()  # such as serialised wgmma

    @classmethod
    def worst(cls, entries: Iterable[Resources]) -> Resources:
        """The maximum of each value over several entry points, and all warnings."""
        every = list(entries)
        numbers = ("registers", "smem_static", "stack", "spill_stores", "spill_loads")
        warnings = tuple(dict.fromkeys(warning for r in every for warning in r.warnings))
        return cls(**{name: max(getattr(r, name) for r in every) for name in numbers}, warnings=warnings)


@dataclass(frozen=True)
class Compiled:
    """One compiled entry point. `seconds`: NVRTC's time when it was compiled; `cached`: found on disk."""

    entry: str
    arch: str
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    log: str = field(repr=False)
    resources: Resources
    options: tuple[str, ...] = field(repr=False)
    seconds: float
    cached: bool


def compile(
    source: Path, entry: str, arch: str, defines: Mapping[str, object] | None = None, *,
    options: Sequence[str] = (_LINES,), folders: Sequence[Path] = (),
) -> Compiled:  # fmt: skip
    """Compile `source` for `arch` ("sm_90a") and report on its entry point `entry`. Other entry points are then cached.

    Include path: the folder `include` next to the source, the project's own, then `folders`.

    `options` must not include files: only `source` and its includes decide whether a cached result is valid. Raises
    CompileError with file, line and excerpt; ToolchainMissing without NVRTC or its headers; UnsupportedProblem for an
    architecture that this NVRTC does not support.
    """
    library = _library()
    if arch not in library.archs:
        raise UnsupportedProblem(
            f"arch {arch} is not supported by NVRTC {library.version}: choose one of {', '.join(library.archs)}"
        )
    source = source.resolve()
    if reason := refused_path(source):
        message = f"NVRTC cannot compile {str(source)!r}: {reason}; move it to another folder"
        raise CompileError(message, source=str(source), options=(), log=reason)
    folders = tuple(dict.fromkeys((source.parent / "include", INCLUDE_DIR, *folders, *include_dirs())))
    flags = (
        f"--gpu-architecture={arch}",
        "--std=c++17",
        *options,
        "--device-as-default-execution-space",  # NVRTC 13.0 treats a generic lambda as a host function
        "--ptxas-options=-v",
        *library.no_cache,
        *(f"-D{name}={value}" for name, value in (defines or {}).items()),
        *(f"--include-path={folder}" for folder in folders),
    )
    with _reading(source):
        fingerprint = sources.fingerprint(source, folders)
    key = cache.make_key(kind="cubin", source=fingerprint, flags=flags, nvrtc=library.identity)
    if fingerprint and (found := cache.get(key, ("cubin", "ptx"), {"log": str, "seconds": float})):
        meta, cubin, ptx = found.meta, found.files["cubin"], found.files["ptx"].decode()
        resources = parse_resources(meta["log"], entry, source)
        log.logger.log(log.COMPILING, "%s %s: in the cache, %s", entry, arch, found.path)
        _keep(key, source, arch, cubin, ptx)
        return Compiled(entry, arch, cubin, ptx, meta["log"], resources, flags, meta["seconds"], True)
    start = time.perf_counter()
    with _reading(source):
        cubin, ptx, text = _compile(source, flags)
    seconds = time.perf_counter() - start
    options_text = " ".join(flags)
    log.logger.log(log.COMPILING, "%s %s: compiled in %.2f s with %s\n%s", entry, arch, seconds, options_text, text)
    _keep(key, source, arch, cubin, ptx)
    resources = parse_resources(text, entry, source)
    with _reading(source):
        unchanged = bool(fingerprint) and fingerprint == sources.fingerprint(source, folders)
    if unchanged:  # not if the source was edited during the compilation
        meta = {"name": f"{source.stem} {arch}", "log": text, "seconds": seconds}
        cache.put(key, {"cubin": cubin, "ptx": ptx.encode()}, meta)
    return Compiled(entry, arch, cubin, ptx, text, resources, flags, seconds, False)


def compile_fast(
    source: Path, entry: str, arch: str, defines: Mapping[str, object] | None = None, *, folders: Sequence[Path] = ()
) -> Compiled:
    """`compile` in less than half the time, with hardly any optimisation: correct code for a first verdict. Its
    registers, spills and times are not those of the kernel.

    Raises as `compile` does; NoFastCompilation if this NVRTC has no such option, or for a kernel with setmaxnreg, which
    ptxas then ignores.
    """
    if not _has_fast_compilation():
        raise NoFastCompilation(f"NVRTC {version()} has no option {_FAST}; NVRTC 13 has it")
    compiled = compile(source, entry, arch, defines, options=(_FAST,), folders=folders)
    if "setmaxnreg" in compiled.ptx:
        raise NoFastCompilation(f"{entry} uses setmaxnreg, which {_FAST} ignores: compile it with optimisation")
    return compiled


@lru_cache(maxsize=1)
def _has_fast_compilation() -> bool:
    """Whether NVRTC accepts the option; none of its functions tells."""
    library = _library()
    return bool(_run(library.api, b"", "empty.cu", (f"--gpu-architecture={library.archs[0]}", _FAST))[0])


@contextlib.contextmanager
def _reading(source: Path) -> Iterator[None]:
    """A file that is missing, perhaps for a moment while an editor replaces it, is a CompileError."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        message = f"{error.filename}: no such file"
        raise CompileError(message, source=str(source), options=(), log="") from error


def _keep(key: str, source: Path, arch: str, cubin: bytes, ptx: str) -> None:
    with _reading(source):
        content = source.read_bytes()
    log.keep(f"{source.stem}-{arch}-{key[:8]}", {".cu": content, ".ptx": ptx.encode(), ".cubin": cubin})


def no_entry_point(source: Path, entry: str, found: Iterable[str]) -> str:
    """The message for a `.cu` that lacks an entry point of its spec, with the entry points that it has."""
    there = ", ".join(found) or "none"
    return f'{source} has no entry point {entry}; its entry points are: {there} (is it extern "C" __global__?)'


def parse_resources(log: str, entry: str, source: Path) -> Resources:
    """The resource usage of one entry point, parsed from NVRTC's log with `--ptxas-options=-v`.

    Spills of functions that were not inlined count for every entry point: the log does not name their callers.
    """
    used = {match[1]: match[2] for match in _USED.finditer(log)}
    functions = {name: tuple(map(int, numbers)) for name, *numbers in _PROPERTIES.findall(log)}
    if entry not in used or entry not in functions:
        raise CompileError(no_entry_point(source, entry, used), source=str(source), options=(), log=log)
    stack = functions[entry][0]
    stores, loads = (sum(functions[f][i] for f in functions if f == entry or f not in used) for i in (1, 2))
    registers, smem = (re.search(rf"(\d+) {what}", used[entry]) for what in ("registers", "bytes smem"))
    warnings = tuple(line.strip() for line in log.splitlines() if _WARNING.search(line))
    return Resources(int(registers[1]) if registers else 0, int(smem[1]) if smem else 0, stack, stores, loads, warnings)


class Parameter(NamedTuple):
    """One parameter of an entry point: the possible kinds ("pointer", "integer", "float", "struct"; PTX does not
    distinguish a pointer from a 64-bit integer) and its size in bytes."""

    kinds: tuple[str, ...]
    size: int


def parameters(ptx: str, entry: str) -> tuple[Parameter, ...]:
    """The parameters of an entry point, in order."""
    listed = re.search(rf"\.entry\s+{entry}\s*\(([^)]*)\)", ptx)
    found = []
    for letter, bits, array in _PARAMETER.findall(listed[1] if listed else ""):
        kinds = ("struct",) if array else ("float",) if letter == "f" else ("integer", "pointer")
        found.append(Parameter(kinds, int(array or int(bits) // 8)))
    return tuple(found)


def max_threads(ptx: str, entry: str) -> int:
    """The entry point's `.maxntid` (__launch_bounds__), in threads per block; 0 if it has none."""
    directives = re.search(rf"\.entry\s+{entry}\b\s*(?:\([^)]*\))?([^{{]*)\{{", ptx)
    extents = re.search(r"\.maxntid\s+([\d, ]+)", directives[1]) if directives else None
    return math.prod(map(int, extents[1].split(","))) if extents else 0


def version() -> str:
    """The version of NVRTC, such as "12.9". Raises ToolchainMissing."""
    return _library().version


def include_dirs() -> tuple[Path, ...]:
    """Folders of the CUDA headers that match this NVRTC. Raises ToolchainMissing."""
    library = _library()
    if tuple(map(int, library.version.split("."))) >= (13, 3):
        return (_bundled_headers(library),)
    return (_installed_headers(library.version),)


@dataclass(frozen=True)
class _Library:
    api: Any
    version: str
    identity: str  # version, file size and time: builds may differ
    archs: tuple[str, ...]
    no_cache: tuple[str, ...]  # disables NVRTC's own cache (12.9 and later): hits have no log


@lru_cache(maxsize=1)
def _library() -> _Library:
    try:
        from cuda.bindings import nvrtc
        from cuda.pathfinder import load_nvidia_dynamic_lib

        loaded = Path(load_nvidia_dynamic_lib("nvrtc").abs_path or "")
        _, major, minor = nvrtc.nvrtcVersion()
        _, numbers = nvrtc.nvrtcGetSupportedArchs()
    except ImportError as error:
        raise ToolchainMissing(f"NVRTC's Python bindings are missing ({error.name}): {INSTALL}") from error
    except RuntimeError as error:  # raised by the bindings if the shared library is missing
        raise ToolchainMissing(f"the NVRTC library is missing: {INSTALL}\n({error})") from error
    names = [f"sm_{number}" for number in numbers]
    # suffix a: all instructions of this chip; f: those of its family
    specific = [
        f"{name}{suffix}" for name in names for suffix, since in (("a", 90), ("f", 100)) if int(name[3:]) >= since
    ]
    stat = loaded.stat()
    identity = f"{major}.{minor} {loaded.name} {stat.st_size} {stat.st_mtime_ns}"
    no_cache = ("--no-cache",) if (major, minor) >= (12, 9) else ()
    return _Library(nvrtc, f"{major}.{minor}", identity, (*names, *specific), no_cache)


@lru_cache(maxsize=1)
def _installed_headers(nvrtc_version: str) -> Path:
    """The folder of CUDA headers with NVRTC's major version. Mixed major versions would compile to wrong code."""
    from cuda.pathfinder import find_nvidia_header_directory

    major = nvrtc_version.split(".")[0]
    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        raise ToolchainMissing(f"CUDA headers (cuda_fp16.h) for NVRTC {nvrtc_version} are missing: {INSTALL}")
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", (Path(folder) / "cuda_runtime_api.h").read_text("latin1"))
    found_major = str(int(found[1]) // 1000) if found else "unknown"
    if found_major != major:
        raise ToolchainMissing(
            f"the CUDA headers in {folder} are for CUDA {found_major}, NVRTC is {nvrtc_version}: install headers of "
            f'the same major version: pip install "nvidia-cuda-runtime{"-cu12" if major == "12" else f"=={major}.*"}"'
        )
    return Path(folder)


def _bundled_headers(library: _Library) -> Path:
    """NVRTC 13.3 and later bundle their headers; unpack them once, into the cache."""
    place = cache.directory() / ("headers-" + cache.make_key(nvrtc=library.identity)[:16])
    if not place.is_dir():
        with tempfile.TemporaryDirectory(prefix=".new-", dir=place.parent) as staging:
            unpacked = Path(staging) / "headers"
            unpacked.mkdir()
            _run(library.api, b"", "unpack.cu", ("--gpu-architecture=sm_90", f"--use-bundled-headers={unpacked}"))
            if not (unpacked / "cuda_fp16.h").exists():
                raise ToolchainMissing(f"NVRTC ({library.identity}) did not unpack its bundled headers into {unpacked}")
            try:
                unpacked.rename(place)
            except OSError:  # another process unpacked them first
                if not place.is_dir():
                    raise
    return place


def _compile(source: Path, flags: tuple[str, ...]) -> tuple[bytes, str, str]:
    """(cubin, PTX, log). Raises CompileError."""
    nvrtc = _library().api
    cubin, ptx, log = _run(nvrtc, source.read_bytes(), str(source), flags)
    if not cubin:
        shown = log.strip() or "NVRTC gave no reason"
        options = " ".join(flags)
        raise CompileError(
            f"NVRTC {version()} refused {source}\n\n{shown}\n\noptions: {options}", source=str(source), options=flags,
            log=log,
        )  # fmt: skip
    return cubin, ptx, log


def _run(nvrtc: Any, text: bytes, name: str, flags: Sequence[str]) -> tuple[bytes, str, str]:
    """Compile one NVRTC program: (cubin, PTX, log); cubin is empty if the compilation failed."""
    _, program = nvrtc.nvrtcCreateProgram(text, name.encode(), 0, None, None)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        read = lambda what: _read(nvrtc, program, what)  # noqa: E731
        log = read("ProgramLog").rstrip(b"\0\n ").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return b"", "", log or status.name
        return read("CUBIN"), read("PTX").rstrip(b"\0").decode(), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(nvrtc: Any, program: Any, what: str) -> bytes:
    _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    buffer = bytes(size)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer
