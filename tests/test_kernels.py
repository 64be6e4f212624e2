"""Every kernel that the registry finds, against the float64 reference, on both backends."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from sandbox import arch, check, choose, driver, nvrtc, registry, run, trial
from sandbox.cases import Case, make_inputs, sweep_cases
from sandbox.dlpack import HOST, Device
from sandbox.spec import Causal, Kernel, Problem, Tile

KERNELS = list(registry.kernels().values())
FORWARD = [kernel for kernel in KERNELS if kernel.computes == "forward"]
ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120")
by_name = lambda kernel: kernel.name  # noqa: E731


@pytest.mark.parametrize("arch_name", ARCHS)
@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_every_tile_compiles_without_spills(kernel: Kernel, arch_name: str) -> None:
    """Registers are the scarce thing: a spill at a shipped tile is a mistake, on any architecture. Needs no GPU."""
    target, tried, refused = arch.parse(arch_name), 0, False
    for dtype in kernel.dtypes:
        for D, causal in itertools.product((40, 64, 96, 128, kernel.max_D), (False, True)):
            problem = Problem(1, 1, 1, 1, D, dtype=dtype, causal="bottom-right" if causal else False)
            for tile in kernel.tiles:
                if kernel.refuses(problem, target):
                    refused = True
                    continue
                if choose.refuses_tile(kernel, problem, tile, target):
                    continue
                r = run.compile(kernel, D=D, dtype=dtype, causal=causal, arch=arch_name, tile=tile).resources
                what = f"{kernel.name} {arch_name} D={D} {dtype} causal={causal} {tile}"
                assert (r.spill_stores, r.spill_loads, r.stack) == (0, 0, 0), what
                assert r.warnings == (), what
                tried += 1
    assert tried or refused


@pytest.mark.parametrize("kernel", FORWARD, ids=by_name)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sweep(kernel: Kernel, dtype: str, device: Device) -> None:
    """Ragged lengths, masks, groups, layouts, pointed inputs: everything `check` tries."""
    bad, tried = [], 0
    for case in sweep_cases(kernel):
        if case.problem.dtype == dtype:
            result = check.verify(kernel, case, make_inputs(case), device)
            tried += result.ok is not None
            if result.ok is False:
                bad.append(result)
    assert not bad, "\n".join(map(str, bad))
    assert tried > 30 or dtype not in kernel.dtypes


@pytest.mark.parametrize("kernel", FORWARD, ids=by_name)
def test_every_tile_is_right(kernel: Kernel, device: Device) -> None:
    """Not the best tile only."""
    for tile in kernel.tiles:
        problem = Problem(1, 2, 130, 101, 64, dtype=kernel.dtypes[-1], causal="bottom-right")
        case = Case("ragged", problem)
        result = check.verify(kernel, case, make_inputs(case), device, tile)
        assert result.ok, result


@pytest.mark.parametrize("kernel", FORWARD, ids=by_name)
def test_repeats_are_bit_equal(kernel: Kernel, device: Device) -> None:
    """A race shows once in hundreds of runs; the CPU backend, whose order is fixed, needs few."""
    case = Case("repeat", Problem(1, 2, 203, 131, 64, dtype=kernel.dtypes[-1], causal="bottom-right"))
    inputs = make_inputs(case)
    tile = choose.choose_tile(kernel, case.problem, None)
    first = trial.forward(kernel, tile, case.problem, *inputs, device)
    for _ in range(5 if device == HOST else 250):
        again = trial.forward(kernel, tile, case.problem, *inputs, device)
        assert first.out.tobytes() == again.out.tobytes()
        assert first.lse.tobytes() == again.lse.tobytes()


@pytest.mark.parametrize("causal", [False, "bottom-right"])
def test_few_blocks_do_all_the_work(causal: Causal, device: Device) -> None:
    """Blocks that stay on their SM: who takes which piece in which round, and over how many heads, changes no bit."""
    kernel, problem = registry.get("fwd_wgmma"), Problem(2, 3, 300, 200, 64, dtype="float16", causal=causal)
    if kernel.refuses(problem, None if device == HOST else driver.device(device[1]).arch):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    inputs = make_inputs(Case("blocks", problem))
    whole = trial.forward(kernel, Tile(BLOCK_M=128, BLOCK_N=64, STAGES=2, BLOCKS=1000), problem, *inputs, device)
    for blocks in (1, 2, 5, 7):
        tile = Tile(BLOCK_M=128, BLOCK_N=64, STAGES=2, BLOCKS=blocks)
        assert kernel.grid(problem, tile)[0] <= blocks
        again = trial.forward(kernel, tile, problem, *inputs, device)
        assert whole.out.tobytes() == again.out.tobytes()
        assert whole.lse.tobytes() == again.lse.tobytes()


@pytest.mark.parametrize("kernel", FORWARD, ids=by_name)
def test_nan_stays_in_the_rows_that_see_it(kernel: Kernel, device: Device) -> None:
    """A masked value's P is 0, and 0 * NaN must not count."""
    problem = Problem(1, 1, 70, 70, 32, dtype=kernel.dtypes[0], causal="bottom-right")
    q, k, v = make_inputs(Case("nan", problem))
    v[:, :, 40] = np.nan
    k[:, :, 50] = np.nan
    tile = choose.choose_tile(kernel, problem, None)
    done = trial.forward(kernel, tile, problem, q, k, v, device)
    rows = np.isnan(done.out.astype(np.float32)).any(axis=3)[0, 0]
    assert not rows[:40].any()
    assert rows[40:].all()
    assert np.isfinite(done.lse[0, 0, :50]).all()


@pytest.mark.parametrize("kernel", FORWARD, ids=by_name)
def test_a_wrong_result_is_caught(kernel: Kernel, device: Device, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: with the scale forgotten, an output left unwritten, or NaN, it does."""
    case = Case("normal", Problem(1, 1, 64, 64, 64, dtype=kernel.dtypes[0]))
    inputs = make_inputs(case)
    assert check.verify(kernel, case, inputs, device).ok
    scale = dataclasses.replace(case, problem=dataclasses.replace(case.problem, scale=0.13))
    real = trial.forward

    def wrong_scale(kernel, tile, problem, *args, **kwargs):
        return real(kernel, tile, scale.problem, *args, **kwargs)

    monkeypatch.setattr(trial, "forward", wrong_scale)
    assert check.verify(kernel, case, inputs, device).ok is False

    def one_nan(*args, **kwargs):
        done = real(*args, **kwargs)
        done.out[0, 0, 5, 5] = np.nan
        return done

    monkeypatch.setattr(trial, "forward", one_nan)
    assert check.verify(kernel, case, inputs, device).ok is False


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
    """Registers that the driver reports are those that the log says; so is occupancy, by our own rule."""
    from sandbox import driver

    gpu = driver.device()
    for D in (64, 128, 256):
        for tile in kernel.tiles:
            problem = Problem(1, 1, 1, 1, D, dtype=kernel.dtypes[-1])
            if kernel.refuses(problem, gpu.arch) or choose.refuses_tile(kernel, problem, tile, gpu.arch):
                continue
            compiled, function = run._on_gpu(kernel, tuple(kernel.defines(problem, tile).items()), 0)
            resources = compiled.resources
            assert function.attribute("NUM_REGS") == resources.registers
            assert function.attribute("SHARED_SIZE_BYTES") == resources.smem_static
            x, y, z = kernel.block(tile)
            smem = kernel.smem_bytes(problem, tile)
            case = Case("fits", dataclasses.replace(problem, Sq=8, Sk=8))
            assert check.verify(kernel, case, make_inputs(case), ("cuda", 0), tile).ok  # opts in to the shared memory
            ours = arch.occupancy(
                gpu.arch, x * y * z, compiled.resources.registers, smem + compiled.resources.smem_static
            )
            assert ours.blocks_per_sm == function.blocks_per_sm(x * y * z, smem)


def test_program_name_is_the_source(tmp_path) -> None:
    """Errors, disassembly and Nsight show the real file: its path is in the line table."""
    compiled = run.compile("fwd_minimal", arch="sm_90a")
    assert str(registry.get("fwd_minimal").source) in compiled.ptx
    assert nvrtc.version().split(".")[0] in ("12", "13")
