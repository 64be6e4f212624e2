"""The memory that marks write to (include/timeline.cuh), and how it is read."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterator, Sequence
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

MACRO = "TIMELINE_MARKS"
ROOM = 16384  # events of a warp
_WARP = np.dtype(
    {"names": ["next", "begin", "end", "sm", "nanoseconds"], "formats": ["u4", "u4", "u4", "u4", "u8"], "itemsize": 32}
)
_EVENT = np.dtype([("step", "u4"), ("clock", "u4")])
_SYMBOL = "sandbox_timeline"
_MARK = re.compile(r"\bTIMELINE\((\w+)\)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def steps_of(source: Path) -> dict[int, str]:
    """{number: name} of the steps that marks in a `.cu` and its headers begin. Raises UnsupportedProblem when there are
    none, or when two names have one number."""
    files, _ = sources.included_files(source, build.include_dirs(source))
    texts = (_COMMENT.sub(" ", file.read_text(errors="replace")) for file in files if file.name != "timeline.cuh")
    names = {name for text in texts for name in _MARK.findall(text)}
    if not names:
        raise UnsupportedProblem(
            f"{source.name} has no marks: write TIMELINE(name); where a step begins, and a line of it has a timeline"
        )
    found: dict[int, str] = {}
    for name in sorted(names):
        if found.setdefault(number_of(name), name) != name:
            raise UnsupportedProblem(f"{source.name}: steps {name} and {found[number_of(name)]} need other names")
    return found


def number_of(name: str) -> int:
    """What stands for a step in memory: FNV-1a of its name, as in timeline.cuh."""
    number = 2166136261
    for byte in name.encode():
        number = (number ^ byte) * 16777619 % 2**32
    return number


class _Told(ctypes.Structure):  # `Notes` of timeline.cuh
    _fields_ = (
        ("warps", ctypes.c_uint64), ("events", ctypes.c_uint64),
        ("blocks", ctypes.c_uint32), ("warps_per_block", ctypes.c_uint32),
    )  # fmt: skip


class Notes:
    """Memory for the marks of one entry's launches, where its module finds it, until `close`.

    `blocks`, by number, have room for ROOM events a warp; of the others nothing is kept.
    """

    def __init__(
        self, function: driver.CudaFunction | CpuFunction, grid: Dim3, block: Dim3, blocks: Sequence[int],
        device: Device,
    ) -> None:  # fmt: skip
        self.warps_per_block = -(-math.prod(block) // 32)
        self.blocks = [*blocks]
        count = math.prod(grid) * self.warps_per_block
        self._fresh = np.zeros(count, _WARP)
        places = np.concatenate([block * self.warps_per_block + np.arange(self.warps_per_block) for block in blocks])
        begins = np.arange(len(places), dtype=np.uint32) * ROOM
        for field, values in (("next", begins), ("begin", begins), ("end", begins + ROOM)):
            self._fresh[field][places] = values
        self._warps, self._events = self._fresh.copy(), np.zeros(len(places) * ROOM, _EVENT)
        self._gpu = driver.device(device[1]) if device != HOST else None
        arrays = (self._warps, self._events)
        self._memory = [driver.DeviceMemory(array.nbytes, self._gpu) for array in arrays] if self._gpu else []
        self._symbol = function.constant(_SYMBOL)
        addresses = [memory.pointer for memory in self._memory] or [array.ctypes.data for array in arrays]
        self._tell(_Told(*addresses, math.prod(grid), self.warps_per_block))

    def _tell(self, told: _Told) -> None:
        if self._gpu:
            driver.write(self._symbol, ctypes.addressof(told), ctypes.sizeof(told), self._gpu)
        else:
            ctypes.memmove(self._symbol, ctypes.byref(told), ctypes.sizeof(told))

    def close(self) -> None:
        """Nobody listens from now on."""
        self._tell(_Told())

    def begin(self) -> None:
        """Forget what was noted."""
        if self._gpu:
            driver.write(self._memory[0].pointer, self._fresh.ctypes.data, self._fresh.nbytes, self._gpu)
        else:
            self._warps[:] = self._fresh

    def read(self) -> Iterator[tuple[int, int, NDArray, NDArray, int]]:
        """(block, warp, its record, its events, how many more there were) of each warp that came to a mark."""
        if self._gpu:
            for array, memory in zip((self._warps, self._events), self._memory, strict=True):
                driver.read(array.ctypes.data, memory.pointer, array.nbytes, self._gpu)
        for block in self.blocks:
            for number in range(self.warps_per_block):
                warp = self._warps[block * self.warps_per_block + number]
                begin, end, came = int(warp["begin"]), int(warp["end"]), int(warp["next"])
                if came > begin:
                    yield block, number, warp, self._events[begin : min(came, end)], max(came - end, 0)
