"""The ladder from a plain tensor-core kernel to `fwd_mma`, one idea a step: the numbers of `ladder.cu`'s tiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sandbox.spec import Arch, Kernel, Problem, Tile, cdiv

OFF, ON = 1, 2
WIDTHS = (64, 128)


@dataclass(frozen=True)
class Step:
    """One idea. `predicted`, before anything was measured: the gain over the step before (a variant's: over the top of
    the ladder) at D = 64 and at D = 128. `changes`: the numbers that differ from there; `at_128`: others at D = 128."""

    name: str
    idea: str
    predicted: tuple[float, float]
    changes: dict[str, int] = field(default_factory=dict)
    at_128: dict[str, int] = field(default_factory=dict)

    def numbers(self, D: int) -> dict[str, int]:
        """What this step changes at head width D."""
        return {**self.changes, **(self.at_128 if D == 128 else {})}


SIZES = {"BLOCK_M": 64, "BLOCK_N": 64, "SUB_N": 64, "WARPS": 4, "STAGES": 1}
SWITCHES = ("LDMATRIX", "SWIZZLE", "SPLIT_Q", "Q_IN_REGISTERS", "FOLDED_SCALE", "TWO_LOOPS", "RESCALE_THRESHOLD",
            "MANY_REGISTERS", "ONE_LANE_MAP")  # fmt: skip
PLAIN = {**SIZES, **dict.fromkeys(SWITCHES, OFF)}
LADDER = (
    Step("plain", "`mma.sync`; four warps share 64 rows: S by keys, O by columns, maxima and P through shared memory",
         (1.0, 1.0)),
    Step("ldmatrix", "operands by `ldmatrix` instead of 4-byte loads (V: 2-byte loads)", (1.2, 1.2), {"LDMATRIX": ON}),
    Step("swizzle", "16-byte chunks XOR-swizzled by the row", (2.0, 2.0), {"SWIZZLE": ON}),
    Step("split-Q", "a warp owns 16 whole rows: maxima by shuffles, P stays in registers", (1.3, 1.2), {"SPLIT_Q": ON}),
    Step("Q in registers", "Q is read from shared memory once", (1.08, 1.1), {"Q_IN_REGISTERS": ON}),
    Step("cp.async", "`cp.async`, two stages, one barrier a tile", (1.15, 1.15), {"STAGES": 2}),
    Step("exp2", "`exp2` with the scale folded into one FFMA", (1.08, 1.04), {"FOLDED_SCALE": ON}),
    Step("two loops", "tiles that every row sees whole have a loop without masks; others go in 16-key steps and end "
         "where no row sees more", (1.1, 1.1), {"TWO_LOOPS": ON}),
    Step("32 rows a warp", "two 16-row tiles use each K and V fragment (D = 128: 48 keys a tile, Q in shared memory "
         "again)", (1.15, 1.1), {"BLOCK_M": 128}, {"BLOCK_N": 48, "SUB_N": 48, "Q_IN_REGISTERS": OFF}),
    Step("sub-tiles", "tiles of 128 keys, 32 at a time, unrolled: exponentials mix with the next products",
         (1.1, 1.0), {"BLOCK_N": 128, "SUB_N": 32}, {"BLOCK_N": 48, "SUB_N": 48}),
    Step("lazy maximum", "m moves, and O is rescaled, only when a score exceeds it by 8 in the exponent", (1.06, 1.06),
         {"RESCALE_THRESHOLD": ON}),
    Step("more registers", "`__launch_bounds__` says that 8 warps an SM are enough: ptxas need not save registers",
         (1.03, 1.0), {"MANY_REGISTERS": ON}),
)  # fmt: skip
VARIANTS = (
    Step("8 warps", "256 rows a block share K and V", (0.97, 0.97), {"BLOCK_M": 256, "WARPS": 8}),
    Step("3 stages", "two tiles on their way", (0.99, 0.98), {"STAGES": 3}),
    Step("one lane map", "K's fragments by the lane map of Q's and V's: fewer address registers, but a B operand's two "
         "registers are no neighbours", (0.97, 0.88), {"ONE_LANE_MAP": ON}),
    Step("64 keys", "S of 64 keys at once", (0.93, 0.95), {"SUB_N": 64}, {"BLOCK_N": 64}),
    Step("Q elsewhere", "Q in shared memory (D = 128: in registers, which spills)", (0.95, 0.9),
         {"Q_IN_REGISTERS": OFF}, {"Q_IN_REGISTERS": ON}),
)  # fmt: skip


def tiles(D: int) -> dict[str, Tile]:
    """{step: its tile} at head width D: the ladder from the bottom, then the variants of its top. A step that changes
    nothing there is left out."""
    found: dict[str, Tile] = {}
    numbers = PLAIN
    for step in LADDER:
        numbers = {**numbers, **step.numbers(D)}
        if (tile := Tile(**numbers)) not in found.values():
            found[step.name] = tile
    return found | {step.name: Tile(**{**numbers, **step.numbers(D)}) for step in VARIANTS}


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, and STAGES times K and V, in 16-bit elements."""
    return 2 * p.D * (t.BLOCK_M + 2 * t.STAGES * t.BLOCK_N)


def supports(p: Problem, arch: Arch | None) -> str | None:
    """Head widths that are measured; rows that are copied 16 bytes at a time; a scale that can be folded."""
    if p.D not in WIDTHS:
        return f"D={p.D} is not built: the ladder is measured at D = 64 and 128"
    if p.alignment < 16:
        return f"rows that begin at multiples of {p.alignment} bytes are not built: pass contiguous copies (16 bytes)"
    if not 1e-20 < p.scale < 1e6:
        return f"scale={p.scale} is not built: it must be between 1e-20 and 1e6"
    return None


KERNEL = Kernel(
    name="fwd_ladder",
    computes="forward",
    rung=3,
    summary="fwd_mma with its ideas as switches",
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
