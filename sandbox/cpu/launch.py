"""Running a built kernel on the CPU: the counterpart of `driver`."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

from ..errors import LaunchError, SpecError

MAX_DYNAMIC_SMEM = 227 * 1024  # as in runtime.h
_ERROR_BYTES = 4096
Dim3 = tuple[int, int, int]


class _Launch(ctypes.Structure):
    """`cpu::Launch` of runtime.h."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("dynamic_smem", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("workers", ctypes.c_uint),
        ("error", ctypes.c_char_p),
        ("error_size", ctypes.c_uint64),
    )


class CpuFunction:
    """One kernel's entry point in a loaded library."""

    def __init__(self, library: Path, entry: str):
        self.entry = entry
        loaded = _load(str(library))
        self._run = loaded.sandbox_launch
        self._entry = ctypes.cast(loaded.sandbox_entry, ctypes.c_void_p)
        self._smem = ctypes.cast(loaded.sandbox_dynamic_smem_address, ctypes.c_void_p)

    def launch(self, grid: Dim3, block: Dim3, smem_bytes: int, table: ctypes.Array) -> None:
        """Run the whole grid and return when it is done; other Python threads go on meanwhile.

        Raises LaunchError with what a barrier, a warp collective or a trap had to say.
        """
        if smem_bytes > MAX_DYNAMIC_SMEM:
            raise SpecError(f"{self.entry}: {smem_bytes} bytes of shared memory exceed {MAX_DYNAMIC_SMEM}")
        message = ctypes.create_string_buffer(_ERROR_BYTES)
        launch = _Launch(
            self._entry, ctypes.addressof(table), self._smem, grid, block, smem_bytes, workers(),
            ctypes.cast(message, ctypes.c_char_p), _ERROR_BYTES,
        )  # fmt: skip
        if self._run(ctypes.byref(launch)):
            raise LaunchError(f"{self.entry} on the CPU backend: {message.value.decode(errors='replace')}")


def workers() -> int:
    """OS threads to spread blocks over: `$SANDBOX_CPU_WORKERS`, else the cores this process may use."""
    chosen = os.environ.get("SANDBOX_CPU_WORKERS")
    return max(1, int(chosen)) if chosen else len(os.sched_getaffinity(0))


@lru_cache(maxsize=None)
def _load(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)
