"""Keys in pages, and keys that several blocks share: fwd_decode, and what the engine knows for it."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from project import LOT

from sandbox.core import registry
from sandbox.core.errors import SpecError
from sandbox.engine import choose, pipeline
from sandbox.launch.dlpack import HOST, Device
from sandbox.reference import gather_pages
from sandbox.spec import Problem, Tile
from sandbox.verify import check, trial
from sandbox.verify.cases import Case, inputs_of
from sandbox.verify.pages import paged_problems

KERNEL = registry.get("fwd_decode")
PAGED = Problem(2, 4, 3, 160, 64, Hk=2, dtype="float16", causal="bottom-right", page_size=16, pages=25)


def right(case: Case, device: Device, tile: Tile | None = None) -> None:
    result = check.verify(KERNEL, case, device, tile)
    assert result.ok, f"SANDBOX_LOT={LOT}: {case.name}: {result}"


def test_pages_by_lot(device: Device) -> None:
    """Shuffled, NaN in all that does not count, and no page where the table need not name one."""
    every = [*paged_problems(KERNEL, LOT, 20)]
    for name, problem in random.Random(LOT).sample(every, 4) if device == HOST else every:
        right(Case(name, problem), device)


def test_pages_are_as_keys_in_a_row() -> None:
    """The same bits, whatever the pages' size."""
    found = []
    for page_size in (0, 16, 160):
        problem = dataclasses.replace(PAGED, page_size=page_size, pages=0, key_lengths=True)
        tile = choose.choose_tile(KERNEL, problem, None)
        found.append(trial.launch(KERNEL, tile, problem, inputs_of("forward", Case("pages", problem)), HOST).outputs)
    for outputs in found[1:]:
        assert all(outputs[name].tobytes() == found[0][name].tobytes() for name in ("O", "LSE"))


@pytest.mark.parametrize(("blocks", "splits"), [(1, 1), (3, 3), (40, 10)])
def test_splits(blocks: int, splits: int, device: Device) -> None:
    """One block, several, and as many as there is a round for each warp: of few keys the last ones get none."""
    tile = Tile(BLOCK_M=16, BLOCK_N=16, WARPS=4, STAGES=3, BLOCKS=blocks)
    problem = Problem(2, 8, 3, 600, 64, Hk=2, dtype="bfloat16")
    assert KERNEL.grid(problem, tile) == (splits, 2, 2)
    if splits == 1:  # NaN would have the rows computed again one by one where something is hidden: nothing is
        right(Case("splits", problem, "rising"), device, tile)
    else:
        window = (40, 0) if splits == 3 else (None, None)
        hidden = dataclasses.replace(problem, causal="bottom-right", key_lengths=True, sink=True, window=window)
        right(Case("splits", hidden, "hidden"), device, tile)


def test_splits_fill_the_multiprocessors() -> None:
    """As many blocks as there is room for, and no more than help; of many rows none is split."""
    (tile, *_) = KERNEL.tiles
    few, many = (Problem(B, 32, 1, 8192, 128, Hk=8, dtype="bfloat16") for B in (1, 128))
    alone, together = ((KERNEL.grid(p, tile), KERNEL.then[0].grid(p, tile)) for p in (few, many))
    assert 132 < np.prod(alone[0]) <= 2 * 132
    assert np.prod(together[0]) == 8 * 128
    assert all(alone[1])
    assert not all(together[1])


def test_a_tile_has_as_many_blocks_as_the_gpu_multiprocessors() -> None:
    """Of what the spec ships; a tile that somebody gave stays as it is."""
    problem = Problem(1, 4, 1, 4096, 128, dtype="float16")
    assert choose.choose_tile(KERNEL, problem, (8, 0), multiprocessors=108).BLOCKS == 108
    assert choose.choose_tile(KERNEL, problem, (8, 0), KERNEL.tiles[0], multiprocessors=108) == KERNEL.tiles[0]
    assert choose.choose_tile(KERNEL, problem, (8, 0)) == KERNEL.tiles[0]
    minimal = registry.get("fwd_minimal")
    assert choose.choose_tile(minimal, problem, (8, 0), multiprocessors=108) == minimal.tiles[0]
    assert pipeline.tile_on(HOST, KERNEL, problem) == choose.choose_tile(KERNEL, problem, None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"page_size": 24}, "multiple of 16"),
        ({"page_size": 64}, "whole pages"),
        ({"page_size": 16, "ragged": (4, 4), "lengths": ((4, 160),)}, "ragged"),
    ],
)
def test_pages_that_make_no_sense(fields: dict, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Problem(**{"B": 1, "H": 1, "Sq": 1, "Sk": 160, "D": 64, **fields})


def test_a_problem_in_pages_is_told_again() -> None:
    assert Problem.from_json(PAGED.as_json()) == PAGED
    assert PAGED.key_lengths
    assert not PAGED.plain
    assert "page_size=16" in str(PAGED)
    assert "fwd_decode" in str(registry.get("fwd_minimal").refuses(PAGED))


def test_gather_pages() -> None:
    pages = np.arange(4 * 16).reshape(4, 16, 1, 1).astype(np.float32)
    table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([20, 16], np.int32)
    found = gather_pages(pages, table, lengths)[:, 0, :, 0]
    assert found[0].tolist() == [*range(48, 64), 0, 1, 2, 3, *[0] * 12]
    assert found[1].tolist() == [*range(16, 32), *[0] * 16]
    with pytest.raises(ValueError, match=r"block_table\[1\]"):
        gather_pages(pages, table, lengths + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("Sk", [0, 1, 4097, 131072])
def test_long_keys(Sk: int) -> None:
    """Up to the longest that people ask for, in splits and in pages."""
    problem = Problem(1, 16, 2, Sk, 128, Hk=2, dtype="bfloat16", causal="bottom-right")
    right(Case("long", problem), ("cuda", 0))
    if Sk % 16 == 0:
        right(Case("long, in pages", dataclasses.replace(problem, page_size=16)), ("cuda", 0))
