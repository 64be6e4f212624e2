"""Launches a compiled kernel on the CPU: the counterpart of `launch.driver`."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from ..core.errors import LaunchError, SpecError
from ..core.kernel import Dim3
from ..launch.arguments import Arguments, Launch
from ..launch.parameters import check_block_size
from ..toolchain.nvrtc import Parameter

MAX_DYNAMIC_SMEM = 227 * 1024  # as in runtime.h
MAX_THREADS = 1024  # per block, on every architecture
_ERROR_BYTES = 4096
_MAX_PARAMETERS = 4096 // 4  # 4 KiB in total
_KINDS = ("pointer", "integer", "float", "struct")  # numbered as in cuda_cpu.h
_order: ContextVar[int] = ContextVar("_order", default=0)  # of threads, as in `instrumented.run`


@contextlib.contextmanager
def shuffled_threads(seed: int) -> Iterator[None]:
    """Launches within run the threads of a block, and the blocks, in another order, which depends on `seed` >= 1."""
    token = _order.set(seed)
    try:
        yield
    finally:
        _order.reset(token)


class _Launch(ctypes.Structure):
    """`cpu::Launch` of runtime.h."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("dynamic_smem", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint),
        ("smem_bytes", ctypes.c_uint),
        ("workers", ctypes.c_uint),
        ("order", ctypes.c_uint),
        ("stack", ctypes.c_uint),
        ("error", ctypes.c_char_p),
        ("error_size", ctypes.c_uint64),
    )


class CpuFunction:
    """One kernel's entry point in a loaded library."""

    def __init__(self, library: Path, entry: str):
        self.entry = entry
        loaded = self._loaded = _load(str(library))
        self._run = loaded.sandbox_launch
        self._entry = ctypes.cast(getattr(loaded, f"sandbox_entry_{entry}"), ctypes.c_void_p)
        self._smem = ctypes.cast(loaded.sandbox_dynamic_smem_address, ctypes.c_void_p)
        each = (ctypes.c_uint * _MAX_PARAMETERS)()
        count = getattr(loaded, f"sandbox_parameters_{entry}")(each)
        self.parameters = tuple(Parameter((_KINDS[packed & 3],), packed >> 2) for packed in each[:count])
        self.max_threads: int = getattr(loaded, f"sandbox_max_threads_{entry}")()  # from __launch_bounds__; 0: none

    def constant(self, name: str) -> int:
        """The address of a global or constant variable of the library, shared by its entry points."""
        return ctypes.addressof(ctypes.c_char.in_dll(self._loaded, name))

    def launcher(
        self,
        grid: Dim3,
        block: Dim3,
        smem: int,
        arguments: Arguments,
        programmatic_launch: bool = False,
        cluster: int = 1,
    ) -> Launch:
        """A callable that runs the whole grid and returns when it has finished. It releases the GIL.

        It raises LaunchError for an unreached barrier, a mismatched warp collective or a trap.
        """
        if smem > MAX_DYNAMIC_SMEM:
            raise SpecError(f"{self.entry}: {smem} bytes of shared memory exceed {MAX_DYNAMIC_SMEM}")
        if not 1 <= math.prod(block) <= MAX_THREADS:
            raise SpecError(f"{self.entry}: a block {block} is not supported: it must have 1 to {MAX_THREADS} threads")
        check_block_size(self.entry, block, self.max_threads)
        if grid[0] % cluster:
            raise SpecError(f"{self.entry}: a grid {grid} is not of whole clusters of {cluster} blocks along x")
        lock = _ForkedLock()

        def launch(pointers: tuple[int, ...], stream: int = 0) -> None:
            if not math.prod(grid):
                raise SpecError(f"{self.entry}: a grid {grid} has no blocks")  # as cuLaunchKernel does
            message = ctypes.create_string_buffer(_ERROR_BYTES)
            description = _Launch(
                self._entry, ctypes.addressof(arguments.table), self._smem, grid, block, cluster, smem, workers(),
                _order.get(), 0, ctypes.cast(message, ctypes.c_char_p), _ERROR_BYTES,
            )  # fmt: skip
            with lock:
                for slot, pointer in zip(arguments.slots, pointers, strict=True):
                    slot.value = pointer
                failed = self._run(ctypes.byref(description))
            if failed:
                raise LaunchError(f"{self.entry} on the CPU backend: {message.value.decode(errors='replace')}")

        return launch


class _ForkedLock:
    """A lock that is free in a forked child, where the thread that acquired it does not exist."""

    def __init__(self) -> None:
        self.renew()
        _locks.add(self)

    def renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


_locks: weakref.WeakSet[_ForkedLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [*map(_ForkedLock.renew, _locks)])


def workers() -> int:
    """Number of OS threads: `$SANDBOX_CPU_WORKERS`, else the cores available to this process."""
    chosen = os.environ.get("SANDBOX_CPU_WORKERS")
    if chosen and not chosen.isdecimal():
        raise SpecError(f"SANDBOX_CPU_WORKERS={chosen} is not supported: it must be the number of OS threads")
    return max(1, int(chosen)) if chosen else len(os.sched_getaffinity(0))


@cache
def _load(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)
