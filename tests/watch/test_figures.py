"""The numbers that versions are compared by."""

from __future__ import annotations

import dataclasses
import math

import pytest

from sandbox.core.tile import Tile
from sandbox.spec import Problem
from sandbox.toolchain.arch import Occupancy
from sandbox.toolchain.nvrtc import Resources
from sandbox.verify.check import Result
from sandbox.watch.figures import Cost, VersionResult, figures

COST = Cost("sm_90a", Tile(), Resources(168, 0, 0, 12, 6), 4096, Occupancy(2, 0.125, "registers"), {})
RESULT = Result("k", "case", Problem(1, 1, 1, 1, 64), "cuda", True)
RESOURCES = {"registers": 168, "spills": 18, "smem": 4096, "occupancy": 0.125}


def test_figures_of_resources() -> None:
    """Without a stack it has no figure; spills always have. Without counts there are no instructions."""
    assert figures(VersionResult("ok", cost=COST)) == RESOURCES
    stack = dataclasses.replace(COST, resources=Resources(168, 0, 64, 12, 6))
    assert figures(VersionResult("ok", cost=stack)) == RESOURCES | {"stack": 64}
    assert figures(VersionResult("ok")) == {}


def test_figures_of_instructions() -> None:
    """All of them, and some opcodes by themselves, with their modifiers."""
    counted = {"STG": 1, "FADD": 7, "LDG.E.128": 2, "LDG": 3, "HMMAX": 5, "HGMMA": 4}
    found = figures(VersionResult("ok", cost=dataclasses.replace(COST, opcodes=counted)))
    own = {"instructions": 22, "HGMMA": 4, "LDG": 3, "LDG.E.128": 2, "STG": 1}
    assert found == RESOURCES | own
    assert [name for name in found if name in own] == [*own]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([(1.0, 2.0, None), (3.0, 4.0, None)], {"error": 0.75}),
        ([(None, None, None), (0.0, 2.0, None)], {"error": 0.0}),
        ([(1.0, 0.0, None)], {}),
        ([(math.inf, 2.0, None)], {}),
        ([(None, None, None)], {}),
        ([(1.0, 2.0, None), (1.0, 2.0, 50.0), (1.0, 2.0, 90.0)], {"error": 0.5, "seconds": 2e-3, "tflops": 50.0}),
    ],
)
def test_figures_of_results(results: list[tuple[float | None, ...]], expected: dict[str, float]) -> None:
    """The largest error relative to its bound, if it is finite; the time of the first case that is timed."""
    made = [
        dataclasses.replace(RESULT, error=error, bound=bound, seconds=2e-3 if n == 1 else 1e-3, tflops=tflops)
        for n, (error, bound, tflops) in enumerate(results)
    ]
    assert figures(VersionResult("ok", results=tuple(made))) == expected
