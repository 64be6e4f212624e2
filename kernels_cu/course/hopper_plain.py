"""Spec of `hopper_plain.cu`."""

from sandbox.spec import Arch, Kernel, Problem, Tile, cdiv, unsupported_by_wgmma


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, stages of K and V, and mbarriers; rows padded to multiples of 128 bytes."""
    return 128 * cdiv(p.D, 64) * (t.BLOCK_M + 2 * t.STAGES * t.BLOCK_N) + 1024


def supports(p: Problem, arch: Arch | None) -> str | None:
    """Why a problem is not supported, or None: no options but masks by position, and D = Dv of 64 or 128."""
    if not p.plain or p.D not in (64, 128):
        return f"{p} is not supported: the kernel is for D = Dv = 64 or 128 without options"
    return unsupported_by_wgmma(p, arch)


kernel = Kernel(
    name="hopper_plain",
    computes="forward",
    rung=4,
    summary="plain warpgroup MMA, fed by TMA: one producer thread, one consumer warpgroup, one stage",
    dtypes=("float16", "bfloat16"),
    min_arch=(9, 0),
    arch_suffix="a",
    tiles=(Tile(BLOCK_M=64, BLOCK_N=128, STAGES=1),),
    grid=lambda p, t: (cdiv(p.Sq, t.BLOCK_M), p.H, p.B),
    block=lambda t: (256, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    args=("Q", "K", "V", "O", "LSE", "Q_map", "K_map", "V_map", "H", "group", "score"),
    max_D=128,
)
