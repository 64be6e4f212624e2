"""Calls of the driver whose arguments are made beforehand: what is left of a launch is to write addresses, and to call.

What that saves of a call's host time is in experiment 001.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .arguments import Launch


class Call(NamedTuple):
    """One call of a function of ctypes."""

    function: Callable[..., int]  # gives 0 if all is well
    arguments: tuple[Any, ...]
    stream: Any  # whose `value` is the stream that it goes to
    about: str  # in words


def launch_sequence(
    calls: Sequence[Call], slots: Sequence[Sequence[Any]], tried: bool, again: Callable[[Call, int | None], None]
) -> Launch:
    """One launch of several calls, which share one lock and one refill: address i goes to each of `slots[i]`.

    `again(call, status)` is asked where a call has failed, and, unless `tried`, in place of trying it (None).
    """
    fill, lock = refill(slots), threading.Lock()
    redirect = refill([[call.stream for call in calls]])
    every = [(call, call.function, call.arguments) for call in calls]

    # What slots and streams hold, as far as that is known: an interrupt in the middle of a change leaves None.
    filled: tuple[int, ...] | None = None
    current: int | None = 0

    def launch(pointers: tuple[int, ...], stream: int = 0) -> None:
        nonlocal filled, current
        with lock:  # nobody else refills the arguments until the driver has copied them
            if pointers != filled:  # a loop gets the same memory again and again from its allocator
                filled = None
                fill(pointers)
                filled = pointers
            if stream != current:
                current = None
                redirect((stream,))
                current = stream
            for call, function, arguments in every:
                status = function(*arguments) if tried else None
                if status != 0:
                    again(call, status)

    return launch


def refill(slots: Sequence[Sequence[Any]]) -> Callable[[tuple[int, ...]], None]:
    """What sets the `value` of each of `slots[i]` to number i.

    It is written out and compiled, as Python's own named tuples are: a loop takes twice the time.
    """
    places = {f"slot_{i}_{j}": slot for i, some in enumerate(slots) for j, slot in enumerate(some)}
    lines = ["def fill(numbers):", f"    [{', '.join(f'number_{i}' for i in range(len(slots)))}] = numbers"]
    for i, some in enumerate(slots):
        lines += [f"    {' = '.join(f'slot_{i}_{j}.value' for j in range(len(some)))} = number_{i}"] if some else []
    exec("\n".join(lines), places)
    return places["fill"]
