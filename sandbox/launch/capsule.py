"""DLPack capsules: reads those of other libraries, and exports bfloat16 arrays, which NumPy cannot export.

dlpack.h's DLTensor is the first member of DLManagedTensor ("dltensor"), and follows a header in the newer
DLManagedTensorVersioned ("dltensor_versioned"). Only the latter can mark an array as read-only.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ..core.errors import UnsupportedProblem


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


_READ_ONLY, _COPIED = 1, 2  # bits of `flags`
_MAJOR = 1  # version of dlpack.h: another major version may have another layout
BFLOAT16 = 4  # of DLDataTypeCode
DTYPES = {  # (DLDataTypeCode, bits)
    (2, 32): "float32", (2, 16): "float16", (BFLOAT16, 16): "bfloat16", (0, 32): "int32", (0, 64): "int64",
    (6, 8): "bool", (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2",
}  # fmt: skip
DEVICES = {1: "cpu", 2: "cuda", 3: "cpu"}  # DLDeviceType: kDLCPU, kDLCUDA, kDLCUDAHost


def capsule_of(array: Any, **options: Any) -> Any:
    """`array.__dlpack__(…)`: a versioned capsule if the library supports it, because unversioned capsules do not
    support read-only arrays."""
    try:
        return array.__dlpack__(max_version=(_MAJOR, 0), **options)
    except TypeError:  # the library does not support the argument of the newer protocol
        return array.__dlpack__(**options)


def tensor_in(capsule: Any) -> DLTensor:
    """The DLTensor inside a capsule that has not been consumed. The capsule still owns and deletes it."""
    versioned = _versioned(capsule)
    return versioned.tensor if versioned else DLTensor.from_address(_get(capsule, b"dltensor"))


def unwritable(capsule: Any) -> str:
    """Why writes to the memory of a capsule do not reach the exporter's array, or ""; an older capsule does not say."""
    flags = versioned.flags if (versioned := _versioned(capsule)) else 0
    return "is read-only" if flags & _READ_ONLY else "is exported as a copy" if flags & _COPIED else ""


def _get(capsule: Any, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return get(capsule, name)


def _versioned(capsule: Any) -> _Versioned | None:
    """The tensor of a versioned capsule; None for an unversioned one. Raises UnsupportedProblem for another version."""
    has = ctypes.pythonapi.PyCapsule_IsValid
    has.restype, has.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
    if not has(capsule, b"dltensor_versioned"):
        return None
    versioned = _Versioned.from_address(_get(capsule, b"dltensor_versioned"))
    if versioned.major != _MAJOR:
        raise UnsupportedProblem(
            f"DLPack version {versioned.major}.{versioned.minor} is not supported: "
            f"pass an array whose library exports version {_MAJOR}"
        )
    return versioned


class Exported:
    """A NumPy array of bfloat16 for `from_dlpack`. NumPy does not support the dtype and exports integers instead."""

    def __init__(self, array: np.ndarray):
        self._integers = array.view(np.uint16)

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._integers.__dlpack__(**options)
        tensor_in(capsule).dtype.code = BFLOAT16
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._integers.__dlpack_device__()
