"""The read ceiling: a kernel that only reads memory, timed in turns with memory-bound contenders."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.normalise import cdiv
from ..launch import driver
from ..launch.arguments import PackedArguments
from ..launch.dlpack import library_of
from ..toolchain import nvrtc

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, LOADS = 512, 8  # threads per block; 16-byte loads per thread
DEFINES = {"THREADS": THREADS, "LOADS": LOADS}
BLOCK_BYTES = 16 * THREADS * LOADS
MAX_BYTES = 4 << 30  # bytes: the rate does not increase beyond this size


def bytes_to_read(nbytes: int, device: str = "cuda:0") -> Any:
    """A PyTorch tensor of `nbytes` random bytes, at most `MAX_BYTES`, rounded up to the 64 KiB that a block reads."""
    import torch

    size = cdiv(min(nbytes, MAX_BYTES), BLOCK_BYTES) * BLOCK_BYTES
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)


def reader(data: Any) -> Callable[[], None]:
    """A launch that reads all of `data`, made by `bytes_to_read`."""
    import torch

    gpu, blocks = driver.device(data.device.index), data.nbytes // BLOCK_BYTES
    arch = f"sm_{gpu.arch[0]}{gpu.arch[1]}"
    sums = torch.empty(blocks * THREADS // 32, dtype=torch.int32, device=data.device)
    arguments = PackedArguments([ctypes.c_void_p(x.data_ptr()) for x in (data, sums)])
    function = driver.CudaFunction(nvrtc.compile(SOURCE, "read_all", arch, DEFINES).cubin, "read_all", gpu)
    launch = function.launcher((blocks, 1, 1), (THREADS, 1, 1), 0, arguments)
    stream, keep_alive = library_of(data).stream(gpu.ordinal), (data, sums)

    def read() -> None:
        assert keep_alive, "the closure keeps the tensors alive"
        launch((), stream())

    return read
