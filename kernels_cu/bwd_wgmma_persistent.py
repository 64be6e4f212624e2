"""Spec of `bwd_wgmma_persistent.cu`."""

from sandbox.spec import HOPPER_SMS, Arch, Entry, Kernel, Problem, Tile, cdiv, unsupported_by_wgmma, unsupported_unless


def smem_bytes(p: Problem, t: Tile) -> int:
    """K of two work tiles, V; stages of Q, dO, LSE and delta; dS; staging of dQ, dV, dK; mbarriers; work tiles."""
    staging = max(4 * t.BLOCK_M * cdiv(p.D, 16) * 16, t.BLOCK_N * 128)
    return 3 * t.BLOCK_N * 128 + t.STAGES * t.BLOCK_M * (2 * 128 + 8) + 4 * t.BLOCK_M * t.BLOCK_N + staging + 1024


def supports(p: Problem, arch: Arch | None) -> str | None:
    """Masks that are ranges."""
    if others := p.options - {"window", "key_lengths", "sink"}:
        return f"{', '.join(sorted(others))} is not supported: only causal, scale, window, key_lengths and sink are"
    if p.Dv > p.D:
        return f"Dv={p.Dv} with D={p.D} is not supported: Dv must not exceed D"
    return unsupported_by_wgmma(p, arch)


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """The only tile size of the kernel."""
    return unsupported_unless(t, BLOCK_M=128, BLOCK_N=128, STAGES=2)


def short(p: Problem) -> bool:
    """Where it is 1 … 20% faster than bwd_wgmma: short m_block ranges and more work tiles than blocks, for D <= 32 many
    more. With a last key (causal) a work tile has half of the query rows on average."""
    left, right = p.bounds
    if left is not None and right is not None:
        rows, max_rows = min(p.Sq, left + right + 128), 1024
    else:
        rows, max_rows = p.Sq if right is None else p.Sq // 2, 512
    work_tiles = p.B * p.Hk * cdiv(p.Sk, 128)
    return p.D <= 64 and p.H * rows <= p.Hk * max_rows and work_tiles >= (1.5 if p.D > 32 else 6) * HOPPER_SMS


def dQ_accum(p: Problem, t: Tile) -> tuple[int, int]:
    """The tile counter and the semaphores, which are zeroed; the accumulators. See include/dq_semaphore.cuh."""
    tiles = p.B * p.H * cdiv(p.Sq, t.BLOCK_M)
    counters = cdiv(4 + 2 * tiles, 32) * 32
    return counters + tiles * t.BLOCK_M * cdiv(p.D, 16) * 16, counters


kernel = Kernel(
    name="bwd_wgmma_persistent",
    test_share=10,
    computes="backward",
    rung=4,
    preference=2,
    summary="bwd_wgmma for narrow heads: persistent blocks with one mainloop over all work tiles",
    dtypes=("float16", "bfloat16"),
    max_D=64,
    min_arch=(9, 0),
    arch_suffix="a",
    deterministic=False,
    scratch={"dQ_accum": dQ_accum},
    default=True,
    first_for=short,
    tiles=(Tile(BLOCK_M=128, BLOCK_N=128, STAGES=2, BLOCKS=HOPPER_SMS),),
    grid=lambda p, t: (min(p.key_tiles(t.BLOCK_N) * p.Hk * p.B, t.BLOCKS), 1, 1),
    block=lambda t: (384, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    args=(
        *("Q", "K", "V", "dO", "LSE", "delta", "dQ_accum", "dK", "dV"),
        *("Q_tile_map", "dO_tile_map", "K_map", "V_map", "dK_map", "dV_map", "B", "Hk", "group", "score"),
    ),
    then=(
        Entry(
            name="bwd_wgmma_persistent_postprocess",
            grid=lambda p, t: (cdiv(p.Sq, t.BLOCK_M), p.H, p.B),
            block=lambda t: (256, 1, 1),
            smem_bytes=lambda p, t: 0,
            args=("Q", "K", "V", "dO", "LSE", "delta", "dQ_accum", "dQ", "group", "score"),
        ),
    ),
)
