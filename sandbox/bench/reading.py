"""Reading as a contender: what a matter of reading memory would take if it did nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.integers import cdiv
from ..launch import driver
from ..launch.arguments import PackedArguments
from ..launch.dlpack import library_of
from ..toolchain import nvrtc

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, LOADS, BLOCKS = 256, 8, 4  # of a block; of 16 bytes, of a thread at once; on a multiprocessor
DEFINES = {"THREADS": THREADS, "LOADS": LOADS}


def bytes_to_read(nbytes: int, device: str = "cuda:0") -> Any:
    """So many bytes at random, a tensor of PyTorch's; rounded up to whole reads of 16."""
    import torch

    return torch.randint(0, 256, (cdiv(nbytes, 16) * 16,), dtype=torch.uint8, device=device)


def reader(data: Any) -> Callable[[], None]:
    """A launch that reads all of a contiguous tensor of PyTorch's, on a GPU, of a multiple of 16 bytes."""
    import torch

    gpu, count = driver.device(data.device.index), data.nbytes // 16
    arch = f"sm_{gpu.arch[0]}{gpu.arch[1]}"
    blocks = max(1, min(gpu.sm_count * BLOCKS, cdiv(count, THREADS * LOADS)))
    sums = torch.empty(blocks * THREADS // 32, dtype=torch.int32, device=data.device)
    arguments = PackedArguments(
        [ctypes.c_void_p(data.data_ptr()), ctypes.c_longlong(count), ctypes.c_void_p(sums.data_ptr())]
    )
    function = driver.CudaFunction(nvrtc.compile(SOURCE, "read_all", arch, DEFINES).cubin, "read_all", gpu)
    launch = function.launcher((blocks, 1, 1), (THREADS, 1, 1), 0, arguments)
    stream, held = library_of(data).stream(gpu.ordinal), (data, sums)

    def read() -> None:
        assert held, "what is read lives as long as whoever reads it"
        launch((), stream())

    return read
