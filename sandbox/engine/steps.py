"""The launches of a kernel's entries, made one."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..core import log
from ..core.kernel import Dim3, Entry
from ..launch import driver
from ..launch.arguments import ArgumentBlock, Launch, describe
from ..launch.dlpack import HOST, Device


class Step(NamedTuple):
    """One entry: what is launched, and with what."""

    entry: Entry
    function: Any  # driver.CudaFunction or CpuFunction
    grid: Dim3
    block: Dim3
    smem: int
    arguments: ArgumentBlock
    early: bool

    @property
    def how(self) -> tuple[Any, ...]:
        """As the function's `launcher` and `call` take it."""
        return self[2:]


def in_order(steps: Sequence[Step], zeroed: Mapping[str, int], order: Sequence[str], device: Device) -> Launch:
    """One launch of all that have blocks, on tensors whose addresses come in `order`, after so many bytes of those that
    are `zeroed` have been made zeros."""
    steps = [step for step in steps if all(step.grid)]
    zeroed = {name: nbytes for name, nbytes in zeroed.items() if nbytes}
    launch = _on_host(steps, zeroed, order) if device == HOST else _on_gpu(steps, zeroed, order, device)
    return _logged(launch, steps) if log.logger.isEnabledFor(log.LAUNCHES) else launch


def _on_gpu(steps: Sequence[Step], zeroed: Mapping[str, int], order: Sequence[str], device: Device) -> Launch:
    slots: dict[str, list[Any]] = {name: [] for name in order}
    calls = []
    for name, nbytes in zeroed.items():
        slots[name].append(pointer := ctypes.c_uint64())
        calls.append(driver.zeroing(pointer, nbytes))
    for step in steps:
        for name, slot in zip(step.arguments.tensor_names, step.arguments.slots, strict=True):
            slots[name].append(slot)
        calls.append(step.function.call(*step.how))
    return driver.in_order(calls, [*slots.values()], driver.device(device[1]))


def _on_host(steps: Sequence[Step], zeroed: Mapping[str, int], order: Sequence[str]) -> Launch:
    clear = [(order.index(name), nbytes) for name, nbytes in zeroed.items()]
    launches = [
        (step.function.launcher(*step.how), [order.index(name) for name in step.arguments.tensor_names])
        for step in steps
    ]

    def launch_all(pointers: tuple[int, ...], stream: int = 0) -> None:
        for i, nbytes in clear:
            ctypes.memset(pointers[i], 0, nbytes)
        for launch, places in launches:
            launch(tuple([pointers[i] for i in places]), stream)

    return launch_all


def _logged(launch: Launch, steps: Sequence[Step]) -> Launch:
    """`launch` for who wants to hear of each."""

    def said(pointers: tuple[int, ...], stream: int = 0) -> None:
        for entry, _, *shape, _, _ in steps:
            log.logger.log(log.LAUNCHES, "%s: grid %s, block %s, %d bytes of shared memory", entry.name, *shape)
        launch(pointers, stream)
        for step in steps:
            for name, value in zip(step.entry.args, step.arguments.values, strict=True):
                log.logger.log(log.ARGUMENTS, "  %s of %s = %s", name, step.entry.name, describe(value))

    return said
