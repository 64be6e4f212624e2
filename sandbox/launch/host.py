"""Any array as a NumPy array, copied from the GPU if necessary."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.score import SIZES
from . import driver
from .dlpack import HOST, numpy_dtype, view


def host_array(array: Any) -> NDArray[Any]:
    """`array`, of any library, as a NumPy array: itself, a view of the same memory, or a copy of GPU memory.

    Raises UnsupportedProblem for a dtype that no kernel reads.
    """
    if isinstance(array, np.ndarray):
        return array
    seen = view(array)
    low, high = seen.extent()
    size = SIZES[seen.dtype]
    nbytes, start = (high - low) * size, seen.pointer + low * size
    memory: Any = b""
    if nbytes and seen.device == HOST:
        memory = (ctypes.c_char * nbytes).from_address(start)
    elif nbytes:
        memory = (ctypes.c_char * nbytes)()
        driver.read(ctypes.addressof(memory), start, nbytes, driver.device(seen.device[1]))
    strides = tuple(stride * size for stride in seen.strides)
    return np.ndarray(seen.shape, numpy_dtype(seen.dtype), memory, -low * size, strides)
