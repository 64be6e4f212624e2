"""Driver calls whose arguments are prepared in advance. A launch only writes addresses and makes the calls.

Experiment 001 has the host time that this saves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .arguments import Launch


class Call(NamedTuple):
    """One call of a ctypes function."""

    function: Callable[..., int]  # returns 0 on success
    arguments: tuple[Any, ...]
    stream: Any  # its `value` is the CUDA stream of the call
    about: str  # description, for error messages


def launch_sequence(
    calls: Sequence[Call], slots: Sequence[Sequence[Any]], direct: bool, fallback: Callable[[Call, int | None], None]
) -> Launch:
    """One launch of several calls. They share one lock and one refill, which writes address i to each of `slots[i]`.

    `direct`: make each call directly, and run `fallback(call, status)` if it fails. Otherwise every call goes through
    `fallback(call, None)`.
    """
    fill, lock = refill(slots), threading.Lock()
    redirect = refill([[call.stream for call in calls]])
    every = [(call, call.function, call.arguments) for call in calls]

    # The current content of slots and streams. None while they are changed, so that an interrupt leaves no stale value.
    filled: tuple[int, ...] | None = None
    current: int | None = 0

    def launch(pointers: tuple[int, ...], stream: int = 0) -> None:
        nonlocal filled, current
        with lock:  # no other thread may refill the arguments before the driver has copied them
            if pointers != filled:  # in a loop, the allocator often returns the same addresses
                filled = None
                fill(pointers)
                filled = pointers
            if stream != current:
                current = None
                redirect((stream,))
                current = stream
            for call, function, arguments in every:
                status = function(*arguments) if direct else None
                if status != 0:
                    fallback(call, status)

    return launch


def refill(slots: Sequence[Sequence[Any]]) -> Callable[[tuple[int, ...]], None]:
    """A function that sets the `value` of each of `slots[i]` to number i.

    Its unrolled source is generated and compiled, as for Python's named tuples: a loop takes twice the time.
    """
    places = {f"slot_{i}_{j}": slot for i, some in enumerate(slots) for j, slot in enumerate(some)}
    lines = ["def fill(numbers):", f"    [{', '.join(f'number_{i}' for i in range(len(slots)))}] = numbers"]
    for i, some in enumerate(slots):
        lines += [f"    {' = '.join(f'slot_{i}_{j}.value' for j in range(len(some)))} = number_{i}"] if some else []
    exec("\n".join(lines), places)
    return places["fill"]
