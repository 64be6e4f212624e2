"""The steps from a plain tensor-core kernel to `fwd_mma`, one optimisation each: the tiles of `ladder.cu`."""

from __future__ import annotations

from pathlib import Path

from sandbox.bench.steps import Step
from sandbox.spec import Arch, Kernel, Problem, Tile, cdiv

OFF, ON = 1, 2
WIDTHS = (64, 128)


SIZES = {"BLOCK_M": 64, "BLOCK_N": 64, "SUB_N": 64, "WARPS": 4, "STAGES": 1}
SWITCHES = ("LDMATRIX", "SWIZZLE", "SPLIT_Q", "Q_IN_REGISTERS", "FOLDED_SCALE", "TWO_LOOPS", "RESCALE_THRESHOLD",
            "MANY_REGISTERS", "ONE_LANE_MAP")  # fmt: skip
PLAIN = {**SIZES, **dict.fromkeys(SWITCHES, OFF)}
LADDER = (
    Step("plain", "`mma.sync`; four warps share 64 rows: S split by keys, O by columns; row maxima and P through "
         "shared memory", (1.0, 1.0)),
    Step("ldmatrix", "operands by `ldmatrix` instead of 4-byte loads (V: 2-byte loads)", (1.2, 1.2), {"LDMATRIX": ON}),
    Step("swizzle", "16-byte chunks XOR-swizzled by the row", (2.0, 2.0), {"SWIZZLE": ON}),
    Step("split-Q", "each warp has 16 rows: row maxima by shuffles, P stays in registers", (1.3, 1.2), {"SPLIT_Q": ON}),
    Step("Q in registers", "Q is read from shared memory once", (1.08, 1.1), {"Q_IN_REGISTERS": ON}),
    Step("cp.async", "`cp.async`, two stages, one barrier per tile", (1.15, 1.15), {"STAGES": 2}),
    Step("exp2", "`exp2` with the scale folded into one FFMA", (1.08, 1.04), {"FOLDED_SCALE": ON}),
    Step("two loops", "fully visible tiles have a loop without masks; other tiles go in steps of 16 keys up to the "
         "last visible key", (1.1, 1.1), {"TWO_LOOPS": ON}),
    Step("32 rows a warp", "two 16-row tiles use each K and V fragment (D = 128: 48 keys per tile, Q in shared memory "
         "again)", (1.15, 1.1), {"BLOCK_M": 128}, {"BLOCK_N": 48, "SUB_N": 48, "Q_IN_REGISTERS": OFF}),
    Step("sub-tiles", "tiles of 128 keys, 32 at a time, unrolled: exponentials overlap with the next products",
         (1.1, 1.0), {"BLOCK_N": 128, "SUB_N": 32}, {"BLOCK_N": 48, "SUB_N": 48}),
    Step("deferred rescaling", "m changes and O is rescaled only when P would exceed 2^8",
         (1.06, 1.06), {"RESCALE_THRESHOLD": ON}),
    Step("more registers", "`__launch_bounds__` for 8 warps per SM: ptxas does not limit registers for occupancy",
         (1.03, 1.0), {"MANY_REGISTERS": ON}),
)  # fmt: skip
VARIANTS = (
    Step("8 warps", "256 rows per block share K and V", (0.97, 0.97), {"BLOCK_M": 256, "WARPS": 8}),
    Step("3 stages", "two tiles in flight", (0.99, 0.98), {"STAGES": 3}),
    Step("one lane map", "K fragments with the lane map of Q and V: fewer address registers, but the two registers of "
         "a B operand are not adjacent", (0.97, 0.88), {"ONE_LANE_MAP": ON}),
    Step("64 keys", "S of 64 keys at once", (0.93, 0.95), {"SUB_N": 64}, {"BLOCK_N": 64}),
    Step("Q elsewhere", "Q in shared memory (D = 128: in registers, which spills)", (0.95, 0.9),
         {"Q_IN_REGISTERS": OFF}, {"Q_IN_REGISTERS": ON}),
)  # fmt: skip


def tiles(D: int) -> dict[str, Tile]:
    """{step: tile} at head width D: the steps in order, then the variants of the last one. Steps that change nothing at
    this width are omitted."""
    found: dict[str, Tile] = {}
    numbers = PLAIN
    for step in LADDER:
        numbers = {**numbers, **step.numbers(D)}
        if (tile := Tile(**numbers)) not in found.values():
            found[step.name] = tile
    return found | {step.name: Tile(**{**numbers, **step.numbers(D)}) for step in VARIANTS}


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, and STAGES times K and V, 16-bit elements."""
    return 2 * p.D * (t.BLOCK_M + 2 * t.STAGES * t.BLOCK_N)


def supports(p: Problem, arch: Arch | None) -> str | None:
    """Why the problem is not supported, or None. Head widths 64 and 128, rows aligned to 16 bytes, a scale that can be
    folded into the exponent."""
    if p.D not in WIDTHS:
        return f"D={p.D} is not supported: the steps are measured at D = 64 and 128"
    if p.alignment < 16:
        return f"rows aligned to {p.alignment} bytes are not supported: pass contiguous copies (16 bytes)"
    if not 1e-20 < p.scale < 1e6:
        return f"scale={p.scale} is not supported: it must be between 1e-20 and 1e6"
    return None


KERNEL = Kernel(
    name="fwd_ladder",
    computes="forward",
    rung=3,
    summary="fwd_mma with its optimisations as switches",
    dtypes=("float16", "bfloat16"),
    min_arch=(8, 0),
    tiles=tuple(dict.fromkeys(tile for D in WIDTHS for tile in tiles(D).values())),
    grid=lambda p, t: (cdiv(p.Sq, t.BLOCK_M), p.H, p.B),
    block=lambda t: (32 * t.WARPS, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    args=("Q", "K", "V", "O", "LSE", "group", "score"),
    max_D=128,
    source=Path(__file__).resolve().parent / "ladder.cu",
)


def find(step: Step, D: int) -> tuple[Kernel, Tile] | None:
    """The kernel and tile of a step at head width D; None if it changes nothing there."""
    tile = tiles(D).get(step.name)
    return (KERNEL, tile) if tile else None
