"""One launch of a kernel under a sanitizer, or bare, in a process of its own: it may crash, and be ended in time."""

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

UNFINISHED = "did not finish within"  # what the text says of a launch that was ended


_REPORTED = re.compile(r"Sanitizer: |: runtime error: ")
Pointer = tuple[int, int]  # the position of the argument that holds it, and its offset there in bytes


class Fill(IntEnum):
    """What local variables hold before they are written, as runtime.h has it. REPORTED_NANS: the first read of one is
    reported where the compiler shows it to the runtime: of an array, by an index that is no constant."""

    NANS = 0
    ZEROS = 1
    REPORTED_NANS = 2


@dataclass(frozen=True)
class Report:
    """What a sanitizer said. `lines` are the places it names in the kernel's own files, as (file name, line).

    `contents`: the buffers after the launch, when it came to its end.
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
    team: int = 1,
    order: int = 0,
    stack: Fill = Fill.NANS,
    timeout: float = 120.0,
    folders: Sequence[Path] = (),
) -> Report:
    """Build the kernel with `sanitizer`, launch it once and report.

    `buffers` maps a pointer among the arguments to the contiguous array it leads to. Blocks run side by side on one OS
    thread each under ThreadSanitizer, so that races between blocks are seen too. `order` 0 runs blocks, warps and lanes
    in ascending order; any other number runs blocks in descending order and shuffles the rest, with that seed; of each
    block one warp lags behind the others as far as it can. `stack`: under "uninitialised" alone. `folders`: where else
    its headers are looked for.
    """
    with cache.in_use():  # programs are run by their paths
        program, kernel = build.program(source, entry, defines, sanitizer, folders)
        blocks = grid[0] * grid[1] * grid[2]
        workers = min(blocks, 64) if sanitizer == "thread" else 1
        with tempfile.NamedTemporaryFile(prefix="sandbox-launch-") as file:
            file.write(_launch((*grid, *block, team, smem_bytes, workers, order, stack), arguments, buffers))
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
                done = subprocess.CompletedProcess((), 1, "", error.head)  # what was found before that counts
            results = Path(file.name).read_bytes() if done.returncode == 0 else b""
        text = _symbolized((done.stderr + done.stdout).strip())
    if done.returncode < 0 and not text:
        text = f"{entry} was ended by {signal.Signals(-done.returncode).name}"
    places = re.findall(r"([\w.-]+\.cuh?):(\d+)", text)
    lines = tuple(dict.fromkeys((name, int(line)) for name, line in places))
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
    """The file that main.cpp reads."""
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
    """Our own reports name places in the machine code, innermost call first; say which lines those are, as the
    sanitizers do."""
    frames = re.findall(r"^ +in (\S+\.so)\+0x([0-9a-f]+)$", text, re.MULTILINE)
    if not frames:
        return text
    library = frames[0][0]
    # A return address is behind its call.
    calls = [hex(int(offset, 16) - 1) for file, offset in frames if file == library]
    said = subprocess.run(
        ["addr2line", "-i", "-e", library, *calls],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    lines = [line.partition(" (")[0] for line in said.stdout.splitlines()]
    return "\n".join((text.partition("\n    in ")[0], *(f"    at {line}" for line in lines)))


@functools.cache
def _fixed_layout() -> tuple[str, ...]:
    """ThreadSanitizer of older compilers cannot start where Linux randomises addresses widely; a container may forbid
    to switch that off.
    """
    command = ("setarch", "-R")
    if shutil.which("setarch") and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
        return command
    return ()
