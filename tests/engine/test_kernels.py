"""Every kernel that the registry finds, against the float64 reference, on both backends."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from project import SAMPLE, SEED, SELDOM, dtype_of, takes_causal

from sandbox.core import registry
from sandbox.core.errors import UnsupportedProblem
from sandbox.disassembly import sweep
from sandbox.engine import choose, pipeline
from sandbox.launch import driver
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import COMPUTATIONS, ITEMSIZE, Causal, Entry, Kernel, Problem, Tile
from sandbox.toolchain import arch, nvrtc
from sandbox.verify import check, trial
from sandbox.verify.cases import Case, inputs_of, isolating_cases, make_inputs, sweep_cases

KERNELS = list(registry.kernels().values())
FORWARD = [kernel for kernel in KERNELS if kernel.computes == "forward"]
# {arch: n}: one of n variants of each tile is compiled; without a GPU one of 10 n variants, and one of n tiles.
ARCHS = {"sm_80": 1, "sm_89": 3, "sm_90a": 1, "sm_100a": 3, "sm_120": 3}
# Bytes: with some releases of NVRTC (docs/limits.md), and where the sums of earlier keys need registers (docs/bits.md).
SPILLS = {("fwd_block2d", "sm_100a"): 12, ("fwd_decode", "sm_100a"): 64, ("fwd_wgmma_invariant", "sm_90a"): 216}
by_name = lambda kernel: kernel.name  # noqa: E731


def variants(kernel: Kernel, arch_name: str) -> list[tuple[Problem, Tile]]:
    """A sample of (problem, tile) to compile, of tiles that selection chooses: one of the 16-bit dtypes, which need the
    same registers, and fewer samples for architectures that are similar to others."""
    draw, target = random.Random(f"{SEED} {kernel.name} {arch_name}"), arch.parse(arch_name)
    found: dict[Tile, dict[str, tuple[Problem, Tile]]] = {}
    share = ARCHS[arch_name]
    widths = (40, 64, 96, 128, kernel.max_D)
    for D, causal, (B, H, Hk, Sq, Sk) in itertools.product(widths, (False, "bottom-right"), sweep.SHAPES):
        narrow = draw.choice([dtype for dtype in kernel.dtypes if dtype != "float32"])
        for dtype in (narrow, *({"float32"} & {*kernel.dtypes})):
            problem = kernel.adapted(Problem(B, H, Sq, Sk, D, Hk, dtype, causal))
            with contextlib.suppress(UnsupportedProblem):
                tile = choose.choose_tile(kernel, problem, target)
                found.setdefault(tile, {})[str(kernel.defines(problem, tile))] = problem, tile
    groups = [[*of_tile.values()] for of_tile in found.values()]
    if not driver.available():
        groups, share = draw.sample(groups, -(-len(groups) // share)), 10 * share
    return [pair for of_tile in groups for pair in draw.sample(of_tile, -(-len(of_tile) // share))]


@pytest.mark.parametrize("arch_name", ARCHS)
@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.sampled(80)
def test_every_tile_compiles_without_spills(kernel: Kernel, arch_name: str) -> None:
    """No tile that selection chooses spills registers on any architecture. Needs no GPU."""
    chosen = variants(kernel, arch_name)
    assert chosen or kernel.why_unsupported(Problem(1, 1, 1, 1, 64, dtype=kernel.dtypes[-1]), arch.parse(arch_name))
    for p, tile in chosen:
        no_spills(kernel, p, tile, arch_name)


def no_spills(kernel: Kernel, p: Problem, tile: Tile, arch_name: str) -> None:
    """Compiles every entry. Fails if registers are spilled, the stack is used or the compiler warns."""
    for compiled in pipeline.compile_problem(kernel, p, tile, arch_name):
        r, what = compiled.resources, f"{compiled.entry} {arch_name} {p} {tile}: {compiled.resources}"
        assert r.spill_stores <= SPILLS.get((kernel.name, arch_name), 0), what
        assert r.spill_stores or (r.spill_loads, r.stack) == (0, 0), what
        assert r.warnings == (), what


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("arch_name", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.sampled(100)
def test_no_default_tile_of_plain_problems_spills(kernel: Kernel, arch_name: str, D: int) -> None:
    """The tile that `attention` uses, with and without a causal mask. NVRTC releases the GIL: threads compile in
    parallel."""
    target, found = arch.parse(arch_name), {}
    for causal in (False, "bottom-right"):
        problem = Problem(2, 16, 4096, 4096, D, dtype=dtype_of(kernel), causal=causal)
        with contextlib.suppress(UnsupportedProblem):
            tile = choose.choose_tile(kernel, problem, target)
            found[str(kernel.defines(problem, tile))] = problem, tile
    fitting = [tile for tile in kernel.tiles if not choose.why_tile_unsupported(kernel, problem, tile, target)]
    assert found or kernel.why_unsupported(problem, target) or not fitting  # bwd_mma on sm_80: none fits
    with ThreadPoolExecutor(2) as pool:
        for _ in pool.map(lambda pair: no_spills(kernel, *pair, arch_name), found.values()):
            pass  # an assertion that failed is raised here


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.parametrize("dtype", list(ITEMSIZE))
@pytest.mark.sampled(6)
def test_sweep(kernel: Kernel, dtype: str, device: Device) -> None:
    """All cases of `check` on a GPU, a sample on the CPU backend: lengths, masks, groups, layouts, isolating inputs,
    options, ragged batches."""
    cases = [case for case in sweep_cases(kernel) if case.problem.dtype == dtype]
    if device == HOST and cases and SAMPLE != "all":
        cases = drawn(kernel, dtype, cases)
    bad, tried = [], 0
    for case in cases:
        result = check.verify(kernel, case, device)
        tried += result.ok is not None
        if result.ok is False:
            bad.append(result)
    assert not bad, f"SANDBOX_SEED={SEED}\n" + "\n".join(map(str, bad))
    few = kernel.name in SELDOM
    least = (15 if few else 25) if device != HOST else 0 if few or kernel.computes == "block_map" else 2
    assert tried > least or dtype not in kernel.dtypes


def drawn(kernel: Kernel, dtype: str, cases: list[Case]) -> list[Case]:
    """The cases for the CPU backend, a random sample: each head dimension and mask needs a compile.

    Isolating cases, which `test_cases.py` runs in one dtype, in the other dtypes: one in eight, which share a compile.
    Cases without options: one head dimension, up to three cases with one mask. Also, for the dtype of single cases, one
    with many tiles and a small D, and one with options or a ragged batch, which `test_scores.py` and `test_ragged.py`
    test further. For kernels in SELDOM, and for block maps, two cases, of block maps with a mask.
    """
    sample = random.Random(f"{SEED} {kernel.name} {dtype}")
    if kernel.computes == "block_map":
        cases = [case for case in cases if case.problem.has_block_map]
    if kernel.name in SELDOM or kernel.computes == "block_map":
        cases = [case for case in cases if not kernel.why_unsupported(case.problem)]
        return sample.sample(cases, min(len(cases), 2))
    own, several = kernel.dtypes.index(dtype), len(kernel.dtypes)
    pointed = [*isolating_cases(kernel, dtype)]
    rare = [case for case in cases if not case.problem.plain or case.problem.ragged]
    usual = [case for case in cases if case not in rare and case not in pointed and copies_rows(kernel, case)]
    long = [case for case in usual if max(case.problem.Sq, case.problem.Sk) >= 1024]
    narrow = [case for case in long if case.problem.D <= 64]
    width = sample.choice(sorted({case.problem.D for case in usual})[own::several])
    of_width = [case for case in usual if width == case.problem.D and case not in long]
    mask = sample.choice(of_width).problem.causal
    group = [case for case in of_width if case.problem.causal == mask]
    chosen = sample.sample(group, min(len(group), 3))
    if dtype != dtype_of(kernel):
        return chosen + sample.sample(pointed, len(pointed) // 8)
    return chosen + sample.sample(narrow, min(len(narrow), 1)) + sample.sample(rare, min(len(rare), 1))


def copies_rows(kernel: Kernel, case: Case) -> bool:
    """Whether the kernel supports the alignment of the case's rows. A small sample must not consist of other cases."""
    p = case.problem
    return case.layout != "unaligned" or not kernel.why_unsupported(dataclasses.replace(p, alignment=p.itemsize), None)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.sampled(10)
def test_every_tile_is_right(kernel: Kernel, device: Device) -> None:
    """All tiles of the spec, not only the best."""
    for tile in kernel.tiles:
        masks: tuple[Causal, ...] = ("bottom-right", False)
        problems = [
            kernel.adapted(Problem(1, 2, 130, 170, D, dtype=kernel.dtypes[-1], causal=c))
            for c in masks
            for D in (64, 128, 256)
        ]
        problems = [p for p in problems if not kernel.why_unsupported(p)]
        case = Case("ragged", next(p for p in problems if choose.why_tile_unsupported(kernel, p, tile, None) is None))
        result = check.verify(kernel, case, device, tile)
        assert result.ok, result


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if "STAGES" in kernel.tiles[0]], ids=by_name)
@pytest.mark.sampled(6)
def test_one_stage(kernel: Kernel, D: int) -> None:
    """Is refused where a warp waits for the next tile before it releases this one, and right otherwise. On the CPU
    backend, which reports a deadlock. The last query tile has a consumer without rows."""
    problem = kernel.adapted(Problem(1, 2, 300, 300, D, Hk=1, dtype=kernel.dtypes[0]))
    if kernel.why_unsupported(problem):
        pytest.skip("the head dimension")
    tile = Tile(**{**choose.choose_tile(kernel, problem, None), "STAGES": 1})
    if reason := kernel.why_tile_unsupported(problem, tile):
        assert "STAGES=1" in reason
    else:
        result = check.verify(kernel, Case("one stage", problem), HOST, tile)
        assert result.ok, result


@pytest.mark.parametrize("causal", [False, "bottom-right", "top-left"])
@pytest.mark.sampled(3)
def test_wide_heads_share_tiles_of_keys(causal: Causal, device: Device) -> None:
    """The tile of fwd_mma with a loop over steps, selected only for problems larger than those of the sweep."""
    kernel = registry.get("fwd_mma")
    tile = next(tile for tile in kernel.tiles if tile.WARPS == 8)
    for inputs, Sk, D in (("rising", 331, 256), ("inf_value", 130, 232)):
        problem = Problem(1, 2, 200, Sk, D, Hk=1, dtype="bfloat16", causal=causal)
        assert choose.why_tile_unsupported(kernel, problem, tile, None) is None
        result = check.verify(kernel, Case(inputs, problem, inputs), device, tile)
        assert result.ok, result


def test_wide_heads_share_tiles_of_keys_where_it_was_faster() -> None:
    """With many blocks, causal ones with long rows; not where an SM has no room for it, and not beside options, but for
    windows with two bounds on 9.0, where the other one spills."""
    of = lambda arch_of, *shape, **more: choose.choose_tile(  # noqa: E731
        registry.get("fwd_mma"), Problem(*shape, dtype="float16", **more), arch_of
    )
    assert of((9, 0), 32, 8, 512, 512, 256).WARPS == of((9, 0), 8, 8, 2048, 2048, 256, causal="bottom-right").WARPS == 8
    assert of((8, 0), 32, 8, 512, 512, 256).WARPS == of((9, 0), 32, 8, 512, 512, 128).WARPS == 4
    assert of((9, 0), 32, 8, 512, 512, 256, causal="bottom-right").WARPS == of((9, 0), 1, 8, 512, 512, 256).WARPS == 4
    many = (32, 8, 512, 512, 256)
    assert of((9, 0), *many, softcap=30.0).WARPS == of((8, 0), *many, window=(64, 64)).WARPS == 4
    assert of((9, 0), *many, window=(64, 64)).WARPS == 8


@pytest.mark.parametrize(
    ("blocks", "shape"),
    [(4, (1, 2, 500, 2000, 128)), (5, (1, 2, 500, 2000, 128)), (2, (1, 3, 100, 2000, 256))],
    ids=str,
)
@pytest.mark.sampled(3)
def test_stream_k_splits_the_last_wave(blocks: int, shape: tuple[int, ...], device: Device) -> None:
    """With six work tiles, four blocks share two, and five blocks share one. With three work tiles of two consumers,
    two blocks share one."""
    kernel = registry.get("fwd_wgmma_fp8")
    problem = Problem(*shape, dtype="float8_e4m3")
    tile = Tile(**{**choose.choose_tile(kernel, problem, (9, 0)), "BLOCKS": blocks})
    work_tiles = problem.query_tiles(tile.BLOCK_M) * problem.batches * problem.H
    assert kernel.numbers["full_wave_tiles"](problem, tile) == work_tiles // blocks * blocks < work_tiles
    for inputs in ("normal", "rising", "large"):
        result = check.verify(kernel, Case(inputs, problem, inputs), device, tile)
        assert result.ok, result


@pytest.mark.parametrize(("Sk", "window"), [(1300, (960, 0)), (1152, None), (2300, None)], ids=str)
def test_float8_sums_are_split(Sk: int, window: tuple[int, int] | None, device: Device) -> None:
    """Into parts of MMA_SUM_KEYS = 1024 keys, from the first key tile that the consumer's rows see: with the window it
    depends on the consumer. One part, and three."""
    problem = Problem(1, 1, 192, Sk, 64, dtype="float8_e4m3", out_dtype="float16", window=window)
    tile = Tile(BLOCK_M=192, BLOCK_N=128, STAGES=2, BLOCKS=1, LOADS=1)
    result = check.verify(registry.get("fwd_wgmma_fp8"), Case("split", problem), device, tile)
    assert result.ok, result


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.deterministic], ids=by_name)
@pytest.mark.sampled(3)
def test_repeats_are_bit_equal(kernel: Kernel, device: Device) -> None:
    """A race may appear once in hundreds of runs. The CPU backend has a fixed order and needs few."""
    causal: Causal = "bottom-right" if kernel.latent or takes_causal(kernel) else False
    problem = Problem(1, 2, 203, 131, 64, Hk=1, dtype=dtype_of(kernel), causal=causal)
    case = Case("repeat", kernel.adapted(problem))
    inputs = inputs_of(kernel.computes, case)
    tile = choose.choose_tile(kernel, case.problem, None)
    first = trial.launch(kernel, tile, case.problem, inputs, device)
    for _ in range(5 if device == HOST else 250):
        again = trial.launch(kernel, tile, case.problem, inputs, device)
        for name, output in first.outputs.items():
            assert output.tobytes() == again.outputs[name].tobytes(), name


@pytest.mark.parametrize("causal", [False, "bottom-right"])
@pytest.mark.parametrize(
    ("name", "D"), [("fwd_wgmma", 64), ("fwd_wgmma", 200), ("fwd_wgmma", 256), ("fwd_wgmma_fp8", 64)]
)
@pytest.mark.sampled(8)
def test_few_blocks_do_all_the_work(name: str, D: int, causal: Causal, device: Device) -> None:
    """The number of persistent blocks, and with it the assignment of work tiles and the head groups, changes no bit.

    With one block, the heads are not grouped. With D = 200, only half of O fits; with D = 256 and 80 keys, O overwrites
    Q. With float8, the last of the 192-row tiles of a head has 64 rows."""
    kernel, usual = registry.get(name), name == "fwd_wgmma"
    Sk = (200 if D == 64 else 100) if usual else 392
    problem = Problem(2, 3, 392, Sk, D, dtype="float16" if usual else "float8_e4m3", causal=causal)
    if kernel.why_unsupported(problem, None if device == HOST else driver.device(device[1]).arch):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    numbers = {"BLOCK_M": 128} if usual else {"BLOCK_M": 192, "LOADS": 2}
    numbers |= {"BLOCK_N": 80 if D == 256 else 64, "STAGES": 2}
    case, many = Case("blocks", problem), Tile(BLOCKS=1000, **numbers)
    assert check.verify(kernel, case, device, many).ok
    inputs = inputs_of("forward", case)
    whole = trial.launch(kernel, many, problem, inputs, device)
    for blocks in (1, 5) if device == HOST else (1, 2, 5, 7):
        tile = Tile(BLOCKS=blocks, **numbers)
        assert kernel.grid(problem, tile)[0] <= blocks
        again = trial.launch(kernel, tile, problem, inputs, device)
        for output_name, output in whole.outputs.items():
            assert output.tobytes() == again.outputs[output_name].tobytes(), output_name


def test_the_persistent_kernel_is_selected_for_short_rows_of_narrow_heads() -> None:
    """For problems where it was measured to be faster, with more work tiles than blocks; and `bwd_wgmma_head` where the
    launch overhead dominates."""
    few = {"B": 1, "H": 4, "Hk": 4}
    window = {"Sq": 8192, "Sk": 8192, "window": (512, None)}
    short = Problem(32, 32, 512, 512, 64, dtype="float16", causal="bottom-right")
    narrow = {"D": 32, "Dv": 32}
    stay = ({}, narrow, {"causal": False}, {"Sq": 200, "Sk": 200}, {"dtype": "bfloat16"}, {"D": 40, "Dv": 40}, window,
            {"Sq": 1024, "Sk": 1024, "B": 1}, {"Sq": 77, "Sk": 4096}, {**window, **narrow}, {"Sq": 1})  # fmt: skip
    host = ({**few, "Sq": 128, "Sk": 128}, {**few, "Sq": 1, "Sk": 1}, {**few, **narrow, "Sq": 128, "Sk": 128},
            {**few, "D": 40, "Dv": 40, "Sq": 128, "Sk": 128},
            {**few, "D": 48, "Dv": 48, "Sq": 128, "Sk": 128})  # fmt: skip
    differ = (
        {"B": 1},
        {"Sq": 1026, "Sk": 1026},
        {"Sq": 513, "Sk": 513, "causal": False},
        {"Hk": 8},
        {**window, "window": (900, None)},
        {**narrow, "B": 4},
        {"softcap": 9.0},
        {**few, "Sq": 129, "Sk": 129},
        {**few, "Sq": 1},
    )
    for others, name in ((stay, "bwd_wgmma_persistent"), (host, "bwd_wgmma_head"), (differ, "bwd_wgmma")):
        for fields in others:
            p = dataclasses.replace(short, **fields)
            assert choose.choose_kernel(p, "backward", (9, 0)).name == name, p


@pytest.mark.parametrize(("D", "Dv"), [(64, 64), (96, 96), (136, 136), (192, 128)])
@pytest.mark.sampled(3)
def test_the_deterministic_backward_in_serpentine_head_groups(
    D: int, Dv: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head per group, in serpentine order: correct, and the number of concurrent work tiles changes no bit."""
    kernel, problem = (
        registry.get("bwd_wgmma_deterministic"),
        Problem(1, 3, 150, 200, D, Dv=Dv, dtype="float16", causal="bottom-right"),
    )
    if kernel.why_unsupported(problem, None if device == HOST else driver.device(device[1]).arch):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    monkeypatch.setitem(kernel.grid.__globals__, "HOPPER_SMS", 2)
    tile = choose.choose_tile(kernel, problem, None)
    assert kernel.grid(problem, tile)[::2] == (1, 3)
    result = check.verify(kernel, Case("sections", problem), device)
    assert result.ok is not False, result.message
    inputs, outputs = inputs_of("backward", Case("sections", problem)), []
    for workers in ("1", "2"):
        monkeypatch.setenv("SANDBOX_CPU_WORKERS", workers)
        outputs.append(trial.launch(kernel, tile, problem, inputs, device).outputs)
    assert all(x.tobytes() == outputs[1][name].tobytes() for name, x in outputs[0].items())


PLAIN = [
    (Sq, Sk, {"causal": causal})
    for Sq, Sk in ((2049, 70), (260, 300), (300, 130), (70, 0), (60, 300))
    for causal in (False, "bottom-right")
]
FEW_WORK_TILES = [(2049, 70, options) for options in ({"window": (30, 40)}, {"mask": (1, 1, 2049, 70)})]


@pytest.mark.parametrize(("Sq", "Sk", "options"), PLAIN + FEW_WORK_TILES, ids=str)
@pytest.mark.parametrize(
    ("kernel", "D", "Dv"),
    [("bwd_wgmma", 104, 104), ("bwd_wgmma", 192, 96), ("bwd_wgmma", 256, 256), ("bwd_wgmma_persistent", 40, 40)],
)
@pytest.mark.sampled(18)
def test_the_first_block_stores_dq(
    Sq: int, Sk: int, options: dict, kernel: str, D: int, Dv: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block that adds to a dQ tile stores instead, so that no zeroing is needed: scratch is 1 before. Rows
    without keys have no such block; rows with NaN behind a mask are recomputed.

    With two concurrent blocks, the CPU backend delays a store until the other block cannot continue without it.
    """
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", "2")
    filled = trial._filled
    ones = lambda shape, dtype, *fill: np.ones(shape, dtype) if dtype == "float32" else filled(shape, dtype, *fill)  # noqa: E731
    monkeypatch.setattr(trial, "_filled", ones)
    problem = Problem(1, 1, Sq, Sk, D, Dv=Dv, dtype="float16", **options)
    result = check.verify(registry.get(kernel), Case("first", problem), device)
    assert result.ok is not False, result.message


@pytest.mark.parametrize("kernel", [*filter(takes_causal, FORWARD)], ids=by_name)
def test_nan_stays_in_the_rows_that_see_it(kernel: Kernel, device: Device) -> None:
    """P of a masked key is 0, and 0 * NaN must not reach O."""
    problem = Problem(1, 1, 70, 70, 64, dtype=dtype_of(kernel), causal="bottom-right")
    q, k, v = make_inputs(Case("nan", problem))
    v[:, :, 40] = np.nan
    k[:, :, 50] = np.nan
    tile = choose.choose_tile(kernel, problem, None)
    outputs = trial.launch(kernel, tile, problem, {"Q": q, "K": k, "V": v}, device).outputs
    rows = np.isnan(outputs["O"].astype(np.float32)).any(axis=3)[0, 0]
    assert not rows[:40].any()
    assert rows[40:].all()
    assert np.isfinite(outputs["LSE"][0, 0, :50]).all()


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.computes == "backward" and takes_causal(k)], ids=by_name)
def test_nan_stays_in_the_gradients_that_it_reaches(kernel: Kernel, device: Device) -> None:
    """NaN in a query row, or in its dO, reaches that row of dQ, and dK and dV of the keys that it sees."""
    case = Case("nan", Problem(1, 1, 70, 70, 64, dtype=dtype_of(kernel), causal="bottom-right"))
    tile = choose.choose_tile(kernel, case.problem, None)
    for name in ("Q", "dO"):
        inputs = inputs_of(kernel.computes, case)
        inputs[name][:, :, 40] = np.nan
        outputs = trial.launch(kernel, tile, case.problem, inputs, device).outputs
        hit = {n: np.isnan(x.astype(np.float32)).any(axis=3)[0, 0] for n, x in outputs.items()}
        assert hit["dQ"].nonzero()[0].tolist() == [40]
        for gradient in ("dK", "dV"):
            assert hit[gradient].nonzero()[0].tolist() == list(range(41))


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_a_wrong_result_is_caught(kernel: Kernel, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` fails with a wrong scale, an unwritten element of any output, or an element that is too large."""
    mask = (1, 1, 64, 64) if kernel.computes == "block_map" else ()  # nothing to map without
    causal: Causal = "bottom-right" if not mask and (kernel.latent or takes_causal(kernel)) else False
    problem = Problem(1, 1, 64, 64, 64, dtype=dtype_of(kernel), mask=mask, causal=causal)
    case = Case("normal", kernel.adapted(problem))
    real = trial.launch
    assert check.verify(kernel, case, device).ok

    def fails(launch) -> bool:
        monkeypatch.setattr(trial, "launch", launch)
        return check.verify(kernel, case, device).ok is False

    def wrong_scale(kernel, tile, problem, *args, **kwargs):
        return real(kernel, tile, dataclasses.replace(problem, scale=0.13), *args, **kwargs)

    def non_finite(name: str, spoil):
        def launch(*args, **kwargs):
            done = real(*args, **kwargs)
            element = (0, 0, 0, 1) if name == "block_map" else (0, 0, 5, 5)[: done.outputs[name].ndim]
            done.outputs[name][element] = spoil(np.abs(done.outputs[name]).max())
            return done

        return launch

    assert kernel.computes in ("block_map", "preprocess") or fails(wrong_scale)
    for name in COMPUTATIONS[kernel.computes].writes:
        assert kernel.computes == "block_map" or fails(non_finite(name, lambda largest: np.nan))
        larger = (lambda largest: 6) if name == "block_map" else lambda largest: 1.1 * float(largest) + 1
        assert fails(non_finite(name, larger))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    """64-bit offsets: the heads of a tensor of 2.4e9 elements."""
    torch = pytest.importorskip("torch")
    import sandbox

    S, D = 2**20, 256
    q = torch.randn(1, 9, 40, D, device="cuda", dtype=torch.float16)
    k = torch.zeros(1, 9, S, D, device="cuda", dtype=torch.float16)
    k[:, :, -64:] = torch.randn(9, 64, D, device="cuda", dtype=torch.float16)
    last = k[:, :, -64:]
    assert 8 * last.stride(1) >= 2**31  # where the last head begins
    out = sandbox.attention(q, last, last)
    expected = torch.nn.functional.scaled_dot_product_attention(q, last, last)
    assert ((out - expected).abs() < 1e-2).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_driver_and_compiler_agree_on_resources(kernel: Kernel) -> None:
    """The driver reports the registers of the compiler's log, and the occupancy that we compute."""
    from sandbox.launch import driver

    gpu = driver.device()
    for D in (64, 128, 256):
        for tile in kernel.tiles:
            problem = kernel.adapted(Problem(1, 1, 1, 1, D, dtype=kernel.dtypes[-1]))
            if kernel.why_unsupported(problem, gpu.arch) or choose.why_tile_unsupported(
                kernel, problem, tile, gpu.arch
            ):
                continue
            case = Case("fits", dataclasses.replace(problem, Sq=8, Sk=8))
            assert check.verify(kernel, case, ("cuda", 0), tile).ok  # opts in to the shared memory
            loaded = pipeline.load(kernel, tile, problem, ("cuda", 0))
            for entry, function, compiled in zip(kernel.entries, loaded.functions, loaded.compiled, strict=True):
                resources = compiled.resources
                assert function.attribute("NUM_REGS") == resources.registers
                assert function.attribute("SHARED_SIZE_BYTES") == resources.smem_static
                x, y, z = entry.block(tile)
                smem = entry.smem_bytes(problem, tile)
                ours = arch.occupancy(gpu.arch, x * y * z, resources.registers, smem + resources.smem_static)
                assert ours.blocks_per_sm == function.blocks_per_sm(x * y * z, smem)


def test_program_name_is_the_source(tmp_path) -> None:
    """Errors, disassembly and Nsight show the real file: its path is in the line table."""
    compiled = pipeline.compile("fwd_minimal", arch="sm_90a")
    assert str(registry.get("fwd_minimal").source) in compiled.ptx
    assert nvrtc.version().split(".")[0] in ("12", "13")


def test_each_entry_is_compiled_by_its_name() -> None:
    """One cubin has all entries: of kernels with several, a sample without a GPU."""
    several = [kernel for kernel in KERNELS if len(kernel.entries) > 1 and not kernel.custom]  # a custom one has no D
    for kernel in several if driver.available() else random.Random(SEED).sample(several, 3):
        dtype = kernel.dtypes[0]
        compiled = [pipeline.compile(entry.name, D=64, dtype=dtype, arch="sm_90a") for entry in kernel.entries]
        assert [c.entry for c in compiled] == [entry.name for entry in kernel.entries]
        assert len({c.cubin for c in compiled}) == 1


@pytest.mark.parametrize("arch_name", ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_120", None])
def test_a_tile_may_take_all_the_shared_memory_there_is(arch_name: str | None) -> None:
    """And no more; for several entries the maximum counts."""
    target = arch.parse(arch_name) if arch_name else None
    have = arch.limits(target).smem_per_block if target else arch.LARGEST_SMEM
    kernel, problem = registry.get("fwd_minimal"), Problem(1, 1, 64, 64, 64)
    for need in (have - 1, have, have + 1):
        entry = Entry(
            name="fwd_minimal_more", grid=kernel.grid, block=kernel.block, args=kernel.args,
            smem_bytes=lambda p, t, need=need: need,
        )  # fmt: skip
        for variant in (
            dataclasses.replace(kernel, smem_bytes=lambda p, t, need=need: need),
            dataclasses.replace(kernel, then=(entry,)),
        ):
            reason = choose.why_tile_unsupported(variant, problem, kernel.tiles[0], target)
            assert (reason is None) == (need <= have)
            if reason is None:
                assert choose.choose_tile(variant, problem, target) == kernel.tiles[0]
            else:
                assert f"needs {need} bytes of shared memory at D=64" in reason
                assert f"has {have}" in reason
