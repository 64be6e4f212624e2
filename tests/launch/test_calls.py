"""Several driver calls as one launch: addresses and stream reach each call, and a failing call is named."""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace

import pytest

from sandbox.launch.calls import Call, launch_sequence, refill


def test_addresses_go_where_they_belong() -> None:
    """To several slots, to one, or to none. The number of addresses must match."""
    slots = [[ctypes.c_uint64(), ctypes.c_void_p()], [], [ctypes.c_void_p()]]
    fill = refill(slots)
    fill((1 << 63, 5, 7))
    assert [[slot.value for slot in some] for some in slots] == [[1 << 63, 1 << 63], [], [7]]
    for wrong in ((1, 2), (1, 2, 3, 4)):
        with pytest.raises(ValueError, match="to unpack"):
            fill(wrong)


class Driver:
    """Records its calls, and returns the statuses in `status`."""

    def __init__(self) -> None:
        self.slot, self.status = ctypes.c_void_p(), {"first": 0, "second": 0}
        self.called: list[tuple[object, ...]] = []

    def calls(self) -> list[Call]:
        streams = [SimpleNamespace(value=0) for _ in self.status]
        return [
            Call(self._call, (name, stream), stream, name) for name, stream in zip(self.status, streams, strict=True)
        ]

    def _call(self, name: str, stream: SimpleNamespace) -> int:
        self.called.append((name, self.slot.value, stream.value))
        return self.status[name]


def test_calls_go_in_order_to_one_stream() -> None:
    driver = Driver()
    launch = launch_sequence(driver.calls(), [[driver.slot]], True, lambda call, status: pytest.fail(call.about))
    launch((16,))
    launch((32,), 9)
    launch((32,))
    expected = [(16, None, 0), (32, None, 9), (32, None, 0)]
    assert driver.called == [(name, at, to) for at, _, to in expected for name in ("first", "second")]


def test_threads_do_not_change_each_others_arguments() -> None:
    slot, found = ctypes.c_void_p(), []

    def call() -> int:
        before = slot.value
        time.sleep(0)  # lets other threads run
        found.append(before == slot.value)
        return 0

    made = Call(call, (), SimpleNamespace(value=0), "a call")
    launch = launch_sequence([made], [[slot]], True, lambda call, status: pytest.fail(call.about))
    threads = [threading.Thread(target=lambda at=16 * n: [launch((at,)) for _ in range(200)]) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 800


def test_a_failed_call_goes_to_the_fallback_whose_exception_ends_the_launch() -> None:
    """With its status, before the following calls; without direct calls, with None."""
    driver, failed = Driver(), []

    def fallback(call: Call, status: int | None) -> None:
        failed.append((call.about, status))
        if status == 700:
            raise RuntimeError(call.about)

    launch = launch_sequence(driver.calls(), [[driver.slot]], True, fallback)
    driver.status["first"] = 201
    launch((16,))
    driver.status["first"] = 700
    with pytest.raises(RuntimeError, match="first"):
        launch((16,))
    assert failed == [("first", 201), ("first", 700)]
    assert [name for name, *_ in driver.called] == ["first", "second", "first"]
    failed.clear()
    launch_sequence(driver.calls(), [[driver.slot]], False, fallback)((16,))
    assert failed == [("first", None), ("second", None)]
