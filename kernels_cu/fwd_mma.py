"""Spec of `fwd_mma.cu`."""

from sandbox.spec import Arch, Kernel, Problem, Tile, cdiv, unsupported_by_cp_async


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, which O replaces, and two stages of K and V, in 16-bit elements; rows padded to a multiple of 16 columns."""
    K, V = cdiv(p.D, 16) * 16, cdiv(p.Dv, 16) * 16
    return 2 * (max(K, V) * t.BLOCK_M + 2 * (K + V) * t.BLOCK_N)


def supports(p: Problem, arch: Arch | None) -> str | None:
    """Rows are copied 16 bytes at a time; the scale is folded into the exponent."""
    return unsupported_by_cp_async(p, "fwd_block2d")


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """What an MMA step, the register file and an SM's shared memory ask of a tile."""
    rows, columns, smem = t.BLOCK_M // t.WARPS, cdiv(max(p.D, p.Dv), 16) * 16, t.MIN_BLOCKS * smem_bytes(p, t)
    ranges = (p.ragged or p.window != (None, None)) and not (p.softcap or p.alibi or p.bias or p.mask or p.score)
    most = 6144 if p.dropout else 16384 if rows == 16 and (p.plain or ranges) else 8192
    accumulators = rows * (columns + t.SUB_N) // 32
    rules = (
        (t.BLOCK_M % (16 * t.WARPS) == 0, f"BLOCK_M={t.BLOCK_M} must be 16 rows, or a multiple, for each warp"),
        (t.SUB_N % 16 == 0, f"SUB_N={t.SUB_N} must be a multiple of 16: one m16n8k16 step of P V"),
        (p.plain or t.SUB_N != 48, "SUB_N=48 spills with options of the score"),
        (
            rows == 16 or not (p.bias or p.mask or p.score),
            f"{rows} rows a warp spill with a bias, a mask or a score of one's own: 16 do not",
        ),
        (rows == 16 or not p.dropout or columns <= 64, f"{rows} rows a warp spill with dropout at D={p.D}: 16 do not"),
        (not arch or arch < (10, 0) or t.SUB_N != 48, "SUB_N=48 spills on compute capability 10.0 and later"),
        (
            columns <= 240 or t.SUB_N == 16 or not ranges or p.dropout or arch != (9, 0),
            f"SUB_N={t.SUB_N} spills with a window or ragged batches at D={p.D} on compute capability 9.0: 16 does not",
        ),
        (t.BLOCK_N % t.SUB_N == 0, f"BLOCK_N={t.BLOCK_N} must be a multiple of SUB_N={t.SUB_N}"),
        (
            t.BLOCK_N * columns <= most,
            f"BLOCK_N={t.BLOCK_N} rows of K at D={p.D} spill: at most {most} elements do not",
        ),
        (accumulators <= 176, f"{rows} rows a warp need {accumulators} registers for S and O at D={p.D}: at most 176"),
        (
            smem <= 232448,
            f"MIN_BLOCKS={t.MIN_BLOCKS} need {smem} bytes of shared memory at D={p.D}: an SM has 232448",
        ),
    )
    return next((sentence for kept, sentence in rules if not kept), None)


def rank(p: Problem, t: Tile) -> bool:
    """First what was fastest (experiments/003_forward_paper)."""
    return (t.WARPS == 8) != shares_keys(p)


def shares_keys(p: Problem) -> bool:
    """Whether eight warps, 128 rows, shall share tiles of keys: of wide heads, where there are several waves of blocks
    and, where half of each diagonal tile is hidden, rows are long."""
    blocks, long = cdiv(p.Sq, 128) * p.H * p.B, 2048 if p.causal else 512
    return p.plain and p.D > 240 and min(p.Sq, p.Sk) >= long and blocks >= 4 * 132


kernel = Kernel(
    name="fwd_mma",
    computes="forward",
    rung=3,
    default=True,
    ragged=True,
    summary="tensor cores warp by warp (mma.sync), fed by cp.async through swizzled shared memory",
    dtypes=("float16", "bfloat16"),
    min_arch=(8, 0),
    tiles=(
        Tile(BLOCK_M=128, BLOCK_N=128, SUB_N=32, WARPS=4, MIN_BLOCKS=2),
        Tile(BLOCK_M=128, BLOCK_N=48, SUB_N=48, WARPS=4, MIN_BLOCKS=2),
        Tile(BLOCK_M=128, BLOCK_N=32, SUB_N=32, WARPS=4, MIN_BLOCKS=2),
        Tile(BLOCK_M=64, BLOCK_N=32, SUB_N=32, WARPS=4, MIN_BLOCKS=2),
        Tile(BLOCK_M=128, BLOCK_N=64, SUB_N=16, WARPS=8, MIN_BLOCKS=1),
    ),
    space={
        "BLOCK_M": (64, 128, 192, 256),
        "BLOCK_N": (16, 32, 48, 64, 96, 128, 192),
        "SUB_N": (16, 32, 48, 64),
        "WARPS": (4, 8),
        "MIN_BLOCKS": (1, 2, 3),
    },
    grid=lambda p, t: (p.query_tiles(t.BLOCK_M), p.H, p.batches),
    block=lambda t: (32 * t.WARPS, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    rank=rank,
    args=("Q", "K", "V", "O", "LSE", "group", "score"),
)
