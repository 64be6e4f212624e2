"""The CUDA driver: the only module that calls libcuda.

All work uses the device's primary context, as in PyTorch and CuPy, so that arrays and streams can be shared. Launches
call cuLaunchKernelEx through ctypes, because their latency matters: its four arguments are prepared in advance, while
cuLaunchKernel has eleven to convert. All other calls use NVIDIA's Python bindings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from ..core.errors import DriverError, GpuUnavailable
from ..core.kernel import Arch, Dim3
from . import calls
from .arguments import Arguments, Launch
from .calls import Call
from .launch_config import PROGRAMMATIC_LAUNCH_ARCH, launch_config
from .tensor_maps import Box

_SUCCESS, _NO_DEVICE, _NOT_INITIALIZED, _INVALID_CONTEXT = 0, 100, 3, 201
_DEFAULT_SMEM = 48 * 1024  # a kernel must opt in to more shared memory than this, static and dynamic together


@lru_cache(maxsize=1)
def _libcuda() -> ctypes.CDLL:
    """libcuda, initialised. Raises GpuUnavailable immediately if there is no driver or no GPU."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise GpuUnavailable(
            "no NVIDIA driver: libcuda.so.1 is not on this machine (install it; on a machine without a GPU use "
            "attention(backend='cpu'), the commands `run` and `check` with --backend cpu, and `bench --show` and "
            "`profile --show` for stored results)"
        ) from error
    status = library.cuInit(0)
    if status == _NO_DEVICE:
        raise GpuUnavailable("the NVIDIA driver finds no GPU (check nvidia-smi and CUDA_VISIBLE_DEVICES)")
    if status == _NOT_INITIALIZED:
        raise GpuUnavailable("CUDA cannot be used in a forked process: start it with the 'spawn' method")
    if status != _SUCCESS:
        raise GpuUnavailable(f"the NVIDIA driver does not start: cuInit returned {status} (does nvidia-smi work?)")
    library.cuMemsetD8Async.argtypes = ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p
    return library


@lru_cache(maxsize=1)
def _bindings() -> Any:
    _libcuda()
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise GpuUnavailable(f"CUDA's Python bindings are missing ({error}): pip install cuda-python") from error
    return driver


def _call(name: str, *args: Any, about: str = "") -> Any:
    """One driver call; returns its result, or raises DriverError naming the call."""
    driver = _bindings()
    status, *results = getattr(driver, name)(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise _error(int(status), f"{name}({about})")
    return results[0] if len(results) == 1 else tuple(results) or None


def _error(code: int, call: str) -> DriverError:
    driver = _bindings()
    _, name = driver.cuGetErrorName(driver.CUresult(code))
    _, text = driver.cuGetErrorString(driver.CUresult(code))
    named = name.decode() if name else str(code)
    return DriverError(f"{call}: {named} ({text.decode() if text else 'unknown'})", code=code, name=named)


def available() -> bool:
    """Whether there is a GPU to use."""
    try:
        return device_count() > 0
    except GpuUnavailable:
        return False


@lru_cache(maxsize=1)
def device_count() -> int:
    """The number of GPUs that this process can use. Raises GpuUnavailable without a driver."""
    return _call("cuDeviceGetCount")


def driver_version() -> str:
    """The newest CUDA version that the driver supports, such as "13.0"."""
    version = _call("cuDriverGetVersion")
    return f"{version // 1000}.{version % 1000 // 10}"


@dataclass(frozen=True)
class Device:
    """One GPU and its primary context."""

    ordinal: int
    name: str
    arch: Arch
    sm_count: int
    smem_per_block: int  # maximum shared memory of a block with opt-in, bytes
    context: Any

    @contextmanager
    def current(self) -> Iterator[None]:
        """Binds the primary context to the calling thread, and restores the previous context afterwards.

        PyTorch and CuPy treat the bound context as the device that the user has selected.
        """
        _call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent")

    def clock_rate(self) -> int:
        """The maximum SM clock, in Hz."""
        which = _bindings().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE
        return 1000 * _call("cuDeviceGetAttribute", which, _call("cuDeviceGet", self.ordinal))

    def synchronize(self, after: str = "") -> None:
        """Wait for all work. An error of an earlier launch is raised here; `after` names it in the message."""
        with self.current():
            _call("cuCtxSynchronize", about=f"after {after}" if after else "")

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """The range that a profiler records (cuProfilerStart to cuProfilerStop)."""
        with self.current():
            _call("cuProfilerStart")
            try:
                yield
            finally:
                _call("cuProfilerStop")


def _called(device: Device, call: Callable[..., int], *arguments: Any) -> int:
    """Calls a driver function through ctypes, in the device's context, and returns its status.

    If the thread has no context yet (such as a thread of autograd), that of GPU 0 stays bound, as with the CUDA
    runtime. Otherwise the previous context is restored.
    """
    if device_count() == 1 or _current_context() == int(device.context):
        status = call(*arguments)
        if status != _INVALID_CONTEXT:
            return status
    if device.ordinal == 0 and _current_context() is None:
        _call("cuCtxSetCurrent", device.context)
        return call(*arguments)
    with device.current():
        return call(*arguments)


def _current_context() -> int | None:
    found = ctypes.c_void_p()
    _libcuda().cuCtxGetCurrent(ctypes.byref(found))
    return found.value


@cache
def device(ordinal: int = 0) -> Device:
    """The GPU with this number. Raises GpuUnavailable."""
    if ordinal >= device_count():
        raise GpuUnavailable(f"there is no GPU {ordinal}: this process can use 0 to {device_count() - 1}")
    driver = _bindings()
    handle = _call("cuDeviceGet", ordinal)
    name = _call("cuDeviceGetName", 256, handle).split(b"\0")[0].decode()
    context = _call("cuDevicePrimaryCtxRetain", handle)

    def attribute(which: str) -> int:
        return _call("cuDeviceGetAttribute", getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{which}"), handle)

    arch = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    smem = attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    return Device(ordinal, name, arch, attribute("MULTIPROCESSOR_COUNT"), smem, context)


_MAP_DTYPES = {"float8_e4m3": 0, "float8_e5m2": 0, "float16": 6, "float32": 7, "bfloat16": 9}  # CUtensorMapDataType
_ONES = (ctypes.c_uint32 * 5)(1, 1, 1, 1, 1)
_NO_INTERLEAVE, _SWIZZLE_128B, _L2_PROMOTION_128B, _FILL_ZEROS = 0, 3, 2, 0


def encode_tensor_map(address: int, box: Box, dtype: str) -> None:
    """Writes the tensor map of a box, with the 128-byte swizzle, to the 128 bytes at `address`, a multiple of 64.

    Raises DriverError if the driver rejects the tensor.
    """
    arguments = (
        ctypes.c_void_p(address), _MAP_DTYPES[dtype], box.rank, ctypes.c_void_p(box.data), box.size, box.stride,
        box.box, _ONES, _NO_INTERLEAVE, _SWIZZLE_128B, _L2_PROMOTION_128B, _FILL_ZEROS,
    )  # fmt: skip
    if status := _called(device(), _libcuda().cuTensorMapEncodeTiled, *arguments):
        about = f"{dtype}, address={box.data:#x}, size={[*box.size]}, stride={[*box.stride]}, box={[*box.box]}"
        raise _error(status, f"cuTensorMapEncodeTiled({about})")


class CudaFunction:
    """An entry point of a loaded cubin."""

    def __init__(self, cubin: bytes, entry: str, device: Device):
        self.entry, self.device = entry, device
        with device.current():
            self._module = _call("cuModuleLoadData", cubin, about=f"{entry}, {len(cubin)} bytes")
            self._function = _call("cuModuleGetFunction", self._module, entry.encode(), about=entry)

    def attribute(self, which: str) -> int:
        """A CU_FUNC_ATTRIBUTE, such as "NUM_REGS"."""
        attribute = getattr(_bindings().CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{which}")
        return _call("cuFuncGetAttribute", attribute, self._function)

    def constant(self, name: str) -> int:
        """The address of a global or constant variable of the module."""
        with self.device.current():
            return int(_call("cuModuleGetGlobal", self._module, name.encode(), about=name)[0])

    def blocks_per_sm(self, threads: int, smem_bytes: int) -> int:
        """Resident blocks per SM, as the driver computes them."""
        with self.device.current():
            return _call("cuOccupancyMaxActiveBlocksPerMultiprocessor", self._function, threads, smem_bytes)

    def launcher(self, grid: Dim3, block: Dim3, smem: int, arguments: Arguments, **how: Any) -> Launch:
        """A function that launches on tensors at the given addresses, on a stream (a handle); `how` as in `call`.

        Raises DriverError with kernel and geometry, as `call` does; so does the returned function.
        """
        made = self.call(grid, block, smem, arguments, **how)
        return launch_calls([made], [[s] for s in arguments.slots], self.device)

    def call(
        self,
        grid: Dim3,
        block: Dim3,
        smem: int,
        arguments: Arguments,
        programmatic_launch: bool = False,
        cluster: int = 1,
    ) -> Call:
        """The prepared call of cuLaunchKernelEx.

        Opts in to large shared memory. `programmatic_launch`: the kernel may start before the preceding one has
        finished, on GPUs that support it. `cluster`: blocks per cluster, along x. Raises DriverError with kernel and
        geometry.
        """
        about = f"{self.entry}, grid={grid}, block={block}, smem={smem}"
        if smem + self.attribute("SHARED_SIZE_BYTES") > _DEFAULT_SMEM:
            attribute = _bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _call("cuFuncSetAttribute", self._function, attribute, smem, about=about)
        config, stream = launch_config(
            grid, block, smem, programmatic_launch and self.device.arch >= PROGRAMMATIC_LAUNCH_ARCH, cluster
        )
        everything = ctypes.byref(config), ctypes.c_void_p(int(self._function)), arguments.table, None
        return Call(_libcuda().cuLaunchKernelEx, everything, stream, f"cuLaunchKernelEx({about})")


def zeroing(pointer: Any, nbytes: int) -> Call:
    """The prepared call of cuMemsetD8Async that zeroes GPU memory at `pointer`, a c_uint64 whose value may change.
    CUDA graphs can capture it."""
    stream = ctypes.c_void_p()
    arguments = pointer, ctypes.c_ubyte(), ctypes.c_size_t(nbytes), stream
    return Call(_libcuda().cuMemsetD8Async, arguments, stream, f"cuMemsetD8Async({nbytes} bytes)")


def launch_calls(made: Sequence[Call], slots: Sequence[Sequence[Any]], device: Device) -> Launch:
    """One launch of several calls, in the context of `device`. The addresses of tensors go to `slots`. Raises
    DriverError with the call that fails."""

    def in_context(call: Call, status: int | None) -> None:
        if status in (None, _INVALID_CONTEXT):
            status = _called(device, call.function, *call.arguments)
        if status:
            raise _error(status, call.about)

    # With a single GPU, no context of another GPU can be bound: the calls can be made directly.
    return calls.launch_sequence(made, slots, device_count() == 1, in_context)


class Event:
    """A CUDA event, for timing. The context of its device must be current."""

    def __init__(self) -> None:
        self._event = _call("cuEventCreate", 0)

    def record(self, stream: int = 0) -> None:
        """Record the event after all work that `stream` has so far."""
        _call("cuEventRecord", self._event, stream)

    def synchronize(self) -> None:
        """Wait until the event has completed."""
        _call("cuEventSynchronize", self._event)

    def seconds_since(self, earlier: Event) -> float:
        """GPU time between two completed events."""
        return _call("cuEventElapsedTime", earlier._event, self._event) * 1e-3

    def __del__(self) -> None:
        if event := getattr(self, "_event", None):
            _bindings().cuEventDestroy(event)


class DeviceMemory:
    """Bytes on a GPU, freed with the object."""

    def __init__(self, nbytes: int, device: Device):
        self._device = device
        with device.current():
            self.pointer = int(_call("cuMemAlloc", max(nbytes, 1), about=f"{nbytes} bytes"))

    def __del__(self) -> None:
        if pointer := getattr(self, "pointer", 0):
            driver = _bindings()
            driver.cuCtxPushCurrent(self._device.context)
            driver.cuMemFree(pointer)
            driver.cuCtxPopCurrent()


def write(pointer: int, address: int, nbytes: int, device: Device) -> None:
    """Copy from host memory at `address` to GPU memory at `pointer`, after all earlier work."""
    if nbytes:
        with device.current():
            _call("cuMemcpyHtoD", pointer, address, nbytes)


def read(address: int, pointer: int, nbytes: int, device: Device) -> None:
    """Copy from GPU memory at `pointer` to host memory at `address`, after all earlier work."""
    if nbytes:
        with device.current():
            _call("cuMemcpyDtoH", address, pointer, nbytes)
