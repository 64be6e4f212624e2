"""Every score option in every kernel: compiled without spills, and correct; large sets of cases are sampled."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest
from project import SAMPLE, SEED

from sandbox.core import options, registry
from sandbox.core.dtypes import FLOAT8
from sandbox.core.errors import CompileError, UnsupportedProblem
from sandbox.core.score import Score, TensorLike
from sandbox.core.snippet import header, single
from sandbox.disassembly import sweep
from sandbox.engine import choose, pipeline, spills
from sandbox.launch import driver
from sandbox.launch.arguments import score_argument
from sandbox.launch.array_view import ArrayView
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Kernel, Problem, Tile
from sandbox.toolchain import arch
from sandbox.verify import check, trial
from sandbox.verify.attention import usual_dtypes
from sandbox.verify.cases import Case, inputs_of
from sandbox.verify.scores import OF_FLOAT8, OF_FLOAT8_KEYS, OPTIONS

KERNELS = [kernel for kernel in registry.kernels().values() if kernel.computes in ("forward", "backward")]
SIXTEEN_BITS = ("float16", "bfloat16")
FEW_OPTIONS = ("bwd_wgmma_head", "fwd_wgmma_stream_k", "bwd_wgmma_stream_k")  # none, or a sink
by_name = lambda kernel: kernel.name  # noqa: E731


def with_options(names: tuple[str, ...], problem: Problem) -> Problem:
    for name in names:
        problem = dataclasses.replace(problem, **OPTIONS[name](problem))
    return problem


def sample(kernel: Kernel, count: int) -> Iterator[tuple[str, Problem, str]]:
    """Options sampled, alone or two together, with lengths, head widths, dtypes and masks: (what, problem, inputs)."""
    draw = random.Random(f"{SEED} {kernel.name}")
    names, dtypes = list(OPTIONS), usual_dtypes(kernel)
    for _ in range(count):
        chosen = tuple(draw.sample(names, draw.choice((1, 2))))
        Sq, Sk = draw.choice(((1, 70), (70, 33), (97, 150), (150, 97), (64, 64), (129, 200)))
        causal = draw.choice((False, "bottom-right", "top-left"))
        problem = Problem(2, 4, Sq, Sk, draw.choice((32, 64, 40)), Hk=draw.choice((1, 2, 4)),
                          dtype=draw.choice(dtypes), causal=causal)  # fmt: skip
        yield " + ".join(chosen), with_options(chosen, kernel.adapted(problem)), draw.choice(("normal", "hidden"))


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.name not in FEW_OPTIONS], ids=by_name)
@pytest.mark.sampled(2)
def test_options_sampled(kernel: Kernel, device: Device) -> None:
    """The first supported one on the CPU backend. SANDBOX_SEED=N repeats the sample of an earlier run."""
    tried = 0
    for what, problem, inputs in sample(kernel, 40):
        if kernel.why_unsupported(problem):  # an unsupported head dimension
            continue
        # With one key dS is 0 except for the rounding of O, which delta contains: the bound does not cover that.
        if problem.dropout and problem.Sq == 1 and kernel.computes == "backward":
            continue
        result = check.verify(kernel, Case(what, problem, inputs), device)
        assert result.ok, f"SANDBOX_SEED={SEED}: {problem} {inputs}: {result}"
        tried += 1
        if device == HOST and SAMPLE != "all":
            break
    assert tried


@pytest.mark.parametrize("more", OF_FLOAT8, ids=["heads", "float32", "of two kinds", "all"])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if {*k.dtypes} == {*FLOAT8}], ids=by_name)
@pytest.mark.sampled(3)
def test_options_of_float8(kernel: Kernel, more, device: Device) -> None:
    """Descale in each form, V of the other float8 type, and each dtype of O; each with another option, on several
    tiles."""
    problem = Problem(2, 4, 140, 170, 48, Hk=2, dtype=kernel.dtypes[OF_FLOAT8.index(more) % 2], causal="bottom-right")
    result = check.verify(kernel, Case("float8", dataclasses.replace(problem, **more(problem))), device)
    assert result.ok, result


@pytest.mark.parametrize("more", OF_FLOAT8_KEYS, ids=["heads", "of two kinds", "sink", "all"])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.float8_keys], ids=by_name)
@pytest.mark.sampled(6)
def test_options_of_float8_keys(kernel: Kernel, more, device: Device) -> None:
    """float8 keys with 16-bit queries: descale in each form, V of the other float8 type, each with another option."""
    dtype = SIXTEEN_BITS[OF_FLOAT8_KEYS.index(more) % 2]
    problem = Problem(2, 4, 140, 170, 48, Hk=2, dtype=dtype, causal="bottom-right")
    result = check.verify(kernel, Case("float8 keys", dataclasses.replace(problem, **more(problem))), device)
    assert result.ok, result


@pytest.mark.parametrize("target", sweep.ARCHS[:-1])
@pytest.mark.parametrize("kernel", list(registry.kernels().values()), ids=by_name)
@pytest.mark.sampled(50)
def test_no_option_spills(kernel: Kernel, target: str) -> None:
    """Two sampled cases: the tile that selection chooses does not spill unless its table says so."""
    draw, capability = random.Random(f"{SEED} {kernel.name} {target}"), arch.parse(target)
    jobs = [job for job in sweep.jobs(kernel, [target]) if job.D in spills.WIDTHS]
    for job in draw.sample(jobs, min(2, len(jobs))):
        cases = [p for case in job.cases for p in sweep.problems(job, case, draw.random() < 0.5)]
        for problem in draw.sample(cases, min(1, len(cases))):
            with contextlib.suppress(UnsupportedProblem):
                tile = choose.choose_tile(kernel, problem, capability)
                if not spills.spilled(kernel, problem, tile, capability):
                    assert sweep.spilled(kernel, problem, tile, target) == 0, f"SANDBOX_SEED={SEED}: {problem} {tile}"


def test_hopper_kernels_take_tiles_of_a_bias(device: Device) -> None:
    """A bias per head of a group, and one for all heads; with a softcap, and with partial tiles of rows and keys. The
    forward without a mask: with one it computes rows that are not finite again, without tiles."""
    for name, H, softcap in (("fwd_wgmma", 2, 3.0), ("bwd_wgmma", 2, 0.0), ("bwd_wgmma_deterministic", 1, 3.0)):
        causal = False if name == "fwd_wgmma" else "bottom-right"
        plain = Problem(1, 2, 70, 136, 72, Hk=1, dtype="float16", causal=causal)
        problem = dataclasses.replace(plain, bias=(1, H, 70, 136), softcap=softcap)
        assert problem.bias_tiles
        result = check.verify(registry.kernels()[name], Case("bias", problem), device)
        assert result.ok, result


def test_the_hopper_backward_takes_a_narrow_v(device: Device) -> None:
    """Columns of V up to k's head dimension are read as zeros, and those of dV are not written: they would overlap the
    next row."""
    problem = Problem(1, 2, 140, 152, 192, Hk=1, dtype="bfloat16", causal="bottom-right", Dv=104)
    result = check.verify(registry.kernels()["bwd_wgmma"], Case("Dv", problem), device)
    assert result.ok, result


@pytest.mark.parametrize(("D", "Dv"), [(128, 128), (256, 256), (192, 128)])
@pytest.mark.parametrize("names", ["softcap + left window", "alibi + mask", "score + dropout"])
@pytest.mark.sampled(8)
def test_options_of_wide_heads(names: str, D: int, Dv: int, device: Device) -> None:
    """In the Hopper backward, whose consumers divide a tile differently for each head dimension."""
    kernel = registry.kernels()["bwd_wgmma"]
    problem = with_options(
        tuple(names.split(" + ")), Problem(1, 2, 140, 150, D, Hk=1, Dv=Dv, dtype="bfloat16", causal="bottom-right")
    )
    result = check.verify(kernel, Case(names, problem), device)
    assert result.ok, result


@pytest.mark.parametrize("option", ["window", "right window", "lengths"])
@pytest.mark.sampled(3)
def test_a_wide_tile_of_ranges(option: str, device: Device) -> None:
    """The tile for D = 256 that does not spill with windows and key lengths."""
    tile = Tile(BLOCK_M=128, BLOCK_N=64, SUB_N=16, WARPS=8, MIN_BLOCKS=1)
    plain = Problem(1, 2, 190, 210, 256, Hk=1, dtype="bfloat16")
    case = Case(option, dataclasses.replace(plain, **sweep.ALONE[option](plain)))
    result = check.verify(registry.kernels()["fwd_mma"], case, device, tile)
    assert result.ok, result


FEW_BLOCKS = [Tile(BLOCK_M=192, BLOCK_N=32, STAGES=2, BLOCKS=3), Tile(BLOCK_M=128, BLOCK_N=48, STAGES=2, BLOCKS=2)]


@pytest.mark.parametrize("tile", FEW_BLOCKS, ids=str)
@pytest.mark.parametrize("names", ["left window", "window", "alibi", "alibi + left window", "Dv"])
@pytest.mark.sampled(4)
def test_warpgroups_skip_tiles_that_only_others_see(names: str, tile: Tile) -> None:
    """Some key tiles of a work tile are before a warpgroup's n_block range, and some after it: the ping-pong order is
    kept."""
    kernel = registry.kernels()["fwd_wgmma"]
    problem = with_options(
        tuple(names.split(" + ")), Problem(1, 2, 450, 520, 32, dtype="float16", causal="bottom-right")
    )
    assert check.verify(kernel, Case(names, problem), HOST, tile).ok


C, TILE = "bottom-right", Tile(BLOCK_M=192, BLOCK_N=64, STAGES=4, BLOCKS=2)
# Rows end within a work tile; fewer keys than rows, so that some rows see none, or more; windows from one key to all.
WINDOWS = {
    "causal": (Problem(1, 4, 450, 700, 32, Hk=2, dtype="float16", causal=C, window=(300, 0)), TILE),
    "both sides": (Problem(2, 1, 450, 520, 32, dtype="float16", window=(330, 30), sink=True), TILE),
    "lengths": (Problem(2, 1, 450, 400, 32, dtype="float16", window=(100, 30), key_lengths=True), TILE),
    "blind rows": (Problem(1, 4, 700, 450, 64, Hk=1, dtype="float16", causal=C, window=(100, 0)), TILE),
    "top-left": (Problem(1, 2, 700, 450, 128, dtype="bfloat16", causal="top-left", window=(70, 0)), TILE),
    "no right end": (Problem(1, 2, 450, 700, 128, dtype="bfloat16", window=(200, None), Dv=64), TILE),
    "one key": (Problem(2, 2, 450, 450, 96, dtype="bfloat16", causal=C, window=(0, 0)), TILE),
    "short tiles": (
        Problem(1, 2, 600, 600, 32, dtype="float16", window=(30, 200), softcap=5.0),
        Tile(BLOCK_M=192, BLOCK_N=32, STAGES=6, BLOCKS=3),
    ),
    "ragged": (
        Problem(0, 2, 0, 0, 64, dtype="bfloat16", causal=C, window=(90, 0), lengths=((300, 300), (1, 200), (150, 70))),
        Tile(BLOCK_M=128, BLOCK_N=64, STAGES=4, BLOCKS=2),
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.sampled(3)
def test_warpgroups_of_a_window_begin_together(name: str, device: Device) -> None:
    """If the pipeline has spare stages. The CPU backend runs the first two cases and a sampled one."""
    kernel, (problem, tile) = registry.get("fwd_wgmma"), WINDOWS[name]
    if kernel.why_unsupported(problem, None if device == HOST else driver.device(device[1]).arch):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    if device == HOST and name not in [*WINDOWS][:2] and name != random.Random(SEED).choice([*WINDOWS][2:]):
        pytest.skip(f"not drawn by SANDBOX_SEED={SEED}")
    result = check.verify(kernel, Case(name, problem), device, tile)
    assert result.ok, result


SHAPES = [(2, 4, 40, 70), (1, 4, 40, 70), (2, 1, 1, 70), (1, 1, 40, 1), (1, 4, 1, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sampled(2)
def test_the_gradient_of_a_bias_sums_what_it_was_broadcast_to(shape: tuple[int, ...], device: Device) -> None:
    """For every shape, with the same bits each time."""
    kernel = registry.kernels()["bwd_minimal"]
    problem = Problem(2, 4, 40, 70, 24, Hk=2, causal="bottom-right", bias=shape, softcap=3.0)
    case = Case("bias", problem)
    assert check.verify(kernel, case, device).ok
    tile, given = choose.choose_tile(kernel, problem, None), inputs_of("backward", case)
    first, again = (trial.launch(kernel, tile, problem, given, device).outputs["dbias"] for _ in range(2))
    assert first.shape == shape
    assert first.tobytes() == again.tobytes()


@pytest.mark.parametrize("name", ["mask", "key_lengths"])
@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.sampled(12)
def test_nan_in_hidden_keys_reaches_no_result(kernel: Kernel, name: str, device: Device) -> None:
    """Also in the non-finite fallback."""
    problem = with_options((name,), kernel.adapted(Problem(1, 2, 40, 70, 64, Hk=1, dtype=kernel.dtypes[0])))
    if reason := kernel.why_unsupported(problem):
        pytest.skip(reason)
    result = check.verify(kernel, Case(name, problem, "hidden"), device)
    assert result.ok, result


# Options in sets that a kernel takes together, for the fallback that computes single rows when an input is NaN or inf.
FALLBACK = [("dropout", "sink"), ("softcap", "window"), ("bias", "alibi"), ("mask", "Dv"), ("score",), ("key_lengths",)]
# Each fallback (non_finite.cuh, and fwd_decode has its own) with all of them, other kernels with one by lot.
OF_FALLBACK = ("fwd_mma", "fwd_decode", "bwd_mma")


@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.sampled(8)
def test_options_in_the_fallback_for_non_finite_inputs(kernel: Kernel, device: Device) -> None:
    """NaN in a query, a key and a value, or for a backward in a query and a row of dO: rows and keys of the same tiles
    that do not see it are right."""
    draw, dtype = random.Random(f"{SEED} {kernel.name}"), kernel.dtypes[-1]
    plain = Problem(2, 4, 77, 97, 64, Hk=2, dtype=dtype, causal="bottom-right")
    taken = [p for p in (with_options(names, plain) for names in FALLBACK) if not kernel.why_unsupported(p)]
    every = device != HOST or kernel.name in OF_FALLBACK
    for problem in taken if every else draw.sample(taken, min(len(taken), 1)):
        inputs = "nan" if kernel.computes == "forward" else "nan_query"
        result = check.verify(kernel, Case("fallback", problem, inputs), device)
        assert result.ok, f"SANDBOX_SEED={SEED}: {problem}: {result}"


def test_a_row_that_sees_a_sink_alone(device: Device) -> None:
    """Its O is 0 and its LSE the sink."""
    kernel = registry.kernels()["fwd_minimal"]
    problem = Problem(1, 2, 5, 7, 8, mask=(1, 1, 5, 7), sink=True)
    case = Case("sink", problem)
    given = inputs_of("forward", case)
    given["mask"][:, :, 2] = False
    done = trial.launch(kernel, choose.choose_tile(kernel, problem, None), problem, given, device)
    assert not done.outputs["O"][:, :, 2].any()
    np.testing.assert_allclose(done.outputs["LSE"][0, :, 2], given["sink"], rtol=1e-6)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.computes == "forward"], ids=by_name)
@pytest.mark.sampled(2)
def test_a_row_whose_bias_is_minus_infinity(kernel: Kernel, device: Device) -> None:
    """The row has the result of a row without keys; other rows of its tile are unaffected."""
    problem = Problem(1, 1, 40, 170, 64, dtype=kernel.dtypes[0], bias=(1, 1, 40, 170))
    if reason := kernel.why_unsupported(kernel.adapted(problem)):
        pytest.skip(reason)
    given = inputs_of("forward", Case("bias", problem))
    given["bias"][:, :, 2] = -np.inf
    found = trial.launch(kernel, choose.choose_tile(kernel, problem, None), problem, given, device).outputs
    assert not found["O"][0, 0, 2].any()
    assert np.isneginf(found["LSE"][0, 0, 2])
    assert np.isfinite(np.delete(found["LSE"][0, 0], 2)).all()
    assert np.isfinite(found["O"].astype(np.float32)).all()


def test_unused_options_are_not_compiled_in() -> None:
    plain = Problem(1, 1, 9, 9, 64, dtype="float16", causal="bottom-right")
    assert options.macros(plain) == {}
    assert options.macros(dataclasses.replace(plain, window=(None, 5))) == {}  # causal says the same
    assert options.macros(dataclasses.replace(plain, window=(5, 5)))["WINDOW"] == 1


def test_a_bias_with_strides_between_keys_is_refused() -> None:
    problem = Problem(1, 1, 4, 6, 8, bias=(1, 1, 4, 6))
    bias = np.zeros((4, 12), np.float32)[:, ::2]
    view = ArrayView(bias.ctypes.data, bias.shape, (12, 2), "float32", HOST, bias)
    with pytest.raises(UnsupportedProblem, match="bias with stride 2 in its last dimension"):
        score_argument(problem, {"bias": view})


def test_a_mistake_in_an_expression_shows_where(own_cache: object) -> None:
    """With its column; NVRTC also shows the expression, with a caret below it."""
    kernel = registry.kernels()["fwd_minimal"]
    problem = Problem(1, 1, 4, 4, 8, score=Score("x + slop(h)", tensors={"slope": TensorLike((1,), "float32")}))
    tile = choose.choose_tile(kernel, problem, None)
    with pytest.raises(CompileError, match=r"x \+ slop\(h\) does not compile: .*slop"):
        pipeline.load(kernel, tile, problem, HOST)
    with pytest.raises(CompileError, match=r"x \+ slop\(h\) does not compile: .*slop") as device:
        pipeline.compile_problem(kernel, problem, tile, "sm_90a")
    assert "x + slop(h)" in str(device.value)


def test_literals_are_of_single_precision() -> None:
    assert single("x * 0.5 + 1e-3 * .25 - 2. + 3 * 1.5f + a1.5") == "x * 0.5f + 1e-3f * .25f - 2.f + 3 * 1.5f + a1.5"
    assert header(Score("x - 0.5")) != header(Score("x - 0.25"))
