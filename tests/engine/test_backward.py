"""attention_backward: array libraries, semantics in edge cases, scratch memory, and error messages."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from project import takes_causal

import sandbox
from sandbox import reference, spec
from sandbox.core import registry
from sandbox.engine import choose, pipeline
from sandbox.launch import dlpack
from sandbox.launch.arguments import scratch_of
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Entry, Kernel, Problem, Tile
from sandbox.verify import check, trial
from sandbox.verify.cases import Case, inputs_of

torch = pytest.importorskip("torch")
BACKWARD = [kernel for kernel in registry.kernels().values() if kernel.computes == "backward"]
by_name = lambda kernel: kernel.name  # noqa: E731


def arrays(*shape: int, Hk: int = 0, Sk: int | None = None, seed: int = 0, causal=False, dtype=np.float32):
    """dout, q, k, v, out, lse for a (B, H, S, D) shape: random, and the reference's."""
    B, H, S, D = shape
    rng = np.random.default_rng(seed)
    kv = (B, Hk or H, S if Sk is None else Sk, D)
    dout, q, k, v = (rng.standard_normal(s, np.float32).astype(dtype) for s in (shape, shape, kv, kv))
    out, lse = reference.attention(q, k, v, causal=causal)
    return dout, q, k, v, out.astype(dtype), lse.astype(np.float32)


def close(gradients, dout, q, k, v, tolerance: float = 1e-4, **options) -> None:
    """The gradients agree with the reference within `tolerance`; `check` applies the exact bound."""
    refs = reference.attention_backward(*(np.asarray(x) for x in (dout, q, k, v)), **options)
    for gradient, ref in zip(gradients, refs, strict=True):
        assert np.abs(np.asarray(gradient, np.float64) - ref).max(initial=0) <= tolerance


def on(device: Device, *numpy_arrays: np.ndarray):
    """The arrays as PyTorch tensors on `device`."""
    return tuple(torch.from_numpy(x).to(device[0]) for x in numpy_arrays)


def test_numpy(device: Device) -> None:
    """NumPy in, NumPy out, on either backend, with grouped heads."""
    given = arrays(2, 4, 33, 24, Hk=2, Sk=50)
    gradients = sandbox.attention_backward(*given, backend=device[0])
    for gradient, x in zip(gradients, given[1:4], strict=True):
        assert (type(gradient), gradient.shape, gradient.dtype) == (np.ndarray, x.shape, x.dtype)
    close(gradients, *given[:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pytorch(dtype, device: Device) -> None:
    """Compared with PyTorch's autograd. Each gradient has the strides of its input, also for a (B, S, H, D) tensor."""
    dout, q, k, v = (x.to(dtype).transpose(1, 2) for x in on(device, *arrays(2, 37, 3, 32)[:4]))
    out, lse = sandbox.attention_forward(q, k, v, causal=True)
    gradients = sandbox.attention_backward(dout, q, k, v, out, lse, causal=True)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    plain = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    for gradient, ref, x in zip(gradients, torch.autograd.grad(plain, leaves, dout.float()), (q, k, v), strict=True):
        assert (gradient.dtype, gradient.device, gradient.stride()) == (dtype, x.device, x.stride())
        assert ((gradient.float() - ref).abs() < (1e-5 if dtype == torch.float32 else 8e-2)).all()


@pytest.mark.gpu
def test_cupy() -> None:
    """CuPy in, CuPy out, on the caller's stream."""
    cupy = pytest.importorskip("cupy")
    given = arrays(1, 2, 65, 64)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        gradients = sandbox.attention_backward(*(cupy.asarray(x) for x in given))
        stream.synchronize()
    assert all(isinstance(gradient, cupy.ndarray) for gradient in gradients)
    close([cupy.asnumpy(gradient) for gradient in gradients], *given[:4])


@pytest.mark.parametrize("causal", [False, "bottom-right", "top-left"])
@pytest.mark.parametrize(("Sq", "Sk"), [(7, 12), (12, 7), (1, 1), (1, 9), (0, 4), (4, 0)])
@pytest.mark.parametrize("kernel", BACKWARD, ids=by_name)
@pytest.mark.sampled(6)
def test_lengths_and_alignments(kernel: Kernel, Sq: int, Sk: int, causal, device: Device) -> None:
    """Sq < Sk, Sq > Sk, and 0. A row without keys, and a key without rows, have gradient 0, not NaN."""
    if causal and not takes_causal(kernel):
        pytest.skip("the kernel takes no causal mask")
    dtype = np.dtype(kernel.dtypes[0])
    given = arrays(2, 2, Sq, 8, Sk=Sk, causal=causal, dtype=dtype)
    gradients = sandbox.attention_backward(*given, causal=causal, kernel=kernel, backend=device[0])
    close(gradients, *given[:4], causal=causal, tolerance=1e-5 if dtype == np.float32 else 2e-2)
    seen = reference.visible(Sq, Sk, causal)
    for gradient, unseen in zip(gradients, (~seen.any(axis=1), ~seen.any(axis=0), ~seen.any(axis=0)), strict=True):
        assert (gradient[:, :, unseen] == 0).all()


@pytest.mark.parametrize(
    ("rows", "causal"), [((300, 300), "bottom-right"), ((64, 128), "top-left")], ids=["later", "nothing"]
)
@pytest.mark.parametrize("kernel", [registry.get("bwd_wgmma")], ids=by_name)
@pytest.mark.parametrize("D", [128, 192])
def test_keys_without_visible_queries_skip_the_first_tile(
    kernel: Kernel, rows: tuple[int, int], causal: Literal["bottom-right", "top-left"], D: int, device: Device
) -> None:
    """Keys 64 to 127 of a block are hidden from the 64 queries on its diagonal: their sums start a tile later, or are
    zero."""
    problem = spec.Problem(1, 2, *rows, D, Dv=128, dtype="float16", causal=causal)
    assert choose.choose_tile(kernel, problem, None)["BLOCK_N"] == 128
    assert check.verify(kernel, Case("passed over", problem), device).ok


@pytest.mark.parametrize("kernel", [registry.get("bwd_wgmma"), registry.get("bwd_wgmma_deterministic")], ids=by_name)
def test_heads_come_in_l2_groups(kernel: Kernel, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With work tiles of different length, the first tiles of a few heads run first. Every head occurs exactly once.
    The deterministic kernel visits head groups in serpentine order."""
    tile = kernel.tiles[0]
    for heads, rows in ((1, 1), (5, 300), (96, 1024), (128, 2048), (16, 8191), (7, 100000)):
        width, tiles, sections = kernel.grid(spec.Problem(1, heads, rows, rows, 64, causal="bottom-right"), tile)
        assert (sections - 1) * width < heads <= sections * width
        assert tiles == -(-rows // tile.BLOCK_N)
    monkeypatch.setitem(kernel.grid.__globals__, "HOPPER_SMS", 7)
    problem = spec.Problem(1, 5, 300, 300, 64, dtype="float16", causal="bottom-right")
    assert kernel.grid(problem, tile) == (2, 3, 3)  # one head more than the problem has
    assert check.verify(kernel, Case("sections", problem), device).ok


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("name", ["bwd_wgmma", "bwd_wgmma_split_group"])
@pytest.mark.sampled(3)
def test_all_blocks_add_dq_if_a_causal_head_exceeds_a_wave(
    name: str, D: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dQ_accum is zeroed as a whole, and there are no semaphores."""
    kernel = registry.get(name)
    problem = spec.Problem(1, 4, 300, 520, D, Hk=2, dtype="float16", causal="bottom-right")
    tile = choose.choose_tile(kernel, problem, None)
    elements, zeroed = kernel.scratch["dQ_accum"](problem, tile)
    assert 0 < zeroed < elements
    monkeypatch.setitem(kernel.scratch["dQ_accum"].__globals__, "HOPPER_SMS", problem.key_tiles(tile.BLOCK_N) - 1)
    elements, zeroed = kernel.scratch["dQ_accum"](problem, tile)
    assert zeroed == elements
    assert kernel.defines(problem, tile)["ZEROED_DQ"]
    assert check.verify(kernel, Case("zeroed", problem), device, tile=tile).ok


@pytest.mark.parametrize(("D", "p"), [(128, 0.99999), (128, 1.0), (256, 1.0)])
def test_dropout_of_almost_all_or_all_elements(D: int, p: float, device: Device) -> None:
    """P contains the factor 1 / (1 - p): 100000, which exceeds float16, or 0."""
    problem = spec.Problem(1, 2, 600, 300, D, dtype="float16", causal="bottom-right", dropout=p)
    result = check.verify(registry.get("bwd_wgmma"), Case("factor", problem), device)
    assert result.ok, result.message


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.sampled(2)
def test_persistent_blocks_process_several_work_tiles(blocks: int, device: Device) -> None:
    """Some work tiles have no visible pairs, and a NaN in a query does not reach the next work tile of its block."""
    kernel = registry.get("bwd_wgmma_persistent")
    tile = Tile(**{**kernel.tiles[0], "BLOCKS": blocks})
    for options in ({"causal": "top-left"}, {"window": (60, 30)}):
        problem = spec.Problem(1, 3, 140, 400, 40, Hk=1, dtype="float16", **options)
        assert check.verify(kernel, Case("stays", problem), device, tile).ok
    case = Case("stays", spec.Problem(1, 3, 140, 400, 40, dtype="float16", causal="top-left"))
    for row in (100, 130):  # of the second head: the next work tile of a single block has no visible pairs
        given = inputs_of("backward", case)
        whole = trial.launch(kernel, tile, case.problem, given, device).outputs
        given["Q"][:, 1, row] = np.nan
        non_finite = trial.launch(kernel, tile, case.problem, given, device).outputs
        for name in ("dK", "dV"):
            reached = np.isnan(non_finite[name][0, 1].astype(np.float32)).any(axis=1)
            assert reached.tolist() == [True] * (row + 1) + [False] * (399 - row)
            assert all(non_finite[name][0, h].tobytes() == whole[name][0, h].tobytes() for h in (0, 2))


def test_each_gradient_lies_as_its_input(device: Device) -> None:
    """q, k and v in three different orders."""
    dout, q, k, v = on(device, *arrays(2, 3, 20, 16)[:4])
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    v = v.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    out, lse = sandbox.attention_forward(q, k, v)
    gradients = sandbox.attention_backward(dout, q, k, v, out, lse)
    assert [g.stride() for g in gradients] == [x.stride() for x in (q, k, v)]
    assert len({x.stride() for x in (q, k, v)}) == 3
    close([g.cpu() for g in gradients], *(x.cpu() for x in (dout, q, k, v)))


def test_empty_batches_and_heads() -> None:
    """An empty problem is not an error."""
    for B, H in ((0, 2), (2, 0)):
        x, lse = np.zeros((B, H, 5, 8), np.float32), np.zeros((B, H, 5), np.float32)
        assert [g.shape for g in sandbox.attention_backward(x, x, x, x, x, lse)] == [x.shape] * 3


def test_any_strides_of_dout(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """A transposed, broadcast or reversed dout is read without a copy. Without a unit stride in D it is copied, and
    the copy is logged once for each kind of array."""
    dout, q, k, v, out, lse = arrays(2, 3, 20, 16)
    readable = {
        "transposed": np.ascontiguousarray(dout.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
        "broadcast": np.broadcast_to(dout[:1, :1], dout.shape),
        "reversed": dout[:, :, ::-1],
    }
    copied = {
        "one number": np.broadcast_to(np.float32(0.5), dout.shape),
        "columns first": np.asfortranarray(dout),
        "every second column": np.repeat(dout, 2, axis=3)[..., ::2],
    }
    caplog.set_level(logging.INFO, "sandbox")
    for lying, notes in ((readable, 0), (copied, 1)):
        for x in lying.values():
            caplog.clear()
            for _ in range(2):
                gradients = sandbox.attention_backward(x, q, k, v, out, lse, backend=device[0])
                close(gradients, x, q, k, v)
            assert ["INFO"] * notes == [r.levelname for r in caplog.records if "dout has strides" in r.getMessage()]
    expanded = torch.tensor(0.5, device=device[0]).expand(dout.shape)
    gradients = sandbox.attention_backward(expanded, *on(device, q, k, v, out, lse))
    close([x.cpu() for x in gradients], copied["one number"], q, k, v)
    strided = np.repeat(lse, 2, axis=2)[..., ::2]
    close(sandbox.attention_backward(dout, q, k, v, out, strided, backend=device[0]), dout, q, k, v)


def test_inputs_are_untouched(device: Device) -> None:
    """Only the results are written."""
    given = arrays(1, 2, 33, 16)
    before = [x.tobytes() for x in given]
    sandbox.attention_backward(*given, backend=device[0])
    assert [x.tobytes() for x in given] == before


# ---- scratch

ACCUMULATE = """
#include "tensor.cuh"
#include "score_mod.cuh"
extern "C" __global__ void adds(View<const dtype> dO, View<const dtype> Q, View<const dtype> K, View<const dtype> V,
                                const float* LSE, const float* delta, float* dQ_accum, View<dtype> dK, View<dtype> dV,
                                Score score) {
    for (int row = 0; row < score.Sq; ++row)
        for (int d = 0; d < HEAD_DIM; ++d) {
            atomicAdd(&dQ_accum[(blockIdx.x * score.Sq + row) * HEAD_DIM + d], delta[blockIdx.x * score.Sq + row]);
            dK.row(0, blockIdx.x, row)[d] = dV.row(0, blockIdx.x, row)[d] = dtype(0.0f);
        }
}
extern "C" __global__ void adds_dq(const float* dQ_accum, View<dtype> dQ, Score score) {
    for (int i = 0; i < score.Sq * HEAD_DIM; ++i)
        dQ.row(0, blockIdx.x, i / HEAD_DIM)[i % HEAD_DIM] = dtype(dQ_accum[blockIdx.x * score.Sq * HEAD_DIM + i]);
}
"""


@pytest.fixture
def adds(tmp_path: Path) -> Kernel:
    """A backward that adds delta to each element of its row of dQ_accum, and then copies them to dQ."""
    source = tmp_path / "adds.cu"
    source.write_text(ACCUMULATE)
    geometry = {"grid": lambda p, t: (p.H, 1, 1), "block": lambda t: (1, 1, 1), "smem_bytes": lambda p, t: 0}
    return Kernel(
        name="adds", computes="backward", rung=1, summary="", dtypes=("float32",), min_arch=(7, 5),
        tiles=(Tile(BLOCK_M=1),), **geometry, deterministic=False, default=True, source=source,
        args=("dO", "Q", "K", "V", "LSE", "delta", "dQ_accum", "dK", "dV", "score"),
        then=(Entry(name="adds_dq", **geometry, args=("dQ_accum", "dQ", "score")),),
    )  # fmt: skip


def test_an_accumulator_is_zero_before_each_launch(adds: Kernel, device: Device) -> None:
    """Independent of the memory's previous content. Preprocess and the entries are launched in order."""
    dout, q, k, v, out, lse = on(device, *arrays(1, 2, 5, 8))
    delta = (dout * out).sum(-1, keepdim=True)
    for _ in range(3):
        dq, dk, _ = sandbox.attention_backward(dout, q, k, v, out, lse, kernel=adds)
        assert ((dq - delta).abs() < 1e-5).all()
        assert not dk.any()
    numpy = [x.cpu().numpy() for x in (dout, q, k, v, out, lse)]
    for _ in range(2):
        staged = sandbox.attention_backward(*numpy, kernel=adds, backend=device[0])
        assert np.abs(staged[0] - delta.cpu().numpy()).max() < 1e-5


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each array that a plan allocates."""
    sizes: list[int] = []
    real = dlpack._PyTorch.allocator

    def allocator(self, like, shape, strides, dtype):
        make = real(self, like, shape, strides, dtype)

        def counted():
            sizes.append(math.prod(shape) * spec.ITEMSIZE[dtype])
            return make()

        return counted

    monkeypatch.setattr(dlpack._PyTorch, "allocator", allocator)
    sandbox.reload()
    return sizes


def declared(kernel: Kernel, problem: Problem, device: Device) -> dict[str, int]:
    """Bytes of each scratch that the spec declares, rounded up to 512 as in the array that contains all of them."""
    tile = pipeline.tile_on(device, kernel, problem, tuned=True)
    return {name: -(-4 * math.prod(shape) // 512) * 512 for name, shape in scratch_of(kernel, problem, tile).items()}


@pytest.mark.parametrize("kernel", [*BACKWARD, None], ids=lambda kernel: kernel.name if kernel else "adds")
def test_memory_beyond_inputs_and_results(kernel: Kernel | None, adds: Kernel, allocated: list[int]) -> None:
    """The declared scratch alone: delta, at most one fp32 accumulator of dQ's shape (of whole tiles) with a few
    counters, and dK and dV of each query head if the heads of a group are split."""
    kernel = kernel or adds
    dtype = getattr(torch, kernel.dtypes[0])
    dout, q, k, v, out, lse = (torch.from_numpy(x) for x in arrays(1, 2, 128, 64))
    given = (*(x.to(dtype) for x in (dout, q, k, v, out)), lse)
    sandbox.attention_backward(*given, kernel=kernel)
    allocated.clear()
    gradients = sandbox.attention_backward(*given, kernel=kernel)
    scratch = declared(kernel, Problem(1, 2, 128, 128, 64, dtype=kernel.dtypes[0]), HOST)
    assert sum(allocated) - sum(x.nbytes for x in gradients) == sum(scratch.values())
    assert scratch.pop("delta") == lse.nbytes
    counters = scratch.pop("dQ_accum", q.nbytes) - q.nbytes  # q is fp32
    assert 0 <= counters <= (q.nbytes // 50 if kernel.scratch else 0), f"{counters} bytes"
    per_query_head = 2 * 2 * q.numel() if kernel.name == "bwd_wgmma_split_group" else 0  # dK and dV in 16 bits
    assert scratch.pop("dKV_partials", 0) == per_query_head
    assert not any(scratch.values()), scratch
    sandbox.reload()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", BACKWARD, ids=by_name)
def test_gpu_memory_beyond_inputs_and_results(kernel: Kernel) -> None:
    """The declared scratch, as counted by PyTorch's allocator."""
    dtype = getattr(torch, kernel.dtypes[-1])
    q, k, v, dout = (torch.randn(2, 8, 1024, 64, device="cuda", dtype=dtype) for _ in range(4))
    out, lse = sandbox.attention_forward(q, k, v)
    sandbox.attention_backward(dout, q, k, v, out, lse, kernel=kernel)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = sandbox.attention_backward(dout, q, k, v, out, lse, kernel=kernel)
    beyond = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in gradients)
    problem = Problem(2, 8, 1024, 1024, 64, dtype=kernel.dtypes[-1])
    assert beyond <= sum(declared(kernel, problem, ("cuda", 0)).values())


# ---- streams, graphs, the other backend


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [*BACKWARD, None], ids=lambda kernel: kernel.name if kernel else "adds")
def test_a_cuda_graph_captures_it(kernel: Kernel | None, adds: Kernel) -> None:
    """No call synchronises with the device, and an accumulator is zeroed at each replay."""
    kernel = kernel or adds
    dtype = getattr(torch, kernel.dtypes[0])
    given = [torch.from_numpy(x).cuda() for x in arrays(1, 2, 64, 64)]
    given = [*(x.to(dtype) for x in given[:5]), given[5]]
    sandbox.attention_backward(*given, kernel=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sandbox.attention_backward(*given, kernel=kernel)
    given[0].copy_(torch.randn_like(given[0]))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for ours, again in zip(captured, sandbox.attention_backward(*given, kernel=kernel), strict=True):
        assert ((ours - again).abs() <= 1e-2).all()


@pytest.mark.gpu
def test_the_callers_stream_is_honoured(adds: Kernel) -> None:
    """After slow work on a side stream, the backward reads its results, and zeroes scratch only then."""
    given = [torch.from_numpy(x).cuda() for x in arrays(1, 2, 64, 64)]
    for kernel in (None, adds):
        expected = sandbox.attention_backward(*given, kernel=kernel)
        late, side = torch.empty_like(given[0]), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            late.copy_(given[0])
            gradients = sandbox.attention_backward(late, *given[1:], kernel=kernel)
        side.synchronize()
        for ours, ref in zip(gradients, expected, strict=True):
            assert ((ours - ref).abs() <= 1e-5).all()


@pytest.mark.gpu
def test_device_arrays_on_the_cpu_backend() -> None:
    """Copied to the host and back."""
    given = arrays(1, 2, 33, 32)
    gradients = sandbox.attention_backward(*(torch.from_numpy(x).cuda() for x in given), backend="cpu")
    assert all(x.is_cuda for x in gradients)
    close([x.cpu() for x in gradients], *given[:4])


# ---- determinism and error messages


def refused(message: str, *args, error=sandbox.UnsupportedProblem, **options) -> None:
    with pytest.raises(error) as refusal:
        sandbox.attention_backward(*args, **options)
    assert message in str(refusal.value), str(refusal.value)


def test_deterministic(adds: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that sums with atomics is not selected. If it is requested, the error names a deterministic one."""
    given = arrays(1, 2, 5, 8)
    chosen = choose.choose_kernel(spec.Problem(1, 2, 5, 5, 8), "backward", None, deterministic=True)
    refused(f"adds is not deterministic: it accumulates with atomics, in any order: choose {chosen.name}", *given,
            kernel=adds, deterministic=True)  # fmt: skip
    known = {**registry.kernels(), "adds": dataclasses.replace(adds, rung=9)}
    monkeypatch.setattr(registry, "kernels", lambda: known)
    assert choose.choose_kernel(spec.Problem(1, 2, 5, 5, 8), "backward", None).name == "adds"
    close(sandbox.attention_backward(*given, deterministic=True), *given[:4])
    only = {name: kernel for name, kernel in known.items() if kernel.computes != "backward" or name == "adds"}
    monkeypatch.setattr(registry, "kernels", lambda: only)
    sandbox.reload()
    refused("no backward kernel supports B1 H2 S5 D8 float32:\n  adds: not deterministic", *given, deterministic=True)
    sandbox.reload()


def test_refusals_name_the_value_and_the_remedy() -> None:
    """As for the forward, and for dout, out and lse that do not match q."""
    dout, q, k, v, out, lse = given = arrays(2, 4, 9, 16)
    shape = "(B, H, Sq, Dv) = (2, 4, 9, 16), the shape of the out that attention_forward returns"
    refused(f"dout has shape (2, 4, 9, 8): it must be {shape}", dout[..., :8], q, k, v, out, lse)
    refused("out has shape (2, 4, 8, 16): it must be", dout, q, k, v, out[:, :, :8], lse)
    refused(
        "lse has shape (2, 4, 8): it must be (B, H, Sq) = (2, 4, 9), the shape of the lse that attention_forward",
        dout,
        q,
        k,
        v,
        out,
        lse[..., :8],
    )
    refused("out is float16: it must be float32, because q", dout, q, k, v, out.astype(np.float16), lse)
    refused("lse is float16: it must be float32", dout, q, k, v, out, lse.astype(np.float16))
    refused("q is float32 and k is float16", dout, q, k.astype(np.float16), v, out, lse)
    refused("dout is a NumPy array and lse a PyTorch array", dout, q, k, v, out, torch.from_numpy(lse))
    refused("q has stride 2 in D", dout[..., ::2], q[..., ::2], k[..., ::2], v[..., ::2], out[..., ::2], lse)
    refused(
        "kernel='fwd_minimal' is not supported for the backward: it computes the forward (omit kernel=, or choose one",
        *given,
        kernel="fwd_minimal",
    )
    refused(
        "'bwd_preprocess' is not supported for the backward: it computes the preprocess (omit kernel=",
        *given,
        kernel="bwd_preprocess",
    )
    refused("bwd_minimal_dq is an entry point of bwd_minimal and cannot run alone: use", *given,
            kernel="bwd_minimal_dq", error=sandbox.UnknownKernel)  # fmt: skip
    with pytest.raises(
        sandbox.UnsupportedProblem,
        match=r"computes the backward \(omit kernel=, or choose one of fwd_minimal, .*fwd_wgmma",
    ):
        sandbox.attention(q, k, v, kernel="bwd_minimal")
    assert HOST == ("cpu", 0)
