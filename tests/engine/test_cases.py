"""Every kernel on single cases, each made for one fault: what the sweep tries in hundreds, found in a second."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from sandbox.core import registry
from sandbox.engine import choose
from sandbox.launch.dlpack import HOST, Device, numpy_dtype
from sandbox.spec import Kernel, Problem
from sandbox.verify import check, trial
from sandbox.verify.cases import LAYOUTS, Array, Case, inputs_of, pointed_cases

KERNELS = list(registry.kernels().values())
by_name = lambda kernel: kernel.name  # noqa: E731


def right(kernel: Kernel, case: Case, device: Device) -> None:
    result = check.verify(kernel, case, device)
    assert result.ok, f"{result.case}: {result.message or (result.tensor, result.error, result.bound, result.where)}"


def pointed() -> Iterator[object]:
    for kernel in KERNELS:
        for case in pointed_cases(kernel, "float16"):
            p = case.problem
            yield pytest.param(kernel, case, id=f"{kernel.name}-{case.inputs}-{p.Sq}x{p.Sk}-{p.causal or 'all'}")


@pytest.mark.parametrize(("kernel", "case"), list(pointed()))
def test_pointed(kernel: Kernel, case: Case, device: Device) -> None:
    """In float16, which has the least room for what is too large."""
    right(kernel, case, device)


@pytest.mark.parametrize("causal", [False, "bottom-right", "top-left"], ids=["all", "bottom-right", "top-left"])
@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_groups(kernel: Kernel, causal, device: Device) -> None:
    """h // group, h % Hk and h are three different things."""
    right(kernel, Case("groups", Problem(2, 4, 33, 40, 40, Hk=2, dtype="float16", causal=causal)), device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_layouts(kernel: Kernel, layout: str, device: Device) -> None:
    """Wherever the inputs' rows lie; where they have gaps, the outputs' have others."""
    D = 7 if kernel.refuses(Problem(1, 1, 1, 1, 7, dtype="float16")) is None else 40
    case = Case(layout, Problem(2, 4, 70, 45, D, Hk=2, dtype="float16"), layout=layout)
    if layout == "unaligned" and D == 40:
        assert check.verify(kernel, case, device).ok is None  # refused
    else:
        right(kernel, case, device)


def far_apart(x: Array, axis: int) -> Array:
    """A copy whose indices on one axis are more than 2^31 elements apart. Memory that nobody touches is not there."""
    stride = (2**31 + 4096) // 16 * 16
    strides = [x.shape[1] * x.shape[2] * x.shape[3], x.shape[2] * x.shape[3], x.shape[3], 1]
    strides[axis] = stride
    extent = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) + 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = np.frombuffer(mmap.mmap(-1, extent * x.itemsize, flags=flags), np.uint8)
    view = np.ndarray(x.shape, x.dtype, memory.data, strides=[s * x.itemsize for s in strides])
    view[...] = x
    return view


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "row"])
@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_offsets_beyond_32_bits(kernel: Kernel, axis: int) -> None:
    """More than 2^31 elements from one batch entry, head or row to the next, in all inputs. Needs no GPU."""
    case = Case("far", Problem(2, 2, 3, 3, 8, dtype="float16"))
    near = inputs_of(kernel.computes, case)
    far = {name: far_apart(x, axis) if x.ndim == 4 else x for name, x in near.items()}
    tile = choose.choose_tile(kernel, case.problem, None)
    expected = trial.launch(kernel, tile, case.problem, near, HOST).outputs
    for name, output in trial.launch(kernel, tile, case.problem, far, HOST).outputs.items():
        assert output.tobytes() == expected[name].tobytes(), name
