"""A copy of an array on the other device, host or GPU, for a launch there."""

from __future__ import annotations

import ctypes

from ..core.score import SIZES
from ..launch import driver
from ..launch.dlpack import HOST, ArrayView, Device


class Staged:
    """Memory on `device` for the extent of a view, with the same strides.

    `pointer` is the address of the view's first element in the copy; `send` copies the array there, `fetch` back.
    """

    def __init__(self, view: ArrayView, device: Device):
        self.strides = view.strides
        low, high = view.extent()
        itemsize = SIZES[view.dtype]
        self._nbytes = (high - low) * itemsize
        self._home, self._home_device = view.pointer + low * itemsize, view.device
        self._device = device
        self._memory = driver.DeviceMemory(self._nbytes, driver.device(device[1])) if device != HOST else None
        self._host = (ctypes.c_char * self._nbytes)() if device == HOST else None
        self._start = self._memory.pointer if self._memory else ctypes.addressof(self._host)  # type: ignore[arg-type]
        self.pointer = self._start - low * itemsize

    def send(self) -> None:
        """Copy to the device."""
        if self._memory:
            driver.write(self._start, self._home, self._nbytes, driver.device(self._device[1]))
        else:
            driver.device(self._home_device[1]).synchronize()  # a copy alone does not wait for every stream
            driver.read(self._start, self._home, self._nbytes, driver.device(self._home_device[1]))

    def fetch(self) -> None:
        """Copy back. The caller has waited for the launch (`Prepared.wait`)."""
        if self._memory:
            driver.read(self._home, self._start, self._nbytes, driver.device(self._device[1]))
        else:
            driver.write(self._home, self._start, self._nbytes, driver.device(self._home_device[1]))
