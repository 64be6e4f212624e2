"""Views of arrays of every library, without a copy; error messages that contain the value."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from sandbox import UnsupportedProblem
from sandbox.launch import dlpack

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
    for refused in (x[::-1], x[:, ::-1], x[:, :, ::-1], np.broadcast_to(x[:, :, :1], x.shape)):
        assert not dlpack.view(refused).mappable


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_dtypes(name: str) -> None:
    """bfloat16 of ml_dtypes in NumPy, and of PyTorch."""
    assert dlpack.view(np.zeros(3, dlpack.numpy_dtype(name))).dtype == name
    assert dlpack.view(torch.zeros(3, dtype=getattr(torch, name))).dtype == name
    assert dlpack.numpy_dtype("bfloat16") == ml_dtypes.bfloat16


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
