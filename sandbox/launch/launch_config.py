"""What cuLaunchKernelEx is told of a launch, as the driver's C structures lie in memory."""

from __future__ import annotations

import ctypes

from ..core.kernel import Arch, Dim3

PROGRAMMATIC_LAUNCH_ARCH: Arch = (9, 0)  # and later
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_WHILE_THE_ONE_BEFORE_ENDS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint * 3), ("rest", ctypes.c_char * 52))


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def launch_config(
    grid: Dim3, block: Dim3, smem_bytes: int, programmatic_launch: bool, cluster: int = 1
) -> tuple[ctypes.Structure, ctypes.c_void_p]:
    """A CUlaunchConfig, and the stream in it, to be set before a launch. `programmatic_launch`: it may begin while the
    one before it ends. `cluster`: so many blocks along x run at one time, close to each other."""
    told = [_Attribute(_WHILE_THE_ONE_BEFORE_ENDS, (1,))] if programmatic_launch else []
    told += [_Attribute(_CLUSTER, (cluster, 1, 1))] if cluster > 1 else []
    config = _Config(grid, block, smem_bytes, None, (_Attribute * len(told))(*told), len(told))
    return config, ctypes.c_void_p.from_buffer(config, _Config.stream.offset)
