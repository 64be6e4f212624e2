"""Spec of `bwd_wgmma_head.cu`."""

from sandbox.spec import HOPPER_SMS, Arch, Kernel, Problem, Tile, cdiv, unsupported_by_wgmma, unsupported_unless


def smem_bytes(p: Problem, t: Tile) -> int:
    """K, V; stages of Q, dO, LSE and delta; dS; dQ; mbarriers."""
    width = cdiv(p.D, 16) * 16
    return (
        2 * t.BLOCK_N * 128 + t.STAGES * t.BLOCK_M * (2 * 128 + 8) + 4 * t.BLOCK_M * t.BLOCK_N + 4 * 128 * width + 256
    )


def supports(p: Problem, arch: Arch | None) -> str | None:
    """Plain problems with narrow heads: `bwd_wgmma` is as fast or faster for all others."""
    if not p.plain or p.ragged:
        given = ", ".join(sorted(p.options)) or f"Dv={p.Dv} with D={p.D}"
        return f"{given} is not supported: only causal and scale are, and Dv must be D"
    if p.group * cdiv(p.Sq, 128) >= 2**16 or p.Sk > 128 * (2**14 - 1):
        return f"{p} is not supported: the loop counters overflow with so many query or key tiles"
    return unsupported_by_wgmma(p, arch)


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """The only tile size of the kernel."""
    return unsupported_unless(t, BLOCK_M=128, BLOCK_N=128, STAGES=2)


def short(p: Problem) -> bool:
    """One n_block per head. The GPU needs 8 … 16 us, less than the launch: two driver calls rather than four take 22 us
    rather than 32 (experiment 001). For D <= 32 the GPU time is 20% shorter, too (experiment 013).
    """
    return p.Hk == p.H and p.Sq == p.Sk <= 128 and p.B * p.H <= HOPPER_SMS


kernel = Kernel(
    name="bwd_wgmma_head",
    test_share=10,
    computes="backward",
    rung=4,
    invariant_to=("runs", "entries", "batch", "heads", "strides"),
    summary="bwd_wgmma for short sequences: one block per key/value head accumulates dQ in L2 and converts it",
    dtypes=("float16",),  # bfloat16 spills three registers per n_block
    max_D=64,
    min_arch=(9, 0),
    arch_suffix="a",
    scratch={"dQ_accum": lambda p, t: (p.B * p.H * cdiv(p.Sq, 128) * 128 * cdiv(p.D, 16) * 16, 0)},
    default=True,
    first_for=short,
    invariant_tile=lambda p: {},
    tiles=(Tile(BLOCK_M=128, BLOCK_N=128, STAGES=2),),
    grid=lambda p, t: (1, p.Hk, p.B),
    block=lambda t: (384, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    args=(
        *("Q", "K", "V", "dO", "LSE", "delta", "dQ_accum", "dQ", "dK", "dV"),
        *("Q_tile_map", "dO_tile_map", "K_map", "V_map", "dK_map", "dV_map", "group", "score"),
    ),
)
