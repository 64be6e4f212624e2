"""Spec of `fwd_block2d.cu`."""

from sandbox.spec import ROW_INDEPENDENT, Arch, Kernel, Problem, Tile, cdiv


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """Limits of a tile: even division among the threads, registers without spills.

    There is no table of spilled registers: `compile --sweep` finds at most 20 bytes per thread, in 11 of 1,831
    variants, and the next tile has a quarter of the scores.
    """
    X, Y, M, N = t.THREADS_X, t.THREADS_Y, t.BLOCK_M, t.BLOCK_N
    o_cols = cdiv(p.Dv, 4 * X) * 4
    owned = M // Y * (N // X + o_cols)
    others = 124 if p.reads_elements else 64  # registers
    steps = [N >> i for i in range(8) if (N >> i) * o_cols * X <= N * (t.BLOCK_D + 4)]
    rules = (
        (32 % X == 0, f"THREADS_X={X} must be a power of two up to 32: the threads of a row are lanes of one warp"),
        (X * Y % 32 == 0 and X * Y <= 1024, f"THREADS_X * THREADS_Y = {X * Y} must be a multiple of 32 up to 1024"),
        (M % Y == 0, f"BLOCK_M={M} must be a multiple of THREADS_Y={Y}: all threads have the same number of rows"),
        (N % X == 0, f"BLOCK_N={N} must be a multiple of THREADS_X={X}: all threads have the same number of keys"),
        (t.BLOCK_D % (4 * X) == 0, f"BLOCK_D={t.BLOCK_D} must be a multiple of {4 * X}: 4 for each of THREADS_X={X}"),
        (N % 4 == 0 and N % Y == 0, f"BLOCK_N={N} must be a multiple of 4 and of THREADS_Y={Y}"),
        (steps and N % steps[0] == 0 and steps[0] % max(4, Y) == 0,
         (f"BLOCK_N={N} with BLOCK_D={t.BLOCK_D} is not supported at Dv={p.Dv}: V is loaded in steps of BLOCK_N / 2^i "
          f"keys that fit BLOCK_N * (BLOCK_D + 4) words, and a step must be a multiple of max(4, THREADS_Y={Y}) keys "
          "(use a larger BLOCK_D)")),
        (owned < 128 or not (p.score and p.score.changes and p.score.hides),
         f"{owned} registers for S and O per thread spill at Dv={p.Dv} with a Score that changes x and has a mask"),
        (owned + others <= 255 and X * Y * (owned + others) <= 65536,
         (f"{X * Y} threads of {owned + others} registers, {owned} for S and O, are too many at Dv={p.Dv}: "
          "at most 255 each, 65536 in all")),
    )  # fmt: skip
    return next((reason for holds, reason in rules if not holds), None)


def invariant_tile(p: Problem) -> dict[str, int]:
    """Keys of a tile, and the threads among which a row's keys are divided: of the first tile that fits."""
    fitting = next(t for t in kernel.tiles if not check_tile(p, t, None))
    return {"BLOCK_N": fitting.BLOCK_N, "THREADS_X": fitting.THREADS_X}


kernel = Kernel(
    name="fwd_block2d",
    computes="forward",
    rung=2,
    default=True,
    ragged=True,
    paged=True,
    float8_keys=True,
    invariant_to=ROW_INDEPENDENT,
    summary="a 2-D thread block per tile; each thread has a register tile of S and O",
    dtypes=("float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"),
    min_arch=(7, 5),
    tiles=(
        Tile(BLOCK_M=64, BLOCK_N=64, BLOCK_D=64, THREADS_X=8, THREADS_Y=16),
        Tile(BLOCK_M=32, BLOCK_N=32, BLOCK_D=64, THREADS_X=16, THREADS_Y=8),
    ),
    space={
        "BLOCK_M": (16, 32, 64, 128),
        "BLOCK_N": (32, 64, 128),
        "BLOCK_D": (32, 64, 128),
        "THREADS_X": (8, 16, 32),
        "THREADS_Y": (4, 8, 16),
    },
    grid=lambda p, t: (p.query_tiles(t.BLOCK_M), p.H, p.batches),
    block=lambda t: (t.THREADS_X, t.THREADS_Y, 1),
    # Q, P, and a step of K or V: fp32, rows padded by four words
    smem_bytes=lambda p, t: (
        4 * t.BLOCK_M * (cdiv(p.D, t.BLOCK_D) * t.BLOCK_D + t.BLOCK_N + 8) + 4 * t.BLOCK_N * (t.BLOCK_D + 4)
    ),
    check_tile=check_tile,
    invariant_tile=invariant_tile,
    args=("Q", "K", "V", "O", "LSE", "group", "score"),
)
