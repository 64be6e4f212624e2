"""Spec of `bwd_wgmma_persistent.cu`."""

from sandbox.spec import Arch, Entry, Kernel, Problem, Tile, cdiv, unsupported_by_wgmma


def smem_bytes(p: Problem, t: Tile) -> int:
    """K of two pieces, V; stages of Q, dO, LSE and delta; dS; dQ, or gradients of keys; mbarriers and what is told."""
    shipped = max(4 * t.BLOCK_M * cdiv(p.D, 16) * 16, t.BLOCK_N * 128)
    return 3 * t.BLOCK_N * 128 + t.STAGES * t.BLOCK_M * (2 * 128 + 8) + 4 * t.BLOCK_M * t.BLOCK_N + shipped + 1024


def supports(p: Problem, arch: Arch | None) -> str | None:
    """What ranges tell of narrow heads."""
    if p.softcap or p.alibi or p.bias or p.mask or p.score or p.dropout or p.ragged:
        return "causality, windows, lengths and sinks alone are built (bwd_wgmma takes the other options)"
    if p.Dv > p.D:
        return f"Dv={p.Dv} beside D={p.D} is not built: v must not be wider than k (bwd_mma takes it)"
    return unsupported_by_wgmma(p, arch, "bwd_block2d")


ROUND = 132  # blocks that run at one time, one a multiprocessor


def short(p: Problem) -> bool:
    """Where it is faster, by 1 … 20%: pieces that see few query rows, of which there are more than blocks, of D <= 32
    many more. With a last key (causal) they see half of the rows on the mean."""
    left, right = p.bounds
    if left is not None and right is not None:
        rows, most = min(p.Sq, left + right + 128), 1024
    else:
        rows, most = p.Sq if right is None else p.Sq // 2, 512
    pieces = p.B * p.Hk * cdiv(p.Sk, 128)
    return p.D <= 64 and p.H * rows <= p.Hk * most and pieces >= (1.5 if p.D > 32 else 6) * ROUND


def dQ_accum(p: Problem, t: Tile) -> tuple[int, int]:
    """A counter of pieces, and the sums: all zeros."""
    numbers = 32 + p.B * p.H * cdiv(p.Sq, t.BLOCK_M) * t.BLOCK_M * cdiv(p.D, 16) * 16
    return numbers, numbers


kernel = Kernel(
    name="bwd_wgmma_persistent",
    computes="backward",
    rung=4,
    preference=2,
    summary="bwd_wgmma for narrow heads: blocks stay on their SM, and the tiles of one piece follow those of another",
    dtypes=("float16", "bfloat16"),
    max_D=64,
    min_arch=(9, 0),
    arch_suffix="a",
    deterministic=False,
    scratch={"dQ_accum": dQ_accum},
    default=True,
    first_for=short,
    tiles=(Tile(BLOCK_M=128, BLOCK_N=128, STAGES=2, BLOCKS=ROUND),),
    grid=lambda p, t: (min(p.key_tiles(t.BLOCK_N) * p.Hk * p.B, t.BLOCKS), 1, 1),
    block=lambda t: (384, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
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
