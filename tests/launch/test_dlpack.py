"""Views of arrays of every library, without a copy; error messages that contain the value."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sandbox import UnsupportedProblem
from sandbox.launch import array_view, dlpack, host
from sandbox.launch.host import host_array

torch = pytest.importorskip("torch")


class Capsule:
    """An array of no known library: nothing but the DLPack protocol."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


VIEWS = [
    lambda x: x,
    lambda x: x[:, 1:, 2:5, 3:],
    lambda x: x.swapaxes(1, 2),
    lambda x: x[:1, :, :, ::2],
    lambda x: np.broadcast_to(x[:1], x.shape),
]


@pytest.mark.parametrize("cut", VIEWS)
@pytest.mark.parametrize("wrap", [lambda x: x, torch.from_numpy, Capsule], ids=["numpy", "torch", "dlpack"])
def test_views_share_memory(cut, wrap) -> None:
    """Address, shape and strides are those of the array itself, whatever the library."""
    array = cut(np.arange(2 * 3 * 6 * 8, dtype=np.float32).reshape(2, 3, 6, 8).copy())
    if wrap is torch.from_numpy and not array.flags.writeable:  # PyTorch warns
        array = np.lib.stride_tricks.as_strided(array.base, array.shape, array.strides)
    view = dlpack.view(wrap(array))
    assert view.pointer == array.ctypes.data
    assert view.shape == array.shape
    assert view.strides == tuple(stride // 4 for stride in array.strides)
    assert (view.dtype, view.device) == ("float32", ("cpu", 0))


def test_extent() -> None:
    """The extent of a view, also with negative strides and broadcasts."""
    x = np.zeros((4, 5, 6), np.float32)
    assert dlpack.view(x).extent() == (0, 120)
    assert dlpack.view(x[1:3, ::2]).extent() == (0, 30 + 24 + 6)
    assert dlpack.view(x[::-1]).extent() == (-90, 30)
    assert dlpack.view(np.zeros((2, 1), np.float32)[::-1]).extent() == (-1, 1)
    assert dlpack.view(np.broadcast_to(x[:1], x.shape)).extent() == (0, 30)
    assert dlpack.view(x[:, :0]).extent() == (0, 0)


def test_alignment() -> None:
    """The alignment of every row: of the first one's address, and of the strides."""
    memory = np.zeros(4096 + 8, np.float16)
    whole = memory[-memory.ctypes.data % 16 // 2 :][:4096].reshape(4, 4, 16, 16)
    for view, alignment in (
        (whole, 16), (whole[..., 8:], 16), (whole[..., 4:], 8), (whole[..., 1:], 2), (whole[..., 2:8], 4),
        (whole.reshape(4, 4, 64, 4), 8), (whole.reshape(-1)[:-4].reshape(1, 1, 682, 6), 4),
        (whole.reshape(-1)[:7].reshape(1, 1, 1, 7), 16),
    ):  # fmt: skip
        assert dlpack.view(view).alignment == alignment


def test_what_a_tensor_map_takes() -> None:
    """No negative strides and no broadcast rows. The stride of a single row or head does not matter."""
    x = np.zeros((2, 3, 4, 8), np.float16)
    for taken in (x, x[:, ::2], x.swapaxes(1, 2), np.broadcast_to(x[:1], x.shape), x[:, :, 3:2:-1], x[:, :, :0]):
        assert dlpack.view(taken).mappable
    assert dlpack.view(x[..., :1].copy()).mappable  # rows of one element
    for refused in (x[::-1], x[:, ::-1], x[:, :, ::-1], np.broadcast_to(x[:, :, :1], (2, 3, 2, 8))):
        assert not dlpack.view(refused).mappable


def seen(shape: tuple[int, ...], strides: tuple[int, ...], pointer: int = 4096) -> dlpack.ArrayView:
    return dlpack.ArrayView(pointer, shape, strides, "float16", dlpack.HOST, None)


@pytest.mark.parametrize(("step", "mappable"), [(2**39 - 8, True), (2**39, False)])
def test_a_tensor_map_takes_strides_below_2_to_40_bytes(step: int, mappable: bool) -> None:
    assert seen((2, 3, 4, 8), (step, 32, 8, 1)).mappable is mappable


def test_the_layout_of_a_problem_is_that_of_all_4d_tensors() -> None:
    """The lowest alignment; whether a tensor map takes each of them."""
    aligned, by_8 = seen((2, 2, 4, 8), (64, 32, 8, 1)), seen((2, 2, 4, 8), (80, 40, 12, 1))
    reversed_rows, lse = seen((2, 2, 4, 8), (64, 32, -8, 1)), seen((3, 3), (1, 7), 4098)
    assert dlpack.layout([aligned, lse]) == {"alignment": 16, "mappable": True}
    assert dlpack.layout([aligned, by_8, lse]) == {"alignment": 8, "mappable": True}
    assert dlpack.layout([reversed_rows, aligned]) == {"alignment": 16, "mappable": False}


@pytest.mark.parametrize(
    ("shape", "strides", "taken"),
    [
        ((4, 8), (8, 1), True),
        ((2, 2, 4, 8), (64, 32, 8, 1), True),
        ((4, 8), (12, 1), False),  # rows at multiples of 8 bytes
        ((4, 8), (-8, 1), False),
        ((8,), (1,), False),
    ],
)
def test_a_tensor_map_of_a_bias(shape: tuple[int, ...], strides: tuple[int, ...], taken: bool) -> None:
    assert array_view.boxes(seen(shape, strides)) is taken


@pytest.mark.parametrize(
    ("shape", "like", "strides"),
    [
        ((2, 3, 4, 8), None, (96, 32, 8, 1)),
        ((2, 3, 4, 8), (96, 8, 24, 1), (96, 8, 24, 1)),  # (B, S, H, D)
        ((2, 3, 4, 8), (1000, 80, 300, 1), (96, 8, 24, 1)),  # its gaps are left out
        ((2, 3, 4, 8), (0, 8, 24, 1), (96, 8, 24, 1)),  # a broadcast batch is outermost
        ((2, 3, 4, 8), (8, 16, 0, 1), (8, 16, 48, 1)),
        ((2, 3, 4), (12, 4, 9), (12, 4, 1)),  # columns are always innermost
        ((2, 0, 4), None, (4, 4, 1)),
        ((2, 3, 0), None, (3, 1, 1)),
        ((), None, ()),
    ],
)
def test_dense_strides(shape: tuple[int, ...], like: tuple[int, ...] | None, strides: tuple[int, ...]) -> None:
    assert dlpack.dense_strides(shape, like) == strides


@pytest.mark.parametrize("strides", [(96, 32, 8, 1), (96, 8, 24, 1), (8, 16, 48, 1), (1, 2, 6, 24)])
def test_a_permuted_array_has_the_strides(strides: tuple[int, ...]) -> None:
    shape, axes = array_view.permuted((2, 3, 4, 8), strides)
    found = np.zeros(shape, np.int8).transpose(axes)
    assert (found.shape, found.strides) == ((2, 3, 4, 8), strides)


def test_strides_in_elements() -> None:
    assert array_view.element_strides((24, -8, 0), 4) == (6, -2, 0)
    with pytest.raises(UnsupportedProblem, match=r"strides \(24, 6\) \(bytes\) are not supported: .* item size 4"):
        array_view.element_strides((24, 6), 4)


@pytest.mark.parametrize("wrap", [torch.from_numpy, Capsule], ids=["torch", "dlpack"])
def test_a_host_array_shares_memory(wrap) -> None:
    x = np.zeros((3, 4), np.float32)
    assert np.shares_memory(host_array(wrap(x)), x)


def test_a_gpu_array_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the memory between the lowest and the highest element."""
    memory = np.arange(60, dtype=np.float32)
    view = dlpack.ArrayView(memory[47:].ctypes.data, (2, 3), (-20, 4), "float32", ("cuda", 1), None)
    reads = []

    def read(destination: int, source: int, nbytes: int, device: str) -> None:
        reads.append((source, nbytes, device))
        ctypes.memmove(destination, source, nbytes)

    monkeypatch.setattr(host, "view", lambda array: view)
    monkeypatch.setattr(host, "driver", SimpleNamespace(read=read, device=lambda ordinal: f"GPU {ordinal}"))
    found = host_array(object())
    assert found.tolist() == [[47, 51, 55], [27, 31, 35]]
    assert reads == [(memory[27:].ctypes.data, 4 * 29, "GPU 1")]


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_dtypes(name: str) -> None:
    """bfloat16 of ml_dtypes in NumPy, and of PyTorch."""
    assert dlpack.view(np.zeros(3, dlpack.numpy_dtype(name))).dtype == name
    assert dlpack.view(torch.zeros(3, dtype=getattr(torch, name))).dtype == name
    assert dlpack.numpy_dtype("bfloat16") == ml_dtypes.bfloat16


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int32", "int64", "bool"])
def test_dtypes_of_capsules(name: str) -> None:
    assert dlpack.view(Capsule(torch.zeros(3, dtype=getattr(torch, name)))).dtype == name


@pytest.mark.parametrize(
    ("number", "device", "stream"), [(1, "cpu", None), (2, "cuda", 1), (3, "cpu", None), (10, None, None)]
)
def test_devices_of_capsules(number: int, device: str | None, stream: int | None) -> None:
    """By DLDeviceType: CPU, CUDA, and host memory that CUDA has pinned. Work of a GPU is awaited by stream 1."""
    asked: list[object] = []

    class Elsewhere(Capsule):
        def __dlpack__(self, **options: Any) -> Any:
            asked.append(options.pop("stream", None))
            return super().__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return number, 0

    array = np.zeros((2, 3), np.float32)
    if device is None:
        with pytest.raises(UnsupportedProblem, match=r"^DLPack device \(10, 0\) is not supported: the array must"):
            dlpack.view(Elsewhere(array))
    else:
        view = dlpack.view(Elsewhere(array))
        assert (view.device, view.pointer, view.shape) == ((device, 0), array.ctypes.data, (2, 3))
        assert asked == [stream]


class FakeCuPy:
    """The parts of CuPy that are used, on NumPy arrays. `on`: the device on which each of its functions was called."""

    def __init__(self) -> None:
        self.on: list[tuple[str, int | None]] = []
        current: list[int] = []

        class Device:
            def __init__(self, ordinal: int):
                self.id = ordinal

            def __enter__(self) -> None:
                current.append(self.id)

            def __exit__(self, *exception: object) -> None:
                current.pop()

        class ndarray(np.ndarray):
            __module__, device = "cupy", Device(3)

            @property
            def data(self) -> SimpleNamespace:  # type: ignore[override]
                return SimpleNamespace(ptr=self.ctypes.data)

        def noted(name: str, function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
            def call(*arguments: Any, **options: Any) -> np.ndarray:
                self.on.append((name, current[-1] if current else None))
                return function(*arguments, **options).view(ndarray)

            return call

        self.ndarray, self.empty = ndarray, noted("empty", np.empty)
        self.ascontiguousarray, self.full = noted("copy", np.ascontiguousarray), noted("full", np.full)
        self.random = SimpleNamespace(randint=noted("randint", np.random.randint))
        self.cuda = SimpleNamespace(get_current_stream=lambda ordinal: SimpleNamespace(ptr=100 + ordinal))


def test_cupy_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are made on the device of the caller's."""
    cupy = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    array = np.zeros((4, 6), np.float16).view(cupy.ndarray)[:, ::2]
    library = dlpack.library_of(array)
    view = library.view(array)
    assert (library.name, view.shape, view.strides, view.dtype, view.device) == (
        "CuPy", (4, 3), (6, 2), "float16", ("cuda", 3),
    )  # fmt: skip
    assert view.pointer == library.pointer(array) == array.ctypes.data
    assert library.signatures([array]) == (((4, 3), (12, 4), np.dtype(np.float16), 3),)
    made = library.allocator(array, (2, 3, 5), (15, 1, 3), "float32")()
    assert (made.shape, made.strides, made.dtype) == ((2, 3, 5), (60, 4, 12), np.float32)
    library.fill(array, 2.0)
    assert array.base.tolist() == [[2, 0] * 3] * 4
    assert library.contiguous(array).strides == (6, 2)
    seed, drawn = library.seed(array, 7), library.seed(array, None)
    assert (seed.tolist(), seed.dtype, drawn.shape, drawn.dtype) == ([7], np.int64, (1,), np.int64)
    assert library.stream(3)() == 103
    assert cupy.on == [(name, 3) for name in ("empty", "copy", "full", "randint")]


def test_libraries_without_autograd() -> None:
    """NumPy arrays need no gradient, have no stream, and are not intercepted or cast."""
    x = np.zeros((2, 3), np.float32)
    library = dlpack.library_of(x)
    answers = library.requires_grad(x), library.needs_autograd(x), library.differentiates(x), library.intercepts(x)
    assert (*answers, library.grad_enabled()) == (False,) * 5
    assert library.no_dispatch_modes()
    assert (library.cast(x), library.materialise(x), library.to_caller(x), library.stream(0)()) == ((x,), (x,), None, 0)
    library.mark_written(x)
    library.fill(x, 2.0)
    assert x.tolist() == [[2.0] * 3] * 2
    assert (library.unwritable(x), library.unwritable(np.broadcast_to(x, (2, 2, 3)))) == ("", "is read-only")
    seed, drawn = library.seed(x, -5), library.seed(x, None)
    assert (seed.tolist(), seed.dtype, drawn.shape, drawn.dtype) == ([-5], np.int64, (1,), np.int64)
    same = library.same_signature(x, x[:1])
    assert same is not None
    y, z = np.ones((2, 3), np.float32), np.ones((1, 3), np.float32)
    for others, alike in (
        ((y, z), True), ((y, z.astype(np.float16)), False), ((y, z[:, :2]), False), ((z, z), False), ((y, y), False),
        ((y.view(np.recarray), z), False), ((y, np.ones((3, 1), np.float32).T), False),
    ):  # fmt: skip
        assert same(*others) == alike


def test_what_needs_a_gradient() -> None:
    """A tensor that requires one, while gradients are recorded; not a number, nor an array of another library."""
    x, leaf = torch.zeros(2), torch.zeros(2, requires_grad=True)
    library = dlpack.library_of(x)
    others = x, None, 0.5, np.zeros(2)
    assert not library.requires_grad(*others)
    assert not library.needs_autograd(*others)
    assert library.requires_grad(*others, leaf)
    assert library.needs_autograd(*others, leaf)
    with torch.no_grad():
        assert not library.requires_grad(leaf)
        assert not library.grad_enabled()
    assert library.differentiates(leaf)
    assert not library.differentiates(x)


def test_a_lazily_negated_tensor_has_no_signature() -> None:
    library = dlpack.library_of(torch.zeros(2))
    with pytest.raises(RuntimeError, match="a lazily negated tensor has no signature"):
        library.signatures([torch.zeros(2), torch._neg_view(torch.zeros(2))])
    assert library.signatures([torch.zeros(2, 3)]) == (((2, 3), torch.float32, torch.device("cpu")), (3, 1))


def test_a_subclass_is_of_its_library() -> None:
    """torch.nn.Parameter belongs to PyTorch."""
    assert dlpack.library_of(torch.nn.Parameter(torch.zeros(2))).name == "PyTorch"


REFUSED = [
    (lambda: [1.0, 2.0], "an argument is of type list, not an array"),
    (lambda: None, "an argument is None, not an array"),
    (lambda: np.float32(1.0), "of type float32, not an array"),
    (lambda: np.zeros(3, np.float64), "dtype float64 (NumPy) is not supported"),
    (lambda: np.zeros(3, np.int16), "dtype int16 (NumPy)"),
    (lambda: np.zeros(3, ">f4"), "dtype >f4 is not supported: it must be in this machine's byte order"),
    (lambda: np.ma.array([1.0], mask=[True]), "an argument is a MaskedArray: its mask would be ignored; pass its"),
    (lambda: torch.zeros(3, dtype=torch.complex64).conj().imag, "a lazily negated tensor is not supported"),
    (lambda: torch.zeros(3, dtype=torch.float64), "dtype float64 (PyTorch)"),
    (lambda: torch.zeros(3, device="meta"), 'device "meta" is not supported'),
    (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo is not supported"),
    (lambda: Capsule(np.zeros(3, np.int8)), "dtype code 0, 8 bit (DLPack)"),
    (lambda: np.zeros(6, np.uint8)[:5].view(np.uint8), "dtype uint8"),
    (lambda: np.ndarray((2, 2), np.float32, np.zeros(20, np.uint8), strides=(6, 4)), "strides (6, 4) (bytes)"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refusals_name_the_value(make, message: str) -> None:
    """Each unsupported array raises UnsupportedProblem."""
    with pytest.raises(UnsupportedProblem) as refusal:
        dlpack.view(make())
    assert message in str(refusal.value)


class Old(Capsule):
    """An array with the protocol before versions."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


def test_capsules_of_either_protocol() -> None:
    """The newer protocol is requested, because only it can mark read-only arrays. Only its major version 1 is read."""
    array = np.arange(6, dtype=np.float32)
    assert dlpack.view(Old(array)).pointer == array.ctypes.data
    array.flags.writeable = False
    view = dlpack.view(Capsule(array))
    assert (view.pointer, view.shape, view.strides) == (array.ctypes.data, (6,), (1,))

    class Tomorrow(Capsule):
        def __dlpack__(self, **options):
            capsule = self.array.__dlpack__(max_version=(1, 0))
            get = ctypes.pythonapi.PyCapsule_GetPointer
            get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
            ctypes.c_uint32.from_address(get(capsule, b"dltensor_versioned")).value = 2
            return capsule

    with pytest.raises(UnsupportedProblem, match=r"DLPack version 2\.\d is not supported"):
        dlpack.view(Tomorrow(array))


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cupy", "dlpack"])
def test_gpu_views(library: str) -> None:
    """The same on the GPU; capsules are requested for the default stream."""
    cupy = pytest.importorskip("cupy")
    x = cupy.arange(2 * 3 * 6 * 8, dtype=cupy.float32).reshape(2, 3, 6, 8)[:, :, 1:].swapaxes(1, 2)
    array = {"torch": lambda: torch.from_dlpack(x), "cupy": lambda: x, "dlpack": lambda: Capsule(x)}[library]()
    view = dlpack.view(array)
    assert (view.pointer, view.shape, view.device) == (x.data.ptr, x.shape, ("cuda", 0))
    assert view.strides == tuple(stride // 4 for stride in x.strides)
