"""fwd_decode_wgmma: few queries, many heads, persistent blocks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from project import skip_without_wgmma

import sandbox
from sandbox.core import registry
from sandbox.engine import choose
from sandbox.launch.dlpack import Device
from sandbox.spec import Problem, Tile
from sandbox.verify import check, trial
from sandbox.verify.cases import Case, inputs_of

KERNEL = registry.get("fwd_decode_wgmma")
FEW = Problem(3, 15, 4, 300, 72, Hk=3, Dv=40, dtype="float16", causal="bottom-right")  # 20 packed rows


@pytest.fixture(autouse=True)
def hopper(device: Device) -> None:
    skip_without_wgmma(KERNEL, FEW, device)


def tile_of(rows: int, blocks: int, stages: int = 2) -> Tile:
    return Tile(BLOCK_M=rows, BLOCK_N=64, STAGES=stages, BLOCKS=blocks, BLOCKS_PER_SM=1)


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("inputs", ["large", "hidden"])
@pytest.mark.sampled(3)
def test_results_do_not_depend_on_the_number_of_blocks(rows: int, inputs: str, device: Device) -> None:
    """18 work tiles with 16 rows per tile, otherwise nine: correct, and bit-equal for every number of blocks. NaN
    behind the mask must not reach the next work tile."""
    options = {"Dv": 72} if rows == 64 else {"key_lengths": inputs == "hidden", "sink": inputs == "large"}
    case = Case(inputs, dataclasses.replace(FEW, **options), inputs)
    given, found = inputs_of("forward", case), []
    for blocks, stages in ((1, 2), (4, 3), (18, 2)):
        tile = tile_of(rows, blocks, stages)
        assert KERNEL.grid(case.problem, tile)[0] == min(blocks, 18 if rows == 16 else 9) - (rows > 16 and blocks == 4)
        result = check.verify(KERNEL, case, device, tile)
        assert result.ok, f"{blocks} blocks: {result}"
        found.append(trial.launch(KERNEL, tile, case.problem, given, device).outputs)
    for outputs in found[1:]:
        assert all(outputs[name].tobytes() == found[0][name].tobytes() for name in ("O", "LSE"))


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_the_last_keys(rows: int, device: Device) -> None:
    """Key tiles of 64 whose last one has few and many keys: those that it lacks are masked."""
    for Sk in (65, 80, 100, 127):
        problem = Problem(1, 4, 1, Sk, 64, Hk=1, dtype="float16")
        result = check.verify(KERNEL, Case("last keys", problem), device, tile_of(rows, 1))
        assert result.ok, result


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_wide_heads(rows: int, device: Device) -> None:
    """O of more than 128 columns needs more shared memory than the two tiles of P."""
    for D, Dv, inputs in ((256, 256, "normal"), (136, 200, "large"), (256, 64, "large")):
        problem = Problem(2, 12, 4, 200, D, Hk=2, Dv=Dv, dtype="bfloat16", causal="bottom-right")  # 24 packed rows
        result = check.verify(KERNEL, Case("wide", problem, inputs), device, tile_of(rows, 2, 2))
        assert result.ok, f"{problem}: {result}"


def test_maxima_that_rise_along_the_mainloop() -> None:
    """Key tiles are visited in descending order: if scores grow towards the first key, each tile raises m."""
    rng = np.random.default_rng(0)
    shapes = ((1, 4, 5, 64), (1, 2, 400, 64), (1, 2, 400, 64))
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    k *= np.linspace(24, 1, 400, dtype=np.float16)[:, None]
    found = sandbox.attention_forward(q, k, v, kernel=KERNEL.name, tile=tile_of(16, 1))
    for x, y in zip(found, sandbox.reference.attention(q, k, v), strict=True):
        assert np.allclose(x, y, atol=4e-3)


def test_options_per_head_in_a_packed_tile(device: Device) -> None:
    """Slopes, sinks, bias and mask differ between the heads of a tile; some rows see no key."""
    shape = (FEW.B, FEW.H, FEW.Sq, FEW.Sk)
    bias, mask = {"bias": shape, "softcap": 9.0}, {"mask": shape, "window": (90, 0)}
    for options in ({"alibi": (FEW.H,), "sink": True}, bias, mask):
        problem = dataclasses.replace(FEW, **options)
        result = check.verify(KERNEL, Case("options", problem), device, tile_of(32, 2))
        assert result.ok, f"{problem}: {result}"


def test_nan_reaches_only_rows_that_see_it(device: Device) -> None:
    """NaN in K or V reaches no other head of the tile, and no row of the next work tile."""
    inputs = inputs_of("forward", Case("nan", FEW))
    inputs["V"][1, 2, 298] = np.nan  # the last two queries see it
    inputs["K"][2, 0, 299, 3] = np.nan  # the last query sees it
    found = trial.launch(KERNEL, tile_of(32, 1), FEW, inputs, device).outputs
    rows = np.isnan(found["O"].astype(np.float32)).any(axis=3)
    expected = np.zeros_like(rows)
    expected[1, 10:, 2:] = expected[2, :5, 3:] = True
    assert (rows == expected).all()
    assert (np.isnan(found["LSE"]) == (expected & (np.arange(3) == 2)[:, None, None])).all()


def test_selection_with_many_heads() -> None:
    """With 16 packed rows only if the work tiles are balanced; BLOCK_M as large as options permit; with 32 rows three
    stages if balanced. With D above 128 more than 16 rows, and enough work tiles for the number of rows."""
    of = lambda B, Sq, **options: Problem(B, 32, Sq, 8192, Hk=8, **{"D": 128, "dtype": "bfloat16", **options})  # noqa: E731
    found = [of(128, 1), of(16, 1), of(48, 8), of(16, 16), of(32, 16, causal="bottom-right"), of(64, 16, D=64),
             of(64, 8, softcap=9.0, window=(1000, 0)), of(64, 16, sink=True),
             of(6, 5, D=256), of(64, 8, D=136), of(13, 16, D=256)]  # fmt: skip
    tiles = [choose.choose_tile(KERNEL, p, (9, 0)) for p in found]
    assert [t.BLOCK_M for t in tiles] == [16, 16, 32, 64, 64, 64, 32, 32, 32, 32, 64]
    assert [t.STAGES for t in tiles] == [2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 2]
    left = [of(32, 1), of(48, 1), of(100, 1), of(8, 8), of(4, 16), of(8, 32), of(64, 8, key_lengths=True),
            of(5, 5, D=256), of(10, 16, D=256), of(128, 1, D=256), of(64, 8, bias=(1, 32, 8, 8192)),
            of(64, 1, dtype="float8_e4m3", page_size=16)]  # fmt: skip
    for problems, takes in ((found, True), (left, False)):
        for p in problems:
            assert (choose.choose_kernel(p, "forward", (9, 0)).name == KERNEL.name) is takes, p
    assert choose.choose_kernel(of(64, 64, causal="bottom-right"), "forward", (9, 0)).name == "fwd_wgmma_split"
    assert choose.choose_kernel(of(128, 1), "forward", (8, 0)).name == "fwd_decode"
