"""The interface to an array library."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from .array_view import ArrayView

IGNORED_MASK = "its mask would be ignored; pass its numbers (.filled(0)), and what is visible as mask="


class Library:
    """The adapter of an array library; `name` is used in messages.

    `allocator` and `stream` return functions without arguments, which a cached plan calls in every launch.
    """

    name: str

    def materialise(self, *arrays: Any) -> tuple[Any, ...]:
        """The arrays as the other methods expect them: DLPack arrays of other libraries as their views, which keep the
        memory valid; others unchanged."""
        return arrays

    def to_caller(self, like: Any) -> Callable[[Any], Any] | None:
        """A function that converts an array of `allocator(like, …)` into the caller's kind after the launch; None if no
        conversion is needed."""
        return None

    def intercepts(self, *arrays: Any) -> bool:
        """Whether the operation must go through the library's dispatcher: an array has no memory of its own (a fake
        tensor or another subclass), or a transform or dispatch mode is active."""
        return False

    def same_signature(self, *arrays: Any) -> Callable[..., bool] | None:
        """A fast check whether other arrays differ from these in their addresses only, and whether the library would
        dispatch the operation in the same way as now. None if the library has no such check."""
        types, signatures = [*map(type, arrays)], self.signatures(arrays)
        first: type[Any] = types[0]
        shape = arrays[0].shape

        def same(*others: Any) -> bool:
            if type(others[0]) is not first or others[0].shape != shape:  # tells most calls apart, in 0.1 µs
                return False
            return [*map(type, others)] == types and self.signatures(others) == signatures

        return same

    def no_dispatch_modes(self) -> bool:
        """Whether the calling thread has no dispatch mode that `same_signature` does not detect."""
        return True

    def signatures(self, arrays: Sequence[Any]) -> tuple[Hashable, ...]:
        """All properties of the arrays that a launch depends on, except their addresses: shapes, strides, dtypes,
        devices. Raises AttributeError, RuntimeError or TypeError for arrays for which no plan can be cached."""
        raise NotImplementedError

    def pointer(self, array: Any) -> int:
        """Address of the first element."""
        raise NotImplementedError

    def view(self, array: Any) -> ArrayView:
        """The array as an ArrayView. Raises UnsupportedProblem for an unsupported dtype or device."""
        raise NotImplementedError

    def allocator(self, like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        """A function that allocates an array of this library on `like`'s device; `strides` are dense, in any order."""
        raise NotImplementedError

    def stream(self, ordinal: int) -> Callable[[], int]:
        """A function that returns the handle of the caller's current CUDA stream on that device."""
        return int  # int() is 0, the default stream

    def mark_written(self, *arrays: Any) -> None:
        """Tells the library that a kernel changed the elements of these arrays, which autograd may have saved."""

    def fill(self, array: Any, value: float) -> None:
        """Writes `value` to every element, on the caller's stream."""
        array[...] = value

    def unwritable(self, array: Any) -> str:
        """Why a kernel must not write into the array, such as "is read-only"; "" if it may."""
        return ""

    def contiguous(self, array: Any) -> Any:
        """A copy in C order. Raises UnsupportedProblem if the library cannot make one."""
        raise NotImplementedError

    def seed(self, like: Any, seed: int | None) -> Any:
        """An int64 array of one element on `like`'s device: `seed`, or a number from the library's own generator."""
        raise NotImplementedError

    def needs_autograd(self, *arrays: Any) -> bool:
        """Whether the operation must go through the library: it needs a gradient, or `intercepts`."""
        return self.requires_grad(*arrays) or self.intercepts(*arrays)

    def grad_enabled(self) -> bool:
        """Whether the library currently records operations for gradients."""
        return False

    def requires_grad(self, *arrays: Any) -> bool:
        """Whether a result computed from these arrays needs a gradient."""
        return False

    def differentiates(self, array: Any) -> bool:
        """Whether the library differentiates by `array` at present, in reverse or forward mode."""
        return False

    def cast(self, *arrays: Any) -> tuple[Any, ...]:
        """The arrays in the dtype that the library currently prescribes (autocast)."""
        return arrays
