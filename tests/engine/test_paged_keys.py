"""Paged keys and split-KV: fwd_decode, and the engine's support for it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from project import ROOT, SEED

import sandbox
from sandbox.core import registry
from sandbox.core.errors import SpecError, UnsupportedProblem
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
    assert result.ok, f"SANDBOX_SEED={SEED}: {case.name}: {result}"


def test_pages_sampled(device: Device) -> None:
    """Shuffled pages, with NaN in all rows beyond the key length and invalid table entries for unused pages."""
    every = [*paged_problems(KERNEL, SEED, 20)]
    for name, problem in random.Random(SEED).sample(every, 4) if device == HOST else every:
        right(Case(name, problem), device)


def test_pages_are_as_keys_in_a_row() -> None:
    """The same bits for every page size."""
    found = []
    for page_size in (0, 16, 160):
        problem = dataclasses.replace(PAGED, page_size=page_size, pages=0, key_lengths=True)
        tile = choose.choose_tile(KERNEL, problem, None)
        found.append(trial.launch(KERNEL, tile, problem, inputs_of("forward", Case("pages", problem)), HOST).outputs)
    for outputs in found[1:]:
        assert all(outputs[name].tobytes() == found[0][name].tobytes() for name in ("O", "LSE"))


@pytest.mark.parametrize(
    ("blocks", "cluster", "Sk", "splits"),
    [(1, 1, 600, 1), (4, 1, 600, 4), (20, 1, 600, 5), (2, 2, 900, 1), (6, 2, 900, 2)],
)
@pytest.mark.sampled(2)
def test_splits(blocks: int, cluster: int, Sk: int, splits: int, device: Device) -> None:
    """One block, several, and as many as there is a round for each warp: of few keys the last ones get none. A cluster,
    and two."""
    tile = Tile(BLOCK_M=16, BLOCK_N=16, WARPS=4, STAGES=3, BLOCKS=blocks, CLUSTER=cluster)
    problem = Problem(2, 8, 3, Sk, 64, Hk=2, dtype="bfloat16")
    assert KERNEL.grid(problem, tile) == (cluster, 2, 2 * splits)
    if splits == 1:  # NaN would have the rows computed again one by one where something is hidden: nothing is
        right(Case("splits", problem, "rising"), device, tile)
    else:
        right(Case("splits", problem), device, tile)
        window = (40, 0) if splits == 4 else (None, None)
        hidden = dataclasses.replace(problem, causal="bottom-right", key_lengths=True, sink=True, window=window)
        right(Case("splits", hidden, "hidden"), device, tile)


def by_lengths(lengths: np.ndarray, Sq: int, blocks: int, cluster: int = 1, **options: Any) -> tuple[Any, ...]:
    """The results with these key lengths and number of blocks, and the reference."""
    rng, most = np.random.default_rng(0), int(lengths.max(initial=1))
    shapes = ((4, Sq), (2, most), (2, most))
    q, k, v = (rng.standard_normal((len(lengths), *shape, 64)).astype(np.float16) for shape in shapes)
    longest = int(lengths.argmax())
    v[:, :, most - 1 :, 0] = np.nan  # beyond what the others have
    v[longest, :, most - 1, 0] = np.inf
    options = {"key_lengths": lengths.astype(np.int32), **options}
    tile = Tile(BLOCK_M=16, BLOCK_N=16, WARPS=2, STAGES=2, BLOCKS=blocks, CLUSTER=cluster)
    found = sandbox.attention_forward(q, k, v, kernel="fwd_decode", tile=tile, **options)
    return *found, *sandbox.reference.attention(q, k, v, **options)


LENGTHS = {
    "any": np.random.default_rng(0).integers(0, 300, 40),  # more entries than a warp has lanes
    "one": np.array([3, 1, 0, 1, 2300, 2, 1, 0]),
    "none": np.array([0, 0, 0]),
    "last": np.array([*[0] * 33, 700]),
    "alone": np.array([1000]),
    "cut often": np.array([*[3] * 40, 6000]),  # several heads per combine block, which merges many splits of each
}
LENGTHS["any"][[0, 33, 39]] = 0, 0, 300


@pytest.mark.parametrize(("blocks", "cluster"), [(1, 1), (7, 1), (264, 1), (7, 4)])
@pytest.mark.parametrize("of", LENGTHS)
@pytest.mark.sampled(3)
def test_blocks_are_assigned_by_lengths(of: str, blocks: int, cluster: int) -> None:
    """Each batch entry has the result it has alone: with no keys, or with many keys among entries with few; with more
    blocks than needed, and with fewer. Clusters are not assigned by length: each entry has the same number."""
    out, lse, expected, expected_lse = by_lengths(LENGTHS[of], 3, blocks, cluster)
    assert np.allclose(out, expected, atol=2e-3)
    assert np.allclose(lse, expected_lse, atol=1e-3)


SEVENTY = {  # number of keys of batch entries 0 ... 31, 32 ... 63 and 64 ... 69
    "rising": [1] * 32 + [90] * 32 + [260] * 6,
    "falling": [260] * 32 + [40] * 32 + [1] * 6,
    "few, then many": [0] * 64 + [260] * 6,
    "none in the middle": [90] * 32 + [0] * 32 + [260] * 6,
}


@pytest.mark.parametrize("blocks", [1, 7])
@pytest.mark.parametrize("of", SEVENTY)
@pytest.mark.sampled(2)
def test_blocks_check_seventy_entries(of: str, blocks: int, device: Device) -> None:
    """A warp assigns blocks to 32 batch entries at a time: every group of 32 counts, also the last one, which is not
    full. A row without a block stays NaN, as outputs and scratch are before the launch. Six heads: two blocks of the
    combine kernel, with three each."""
    problem = Problem(70, 6, 1, 260, 64, Hk=2, dtype="float16", key_lengths=True)
    for tile in (
        Tile(BLOCK_M=16, BLOCK_N=16, WARPS=2, STAGES=2, BLOCKS=blocks, CLUSTER=1),
        Tile(BLOCK_M=32, BLOCK_N=16, WARPS=2, STAGES=3, BLOCKS=blocks, CLUSTER=1),  # O leaves room for one early tile
    ):
        check_seventy_entries(of, tile, problem, device)


def check_seventy_entries(of: str, tile: Tile, problem: Problem, device: Device) -> None:
    inputs = inputs_of("forward", Case("lengths", problem))
    inputs["key_lengths"] = np.array(SEVENTY[of], np.int32)
    found = trial.launch(KERNEL, tile, problem, inputs, device).outputs
    O, LSE = sandbox.reference.attention(*(inputs[name] for name in "QKV"), key_lengths=inputs["key_lengths"])
    assert np.allclose(found["O"].astype(np.float32), O, atol=4e-3)
    assert np.allclose(found["LSE"], LSE, atol=1e-3)


@pytest.mark.parametrize("options", [{"window": (60, 0)}, {"causal": True}], ids=["window", "causal"])
def test_query_tiles_are_assigned(options: dict) -> None:
    """Several query tiles per key/value head, none of which sees all keys."""
    out, lse, expected, expected_lse = by_lengths(np.array([150, 0, 331, 7]), 21, 7, **options)
    assert np.allclose(out, expected, atol=2e-3)
    assert np.allclose(lse, expected_lse, atol=1e-3)


@pytest.mark.parametrize("of", ["splits", "lengths", "pages"])
def test_float8(of: str, device: Device) -> None:
    """V is converted to half, with its columns in memory order; descale per head, and split keys."""
    dtype, other = ("float8_e4m3", "float8_e5m2")[:: 1 if of == "pages" else -1]
    descale = ((2, 4), (2, 2), (1, 2)) if of in ("splits", "pages") else (1.0, 0.5, 2.0)
    problem = Problem(2, 4, 5, 352, 96, Hk=2, dtype=dtype, descale=descale, causal="bottom-right")
    problem = dataclasses.replace(problem, **{
        "splits": {"v_dtype": other, "Dv": 48},
        "lengths": {"key_lengths": True, "out_dtype": "float32"},
        "pages": {"page_size": 16},
    }[of])  # fmt: skip
    right(Case(of, problem, "hidden" if of == "splits" else "normal"), device)


@pytest.mark.parametrize("name", ["fwd_decode", "fwd_mma"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.sampled(10)
def test_float8_pages(name: str, page_size: int, ragged: bool, device: Device) -> None:
    """float8 pages with 16-bit queries: tiles in one page and in several, one query and many, descale per head; D is
    not a multiple of an MMA step, and V has other columns."""
    first = page_size == 16
    dtypes = {"dtype": ("float16", "bfloat16")[ragged], "kv_dtype": ("float8_e4m3", "float8_e5m2")[first]}
    sizes = {"lengths": ((1, 70), (40, 41), (0, 3))} if ragged else {"B": 2, "Sq": 5, "Sk": 192}
    problem = Problem(**{"B": 3, "H": 4, "Hk": 2, "Sq": 0, "Sk": 0, "D": 80, "Dv": 48, **dtypes, **sizes},
                      page_size=page_size, causal="bottom-right")  # fmt: skip
    problem = dataclasses.replace(problem, descale=(1.0, (problem.B, 2), (1, 2)))
    result = check.verify(registry.get(name), Case("float8 pages", problem), device)
    assert result.ok, f"{problem}: {result}"


@pytest.mark.parametrize(
    ("page_size", "keys", "fits"),
    [(0, 64, True), (64, 64, True), (1, 16, True), (16, 32, True), (48, 32, True), (20, 32, False), (16, 48, False),
     (16, 64, False), (32, 64, False)],
)  # fmt: skip
def test_tiles_that_fit_pages(page_size: int, keys: int, fits: bool) -> None:
    """One page, two halves in two, or 16 keys of which each has an address."""
    tile = Tile(BLOCK_M=16, BLOCK_N=keys, WARPS=4, STAGES=2, BLOCKS=132, CLUSTER=1)
    problem = Problem(1, 2, 1, 960, 64, dtype="float16", page_size=page_size)
    reason = KERNEL.why_tile_unsupported(problem, tile, (9, 0))
    wanted = f"BLOCK_N={keys} must divide page_size={page_size}, or be 16, or 32 in pages of a multiple of 16"
    assert reason is None if fits else wanted in (reason or "")


def test_each_warp_combines_as_many_rows() -> None:
    tile = Tile(BLOCK_M=8, BLOCK_N=16, WARPS=16, STAGES=2, BLOCKS=132, CLUSTER=1)
    reason = KERNEL.why_tile_unsupported(Problem(1, 2, 1, 960, 64, dtype="float16"), tile, (9, 0))
    assert "WARPS=16 must divide BLOCK_M=8" in (reason or "")


@pytest.mark.parametrize("keys", [16, 32])
def test_pages_are_read_ahead(keys: int) -> None:
    """A warp reads the pages of 32 of its tiles together: three times here, in two entries of one block."""
    Sk, kv = 2 * keys * (2 * 32 + 10), np.float16 if keys == 16 else ml_dtypes.float8_e4m3fn
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 2, 1, 128)).astype(np.float16)
    k, v = (rng.standard_normal((2 * Sk // 16, 16, 2, 128)).astype(kv) for _ in range(2))
    table, lengths = rng.permutation(2 * Sk // 16).reshape(2, -1).astype(np.int32), np.array([Sk, Sk - 5], np.int32)
    tile = Tile(BLOCK_M=8, BLOCK_N=keys, WARPS=2, STAGES=4, BLOCKS=1, CLUSTER=1)
    options = {} if keys == 16 else {"descale": (1.0, 1.0, 1.0)}
    out = sandbox.attention_paged(q, k, v, table, lengths, kernel="fwd_decode", tile=tile, **options)
    rows = [gather_pages(x.astype(np.float32), table, lengths) for x in (k, v)]
    O, _ = sandbox.reference.attention(q.astype(np.float32), *rows, key_lengths=lengths)
    assert np.allclose(out.astype(np.float32), O, atol=4e-3)


@pytest.mark.parametrize(("page_size", "blocks", "D"), [(16, 1, 128), (48, 2, 128), (64, 1, 128), (16, 3, 112)])
@pytest.mark.sampled(2)
def test_float8_pages_by_tma(page_size: int, blocks: int, D: int, device: Device) -> None:
    """The same bits as by cp.async: boxes of a whole tile and of half a tile; blocks with several entries, with a part
    of one, and with more tiles than a warp reads ahead. Rows beyond an entry's keys are NaN; if they arrived, the
    fallback would compute all rows again, with other bits."""
    tile = Tile(BLOCK_M=32, BLOCK_N=32, WARPS=8, STAGES=3, BLOCKS=blocks, CLUSTER=1)
    problem = Problem(
        3, 8, 4, 192 * 62, D, Hk=1, dtype="bfloat16", kv_dtype="float8_e4m3", causal="bottom-right",
        page_size=page_size,
    )  # fmt: skip
    by_cp_async = dataclasses.replace(problem, mappable=False)
    assert KERNEL.defines(problem, tile)["TMA"] == 1
    assert "TMA" not in KERNEL.defines(by_cp_async, tile)
    assert KERNEL.why_tile_unsupported(problem, tile, (8, 9)) is not None
    case = Case("tma", problem)
    right(case, device, tile)
    inputs = inputs_of("forward", case)
    found, wanted = (trial.launch(KERNEL, tile, p, inputs, device).outputs for p in (problem, by_cp_async))
    assert all(np.array_equal(found[name], wanted[name], equal_nan=True) for name in ("O", "LSE"))


@pytest.mark.parametrize(("page_size", "cluster"), [(16, 1), (48, 2)])
def test_tiles_in_two_pages(page_size: int, cluster: int, device: Device) -> None:
    """Tiles of 32 keys whose halves are in different pages; the table has no page for the second half of the last."""
    tile = Tile(BLOCK_M=16, BLOCK_N=32, WARPS=4, STAGES=2, BLOCKS=132, CLUSTER=cluster)
    for dtypes in ({"dtype": "bfloat16", "kv_dtype": "float8_e4m3"}, {"dtype": "float16"}):
        right(Case("two pages", Problem(3, 8, 2, 144, 128, Hk=2, page_size=page_size, **dtypes)), device, tile)


HOPPER = (
    {"B": 2, "Sq": 5, "Sk": 160, "D": 64, "page_size": 16, "pages": 25},
    {"B": 2, "Sq": 140, "Sk": 384, "D": 128, "page_size": 32, "pages": 30, "causal": False},
    {"B": 2, "Sq": 140, "Sk": 512, "D": 64, "page_size": 256, "Hk": 4},
    {"D": 64, "page_size": 16, "lengths": ((150, 150), (2, 1), (1, 300), (0, 33))},
    {"D": 128, "page_size": 64, "lengths": ((70, 95), (1, 130), (200, 200)), "window": (40, 0)},
    {"D": 128, "page_size": 128, "lengths": ((1, 0), (40, 95), (3, 140)) * 12, "causal": False, "softcap": 3.0},
    {"D": 256, "page_size": 8, "lengths": ((70, 95), (1, 130), (200, 200))},
    {"D": 80, "Dv": 48, "page_size": 24, "lengths": ((70, 95), (9, 50))},
)


@pytest.mark.parametrize("fields", HOPPER, ids=lambda fields: f"{fields['page_size']}-D{fields['D']}")
@pytest.mark.sampled(6)
def test_boxes_of_pages(fields: dict[str, Any], device: Device) -> None:
    """fwd_wgmma: boxes smaller than a page and as large, of dense and ragged queries, of more sequences than a warp has
    lanes. Rows beyond a sequence's keys are NaN: they must not arrive, or the fallback would compute all rows again."""
    dtype = ("float16", "bfloat16")[HOPPER.index(fields) % 2]
    problem = Problem(**{"B": 0, "H": 4, "Hk": 2, "Sq": 0, "Sk": 0, "dtype": dtype, "causal": "bottom-right", **fields})
    kernel = registry.get("fwd_wgmma")
    result = check.verify(kernel, Case("boxes of pages", problem), device)
    assert result.ok, f"{problem}: {result}"


def test_a_bias_that_tma_loads_with_pages(device: Device) -> None:
    """One lane loads the bias tile, while all lanes load pages."""
    problem = Problem(
        2, 4, 150, 160, 64, Hk=2, dtype="float16", causal="bottom-right", page_size=16, bias=(1, 4, 150, 160)
    )
    assert problem.bias_tiles
    result = check.verify(registry.get("fwd_wgmma"), Case("bias", problem), device)
    assert result.ok, result


def mixed(draw: random.Random, **fields: Any) -> Problem:
    """A step of an inference server: single tokens, some sequences with a few more, and chunks of prompts, shuffled."""
    H, Hk = draw.choice(((8, 2), (4, 4), (16, 2)))
    most = max(16 // (H // Hk), 1)  # queries of a short sequence
    queries = [1] * draw.randint(0, 40) + [0, most, most + 1] + [draw.randint(most + 1, 150) for _ in "ab"]
    draw.shuffle(queries)
    lengths = tuple((n, draw.choice((n, n + draw.randint(0, 300), draw.randint(0, 40)))) for n in queries)
    problem = Problem(0, H, 0, 0, 64, Hk=Hk, lengths=lengths, causal="bottom-right", **fields)
    return dataclasses.replace(problem, alibi=(problem.B, H)) if fields["dtype"] == "float16" else problem


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("fwd_wgmma", {"dtype": "bfloat16", "page_size": 16}),
        ("fwd_wgmma", {"dtype": "float16", "page_size": 32, "window": (60, 0), "sink": True, "softcap": 3.0}),
        ("fwd_mma", {"dtype": "bfloat16", "page_size": 1, "kv_dtype": "float8_e4m3"}),
        ("fwd_mma", {"dtype": "float16", "page_size": 48}),
        ("fwd_mma_fp8", {"dtype": "float8_e4m3", "page_size": 32, "descale": (1.0, 0.5, 2.0)}),
    ],
)
@pytest.mark.sampled(8)
def test_long_and_short_sequences(name: str, fields: dict[str, Any], device: Device) -> None:
    """Sampled batches have the results of their sequences alone. Two kernels share the rows: outputs are NaN before the
    launch, and partial results of split keys are used by some batches."""
    draw, kernel = random.Random(f"{SEED} {name} {fields}"), registry.get(name)
    for _ in range(1 if device == HOST else 12):
        problem = mixed(draw, **fields)
        tile = pipeline.tile_on(device, kernel, problem)
        own = pipeline.parts(kernel, tile, problem, device)
        assert [(part.kernel.name, part.problem.part) for part in own] == [(name, "long"), ("fwd_decode", "short")]
        result = check.verify(kernel, Case("long and short sequences", problem), device)
        assert result.ok, f"SANDBOX_SEED={SEED}: {problem}: {result}"


def test_partial_results_of_short_sequences(device: Device) -> None:
    """Sequences of which all, some and no keys are split, beside those of the other kernel, with more and with fewer
    blocks than sequences."""
    lengths = ((1, 2000), (70, 90), (1, 3), (2, 1000), (0, 50), (4, 4), (1, 0), (5, 700)) * 2
    problem = Problem(0, 8, 0, 0, 64, Hk=2, dtype="float16", lengths=lengths, page_size=16, causal="bottom-right")
    short = dataclasses.replace(problem, part="short")
    for blocks in (1, 7, 40):
        tile = Tile(BLOCK_M=16, BLOCK_N=16, WARPS=2, STAGES=2, BLOCKS=blocks, CLUSTER=1)
        given = inputs_of("forward", Case("short", short))
        found = trial.launch(KERNEL, tile, short, given, device).outputs
        alone = trial.launch(KERNEL, tile, problem, given, device).outputs
        row = 0
        for queries, _ in lengths:
            rows = slice(row, row := row + queries)
            if queries <= short.short_queries:
                assert np.allclose(found["O"][:, :, rows], alone["O"][:, :, rows], atol=2e-3)
                assert np.allclose(found["LSE"][:, :, rows], alone["LSE"][:, :, rows], atol=1e-3)
            else:  # of the other kernel
                assert np.isnan(found["LSE"][:, :, rows]).all()


def test_two_kernels_where_sequences_may_be_short_and_long() -> None:
    """One if all are short, or all queries are few, or pages or offsets are missing. The second one overlaps the first
    and needs its own scratch."""
    both = Problem(0, 8, 0, 0, 64, Hk=2, dtype="float16", lengths=((100, 200), (1, 4000)), page_size=16)
    dense, tokens = dataclasses.replace(both, lengths=(), ragged=()), dataclasses.replace(both, lengths=((4, 9),) * 2)
    ragged = dataclasses.replace(both, page_size=0, pages=0, key_lengths=False, ragged=())
    for name in ("fwd_wgmma", "fwd_mma", "fwd_decode", "fwd_block2d"):
        kernel, found = registry.get(name), []
        for problem in (both, dense, tokens, ragged):
            tile = pipeline.tile_on(HOST, kernel, problem)
            own = pipeline.parts(kernel, tile, problem, HOST)
            found.append(len(own))
            assert ("partials" in pipeline.scratch_of(kernel, problem, tile, HOST)) is any(
                part.kernel.name == KERNEL.name for part in own
            )
            assert [part.overlaps for part in own] == [False, True][: len(own)]
        assert found == [2 if name in ("fwd_wgmma", "fwd_mma") else 1, 1, 1, 1]
    chosen = [choose.choose_kernel(p, "forward", (9, 0)).name for p in (both, tokens)]
    assert chosen == ["fwd_wgmma", "fwd_decode"]


def test_pages_with_gaps_are_read_by_fwd_mma() -> None:
    """A tensor map has one stride for the rows of all pages."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 4, 70, 64)).astype(np.float16)
    both = rng.standard_normal((6, 2, 16, 2, 64)).astype(np.float16)  # K and V of a page side by side
    table, lengths = np.array([[4, 1, 5, 0, 2]], np.int32), np.array([75], np.int32)
    options = {"causal": True, "kernel": "fwd_wgmma"}
    with pytest.raises(UnsupportedProblem, match="gaps between pages are not supported by TMA"):
        sandbox.attention_paged(q, both[:, 0], both[:, 1], table, lengths, **options)
    pages = [np.ascontiguousarray(both[:, i]) for i in range(2)]
    out = sandbox.attention_paged(q, *pages, table, lengths, **options)
    other = sandbox.attention_paged(q, both[:, 0], both[:, 1], table, lengths, causal=True, kernel="fwd_mma")
    assert np.abs(out.astype(np.float32) - other).max() < 2e-3


def test_float8_keys_are_read_at_as_many_bytes() -> None:
    """Tiles with as many bytes in flight as with float8 queries, in pages with fewer; selected as with 16-bit keys."""
    problem = Problem(2, 32, 1, 4096, 128, Hk=8, dtype="bfloat16", kv_dtype="float8_e4m3")
    paged, wide = dataclasses.replace(problem, page_size=16), dataclasses.replace(problem, D=256, Dv=256)
    tiles = [choose.choose_tile(KERNEL, p, (9, 0)) for p in (problem, paged, wide)]
    assert [(t.BLOCK_N, t.STAGES) for t in tiles] == [(32, 3), (32, 2), (16, 5)]
    few = [dataclasses.replace(problem, Sq=8, causal="bottom-right", page_size=size) for size in (0, 64, 16)]
    tiles = [choose.choose_tile(KERNEL, p, (9, 0)) for p in few]
    assert {t.BLOCK_M for t in tiles} == {32}
    tiles.append(choose.choose_tile(KERNEL, few[2], (8, 9)))
    assert [(t.BLOCK_N, t.WARPS, t.STAGES) for t in tiles] == [(32, 4, 3), (32, 8, 3), (32, 8, 3), (32, 4, 2)]
    entries = [dataclasses.replace(problem, B=B, page_size=size) for B, size in ((1, 64), (64, 64), (64, 16))]
    tiles = [choose.choose_tile(KERNEL, p, (9, 0)) for p in entries]
    assert [(t.STAGES, t.CLUSTER) for t in tiles] == [(3, 1), (2, 2), (2, 2)]
    many = dataclasses.replace(problem, Sq=512, causal="bottom-right")
    chosen = [choose.choose_kernel(p, "forward", (9, 0)).name for p in (problem, paged, many)]
    assert chosen == ["fwd_decode", "fwd_decode", "fwd_mma"]
    with pytest.raises(UnsupportedProblem, match=r"float8_e4m3 is not .* 8\.0: it needs 8\.9 or later"):
        choose.choose_kernel(problem, "forward", (8, 0))


def test_what_float8_is_read_by() -> None:
    """As many bytes in flight as with 16-bit keys; selected for few queries, as with 16-bit keys."""
    problem = Problem(2, 32, 1, 4096, 128, Hk=8, dtype="float8_e4m3", descale=(1.0, 1.0, 1.0))
    paged, wide = dataclasses.replace(problem, page_size=16), dataclasses.replace(problem, D=256, Dv=256)
    tiles = [choose.choose_tile(KERNEL, p, (9, 0)) for p in (problem, paged, wide)]
    assert [(t.BLOCK_N, t.STAGES) for t in tiles] == [(32, 3), (16, 5), (16, 5)]
    many = dataclasses.replace(problem, Sq=512, causal="bottom-right")
    chosen = [choose.choose_kernel(p, "forward", (9, 0)).name for p in (problem, paged, many)]
    assert chosen == ["fwd_decode", "fwd_decode", "fwd_wgmma_fp8"]


def test_twice_as_many_rows_where_they_are_narrow() -> None:
    """Up to D = 64 with 16-bit keys, if there are enough heads for all multiprocessors."""
    few = Problem(16, 32, 32, 8192, 64, Hk=8, dtype="bfloat16", causal="bottom-right", key_lengths=True)
    others = (few, dataclasses.replace(few, D=72, Dv=72), dataclasses.replace(few, dtype="float8_e4m3"))
    assert [KERNEL.first_for(p) for p in others] == [True, False, False]


def test_stream_k_has_one_wave() -> None:
    """As many blocks per key/value head as run at the same time, whatever the number of entries, and fewer if there are
    fewer rounds. The combine kernel has a block for every entry, or for every block if those are fewer."""
    one = Problem(1, 32, 1, 64, 128, Hk=8, dtype="bfloat16", kv_dtype="float8_e4m3", page_size=64, key_lengths=True)
    tile = Tile(BLOCK_M=8, BLOCK_N=32, WARPS=4, STAGES=2, BLOCKS=132, CLUSTER=1)
    of = ((1, 64), (1, 512), (1, 32768), (4, 32768), (32, 4096), (128, 2048), (0, 4096))
    problems = [dataclasses.replace(one, B=B, Sk=Sk) for B, Sk in of]
    grids = [(KERNEL.grid(p, tile), KERNEL.then[0].grid(p, tile)) for p in problems]
    assert [grid for grid, _ in grids] == [(1, 8, n) for n in (1, 4, 33, 33, 33, 33, 1)]
    a_head, four_heads = [(0, 32, 1), (1, 32, 1), (1, 32, 1), (1, 32, 4)], [(1, 8, 32), (1, 8, 33), (0, 32, 0)]
    assert [combine for _, combine in grids] == a_head + four_heads


def test_splits_fill_the_multiprocessors() -> None:
    """Two blocks a multiprocessor, whose copies keep its memory busy, and fewer of few keys, since parts are to be
    merged; of many rows none is split."""
    (tile, *_) = KERNEL.tiles
    of = ((1, 131072), (1, 2048), (128, 8192))
    problems = [Problem(B, 32, 1, Sk, 128, Hk=8, dtype="bfloat16") for B, Sk in of]
    long, few, many = ((int(np.prod(KERNEL.grid(p, tile))), all(KERNEL.then[0].grid(p, tile))) for p in problems)
    assert 240 < long[0] <= 264
    assert few == (64, True)
    assert (long[1], many) == (True, (8 * 128, False))


def test_clusters() -> None:
    """Where they make one wave: of two with eight warps each, of two or four with four warps each. With key_lengths of
    two or four, unless there are many keys. Nothing is merged. Not before compute capability 9.0, nor of other widths;
    without key_lengths not if there are many waves."""
    few, many = (Problem(B, 32, 1, 4096, 128, Hk=8, dtype="bfloat16") for B in (8, 64))
    rows = dataclasses.replace(many, Sq=4, H=64, causal="bottom-right")
    wave_of_two, wave_of_four = dataclasses.replace(few, B=24), dataclasses.replace(few, B=12)
    differ = dataclasses.replace(many, key_lengths=True)
    fewer = dataclasses.replace(differ, B=32)
    long, narrow = dataclasses.replace(differ, Sk=131072), dataclasses.replace(few, D=64, Dv=64)
    paged = dataclasses.replace(differ, page_size=16)
    found = []
    for problem in (few, wave_of_two, differ, paged, wave_of_four, fewer, many, rows, long, narrow):
        tile = choose.choose_tile(KERNEL, problem, (9, 0))
        found.append((tile.BLOCK_M, tile.WARPS, tile.STAGES, tile.CLUSTER))
        assert all(KERNEL.then[0].grid(problem, tile)) == (found[-1] == (8, 4, 3, 1))
    small = [*[(8, 4, 2, 2)] * 3, *[(8, 4, 2, 4)] * 2]
    assert found == [(8, 8, 3, 2), *small, (8, 8, 2, 1), (32, 8, 2, 1), *[(8, 4, 3, 1)] * 2]
    assert choose.choose_tile(KERNEL, few, (8, 0)).CLUSTER == 1
    refused = choose.why_tile_unsupported(KERNEL, few, choose.choose_tile(KERNEL, few, (9, 0)), (8, 9))
    assert refused
    assert "CLUSTER=2 needs compute capability 9.0" in refused


def test_attention_chooses_it_for_few_queries() -> None:
    """And not for problems with many queries."""
    few = Problem(2, 32, 1, 4096, 128, Hk=8, dtype="bfloat16")
    many = [dataclasses.replace(few, Sq=Sq, causal="bottom-right") for Sq in (512, 4096)]
    chosen = [choose.choose_kernel(p, "forward", arch).name for arch in ((8, 0), (9, 0)) for p in (few, *many)]
    assert chosen == ["fwd_decode", "fwd_mma", "fwd_mma", "fwd_decode", "fwd_wgmma", "fwd_wgmma"]


def test_a_tile_has_as_many_blocks_as_the_gpu_multiprocessors() -> None:
    """For tiles of the spec; an explicit tile is unchanged."""
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
        ({"page_size": -1}, "page_size"),
        ({"page_size": 64}, "must be a multiple of page_size=64"),
        ({"page_size": 16, "ragged": (3, 0), "lengths": ((4, 160),)}, "must not add up to more than"),
    ],
)
def test_pages_that_make_no_sense(fields: dict, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Problem(**{"B": 1, "H": 1, "Sq": 1, "Sk": 160, "D": 64, **fields})


def test_a_paged_problem_survives_a_round_trip() -> None:
    assert Problem.from_json(PAGED.as_json()) == PAGED
    assert PAGED.key_lengths
    assert not PAGED.plain
    assert "page_size=16" in str(PAGED)
    assert "paged keys are not supported" in str(registry.get("fwd_decode_wgmma").why_unsupported(PAGED))
    ragged = dataclasses.replace(PAGED, lengths=((5, 33), (0, 160)), pages=0)
    assert Problem.from_json(ragged.as_json()) == ragged
    assert (ragged.B, ragged.Sq, ragged.Sk, ragged.rows, ragged.pages) == (2, 5, 160, (5, 160), 20)
    assert [(p.Sq, p.Sk, p.page_size) for p in ragged.sequences] == [(5, 33, 0), (0, 160, 0)]


def test_gather_pages() -> None:
    pages = np.arange(4 * 16).reshape(4, 16, 1, 1).astype(np.float32)
    table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([20, 16], np.int32)
    found = gather_pages(pages, table, lengths)[:, 0, :, 0]
    assert found[0].tolist() == [*range(48, 64), 0, 1, 2, 3, *[0] * 12]
    assert found[1].tolist() == [*range(16, 32), *[0] * 16]
    with pytest.raises(ValueError, match=r"block_table\[1\]"):
        gather_pages(pages, table, lengths + 1)
    with pytest.raises(ValueError, match=r"key_lengths\[1\]=33: block_table has pages for 32 keys"):
        gather_pages(pages, table[[0, 0]], np.array([20, 33], np.int32))


CHECKED = """
import sys
import numpy as np
from sandbox.core import registry
from sandbox.engine import pipeline
from sandbox.spec import Problem
from sandbox.verify import trial
from sandbox.verify.cases import Case, inputs_of
kernel, device = registry.get(sys.argv[1]), ("cuda", 0)
problem = Problem(0, 4, 0, 0, 64, Hk=2, dtype="float16", lengths=((1, 40), (70, 70)), page_size=16)
given = inputs_of("forward", Case("invalid", problem))
name, index, value = sys.argv[2], eval(sys.argv[3]), int(sys.argv[4])
if name:
    given[name] = np.array(given[name])
    given[name][index] = value
trial.launch(kernel, pipeline.tile_on(device, kernel, problem), problem, given, device)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("fwd_wgmma", ("", "0", "0"), ""),
        ("fwd_wgmma", ("block_table", "(0, 1)", "5000"), "block_table has a page that does not exist"),
        ("fwd_wgmma", ("block_table", "(1, 4)", "-1"), "block_table has a page that does not exist"),
        ("fwd_mma", ("key_lengths", "1", "5000"), "key_lengths has more keys than block_table has pages for"),
        ("fwd_decode", ("cu_seqlens_q", "1", "72"), "cu_seqlens decreases"),
    ],
)
def test_checked_kernels_report_invalid_pages(name: str, changed: tuple[str, str, str], said: str) -> None:
    """In a separate process, because the CUDA context is lost. Two kernels share the sequences."""
    environment = {**os.environ, "SANDBOX_CHECKED": "1"}
    command = [sys.executable, "-c", CHECKED, name, *changed]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode == 0) is (said == ""), done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fwd_wgmma", "fwd_mma", "fwd_decode"])
@pytest.mark.parametrize(
    ("changed", "index", "value"),
    [
        ("block_table", (0, 1), 5000),
        ("block_table", (1, 0), -7),
        ("key_lengths", 1, 10**6),
        ("key_lengths", 0, -3),
        ("cu_seqlens_q", 1, 72),
        ("cu_seqlens_q", 2, 10**6),
        ("cu_seqlens_q", 0, -5),
    ],
)
def test_invalid_pages_are_read_within_the_tensors(name: str, changed: str, index: Any, value: int) -> None:
    """Memory around q and the pages is NaN, and their own is not: no result may be NaN. Nothing is written around the
    results."""
    torch = pytest.importorskip("torch")
    problem = Problem(0, 4, 0, 0, 64, Hk=2, dtype="float16", lengths=((70, 70), (1, 40)), page_size=16)
    given = inputs_of("forward", Case("invalid", problem))
    given[changed] = np.array(given[changed])
    given[changed][index] = value
    guarded = {}
    for which in "QKV":
        x = np.nan_to_num(given[which]).swapaxes(1, 2)  # rows of all heads together, pages adjacent
        axis = 1 if which == "Q" else 0
        around = np.full((*x.shape[:axis], 3 * x.shape[axis], *x.shape[axis + 1 :]), np.nan, x.dtype)
        inner = slice(x.shape[axis], 2 * x.shape[axis])
        around[(slice(None),) * axis + (inner,)] = x
        guarded[which] = torch.from_numpy(around).cuda()[(slice(None),) * axis + (inner,)]
    q, k, v = guarded["Q"][0], guarded["K"], guarded["V"]
    others = {n: torch.from_numpy(np.array(given[n])).cuda() for n in ("block_table", "key_lengths", "cu_seqlens_q")}
    out = sandbox.attention_paged(
        q, k, v, others["block_table"], others["key_lengths"], cu_seqlens_q=others["cu_seqlens_q"], kernel=name
    )
    torch.cuda.synchronize()
    begins = np.clip(given["cu_seqlens_q"], 0, len(q))
    rows = [row for first, end in itertools.pairwise(begins) for row in range(first, max(first, end))]
    assert torch.isfinite(out[rows]).all()
    kernel, device = registry.get(name), ("cuda", 0)
    done = trial.launch(kernel, pipeline.tile_on(device, kernel, problem), problem, given, device)
    assert done.stray_writes == ()


@pytest.mark.gpu
def test_a_cuda_graph_of_long_and_short_sequences() -> None:
    """Replayed after lengths, pages and the queries per sequence have changed: also with no long or no short ones."""
    torch = pytest.importorskip("torch")
    draw, size, most = torch.Generator("cuda").manual_seed(0), 32, 16
    q = torch.randn(600, 8, 64, generator=draw, device="cuda").half()
    k, v = (torch.randn(80, size, 2, 64, generator=draw, device="cuda").half() for _ in "kv")
    table, lengths, offsets = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in ((4, most), 4, 5))

    def call() -> Any:
        return sandbox.attention_paged(q, k, v, table, lengths, cu_seqlens_q=offsets, causal=True, return_lse=True)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for queries, keys in (((1, 300, 0, 2), (500, 300, 7, 400)), ((1, 1, 1, 1), (5, 0, 512, 33)),
                          ((200, 100, 300, 0), (200, 512, 300, 0)), ((1, 590, 4, 5), (512, 512, 4, 100))):  # fmt: skip
        table.copy_(torch.randint(0, 80, (4, most), generator=draw, device="cuda"))
        lengths.copy_(torch.tensor(keys))
        offsets.copy_(torch.tensor([0, *itertools.accumulate(queries)]))
        graph.replay()
        gathered = [gather_pages(x.cpu().numpy(), table.cpu().numpy(), lengths.cpu().numpy()) for x in (k, v)]
        for b, (first, n, m) in enumerate(zip(offsets.tolist(), queries, keys, strict=False)):
            own = q[first : first + n].cpu().numpy().swapaxes(0, 1)[None], *(x[b : b + 1, :, :m] for x in gathered)
            O, LSE = sandbox.reference.attention(*own, causal=True)
            assert np.allclose(out[first : first + n].float().cpu().numpy().swapaxes(0, 1), O[0], atol=4e-3)
            assert np.allclose(lse[:, first : first + n].cpu().numpy(), LSE[0], atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fwd_wgmma", "fwd_mma"])
@pytest.mark.parametrize("queries", [(4000, 1, 1), (4000, 0, 0)], ids=["with short ones", "long ones alone"])
def test_the_next_kernel_of_the_stream_waits_for_long_sequences(name: str, queries: tuple[int, ...]) -> None:
    """The kernel of the short sequences may start before that of the long ones has ended, but must not end before it:
    the stream's next kernel, a copy, would read rows that are not written yet. They are NaN before."""
    torch = pytest.importorskip("torch")
    q = torch.randn(sum(queries), 16, 128, device="cuda").half()
    k, v = (torch.randn(300, 16, 2, 128, device="cuda").half() for _ in "kv")
    table = torch.arange(300, device="cuda").int().expand(3, 300).contiguous()
    lengths = torch.tensor([4800, 40, 7], device="cuda").int()
    offsets = torch.tensor([0, *itertools.accumulate(queries)], device="cuda").int()
    for _ in range(5):
        unwritten = torch.full_like(q, float("nan"))
        del unwritten  # the results get its memory
        out = sandbox.attention_paged(q, k, v, table, lengths, cu_seqlens_q=offsets, kernel=name)
        copied = out.clone()
        torch.cuda.synchronize()
        assert torch.isfinite(out).all()
        assert torch.equal(copied, out)


@pytest.mark.gpu
@pytest.mark.parametrize("Sk", [0, 1, 4097, 131072])
def test_long_keys(Sk: int) -> None:
    """Up to very long contexts, with splits and with pages."""
    problem = Problem(1, 16, 2, Sk, 128, Hk=2, dtype="bfloat16", causal="bottom-right")
    right(Case("long", problem), ("cuda", 0))
    if Sk % 16 == 0:
        right(Case("long, in pages", dataclasses.replace(problem, page_size=16)), ("cuda", 0))
