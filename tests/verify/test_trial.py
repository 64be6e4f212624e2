"""The memory around outputs, and problems that a kernel takes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sandbox.core import registry
from sandbox.launch.dlpack import HOST
from sandbox.verify import attention, trial

KERNEL = registry.get("fwd_minimal")


@pytest.mark.parametrize(
    ("shape", "guard"), [((2, 4, 100), 448), ((3, 64), 64), ((3, 65), 128), ((500,), 64), ((2, 0, 5), 64)]
)
def test_guard_memory_of_a_contiguous_output(shape: tuple[int, ...], guard: int) -> None:
    """Before and after it: an entry of the first dimension, rounded up to 64 elements."""
    memory, (inner,) = trial._contiguous(shape, "float32", 0xFF)
    assert isinstance(inner, slice)
    assert (inner.start, inner.stop) == (guard, guard + np.prod(shape))
    assert len(memory) == 2 * guard + np.prod(shape)
    assert np.isnan(memory).all()


@pytest.mark.parametrize("at", [0, 63, 64, 191, 192, -1])
def test_a_write_to_guard_memory(at: int) -> None:
    memory, inner = trial._contiguous((2, 64), "float32", 0xFF)
    memory[at] = 0
    assert trial._guard_changed(memory, inner, 0xFF) == (not 64 <= at < 192)


@pytest.mark.parametrize("gap", [0, 8])
def test_guard_memory_between_rows(gap: int) -> None:
    memory, inner = trial._between_rows((2, 3, 5, 16), "float16", gap, 0xFF)
    assert memory[inner].shape == (2, 3, 5, 16)
    assert memory.shape == (2, 3, 7, 16 + gap)
    memory[inner] = 0
    assert not trial._guard_changed(memory, inner, 0xFF)
    assert np.isnan(memory[:, :, [0, -1]]).all()
    assert np.isnan(memory[..., 16:]).all()


@pytest.mark.parametrize("D", [16, 32, 64, 128, 256])
def test_a_kernel_of_one_head_dimension_gets_it(D: int) -> None:
    only = dataclasses.replace(KERNEL, supports=lambda p, arch: None if p.D == D else "not supported")
    problems = [case.problem for case in attention.quick_cases(only, HOST)]
    problems += [attention.tile_case(only, only.tiles[0]).problem, *attention.small_problems(only, only.tiles[0])]
    assert {p.D for p in problems} == {D}
