"""Spec of `hopper_ladder.cu`, and the steps from `hopper_plain` to `fwd_wgmma`."""

from __future__ import annotations

from kernels_cu.course.hopper_plain import supports
from sandbox.bench.steps import Step
from sandbox.spec import Kernel, Problem, Tile, cdiv

OFF, ON = 1, 2
WIDTHS = (64, 128)

FIRST = Tile(BLOCK_M=128, BLOCK_N=128, STAGES=2, OVERLAP=OFF, PING_PONG=OFF, DEFERRED=OFF, TMA_STORE=OFF, SCHEDULE=1,
             BLOCKS=132)  # fmt: skip
PLAIN = (  # of hopper_plain
    Step("plain", "one producer thread, one consumer warpgroup of 64 rows, one stage of K and V", (1.0, 1.0)),
    Step("two stages", "a second stage of K and of V: both load one key tile ahead", (1.3, 1.25), {"STAGES": 2}),
)
LADDER = (
    Step("two consumers", "two warpgroups share each key tile: one multiplies while the other computes exponentials",
         (1.5, 1.5)),
    Step("overlap", "Q K^T of a key tile is issued together with P V of the previous one", (1.1, 1.1),
         {"OVERLAP": ON}),
    Step("ping-pong", "named barriers (bar.sync): consumers take turns to issue products", (1.05, 1.03),
         {"PING_PONG": ON}),
    Step("deferred rescaling", "m changes and O is rescaled only if a thread's sum of P exceeds 16384", (1.08, 1.04),
         {"DEFERRED": ON}),
    Step("TMA store", "O leaves through shared memory by TMA, instead of 4-byte stores from registers", (1.02, 1.02),
         {"TMA_STORE": ON}),
    Step("persistent", "one block per SM, longest work tiles first: the next tile loads during the epilogue",
         (1.1, 1.1), {"SCHEDULE": 2}),
    Step("scheduler warp", "publishes the work tiles; causal: the blocks work on a few heads at a time, whose K and V"
         " stay in L2", (1.02, 1.05), {"SCHEDULE": 3}),
    Step("three consumers", "192 rows share each key tile (D = 128: 80 keys per tile, to save registers)",
         (1.05, 1.05), {"BLOCK_M": 192}, {"BLOCK_N": 80}),
)  # fmt: skip


def tiles(D: int) -> dict[str, Tile]:
    """{step: tile} at head width D, in order."""
    found, numbers = {}, dict(FIRST)
    for step in LADDER:
        numbers |= step.numbers(D)
        found[step.name] = Tile(**numbers)
    return found


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, stages of K and V, O, and mbarriers."""
    return 128 * cdiv(p.D, 64) * (2 * t.BLOCK_M + 2 * t.STAGES * t.BLOCK_N) + 1024


def grid(p: Problem, t: Tile) -> tuple[int, int, int]:
    """A block per work tile, or at most BLOCKS persistent blocks."""
    work_tiles = cdiv(p.Sq, t.BLOCK_M) * p.H * p.B
    return (work_tiles if t.SCHEDULE == 1 else min(work_tiles, t.BLOCKS), 1, 1)


kernel = Kernel(
    name="hopper_ladder",
    computes="forward",
    rung=4,
    summary="fwd_wgmma with its ideas as switches",
    dtypes=("float16", "bfloat16"),
    min_arch=(9, 0),
    arch_suffix="a",
    tiles=tuple(dict.fromkeys(tile for D in reversed(WIDTHS) for tile in reversed(tiles(D).values()))),
    grid=grid,
    block=lambda t: (128 + 2 * t.BLOCK_M, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    args=(
        *("Q", "K", "V", "O", "LSE", "Q_map", "K_map", "V_map", "O_warp_map"),
        *("H", "heads", "group", "score"),
    ),
    max_D=128,
)
