"""DLPack capsules: what is in another library's, and one of our own where NumPy refuses to make it.

dlpack.h's DLTensor is the first member of DLManagedTensor ("dltensor"), and follows a header in the newer
DLManagedTensorVersioned ("dltensor_versioned"), the only one that can say that an array is read-only.
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


_MAJOR = 1  # of dlpack.h: what another says may lie differently
BFLOAT16 = 4  # of DLDataTypeCode
DTYPES = {  # (DLDataTypeCode, bits)
    (2, 32): "float32", (2, 16): "float16", (BFLOAT16, 16): "bfloat16", (0, 32): "int32", (0, 64): "int64",
    (6, 8): "bool", (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2",
}  # fmt: skip
DEVICES = {1: "cpu", 2: "cuda", 3: "cpu"}  # DLDeviceType: kDLCPU, kDLCUDA, kDLCUDAHost


def capsule_of(array: Any, **options: Any) -> Any:
    """`array.__dlpack__(…)`: a versioned capsule where its library makes them, since others refuse read-only arrays."""
    try:
        return array.__dlpack__(max_version=(_MAJOR, 0), **options)
    except TypeError:  # a library that does not know the newer protocol's argument
        return array.__dlpack__(**options)


def tensor_in(capsule: Any) -> DLTensor:
    """The DLTensor inside a capsule that nobody has consumed; the capsule still owns it, and deletes it in the end."""
    get, has = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_IsValid
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    has.restype, has.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
    if not has(capsule, b"dltensor_versioned"):
        return DLTensor.from_address(get(capsule, b"dltensor"))
    versioned = _Versioned.from_address(get(capsule, b"dltensor_versioned"))
    if versioned.major != _MAJOR:
        raise UnsupportedProblem(
            f"a DLPack capsule of version {versioned.major}.{versioned.minor} is not known: "
            f"pass an array whose library speaks version {_MAJOR}"
        )
    return versioned.tensor


class Exported:
    """A NumPy array of bfloat16 as `from_dlpack` takes it: NumPy, which does not know the dtype, exports integers."""

    def __init__(self, array: np.ndarray):
        self._integers = array.view(np.uint16)

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._integers.__dlpack__(**options)
        tensor_in(capsule).dtype.code = BFLOAT16
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._integers.__dlpack_device__()
