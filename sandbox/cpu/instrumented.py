"""One launch of a kernel in a separate process, with or without a sanitizer: it may crash or time out."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

from ..core import process
from ..core.kernel import Dim3
from ..toolchain import cache
from . import build
from .build import Sanitizer

UNFINISHED = "did not finish within"  # in the text of a launch that timed out

_REPORTED = re.compile(r"Sanitizer: |: runtime error: ")
Pointer = tuple[int, int]  # index of the argument that contains the pointer, byte offset in the argument


class Fill(IntEnum):
    """Initial contents of local variables, as in runtime.h. REPORTED_NANS: the first read of an unwritten array element
    by a variable index is reported; the compiler does not instrument other reads."""

    NANS = 0
    ZEROS = 1
    REPORTED_NANS = 2


@dataclass(frozen=True)
class Report:
    """The report of a sanitizer. `lines`: locations in the kernel's files, as (file name, line).

    `contents`: the buffers after the launch, if it completed.
    """

    clean: bool
    text: str
    lines: tuple[tuple[str, int], ...]
    contents: tuple[np.ndarray, ...] = ()


def run(
    sanitizer: Sanitizer,
    source: Path,
    entry: str,
    defines: Mapping[str, object],
    grid: Dim3,
    block: Dim3,
    smem_bytes: int,
    arguments: Sequence[ctypes._SimpleCData | ctypes.Structure],
    buffers: Mapping[Pointer, np.ndarray],
    *,
    cluster: int = 1,
    order: int = 0,
    stack: Fill = Fill.NANS,
    timeout: float = 120.0,
    folders: Sequence[Path] = (),
) -> Report:
    """Build the kernel with `sanitizer`, launch it once and report.

    `buffers` maps a pointer in the arguments to its contiguous array. Under ThreadSanitizer each block runs on its own
    OS thread, so that races between blocks are found too. `order` 0 runs blocks, warps and lanes in ascending order;
    another value runs blocks in descending order, shuffles warps and lanes with this seed, and delays one warp of each
    block as long as possible. `stack`: for "uninitialised" only. `folders`: additional include directories.
    """
    with cache.in_use():  # executes cached files
        program, kernel = build.program(source, entry, defines, sanitizer, folders)
        blocks = grid[0] * grid[1] * grid[2]
        workers = min(blocks, 64) if sanitizer == "thread" else 1
        with tempfile.NamedTemporaryFile(prefix="sandbox-launch-") as file:
            file.write(_launch((*grid, *block, cluster, smem_bytes, workers, order, stack), arguments, buffers))
            file.flush()
            try:
                done = process.run(
                    [*_fixed_layout(), str(program.path), str(kernel.path), entry, file.name],
                    timeout=timeout, env={**os.environ, **_OPTIONS},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return Report(False, f"{entry} {UNFINISHED} {timeout:g} s: does it end?", ())
            except process.TooMuchOutput as error:
                if not _REPORTED.search(error.head):
                    return Report(False, f"{entry} {process.too_much(process.MOST_OUTPUT)}", ())
                done = subprocess.CompletedProcess((), 1, "", error.head)  # keep findings printed before
            results = Path(file.name).read_bytes() if done.returncode == 0 else b""
        text = _symbolized((done.stderr + done.stdout).strip())
    if done.returncode < 0 and not text:
        text = f"{entry} was terminated by {signal.Signals(-done.returncode).name}"
    sites = re.findall(r"([\w.-]+\.cuh?):(\d+)", text)
    lines = tuple(dict.fromkeys((name, int(line)) for name, line in sites))
    return Report(done.returncode == 0, text, lines, _split(results, list(buffers.values())) if results else ())


_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "TSAN_OPTIONS": "history_size=4",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def _launch(
    numbers: tuple[int, ...],
    arguments: Sequence[ctypes._SimpleCData | ctypes.Structure],
    buffers: Mapping[Pointer, np.ndarray],
) -> bytes:
    """The launch file; main.cpp documents the format."""
    parts = [struct.pack(f"{len(numbers) + 2}q", *numbers, len(buffers), len(arguments))]
    for argument in arguments:
        parts += [struct.pack("q", ctypes.sizeof(argument)), bytes(argument)]
    for pointer, array in buffers.items():
        parts += [struct.pack("3q", *pointer, array.nbytes), np.ascontiguousarray(array).tobytes()]
    return b"".join(parts)


def _split(content: bytes, like: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    found, offset = [], 0
    for array in like:
        found.append(np.frombuffer(content, array.dtype, array.size, offset).reshape(array.shape))
        offset += array.nbytes
    return tuple(found)


def _symbolized(text: str) -> str:
    """Replaces the code addresses in the runtime's reports, innermost call first, by source lines, as sanitizers do."""
    frames = re.findall(r"^ +in (\S+\.so)\+0x([0-9a-f]+)$", text, re.MULTILINE)
    if not frames:
        return text
    library = frames[0][0]
    # A return address is after its call.
    calls = [hex(int(offset, 16) - 1) for file, offset in frames if file == library]
    done = subprocess.run(
        ["addr2line", "-i", "-e", library, *calls],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [line.partition(" (")[0] for line in done.stdout.splitlines()]
    return "\n".join((text.partition("\n    in ")[0], *(f"    at {line}" for line in lines)))


@functools.cache
def _fixed_layout() -> tuple[str, ...]:
    """The command that disables address randomisation, with which ThreadSanitizer of older compilers may not start.
    Empty if a container forbids it.
    """
    command = ("setarch", "-R")
    if shutil.which("setarch") and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
        return command
    return ()
