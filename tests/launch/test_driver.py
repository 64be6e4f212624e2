"""The driver: without a GPU it fails immediately; with one, launches and their error messages."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import sandbox
from sandbox import DriverError, GpuUnavailable
from sandbox.launch import driver
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
