"""CUlaunchConfig and CUlaunchAttribute, the launch configuration of cuLaunchKernelEx, as ctypes structures."""

from __future__ import annotations

import ctypes

from ..core.kernel import Arch, Dim3

PROGRAMMATIC_LAUNCH_ARCH: Arch = (9, 0)  # and later
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


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
    """A CUlaunchConfig, and its stream field, which is set before each launch. `programmatic_launch`: programmatic
    dependent launch: the kernel may start before the preceding one has finished. `cluster`: blocks of a thread block
    cluster, along x."""
    attributes = [_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (1,))] if programmatic_launch else []
    attributes += [_Attribute(_CLUSTER_DIMENSION, (cluster, 1, 1))] if cluster > 1 else []
    config = _Config(grid, block, smem_bytes, None, (_Attribute * len(attributes))(*attributes), len(attributes))
    return config, ctypes.c_void_p.from_buffer(config, _Config.stream.offset)
