"""A spec's `args` compared with the parameters of its `.cu`: the first difference is reported before a launch."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from project import check_stored, digest, drawn_problem, in_project, is_stored, new_kernel

from sandbox.core import registry
from sandbox.core.errors import DriverError, SpecError, UnsupportedProblem
from sandbox.core.kernel import Kernel
from sandbox.core.options import macros, score_tensors
from sandbox.engine import pipeline
from sandbox.launch import arguments, parameters
from sandbox.launch.arguments import ARGUMENTS
from sandbox.launch.array_view import dense_strides
from sandbox.launch.dlpack import HOST
from sandbox.profile.work import work_of
from sandbox.spec import Operation, Problem, Tensor
from sandbox.toolchain import nvrtc
from sandbox.toolchain.nvrtc import Parameter
from sandbox.verify.sanitize import launch_on_host

MINIMAL = registry.get("fwd_minimal")
ARGS = MINIMAL.args


def found_on_the_cpu(kernel: Kernel) -> list[tuple[Parameter, ...]]:
    problem = problem_of(kernel)
    return [f.parameters for f in pipeline.load(kernel, kernel.tiles[0], problem, HOST).functions]  # type: ignore[union-attr]


def found_in_ptx(kernel: Kernel) -> list[tuple[Parameter, ...]]:
    p = problem_of(kernel)
    compiled = pipeline.compile_problem(kernel, p, kernel.tiles[0], "sm_90a")
    return [nvrtc.parameters(made.ptx, made.entry) for made in compiled]


def problem_of(kernel: Kernel) -> Problem:
    return Problem(1, 1, 64, 64, 64, dtype="float16" if "float16" in kernel.dtypes else kernel.dtypes[0])


@pytest.mark.parametrize("find", [found_on_the_cpu, found_in_ptx])
@pytest.mark.parametrize("name", registry.kernels())
@pytest.mark.sampled(8)
def test_shipped_kernels_agree_with_their_specs(name: str, find) -> None:
    kernel = registry.get(name)
    for entry, found in zip(kernel.entries, find(kernel), strict=True):
        assert len(found) == len(entry.args)
        parameters.check_arguments(entry, found, kernel.source, macros(problem_of(kernel)).get("SCORE_BYTES", 16))


@pytest.mark.parametrize("other", [False, True], ids=["main entry", "other entry"])
def test_a_kernel_is_loaded_only_if_each_entry_agrees(other: bool) -> None:
    """On the CPU backend. A parameter without an argument would have any value."""
    kernel = registry.get("bwd_mma")
    (then,) = kernel.then
    entry, args = (then, then.args[:-1]) if other else (kernel, kernel.args[:-1])
    then = (dataclasses.replace(then, args=args),)
    changed = dataclasses.replace(kernel, then=then) if other else dataclasses.replace(kernel, args=args)
    with pytest.raises(SpecError, match=rf"{entry.name}.*args in its spec has {len(args)} names"):
        pipeline.load(changed, kernel.tiles[0], problem_of(kernel), HOST)


def test_an_unknown_name_in_args() -> None:
    kernel = registry.get("fwd_minimal")
    kernel = dataclasses.replace(kernel, args=("grp", *kernel.args))
    with pytest.raises(
        SpecError, match=r"^fwd_minimal: args: 'grp' is not known: choose one of .*group.*, or define it in"
    ):
        arguments.ArgumentBlock(kernel, problem_of(kernel), kernel.tiles[0], {})


def test_an_unknown_name_in_unused() -> None:
    kernel = dataclasses.replace(registry.get("fwd_minimal"), unused=lambda p, t: ("Q_map",))
    with pytest.raises(SpecError, match=r"^fwd_minimal: unused: 'Q_map' is not one of its args: Q, K, V"):
        arguments.ArgumentBlock(kernel, problem_of(kernel), kernel.tiles[0], {})


def swapped(one: str, other: str) -> tuple[str, ...]:
    change = {one: other, other: one}
    return tuple(change.get(name, name) for name in ARGS)


@pytest.mark.parametrize("find", [found_on_the_cpu, found_in_ptx])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (ARGS[:-1], r"args in its spec has 6 names, fwd_minimal.cu has 7 parameters: parameter 7, struct of \d+ bytes"),
        ((*ARGS, "H"), "args in its spec has 8 names, fwd_minimal.cu has 7 parameters: argument 8, H,"),
        (ARGS[1:], "argument 1 in its spec is K, but parameter 1 in fwd_minimal.cu is called Q"),
        (swapped("LSE", "group"), "argument 5 in its spec is group, integer of 4 bytes, but parameter 5 .* LSE,"),
        (swapped("group", "score"), r"argument 6 in its spec is score, struct of .* bytes, but parameter 6 .* gr"),
        (swapped("K", "V"), "argument 2 in its spec is V, but parameter 2 in fwd_minimal.cu is called K"),
        (swapped("V", "O"), "argument 3 in its spec is O, but parameter 3 in fwd_minimal.cu is called V"),
    ],
)  # fmt: skip
def test_the_first_that_differs_is_named(args: tuple[str, ...], message: str, find) -> None:
    (found,) = find(MINIMAL)
    entry = dataclasses.replace(MINIMAL.entries[0], args=tuple(ARGS))  # a spec checks its own names
    object.__setattr__(entry, "args", args)
    with pytest.raises(SpecError, match=f"^fwd_minimal: {message}"):
        parameters.check_arguments(entry, found, MINIMAL.source)


def test_parameters_without_names_of_ours(tmp_path: Path) -> None:
    """A `.cu` may use any parameter names, except the name of another argument."""
    source = tmp_path / "fwd_minimal.cu"
    text = MINIMAL.source.read_text().replace("Q.row", "queries.row").replace("(Q, O)", "(queries, O)")
    source.write_text(text.replace("dtype> Q,", "dtype> /* Q, */ queries,"))
    (found,) = found_on_the_cpu(dataclasses.replace(MINIMAL, source=source))
    parameters.check_arguments(MINIMAL, found, source)


@pytest.mark.parametrize(
    ("declared", "tensor", "dtypes", "message"),
    [
        ("const dtype* x", Tensor("N"), ("float32", "float16"), None),
        ("const float* __restrict__ x", Tensor("N", dtype="float32"), ("float16",), None),
        ("float const *x", Tensor("N"), ("float32",), None),
        ("const dtype* x", Tensor("N", dtype="float16"), ("float16",), None),
        ("const long long* x", Tensor("N", dtype="int64"), ("float32",), None),
        ("const T* x", Tensor("N"), ("float32", "float16"), None),  # not known
        ("const unsigned* x", Tensor("N", dtype="int32"), ("float32",), None),
        ("float** x", Tensor("N"), ("float16",), None),
        ("const float* x", Tensor("N"), ("float32", "float16"),
         r"x, has the problem's dtype in its spec, but is float\* in k.cu \(write dtype\*, or give its Tensor dtype"),
        ("const dtype* x", Tensor("N", dtype="float32"), ("float32", "float16"),
         r"x, has dtype='float32' in its spec, but is dtype\* in k.cu \(omit dtype\)"),
        ("const int* x", Tensor("N", dtype="int64"), ("float32",),
         r"x, has dtype='int64' in its spec, but is int\* in k.cu \(dtype='int32'\)"),
    ],
)  # fmt: skip
def test_element_types(
    declared: str, tensor: Tensor, dtypes: tuple[str, ...], message: str | None, tmp_path: Path
) -> None:
    operation = Operation(dims=("N",), inputs={"x": tensor}, outputs={"y": Tensor("N")}, reference=lambda x: x)
    source = tmp_path / "k.cu"
    source.write_text(f'extern "C" __global__ void k(int N, {declared}, dtype* y) {{}}')
    kernel = Kernel(name="k", computes=operation, dtypes=dtypes, grid=lambda p, t: (1, 1, 1), block=lambda t: (1, 1, 1),
                    args=("N", "x", "y"), source=source)  # fmt: skip
    if message is None:
        parameters.check_element_types(kernel)
    else:
        with pytest.raises(SpecError, match=f"^k: argument 2, {message}"):
            parameters.check_element_types(kernel)


def test_kinds_in_ptx() -> None:
    ptx = """.visible .entry k(
\t.param .u64 .ptr .global .align 1 k_param_0,
\t.param .f32 k_param_1,
\t.param .align 64 .b8 k_param_2[128],
\t.param .b32 k_param_3
)"""
    assert nvrtc.parameters(ptx, "k") == (
        Parameter(("integer", "pointer"), 8),
        Parameter(("float",), 4),
        Parameter(("struct",), 128),
        Parameter(("integer", "pointer"), 4),
    )


def test_run_says_so_for_that_kernel_alone(project_copy: Path) -> None:
    new_kernel(project_copy, "fwd_swapped", **{'"LSE", "group"': '"group", "LSE"'})
    done = in_project(
        project_copy, "sandbox", "run", "fwd_minimal", "fwd_swapped", "--shape", "1,1,7,16", "--backend", "cpu"
    )
    assert done.returncode == 1
    assert "FAIL fwd_swapped on B1 H1 S7 D16 float16 [cpu]: argument 5 in its spec is group, integer of" in done.stdout
    done = in_project(project_copy, "sandbox", "sanitize", "fwd_swapped", "--backend", "cpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("sandbox: fwd_swapped: argument 5 in its spec is group")


BOUND = "__launch_bounds__(BLOCK_M, 1) void fwd_minimal("


@pytest.mark.parametrize("bound", [BOUND, "void __launch_bounds__(THREADS) fwd_minimal("])
def test_a_block_beyond_the_launch_bounds_is_rejected(bound: str, tmp_path: Path) -> None:
    """On the CPU backend, under its sanitizers, and by NVRTC's PTX."""
    tile = MINIMAL.tiles[-1]
    text = MINIMAL.source.read_text()
    assert BOUND in text
    constant = 'constexpr int THREADS = BLOCK_M;  // void fwd_minimal(\nextern "C"'
    source = tmp_path / "fwd_minimal.cu"
    source.write_text(text.replace('extern "C"', constant).replace(BOUND, bound))
    fits = dataclasses.replace(MINIMAL, source=source)
    exceeds = dataclasses.replace(fits, block=lambda t: (t.BLOCK_M, 2, 1))
    M, problem = tile.BLOCK_M, Problem(1, 1, 40, 40, 16, dtype="float16")
    message = re.escape(f"fwd_minimal: a block of {2 * M} threads, ({M}, 2, 1), exceeds its __launch_bounds__({M})")
    for prepare in (
        lambda kernel: pipeline.load(kernel, tile, problem, HOST),
        lambda kernel: pipeline.compile_problem(kernel, problem, tile, "sm_80"),
    ):
        prepare(fits)
        with pytest.raises(SpecError, match=message):
            prepare(exceeds)
    report, _ = launch_on_host("none", exceeds, problem, tile)
    assert f"fwd_minimal: a block of {2 * M} threads exceeds its __launch_bounds__({M})" in report.text
    assert launch_on_host("none", fits, problem, tile)[0].clean


@pytest.mark.parametrize("name", registry.kernels())
@pytest.mark.sampled(4)
def test_the_launch_bounds_of_shipped_kernels(name: str) -> None:
    """The CPU backend parses the same bounds from the source as NVRTC."""
    kernel = registry.get(name)
    tile, problem = kernel.tiles[0], problem_of(kernel)
    in_ptx = [nvrtc.max_threads(c.ptx, c.entry) for c in pipeline.compile_problem(kernel, problem, tile, "sm_90a")]
    assert in_ptx == [math.prod(entry.block(tile)) for entry in kernel.entries]
    assert in_ptx == [*pipeline.load(kernel, tile, problem, HOST).max_threads]


def test_launch_bounds_in_ptx() -> None:
    ptx = ".entry k_2()\n.maxntid 1\n{\n}\n.visible .entry k()\n.maxntid 32, 2, 1\n.minnctapersm 2\n{\nret;\n}\n"
    ptx += ".entry free(.param .u64 p)\n{\n}"
    assert [nvrtc.max_threads(ptx, entry) for entry in ("k", "free", "none")] == [64, 0, 0]


def test_launch_bounds_that_the_preprocessor_chooses_are_left_to_nvrtc(run_cuda) -> None:
    text = """
    #if CHOSEN
    extern "C" __global__ __launch_bounds__(32) void k(int* out)
    #else
    extern "C" __global__ __launch_bounds__(64) void k(int* out)
    #endif
    { out[threadIdx.x] = 1; }"""
    out = np.zeros(64, np.int32)
    run_cuda(text, "k", out, block=64)
    assert out.all()


def test_a_launch_beyond_the_bounds_fails_on_the_cpu(run_cuda, device) -> None:
    text = 'extern "C" __global__ __launch_bounds__(2 * (16), 1) void k(int* out) { out[threadIdx.x] = 1; }'
    out = np.zeros(64, np.int32)
    run_cuda(text, "k", out, block=32)
    error, message = (SpecError, r"exceeds its __launch_bounds__\(32\)") if device == HOST else (DriverError, None)
    with pytest.raises(error, match=message):
        run_cuda(text, "k", out, block=64)
    assert out.sum() == 32


# ---- values


class Placed(NamedTuple):
    """A tensor without memory."""

    pointer: int
    strides: tuple[int, ...]


def placed(problem: Problem, names: Iterable[str]) -> dict[str, Placed]:
    """The tensors of a problem at made-up addresses; those with four dimensions as (B, S, H, D), with gaps."""
    found = {}
    for n, name in enumerate(sorted(names), 1):
        of_keys, width = name in ("K", "V", "dK", "dV"), problem.Dv if name in ("V", "O", "dO", "dV") else problem.D
        _, heads, rows = problem.key_shape if of_keys else (problem.batches, problem.H, problem.rows[0])
        step = -(-width // 16) * 16 + 16
        strides = (rows * heads * step, step, heads * step, 1)
        if name == "bias":
            strides = dense_strides(problem.bias)
        elif name == "mask":
            strides = dense_strides(problem.mask)
        found[name] = Placed(n << 20, strides if name in VIEWS or name in ("bias", "mask") else (1,) * 4)
    return found


VIEWS = ("Q", "K", "V", "O", "dO", "dQ", "dK", "dV")


@pytest.mark.parametrize(
    "name", [n for n, k in registry.kernels().items() if not k.custom and is_stored(f"arguments/{n}.txt")]
)
def test_stored_arguments(name: str) -> None:
    """The bytes of all arguments, and the bytes that each entry reads and writes by the IO model, for random problems
    that the kernel supports; the arguments of some as text."""
    kernel, draw, lines = registry.get(name), random.Random(name), []
    for _ in range(400):
        problem = kernel.adapted(drawn_problem(draw, kernel.dtypes))
        if kernel.why_unsupported(problem) or problem.Sq > 4097 or (problem.score and problem.score.tensors):
            continue
        tile = draw.choice(kernel.tiles)
        given = {"dbias": problem.bias, "dsink": problem.sink}
        for entry in kernel.entries:
            if not all(given.get(arg, True) for arg in entry.args):
                continue
            wanted = {row.tensor for arg in entry.args if (row := ARGUMENTS.get(arg)) and row.tensor}
            wanted |= {tensor.name for tensor in score_tensors(problem)} if "score" in entry.args else set()
            tensors = placed(problem, wanted - {"dLSE"})
            try:
                values = arguments.ArgumentBlock(entry, problem, tile, tensors).values
                shown = ", ".join(f"{arg} {bytes(value).hex()}" for arg, value in zip(entry.args, values, strict=True))
            except UnsupportedProblem as error:
                shown = str(error)
            lines.append(f"{entry.name} {problem} {tile}: {shown} {work_of(entry, problem, tile)}")
    check_stored(f"arguments/{name}.txt", [*(line[:1500] for line in lines[:3]), digest(lines)])


@pytest.mark.parametrize(
    ("Sq", "D", "shape"),
    [
        (1, 16, (2, 3, 128, 32)), (128, 32, (2, 3, 128, 32)), (129, 33, (2, 3, 256, 64)), (256, 64, (2, 3, 256, 64)),
        (257, 65, (2, 3, 384, 128)), (0, 128, (2, 3, 0, 128)), (5, 129, (2, 3, 128, 256)),
    ],
)  # fmt: skip
def test_the_accumulator_of_dQ_has_room_for_whole_tiles(Sq: int, D: int, shape: tuple[int, ...]) -> None:
    """Of 128 rows, with D rounded up to a power of two."""
    problem = Problem(2, 3, Sq, 7, D, dtype="float16")
    assert arguments.SCRATCH["dQ_accum"].shape(problem) == shape
    assert arguments.SCRATCH["delta"].shape(problem) == (2, 3, Sq)


def test_scratch_and_what_of_it_is_zeroed() -> None:
    """In elements and bytes. A spec's own sizes replace the usual ones; memory that a problem does not need is left
    out."""
    kernel, tile, p = (
        registry.get("bwd_mma"),
        registry.get("bwd_mma").tiles[0],
        Problem(2, 3, 5, 7, 64, dtype="float16"),
    )
    args = ("Q", "K", "V", "O", "LSE", "dO", "delta", "dQ", "dK", "dV", "dQ_accum", "partials", "tile_counter")
    fields = {"args": args, "then": (), "scratch": {"partials": lambda p, t: (40, 9)}, "numbers": {}}
    made = dataclasses.replace(kernel, **fields)
    assert arguments.scratch_of(made, p, tile) == {"delta": (2, 3, 5), "dQ_accum": (2, 3, 128, 64), "partials": (40,)}
    assert arguments.zeroed_of(made, p, tile) == {"dQ_accum": 4 * 2 * 3 * 128 * 64, "partials": 36}
    masked = dataclasses.replace(p, mask=(1, 1, 5, 7))
    assert {*arguments.scratch_of(made, masked, tile)} == {"delta", "dQ_accum", "partials", "tile_counter", "block_map"}
    own = dataclasses.replace(made, scratch={"partials": lambda p, t: (8, 0), "dQ_accum": lambda p, t: (20, 0)})
    assert arguments.scratch_of(own, p, tile)["dQ_accum"] == (20,)
    assert arguments.zeroed_of(own, p, tile) == {"dQ_accum": 0, "partials": 0}
    operation = dataclasses.replace(registry.get("append_kv"), scratch={"sums": lambda p, t: (40, 9)})
    of_operation = operation.computes.problem(operation.computes.example, "float16")
    assert arguments.scratch_of(operation, of_operation, tile) == {"sums": (40,)}
    assert arguments.zeroed_of(operation, of_operation, tile) == {"sums": 36}


def test_an_argument_as_text() -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_float))

    assert arguments.describe(Pair(3, 0.5)) == "a 3, b 0.5"
    assert arguments.describe(ctypes.c_int32(-7)) == "-7"
    assert arguments.describe(ctypes.c_void_p(0)) == "None"
