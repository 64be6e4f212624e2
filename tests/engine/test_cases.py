"""Every kernel on single cases that each isolate one kind of fault: faster than the sweep's hundreds of cases."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from project import dtype_of, takes_causal

from sandbox.core import registry
from sandbox.engine import choose
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Kernel, Problem
from sandbox.verify import check, trial
from sandbox.verify.cases import Array, Case, inputs_of, isolating_cases

KERNELS = [kernel for kernel in registry.kernels().values() if kernel.computes != "block_map"]
by_name = lambda kernel: kernel.name  # noqa: E731


def right(kernel: Kernel, case: Case, device: Device) -> None:
    result = check.verify(kernel, case, device)
    assert result.ok, f"{result.case}: {result.message or (result.tensor, result.error, result.bound, result.where)}"


def pointed() -> Iterator[object]:
    for kernel in KERNELS:
        for case in isolating_cases(kernel, dtype_of(kernel)):
            p = case.problem
            yield pytest.param(kernel, case, id=f"{kernel.name}-{case.inputs}-{p.Sq}x{p.Sk}-{p.causal or 'all'}")


@pytest.mark.parametrize(("kernel", "case"), list(pointed()))
@pytest.mark.sampled(8)
def test_isolating_inputs(kernel: Kernel, case: Case, device: Device) -> None:
    right(kernel, case, device)


MASKS = [pytest.param(causal, id=causal, marks=pytest.mark.sampled(3)) for causal in ("bottom-right", "top-left")]


@pytest.mark.parametrize("causal", [pytest.param(False, id="all"), *MASKS])
@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
def test_groups(kernel: Kernel, causal, device: Device) -> None:
    """Cases in which h // group, h % Hk and h differ."""
    problems = (Problem(2, 4, 40, 33, D, Hk=2, dtype=dtype_of(kernel), causal=causal) for D in (64, 48))
    supported = [p for p in map(kernel.adapted, problems) if not kernel.why_unsupported(p)]
    if not supported and not takes_causal(kernel):
        pytest.skip("no causal mask")
    right(kernel, Case("groups", supported[0]), device)


LYING = [("bhsd", 64), ("bshd", 128), ("offset", 64), ("offset", 40), ("broadcast", 64), ("unaligned", 40), ("bhsd", 7)]
LYING += [("bshd", 12)]  # some heads begin at a multiple of 16 bytes, all end beside one


@pytest.mark.parametrize(("layout", "D"), LYING)
@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.sampled(10)
def test_layouts(kernel: Kernel, layout: str, D: int, device: Device) -> None:
    """All layouts of the inputs. If their rows have gaps, those of the outputs have other gaps."""
    case = Case(layout, kernel.adapted(Problem(2, 4, 70, 45, D, Hk=2, dtype=dtype_of(kernel))), layout=layout)
    if kernel.why_unsupported(dataclasses.replace(case.problem, alignment=2 if layout == "unaligned" else 16)):
        assert check.verify(kernel, case, device).ok is None
    else:
        right(kernel, case, device)


@pytest.mark.parametrize(("D", "causal"), [(88, False), (120, "bottom-right")])
def test_a_tile_in_shares(D: int, causal, device: Device) -> None:
    """`fwd_mma` interleaves the loads of the next tile with its products: with partial tiles of rows and columns."""
    problem = Problem(1, 2, 160, 250, D, Hk=1, dtype="float16", causal=causal)
    right(registry.kernels()["fwd_mma"], Case("shares", problem, layout="offset"), device)


@pytest.mark.parametrize(("D", "Dv"), [(32, 64), (96, 128), (8, 256)])
def test_rows_of_o_that_are_wider_than_those_of_q(D: int, Dv: int, device: Device) -> None:
    """O reuses the shared memory of Q, and its rows are wider. With a single key tile and no mask, a warp may store its
    rows of O before another warp has read its rows of Q at the same addresses."""
    problem = Problem(1, 2, 200, 30, D, Hk=1, Dv=Dv, dtype="float16")
    right(registry.kernels()["fwd_mma"], Case("Dv", problem), device)


BESIDE = {
    "a row before": "if (query_row == 0) O.row(b, h, -1)[0] = dtype(0.0f);",
    "a row after": "if (query_row + 1 == score.Sq) O.row(b, h, score.Sq)[0] = dtype(0.0f);",
    "a column after": "O.row(b, h, query_row)[HEAD_DIM] = dtype(0.0f);",
    # without a gap this is the first element of the next row, which later overwrites it
    "a column between rows": "if (query_row + 1 < score.Sq) O.row(b, h, query_row)[HEAD_DIM] = dtype(0.0f);",
    "a number before": "if (query_row == 0 && b == 0 && h == 0) LSE[-1] = 0.0f;",
    "a number after": "LSE[gridDim.z * gridDim.y * score.Sq] = 0.0f;",
}


@pytest.mark.parametrize("beside", BESIDE)
def test_writes_outside_an_output_are_detected(beside: str, tmp_path: Path) -> None:
    """A kernel with correct outputs that also writes outside of them."""
    kernel = registry.get("fwd_minimal")
    text, store = kernel.source.read_text(), "= final_row.lse;"
    assert text.count(store) == 1
    (tmp_path / "fwd_minimal.cu").write_text(text.replace(store, f"{store}\n    {BESIDE[beside]}"))
    faulty = dataclasses.replace(kernel, source=tmp_path / "fwd_minimal.cu")
    case = Case("offset", Problem(1, 2, 5, 5, 8), layout="offset")
    assert check.verify(kernel, case, HOST).message == ""
    result = check.verify(faulty, case, HOST)
    assert result.ok is False
    assert result.message == f"memory beside {'LSE' if 'number' in beside else 'O'} was written"
    assert result.error <= result.bound


MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a file there is never written to a disk


def far_apart(x: Array, axis: int) -> Array:
    """A copy in which batch entries, heads, or groups of rows that a block loads at a time are more than 2^31 elements
    apart. It is in a sparse file."""
    strides = [x.shape[1] * x.shape[2] * x.shape[3], x.shape[2] * x.shape[3], x.shape[3], 1]
    strides[axis] = 2**31 + 4096 if axis < 2 else 2**28 + 4096
    extent = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) + 1
    with tempfile.TemporaryFile(dir=MEMORY) as file:
        memory = np.memmap(file, np.uint8, "w+", shape=(extent * x.itemsize,))
    view = np.ndarray(x.shape, x.dtype, memory.data, strides=[s * x.itemsize for s in strides])
    view[...] = x
    return view


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "row"])
@pytest.mark.parametrize("kernel", KERNELS, ids=by_name)
@pytest.mark.sampled(4)
def test_offsets_beyond_32_bits(kernel: Kernel, axis: int) -> None:
    """Inputs with more than 2^31 elements between consecutive entries, heads or rows. Needs no GPU."""
    heads = (2, 2) if axis < 2 else (1, 1)  # slow: each row has its own memory page
    problems = (kernel.adapted(Problem(*heads, 70, 70, D, dtype=dtype_of(kernel))) for D in (8, 16))
    case = Case("far", next(p for p in problems if not kernel.why_unsupported(p)))
    near = inputs_of(kernel.computes, case)
    far = {name: far_apart(x, axis) if x.ndim == 4 else x for name, x in near.items()}
    tile = choose.choose_tile(kernel, case.problem, None)
    expected = trial.launch(kernel, tile, case.problem, near, HOST).outputs
    for name, output in trial.launch(kernel, tile, case.problem, far, HOST).outputs.items():
        assert output.tobytes() == expected[name].tobytes(), name
