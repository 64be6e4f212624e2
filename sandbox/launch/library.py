"""What this project needs of an array library."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from .array_view import ArrayView

IGNORED_MASK = "its mask would be ignored; pass its numbers (.filled(0)), and what is hidden as mask="


class Library:
    """An array library's adapter; `name` is the word for messages.

    `allocator` and `stream` return calls without arguments, so that a plan made once can run them often.
    """

    name: str

    def materialise(self, *arrays: Any) -> tuple[Any, ...]:
        """The arrays as the other methods take them; their memory stays where it is as long as somebody has these."""
        return arrays

    def to_caller(self, like: Any) -> Callable[[Any], Any] | None:
        """What turns an array of `allocator(like, …)` into the caller's kind, once it is written; None: it is."""
        return None

    def intercepts(self, *arrays: Any) -> bool:
        """Whether the library has to see the operation, since an array has no memory of its own or is watched."""
        return False

    def same_signature(self, *arrays: Any) -> Callable[..., bool] | None:
        """What says of other arrays, in no time, that they are as these in all but address, and that the library would
        do with them as it does with these just now; None where it cannot be asked."""
        return None

    def no_dispatch_modes(self) -> bool:
        """Whether nobody watches what the caller's thread does whom `alike` does not see."""
        return False

    def signature(self, array: Any) -> Hashable:
        """All that decides how to launch on this array, except where it lies: shape, strides, dtype, device. Raises
        AttributeError, RuntimeError or TypeError for an array that no plan can be kept for."""
        raise NotImplementedError

    def signatures(self, arrays: Sequence[Any]) -> tuple[Hashable, ...]:
        """The same of several, one after the other or otherwise."""
        return tuple(map(self.signature, arrays))

    def pointer(self, array: Any) -> int:
        """Address of the first element."""
        raise NotImplementedError

    def view(self, array: Any) -> ArrayView:
        """The array as an ArrayView. Raises UnsupportedProblem naming a dtype or device that is not served."""
        raise NotImplementedError

    def allocator(self, like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        """A call that makes a new array of this library on `like`'s device; `strides` are dense, in any order."""
        raise NotImplementedError

    def stream(self, ordinal: int) -> Callable[[], int]:
        """A call that returns the handle of the CUDA stream on which the caller works just now with that device."""
        return int  # int() is 0, the default stream

    def fill(self, array: Any, value: float) -> None:
        """Writes `value` to every element, in the order of the caller's stream."""
        array[...] = value

    def contiguous(self, array: Any) -> Any:
        """A copy in C order. Raises UnsupportedProblem where the library cannot be asked for one."""
        raise NotImplementedError

    def seed(self, like: Any, seed: int | None) -> Any:
        """An int64 array of one element on `like`'s device: `seed`, or drawn from the library's own generator."""
        raise NotImplementedError

    def needs_autograd(self, *arrays: Any) -> bool:
        """Whether the library has to see the operation, or wants a gradient of it."""
        return self.requires_grad(*arrays) or self.intercepts(*arrays)

    def grad_enabled(self) -> bool:
        """Whether the library records just now what is computed of arrays that ask for a gradient."""
        return False

    def requires_grad(self, *arrays: Any) -> bool:
        """Whether the library wants a gradient of what is computed of these."""
        return False

    def cast(self, *arrays: Any) -> tuple[Any, ...]:
        """The arrays as the library wants them computed with just now."""
        return arrays
