"""Dropout in every kernel: it keeps the same elements as the reference, in every run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sandbox.core import registry
from sandbox.engine import choose, pipeline
from sandbox.launch.dlpack import Device
from sandbox.reference import dropout_keep
from sandbox.spec import Kernel, Problem
from sandbox.verify import check, trial
from sandbox.verify.cases import Case, inputs_of

DROPPED = Problem(1, 1, 1, 1, 64, dtype="float16", dropout=0.5)
KERNELS = [  # those that support dropout
    kernel
    for kernel in registry.kernels().values()
    if kernel.computes in ("forward", "backward")
    and not all(
        kernel.why_unsupported(dataclasses.replace(DROPPED, D=D, Dv=D, dtype=kernel.dtypes[0])) for D in (64, 128)
    )
]
FORWARD = [kernel for kernel in KERNELS if kernel.computes == "forward"]
by_name = lambda kernel: kernel.name  # noqa: E731


def outputs(kernel: Kernel, problem: Problem, inputs: dict, device: Device) -> dict[str, np.ndarray]:
    tile = choose.choose_tile(kernel, problem, pipeline.arch_of(device))
    return trial.launch(kernel, tile, problem, inputs, device).outputs


def width(kernel: Kernel) -> int:
    """A head dimension that the kernel supports with dropout."""
    return next(
        D for D in (64, 128) if not kernel.why_unsupported(Problem(1, 1, 1, 1, D, dtype=kernel.dtypes[0], dropout=0.5))
    )


@pytest.mark.parametrize("kernel", FORWARD, ids=by_name)
@pytest.mark.sampled(4)
def test_each_element_is_kept_or_not_as_the_definition_says(kernel: Kernel, device: Device) -> None:
    """With scores 0 and V the identity, O is P."""
    p = 0.3
    for causal in (False, "top-left"):
        problem = Problem(2, 3, 70, 64, 64, dtype=kernel.dtypes[0], causal=causal, dropout=p)
        given = inputs_of("forward", Case("identity", problem))
        given["Q"][:] = 0
        given["V"][:] = np.eye(64)
        O = outputs(kernel, problem, given, device)["O"].astype(np.float32)
        seen = np.arange(64) <= np.arange(70)[:, None] if causal else np.ones((70, 64), bool)
        kept = dropout_keep(int(given["seed"][0]), 2, 3, 70, 64, p)
        np.testing.assert_array_equal(O != 0, kept & seen)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.sampled(16)
def test_dropout_by_the_reference(kernel: Kernel, device: Device) -> None:
    """Partial tiles, groups, and tiles at any offset in the 16 x 16 blocks of random numbers, causal and with a
    window."""
    D = width(kernel)
    cases = (
        Problem(2, 2, 49, 83, D, Hk=1, dtype=kernel.dtypes[0], dropout=0.5),
        Problem(1, 1, 480, 131, D - 24, dtype=kernel.dtypes[-1], causal="top-left", dropout=0.1),  # four tiles
        Problem(1, 2, 83, 150, D, dtype=kernel.dtypes[-1], window=(40, 9), dropout=0.9),
    )
    for problem in cases:
        if kernel.why_unsupported(problem) is None:
            result = check.verify(kernel, Case("dropout", problem), device)
            assert result.ok, f"{problem}: {result}"


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.sampled(8)
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(kernel: Kernel, device: Device) -> None:
    problem = Problem(1, 2, 65, 77, width(kernel), dtype=kernel.dtypes[-1], dropout=0.3)
    given = inputs_of(kernel.computes, Case("seeds", problem))
    first, again = (outputs(kernel, problem, given, device) for _ in range(2))
    other = outputs(kernel, problem, {**given, "seed": given["seed"] + 2**32}, device)  # the high word counts
    for name, x in first.items():
        if name != "dQ" or kernel.deterministic:
            assert x.tobytes() == again[name].tobytes(), name
        assert name == "LSE" or (x != other[name]).any(), name


def test_dropout_of_nothing_compiles_to_the_plain_kernel() -> None:
    for kernel in KERNELS:
        plain = Problem(1, 1, 64, 64, 64, dtype=kernel.dtypes[0])
        none = Problem(1, 1, 64, 64, 64, dtype=kernel.dtypes[0], dropout=0.0)
        assert none == plain
        assert kernel.defines(none, kernel.tiles[0]) == kernel.defines(plain, kernel.tiles[0])


@pytest.mark.parametrize("p", [2**-18, 2**-17 * 1.1, 1 - 2**-16, 1 - 2**-18])
def test_probabilities_next_to_the_ends(p: float, device: Device) -> None:
    kernel = registry.get("fwd_minimal")
    for problem in (Problem(1, 2, 33, 40, 16, dropout=p),):
        assert check.verify(kernel, Case("ends", problem), device).ok
