"""Spec of `fwd_mma.cu`."""

from sandbox.spec import Arch, Kernel, Problem, Tile, cdiv, unsupported_by_cp_async, unsupported_by_sm


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, whose memory O reuses, and two stages of K and V: rows of K and V are padded to a multiple of 32 bytes."""
    step = 32 // p.key_itemsize
    K, V = cdiv(p.D, step) * step, cdiv(p.Dv, step) * step
    return 2 * max(K, V) * t.BLOCK_M + 2 * p.key_itemsize * (K + V) * t.BLOCK_N


def supports(p: Problem, arch: Arch | None) -> str | None:
    """cp.async copies 16 bytes of a row at a time; the scale is part of the exponent."""
    return unsupported_by_cp_async(p)


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """Limits of a tile: whole MMA steps, registers of S and O, shared memory of an SM."""
    rows, columns = t.BLOCK_M // t.WARPS, cdiv(max(p.D, p.Dv), 16) * 16
    accumulators = rows * (columns + t.SUB_N) // 32
    rules = (
        (
            t.BLOCK_M % (16 * t.WARPS) == 0,
            f"BLOCK_M={t.BLOCK_M} must be a multiple of {16 * t.WARPS} = 16 * WARPS, with WARPS={t.WARPS}",
        ),
        (t.SUB_N % 16 == 0, f"SUB_N={t.SUB_N} must be a multiple of 16: one m16n8k16 step of P V"),
        (t.BLOCK_N % t.SUB_N == 0, f"BLOCK_N={t.BLOCK_N} must be a multiple of SUB_N={t.SUB_N}"),
        (
            accumulators <= 176,
            (
                f"BLOCK_M={t.BLOCK_M} with WARPS={t.WARPS} needs {accumulators} registers per thread for S and O at "
                f"{p.widths}: the limit is 176 (use more WARPS, or a smaller BLOCK_M or SUB_N)"
            ),
        ),
    )
    return next((reason for holds, reason in rules if not holds), None) or unsupported_by_sm(p, t, smem_bytes(p, t))


def rank(p: Problem, t: Tile) -> int:
    """Tiles that were timed with the options first; of these, tiles of eight warps where they are faster
    (experiments/003_forward_paper)."""
    return 2 * (not was_timed(p, t)) + ((t.WARPS == 8) != prefers_eight_warps(p))


def was_timed(p: Problem, t: Tile) -> bool:
    """Whether a tile of this size was timed with such options: a preference, not a limit. A tile that was not timed may
    be faster. A tile that spills (fwd_mma.spills.json) is used only if all tiles spill."""
    if t.BLOCK_M == 16 * t.WARPS:
        return True
    if p.reads_elements or (t.SUB_N == 48 and not p.plain):
        return False
    limited = t.BLOCK_N == 128 or p.dropout
    return not limited or max(p.D, p.Dv) <= (48 if t.BLOCK_N == 128 and p.dropout else 64)


def prefers_eight_warps(p: Problem) -> bool:
    """Whether eight warps should share a K/V tile: D > 240, at least four waves of blocks, and at least 512 queries
    and keys, 2048 if causal."""
    blocks, min_rows = cdiv(p.Sq, 128) * p.H * p.B, 2048 if p.causal else 512
    return p.plain and p.D > 240 and min(p.Sq, p.Sk) >= min_rows and blocks >= 4 * 132


def invariant_tile(p: Problem) -> dict[str, int]:
    """Keys after which m may change."""
    return {"SUB_N": 32}


kernel = Kernel(
    name="fwd_mma",
    computes="forward",
    rung=3,
    default=True,
    ragged=True,
    paged=True,
    short_sequences="fwd_decode",
    float8_keys=True,
    invariant_to=("runs", "entries", "batch", "heads", "allocation", "pages", "page_size", "ragged", "strides"),
    summary="tensor cores (mma.sync): two cp.async stages in swizzled shared memory, deferred rescaling",
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
    invariant_tile=invariant_tile,
    args=("Q", "K", "V", "O", "LSE", "group", "score"),
)
