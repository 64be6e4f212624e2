"""Architectures: names, limits, and occupancy against hand-computed cases."""

from __future__ import annotations

import itertools

import pytest
from project import check_stored, digest

from sandbox.core.errors import UnsupportedProblem
from sandbox.toolchain import arch
from sandbox.toolchain.arch import KIB, Occupancy, occupancy


@pytest.mark.parametrize(
    ("name", "expected"),
    [("sm_75", (7, 5)), ("sm_80", (8, 0)), ("sm_90", (9, 0)), ("sm_90a", (9, 0)), ("sm_100a", (10, 0)),
     ("sm_103f", (10, 3)), ("sm_120", (12, 0)), ("sm_121a", (12, 1))],
)  # fmt: skip
def test_parse(name: str, expected: tuple[int, int]) -> None:
    assert arch.parse(name) == expected


@pytest.mark.parametrize(
    "name", ["", "90", "sm_", "sm_9", "sm_70", "sm_999", "sm_90b", "sm_90aa", "SM_90", "sm_90 ", "compute_90"]
)
def test_parse_rejects(name: str) -> None:
    with pytest.raises(
        UnsupportedProblem, match=f'arch "{name}" is not supported: choose one of sm_75, sm_80, .*sm_121'
    ):
        arch.parse(name)


def test_limits() -> None:
    assert arch.limits((9, 0)).smem_per_block == 227 * KIB
    assert arch.limits((8, 6)).blocks_per_sm == 16
    assert arch.limits((8, 8)) == arch.limits((8, 7))  # unknown: as the one before it
    assert arch.limits((13, 0)) == arch.limits((12, 1))
    assert arch.LARGEST_SMEM == 227 * KIB
    with pytest.raises(UnsupportedProblem, match=r"7\.0 is not supported: 7\.5 is the oldest"):
        arch.limits((7, 0))


HOPPER, AMPERE_GAMER, TURING = (9, 0), (8, 6), (7, 5)


@pytest.mark.parametrize(
    ("where", "threads", "registers", "smem", "expected"),
    [
        # 256 threads = 8 warps. Registers: 32 * 32 = 1024 a warp, 65536 / 4 / 1024 = 16 warps a sub-partition, 64 an
        # SM: 8 blocks. Shared memory: 1 KiB reserved, 228 blocks. Warps: 64 / 8 = 8 blocks. Full: 8 * 8 / 64.
        (HOPPER, 256, 32, 0, Occupancy(8, 1.0, "registers")),
        # One register more: 33 * 32 = 1056, in steps of 256: 1280 a warp; 16384 // 1280 = 12 warps, 48 an SM: 6 blocks.
        (HOPPER, 256, 33, 0, Occupancy(6, 48 / 64, "registers")),
        # 16 registers: 512 a warp, 128 warps an SM, 16 blocks; the 64 warp slots stop at 8.
        (HOPPER, 256, 16, 0, Occupancy(8, 1.0, "warps")),
        # 128 threads, 168 registers: 5376 a warp; 16384 // 5376 = 3, 12 an SM; 12 / 4 warps = 3 blocks.
        (HOPPER, 128, 168, 48 * KIB, Occupancy(3, 12 / 64, "registers")),
        # 96 KiB + 1 KiB reserved = 97: 228 // 97 = 2 blocks of 2 warps.
        (HOPPER, 64, 80, 96 * KIB, Occupancy(2, 4 / 64, "shared memory")),
        # 113 KiB + 1 = 114: exactly 2 in 228; one byte more is rounded up to 128 and leaves 1.
        (HOPPER, 128, 32, 113 * KIB, Occupancy(2, 8 / 64, "shared memory")),
        (HOPPER, 128, 32, 113 * KIB + 1, Occupancy(1, 4 / 64, "shared memory")),
        # The most a block may have, and one byte more.
        (HOPPER, 128, 32, 227 * KIB, Occupancy(1, 4 / 64, "shared memory")),
        (HOPPER, 128, 32, 227 * KIB + 1, Occupancy(0, 0.0, "shared memory")),
        # One warp, 64 registers: 32 blocks by registers; 228 KiB / (24 + 1) = 9 (as an H100's driver says).
        (HOPPER, 32, 64, 24 * KIB, Occupancy(9, 9 / 64, "shared memory")),
        # One warp, 32 registers, no shared memory: 64 blocks by registers; 32 are allowed.
        (HOPPER, 32, 32, 0, Occupancy(32, 32 / 64, "blocks")),
        # 8 registers: 256 a warp, 256 warps an SM, 64 blocks by registers and by warps; 32 are allowed.
        (HOPPER, 32, 8, 0, Occupancy(32, 32 / 64, "blocks")),
        # 1024 threads with 65 registers: 2304 a warp, 7 a sub-partition, 28 an SM: no room for 32 warps.
        (HOPPER, 1024, 65, 0, Occupancy(0, 0.0, "registers")),
        # 33 threads are two warps: 16 blocks of 2 warps in 48 slots.
        (AMPERE_GAMER, 33, 16, 0, Occupancy(16, 32 / 48, "blocks")),
        # 99 KiB + 1 = 100: one block.
        (AMPERE_GAMER, 128, 32, 99 * KIB, Occupancy(1, 4 / 48, "shared memory")),
        # Turing reserves nothing: 64 KiB is one block, 32 KiB two; 32 warp slots, 16 blocks.
        (TURING, 64, 32, 64 * KIB, Occupancy(1, 2 / 32, "shared memory")),
        (TURING, 64, 32, 32 * KIB, Occupancy(2, 4 / 32, "shared memory")),
        (TURING, 256, 32, 0, Occupancy(4, 1.0, "warps")),
        (TURING, 32, 16, 0, Occupancy(16, 0.5, "blocks")),
    ],
)
def test_occupancy(where: tuple[int, int], threads: int, registers: int, smem: int, expected: Occupancy) -> None:
    assert occupancy(where, threads, registers, smem) == expected


def test_stored_occupancy() -> None:
    """Of every architecture, at and beside the limits."""
    shown = []
    for where in arch._LIMITS:
        limits, lines = arch.limits(where), list[str]()
        for threads, registers in itertools.product((1, 33, 128, 1024), (0, 33, 168, 255)):
            found = occupancy(where, threads, registers, 100)
            lines.append(f"{threads} {registers}: {found.blocks_per_sm} {found.fraction:.4g} {found.limiter}")
        sizes = {
            limits.smem_per_block,
            limits.smem_per_sm // 2,
            limits.smem_per_sm // 3 // 128 * 128 - KIB,
            0,
            48 * KIB,
        }
        for smem in sorted(size + more for size in sizes for more in (0, 1, -128, 128) if size + more >= 0):
            lines.append(f"{smem} bytes: {occupancy(where, 64, 24, smem)}")
        shown += [f"{where} {arch.name_of(where)} {limits}", lines[5], lines[-1], digest(lines)]
    check_stored("occupancy.txt", shown)
