"""Ragged batches with every kernel that supports them: each sequence has the same bits as alone."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from project import ROOT, SAMPLE, SEED

from sandbox.core import registry
from sandbox.core.errors import LaunchError, UnsupportedProblem
from sandbox.core.options import macros
from sandbox.engine import choose, launches, pipeline
from sandbox.launch import dlpack, driver
from sandbox.launch.arguments import score_argument
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Kernel, Problem, Tile
from sandbox.verify import check, trial
from sandbox.verify.cases import Case, inputs_of, ragged_cases
from sandbox.verify.sequences import ragged_problems, sequences_of

KERNELS = [kernel for kernel in registry.kernels().values() if kernel.ragged]
KEYS = ("K", "V", "dK", "dV")


def drawn(kernel: Kernel, seed: int) -> Problem:
    """Lengths around multiples of the tiles, including 0 and 1."""
    sample, tile = random.Random(seed), kernel.tiles[-1]
    M, N = tile.get("BLOCK_M", 64), tile.get("BLOCK_N", 64)
    lengths = [
        (sample.choice((0, 1, 5, M - 1, M, M + 1)), sample.choice((0, 1, 7, N, N + 1, 2 * N + 3))) for _ in range(6)
    ]
    window = sample.choice(((None, None), (7, 3), (None, 0)))
    causal: Any = sample.choice((False, "bottom-right", "top-left"))
    D = (32, 96)[seed % 2]  # bwd_wgmma adds to zeros, and to what the first to come has stored
    return Problem(0, 2, 0, 0, D, Hk=1, dtype=kernel.dtypes[-1], lengths=tuple(lengths), causal=causal, window=window)


def test_lengths_of_the_cases() -> None:
    """Whole tiles, partial tiles, one row, no queries, no keys, neither; more queries than keys and fewer."""
    kernel = registry.get("fwd_minimal")
    M, N = (kernel.tiles[0][name] for name in ("BLOCK_M", "BLOCK_N"))
    lengths = {n for _, p, _ in ragged_problems(kernel) if p.options == {"ragged"} for n in p.lengths}
    assert {(N, N), (M - 1, N - 1), (M + 5, N + 13), (1, 1), (0, 5), (5, 0), (0, 0)} <= lengths
    assert {Sq > Sk for Sq, Sk in lengths if Sq and Sk} == {False, True}


def test_each_mask_has_cases_of_each_kind_of_lengths() -> None:
    kernel = registry.get("fwd_minimal")
    found = {(p.causal, p.lengths) for _, p, _ in ragged_problems(kernel) if p.options == {"ragged"}}
    for causal in (False, "bottom-right", "top-left"):
        assert {(0, 5), (0, 0), (1, 200)} <= {n for mask, lengths in found if mask == causal for n in lengths}


def launch(kernel: Kernel, problem: Problem, given: dict[str, Any], device: Device, tile: Any) -> dict[str, Any]:
    done = trial.launch(kernel, tile, problem, given, device)
    assert not done.stray_writes
    return done.outputs


def chosen(kernel: Kernel, problem: Problem, device: Device) -> Any:
    arch = None if device == HOST else driver.device(device[1]).arch
    try:
        return choose.choose_tile(kernel, problem, arch)
    except UnsupportedProblem as reason:
        pytest.skip(str(reason))


def same(kernel: Kernel, name: str, a: Any, b: Any) -> bool:
    if name == "dQ" and not kernel.deterministic:  # sums in any order
        return np.allclose(a.astype(np.float32), b.astype(np.float32), rtol=0.02, atol=0.02, equal_nan=True)
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    "seed", [*(pytest.param(n, marks=pytest.mark.sampled(10)) for n in (0, 1)), pytest.param(2, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_each_sequence_is_as_if_alone(kernel: Kernel, seed: int, device: Device) -> None:
    problem = drawn(kernel, seed)
    tile, given = chosen(kernel, problem, device), inputs_of(kernel.computes, Case("sample", problem))
    whole = launch(kernel, problem, given, device, tile)
    for sequence in sequences_of(problem):
        own = {
            name: np.ascontiguousarray(x[sequence.slices(name, x)])
            for name, x in given.items()
            if "seqlens" not in name
        }
        for name, alone in launch(kernel, sequence.problem, own, device, tile).items():
            part = whole[name][sequence.slices(name, whole[name])]
            assert same(kernel, name, alone, part), f"seed {seed}: {problem}, sequence {sequence.b}, {name}"


def test_a_third_consumer_changes_no_bit(device: Device) -> None:
    """With few blocks, each of which processes several work tiles; some consumers have no rows, or other tiles."""
    lengths = ((200, 200), (63, 300), (0, 7), (385, 385), (65, 1))
    problem = Problem(0, 2, 0, 0, 32, Hk=1, dtype="float16", lengths=lengths, causal="bottom-right")
    kernel, given = registry.get("fwd_wgmma"), inputs_of("forward", Case("consumers", problem))
    chosen(kernel, problem, device)
    tiles = (Tile(BLOCK_M=M, BLOCK_N=64, STAGES=2, BLOCKS=3) for M in (128, 192))
    two, three = (launch(kernel, problem, given, device, tile) for tile in tiles)
    assert all(same(kernel, name, two[name], three[name]) for name in two)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.sampled(12)
def test_nan_and_huge_numbers_stay_in_their_sequence(kernel: Kernel, device: Device) -> None:
    """Tiles contain rows of neighbouring sequences: these must not be multiplied, even by 0, nor change a maximum."""
    lengths = ((33, 40), (70, 50), (1, 1), (20, 90))
    problem = Problem(0, 2, 0, 0, 32, Hk=1, dtype=kernel.dtypes[-1], lengths=lengths, causal="bottom-right")
    tile, given = chosen(kernel, problem, device), inputs_of(kernel.computes, Case("nan", problem))
    clean = launch(kernel, problem, given, device, tile)
    for non_finite in (1, 2):
        for value in (np.nan, np.inf, 3e4):
            bad = {name: x.copy() for name, x in given.items()}
            for sequence in sequences_of(problem):
                for name in {"Q", "K", "V", "dO", "O"} & {*bad}:
                    if sequence.b == non_finite:
                        bad[name][sequence.slices(name, bad[name])] = value
            found = launch(kernel, problem, bad, device, tile)
            for sequence in sequences_of(problem):
                for name, x in found.items():
                    at = sequence.slices(name, x)
                    if sequence.b != non_finite:
                        assert same(kernel, name, x[at], clean[name][at]), (
                            f"{value} in {non_finite}: {sequence.b}, {name}"
                        )


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.sampled(8)
def test_sweep_of_ragged_batches(kernel: Kernel, device: Device) -> None:
    """On the CPU backend one of them; `check` runs all."""
    cases = [case for case in ragged_cases(kernel) if not kernel.why_unsupported(case.problem)]
    if device == HOST and SAMPLE != "all":
        cases = [random.Random(f"{SEED} {kernel.name}").choice(cases)]
    results = [check.verify(kernel, case, device) for case in cases]
    assert not [result for result in results if result.ok is False]
    assert [result for result in results if result.ok] or device != HOST


@pytest.mark.parametrize(
    ("offsets", "said"), [((3, 40, 60), "begin with 0"), ((0, 50, 40), "decreases"), ((0, 40, 99), "beyond")]
)
def test_offsets_that_make_no_sense(offsets: tuple[int, ...], said: str, device: Device) -> None:
    """An error on the CPU backend. On a GPU, nothing outside of the tensors is written."""
    problem = Problem(0, 1, 0, 0, 32, lengths=((40, 40), (20, 20)))
    for kernel in (registry.get("fwd_minimal"), registry.get("fwd_block2d")):
        given = inputs_of("forward", Case("offsets", problem))
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            bad = {**given, name: np.array(offsets, np.int32)}
            if device == HOST:
                with pytest.raises(LaunchError, match=said):
                    launch(kernel, problem, bad, device, kernel.tiles[0])
            else:
                launch(kernel, problem, bad, device, kernel.tiles[0])


CHECKED = """
import numpy as np, sys
from sandbox.core import registry
from sandbox.spec import Problem
from sandbox.verify import trial
from sandbox.verify.cases import Case, inputs_of
kernel, offsets = registry.get(sys.argv[1]), np.array(eval(sys.argv[2]), np.int32)
problem = Problem(0, 1, 0, 0, 64, dtype="float16", lengths=((40, 40), (20, 20)))
given = inputs_of("forward", Case("offsets", problem)) | {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
tile = next(tile for tile in kernel.tiles if not kernel.why_tile_unsupported(problem, tile))
trial.launch(kernel, tile, problem, given, ("cuda", 0))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fwd_minimal", "fwd_wgmma"])
@pytest.mark.parametrize(
    ("offsets", "said"),
    [((0, 40, 60), ""), ((3, 40, 60), "begin with 0"), ((0, 50, 40), "decreases"), ((0, 9, 99), "beyond")],
)
def test_checked_kernels_say_what_is_wrong_with_offsets(name: str, offsets: tuple[int, ...], said: str) -> None:
    """In a separate process, because the CUDA context is lost."""
    environment = {**os.environ, "SANDBOX_CHECKED": "1"}
    command = [sys.executable, "-c", CHECKED, name, repr(offsets)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode == 0) is (said == "")
    assert said in done.stdout + done.stderr


def test_the_tile_counter_is_cleared_at_each_launch() -> None:
    """Independent of the previous value in its memory."""
    kernel, problem = (
        registry.get("fwd_wgmma"),
        Problem(0, 2, 0, 0, 32, dtype="float16", lengths=((300, 300), (70, 70))),
    )
    tile = Tile(BLOCK_M=64, BLOCK_N=64, STAGES=2, BLOCKS=2)
    given = inputs_of("forward", Case("twice", problem))
    made = trial.outputs_and_scratch(kernel, problem, tile).items()
    arrays = {name: np.zeros(shape, dlpack.numpy_dtype(dtype)) for name, (shape, dtype) in made}
    views = {name: dlpack.view(x) for name, x in {**given, **arrays}.items()}
    prepared = pipeline.prepare(kernel, tile, problem, views, HOST)
    for before in (3.0, None):  # then what the first launch left there
        arrays["tile_counter"][...] = arrays["tile_counter"] if before is None else before
        arrays["O"].fill(np.nan)
        prepared.launch(prepared.pointers(views))
        assert np.array_equal(arrays["O"], launch(kernel, problem, given, HOST, tile)["O"])


@pytest.mark.parametrize(
    ("name", "lengths", "wanted", "zeroed"),
    [
        ("fwd_wgmma", (), {"fwd_wgmma": False}, ()),
        ("fwd_wgmma", ((70, 70),), {"fwd_wgmma_clear": False, "fwd_wgmma": True}, ()),
        (
            *("fwd_wgmma", ((70, 70), (1, 6000))),
            {"fwd_wgmma_clear": False, "fwd_wgmma": True, "fwd_decode": True, "fwd_decode_combine": True},
            (),
        ),
        ("bwd_wgmma", (), {"bwd_preprocess": False, "bwd_wgmma": True, "bwd_wgmma_postprocess": True}, ("dQ_accum",)),
        (
            *("bwd_wgmma", ((70, 70),)),
            {"bwd_wgmma_scheduler": False, "bwd_preprocess": True, "bwd_wgmma": True, "bwd_wgmma_postprocess": True},
            (),
        ),
    ],
)
@pytest.mark.sampled(2)
def test_launch_order_of_entries(
    name: str, lengths: Any, wanted: dict[str, bool], zeroed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that list work tiles or clear the tile counter are first. Entries with programmatic launch overlap with
    the preceding entry, but the first one does not overlap with earlier work of the stream."""
    kernel, (B, S) = registry.get(name), (0, 0) if lengths else (2, 70)
    problem = Problem(B, 2, S, S, 96, dtype="float16", lengths=lengths, page_size=16 * (len(lengths) > 1))
    given = inputs_of(kernel.computes, Case("when", problem))
    tile = choose.choose_tile(kernel, problem, None)
    made = trial.outputs_and_scratch(kernel, problem, tile).items()
    arrays = {of: np.zeros(shape, dlpack.numpy_dtype(dtype)) for of, (shape, dtype) in made}
    said: list[Any] = []
    monkeypatch.setattr(launches, "_on_host", lambda *what: said.append(what[:2]))
    views = {of: dlpack.view(x) for of, x in {**given, **arrays}.items()}
    pipeline.prepare(kernel, tile, problem, views, HOST)
    [(launched, cleared)] = said
    assert [(one.entry.name, one.programmatic_launch) for one in launched] == [*wanted.items()]
    assert tuple(cleared) == zeroed


def test_a_kernel_that_does_not_take_them_says_so() -> None:
    problem = Problem(0, 1, 0, 0, 64, dtype="float16", lengths=((5, 5),))
    for kernel in registry.kernels().values():
        if kernel.custom:
            continue
        assert kernel.ragged or "ragged batches are not" in (kernel.why_unsupported(problem) or "")


@pytest.mark.parametrize("seed", range(20))
def test_every_tile_has_its_number(seed: int) -> None:
    """The tile numbers of include/seqlen.cuh: enough for each sequence, and no more than the grid has."""
    sample = random.Random(seed)
    lengths = [sample.choice((0, 1, sample.randrange(300))) for _ in range(sample.randrange(1, 9))]
    problem, size = Problem(0, 1, 0, 0, 8, lengths=tuple((n, n) for n in lengths)), sample.choice((16, 64, 192))
    begins = np.cumsum([0, *lengths])
    numbers = [begin // size + b for b, begin in enumerate(begins)]
    assert all(after - before >= -(-n // size) for before, after, n in zip(numbers, numbers[1:], lengths, strict=False))
    assert numbers[-1] == problem.query_tiles(size) == problem.key_tiles(size)


TILES = """
#include "score_mod.cuh"
extern "C" __global__ void tiles(const int* cu_seqlens, int* found, int sequences, int rows, int count) {
    const Offsets offsets = {cu_seqlens, 1, sequences, rows, rows};
    for (int number = blockIdx.x; number < count; number += gridDim.x) {
        const RowTile alone = offsets.tile<16>(number), together = offsets.tile_by_warp<16>(number);
        if (threadIdx.x != number % 32) continue;
        found[4 * number] = alone.b, found[4 * number + 1] = alone.row0;
        found[4 * number + 2] = together.b, found[4 * number + 3] = together.row0;
    }
}"""


@pytest.mark.parametrize("sequences", [1, 31, 32, 33, 64, 70])
def test_a_warp_finds_the_tile_that_bisection_finds(run_cuda: Callable[..., None], sequences: int) -> None:
    sample = random.Random(sequences)
    offsets = np.cumsum([0, *(sample.choice((0, 0, 1, 16, 40)) for _ in range(sequences))], dtype=np.int32)
    rows = int(offsets[-1]) + 20  # beyond the last one
    found = np.full((rows // 16 + sequences, 4), 7, np.int32)
    p = Problem(0, 1, 0, 0, 64, dtype="float16", lengths=((16, 16),))
    defines = {"BLOCK_M": 16, "BLOCK_N": 16, "HEAD_DIM": 64, "CAUSAL": 0, "DTYPE_float16": 1, **macros(p)}
    run_cuda(TILES, "tiles", offsets, found, *map(ctypes.c_int, (sequences, rows, len(found))), grid=2, defines=defines)
    assert np.array_equal(found[:, :2], found[:, 2:])
    wanted = {(b, row) for b in range(sequences) for row in range(0, offsets[b + 1] - offsets[b], 16)}
    assert {(b, row) for b, row, *_ in found.tolist()} - {(-1, 0)} == wanted


SCHEDULE = """
#include "ptx.cuh"
#include "tile_scheduler.cuh"
extern "C" __global__ void schedule(const int* cu_seqlens_q, const int* cu_seqlens_k, WorkTile* found, int count,
                                    int heads, int group, const __grid_constant__ Score score) {
    const LongestFirst<TILES> scheduler(score);
    for (int number = blockIdx.x; number < count; number += gridDim.x) {
        const WorkTile work_tile = scheduler.work_tile(number, heads, group);
        if (threadIdx.x == 0) found[number] = work_tile;
    }
}"""


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.sampled(2)
def test_every_work_tile_is_scheduled_once_and_long_ones_first(run_cuda: Callable[..., None], seed: int) -> None:
    """Query tiles are ordered by the last key that they see, key tiles by the number of queries that see them."""
    sample, of_keys = random.Random(seed), seed >= 5
    M, N, H = sample.choice((16, 64)), sample.choice((16, 48)), sample.choice((1, 4, 16))
    causal: Any = sample.choice((False, "bottom-right", "top-left"))
    sizes = (0, 1, N, 3 * N + 1, 5000 if seed % 2 else 200)  # long ones: several head groups
    lengths = [(sample.choice(sizes), sample.choice(sizes)) for _ in range(sample.choice((1, 5, 40)))]
    p = Problem(0, H, 0, 0, 64, Hk=1, dtype="float16", lengths=tuple(lengths), causal=causal)
    offsets = [np.cumsum([0, *n], dtype=np.int32) for n in zip(*lengths, strict=True)]
    size = N if of_keys else M
    wanted = [(b, row, h) for b, n in enumerate(lengths) for row in range(0, n[of_keys], size) for h in range(H)]
    found = np.full((len(wanted) + 2, 8), 7, np.int32)

    def score(addresses: dict[int, int], device: Device) -> ctypes.Structure:
        tensors = {f"cu_seqlens_{x}": SimpleNamespace(pointer=addresses[i], strides=(1,)) for i, x in enumerate("qk")}
        return score_argument(p, tensors)[0]

    numbers = map(ctypes.c_int, (len(found), H, H))
    defines = {"BLOCK_M": M, "BLOCK_N": N, "HEAD_DIM": 64, "CAUSAL": int(bool(causal)), "DTYPE_float16": 1, **macros(p)}
    defines |= {"TILES": "KeyTileOrder" if of_keys else "QueryTileOrder", "STAGES": 2}
    run_cuda(SCHEDULE, "schedule", *offsets, found, *numbers, score, grid=2, defines=defines)
    scheduled = [tuple(map(int, work_tile[:3])) for work_tile in found]
    assert sorted(scheduled[:-2]) == sorted(wanted)
    assert scheduled[-2:] == [(-1, 0, 0)] * 2

    def bucket(b: int, row: int) -> int:
        n, keys = lengths[b]
        if of_keys:
            first = row - (keys - n) * (causal == "bottom-right") if causal else 0
            return -(-max(0, n - max(0, first)) // (4 * M))
        rows = min(n, row + M) if causal == "bottom-right" else row + M
        end = min(keys, max(0, rows + (keys - n) * (causal == "bottom-right"))) if causal else keys
        return -(-end // (2 * N))

    for h in range(H):
        buckets = [bucket(b, row) for b, row, own in scheduled[:-2] if own == h]
        assert all(a >= z for a, z in itertools.pairwise(buckets)), f"seed {seed}"
