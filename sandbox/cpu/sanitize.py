"""One launch of a kernel under AddressSanitizer or ThreadSanitizer, in a process of its own."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ..spec import Dim3
from . import build
from .build import Sanitizer


@dataclass(frozen=True)
class Report:
    """What a sanitizer said. `lines` are the places it names in the kernel's own files, as (file name, line)."""

    clean: bool
    text: str
    lines: tuple[tuple[str, int], ...]


def run(
    sanitizer: Sanitizer,
    source: Path,
    entry: str,
    defines: Mapping[str, object],
    grid: Dim3,
    block: Dim3,
    smem_bytes: int,
    arguments: Sequence[ctypes._SimpleCData | ctypes.Structure],
    buffers: Mapping[int, np.ndarray],
    *,
    timeout: float = 120.0,
) -> Report:
    """Build the kernel with `sanitizer`, launch it once and report.

    `buffers` maps an argument's position to the contiguous array it points to. Blocks run side by side on one OS
    thread each under ThreadSanitizer, so that races between blocks are seen too.
    """
    program, kernel = build.program(source, entry, defines, sanitizer)
    blocks = grid[0] * grid[1] * grid[2]
    positions = list(buffers)
    numbers = (*grid, *block, smem_bytes, min(blocks, 64) if sanitizer == "thread" else 1, len(buffers), len(arguments))
    with tempfile.NamedTemporaryFile(prefix="sandbox-launch-") as file:
        file.write(struct.pack(f"{len(numbers)}q", *numbers))
        for array in buffers.values():
            file.write(struct.pack("q", array.nbytes) + np.ascontiguousarray(array).tobytes())
        for position, argument in enumerate(arguments):
            buffer = positions.index(position) if position in buffers else -1
            file.write(struct.pack("2q", ctypes.sizeof(argument), buffer) + bytes(argument))
        file.flush()
        done = subprocess.run(
            [*_fixed_layout(), str(program.path), str(kernel.path), f"sandbox_entry_{entry}", file.name],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "history_size=4"},
        )
    text = (done.stderr + done.stdout).strip()
    places = re.findall(r"([\w.-]+\.cuh?):(\d+)", text)
    lines = tuple(dict.fromkeys((name, int(line)) for name, line in places))
    return Report(done.returncode == 0, text, lines)


@cache
def _fixed_layout() -> tuple[str, ...]:
    """ThreadSanitizer of older compilers cannot start where Linux randomises addresses widely; a container may forbid
    to switch that off.
    """
    command = ("setarch", "-R")
    if shutil.which("setarch") and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
        return command
    return ()
