"""`sandbox.call`: kernels of other operations than attention on arrays of several libraries."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from operation_kernels import kernels_in

import sandbox
from sandbox.api import call, dispatch
from sandbox.core import registry
from sandbox.core.errors import SpecError, UnknownKernel, UnsupportedProblem
from sandbox.engine import staging
from sandbox.launch import arguments, dlpack
from sandbox.spec import Tile

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with kernels_in(tmp_path_factory.mktemp("kernels")) as path:
        yield path


def randn(*shape: int, dtype: str = "float32", grad: bool = False, device: str = "cpu") -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, getattr(torch, dtype)).requires_grad_(grad)


class OnlyDlpack:
    """An array of a library that is not known here."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return np


def test_numpy_and_dlpack() -> None:
    x = randn(5, 40).numpy()
    expected = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    y = sandbox.call("row_softmax", x)
    assert isinstance(y, np.ndarray)
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_allclose(sandbox.call("row_softmax", OnlyDlpack(x)), expected, rtol=1e-5)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch(place: str) -> None:
    """Several dtypes; an operation with two matrices, and one whose output has sizes of its own."""
    for dtype in ("float32", "float16", "bfloat16"):
        x, w = randn(6, 48, dtype=dtype, device=place), randn(48, device=place)
        y = sandbox.call("rms_norm", x, w, tile="THREADS=128,PARTS=264")
        assert (y.dtype, y.device) == (x.dtype, x.device)
        torch.testing.assert_close(
            y.float(), torch.nn.functional.rms_norm(x.float(), (48,), w, 1e-6), rtol=1e-2, atol=1e-2
        )
    A, B = randn(70, 64, dtype="float16", device=place), randn(64, 72, dtype="float16", device=place)
    torch.testing.assert_close(sandbox.call("matmul", A, B).float(), A.float() @ B.float(), rtol=1e-2, atol=2e-2)
    bins = torch.arange(1000, dtype=torch.int32, device=place) % 7
    for _ in range(2):  # counts are zero before each launch
        assert sandbox.call("histogram", bins)[:8].tolist() == [143] * 6 + [142, 0]


@pytest.mark.parametrize("name", ["rms_norm_backward", "histogram", "append_kv"])
def test_arrays_for_another_device_are_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs before the launch and outputs after it, also one that is updated in place, with scratch and memory that
    must be zero. The other device is host memory here."""
    move = lambda to, of, nbytes, gpu: ctypes.memmove(to, of, nbytes)  # noqa: E731
    gpu = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(staging, "driver", SimpleNamespace(device=lambda number: gpu, read=move, write=move))
    if name == "rms_norm_backward":
        arrays = randn(6, 48), randn(6, 48), randn(48)
    elif name == "histogram":
        arrays = (torch.arange(1000, dtype=torch.int32) % 7,)
    else:
        pages, table = torch.zeros(2, 1, 16, 8), torch.tensor([[1]], dtype=torch.int32)
        arrays = (randn(1, 1, 3, 8), randn(1, 1, 3, 8), table, table[0, :1] + 1, table[0, :0], pages, pages.clone())
    expected = call.run(name, tuple(x.clone() for x in arrays))
    library = dlpack.library_of(arrays[0])
    kernel = registry.get(name)
    problem = call.problem_of(kernel, [library.view(x) for x in arrays])
    tile = kernel.tiles[0]
    outputs = {
        output: library.allocator(arrays[0], shape, dlpack.dense_strides(shape), tensor.dtype_in(problem))
        for output, tensor in call.operation_of(kernel).outputs.items()
        if output not in call.operation_of(kernel).in_place
        for shape in (tensor.shape(problem),)
    }
    scratch = arguments.scratch_of(kernel, problem, tile)
    assert bool(scratch) == (name == "rms_norm_backward")
    making = call._Making(kernel, problem, tile, dlpack.HOST, library, outputs, scratch)
    found = call._staged(making)(arrays, [x.data_ptr() for x in arrays])
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    if name == "append_kv":
        assert found[0] is arrays[5]
        assert found[1] is arrays[6]


@pytest.mark.gpu
def test_the_callers_stream_and_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    x = cupy.random.standard_normal((5, 40)).astype("float32")
    y = sandbox.call("row_softmax", x)
    cupy.testing.assert_allclose(y, cupy.exp(x) / cupy.exp(x).sum(-1, keepdims=True), rtol=1e-5)
    x = randn(512, 4096, device="cuda")
    sandbox.call("row_softmax", x)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        y = sandbox.call("row_softmax", torch.zeros_like(x))
        assert (y.sum(-1) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients(place: str) -> None:
    x, w = randn(6, 48, grad=True), randn(48, grad=True)
    dy = randn(48, 6).T  # not contiguous
    y = sandbox.call("rms_norm", x, w, backend=None if place == "cpu" else "cuda")
    found = torch.autograd.grad(y, (x, w), dy)
    expected = torch.autograd.grad(torch.nn.functional.rms_norm(x, (48,), w, 1e-6), (x, w), dy)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert not sandbox.call("row_softmax", x).requires_grad
    with pytest.raises(UnsupportedProblem, match="row_softmax has no backward: name its kernel in the Operation"):
        sandbox.call("row_softmax", x)


def test_gradients_as_autograd_delivers_them() -> None:
    """Lazily negated; a part of another gradient, which does not begin at a multiple of 16 bytes; and both."""
    x, w = randn(6, 48, grad=True), randn(48, grad=True)
    y, dy = sandbox.call("rms_norm", x, w), randn(6, 48)
    expected = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
    moved = torch.cat((torch.zeros(1), -dy.flatten()))[1:].view(6, 48)
    assert moved.data_ptr() % 16
    for given in (torch._neg_view(-dy), -moved, torch._neg_view(moved)):
        found = torch.autograd.grad(y, (x, w), given, retain_graph=True)
        assert all(map(torch.equal, found, expected))
    loss = (torch.cat((torch.zeros(1), y.flatten())) * torch.cat((torch.zeros(1), dy.flatten()))).sum()
    assert all(map(torch.equal, torch.autograd.grad(loss, (x, w)), expected))


def test_second_gradients_raise_an_error() -> None:
    """Also if the gradient of the output is a constant, so that PyTorch would take the first gradient for one."""
    x, w = randn(6, 48, grad=True), randn(48)
    y = sandbox.call("rms_norm", x, w)
    for loss in (y.sum(), (y * y).sum()):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.testing.assert_close(gradient, torch.autograd.grad(loss, x, retain_graph=True)[0])
        with pytest.raises(UnsupportedProblem, match="rms_norm cannot be differentiated twice"):
            (gradient * gradient).sum().backward()


def test_a_gradient_with_other_names(folder: Path) -> None:
    spec = folder / "rms_norm.py"
    text = spec.read_text()
    try:
        spec.write_text(text.replace('gradient="rms_norm_backward"', 'gradient="row_softmax"'))
        sandbox.reload()
        message = "row_softmax: as the gradient of rms_norm, its output y must be one of dw, dx"
        with pytest.raises(SpecError, match=message):
            sandbox.call("rms_norm", randn(6, 48, grad=True), randn(48))
    finally:
        spec.write_text(text)
        sandbox.reload()


def test_plans_are_found_again(folder: Path) -> None:
    """One plan for each kind of arrays; `reload` discards them."""
    call._plans.clear()
    for rows in (3, 3, 5):
        sandbox.call("row_softmax", randn(rows, 8))
    assert len(call._plans) == 2
    source = folder / "row_softmax.cu"
    text = source.read_text()
    source.write_text(text.replace("* inverse)", "* inverse + 1.0f)"))
    x = randn(3, 8)
    assert sandbox.call("row_softmax", x).max() < 1
    sandbox.reload()
    assert sandbox.call("row_softmax", x).min() > 1
    source.write_text(text)
    sandbox.reload()


@pytest.mark.parametrize("kind", [dict, MappingProxyType, Tile], ids=lambda kind: kind.__name__)
def test_a_tile_as_a_mapping_finds_its_plan(kind: Any) -> None:
    """Also of attention."""
    sandbox.reload()
    call._plans.clear()
    x, q = randn(4, 8), randn(1, 1, 9, 16)
    numbers, of_attention = {"THREADS": 128, "PARTS": 264}, {"BLOCK_M": 16, "BLOCK_N": 16}
    as_kind = (lambda tile: Tile(**tile)) if kind is Tile else kind
    for _ in range(3):
        sandbox.call("rms_norm", x, randn(8), tile=as_kind(numbers))
        sandbox.attention(q, q, q, kernel="fwd_minimal", tile=as_kind(of_attention))
    assert (len(call._plans), len(dispatch._plans)) == (1, 1)


def test_a_plan_in_the_making_does_not_outlive_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made from the source of before, it serves its own call alone."""
    x, real, made = randn(4, 8), call._planned, []
    sandbox.call("row_softmax", x)

    def slow(*args: Any) -> Any:
        made.append(real(*args))
        if len(made) == 1:
            sandbox.reload()  # as by another thread
        return made[-1]

    monkeypatch.setattr(call, "_planned", slow)
    sandbox.reload()
    for _ in range(3):
        sandbox.call("row_softmax", x)
    assert len(made) == 2
    assert [*call._plans.values()] == made[1:]


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        (
            "row_softmax",
            [randn(48, 6).T],
            r"x with shape \(6, 48\) and strides \(1, 6\) is not supported: pass a",
        ),
        ("row_softmax", [randn(48)], r"row_softmax: x has shape \(48,\): it must be \(M, N\)"),
        (
            "row_softmax",
            [randn(49)[1:].view(6, 8)],
            "row_softmax: x does not begin at a multiple of 16 bytes: pass a copy",
        ),
        ("rms_norm", [randn(6, 48), randn(49)[1:]], "rms_norm: w does not begin at a multiple of 16 bytes: pass"),
        ("row_softmax", [randn(6, 8, dtype="float64")], "dtype float64 .* is not supported"),
        ("row_softmax", [], r"row_softmax takes 1 inputs \(x\), and 0 were passed"),
        ("rms_norm", [randn(6, 48)], r"rms_norm takes 2 inputs \(x, w\), and 1 were passed"),
        ("rms_norm", [randn(6, 48), randn(40)], r"w has shape \(40,\): it must be \(N\), and N is 48 in x"),
        ("rms_norm", [randn(6, 48), randn(48, dtype="float16")], "w has dtype float16, and the spec gives float32"),
        ("rms_norm", [randn(6, 48), randn(48).numpy()], "^x is a PyTorch array and w a NumPy array: pass"),
        ("rms_norm", [randn(6, 48).numpy(), randn(48, grad=True)], "^x is a NumPy array and w a PyTorch array: pass"),
        ("rms_norm", [randn(6, 48, grad=True), randn(48).numpy()], "^x is a PyTorch array and w a NumPy array: pass"),
        ("rms_norm", [OnlyDlpack(randn(6, 48).numpy()), randn(48)], "^x is a DLPack array and w a PyTorch array: pass"),
        ("rms_norm", [randn(6, 48), [1.0]], "^w is of type list, not an array: pass a NumPy, CuPy or PyTorch array"),
        ("matmul", [randn(8, 8, dtype="float16"), randn(8, 8)], "B has dtype float32, and A has float16: convert it"),
        (
            "matmul",
            [randn(8, 8), randn(8, 8)],
            r"matmul: dtype float32 is not supported: it must be float16 or bfloat16 \(convert the tensors\)",
        ),
        ("matmul", [randn(8, 9, dtype="float16"), randn(9, 8, dtype="float16")], "K=9, N=8 are not supported: TMA"),
        ("fwd_minimal", [randn(8, 8)], "fwd_minimal computes attention's forward: use sandbox.attention$"),
        ("bwd_minimal", [randn(8, 8)], "computes attention's backward: use sandbox.attention_backward"),
        ("bwd_preprocess", [randn(8, 8)], "computes a step of attention's backward: use sandbox.attention_backward"),
        ("block_map", [randn(8, 8)], "block_map computes a block map: use sandbox.block_map"),
    ],
)
def test_arrays_that_do_not_fit(name: str, inputs: list[Any], message: str) -> None:
    with pytest.raises(UnsupportedProblem, match=message):
        sandbox.call(name, *inputs)


def test_the_dtype_of_an_operation_whose_tensors_have_their_own() -> None:
    """The first dtype of the spec, which the macro DTYPE_… names."""
    kernel = dataclasses.replace(registry.get("histogram"), dtypes=("float16", "float32"))
    views = [dlpack.view(np.zeros(5, np.int32))]
    assert call.problem_of(kernel, views).dtype == "float16"


def test_inputs_of_several_devices() -> None:
    kernel, device = registry.get("rms_norm"), ("cuda", 1)
    views = [dlpack.view(randn(6, 48)), dlpack.ArrayView(64, (48,), (1,), "float32", device, None)]
    with pytest.raises(UnsupportedProblem, match=r"^rms_norm: w is on another device than x: move it$"):
        call.problem_of(kernel, views)


def test_a_full_cache_of_plans_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As is one with plans of before a reload."""
    monkeypatch.setattr(call, "MAX_PLANS", 2)
    plans, made = call._Plans(), [call._Plan(lambda arrays, addresses: (), ((n, "x"),)) for n in range(4)]
    for n in (0, 1):
        plans.keep((5, n), made[n])
    assert dict(plans) == {(5, 0): made[0], (5, 1): made[1]}
    plans.keep((5, 2), made[2])
    assert dict(plans) == {(5, 2): made[2]}
    plans.keep((6, 3), made[3])
    assert dict(plans) == {(6, 3): made[3]}
    plans.keep((5, 0), made[0])  # made from the source of before: never found again
    assert plans.generation == 6
    assert (6, 3) in plans


def test_an_unknown_kernel() -> None:
    with pytest.raises(UnknownKernel, match="did you mean row_softmax"):
        sandbox.call("row_sofmax", randn(2, 8))
    with pytest.raises(UnknownKernel, match="did you mean row_softmax"):
        sandbox.call("row_sofmax")
    with pytest.raises(UnsupportedProblem, match='backend=3 is not known: choose "cuda" or "cpu"'):
        sandbox.call("row_softmax", randn(2, 8), backend=3)  # type: ignore[arg-type]
    assert "row_softmax" in registry.kernels()
