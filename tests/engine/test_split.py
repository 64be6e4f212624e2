"""fwd_wgmma_split: several blocks share the keys of a work tile, and heads of a group share a work tile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from project import skip_without_wgmma

from sandbox.core import registry
from sandbox.engine import choose
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Problem, Tile
from sandbox.verify import check
from sandbox.verify.cases import Case

KERNEL = registry.get("fwd_wgmma_split")
SPEC = KERNEL.rank.__globals__  # core/key_splits.py
FEW = Problem(2, 4, 37, 300, 64, Hk=2, dtype="float16", causal="bottom-right")  # packed: slots of 48 rows
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("normal", {}),
    ("normal", {"Hk": 4, "Sq": 200, "causal": "top-left"}),  # not packed; splits without visible keys for some rows
    ("normal", {"Hk": 4, "Sq": 260, "Sk": 270}),
    ("large", {"softcap": 30.0}),
    ("hidden", {"key_lengths": True}),  # some entries have fewer key tiles than splits
    ("hidden", {"key_lengths": True, "page_size": 16, "Sk": 304}),
    ("normal", {"D": 128, "Dv": 64, "Hk": 1}),
    ("normal", {"D": 256, "Dv": 256, "Hk": 1, "causal": False}),
    ("normal", {"H": 6, "Sq": 171, "causal": False}),  # packed: a head has several work tiles
    ("hidden", {"H": 6, "Sq": 150, "causal": False, "key_lengths": True, "page_size": 16, "Sk": 304}),
    ("normal", {"sink": True, "dropout": 0.2}),
    ("nan_query", {}),
)


@pytest.fixture(autouse=True)
def splits(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A split of 20 keys suffices, and waves of blocks cost much: as many splits as possible."""
    skip_without_wgmma(KERNEL, FEW, device)
    monkeypatch.setitem(SPEC, "LEAST_KEYS", 20)
    monkeypatch.setitem(SPEC, "wgmma_us", lambda p, t, splits=1, packed=False: -splits)
    SPEC["best_splits"].cache_clear()
    yield
    SPEC["best_splits"].cache_clear()


@pytest.mark.parametrize("blocks", [pytest.param(3, marks=pytest.mark.sampled(10)), 132])
@pytest.mark.parametrize(("inputs", "options"), CASES)
@pytest.mark.sampled(4)
def test_split_keys(inputs: str, options: dict[str, Any], blocks: int, device: Device) -> None:
    """More splits than key tiles, so some have none."""
    problem = dataclasses.replace(FEW, **options)
    tile = Tile(BLOCK_M=128, BLOCK_N=64 if problem.D > 128 else 128, STAGES=2, BLOCKS=blocks)
    if blocks == 132:
        assert KERNEL.numbers["splits"](problem, tile) > -(-problem.Sk // tile.BLOCK_N)
        assert KERNEL.defines(problem, tile)["SPLIT_KEYS"]
    result = check.verify(KERNEL, Case(inputs, problem, inputs), device, tile)
    assert result.ok, result


def test_rows_of_192() -> None:
    """Three consumers: rows of different heads in one of them."""
    problem = dataclasses.replace(FEW, H=6, Hk=1, Sq=20, D=128, Dv=128)
    tile = Tile(BLOCK_M=192, BLOCK_N=80, STAGES=2, BLOCKS=132)
    assert KERNEL.defines(problem, tile)["PACK_GQA"]
    result = check.verify(KERNEL, Case("normal", problem), HOST, tile)
    assert result.ok, result


CHOICES = {  # (B, H, Hk, Sq, Sk, D): kernel, BLOCK_M, splits
    (1, 64, 8, 16, 131072, 128): ("fwd_wgmma_split", 128, 12),  # 8 work tiles of 128 packed rows
    (1, 32, 8, 64, 8192, 128): ("fwd_wgmma_split", 128, 8),
    (152, 21, 3, 68, 68, 128): ("fwd_wgmma_split", 192, 1),  # three work tiles for seven heads
    (1, 8, 8, 1000, 20000, 128): ("fwd_wgmma_split", 128, 2),
    (16, 32, 8, 16, 4096, 128): ("fwd_decode_wgmma", 64, 0),
    (1, 64, 8, 4, 131072, 128): ("fwd_decode", 32, 0),
    (4, 16, 16, 4096, 4096, 128): ("fwd_wgmma", 192, 0),
    (1, 16, 16, 2048, 30000, 128): ("fwd_wgmma", 128, 0),  # 256 work tiles of 128 rows are two waves; 176 of 192, too
}


@pytest.mark.parametrize("shape", CHOICES)
def test_choices(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernel and how many splits fill the GPU."""
    monkeypatch.undo()
    SPEC["best_splits"].cache_clear()
    B, H, Hk, Sq, Sk, D = shape
    problem = Problem(B, H, Sq, Sk, D, Hk, dtype="bfloat16", causal="bottom-right")
    kernel = choose.choose_kernel(problem, "forward", (9, 0))
    tile = choose.choose_tile(kernel, problem, (9, 0))
    splits = kernel.numbers["splits"](problem, tile) if kernel.name == KERNEL.name else 0
    assert (kernel.name, tile.BLOCK_M, splits) == CHOICES[shape]
