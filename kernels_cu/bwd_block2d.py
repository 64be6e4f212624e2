"""Spec of `bwd_block2d.cu`."""

from sandbox.spec import Arch, Entry, Kernel, Problem, Tile, cdiv


def smem_bytes(p: Problem, t: Tile, own_rows: int, other_rows: int) -> int:
    """Q and dO, K and V, and P: fp32, rows padded by four words. `own_rows`: of the tile that the block keeps (keys;
    for bwd_block2d_dq queries); `other_rows`: of the tiles that it loops over."""
    step = 4 * t.THREADS_X
    pitches = cdiv(p.D, step) * step + cdiv(p.Dv, step) * step + 8
    return 4 * ((own_rows + other_rows) * pitches + own_rows * (other_rows + 4))


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """Limits of a tile: even division among the threads, registers without spills.

    There is no table of spilled registers: `compile --sweep` finds at most 84 bytes per thread, in 35 of 1,238
    variants, mostly with a mask or dropout, and the next tile has half of the scores.
    """
    X, Y, M, N = t.THREADS_X, t.THREADS_Y, t.BLOCK_M, t.BLOCK_N
    columns, columns_v = cdiv(p.D, 4 * X) * 4, cdiv(p.Dv, 4 * X) * 4
    owned = max(N // Y * (columns + columns_v + 2 * M // X), M // Y * (columns + 2 * N // X))
    rules = (
        (32 % X == 0, f"THREADS_X={X} must be a power of two up to 32: the threads of a row are lanes of one warp"),
        (X * Y % 32 == 0 and X * Y <= 1024, f"THREADS_X * THREADS_Y = {X * Y} must be a multiple of 32 up to 1024"),
        (M % Y == 0 and M % X == 0 and M % 4 == 0,
         f"BLOCK_M={M} must be a multiple of THREADS_X={X}, THREADS_Y={Y} and 4: all threads have equal shares"),
        (N % Y == 0 and N % X == 0 and N % 4 == 0,
         f"BLOCK_N={N} must be a multiple of THREADS_X={X}, THREADS_Y={Y} and 4: all threads have equal shares"),
        (owned < 160 or arch is None or not (p.dropout or p.score or ((p.bias or p.mask) and arch < (9, 0))),
         (f"{owned} registers per thread for gradients, S, dP spill with dropout or a Score, "
          "before sm_90 also with a bias or mask")),
        (owned + 80 <= 255 and X * Y * (owned + 80) <= 65536,
         (f"{X * Y} threads of {owned + 80} registers, {owned} for gradients, S, dP, are too many at {p.widths}: "
          "at most 255 each, 65536 in all")),
    )  # fmt: skip
    return next((reason for holds, reason in rules if not holds), None)


kernel = Kernel(
    name="bwd_block2d",
    computes="backward",
    rung=2,
    default=True,
    ragged=True,
    invariant_to=("runs", "entries", "batch", "heads", "ragged"),
    summary="a 2-D thread block per tile; each thread has a register tile of S, dP and the gradients",
    dtypes=("float32", "float16", "bfloat16"),
    min_arch=(7, 5),
    invariant_tile=lambda p: {},
    tiles=(
        Tile(BLOCK_M=64, BLOCK_N=64, THREADS_X=8, THREADS_Y=16),
        Tile(BLOCK_M=32, BLOCK_N=64, THREADS_X=8, THREADS_Y=16),
        Tile(BLOCK_M=32, BLOCK_N=32, THREADS_X=8, THREADS_Y=16),
        Tile(BLOCK_M=16, BLOCK_N=16, THREADS_X=8, THREADS_Y=16),
    ),
    grid=lambda p, t: (p.key_tiles(t.BLOCK_N), p.Hk, p.batches),
    block=lambda t: (t.THREADS_X, t.THREADS_Y, 1),
    smem_bytes=lambda p, t: smem_bytes(p, t, t.BLOCK_N, t.BLOCK_M),
    args=("dO", "Q", "K", "V", "LSE", "delta", "dK", "dV", "group", "score"),
    then=(
        Entry(
            name="bwd_block2d_dq",
            grid=lambda p, t: (p.query_tiles(t.BLOCK_M), p.H, p.batches),
            block=lambda t: (t.THREADS_X, t.THREADS_Y, 1),
            smem_bytes=lambda p, t: smem_bytes(p, t, t.BLOCK_M, t.BLOCK_N),
            args=("dO", "Q", "K", "V", "LSE", "delta", "dQ", "group", "score"),
        ),
    ),
    check_tile=check_tile,
)
