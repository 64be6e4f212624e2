"""The buffers that marks write to (include/timeline.cuh), and how they are read."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UnsupportedProblem
from ..core.kernel import Dim3
from ..cpu import build
from ..cpu.launch import CpuFunction
from ..launch import driver
from ..launch.dlpack import HOST, Device
from ..toolchain import sources

DONE = "done"  # the mark that ends a warp's last step and does not begin another; its number is 0
MOST_BLOCKS, MOST_STEPS = 4, 16
CLOCKS_A_MARK = (
    4 * MOST_STEPS
)  # clock units between marks on the CPU backend, where the clock counts the marks of a block
LENGTH = {"cuda": 2**22, "cpu": 2**20}  # bytes per warp: 2 ms on a GPU, 16K marks of a block on the CPU backend
_CLOCK = np.dtype("u4")
_MARK = np.dtype([("step", "u4"), ("clock", "u4")])
_NO_BLOCK = 2**32 - 1
_ANCHOR = np.dtype([("sm", "u4"), ("clock", "u4"), ("nanoseconds", "u8")])
_SYMBOL = "sandbox_timeline"
_CALL = re.compile(r"\bTIMELINE\((\w+)\)")


def steps_of(source: Path) -> tuple[str, ...]:
    """The names of the steps in a `.cu` and its headers, DONE first. A step's number is its index.

    Raises UnsupportedProblem if there are none, or more than MOST_STEPS.
    """
    files, _ = sources.included_files(source, build.include_dirs(source))
    texts = (sources.code_of(file) for file in files if file.name != "timeline.cuh")
    names = {name for text in texts for name in _CALL.findall(text)}
    if not names:
        raise UnsupportedProblem(f"{source.name} has no marks: add the statement `TIMELINE(name);` where a step begins")
    found = (DONE, *sorted(names - {DONE}))
    if len(found) > MOST_STEPS:
        raise UnsupportedProblem(
            f"{source.name} has {len(found) - 1} steps: at most {MOST_STEPS - 1}, without {DONE}, are supported"
        )
    return found


def macros(steps: Sequence[str], grid: Dim3, block: Dim3, device: Device) -> dict[str, int]:
    """The macros that compile marks into a kernel: buffer length, step numbers, grid and block dimensions."""
    extents = {f"TIMELINE_{what}_{axis}": n for what, dim in (("GRID", grid), ("BLOCK", block))
               for axis, n in zip("XYZ", dim, strict=True)}  # fmt: skip
    numbers = {f"TIMELINE_STEP_{name}": number for number, name in enumerate(steps)}
    most = {"TIMELINE_BLOCKS": MOST_BLOCKS, "TIMELINE_STEPS": MOST_STEPS}
    return {"TIMELINE_MARKS": LENGTH[device[0]], **most, **extents, **numbers}


class _DeviceBuffers(ctypes.Structure):  # `MarkBuffers` of timeline.cuh
    _fields_ = (
        ("anchors", ctypes.c_uint64), ("high", ctypes.c_uint32), ("low", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32 * MOST_BLOCKS),
    )  # fmt: skip


@dataclass(frozen=True)
class MarkBuffer:
    """The marks of one warp in the order of their clocks; `lost`: number of overwritten marks; `anchor`: (sm, clock,
    nanoseconds) at TIMELINE(done), or None without it."""

    block: int
    warp: int
    marks: NDArray  # step, clock: modulo 2^32
    lost: int
    anchor: tuple[int, int, int] | None


class _Shared:
    """A zeroed array for a kernel to write to, aligned to `alignment`, within one 4 GiB segment."""

    def __init__(self, count: int, dtype: np.dtype, alignment: int, gpu: driver.Device | None) -> None:
        self._gpu, self.nbytes = gpu, count * dtype.itemsize
        room = 2 * self.nbytes + alignment
        self._memory = driver.DeviceMemory(room, gpu) if gpu else np.zeros(room, np.uint8)
        begin = self._memory.pointer if isinstance(self._memory, driver.DeviceMemory) else self._memory.ctypes.data
        self.address = begin + -begin % alignment
        if self.address >> 32 != self.address + self.nbytes - 1 >> 32:
            self.address += -self.address % 2**32
        if isinstance(self._memory, driver.DeviceMemory):
            self._host = np.zeros(count, dtype)
        else:
            self._host = self._memory[self.address - begin :][: self.nbytes].view(dtype)

    def clear(self) -> None:
        """Set to zero."""
        if self._gpu:
            driver.launch_calls([driver.zeroing(ctypes.c_uint64(self.address), self.nbytes)], [], self._gpu)(())
        else:
            self._host[:] = 0

    def fetch(self, count: int) -> NDArray:
        """Copy the first `count` elements to the host."""
        found = self._host[:count]
        if self._gpu:
            driver.read(found.ctypes.data, self.address, found.nbytes, self._gpu)
        return found


class MarkBuffers:
    """Device memory for the marks of one entry point. Its address is stored in the module; the entry point may only be
    launched during the lifetime of this object.

    Each warp of the given `blocks` (numbers, at most MOST_BLOCKS) has a buffer. All other blocks share a scratch buffer
    that is not read. A buffer is a ring with one byte per clock cycle; older marks are overwritten.
    """

    def __init__(
        self, function: driver.CudaFunction | CpuFunction, block: Dim3, blocks: Sequence[int], device: Device
    ) -> None:
        self.blocks, self._warps, self._length = [*blocks], -(-math.prod(block) // 32), LENGTH[device[0]]
        self._gpu = driver.device(device[1]) if device != HOST else None
        count = (MOST_BLOCKS + 1) * self._warps
        self._clocks = _Shared(count * self._length // _CLOCK.itemsize, _CLOCK, self._length, self._gpu)
        self._anchors = _Shared(count, _ANCHOR, _ANCHOR.itemsize, self._gpu)
        self.clear()
        high, low = divmod(self._clocks.address, 2**32)
        recorded = [*blocks, *[_NO_BLOCK] * (MOST_BLOCKS - len(blocks))]
        buffers = _DeviceBuffers(self._anchors.address, high, low, (ctypes.c_uint32 * MOST_BLOCKS)(*recorded))
        if self._gpu:
            driver.write(function.constant(_SYMBOL), ctypes.addressof(buffers), ctypes.sizeof(buffers), self._gpu)
        else:
            ctypes.memmove(function.constant(_SYMBOL), ctypes.byref(buffers), ctypes.sizeof(buffers))

    def clear(self) -> None:
        """Clear all marks."""
        self._clocks.clear()
        self._anchors.clear()

    def read(self) -> Iterator[MarkBuffer]:
        """The marks of each warp that has any. If a block ran longer than a buffer holds, only the last marks."""
        count = len(self.blocks) * self._warps
        anchors = self._anchors.fetch(count).reshape(-1, self._warps)
        every = self._clocks.fetch(count * self._length // _CLOCK.itemsize).reshape(*anchors.shape, -1)
        for block, buffers, ends in zip(self.blocks, every, anchors, strict=True):
            written = [_marks_on(buffer) for buffer in buffers]
            latest = _latest(np.concatenate([marks["clock"] for marks in written]))
            for warp, marks in enumerate(written):
                age = latest - marks["clock"]  # modulo 2^32
                order = np.argsort(age)[::-1]
                kept = marks[order[age[order] < self._length]]
                if len(kept):
                    sm, clock, nanoseconds = map(int, ends[warp])
                    done = kept["step"][-1] == 0
                    anchor = (sm, clock, nanoseconds) if done else None
                    yield MarkBuffer(block, warp, kept, len(marks) - len(kept), anchor)


def _marks_on(buffer: NDArray) -> NDArray:
    """The marks in a buffer. A nonzero clock is a mark; its index modulo MOST_STEPS is the step's number."""
    places = np.flatnonzero(buffer)
    found = np.empty(len(places), _MARK)
    found["step"], found["clock"] = places % MOST_STEPS, buffer[places]
    return found


def _latest(clocks: NDArray) -> NDArray:
    """The latest of clocks modulo 2^32 that lie within 2^31 of each other, as an array of one element or none."""
    return clocks[:1] + (clocks - clocks[:1]).view(np.int32).max(initial=0).astype(np.uint32)
