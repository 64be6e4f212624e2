"""Resource usage of a tile, and the table of the command `compile`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from ..core.problem import Problem
from ..core.tile import Tile
from ..toolchain.arch import Occupancy
from ..toolchain.nvrtc import Resources
from ..verify.report import SLOW, WIDE, kib, registers, si_time, slow, table


@dataclass(frozen=True)
class Cost:
    """Resource usage of one tile of a kernel on `arch`. Without numbers, `message` has the reason: the kernel does not
    support the tile or the problem (`ok` is None), or the compilation failed (`ok` is False)."""

    kernel: str
    problem: Problem
    tile: Tile
    arch: str
    ok: bool | None
    resources: Resources | None = None
    smem_dynamic: int | None = None
    occupancy: Occupancy | None = None
    seconds: float | None = None
    cached: bool | None = None
    message: str = ""


def compiled_table(costs: Sequence[Cost], width: int) -> Table:
    """The table of `compile`: one line per tile, or two on a narrow screen."""
    caption = SLOW if any(slow(c.resources) for c in costs) else ""
    if width >= WIDE:
        numbers = ["regs", "smem", "blocks/SM", "occupancy", "compile"]
        shown = table("kernel", "problem", "arch", "tile", *numbers, "limited by", right=numbers, caption=caption)
        shown.columns[3].no_wrap = True  # so that it can be copied
    else:
        numbers = ["regs\nsmem", "blocks\nper SM", "compile"]
        last = "occupancy\nlimited by"
        shown = table("kernel, arch\nproblem", "tile", *numbers, last, right=numbers, caption=caption)
    for c in costs:
        r, o = c.resources, c.occupancy
        if r is None or o is None or c.smem_dynamic is None:
            continue
        regs, smem, blocks = registers(r), kib(c.smem_dynamic + r.smem_static), str(o.blocks_per_sm)
        variant, tile = c.problem.variant, str(c.tile)
        compiling, occupancy = "cached" if c.cached else si_time(c.seconds), f"{o.fraction:.0%}"
        if width >= WIDE:
            shown.add_row(c.kernel, variant, c.arch, tile, regs, smem, blocks, occupancy, compiling, o.limiter)
        else:
            what = Text.assemble(c.kernel, " ", c.arch, "\n", (variant, "dim"))
            memory = Text.assemble(regs, "\n", smem)
            shown.add_row(what, tile.replace(",", "\n"), memory, blocks, compiling, f"{occupancy}\n{o.limiter}")
    return shown
