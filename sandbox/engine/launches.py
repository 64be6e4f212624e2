"""Combines all entries that a call needs, of one kernel or several, into one `Launch`: a function that starts them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..core import log
from ..core.kernel import Dim3, Entry
from ..launch import driver
from ..launch.arguments import ArgumentBlock, Launch, describe
from ..launch.dlpack import HOST, Device


class EntryLaunch(NamedTuple):
    """The launch of one entry: function, geometry and arguments."""

    entry: Entry
    function: Any  # driver.CudaFunction or CpuFunction
    grid: Dim3
    block: Dim3
    smem: int
    arguments: ArgumentBlock
    programmatic_launch: bool
    cluster: int

    @property
    def launch_config(self) -> tuple[Any, ...]:
        """The arguments of the function's `launcher` and `call`: the fields of this tuple from `grid` on."""
        return self[2:]


def make_launch(
    launches: Sequence[EntryLaunch], zeroed: Mapping[str, int], order: Sequence[str], device: Device
) -> Launch:
    """A function that zeroes memory, then launches all entries whose grid is not empty. It takes the addresses of the
    tensors that `order` names, in this order. `zeroed`: {name of a tensor: number of bytes}."""
    launches = [one for one in launches if all(one.grid)]
    # Earlier work on the stream is the caller's: the first entry must not overlap it, so it has no programmatic launch.
    launches[:1] = [one._replace(programmatic_launch=False) for one in launches[:1]]
    zeroed = {name: nbytes for name, nbytes in zeroed.items() if nbytes}
    launch = _on_host(launches, zeroed, order) if device == HOST else _on_gpu(launches, zeroed, order, device)
    return _logged(launch, launches) if log.logger.isEnabledFor(log.LAUNCHES) else launch


def _on_gpu(launches: Sequence[EntryLaunch], zeroed: Mapping[str, int], order: Sequence[str], device: Device) -> Launch:
    slots: dict[str, list[Any]] = {name: [] for name in order}
    calls = []
    for name, nbytes in zeroed.items():
        slots[name].append(pointer := ctypes.c_uint64())
        calls.append(driver.zeroing(pointer, nbytes))
    for one in launches:
        for name, slot in zip(one.arguments.tensor_names, one.arguments.slots, strict=True):
            slots[name].append(slot)
        calls.append(one.function.call(*one.launch_config))
    return driver.launch_calls(calls, [*slots.values()], driver.device(device[1]))


def _on_host(launches: Sequence[EntryLaunch], zeroed: Mapping[str, int], order: Sequence[str]) -> Launch:
    clear = [(order.index(name), nbytes) for name, nbytes in zeroed.items()]
    each = [
        (one.function.launcher(*one.launch_config), [order.index(name) for name in one.arguments.tensor_names])
        for one in launches
    ]

    def launch_all(pointers: tuple[int, ...], stream: int = 0) -> None:
        for i, nbytes in clear:
            ctypes.memset(pointers[i], 0, nbytes)
        for launch, indices in each:
            launch(tuple([pointers[i] for i in indices]), stream)

    return launch_all


def _logged(launch: Launch, launches: Sequence[EntryLaunch]) -> Launch:
    """`launch`, with log records of every entry's geometry and arguments."""

    def logged(pointers: tuple[int, ...], stream: int = 0) -> None:
        for one in launches:
            shape = one.grid, one.block, one.smem
            log.logger.log(log.LAUNCHES, "%s: grid %s, block %s, %d bytes of shared memory", one.entry.name, *shape)
        launch(pointers, stream)
        for one in launches:
            for name, value in zip(one.entry.args, one.arguments.values, strict=True):
                log.logger.log(log.ARGUMENTS, "  %s of %s = %s", name, one.entry.name, describe(value))

    return logged
