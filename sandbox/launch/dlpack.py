"""NumPy, CuPy, PyTorch and any other DLPack array <-> a validated view: address, shape, strides, dtype, device.

Nothing is copied. Each array library has one adapter. The adapters of NumPy, CuPy and PyTorch read the array's
attributes, which takes a tenth of the time of a DLPack capsule; any other array with `__dlpack__` is read from its
capsule. This module imports no array library that the caller has not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import numpy as np

from ..core.errors import UnsupportedProblem
from ..core.score import SIZES
from .array_view import (
    DTYPE_NAMES,
    HOST,
    SEEDS,
    ArrayView,
    Device,
    dense_strides,
    element_strides,
    layout,
    numpy_dtype,
    permuted,
)
from .capsule import DEVICES, DTYPES, Exported, capsule_of, tensor_in, unwritable
from .library import IGNORED_MASK, Library

__all__ = [
    "HOST",
    "NESTED",
    "ArrayView",
    "Device",
    "Library",
    "UnsupportedDtype",
    "dense_strides",
    "layout",
    "library_of",
    "not_an_array",
    "numpy_dtype",
    "view",
]


class UnsupportedDtype(UnsupportedProblem):
    """The dtype of an array is not supported. The message lists the dtypes of q, k and v; `reason` is the message
    without them, for arrays of other dtypes."""

    def __init__(self, reason: str):
        super().__init__(f"{reason}: convert to one of {DTYPE_NAMES}")
        self.reason = reason


def _dtype(name: str, library: str) -> str:
    name = _WORDS.get(name, name)
    if name not in SIZES:
        raise UnsupportedDtype(f"dtype {name} ({library}) is not supported")
    return name


# {a library's dtype name: ours}; ml_dtypes' float8_e4m3 is another format, which is rejected
_WORDS = {"float8_e4m3fn": "float8_e4m3", "float8_e4m3": "float8_e4m3 with infinities"}


class _NumPy(Library):
    name = "NumPy"

    def signatures(self, arrays: Sequence[Any]) -> tuple[Hashable, ...]:
        return tuple(map(_NUMPY_KIND, arrays))  # with the type: some subclasses are rejected, see `library_of`

    def pointer(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def view(self, array: np.ndarray) -> ArrayView:
        if not array.dtype.isnative:
            raise UnsupportedProblem(
                f"dtype {array.dtype.str} is not supported: it must be in this machine's byte order (use .astype)"
            )
        dtype = _dtype(array.dtype.name, self.name)
        strides = element_strides(array.strides, SIZES[dtype])
        return ArrayView(array.ctypes.data, array.shape, strides, dtype, HOST, array)

    def allocator(self, like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        dense_shape, axes = permuted(shape, strides)
        kind = numpy_dtype(dtype)
        return lambda: np.empty(dense_shape, kind).transpose(axes)

    def unwritable(self, array: np.ndarray) -> str:
        return "" if array.flags.writeable else "is read-only"

    def contiguous(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array)

    def seed(self, like: Any, seed: int | None) -> np.ndarray:
        return np.random.randint(*SEEDS, size=1, dtype=np.int64) if seed is None else np.full(1, seed, np.int64)


class _CuPy(Library):
    name = "CuPy"

    def signatures(self, arrays: Sequence[Any]) -> tuple[Hashable, ...]:
        return tuple(map(_CUPY_KIND, arrays))

    def pointer(self, array: Any) -> int:
        return array.data.ptr

    def view(self, array: Any) -> ArrayView:
        dtype = _dtype(array.dtype.name, self.name)
        strides = element_strides(array.strides, SIZES[dtype])
        return ArrayView(array.data.ptr, array.shape, strides, dtype, ("cuda", array.device.id), array)

    def allocator(self, like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        import cupy

        dense_shape, axes = permuted(shape, strides)
        device, kind = like.device, numpy_dtype(dtype)

        def allocate() -> Any:
            with device:
                return cupy.empty(dense_shape, kind).transpose(axes)

        return allocate

    def fill(self, array: Any, value: float) -> None:
        with array.device:
            array[...] = value

    def contiguous(self, array: Any) -> Any:
        import cupy

        with array.device:
            return cupy.ascontiguousarray(array)

    def seed(self, like: Any, seed: int | None) -> Any:
        import cupy

        with like.device:
            return cupy.random.randint(*SEEDS, size=1, dtype="int64") if seed is None else cupy.full(1, seed, "int64")

    def stream(self, ordinal: int) -> Callable[[], int]:
        import cupy

        return lambda: cupy.cuda.get_current_stream(ordinal).ptr


class _PyTorch(Library):
    name = "PyTorch"

    @cached_property
    def pointer(self) -> Callable[[Any], int]:  # the method itself: a Python function would take twice the time
        return sys.modules["torch"].Tensor.data_ptr

    def signatures(self, arrays: Sequence[Any]) -> tuple[Hashable, ...]:
        Tensor = sys.modules["torch"].Tensor  # unbound methods take two thirds of the time of bound ones
        if True in map(Tensor.is_neg, arrays):  # the signature of its base would be equal
            raise RuntimeError("a lazily negated tensor has no signature")
        return *map(_TORCH_KIND, arrays), *map(Tensor.stride, arrays)

    def view(self, array: Any) -> ArrayView:
        if array.is_nested:
            raise UnsupportedProblem(NESTED)
        dtype = _dtype(str(array.dtype).removeprefix("torch."), self.name)
        kind = array.device.type
        if kind not in ("cpu", "cuda"):
            raise UnsupportedProblem(f'device "{array.device}" is not supported: move the tensor to cpu or cuda')
        if array.layout is not sys.modules["torch"].strided:
            raise UnsupportedProblem(f"layout {array.layout} is not supported: pass a strided tensor (.to_dense())")
        if array.is_neg() or array.is_conj():
            raise UnsupportedProblem("a lazily negated tensor is not supported: pass it through .resolve_neg()")
        device = (kind, array.device.index or 0)
        return ArrayView(array.data_ptr(), tuple(array.shape), array.stride(), dtype, device, array)

    def allocator(self, like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        """Uses the allocation function of PyTorch's compiler if there is one: it skips the dispatcher and takes half
        the time."""
        torch = sys.modules["torch"]
        kind, device = getattr(torch, dtype), like.device
        if device.type == "cpu" or torch.cuda.device_count() == 1:  # the function takes no device
            empty = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
            if empty is not None:
                return partial(empty, shape, strides, kind)
        return partial(torch.empty(0, dtype=kind, device=device).new_empty_strided, shape, strides)

    def contiguous(self, array: Any) -> Any:
        return array.contiguous()

    def seed(self, like: Any, seed: int | None) -> Any:
        torch = sys.modules["torch"]  # a CUDA graph captures the operation: each replay draws a new seed
        how = {"dtype": torch.int64, "device": like.device}
        return torch.randint(*SEEDS, (1,), **how) if seed is None else torch.full((1,), seed, **how)

    def stream(self, ordinal: int) -> Callable[[], int]:
        # Takes a tenth of the time of torch.cuda.current_stream(), which makes a Stream object.
        return partial(sys.modules["torch"]._C._cuda_getCurrentRawStream, ordinal)

    def mark_written(self, *arrays: Any) -> None:
        for array in arrays:
            sys.modules["torch"].autograd.graph.increment_version(array)

    def grad_enabled(self) -> bool:
        return sys.modules["torch"].is_grad_enabled()

    def requires_grad(self, *arrays: Any) -> bool:
        return self.grad_enabled() and any(getattr(array, "requires_grad", False) for array in arrays)

    def differentiates(self, array: Any) -> bool:
        # Not `_modes`: the compiler cannot trace a cached_property.
        forward_ad = sys.modules["torch"].autograd.forward_ad
        dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(array).tangent is not None
        return dual or self.requires_grad(array)

    def same_signature(self, *arrays: Any) -> Callable[..., bool] | None:
        """Uses the guards of PyTorch's compiler: type, dtype, device, sizes, strides, requires_grad, and the dispatch
        keys of tensors and thread, which include torch.func, torch.jit.trace, autocast and most dispatch modes."""
        torch = sys.modules["torch"]
        try:
            guards = torch._C._dynamo.guards.TensorGuards(*arrays, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        except (AttributeError, TypeError):  # a private interface of PyTorch: it may be missing
            return None

        def same(*others: Any) -> bool:
            for x in others:  # in PyTorch 2.13, check() of a nested tensor with the strided layout ends the process
                if getattr(x, "is_nested", False):
                    return False
            return guards.check(*others)

        kind = arrays[0].device.type
        if not torch.is_autocast_enabled(kind):
            return same
        if any(x is not y for x, y in zip(self.cast(*arrays[:3]), arrays, strict=False)):
            return None
        dtype = torch.get_autocast_dtype(kind)
        return lambda *others: same(*others) and torch.get_autocast_dtype(kind) is dtype

    def cast(self, *arrays: Any) -> tuple[Any, ...]:
        """Casts as torch.autocast casts the arguments of PyTorch's attention."""
        torch, kind = sys.modules["torch"], arrays[0].device.type
        if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
            return arrays
        dtype, double = torch.get_autocast_dtype(kind), torch.float64
        return tuple(x.to(dtype) if x.is_floating_point() and x.dtype is not double else x for x in arrays)

    @cached_property
    def _modes(self) -> tuple[Any, Any]:  # looked up once, which halves the time of `no_dispatch_modes`
        return sys.modules["torch"]._C._len_torch_dispatch_stack, sys.modules["torch"].autograd.forward_ad

    def no_dispatch_modes(self) -> bool:
        """No compiler, dispatch mode or forward-mode AD level is active. Tracers other than Dynamo have a mode."""
        # Checked first, because Dynamo cannot trace a cached_property.
        if sys.modules["torch"].compiler.is_dynamo_compiling():
            return False
        modes, forward_ad = self._modes
        return not (modes() > 0 or forward_ad._current_level >= 0)

    def intercepts(self, *arrays: Any) -> bool:
        """A dispatch mode or transform is active (also torch.func and torch.jit.trace), or an array is of a subclass (a
        fake or distributed tensor, …)."""
        torch = sys.modules["torch"]
        if (
            not self.no_dispatch_modes()
            or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._get_tracing_state() is not None
        ):
            return True
        for array in arrays:
            kind = type(array)
            if kind is not torch.Tensor and kind is not torch.nn.Parameter and isinstance(array, torch.Tensor):
                return True
        return False


class _Capsule(Library):
    """Any other array with `__dlpack__`. The capsule is requested once per call and kept, because a library may copy
    the array to export it. The methods take views. Results are NumPy arrays, which the array's own `from_dlpack`
    converts."""

    name = "DLPack"

    def materialise(self, *arrays: Any) -> tuple[Any, ...]:
        return tuple(self.view(array) if library_of(array) is self else array for array in arrays)

    def signatures(self, arrays: Sequence[ArrayView]) -> tuple[Hashable, ...]:
        return tuple((x.shape, x.strides, x.dtype, x.device, type(x.owner[0])) for x in arrays)

    def same_signature(self, *arrays: Any) -> None:
        """A call has the arrays, not their views."""

    def pointer(self, array: ArrayView) -> int:
        return array.pointer

    def view(self, array: Any) -> ArrayView:
        if isinstance(array, ArrayView):
            return array
        device = DEVICES.get(int(array.__dlpack_device__()[0]))
        if device is None:
            raise UnsupportedProblem(
                f"DLPack device {array.__dlpack_device__()} is not supported: the array must be on a CPU or a CUDA GPU"
            )
        # stream=1: the exporting library makes its work visible to the legacy default stream, on which we launch.
        capsule = capsule_of(array, stream=1) if device == "cuda" else capsule_of(array)
        tensor = tensor_in(capsule)
        code, bits, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
        name = DTYPES.get((code, bits), f"code {code}, {bits} bit")
        dtype = _dtype(name if lanes == 1 else f"{name} x {lanes}", self.name)
        shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        stored = tensor.strides  # absent when contiguous
        strides = tuple(stored[i] for i in range(tensor.ndim)) if stored else dense_strides(shape)
        pointer = (tensor.data or 0) + tensor.byte_offset
        return ArrayView(pointer, shape, strides, dtype, (device, tensor.device.device_id), (array, capsule))

    def allocator(
        self, like: ArrayView, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str
    ) -> Callable[[], Any]:
        numpy = _KNOWN["numpy"]
        new = numpy.allocator(like, shape, strides, dtype)
        return lambda: numpy.view(new())

    def to_caller(self, like: ArrayView) -> Callable[[ArrayView], Any]:
        array = like.owner[0]
        namespace = array.__array_namespace__() if hasattr(array, "__array_namespace__") else None
        if like.device != HOST or namespace is None:
            raise UnsupportedProblem(
                f"results as {type(array).__name__} are not supported: pass NumPy, CuPy or PyTorch arrays, "
                "for instance torch.from_dlpack(array)"
            )

        def convert(result: ArrayView) -> Any:
            if isinstance(result.owner, tuple):  # the caller's own array, updated in place
                return result.owner[0]
            return namespace.from_dlpack(Exported(result.owner) if result.dtype == "bfloat16" else result.owner)

        return convert

    def fill(self, array: ArrayView, value: float) -> None:
        array.owner[...] = value  # the owner is a NumPy array made by `allocator`

    def unwritable(self, array: ArrayView) -> str:
        return unwritable(array.owner[1])

    def seed(self, like: Any, seed: int | None) -> ArrayView:
        return self.view(_KNOWN["numpy"].view(_KNOWN["numpy"].seed(like, seed)))

    def contiguous(self, array: ArrayView) -> Any:
        raise UnsupportedProblem(
            f"a {type(array.owner[0]).__name__} with these strides is not supported: pass a contiguous array"
        )


NESTED = "nested tensors are supported as q, k and v of attention, with layout torch.jagged: else use attention_varlen"
_NUMPY_KIND = attrgetter("__class__", "shape", "strides", "dtype")
_CUPY_KIND = attrgetter("shape", "strides", "dtype", "device.id")
_TORCH_KIND = attrgetter("shape", "dtype", "device")
_TORCH = _PyTorch()
_KNOWN = {"numpy": _NumPy(), "cupy": _CuPy(), "torch": _TORCH}
_CAPSULE = _Capsule()
_by_type: dict[type, Library] = {ArrayView: _CAPSULE}


def not_an_array(name: str, x: Any) -> UnsupportedProblem:
    """The error for an argument `name`, or "" where it is not known, that is not an array."""
    kind = "None" if x is None else f"of type {type(x).__name__}"
    return UnsupportedProblem(
        f"{name or 'an argument'} is {kind}, not an array: pass a NumPy, CuPy or PyTorch array, or any with __dlpack__"
    )


def library_of(array: Any, name: str = "") -> Library:
    """The adapter for `array`. Raises UnsupportedProblem, which names the argument `name`, if it is not an array."""
    kind = type(array)
    torch = sys.modules.get("torch")
    if torch is not None and (kind is torch.Tensor or kind is torch.nn.Parameter):
        return _TORCH  # without reading __mro__, which PyTorch's compiler could not trace before 2.13
    library = _by_type.get(kind)
    if library is None:
        # A subclass, such as torch.nn.Parameter, belongs to the library of its base.
        modules = [base.__module__.partition(".")[0] for base in kind.__mro__]
        library = next((_KNOWN[module] for module in modules if module in _KNOWN), None)
        if library is None and hasattr(kind, "__dlpack__"):
            library = _CAPSULE
        if library is None or not hasattr(kind, "__dlpack__"):
            raise not_an_array(name, array)
        if library is _KNOWN["numpy"] and hasattr(kind, "mask"):  # np.ma.MaskedArray and similar classes
            raise UnsupportedProblem(f"{name or 'an argument'} is a {kind.__name__}: {IGNORED_MASK}")
        _by_type[kind] = library
    return library


def view(array: Any) -> ArrayView:
    """Any array as an ArrayView, without a copy."""
    return library_of(array).view(array)
