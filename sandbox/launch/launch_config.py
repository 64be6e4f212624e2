"""What cuLaunchKernelEx is told of a launch, as the driver's C structures lie in memory."""

from __future__ import annotations

import ctypes

from ..core.kernel import Arch, Dim3

EARLY_ARCH: Arch = (9, 0)  # and later
_WHILE_THE_ONE_BEFORE_ENDS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def launch_config(grid: Dim3, block: Dim3, smem_bytes: int, early: bool) -> tuple[ctypes.Structure, ctypes.c_void_p]:
    """A CUlaunchConfig, and the stream in it, to be set before a launch. `early`: it may begin while the one before it
    ends."""
    attribute = _Attribute(_WHILE_THE_ONE_BEFORE_ENDS, 1)
    config = _Config(grid, block, smem_bytes, None, ctypes.pointer(attribute), int(early))
    return config, ctypes.c_void_p.from_buffer(config, _Config.stream.offset)
