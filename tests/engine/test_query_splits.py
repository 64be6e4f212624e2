"""bwd_wgmma_stream_k: work tiles that do not fill a wave are split by queries."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from project import skip_without_wgmma

from sandbox.core import query_splits, registry
from sandbox.engine import choose
from sandbox.launch.dlpack import Device
from sandbox.spec import Problem, Tile
from sandbox.verify import check
from sandbox.verify.cases import Case

KERNEL = registry.get("bwd_wgmma_stream_k")
BASE = Problem(1, 3, 900, 300, 64, dtype="float16")
# Options of BASE, BLOCK_M, BLOCK_N, blocks; work tiles that are not split, work tiles and shares of a period, parts.
CASES: tuple[tuple[dict[str, Any], int, int, int, tuple[int, int, int], int], ...] = (
    ({}, 128, 128, 4, (8, 1, 4), 4),
    ({}, 64, 128, 5, (5, 4, 5), 8),
    ({"D": 128, "Dv": 128, "sink": True}, 64, 128, 7, (7, 2, 7), 8),
    ({"B": 2, "H": 6, "D": 128, "Dv": 128}, 64, 128, 13, (13, 5, 13), 17),  # two query heads per key/value head
    ({"B": 2, "D": 96, "Dv": 96, "Sk": 256}, 64, 128, 8, (8, 1, 2), 8),  # four periods
    ({"H": 1, "Hk": 1, "D": 192, "Dv": 128, "dtype": "bfloat16"}, 64, 128, 5, (0, 3, 5), 7),  # no full wave
    ({"D": 256, "Dv": 256, "Sk": 250}, 64, 64, 5, (10, 2, 5), 6),
    ({"H": 4, "Hk": 4, "Sq": 330}, 128, 128, 7, (7, 5, 7), 11),  # some parts have no m_block
    ({"Sq": 100}, 64, 128, 5, (9, 1, 1), 0),  # two m_blocks are not split
    ({"Sk": 256}, 64, 128, 3, (6, 1, 1), 0),  # no work tile is left
)


@pytest.fixture(autouse=True)
def supported(device: Device) -> None:
    skip_without_wgmma(KERNEL, BASE, device)


@pytest.mark.parametrize(("options", "queries", "keys", "blocks", "split", "parts"), CASES)
@pytest.mark.parametrize("inputs", ["normal", "large", "nan_query", "inf_value"])
@pytest.mark.sampled(8)
def test_last_wave_is_split(
    options: dict[str, Any],
    queries: int,
    keys: int,
    blocks: int,
    split: tuple[int, int, int],
    parts: int,
    inputs: str,
    device: Device,
) -> None:
    problem = dataclasses.replace(BASE, **options)
    tile = Tile(BLOCK_M=queries, BLOCK_N=keys, STAGES=2, BLOCKS=blocks)
    assert query_splits.split(problem, tile) == split
    assert query_splits.parts(problem, tile) == parts
    result = check.verify(KERNEL, Case(inputs, problem, inputs), device, tile)
    assert result.ok, result


@pytest.mark.parametrize(
    ("shape", "options", "chosen"),
    [
        ((4, 16, 4096, 4096, 128), {}, "bwd_wgmma_stream_k"),
        ((1, 1, 4096, 4096, 256), {"sink": True}, "bwd_wgmma_stream_k"),
        ((4, 8, 4096, 4096, 256), {}, "bwd_wgmma"),  # saves 2%
        ((1, 32, 16384, 16384, 64), {}, "bwd_wgmma_stream_k"),
        ((16, 16, 1024, 1024, 128), {}, "bwd_wgmma"),  # saves eight m_blocks of a work tile
        ((8, 32, 2048, 2048, 64), {}, "bwd_wgmma"),
        ((32, 32, 512, 512, 64), {}, "bwd_wgmma_persistent"),
        ((4, 16, 4096, 4096, 128), {"causal": "bottom-right"}, "bwd_wgmma"),
        ((4, 16, 4096, 4096, 128), {"softcap": 30.0}, "bwd_wgmma"),
        ((4, 16, 4096, 4096, 128), {"key_lengths": True}, "bwd_wgmma"),
        ((4, 32, 2048, 2048, 128), {"Hk": 8}, "bwd_wgmma"),  # 116 of 132 blocks have a work tile in the last wave
    ],
)
def test_choices(shape: tuple[int, ...], options: dict[str, Any], chosen: str) -> None:
    problem = Problem(*shape, dtype="float16", **options)
    assert choose.choose_kernel(problem, "backward", (9, 0)).name == chosen


def test_queries_must_see_all_keys() -> None:
    reason = KERNEL.why_unsupported(dataclasses.replace(BASE, causal="bottom-right", softcap=3.0), None)
    assert reason is not None
    assert "causal, softcap is not supported" in reason
