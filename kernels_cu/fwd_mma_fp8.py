"""Spec of `fwd_mma_fp8.cu`."""

from sandbox.spec import SM_SMEM, Arch, Kernel, Problem, Tile, cdiv, unsupported_by_cp_async, unsupported_by_sm


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, and two stages of K and V; rows padded to a multiple of 32 columns."""
    K, V = cdiv(p.D, 32) * 32, cdiv(p.Dv, 32) * 32
    return K * t.BLOCK_M + 2 * (K + V) * t.BLOCK_N


def supports(p: Problem, arch: Arch | None) -> str | None:
    """cp.async copies 16 bytes of a row at a time; the scale is part of the exponent."""
    costly = sorted(p.options - {"window", "sink", "descale", "ragged"})  # options that need registers
    if arch is not None and costly and max(p.D, p.Dv) > 128:
        return (
            f"D={p.D}, Dv={p.Dv} with {', '.join(costly)} is not supported: with options other than window, sink, "
            "descale and ragged batches the limit is 128, because of registers"
        )
    return unsupported_by_cp_async(p)


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """Limits of a tile: whole MMA steps, registers without spills, shared memory of an SM."""
    rows = t.BLOCK_M // t.WARPS
    accumulators = rows * (p.Dv + t.SUB_N + t.SUB_N // 4) // 32
    rules = (
        (
            t.BLOCK_M % (16 * t.WARPS) == 0,
            f"BLOCK_M={t.BLOCK_M} must be a multiple of {16 * t.WARPS} = 16 * WARPS, with WARPS={t.WARPS}",
        ),
        (t.SUB_N % 32 == 0, f"SUB_N={t.SUB_N} must be a multiple of 32: one m16n8k32 step of P V"),
        (t.BLOCK_N % t.SUB_N == 0, f"BLOCK_N={t.BLOCK_N} must be a multiple of SUB_N={t.SUB_N}"),
        (
            accumulators <= 168,
            (
                f"BLOCK_M={t.BLOCK_M} with WARPS={t.WARPS} needs {accumulators} registers per thread for S and O at "
                f"Dv={p.Dv}: the limit is 168 (use more WARPS, or a smaller BLOCK_M or SUB_N)"
            ),
        ),
    )
    if reason := next((reason for holds, reason in rules if not holds), None):
        return reason
    if arch is None:
        return None
    return unsupported_by_sm(p, t, smem_bytes(p, t), SM_SMEM if arch[0] in (9, 10) else 102400)


kernel = Kernel(
    name="fwd_mma_fp8",
    computes="forward",
    rung=3,
    default=True,
    ragged=True,
    paged=True,
    short_sequences="fwd_decode",
    invariant_to=("runs", "entries", "batch", "heads", "ragged"),
    summary="8-bit tensor cores (mma.sync): V is transposed by byte permutations between shared memory and MMA",
    dtypes=("float8_e4m3", "float8_e5m2"),
    min_arch=(8, 9),
    max_D=192,  # beyond, all tiles spill registers
    tiles=(
        Tile(BLOCK_M=128, BLOCK_N=64, SUB_N=64, WARPS=4, MIN_BLOCKS=2),
        Tile(BLOCK_M=64, BLOCK_N=64, SUB_N=64, WARPS=4, MIN_BLOCKS=2),
        Tile(BLOCK_M=64, BLOCK_N=64, SUB_N=32, WARPS=4, MIN_BLOCKS=2),
        Tile(BLOCK_M=64, BLOCK_N=32, SUB_N=32, WARPS=4, MIN_BLOCKS=2),
    ),
    space={
        "BLOCK_M": (64, 128),
        "BLOCK_N": (32, 64, 96, 128),
        "SUB_N": (32, 64),
        "WARPS": (4, 8),
        "MIN_BLOCKS": (1, 2, 3),
    },
    grid=lambda p, t: (p.query_tiles(t.BLOCK_M), p.H, p.batches),
    block=lambda t: (32 * t.WARPS, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    rank=lambda p, t: p.Dv > 128 and t.BLOCK_N > t.SUB_N,  # two steps per tile are measured for Dv <= 128 only
    args=("Q", "K", "V", "O", "LSE", "group", "score"),
)
