"""Estimated times, splits of the keys, and the restrictions that several kernels share."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sandbox.core import estimates, key_splits, packed_gqa, unsupported
from sandbox.spec import Problem, Tile

P = Problem(2, 6, 100, 300, 64, Hk=3, dtype="float16")
TILE = Tile(BLOCK_M=128, BLOCK_N=128, BLOCKS=2)


def changed(**fields: Any) -> Problem:
    return dataclasses.replace(P, **fields)


# ---- estimates


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({}, 300),
        ({"causal": "bottom-right", "Sq": 128}, 300),
        ({"causal": "bottom-right", "Sq": 129}, 236),  # half of the queries' diagonal is hidden
        ({"causal": "bottom-right", "Sq": 300, "Sk": 100}, 16),  # 200 queries see no key
        ({"causal": "top-left", "Sq": 100}, 100),
        ({"causal": "top-left", "Sq": 200}, 100),
        ({"causal": "top-left", "Sq": 400}, 188),  # 100 queries see all keys
    ],
)
def test_keys_of_a_row(fields: dict[str, Any], keys: int) -> None:
    assert estimates.keys_of_row(changed(**fields)) == keys


def test_the_value_for_a_width() -> None:
    """The first width that is not exceeded by D or Dv."""
    values = {64: 1.0, 128: 2.0, 256: 3.0}
    found = [estimates.at_width(values, changed(D=D, Dv=Dv)) for D, Dv in ((64, 64), (65, 8), (64, 128), (128, 129))]
    assert found == [1.0, 2.0, 2.0, 3.0]


def test_estimated_times() -> None:
    """In µs. Reading: 2 bytes x 2 entries x 3 heads x 300 keys x 128 numbers, at 3.8 TB/s."""
    reading = 2 * 2 * 3 * 300 * 128 / 3.8e6
    assert estimates.reading_us(P) == pytest.approx(reading)
    # A tile of 128 rows and 384 keys: 256 x 384 x 128 operations at 3.8 TFLOP/s, and its overhead.
    tile = 256 * 384 * 128 / 3.8e6 + 1 + 3e-5 * 128 * 128
    assert estimates.wgmma_us(P, TILE) == pytest.approx(7.5 + 6 * tile)  # 12 tiles on 2 SMs
    split = 256 * 256 * 128 / 3.8e6 + 1 + 3e-5 * 128 * 128
    merging = 4.3 + 3e-6 * 2 * 6 * 100 * 2 * 64
    assert estimates.wgmma_us(P, TILE, 2) == pytest.approx(7.5 + 12 * split + merging)
    assert estimates.wgmma_us(P, TILE, packed=True) == pytest.approx(7.5 + 6 * tile)  # 224 rows of a group: 2 tiles
    fewer = changed(Sq=33)  # of a tile with one slab of 64 rows
    assert estimates.wgmma_us(fewer, TILE) == pytest.approx(7.5 + 6 * (tile - 64 * 384 * 128 / 3.8e6))
    packed = estimates.wgmma_us(fewer, TILE, packed=True)  # 2 x 48 rows of a group: 1 tile of 2 slabs
    assert packed == pytest.approx(7.5 + 3 * tile)
    many = dataclasses.replace(P, Sk=300_000)
    assert estimates.wgmma_us(many, Tile(BLOCK_M=128, BLOCK_N=128, BLOCKS=132)) == pytest.approx(
        7.5 + max(1000 * reading, (256 * 128 * 2344 * 128 / 3.8e6 + 1 + 3e-5 * 128 * 128))
    )
    assert estimates.decode_us(changed(Sq=16)) == pytest.approx(12 + reading)  # 32 rows of a group
    assert estimates.decode_us(changed(Sq=17)) == pytest.approx(12 + 2 * 0.85 * reading)


# ---- splits of the keys


@pytest.mark.parametrize(
    ("keys", "block", "ranges"),
    [
        (0, 128, 1), (1024, 128, 1), (1025, 128, 2), (8 * 1024, 128, 8), (8 * 1024 + 1, 128, 9), (10 * 1024, 128, 9),
        (10 * 1024 + 1, 128, 10), (12 * 1024, 128, 10),  # ranges after the eighth have 2048 keys
        (1040, 80, 1), (1041, 80, 2),  # 13 tiles of 80 keys are nearest to 1024
    ],
)  # fmt: skip
def test_ranges_of_keys(keys: int, block: int, ranges: int) -> None:
    tile = Tile(BLOCK_M=128, BLOCK_N=block, BLOCKS=132)
    assert key_splits.key_ranges(changed(Sk=keys), tile) == ranges
    ragged = changed(B=2, Sq=0, Sk=0, ragged=(9, keys))
    assert key_splits.key_ranges(ragged, tile) == ranges
    for other in ({"window": (3, None)}, {"alibi": (6,)}, {"mask": (1, 1, 100, max(keys, 2))}):
        assert key_splits.key_ranges(changed(Sk=max(keys, 2), **other), tile) == 1
    assert key_splits.key_ranges(changed(Sk=keys, window=(None, 3)), tile) == ranges


def test_blocks_and_floats_of_splits() -> None:
    assert packed_gqa.work_tiles(P, TILE) == 12
    assert key_splits.split_blocks(P, Tile(BLOCK_M=128, BLOCK_N=128, BLOCKS=60), 4) == 48
    assert key_splits.split_blocks(P, Tile(BLOCK_M=128, BLOCK_N=128, BLOCKS=40), 4) == 40
    assert key_splits.split_floats(P, 4) == 2 * 6 * 100 * 4 * (64 + 2)
    assert key_splits.split_floats(P, 2) == 2 * 6 * 100 * 2 * (64 + 2)
    assert key_splits.split_floats(P, 1) == 0


def test_keys_are_shared_if_work_tiles_are_few() -> None:
    tile = Tile(BLOCK_M=128, BLOCK_N=128, BLOCKS=132)
    few = Problem(1, 2, 128, 8192, 128, dtype="float16")
    assert key_splits.splits_by_range(few, tile) == 8
    assert key_splits.splits_by_range(dataclasses.replace(few, Sk=1024), tile) == 1
    assert key_splits.splits_by_range(dataclasses.replace(few, B=132), tile) == 1
    assert key_splits.splits_by_range(dataclasses.replace(few, ragged=(128, 8192)), tile) == 1


@pytest.mark.parametrize(
    ("fields", "packs", "tiles"),
    [
        ({"Sq": 1}, True, 6),  # 2 heads of 16 rows in one tile
        ({"Sq": 64}, True, 6),
        ({"Sq": 65}, False, 12),  # 160 rows: two tiles, as without packing
        ({"Sq": 1, "Hk": 6}, False, 12),
        ({"Sq": 1, "Dv": 32}, False, 12),
        ({"Sq": 1, "alibi": (6,)}, False, 12),
        ({"Sq": 0}, False, 0),
        ({"Sq": 128}, False, 12),
        ({"Sq": 129}, True, 18),  # 288 rows: three tiles instead of four
        ({"Sq": 129, "causal": "bottom-right"}, False, 24),
        ({"Sq": 129, "invariant": True}, False, 24),
        ({"Sq": 257}, False, 36),
    ],
    ids=str,
)
def test_heads_share_work_tiles(fields: dict[str, Any], packs: bool, tiles: int) -> None:
    assert packed_gqa.packs(changed(**fields), TILE) == packs
    assert packed_gqa.work_tiles(changed(**fields), TILE) == tiles


# ---- restrictions


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"D": 60}, "D=60 is not a multiple of 8: cp.async and TMA copy 16 bytes at a time (pad D with zeros to 64)"),
        (
            {"Dv": 71},
            "Dv=71 is not a multiple of 8: cp.async and TMA copy 16 bytes at a time (pad Dv with zeros to 72)",
        ),
        (
            {"dtype": "float8_e4m3", "D": 72},
            "D=72 is not a multiple of 16: cp.async and TMA copy 16 bytes at a time (pad D with zeros to 80)",
        ),
        (
            {"alignment": 8},
            (
                "rows aligned to 8 bytes are not supported: the kernel copies 16 bytes at a time "
                "(pass contiguous copies of q, k and v)"
            ),
        ),
        ({"scale": 1e6}, "scale=1000000.0 is not supported: it must be between 1e-20 and 1e6"),
        ({"scale": 1e-20}, "scale=1e-20 is not supported: it must be between 1e-20 and 1e6"),
        ({"scale": -1.0}, "scale=-1.0 is not supported: it must be between 1e-20 and 1e6"),
        (
            {"mappable": False},
            (
                "strides that are negative, or 0 in S, or gaps between pages are not supported by TMA (pass contiguous "
                "copies)"
            ),
        ),
        (
            {"ragged": (9, 2**30 + 1)},
            "ragged=(9, 1073741825) is not supported: q and k may have at most 2^30 rows each (split the batch)",
        ),
        ({"page_size": 20}, "page_size=20 is not supported: TMA needs pages of a multiple of 8 keys"),
        (
            {"page_size": 16, "pages": 2**26 + 1},
            "pages=67108865 of 16 keys are not supported: the limit is 2^30 keys in all",
        ),
    ],
    ids=str,
)
def test_problems_that_kernels_with_tma_refuse(fields: dict[str, Any], message: str) -> None:
    p = changed(**{"Sk": 320, **fields})
    assert unsupported.unsupported_by_wgmma(p, (9, 0)) == message
    of_tma = not fields.keys().isdisjoint({"mappable", "page_size", "ragged"})
    assert unsupported.unsupported_by_cp_async(p) == (None if of_tma else message)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"scale": 0.9e6}, {"scale": 1.1e-20}, {"D": 8, "Dv": 16}, {"dtype": "float8_e4m3", "D": 80, "Dv": 16},
        {"ragged": (2**30, 2**30)}, {"page_size": 8}, {"page_size": 16, "pages": 2**26},
        {"B": 1, "H": 255, "Hk": 1, "Sq": 2**29},
    ],
    ids=str,
)  # fmt: skip
def test_problems_that_kernels_with_tma_take(fields: dict[str, Any]) -> None:
    for arch in ((9, 0), None):
        assert unsupported.unsupported_by_wgmma(changed(**{"Sk": 320, **fields}), arch) is None


def test_other_restrictions() -> None:
    for arch, name in (((8, 9), "8.9"), ((10, 0), "10.0")):
        refused = f"compute capability {name} is not supported: wgmma exists on 9.0 only"
        assert unsupported.unsupported_by_wgmma(P, arch) == refused
    many = changed(B=1, H=256, Hk=1, Sq=2**29)
    assert unsupported.unsupported_by_wgmma(many, None) == (
        f"{many} is not supported: it has {2**31} tiles of 64 rows, the limit is 2^31 - 1 (split the batch)"
    )
    two = Tile(MIN_BLOCKS=2)
    assert unsupported.unsupported_by_sm(P, two, 1000, sm_smem=2 * 2024) is None
    assert unsupported.unsupported_by_sm(P, two, 1000, sm_smem=2 * 2024 - 1) == (
        "MIN_BLOCKS=2 needs 4048 bytes of shared memory per SM at D=64: at most 4047"
    )
    assert unsupported.mask_of(changed(mask=(1, 1, 100, 300))) == "mask=(1, 1, 100, 300)"
    assert unsupported.mask_of(P) == "a Score with a mask"
