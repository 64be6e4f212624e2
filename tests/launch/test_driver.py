"""The driver: without a GPU it fails immediately; with one, launches and their error messages."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import sandbox
from sandbox import DriverError, GpuUnavailable
from sandbox.launch import driver
from sandbox.launch.calls import Call
from sandbox.launch.tensor_maps import Box
from sandbox.toolchain import nvrtc


@pytest.mark.skipif(driver.available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    """In a new process: GpuUnavailable with the missing part, in under 0.2 s, without importing CUDA packages."""
    code = """
import sys, time
from sandbox import GpuUnavailable
from sandbox.launch import driver
start = time.perf_counter()
try:
    driver.device()
except GpuUnavailable as error:
    print(time.perf_counter() - start, error, sep="|")
assert "cuda.bindings" not in sys.modules
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    seconds, message = said.split("|")
    assert float(seconds) < 0.2
    assert "libcuda" in message


@pytest.mark.parametrize(
    ("status", "message"),
    [(100, "finds no GPU"), (3, "forked process"), (803, "cuInit returned 803")],
)
def test_a_driver_that_does_not_start(status: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each status of cuInit has its own message."""

    class Broken:
        def __init__(self, name: str):
            assert name == "libcuda.so.1"

        def cuInit(self, flags: int) -> int:
            return status

    driver._libcuda.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", Broken)
    try:
        with pytest.raises(GpuUnavailable, match=message):
            driver._libcuda()
    finally:
        driver._libcuda.cache_clear()


SCALE = """
struct Pair { int a; float b; };
extern "C" __global__ void scale(float* x, Pair pair, float factor, long long n, double d) {
    extern __shared__ float big[];
    big[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x < n) x[threadIdx.x] = big[threadIdx.x] * factor + pair.a + pair.b + float(d);
}
"""


class Pair(ctypes.Structure):
    """As in the source above."""

    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_float))


def test_arguments_by_declared_type(run_cuda) -> None:
    """Structures by value, floats as floats, 64-bit integers; more shared memory than the default 48 KiB."""
    x = np.arange(32, dtype=np.float32)
    run_cuda(
        SCALE, "scale", x, Pair(3, 0.25), ctypes.c_float(0.1), ctypes.c_longlong(30), ctypes.c_double(0.5), smem=60_000
    )
    expected = np.arange(32, dtype=np.float32)
    expected[:30] = expected[:30] * np.float32(0.1) + np.float32(3.75)
    assert np.abs(x - expected).max() < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_launch_that_cannot_be_is_named(run_cuda) -> None:
    """The message has the call, kernel, geometry and the driver's error name."""
    arguments = (np.zeros(32, np.float32), Pair(), ctypes.c_float(), ctypes.c_longlong(), ctypes.c_double())
    with pytest.raises(DriverError) as error:
        run_cuda(SCALE, "scale", *arguments, block=2048)
    text = str(error.value)
    assert "cuLaunchKernelEx(scale, grid=(1, 1, 1), block=(2048, 1, 1), smem=0)" in text
    assert "CUDA_ERROR_INVALID_VALUE" in text
    with pytest.raises(DriverError, match=r"cuFuncSetAttribute\(scale.*smem=300000"):
        run_cuda(SCALE, "scale", *arguments, smem=300_000)


@pytest.mark.gpu
def test_an_illegal_address_is_named_with_its_kernel() -> None:
    """In a separate process, because the context is lost."""
    code = """
import ctypes, pathlib, tempfile
from sandbox.launch import driver
from sandbox.launch.calls import Call
from sandbox.launch.tensor_maps import Box
from sandbox.toolchain import nvrtc
class Arguments:
    values = [ctypes.c_void_p(8)]
    table = (ctypes.c_void_p * 1)(ctypes.addressof(values[0]))
    slots = []
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "bad.cu"
    path.write_text('extern "C" __global__ void bad(int* p) { *p = 1; }')
    gpu = driver.device()
    f = driver.CudaFunction(nvrtc.compile(path, "bad", f"sm_{gpu.arch[0]}{gpu.arch[1]}").cubin, "bad", gpu)
    f.launcher((1, 1, 1), (1, 1, 1), 0, Arguments)(())
    try:
        gpu.synchronize(after="bad")
    except driver.DriverError as error:
        print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "after bad" in said.stdout, said
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in said.stdout


@pytest.mark.gpu
def test_events_measure_gpu_time() -> None:
    """A sleep of a known number of cycles takes about that long."""
    torch = pytest.importorskip("torch")
    stream = torch.cuda.current_stream().cuda_stream
    with driver.device().current():
        before, after = driver.Event(), driver.Event()
        before.record(stream)
        torch.cuda._sleep(100_000_000)
        after.record(stream)
        after.synchronize()
        assert 0.02 < after.seconds_since(before) < 1


@pytest.mark.gpu
def test_the_callers_context_stays_current() -> None:
    """With several GPUs, PyTorch takes the current context for the device the user has chosen."""
    torch = pytest.importorskip("torch")
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    torch.cuda.set_device(devices[0])
    for device in devices:
        q = torch.randn(1, 1, 8, 16, device=device)
        for _ in range(2):
            out = sandbox.attention(q, q, q)
            assert out.device == device
            assert torch.cuda.current_device() == 0
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert ((out - expected).abs() < 1e-5).all()


@pytest.mark.gpu
def test_the_primary_context_is_shared() -> None:
    """PyTorch's memory can be used in our launches, and vice versa."""
    torch = pytest.importorskip("torch")
    x = torch.arange(8, device="cuda", dtype=torch.float32)
    host = np.zeros(8, np.float32)
    torch.cuda.synchronize()
    driver.read(host.ctypes.data, x.data_ptr(), host.nbytes, driver.device())
    assert (host == np.arange(8)).all()
    assert nvrtc.version()


BOTH_KINDS = """
extern "C" __global__ void both(float* x) {
    extern __shared__ float dynamic[];
    __shared__ float fixed[64];
    fixed[threadIdx.x] = dynamic[12 * 1024 - 1 - threadIdx.x] = 1.0f + threadIdx.x;
    __syncthreads();
    x[threadIdx.x] = fixed[31 - threadIdx.x] + dynamic[12 * 1024 - 1 - threadIdx.x];
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_static_shared_memory_counts_too(run_cuda) -> None:
    """Dynamic shared memory of 48 KiB alone needs no opt-in; with 256 bytes of static it does."""
    x = np.zeros(32, np.float32)
    run_cuda(BOTH_KINDS, "both", x, smem=48 * 1024)
    np.testing.assert_array_equal(x, np.full(32, 33.0))


class _Slot:
    """A slot for an address. The `interrupted`-th assignment raises KeyboardInterrupt instead."""

    def __init__(self, interrupted: int = 0):
        self.stored, self.times, self.interrupted = 0, 0, interrupted

    def _put(self, pointer: int) -> None:
        self.times += 1
        if self.times == self.interrupted:
            raise KeyboardInterrupt
        self.stored = pointer

    value = property(None, _put)


def test_an_interrupted_launch_leaves_nothing_half_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next launch uses its own addresses, even if they are those of before the interrupt."""
    slots, launched = [_Slot(), _Slot(interrupted=2)], []

    class Cuda:
        def cuLaunchKernelEx(self, *arguments):
            launched.append([slot.stored for slot in slots])
            return 0

    monkeypatch.setattr(driver, "_libcuda", Cuda)
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    function = object.__new__(driver.CudaFunction)
    function.entry, function._function, function.device = "f", 1, SimpleNamespace(arch=(9, 0))
    function.attribute = lambda which: 0
    launch = function.launcher((1, 1, 1), (32, 1, 1), 0, SimpleNamespace(slots=slots, table=None))
    launch((1, 2))
    with pytest.raises(KeyboardInterrupt):
        launch((3, 4))
    launch((1, 2))
    launch((1, 2))
    assert launched == [[1, 2], [1, 2], [1, 2]]
    assert [slot.times for slot in slots] == [3, 3]  # the last launch refilled nothing


def test_programmatic_dependent_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs that support it, the launch attributes have programmatic dependent launch and the cluster size; on others
    the launch has no attributes."""
    configs: list[object] = []

    class Cuda:
        def cuLaunchKernelEx(self, config, function, table, extra):
            c = config._obj
            attributes = [(a.id, *a.value) for a in c.attributes[: c.count]]
            configs.append(((*c.grid, *c.block, c.smem_bytes, c.stream), attributes))
            return 0

    monkeypatch.setattr(driver, "_libcuda", Cuda)
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    for arch, cluster in (((8, 0), 1), ((9, 0), 1), ((9, 0), 4)):
        function = object.__new__(driver.CudaFunction)
        function.entry, function._function, function.device = "f", 1, SimpleNamespace(arch=arch)
        function.attribute = lambda which: 0
        launch = function.launcher(
            (8, 2, 3), (32, 4, 5), 7, SimpleNamespace(slots=[], table=None), programmatic_launch=True, cluster=cluster
        )
        launch((), 99)
    launched = (8, 2, 3, 32, 4, 5, 7, 99)
    programmatic_launch, cluster_of_4 = (6, 1, 0, 0), (4, 4, 1, 1)  # 6: programmatic stream serialization
    # 4: cluster dimensions
    assert configs == [
        (launched, []),
        (launched, [programmatic_launch]),
        (launched, [programmatic_launch, cluster_of_4]),
    ]


@pytest.mark.parametrize("devices", [1, 2])
def test_which_context_a_thread_is_left_with(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread without a context that of GPU 0 stays, as with the CUDA runtime; otherwise the previous one is
    restored."""
    bound: list[int | None] = [None]
    calls: list[str] = []

    class Cuda:
        def cuCtxGetCurrent(self, found) -> int:
            found._obj.value = bound[-1]
            return 0

    def call(name: str, context: int | None = None) -> None:
        calls.append(name)
        if name == "cuCtxPopCurrent":
            bound.pop()
        elif name == "cuCtxPushCurrent":
            bound.append(context)
        else:
            bound[-1] = context

    monkeypatch.setattr(driver, "_libcuda", Cuda)
    monkeypatch.setattr(driver, "device_count", lambda: devices)
    monkeypatch.setattr(driver, "_call", call)
    first, second = (driver.Device(i, "", (9, 0), 1, 1, context=7 + i) for i in range(2))
    for gpu, before, after in ((second, None, None), (first, None, 7), (first, 7, 7), (first, 5, 5)):
        bound[:] = [before]
        calls.clear()
        assert driver._called(gpu, lambda gpu=gpu: 0 if bound[-1] == gpu.context else 201) == 0
        assert bound == [after]
        assert calls == (
            ["cuCtxPushCurrent", "cuCtxPopCurrent"] if before == after != 7 else ["cuCtxSetCurrent"] * (not before)
        )


# ---- calls of the driver, without one


class FakeDriver:
    """The bindings and libcuda: each call is recorded, and returns a status and the values in `results`."""

    CUresult = IntEnum(
        "CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_INVALID_VALUE": 1, "CUDA_ERROR_ILLEGAL_ADDRESS": 700}
    )
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="smem", CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="SMs",
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE="kHz",
    )  # fmt: skip
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="static", CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic",
        CU_FUNC_ATTRIBUTE_NUM_REGS="registers",
    )  # fmt: skip
    attributes: ClassVar = {"major": 9, "minor": 0, "smem": 232448, "SMs": 132, "kHz": 1_980_000, "static": 1024}

    def __init__(self) -> None:
        self.called: list[tuple[Any, ...]] = []
        self.status: dict[str, int] = {}
        self.results: dict[str, tuple[Any, ...]] = {
            "cuDeviceGetCount": (2,), "cuDriverGetVersion": (13010,), "cuDeviceGetName": (b"H\0x",),
            "cuDeviceGet": ("handle",), "cuDevicePrimaryCtxRetain": (70,), "cuModuleLoadData": (80,),
            "cuModuleGetFunction": (90,), "cuModuleGetGlobal": (4096, 16), "cuEventCreate": ("event",),
            "cuEventElapsedTime": (1500.0,), "cuMemAlloc": (8192,),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": (3,),
        }  # fmt: skip

    def cuGetErrorName(self, code: int) -> tuple[int, bytes | None]:
        return 0, self.CUresult(code).name.encode() if code in {*self.CUresult} else None

    def cuGetErrorString(self, code: int) -> tuple[int, bytes | None]:
        return 0, b"not good" if code == 700 else None

    def cuDeviceGetAttribute(self, which: str, handle: str) -> tuple[int, int]:
        assert handle == "handle"
        return 0, self.attributes[which]

    def cuFuncGetAttribute(self, which: str, function: int) -> tuple[int, int]:
        return 0, self.attributes[which]

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.called.append((name, *arguments))
            return self.status.get(name, 0), *self.results.get(name, ())

        return call

    def names(self) -> list[str]:
        found = [name for name, *_ in self.called]
        self.called.clear()
        return found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake, cached = FakeDriver(), (driver.device, driver.device_count)
    for function in cached:
        function.cache_clear()
    monkeypatch.setattr(driver, "_bindings", lambda: fake)
    yield fake
    for function in cached:
        function.cache_clear()


@pytest.fixture
def gpu(fake: FakeDriver) -> driver.Device:
    found = driver.device(1)
    fake.called.clear()
    return found


def test_a_device(fake: FakeDriver) -> None:
    found = driver.device(1)
    assert found == driver.Device(1, "H", (9, 0), 132, 232448, 70)
    assert driver.device(1) is found
    assert fake.called[:4] == [
        ("cuDeviceGetCount",), ("cuDeviceGet", 1), ("cuDeviceGetName", 256, "handle"),
        ("cuDevicePrimaryCtxRetain", "handle"),
    ]  # fmt: skip
    assert found.clock_rate() == 1_980_000_000
    assert (driver.driver_version(), driver.device_count(), driver.available()) == ("13.1", 2, True)
    with pytest.raises(GpuUnavailable, match="there is no GPU 2: this process can use 0 to 1"):
        driver.device(2)


@pytest.mark.parametrize(("count", "there"), [(0, False), (1, True)])
def test_a_gpu_is_available_if_there_is_one(count: int, there: bool, fake: FakeDriver) -> None:
    fake.results["cuDeviceGetCount"] = (count,)
    assert driver.available() == there


def test_the_context_of_a_device_is_bound_during_a_call(fake: FakeDriver, gpu: driver.Device) -> None:
    """And the previous one restored, also after an error, which names the call and its status."""
    gpu.synchronize()
    assert fake.called == [("cuCtxPushCurrent", 70), ("cuCtxSynchronize",), ("cuCtxPopCurrent",)]
    fake.called.clear()
    fake.status["cuCtxSynchronize"] = 700
    with pytest.raises(
        DriverError, match=r"^cuCtxSynchronize\(after fwd_x\): CUDA_ERROR_ILLEGAL_ADDRESS \(not good\)$"
    ) as e:
        gpu.synchronize(after="fwd_x")
    assert (e.value.code, e.value.name) == (700, "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert fake.names() == ["cuCtxPushCurrent", "cuCtxSynchronize", "cuCtxPopCurrent"]
    fake.status["cuCtxSynchronize"] = 1
    with pytest.raises(DriverError, match=r"^cuCtxSynchronize\(\): CUDA_ERROR_INVALID_VALUE \(unknown\)$"):
        gpu.synchronize()
    fake.called.clear()
    with pytest.raises(ZeroDivisionError), gpu.profiled():
        raise ZeroDivisionError
    assert fake.names() == ["cuCtxPushCurrent", "cuProfilerStart", "cuProfilerStop", "cuCtxPopCurrent"]


def test_memory_and_copies(fake: FakeDriver, gpu: driver.Device) -> None:
    memory = driver.DeviceMemory(0, gpu)
    assert memory.pointer == 8192
    assert ("cuMemAlloc", 1) in fake.called
    fake.called.clear()
    driver.write(8192, 64, 32, gpu)
    driver.read(64, 8192, 32, gpu)
    assert fake.called[1::3] == [("cuMemcpyHtoD", 8192, 64, 32), ("cuMemcpyDtoH", 64, 8192, 32)]
    fake.called.clear()
    driver.write(8192, 64, 0, gpu)
    driver.read(64, 8192, 0, gpu)
    assert not fake.called
    del memory
    assert fake.called == [("cuCtxPushCurrent", 70), ("cuMemFree", 8192), ("cuCtxPopCurrent",)]
    fake.status["cuMemAlloc"] = 1
    with pytest.raises(DriverError, match=r"^cuMemAlloc\(20 bytes\): CUDA_ERROR_INVALID_VALUE"):
        driver.DeviceMemory(20, gpu)


def test_an_event(fake: FakeDriver) -> None:
    first, second = driver.Event(), driver.Event()
    second.record()
    second.record(9)
    second.synchronize()
    assert second.seconds_since(first) == 1.5
    assert fake.called == [
        ("cuEventCreate", 0), ("cuEventCreate", 0), ("cuEventRecord", "event", 0), ("cuEventRecord", "event", 9),
        ("cuEventSynchronize", "event"), ("cuEventElapsedTime", "event", "event"),
    ]  # fmt: skip
    fake.called.clear()
    del first
    assert fake.called == [("cuEventDestroy", "event")]


def test_a_function(fake: FakeDriver, gpu: driver.Device) -> None:
    function = driver.CudaFunction(b"cubin", "f", gpu)
    assert fake.called == [
        ("cuCtxPushCurrent", 70), ("cuModuleLoadData", b"cubin"), ("cuModuleGetFunction", 80, b"f"),
        ("cuCtxPopCurrent",),
    ]  # fmt: skip
    assert (function.attribute("SHARED_SIZE_BYTES"), function.constant("c"), function.blocks_per_sm(128, 7)) == (
        1024, 4096, 3,
    )  # fmt: skip
    assert ("cuModuleGetGlobal", 80, b"c") in fake.called
    assert ("cuOccupancyMaxActiveBlocksPerMultiprocessor", 90, 128, 7) in fake.called
    fake.status["cuModuleLoadData"] = 1
    with pytest.raises(DriverError, match=r"^cuModuleLoadData\(f, 5 bytes\): "):
        driver.CudaFunction(b"cubin", "f", gpu)


@pytest.mark.parametrize(("smem", "opts_in"), [(47 * 1024, False), (47 * 1024 + 1, True)])
def test_more_than_48_KiB_of_shared_memory_with_the_static_part(
    smem: int, opts_in: bool, fake: FakeDriver, gpu: driver.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_libcuda", lambda: SimpleNamespace(cuLaunchKernelEx=lambda *arguments: 1))
    function = driver.CudaFunction(b"cubin", "f", gpu)
    fake.called.clear()
    call = function.call((1, 2, 3), (32, 1, 1), smem, SimpleNamespace(slots=[], table=None))
    assert fake.called == ([("cuFuncSetAttribute", 90, "dynamic", smem)] if opts_in else [])
    assert call.about == f"cuLaunchKernelEx(f, grid=(1, 2, 3), block=(32, 1, 1), smem={smem})"
    fake.results["cuDeviceGetCount"] = (1,)
    driver.device_count.cache_clear()
    with pytest.raises(DriverError, match=r"^cuLaunchKernelEx\(f, grid=\(1, 2, 3\), .*\): CUDA_ERROR_INVALID_VALUE"):
        driver.launch_calls([call], [], gpu)(())


@pytest.mark.parametrize(
    ("devices", "statuses", "bound", "fails"),
    [
        (1, [0], False, False),
        (1, [201, 0], False, False),
        (1, [201, 201, 0], True, False),  # 201: the thread has no context
        (1, [700], False, True),
        (2, [0], True, False),
        (2, [700], True, True),
    ],
)
def test_a_launch_is_repeated_in_the_context_of_its_device(
    devices: int, statuses: list[int], bound: bool, fails: bool, fake: FakeDriver, gpu: driver.Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """If it had none; with several GPUs always."""
    left = [*statuses]
    monkeypatch.setattr(driver, "_libcuda", lambda: SimpleNamespace(cuCtxGetCurrent=lambda found: 0))
    monkeypatch.setattr(driver, "device_count", lambda: devices)
    launch = driver.launch_calls([Call(lambda: left.pop(0), (), SimpleNamespace(value=0), "launch(f)")], [], gpu)
    with pytest.raises(DriverError, match=r"^launch\(f\): CUDA_ERROR_ILLEGAL_ADDRESS") if fails else nullcontext():
        launch(())
    assert not left
    assert fake.names() == (["cuCtxPushCurrent", "cuCtxPopCurrent"] if bound else [])


def test_memory_is_zeroed_by_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    memset = object()
    monkeypatch.setattr(driver, "_libcuda", lambda: SimpleNamespace(cuMemsetD8Async=memset))
    pointer = ctypes.c_uint64(8192)
    call = driver.zeroing(pointer, 12)
    address, value, nbytes, stream = call.arguments
    assert (call.function, address, value.value, nbytes.value, call.about) == (
        memset, pointer, 0, 12, "cuMemsetD8Async(12 bytes)",
    )  # fmt: skip
    assert call.stream is stream


@pytest.mark.parametrize(
    ("dtype", "number"), [("float8_e4m3", 0), ("float8_e5m2", 0), ("float16", 6), ("float32", 7), ("bfloat16", 9)]
)
def test_a_tensor_map_is_encoded(dtype: str, number: int, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of cuTensorMapEncodeTiled: 128-byte swizzle (3), L2 promotion of 128 bytes (2), no interleave and
    zeros outside (0)."""
    given: list[Any] = []
    monkeypatch.setattr(driver, "_called", lambda device, function, *arguments: given.append(arguments) or status[0])
    monkeypatch.setattr(driver, "_libcuda", lambda: SimpleNamespace(cuTensorMapEncodeTiled=None))
    box, status = Box.of(4096, (64, 32, 2, 3), (128, 4096, 8192), 16, 2), [0]
    driver.encode_tensor_map(640, box, dtype)
    (arguments,) = given
    assert [getattr(x, "value", x) for x in arguments[:4]] == [640, number, 4, 4096]
    assert [[*x] for x in arguments[4:8]] == [[*box.size], [*box.stride], [*box.box], [1] * 5]
    assert arguments[8:] == (0, 3, 2, 0)
    status[0] = 1
    with pytest.raises(DriverError, match=rf"^cuTensorMapEncodeTiled\({dtype}, address=0x1000, size=\[64, 32, 2, 3"):
        driver.encode_tensor_map(640, box, dtype)
