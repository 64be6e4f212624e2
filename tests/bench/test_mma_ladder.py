"""Experiment 004: every step of its ladder is right, and spills only where it says so."""

from __future__ import annotations

import random
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from project import ROOT, SEED

from sandbox.bench.rows import Row
from sandbox.bench.timing import Timing
from sandbox.core import registry
from sandbox.engine import choose, pipeline
from sandbox.launch import driver
from sandbox.launch.dlpack import Device
from sandbox.spec import Problem
from sandbox.verify import check
from sandbox.verify.cases import Case

FOLDER = ROOT / "experiments" / "004_mma_ladder"
sys.path.insert(0, str(FOLDER))  # where run.py finds steps.py
ladder = SimpleNamespace(**runpy.run_path(str(FOLDER / "run.py")))
sys.path.remove(str(FOLDER))
SPILLS = {("64 keys", 64), ("64 keys", 128), ("Q elsewhere", 128)}


@pytest.mark.parametrize("name", ladder.tiles(64))
def test_every_step_is_right(name: str, device: Device) -> None:
    """Ragged, causal, grouped heads, rows that see no key; NaN behind a mask is not among its promises."""
    for Sq, Sk, causal in ((77, 150, "bottom-right"), (150, 77, "bottom-right"), (150, 200, "top-left")):
        case = Case("ragged", Problem(1, 2, Sq, Sk, 64, Hk=1, dtype="float16", causal=causal), layout="bshd")
        result = check.verify(ladder.KERNEL, case, device, ladder.tiles(64)[name])
        assert result.ok, result


@pytest.mark.parametrize("name", ["plain", "swizzle", "split-Q", "32 rows a warp", "more registers"])
def test_wide_heads_without_mask(name: str, device: Device) -> None:
    """bfloat16, and large scores, of which the lazy maximum must not lose sight."""
    case = Case("wide", Problem(1, 1, 65, 300, 128, dtype="bfloat16"), inputs="large")
    result = check.verify(ladder.KERNEL, case, device, ladder.tiles(128)[name])
    assert result.ok, result


@pytest.mark.parametrize("D", ladder.WIDTHS)
def test_spills_only_where_said(D: int) -> None:
    """Without a GPU, of a third of the steps sampled: nobody launches the ladder's kernel but its experiment."""
    steps = ladder.tiles(D)
    if not driver.available():
        steps = {name: steps[name] for name in random.Random(f"{SEED} {D}").sample([*steps], len(steps) // 3)}
    with ThreadPoolExecutor() as pool:
        job = lambda tile: pipeline.compile(ladder.KERNEL, D=D, causal=True, arch="sm_90a", tile=tile).resources  # noqa: E731
        found = dict(zip(steps, pool.map(job, steps.values()), strict=True))
    assert {(name, D) for name, r in found.items() if r.spill_stores or r.spill_loads} <= SPILLS
    assert all(r.warnings == () for r in found.values())


@pytest.mark.parametrize("D", ladder.WIDTHS)
def test_the_top_is_fwd_mma(D: int) -> None:
    """The geometry that fwd_mma would be launched with; a change there is one here."""
    tile = choose.choose_tile(registry.get("fwd_mma"), Problem(1, 1, 1, 1, D, dtype="float16"), (9, 0))
    top = ladder.tiles(D)["more registers"]
    assert {name: top[name] for name in tile if name != "MIN_BLOCKS"} == {
        name: value for name, value in tile.items() if name != "MIN_BLOCKS"
    }


def test_tables() -> None:
    """A step twice as fast as the last that was timed is ×2.00, also where the one between changes nothing."""
    rows = []
    for p in ladder.PROBLEMS:
        for n, step in enumerate(ladder.LADDER):
            tile = ladder.tiles(p.D).get(step.name)
            seconds = p.flops / 2**n * 1e-12
            timing = Timing(seconds, seconds, seconds, 10, 0.0) if tile else None
            setting = {"device": "GPU", "cuda": "13.0", "ceiling_tflops": 700.0, "registers": 100 + n, "spills": 0}
            rows.append(Row(step.name, "fwd_ladder", p, bool(tile) or None, timing=timing, setting=setting).as_json())
    lines = {line.split("|")[2].strip(): line for line in ladder.ladder_table(rows).splitlines() if "|" in line}
    assert "| 4 | ×2.00 | 4 | ×2.00 | 102 / 102 |" in lines["swizzle"]
    assert "| 512 | ×2.00 | – | – |" in lines["sub-tiles"]
    assert "| 1.02e+03 | ×2.00 | 1.02e+03 | ×4.00 |" in lines["lazy maximum"]
    assert "| split-Q | ×1.30 | ×2.00 | ×2.00 | ×1.20 | ×2.00 | ×2.00 |" in ladder.gain_table(rows)
    assert "| split-Q | ×1.30 | – | – |" in ladder.gain_table([])
