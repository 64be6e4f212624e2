"""Operations: kernels with their own reference, outside of the project's folder."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from operation_kernels import NAMES, kernels_in
from project import ROOT

from sandbox.cli import cli
from sandbox.core import registry
from sandbox.core.errors import SpecError
from sandbox.core.kernel import BoxRows
from sandbox.core.operation import Operation, OperationProblem, Tensor, problem_from_json
from sandbox.engine import pipeline
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Kernel, Tile
from sandbox.toolchain import arch as architectures
from sandbox.verify import check, operations, sanitize
from sandbox.verify.cases import Case
from sandbox.verify.references import ReferenceOutput
from sandbox.verify.suite import suite_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with kernels_in(tmp_path_factory.mktemp("kernels")) as path:
        yield path


def command(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    return subprocess.run(
        [sys.executable, "-m", "sandbox", *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


# ---- right kernels


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(2)
def test_results(name: str, folder: Path, device: Device) -> None:
    """Every dtype, on cases of `check` and on those of `run`."""
    kernel = registry.get(name)
    arch = pipeline.arch_of(device)
    small = list(suite_of(kernel).sweep_cases(kernel))
    cases = [*small[:: 1 if len(small) < 12 else 4], *suite_of(kernel).named_cases(kernel, small=True)]
    assert {case.problem.dtype for case in cases} == {*kernel.dtypes}
    for case in cases:
        if kernel.why_unsupported(case.problem, arch) is None:
            result = check.verify(kernel, case, device)
            assert result.ok, (str(case.problem), result.message, result.where)


@pytest.mark.parametrize("name", [name for name, kernel in registry.kernels().items() if kernel.custom])
def test_operations_in_the_project(name: str, device: Device) -> None:
    """Kernels that `new kernel` created in `kernels_cu`."""
    kernel = registry.get(name)
    for case in suite_of(kernel).sweep_cases(kernel):
        result = check.verify(kernel, case, device)
        assert result.ok is not False, (str(case.problem), result.message, result.where)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(3)
def test_tiles_compile_without_spills(name: str, arch: str, folder: Path) -> None:
    kernel = registry.get(name)
    if architectures.parse(arch) < kernel.min_arch:
        return
    problem = suite_of(kernel).quick_cases(kernel, HOST)[0].problem
    for tile in kernel.tiles:
        for made in pipeline.compile_problem(kernel, problem, tile, arch):
            assert made.resources.spill_stores == 0


def test_an_error_of_one_percent_is_found(folder: Path) -> None:
    """Of a matrix product in float16, whose bound is the loosest."""
    kernel = registry.get("matmul")
    case = Case("run", suite_of(kernel).problem(kernel, "64,64,64", "float16"))  # type: ignore[arg-type]
    reference = suite_of(kernel).reference(case)
    answer = reference.outputs["C"]
    assert suite_of(kernel).locate("C", answer.values, answer, kernel, case.problem, kernel.tiles[0], {}) is None
    wrong = answer.values.copy()
    wrong[3, 5:7] += 0.01 * abs(answer.values).max()
    found = suite_of(kernel).locate("C", wrong, answer, kernel, case.problem, kernel.tiles[0], {})
    assert found
    assert found.text.startswith("C is wrong in 2 of 4096 elements, first at M 3, N 5: ")
    assert "Only M 3 of 64; N 5-6 of 64." in found.text


def test_bounds_allow_sums_in_another_order(folder: Path) -> None:
    rng = np.random.default_rng(0)
    mean = operation(reference=lambda x: x.mean(-1), outputs={"y": Tensor("M")})
    kernel = spec(computes=mean)
    case = Case("run", mean.problem("4,100000", "float32"), layout="contiguous")  # type: ignore[arg-type]
    reference = suite_of(kernel).reference(case)
    x = reference.inputs["x"][:, rng.permutation(100000)]
    in_order = np.add.accumulate(x, axis=-1, dtype=np.float32)[:, -1] / np.float32(100000)
    assert abs(in_order - reference.outputs["y"].values).max() < 40 * reference.outputs["y"].bound
    assert reference.outputs["y"].bound < 1e-6


def test_problems_as_json(folder: Path) -> None:
    kernel = registry.get("matmul")
    problem = suite_of(kernel).problem(kernel, "8, 16,24", "bfloat16")
    assert (problem.M, problem.N, problem.K, str(problem)) == (8, 16, 24, "M8 N16 K24 bfloat16")  # type: ignore[attr-defined]
    assert problem_from_json(json.loads(json.dumps(problem.as_json()))) == problem
    p = problem  # what the engine reads of every problem
    assert (p.score, p.ragged, p.page_size, p.float8, p.plain, p.head_dims) == (None, (), 0, False, True, ())
    with pytest.raises(AttributeError, match="a problem of matmul has no B: it has M, N, K and dtype"):
        _ = problem.B
    with pytest.raises(SpecError, match=r"shape '8,16' must be M,N,K, such as 4096,4096,4096"):
        suite_of(kernel).problem(kernel, "8,16", "float16")
    assert kernel.why_unsupported(problem, (8, 0)) == (
        "matmul: compute capability 8.0 is not supported: the kernel runs on 9.0 only"
    )
    reason = registry.get("stencil").why_unsupported(problem)
    assert reason == "stencil: it computes stencil: M8 N16 K24 bfloat16 is a problem of another operation"


# ---- faults, found with their lines

FAULTS = {  # kernel: (what to replace, by what), for a race and for an index out of range
    "row_softmax": (
        ("    m = block_max<THREADS>(m, partial);\n", "    partial[0] = m;\n    m = partial[0];\n"),
        ("n < N; n += THREADS) y[n]", "n <= N; n += THREADS) y[n]"),
    ),
    "rms_norm": (
        ("w[n]);\n}", "w[n]);\n    partial[0] = r;\n}"),
        ("n < N; n += THREADS) y[row + n]", "n <= N; n += THREADS) y[row + n]"),
    ),
    "rms_norm_backward": (
        ("            dw_block[n] += d * h;", "            dw_part[n] += d * h;"),
        ("if (n >= N) return;", "if (n > N) return;"),
    ),
    "matmul": (
        ("16 * (warp - 4)", "16 * (warp % 4)"),  # two warpgroups store the same rows
        ("column + 8 * j < N", "column + 8 * j <= N"),
    ),
    "stencil": (
        ("    __syncthreads();  // neighbours have loaded their elements\n", ""),
        ("if (n >= N) return;", "if (n > N) return;"),
    ),
    "column_sum": (
        ("y[n] = sum;", "y[n / 2] = sum;"),
        ("if (n >= N) return;", "if (n > N) return;"),
    ),
    "histogram": (
        ("atomicAdd(&counts[b], counts_smem[b]);", "counts[b] += counts_smem[b];"),
        ("i < N; i += gridDim.x", "i <= N; i += gridDim.x"),
    ),
}
PROBLEMS = {"row_softmax": "3,33", "rms_norm": "3,33", "rms_norm_backward": "3,33", "matmul": "16,120,512",
            "stencil": "70,5", "histogram": "1000", "column_sum": "5,300"}  # fmt: skip


@pytest.mark.parametrize("fault", ["race", "index"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(2)
def test_faults_are_found_with_their_lines(name: str, fault: str, folder: Path, tmp_path: Path) -> None:
    kernel = registry.get(name)
    old, new = FAULTS[name][fault == "index"]
    text = kernel.source.read_text()
    assert text.count(old) == 1
    source = tmp_path / kernel.source.name
    source.write_text(text.replace(old, new))
    wrong = dataclasses.replace(kernel, source=source)
    tile, problem = sanitize.small_tile(kernel), suite_of(kernel).problem(kernel, PROBLEMS[name], "")
    found = sanitize.on_host("thread" if fault == "race" else "address", wrong, problem, tile, 120)
    assert found.clean is False, found
    lines = {place.line for finding in found.findings for place in finding.places if place.file == str(source)}
    begin = text[: text.index(old)].count("\n") + 1
    assert lines & {*range(begin - 1, begin + 8)}, (found.findings, begin)


def test_watch_examines_a_kernel_outside_of_the_project(folder: Path, tmp_path: Path) -> None:
    """By the path of its `.cu`; its history is beside it."""
    for suffix in (".cu", ".py"):
        text = (folder / f"stencil{suffix}").read_text().replace("stencil", "mine")
        (tmp_path / f"mine{suffix}").write_text(text)
    environment = {registry.VARIABLE: ""}
    done = command("watch", "mine.cu", "--once", "--backend", "cpu", "--json", cwd=tmp_path, **environment)
    row = json.loads(done.stdout)
    assert (row["found"]["stage"], row["number"], done.returncode) == ("ok", 1, 0), done
    assert (tmp_path / ".sandbox/history/mine.jsonl").is_file()
    source = tmp_path / "mine.cu"
    source.write_text(source.read_text().replace("x_smem[threadIdx.x + k]", "x_smem[threadIdx.x + k + 1]"))
    done = command("watch", "mine.cu", "--once", "--backend", "cpu", cwd=tmp_path, **environment)
    assert done.returncode == 1
    assert "mine.cu:" in done.stdout
    done = command("watch", "mine.cu", "--diff", "1", cwd=tmp_path, **environment)
    assert "+++ mine.cu (now)" in done.stdout
    done = command("watch", "other.cu", cwd=tmp_path, **environment)
    assert f"{tmp_path / 'other.cu'} does not exist: a kernel is a .cu with its spec, a .py, beside it" in done.stderr


def test_commands(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run, compile, list and their messages."""
    monkeypatch.chdir(tmp_path)
    call = CliRunner().invoke
    listed = json.loads(call(cli, ["list", "--json"]).stdout)
    assert {row["name"]: row["computes"] for row in listed}.items() >= {(name, name) for name in NAMES}
    done = call(cli, ["run", "stencil", "--shape", "70,3", "--dtype", "float32", "--backend", "cpu", "--json"])
    (row,) = json.loads(done.stdout)
    problem = {"operation": "stencil", "sizes": {"N": 70, "K": 3}, "dtype": "float32"}
    assert (row["ok"], row["problem"]) == (True, problem)
    assert row["smem"] == 4 * (64 + 2)
    done = call(cli, ["run", "row_softmax", "--shape", "5,70", "--backend", "cpu", "--json"])
    (row,) = json.loads(done.stdout)
    assert row["smem"] == row["resources"]["smem_static"] == 4 * 32  # as in `compile`
    for arguments, message in (
        (("run", "stencil", "--shape", "70"), "shape '70' must be N,K, such as 16777216,7"),
        (("run", "stencil", "--shape", "70,3", "--causal"), "--causal is an option of attention"),
        (
            ("run", "stencil", "fwd_minimal", "--shape", "70,3"),
            "--shape has different meanings for attention and stencil",
        ),
        (("run", "stencil", "--shape", "70,3", "--dtype", "bfloat16"), "not one of"),
        (("tune", "stencil", "--grid", "gpt2"), "--grid has problems of attention: stencil computes another operation"),
    ):
        done = call(cli, [*arguments, "--backend", "cpu"])
        assert (done.exit_code, message in done.stderr) == (2, True) or "bfloat16" in arguments, done
    done = call(cli, ["compile", "rms_norm_backward", "--json"])
    assert [row["kernel"] for row in json.loads(done.stdout)][:2] == ["rms_norm_backward", "rms_norm_backward_sum"]
    done = command("list", cwd=tmp_path, SANDBOX_KERNELS=str(tmp_path / "nothing"))
    assert (done.returncode, "is not a folder: create it, or unset the variable" in done.stderr) == (2, True)


# ---- wrong specs


def operation(**fields: Any) -> Operation:
    usual: dict[str, Any] = {"dims": ("M", "N"), "inputs": {"x": Tensor("M", "N")},
                             "outputs": {"y": Tensor("M", "N")}, "reference": lambda x: x}  # fmt: skip
    return Operation(**{**usual, **fields})


def spec(**fields: Any) -> Kernel:
    usual: dict[str, Any] = {"name": "mine", "dtypes": ("float32",), "grid": lambda p, t: (1, 1, 1),
                             "block": lambda t: (32, 1, 1), "args": ("x", "y", "N")}  # fmt: skip
    return Kernel(**{"computes": operation(), **usual, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dims": ("M", "N", "K")}, "dimension K is not determined: no input has it in its shape; use a number"),
        ({"dims": "M"}, "dims='M' must be a tuple: add a comma"),
        ({"dims": ("M", "dtype")}, "dimension 'dtype' is the name of a tensor or of an attribute"),
        ({"outputs": {"y": Tensor("M", "Z")}}, r"y: dimension Z is not in dims=\('M', 'N'\)"),
        ({"outputs": {"x": Tensor("M")}}, "x is an input and an output with different Tensors"),
        ({"outputs": {"x": Tensor("M", dtype="int32")}}, "updated in place, the same Tensor"),
        (
            {"outputs": {"x": Tensor("M", "N")}, "gradient": "mine_backward"},
            "gradient='mine_backward' is not supported for x, which is updated in place",
        ),
        ({"outputs": {}}, "outputs is empty"),
        ({"inputs": {"x": ("M", "N")}}, r"inputs: x=\('M', 'N'\) must be a Tensor, such as Tensor"),
        ({"reference": 3}, "reference=3 must be a function of the inputs"),
        ({"cases": ("3",)}, "shape '3' must be M,N, such as 1024,1024"),
    ],
)
def test_wrong_operations(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        operation(**fields)


def test_a_strided_tensor_has_four_dimensions() -> None:
    with pytest.raises(SpecError, match="strided=True needs four dimensions, not 2"):
        Tensor("M", "N", strided=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"args": ("x", "N")}, "mine: args must include y: every mine kernel has them"),
        (
            {"args": ("x", "y", "Q")},
            r"mine: args: Q is not known: it must be .* of mine \(x, y, M, N\)",
        ),
        ({"zeroed": ("x",)}, "mine: zeroed: x is not an output of mine"),
        ({"maps": {"x_map": BoxRows("z", lambda t: 64)}}, "mine: maps: x_map: z is not a matrix of mine"),
        ({"computes": "softmax"}, "computes='softmax' must be one of .*, or an Operation"),
    ],
)
def test_wrong_kernels_of_operations(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec(**fields)


def raises(x: Any) -> Any:
    raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"reference": lambda x: x.sum(-1)},
            r"mine: the reference of y has shape \(4,\), and the spec gives it \(M, N\) = \(4, 8\) on M4 N8 float32",
        ),
        ({"reference": raises}, r"mine: the reference raised ZeroDivisionError: no \(test_operations.py, line \d+\)"),
        ({"reference": lambda x: (x, x)}, "mine: the reference gives 2 arrays, and there are 1 outputs: y"),
        ({"bound": lambda p, exact: 1 / 0}, r"mine: the bound raised ZeroDivisionError: division by zero \(test_op"),
        (
            {"inputs": {"x": Tensor("M", "N", values=lambda rng, shape: rng.random(3))}},
            r"mine: values of x have shape \(3,\): it must be \(4, 8\)",
        ),
    ],
)
def test_wrong_functions_of_operations(fields: dict[str, Any], message: str) -> None:
    """One clear message, for each command that compares results."""
    kernel = spec(computes=operation(**fields, cases=("4,8",)))
    case = next(suite_of(kernel).sweep_cases(kernel))
    result = check.verify(kernel, case, HOST)
    assert result.ok is False
    assert re.match(message, result.message), result.message


def test_an_output_that_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "mine.cu").write_text(
        'extern "C" __global__ void mine(const float* x, float* y, int N) {\n'
        "    if (threadIdx.x) y[threadIdx.x] = x[threadIdx.x];\n}\n"
    )
    kernel = spec(source=tmp_path / "mine.cu", computes=operation(cases=("1,32",)))
    result = check.verify(kernel, next(suite_of(kernel).sweep_cases(kernel)), HOST)
    assert result.where
    assert (
        "y is wrong in 1 of 32 elements, 1 of them NaN (or never written), first at M 0, N 0: nan" in result.where.text
    )


def test_arguments_that_do_not_match_the_source(tmp_path: Path) -> None:
    (tmp_path / "mine.cu").write_text('extern "C" __global__ void mine(const float* x, int N, float* y) {}\n')
    kernel = spec(source=tmp_path / "mine.cu", computes=operation(cases=("1,32",)))
    result = check.verify(kernel, next(suite_of(kernel).sweep_cases(kernel)), HOST)
    assert result.message.startswith(
        "mine: argument 2 in its spec is y, pointer of 8 bytes, but parameter 2 in mine.cu"
    )


def test_a_tensor_updated_in_place_is_read_and_written() -> None:
    x, y = Tensor("M", dtype="float32"), Tensor("M", dtype="int32")
    add = Operation(dims=("M",), inputs={"x": x, "y": y}, outputs={"x": x}, reference=lambda x, y: x + y, name="add")
    assert add.bytes_of(add.problem("8", "float32")) == 3 * 8 * 4


def test_no_case_is_supported() -> None:
    kernel = spec(supports=lambda p, arch: "never")
    with pytest.raises(SpecError, match="mine: no small problem is supported, for example mine: never: give `cases`"):
        list(suite_of(kernel).sweep_cases(kernel))


def test_defaults() -> None:
    """Cases next to the tile's numbers; problems on a GPU by the number of dimensions."""
    one = spec(
        computes=Operation(dims=("N",), inputs={"x": Tensor("N")}, outputs={"y": Tensor("N")}, reference=lambda x: x),
        tiles=(Tile(THREADS=128),),
    )
    sizes = {case.problem.N for case in suite_of(one).sweep_cases(one)}  # type: ignore[attr-defined]
    assert {1, 127, 128, 129, 259} <= sizes
    (large,) = suite_of(one).named_cases(one, small=False)
    assert large.problem == OperationProblem("mine", (("N", 16777216),), "float32")
    assert operations.dtype_of(one) == "float32"


# ---- cases, bounds and error maps of an operation without a kernel


@pytest.mark.parametrize(
    ("dtypes", "dtype", "chosen"),
    [
        (("float32", "float16"), "float32", "float32"),
        (("float32", "float16"), "bfloat16", "bfloat16"),  # the kernel refuses it
        (("float32", "float16"), "", "float16"),
        (("float32", "bfloat16"), "", "float32"),
    ],
)
def test_the_dtype_of_a_case(dtypes: tuple[str, ...], dtype: str, chosen: str) -> None:
    assert operations.dtype_of(spec(dtypes=dtypes), dtype) == chosen


def of_dims(n: int, **fields: Any) -> Kernel:
    dims = tuple("MNKL"[:n])
    own = Operation(dims=dims, inputs={"x": Tensor(*dims)}, outputs={"y": Tensor(*dims)}, reference=lambda x: x)
    return spec(computes=own, args=("x", "y", *dims), **fields)


@pytest.mark.parametrize(
    ("n", "tile", "first", "count"),
    [
        (1, Tile(THREADS=128), ["4099", "128", "1000"], 10),
        (2, Tile(THREADS=128), ["67,136", "17,97", "64,203"], 13),
        (3, Tile(THREADS=128), ["67,136,72", "17,97,128", "64,203,67"], 13),
    ],
)
def test_default_cases(n: int, tile: Tile, first: list[str], count: int) -> None:
    """Sizes in turns; with several dimensions also equal sizes."""
    shapes = [*operations._default_cases(n, tile)]
    assert (shapes[:3], len(shapes)) == (first, count)
    if n > 1:
        assert shapes[-3:] == [",".join([size] * n) for size in ("64", "128", "256")]
        assert len({*shapes}) == count


@pytest.mark.parametrize(
    ("tile", "sizes"),
    [
        (Tile(THREADS=128), {127, 128, 129, 259}),
        (Tile(THREADS=128, ROWS=256), {255, 256, 257, 515}),
        (Tile(THREADS=1024), {1023, 1024, 1025, 2051}),
        (Tile(THREADS=128, BLOCKS=1025), {127, 128, 129, 259}),  # no size of a tile
        (Tile(BLOCKS=2000), {63, 64, 65, 131}),
        (Tile(THREADS=1), {1, 2, 5}),
    ],
)
def test_default_cases_beside_the_largest_number_of_the_tile(tile: Tile, sizes: set[int]) -> None:
    assert {*map(int, operations._default_cases(1, tile))} == {4099, 1, 1000, 17} | sizes


@pytest.mark.parametrize(("n", "shape"), [(1, "16777216"), (2, "4096,4096"), (3, "2048,2048,2048"), (4, "64,64,64,64")])
def test_default_shapes_on_a_gpu(n: int, shape: str) -> None:
    kernel = of_dims(n, dtypes=("float32", "float16"))
    found = suite_of(kernel).named_cases(kernel, small=False)
    assert [case.problem for case in found] == [suite_of(kernel).problem(kernel, shape, d) for d in kernel.dtypes]
    small = suite_of(kernel).named_cases(kernel, small=True)
    first = next(operations._default_cases(n, kernel.tiles[0]))
    assert [case.problem for case in small] == [suite_of(kernel).problem(kernel, first, d) for d in kernel.dtypes]


def test_cases_of_commands() -> None:
    own = operation(cases=("3,4", "5,6", "7,8", "9,10"), shapes=("11,12", "13,14"),
                    isolate={"zero": lambda inputs: None})  # fmt: skip
    kernel = spec(computes=own, dtypes=("float32", "float16"))
    suite = suite_of(kernel)

    def texts(cases: Any) -> list[str]:
        return [f"{case.problem.M},{case.problem.N} {case.problem.dtype} {case.inputs}" for case in cases]

    every = [f"{shape} {d} normal" for d in kernel.dtypes for shape in ("3,4", "5,6", "7,8", "9,10")]
    isolated = [f"3,4 {d} zero" for d in kernel.dtypes]
    assert texts(suite.sweep_cases(kernel)) == [*every[:4], isolated[0], *every[4:], isolated[1]]
    small = [f"{shape} float16 normal" for shape in ("3,4", "5,6", "7,8")]
    assert texts(suite.quick_cases(kernel, HOST)) == small
    assert texts(suite.quick_cases(kernel, ("cuda", 0))) == ["11,12 float16 normal", *small]
    assert texts([suite.tile_case(kernel, kernel.tiles[0])]) == small[:1]
    names = [case.name for case in suite.sweep_cases(kernel)]
    assert (names[0], names[4]) == ("M=3 N=4 float32", "M=3 N=4 float32 zero")
    assert {case.layout for case in suite.sweep_cases(kernel)} == {"contiguous"}


def test_problems_of_sanitize() -> None:
    """The two with the fewest threads in several blocks; of these with the most elements."""
    sizes = ("1,9", "2,5", "2,7", "8,3", "3,4")
    kernel = spec(computes=operation(cases=sizes), grid=lambda p, t: (p.M, 1, 1))
    found = suite_of(kernel).small_problems(kernel, kernel.tiles[0])
    assert [(p.M, p.N) for p in found] == [(2, 7), (2, 5)]  # type: ignore[attr-defined]


def test_the_best_tile_is_examined_too() -> None:
    """On a problem that it supports."""
    small, large = Tile(THREADS=32), Tile(THREADS=64)
    for tiles, expected in (((large, small), [(large, 4)]), ((small, large), [])):
        kernel = spec(
            computes=operation(cases=("2,3", "4,5")), tiles=tiles,
            check_tile=lambda p, tile, arch: "no" if (p.M, tile) == (2, large) else None,
        )  # fmt: skip
        found: list[Any] = suite_of(kernel).shipped_tiles(kernel, None)
        assert [(tile, p.M) for tile, p in found] == expected


def test_inputs_of_an_operation() -> None:
    """From values of the spec or by dtype; isolated ones are changed in place."""

    def zero(inputs: Any) -> None:
        inputs["x"][0] = 0

    tensors = {"x": Tensor("M", "N"), "n": Tensor("M", dtype="int32"), "flag": Tensor("N", dtype="bool"),
               "own": Tensor("M", values=lambda rng, shape: np.arange(shape[0]))}  # fmt: skip
    own = operation(inputs=tensors, reference=lambda x, n, flag, own: x, isolate={"zero": zero}, name="mine")
    problem = own.problem("500,3", "float16")
    given = operations.inputs_of(own, Case("x", problem))  # type: ignore[arg-type]
    assert [x.dtype.name for x in given.values()] == ["float16", "int32", "bool", "float16"]
    assert abs(given["x"].astype(float).std() - 1) < 0.1
    assert {*given["n"].flat} == {0, 1}
    assert given["own"].tolist() == [float(n) for n in range(500)]
    assert given["x"][0].any()
    assert not operations.inputs_of(own, Case("x", problem, "zero"))["x"][0].any()  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="inputs='one' are not supported: choose from normal, zero"):
        operations.inputs_of(own, Case("x", problem, "one"))  # type: ignore[arg-type]


def test_inputs_in_another_order_of_sums() -> None:
    """Up to four units of the last place of float32; integers are not changed."""
    x = np.full(10000, 1.5, np.float32)
    change = operations._nudged(x, np.random.default_rng(0)) / x.astype(np.float64) - 1
    assert 0.9 * 2.0**-22 < change.max() <= 1.1 * 2.0**-22
    assert -1.1 * 2.0**-22 <= change.min() < -0.9 * 2.0**-22
    for dtype in ("int32", "uint8", "bool"):
        given = np.ones(3, dtype)
        assert operations._nudged(given, None) is given


def test_the_default_bound() -> None:
    """Twice the float32 result's error, an ulp of the dtype, and eight of float32; of finite elements."""
    exact = np.array([1.0, -3.0, np.inf, 5.0])
    near = [np.array([1.25, -3.0, np.inf, np.nan]), np.array([1.0, -2.5, 0.0, 5.0])]
    assert operations._bound(exact, near, "float16") == 2 * 0.5 + 2.0**-9 + 8 * 2.0**-22  # 3 is between 2 and 4
    assert operations._bound(exact, near, "float32") == 2 * 0.5 + 9 * 2.0**-22
    assert operations._bound(exact, near, "int32") == 0
    assert operations._bound(np.zeros(0), [np.zeros(0)] * 2, "float32") == 9 * 2.0**-149


@pytest.mark.parametrize(
    ("wrong", "count", "first", "text"),
    [
        (np.s_[3, 5], 1, "M 3, N 5", " Only M 3 of 7; N 5 of 10."),
        (np.s_[2:4, ::9], 4, "M 2, N 0", " Only M 2-3 of 7; N 0-9 (2 of them) of 10."),
        (np.s_[:, 8:], 14, "M 0, N 8", " Only N 8-9 of 10: the last, partial tile (T=4)."),
        (np.s_[:, 7:], 21, "M 0, N 7", " Only N 7-9 of 10."),
        (np.s_[:], 70, "M 0, N 0", ""),
    ],
)  # fmt: skip
def test_the_error_map_of_an_operation(wrong: Any, count: int, first: str, text: str) -> None:
    answer = ReferenceOutput(np.ones((7, 10)), 0.5)
    got = answer.values.copy()
    got[wrong] = 9
    found = operations.locate(operation(), "y", got, answer, Tile(ONE=1, T=4, LARGE=16))
    assert found
    at = f"at {first}: 9 instead of 1"
    assert found.text == f"y is wrong in {count} of 70 elements, first {at}; worst {at}.{text}"
    assert found.tile_rows == 16
    assert found.heat.shape == (7, 10)
    assert found.heat.max() == 16


def test_the_worst_element_of_an_operation() -> None:
    """With a bound for each; NaN is worst. Heat has two dimensions."""
    own = operation(outputs={"y": Tensor("M")}, reference=lambda x: x[:, 0])
    bound = np.array([1.0, 0.25, 1.0, 0.0])
    answer = ReferenceOutput(np.array([0.0, 0.0, np.nan, 0.0]), bound)
    found = operations.locate(own, "y", np.array([2.0, 1.0, np.nan, 0.0]), answer, Tile())
    assert found
    assert (found.wrong, found.first, found.worst, found.tile_rows) == (2, (0,), (1,), 64)
    assert found.heat.tolist() == [[2, 4, 0, 0]]
    assert "NaN" not in found.text
    found = operations.locate(own, "y", np.array([np.nan, 1.0, np.nan, 0.0]), answer, Tile())
    assert found
    assert "in 2 of 4 elements, 1 of them NaN (or never written), first at M 0" in found.text
    assert operations.locate(own, "y", answer.values, answer, Tile()) is None
