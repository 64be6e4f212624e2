"""Spec of `bwd_ladder.cu`, and the steps to `bwd_wgmma`."""

from __future__ import annotations

from dataclasses import replace

from kernels_cu.bwd_wgmma import nondeterministic
from sandbox.bench.steps import Step
from sandbox.spec import Arch, Problem, Tile

OFF, ON = 1, 2
WIDTHS = (64, 128)

FIRST = Tile(BLOCK_M=64, BLOCK_N=128, STAGES=1, OVERLAP=OFF, PING_PONG=OFF)
LADDER = (
    Step("plain", "two consumers of 64 keys; an iteration waits for its products; one stage of Q and dO", (1.0, 1.0)),
    Step("two stages", "the next Q and dO load while the consumers compute", (1.15, 1.15), {"STAGES": 2}),
    Step("overlap", "dQ of a tile is computed one iteration later, with dV and dK", (1.1, 1.0), {"OVERLAP": ON}),
    Step("ping-pong", "the consumers alternate in computing P and dS", (1.05, 1.07), {"PING_PONG": ON}),
    Step("128 queries", "a tile has 128 query rows: half as many barriers", (1.05, 1.0), {"BLOCK_M": 128}),
)  # fmt: skip


def tiles(D: int) -> dict[str, Tile]:
    """{step: tile} at head width D, in order; at D = 128 a tile of 128 query rows exceeds the register file."""
    found, numbers = {}, dict(FIRST)
    for step in LADDER[: None if D == 64 else -1]:
        numbers |= step.numbers(D)
        found[step.name] = Tile(**numbers)
    return found


def supports(p: Problem, arch: Arch | None) -> str | None:
    """Why a problem is not supported, or None: no options but masks by position, and D = Dv of 64 or 128."""
    if not p.plain or p.ragged or p.D not in WIDTHS or p.Dv != p.D:
        return f"{p} is not supported: the kernel is for D = Dv = 64 or 128 without options; use bwd_wgmma"
    assert nondeterministic.supports
    return nondeterministic.supports(p, arch)


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """As `bwd_wgmma`, but without OVERLAP a consumer releases Q in the same iteration, so one stage suffices."""
    assert nondeterministic.check_tile
    stages = max(t.STAGES, 2) if t.OVERLAP == OFF else t.STAGES
    return nondeterministic.check_tile(p, Tile(**dict(t) | {"STAGES": stages}), arch)


scheduler, postprocess = nondeterministic.then
kernel = replace(
    nondeterministic,
    name="bwd_ladder",
    summary="bwd_wgmma with its ideas as switches",
    default=False,
    ragged=False,
    supports=supports,
    check_tile=check_tile,
    rank=lambda p, t: 0,
    tiles=tuple(dict.fromkeys(tile for D in WIDTHS for tile in reversed(tiles(D).values()))),
    then=(replace(scheduler, name="bwd_ladder_scheduler"), replace(postprocess, name="bwd_ladder_postprocess")),
)
