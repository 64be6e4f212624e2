"""fwd_wgmma_stream_k: all blocks share the work tiles that do not fill a wave (fwd_wgmma_fp8 does so, too:
test_kernels.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from project import skip_without_wgmma

from sandbox.core import registry
from sandbox.engine import choose
from sandbox.launch.dlpack import Device
from sandbox.spec import Problem, Tile
from sandbox.verify import bits, check
from sandbox.verify.cases import Case

KERNEL = registry.get("fwd_wgmma_stream_k")
BASE = Problem(1, 2, 500, 900, 64, dtype="float16")
# Options of BASE, BLOCK_M, BLOCK_N, blocks, work tiles, of which so many are whole.
CASES: tuple[tuple[dict[str, Any], int, int, int, int, int], ...] = (
    ({"Sk": 1500}, 192, 80, 4, 6, 4),
    ({"Sk": 1500, "D": 128, "Dv": 128}, 128, 80, 3, 8, 6),
    ({"H": 3, "Hk": 3, "Sq": 100, "D": 256, "Dv": 256}, 128, 64, 2, 3, 2),
    (
        {"B": 2, "H": 3, "Hk": 1, "Sq": 450, "Sk": 777, "D": 96, "Dv": 96},
        192,
        48,
        5,
        18,
        15,
    ),  # 66 rows in the last tile
    ({"H": 1, "Hk": 1, "Sq": 200}, 64, 64, 7, 4, 0),  # no full wave
    ({"H": 5, "Hk": 5, "Sq": 64, "Sk": 2100}, 64, 64, 4, 5, 4),  # four blocks share one work tile
    ({"H": 5, "Hk": 5, "Sq": 40, "D": 128, "Dv": 64, "dtype": "bfloat16"}, 64, 32, 4, 5, 4),
    ({"Sk": 1200, "sink": True}, 128, 64, 3, 8, 6),
    ({"Sk": 300}, 128, 64, 3, 8, 8),  # not worth it
)


@pytest.fixture(autouse=True)
def supported(device: Device) -> None:
    skip_without_wgmma(KERNEL, BASE, device)


@pytest.mark.parametrize(("options", "rows", "keys", "blocks", "count", "whole"), CASES)
@pytest.mark.parametrize("inputs", ["normal", "rising", "large", "nan_query"])
@pytest.mark.sampled(8)
def test_last_wave_is_split(
    options: dict[str, Any], rows: int, keys: int, blocks: int, count: int, whole: int, inputs: str, device: Device
) -> None:
    """Ranges of one work tile and of two, before, between and after those of other blocks."""
    problem, tile = dataclasses.replace(BASE, **options), Tile(BLOCK_M=rows, BLOCK_N=keys, STAGES=2, BLOCKS=blocks)
    assert problem.query_tiles(rows) * problem.B * problem.H == count
    assert KERNEL.numbers["full_wave_tiles"](problem, tile) == whole
    result = check.verify(KERNEL, Case(inputs, problem, inputs), device, tile)
    assert result.ok, result


@pytest.mark.parametrize("change", KERNEL.invariant_to)
def test_bits_of_split_work_tiles(change: str, device: Device) -> None:
    """A part of a work tile depends on its keys only, and parts are added in a fixed order."""
    base = bits.base_of(KERNEL, device, Tile(BLOCK_M=64, BLOCK_N=16, STAGES=2, BLOCKS=7), 1)
    assert KERNEL.numbers["full_wave_tiles"](base.problem, base.tile) % 7 == 0
    assert base.problem.query_tiles(64) * 8 % 7 > 0
    found = bits.compare(base, change, device)
    assert found.equal, found.detail


@pytest.mark.parametrize(
    ("shape", "options", "chosen"),
    [
        ((1, 8, 16384, 16384, 256), {}, "fwd_wgmma_stream_k"),
        ((4, 16, 4096, 4096, 128), {"sink": True}, "fwd_wgmma_stream_k"),
        ((4, 32, 4096, 4096, 64), {}, "fwd_wgmma_stream_k"),
        ((1, 32, 16384, 16384, 64), {}, "fwd_wgmma"),  # 112 of 132 blocks have a work tile in the last one of 21 waves
        ((8, 8, 2048, 2048, 256), {}, "fwd_wgmma"),  # saves six key tiles
        ((16, 16, 1024, 1024, 128), {}, "fwd_wgmma"),
        ((16, 256, 2, 4096, 256), {}, "fwd_decode"),
        ((2, 64, 512, 16384, 128), {}, "fwd_wgmma"),  # not timed
        ((8, 32, 2048, 2048, 64), {}, "fwd_wgmma"),  # 256 x 64 is faster
        ((1, 1, 16384, 16384, 128), {}, "fwd_wgmma"),  # 86 work tiles
        ((1, 8, 16384, 16384, 256), {"causal": "bottom-right"}, "fwd_wgmma"),
        ((4, 16, 4096, 4096, 128), {"softcap": 30.0}, "fwd_wgmma"),
        ((4, 16, 4096, 4096, 128), {"key_lengths": True}, "fwd_wgmma"),
        ((4, 16, 4096, 4096, 128), {"invariant": True}, "fwd_wgmma_invariant"),
    ],
)
def test_choices(shape: tuple[int, ...], options: dict[str, Any], chosen: str) -> None:
    problem = Problem(*shape, dtype="float16", **options)
    assert choose.choose_kernel(problem, "forward", (9, 0)).name == chosen


@pytest.mark.parametrize("numbers", [{"BLOCK_M": 256}, {"BLOCKS": 1200}])
def test_limits_of_a_tile(numbers: dict[str, int]) -> None:
    reason = KERNEL.why_tile_unsupported(BASE, Tile(**{**KERNEL.tiles[0], **numbers}))
    assert reason is not None
    assert reason.endswith("at most BLOCK_M=192 and BLOCKS=1024")


def test_work_tiles_must_see_all_keys() -> None:
    reason = KERNEL.why_unsupported(dataclasses.replace(BASE, causal="bottom-right"), None)
    assert reason is not None
    assert "all queries must see all keys" in reason
