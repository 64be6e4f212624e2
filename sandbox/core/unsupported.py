"""Restrictions that several kernels share: the message for the user, or None for a supported problem or tile."""

from __future__ import annotations

from .kernel import SM_SMEM, Arch
from .normalise import cdiv
from .problem import Problem
from .tile import Tile


def unsupported_by_cp_async(p: Problem) -> str | None:
    """Of kernels that copy rows 16 bytes at a time and fold the scale into the exponent."""
    multiple = 16 // p.key_itemsize
    for name, width in (("D", p.D), ("Dv", p.Dv)):
        if width % multiple:
            return (
                f"{name}={width} is not a multiple of {multiple}: cp.async and TMA copy 16 bytes at a time (pad {name} "
                f"with zeros to {cdiv(width, multiple) * multiple})"
            )
    if p.alignment < 16:
        return (
            f"rows aligned to {p.alignment} bytes are not supported: the kernel copies 16 bytes at a time "
            "(pass contiguous copies of q, k and v)"
        )
    if not 1e-20 < p.scale < 1e6:
        return f"scale={p.scale} is not supported: it must be between 1e-20 and 1e6"
    return None


def unsupported_by_wgmma(p: Problem, arch: Arch | None) -> str | None:
    """Of kernels with Hopper's warpgroup MMA, whose tensor maps also restrict strides."""
    if arch is not None and arch[0] != 9:
        return f"compute capability {arch[0]}.{arch[1]} is not supported: wgmma exists on 9.0 only"
    if reason := unsupported_by_cp_async(p):
        return reason
    if not p.mappable:
        return (
            "strides that are negative, or 0 in S, or gaps between pages are not supported by TMA (pass contiguous "
            "copies)"
        )
    if p.ragged and max(p.rows) > 2**30:
        return f"ragged={p.ragged} is not supported: q and k may have at most 2^30 rows each (split the batch)"
    if p.page_size % 8:
        return f"page_size={p.page_size} is not supported: TMA needs pages of a multiple of 8 keys"
    if p.pages * p.page_size > 2**30:
        return f"pages={p.pages} of {p.page_size} keys are not supported: the limit is 2^30 keys in all"
    if p.batches * p.H * p.query_tiles(64) >= 2**31:
        tiles = p.batches * p.H * p.query_tiles(64)
        return f"{p} is not supported: it has {tiles} tiles of 64 rows, the limit is 2^31 - 1 (split the batch)"
    return None


def mask_of(p: Problem) -> str:
    """The option that gives a problem its block map, as text."""
    return f"mask={p.mask}" if p.mask else "a Score with a mask"


def unsupported_by_sm(p: Problem, t: Tile, nbytes: int, sm_smem: int = SM_SMEM) -> str | None:
    """Of kernels for MIN_BLOCKS blocks of `nbytes` shared memory each per SM."""
    smem = t.MIN_BLOCKS * (nbytes + 1024)  # reserved
    if smem <= sm_smem:
        return None
    return f"MIN_BLOCKS={t.MIN_BLOCKS} needs {smem} bytes of shared memory per SM at {p.widths}: at most {sm_smem}"


def unsupported_unless(t: Tile, **only: int) -> str | None:
    """Of kernels that are written for one tile: `only` has its numbers. Others, such as BLOCKS, are free."""
    given = {name: t[name] for name in only}
    if given == only:
        return None
    return f"{Tile(**given)} is not supported: the kernel is written for one tile (use {Tile(**only)})"
