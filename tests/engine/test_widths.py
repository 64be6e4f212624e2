"""Every kernel with head dimensions D and Dv that are multiples of 8, with D < Dv and D > Dv.

Without a GPU they run under the address sanitizer of the CPU backend: a random sample of pairs, or every pair with
SANDBOX_WIDTHS=all (several hours on one core; use `-n`). On a GPU every pair is launched without a sanitizer and
verified.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from project import ALL_WIDTHS, SEED

from sandbox.core import registry
from sandbox.core.errors import UnsupportedProblem
from sandbox.cpu import compiler
from sandbox.engine import choose, pipeline
from sandbox.launch.arguments import scratch_of
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Kernel, Problem, Tile
from sandbox.verify import check
from sandbox.verify.cases import Case
from sandbox.verify.sanitize import launch_on_host

KERNELS = [kernel for kernel in registry.kernels().values() if kernel.computes != "block_map"]
WIDTHS = range(8, 257, 8)
# Always included: bwd_mma pads the columns of dQ for a large Dv, which its scratch once did not account for.
ALWAYS = {"bwd_mma": [(16, 128)]}
by_name = lambda kernel: kernel.name  # noqa: E731


def problem(kernel: Kernel, D: int, Dv: int) -> Problem:
    """Several blocks and partial tiles, or a single key tile; dtype and mask are random."""
    draw = random.Random(f"{SEED} {kernel.name} {D} {Dv}")
    Sk, causal = draw.choice((127, 30)), draw.choice((False, "bottom-right", "top-left"))
    return kernel.adapted(Problem(1, 2, 130, Sk, D, Hk=1, Dv=Dv, dtype=draw.choice(kernel.dtypes), causal=causal))


def taken(kernel: Kernel, D: int | None, device: Device = HOST) -> Iterator[tuple[Problem, Tile]]:
    """The supported problems with head dimension D, or with all, each with its default tile."""
    for pair in itertools.product(WIDTHS if D is None else (D,), WIDTHS):
        with contextlib.suppress(UnsupportedProblem):
            p = problem(kernel, *pair)
            yield p, choose.choose_tile(kernel, p, pipeline.arch_of(device))


def drawn(kernel: Kernel) -> list[tuple[Problem, Tile]]:
    """One problem, with D != Dv if the kernel supports it, and those of ALWAYS."""
    every = [*taken(kernel, None)]
    sides = ([pair for pair in every if sign * (pair[0].Dv - pair[0].D) > 0] for sign in (1, -1))
    draw, differ = random.Random(f"{SEED} {kernel.name}"), [side for side in sides if side]  # the wider one by a coin
    always = [pair for pair in every if (pair[0].D, pair[0].Dv) in ALWAYS.get(kernel.name, ())]
    return [draw.choice(draw.choice(differ or [every])), *always]


@pytest.mark.skipif("ziglang" in compiler.find().command, reason="the ziglang package has no sanitizers")
@pytest.mark.parametrize("D", WIDTHS if ALL_WIDTHS else [None], ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.sampled(12)
def test_widths_under_the_address_sanitizer(kernel: Kernel, D: int | None) -> None:
    for p, tile in drawn(kernel) if D is None else taken(kernel, D):
        report, _ = launch_on_host("address", kernel, p, tile)
        assert report.clean, f"SANDBOX_SEED={SEED}: {kernel.name} {p} {tile}: {report.text}"


@pytest.mark.gpu
@pytest.mark.parametrize("D", WIDTHS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_widths_on_a_gpu(kernel: Kernel, D: int) -> None:
    verified(kernel, D, ("cuda", 0))


def verified(kernel: Kernel, D: int, device: Device) -> None:
    """Compiles all pairs in parallel first, which takes most of the time, and verifies them."""
    pairs = [*taken(kernel, D, device)]
    with ThreadPoolExecutor() as pool:
        [*pool.map(lambda pair: pipeline.load(kernel, pair[1], pair[0], device), pairs)]
    results = [(p, tile, check.verify(kernel, Case("widths", p), device, tile)) for p, tile in pairs]
    assert [bad for bad in results if not bad[2].ok] == [], f"SANDBOX_SEED={SEED}"


def test_sums_of_dq_have_room_for_every_tile() -> None:
    """For every legal tile of bwd_mma: the number of warps determines the padding of columns."""
    kernel = registry.get("bwd_mma")
    for D, Dv, M, N, warps in itertools.product(
        (8, 16, 32, 64, 128), (8, 64, 128), (16, 32, 64, 128), (64, 128), (4, 8)
    ):
        p, tile = (
            Problem(1, 2, 130, 127, D, Dv=Dv, dtype="float16"),
            Tile(BLOCK_M=M, BLOCK_N=N, WARPS=warps, MIN_BLOCKS=1),
        )
        if not choose.why_tile_unsupported(kernel, p, tile, None):
            least = max(D, 16 * (32 * warps // N), 16 * (32 * warps // M))
            assert scratch_of(kernel, p, tile)["dQ_accum"] >= (2 * -(-130 // M) * M * least,), f"{p} {tile}"
