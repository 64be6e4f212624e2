"""The public door: results of the caller's kind, semantics at the edges, and refusals."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest

import sandbox
from sandbox import reference
from sandbox.api import dispatch
from sandbox.core import registry
from sandbox.core.errors import CompileError, SpecError
from sandbox.engine import choose, pipeline
from sandbox.launch import driver
from sandbox.launch.arguments import scratch_of
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Problem

torch = pytest.importorskip("torch")


def arrays(*shape: int, dtype=np.float32, seed: int = 0, Hk: int = 0, Sk: int = 0):
    """Random q, k, v for a (B, H, S, D) shape."""
    B, H, S, D = shape
    rng = np.random.default_rng(seed)
    kv = (B, Hk or H, Sk or S, D)
    return tuple(rng.standard_normal(s, np.float32).astype(dtype) for s in ((B, H, S, D), kv, kv))


def close(out, q, k, v, **options) -> None:
    """`out` agrees with the reference; the bound proper is `check`'s business."""
    ref, _ = reference.attention(*(np.asarray(x) for x in (q, k, v)), **options)
    assert np.abs(np.asarray(out, np.float64) - ref).max(initial=0) <= 4e-3


def test_numpy(device: Device) -> None:
    """NumPy in, NumPy out, on either backend."""
    q, k, v = arrays(2, 4, 33, 24, Hk=2, Sk=50)
    out, lse = sandbox.attention_forward(q, k, v, backend=device[0])
    assert (type(out), out.shape, out.dtype) == (np.ndarray, q.shape, q.dtype)
    assert (type(lse), lse.shape, lse.dtype) == (np.ndarray, q.shape[:3], np.dtype("float32"))
    close(out, q, k, v)
    assert np.array_equal(sandbox.attention(q, k, v, backend=device[0]), out)
    again, again_lse = sandbox.attention(q, k, v, backend=device[0], return_lse=True)
    assert np.array_equal(again, out)
    assert np.array_equal(again_lse, lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pytorch(dtype, device: Device) -> None:
    """Against PyTorch's own attention; (B, S, H, D) tensors go in and come out as they lie, without a copy."""
    where = device[0]
    q, k, v = (torch.from_numpy(x).to(where, dtype) for x in arrays(2, 37, 3, 32))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = sandbox.attention(q, k, v, causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    assert (out.dtype, out.device, out.stride()) == (dtype, q.device, q.stride())
    assert ((out.float() - expected).abs() < 2e-2).all()


class Array:
    """A library known only by its protocol, which wraps another's arrays."""

    copies = False  # what it exports is not what it holds

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return (self.array.copy() if self.copies else self.array).__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return type(self)

    @classmethod
    def from_dlpack(cls, array):
        return cls(array)


@pytest.mark.parametrize("kind", [Array, type("Copying", (Array,), {"copies": True})])
def test_any_dlpack_array(kind) -> None:
    """It gets results of its own kind, though another of the like was served before; read-only inputs will do."""
    q, k, v = arrays(1, 2, 9, 16)
    for other in (type("Other", (kind,), {}), kind):
        out, lse = sandbox.attention_forward(*map(other, (q, k, v)))
        assert (type(out), type(lse)) == (other, other)
        close(out.array, q, k, v)
        gradients = sandbox.attention_backward(*map(other, (q, q, k, v, out.array, lse.array)))
        assert all(type(x) is other for x in gradients)
        expected = sandbox.attention_backward(q, q, k, v, out.array, lse.array)
        assert all(map(np.array_equal, (x.array for x in gradients), expected))
        for x in (q, k, v):
            x.flags.writeable = False


def test_what_a_capsule_owns_lives_until_the_launch_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that a library made for its capsule is there while the kernel reads, and not longer."""
    q, k, v = arrays(1, 2, 9, 16)
    alive: list[weakref.ref] = []

    class Copying(Array):
        def __dlpack__(self, **options):
            copy = self.array.copy()
            alive.append(weakref.ref(copy))
            return copy.__dlpack__(**options)

    sandbox.attention_forward(*map(Copying, (q, k, v)))  # whose plan the next call finds
    counts = []
    for key, kept in dispatch._plans.items():

        def watched(arrays, addresses, kept=kept):
            counts.append(sum(copy() is not None for copy in alive))
            return kept(arrays, addresses)

        monkeypatch.setitem(dispatch._plans, key, watched)
    assert sum(copy() is not None for copy in alive) == 0
    out, _ = sandbox.attention_forward(*map(Copying, (q, k, v)))
    assert counts == [3]
    close(out.array, q, k, v)


def test_a_compile_error_keeps_no_arrays() -> None:
    """Neither the first nor one of a later call, which reports what the compiler said before."""
    errors = []

    def call() -> weakref.ref:
        q, k, v = arrays(1, 1, 5, 8)
        with pytest.raises(CompileError) as caught:
            sandbox.attention(q, k, v, score=sandbox.Score("x + nosuch"))
        errors.append((str(caught.value), caught.value.source, caught.value.options, caught.value.log))
        return weakref.ref(q)

    kept = [call() for _ in range(3)]
    gc.collect()
    assert all(array() is None for array in kept)
    assert errors[0] == errors[1] == errors[2]
    assert "nosuch" in errors[0][3]


def test_a_wrong_spec_keeps_no_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The specs are read in the first call of an attention; the message is kept, the exception is not."""
    read = registry._kernels_of

    def broken(spec: Path):
        if spec.stem == "fwd_decode":
            raise SpecError("a mistake")
        return read(spec)

    def call() -> weakref.ref:
        q, k, v = arrays(1, 1, 5, 8)
        sandbox.attention(q, k, v, kernel="fwd_minimal")
        return weakref.ref(q)

    monkeypatch.setattr(registry, "_kernels_of", broken)
    sandbox.reload()
    try:
        kept = call()
        gc.collect()
        assert kept() is None
        with pytest.raises(SpecError, match="a mistake"):
            registry.get("fwd_decode")
    finally:
        monkeypatch.undo()
        sandbox.reload()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_through_dlpack(dtype: str) -> None:
    """bfloat16 too, which NumPy does not export."""
    q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays(1, 2, 9, 16))

    class Wrapped(Array):
        @classmethod
        def from_dlpack(cls, array):
            return cls(torch.from_dlpack(array))

    out, lse = sandbox.attention_forward(*map(Wrapped, (q, k, v)))
    assert (out.array.dtype, lse.array.dtype) == (q.dtype, torch.float32)
    assert torch.equal(out.array, sandbox.attention(q, k, v))


@pytest.mark.gpu
def test_cupy() -> None:
    """CuPy in, CuPy out, on the caller's stream."""
    cupy = pytest.importorskip("cupy")
    q, k, v = arrays(1, 2, 65, 64, dtype=np.float16)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = sandbox.attention(*(cupy.asarray(x) for x in (q, k, v)))
        stream.synchronize()
    assert isinstance(out, cupy.ndarray)
    close(cupy.asnumpy(out), q, k, v)


@pytest.mark.gpu
def test_the_callers_stream_is_honoured() -> None:
    """Queued behind slow work on a side stream, attention reads what that work writes."""
    q, k, v = (torch.from_numpy(x).cuda() for x in arrays(1, 1, 64, 64))
    late = torch.empty_like(v)
    side = torch.cuda.Stream()
    sandbox.attention(q, k, v)  # compile beforehand
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late.copy_(v)
        out = sandbox.attention(q, k, late)
    side.synchronize()
    close(out.cpu(), q.cpu(), k.cpu(), v.cpu())


@pytest.mark.gpu
def test_device_arrays_on_the_cpu_backend() -> None:
    """Copied to the host and back: the way to debug with the sanitizers what a training run produced."""
    q, k, v = (torch.from_numpy(x).cuda() for x in arrays(1, 2, 33, 32))
    out = sandbox.attention(q, k, v, backend="cpu")
    assert out.is_cuda
    close(out.cpu(), q.cpu(), k.cpu(), v.cpu())


@pytest.mark.gpu
def test_a_cuda_graph_captures_it() -> None:
    """Nothing in a launch waits for the device."""
    q, k, v = (torch.from_numpy(x).cuda() for x in arrays(1, 2, 64, 64))
    sandbox.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sandbox.attention(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    close(out.cpu(), q.cpu(), k.cpu(), v.cpu())


@pytest.mark.parametrize("causal", [False, True, "bottom-right", "top-left"])
@pytest.mark.parametrize(("Sq", "Sk"), [(7, 12), (12, 7), (1, 1), (0, 4), (4, 0)])
def test_lengths_and_alignments(Sq: int, Sk: int, causal, device: Device) -> None:
    """Sq and Sk differ both ways and vanish; rows that see nothing give 0 and -inf."""
    q = arrays(2, 2, Sq, 8)[0]
    _, k, v = arrays(2, 2, Sk, 8)
    out, lse = sandbox.attention_forward(q, k, v, causal=causal, backend=device[0])
    ref, ref_lse = reference.attention(q, k, v, causal=causal)
    assert np.abs(out - ref).max(initial=0) < 1e-5
    assert np.array_equal(np.isneginf(lse), np.isneginf(ref_lse))
    seen = np.isfinite(ref_lse)
    assert np.abs(lse[seen] - ref_lse[seen]).max(initial=0) < 1e-5


def test_empty_batches_and_heads() -> None:
    """Nothing to do is not an error."""
    for B, H in ((0, 2), (2, 0)):
        q, k, v = arrays(B, H, 5, 8)
        out, lse = sandbox.attention_forward(q, k, v)
        assert (out.shape, lse.shape) == ((B, H, 5, 8), (B, H, 5))
        lengths = np.zeros(B, np.int32)  # splits of the keys are assigned by their lengths
        assert sandbox.attention(q, k, v, key_lengths=lengths).shape == (B, H, 5, 8)
    few, many = np.zeros((0, 2, 1, 64), np.float16), np.zeros((0, 2, 640, 64), np.float16)
    assert sandbox.attention(few, many, many, key_lengths=np.zeros(0, np.int32), kernel="fwd_decode").size == 0


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)])
def test_the_result_lies_as_q_does(order, device: Device) -> None:
    """Dense, its dimensions nested as q's, in NumPy as in PyTorch: what follows reads it as it read q."""
    q, k, v = arrays(2, 3, 5, 8)
    inverse = tuple(np.argsort(order))
    lying = np.ascontiguousarray(q.transpose(order)).transpose(inverse)
    assert sandbox.attention(lying, k, v, backend=device[0]).strides == lying.strides
    tensors = (torch.from_numpy(x).to(device[0]) for x in (lying, k, v))
    assert sandbox.attention(*tensors).stride() == tuple(stride // 4 for stride in lying.strides)
    spread = np.broadcast_to(q[:1], q.shape)
    assert sandbox.attention(spread, k, v, backend=device[0]).strides == q.strides


def test_steps_back(device: Device) -> None:
    """Arrays that run backwards, and one key seen many times, are read as they lie, by a kernel that can."""
    q, k, v = (x.astype(np.float16) for x in arrays(2, 2, 80, 64))
    for reading in (np.s_[:, :, ::-1], np.s_[::-1], np.s_[:, ::-1]):
        close(sandbox.attention(q, k[reading], v[reading], backend=device[0]), q, k[reading], v[reading])
    one = np.broadcast_to(k[:, :, :1], k.shape)
    close(sandbox.attention(q, one, v, backend=device[0]), q, one, v)
    hopper = [choose.choose_kernel(Problem(2, 2, 80, 80, 64, dtype="float16", mappable=m), "forward", (9, 0)).name
              for m in (True, False)]  # fmt: skip
    assert hopper == ["fwd_wgmma_split", "fwd_mma"]


def test_scale(device: Device) -> None:
    """By default 1/sqrt(D); given, it is what counts, zero and negative too."""
    q, k, v = arrays(1, 1, 20, 16)
    for scale in (None, 0.0, -0.5, 1.0):
        out = sandbox.attention(q, k, v, scale=scale, backend=device[0])
        close(out, q, k, v, scale=scale)


def test_kernel_and_tile(device: Device) -> None:
    """By name, by object; a tile as text, mapping or Tile."""
    q, k, v = arrays(1, 1, 40, 16)
    kernel = sandbox.kernels()["fwd_minimal"]
    for tile in ("BLOCK_M=32,BLOCK_N=16", {"BLOCK_M": 32, "BLOCK_N": 16}, sandbox.Tile(BLOCK_M=32, BLOCK_N=16), None):
        for chosen in ("fwd_minimal", kernel):
            close(sandbox.attention(q, k, v, kernel=chosen, tile=tile, backend=device[0]), q, k, v)


def test_inputs_and_neighbours_are_untouched(device: Device) -> None:
    """Only the results are written."""
    q, k, v = arrays(1, 2, 33, 16)
    before = [x.tobytes() for x in (q, k, v)]
    sandbox.attention(q, k, v, backend=device[0])
    assert [x.tobytes() for x in (q, k, v)] == before


def test_threads(device: Device) -> None:
    """Threads that share a plan: each launches with its own pointers."""
    sets = [arrays(1, 1, 40, 16, seed=seed) for seed in range(8)]
    expected = [sandbox.attention(*qkv, backend=device[0]) for qkv in sets]
    wrong = []

    def work(i: int) -> None:
        for _ in range(20):
            if not np.array_equal(sandbox.attention(*sets[i], backend=device[0]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(sets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_forward_allocates_out_and_lse_alone() -> None:
    q, k, v = arrays(1, 64, 256, 16, Sk=32)
    for _ in range(2):  # what is kept for later calls
        sandbox.attention_forward(q, k, v, kernel="fwd_minimal")
    tracemalloc.start()
    out, lse = sandbox.attention_forward(q, k, v, kernel="fwd_minimal")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    others = min(x.nbytes for x in (q, k, v, out, lse)) // 2  # Python's small objects and coverage's, but no array
    results = out.nbytes + lse.nbytes
    assert results <= peak <= results + others


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, k in sandbox.kernels().items() if k.computes == "forward"])
def test_the_forward_allocates_out_and_lse_alone_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what blocks that share keys leave for one another. Neither through PyTorch's allocator nor around it: the
    GPU's free memory would count other processes' too."""
    kernel = sandbox.kernels()[name]
    float8 = "float16" not in kernel.dtypes
    dtype, options = (torch.float8_e4m3fn, {"descale": (1.0, 0.5, 2.0)}) if float8 else (torch.float16, {})
    q, k, v = (torch.randn(2, 4, 1024, 64, device="cuda").to(dtype) for _ in range(3))
    v = k if kernel.latent else v
    sandbox.attention_forward(q, k, v, kernel=kernel, **options)
    torch.cuda.synchronize()
    called, call = [], driver._call
    monkeypatch.setattr(driver, "_call", lambda name, *rest, **about: called.append(name) or call(name, *rest, **about))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, lse = sandbox.attention_forward(q, k, v, kernel=kernel, **options)
    torch.cuda.synchronize()
    problem = kernel.adapted(Problem(2, 4, 1024, 1024, 64, dtype="float8_e4m3" if float8 else "float16", **options))
    scratch = scratch_of(kernel, problem, pipeline.tile_on(("cuda", 0), kernel, problem, tuned=True))
    assert {*scratch} <= {"partials"}
    left = 4 * sum(math.prod(shape) for shape in scratch.values())
    # All of them multiples of 512 bytes.
    assert torch.cuda.max_memory_allocated() - before == out.nbytes + lse.nbytes + left
    assert [name for name in called if "Alloc" in name] == []


def test_reload_reads_an_edited_kernel(project_copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edit, reload, call: the edit counts."""
    script = """
import numpy as np, pathlib, sandbox
q = np.ones((1, 1, 4, 8), np.float32)
source = pathlib.Path("kernels_cu/fwd_minimal.cu")
assert sandbox.kernels()["fwd_minimal"].source == source.resolve()
attend = lambda: sandbox.attention(q, q, q, kernel="fwd_minimal")
before = attend()
source.write_text(source.read_text().replace("final_row.O_scale);", "2 * final_row.O_scale);"))
assert (attend() == before).all()
sandbox.reload()
assert (attend() == 2 * before).all()
"""
    subprocess.run([sys.executable, "-c", script], cwd=project_copy, check=True)


def test_arguments_go_in_the_order_of_the_spec(project_copy) -> None:
    """A kernel may take its tensors in any order; both doors, and the check, follow its spec."""
    source, spec = (project_copy / "kernels_cu" / f"fwd_minimal.{kind}" for kind in ("cu", "py"))
    lines = source.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("    View<const dtype> Q"))
    Q, K, V, O, LSE = lines[first : first + 5]
    source.write_text("\n".join([*lines[:first], O, K, LSE, V, Q, *lines[first + 5 :], ""]))
    order = '"Q", "K", "V", "O", "LSE"'
    assert order in spec.read_text()
    spec.write_text(spec.read_text().replace(order, '"O", "K", "LSE", "V", "Q"'))
    script = """
import numpy as np, sandbox
q, k, v = (np.random.default_rng(i).standard_normal((1, 2, 33, 16), np.float32) for i in range(3))
out = sandbox.attention(q, k, v, kernel="fwd_minimal")
assert np.abs(out - sandbox.reference.attention(q, k, v)[0]).max() < 1e-5
"""
    for command in (["-c", script], ["-m", "sandbox", "run", "fwd_minimal", "--shape", "1,2,33,16"]):
        subprocess.run([sys.executable, *command], cwd=project_copy, check=True, capture_output=True)


def refused(message: str, *args, error=sandbox.UnsupportedProblem, **options) -> None:
    with pytest.raises(error) as refusal:
        sandbox.attention_forward(*args, **options)
    assert message in str(refusal.value), str(refusal.value)


def test_refusals_name_the_value_and_the_remedy() -> None:
    """Bad input gets one clear exception, before anything is allocated or launched."""
    q, k, v = arrays(2, 4, 9, 16)
    refused(
        "q: dtype float64 (NumPy) is not supported: convert to one of float32, float16, bfloat16, float8_e4m3fn",
        q.astype(np.float64),
        k,
        v,
    )
    refused("q is float32 and k is float16: convert both", q, k.astype(np.float16), v.astype(np.float16))
    refused("q has shape (4, 9, 16): it must be (B, heads, S, D)", q[0], k, v)
    refused("q has shape (2, 4, 9, 16) and k (1, 4, 9, 16): B must be the same", q, k[:1], v[:1])
    refused("q has shape (2, 4, 9, 16) and k (2, 4, 9, 8): D must be the same", q, k[..., :8], v)
    refused(
        "k has shape (2, 4, 9, 16) and v (2, 4, 8, 16): they must be the same, except for the last dimension",
        q,
        k,
        v[:, :, :8],
    )
    refused("q has H=4 heads and k has Hk=3: H must be a multiple", q, k[:, :3], v[:, :3])
    refused("q has stride 2 in D: it must be 1", q[..., ::2], k[..., ::2], v[..., ::2])
    refused("q has shape (2, 4, 9, 0): its last dimension must be at least 1", q[..., :0], k[..., :0], v[..., :0])
    refused("q is a NumPy array and k a PyTorch array", q, torch.from_numpy(k), torch.from_numpy(v))
    refused("q is of type str, not an array: pass a NumPy, CuPy or PyTorch array", "q", k, v)
    refused("v is None, not an array", q, k, None)
    refused("mask is of type list, not an array", q, k, v, mask=[[True]])
    refused("alibi is of type bool, not an array", q, k, v, alibi=True)
    refused("key_lengths is of type int, not an array", q, k, v, key_lengths=20)
    blocks = sandbox.Score(mask="j <= i").with_blocks(3)
    refused("the block map of score is of type int, not an array", q, k, v, score=blocks)
    refused('backend="tpu" is not known'.replace('"', "'"), q, k, v, backend="tpu")
    refused("causal='upper' is not known: choose False", q, k, v, causal="upper", error=sandbox.SpecError)
    refused("scale=nan must be finite", q, k, v, scale=float("nan"), error=sandbox.SpecError)
    refused("kernel 'fwd_minimum' is not known: did you mean fwd_minimal?", q, k, v, kernel="fwd_minimum",
            error=sandbox.UnknownKernel)  # fmt: skip
    refused("'BLOCK_M' is not NAME=number", q, k, v, tile="BLOCK_M", error=sandbox.SpecError)
    refused("tile BLOCK_M=64 lacks BLOCK_N: set all numbers, such as BLOCK_M=", q, k, v, kernel="fwd_minimal",
            tile="BLOCK_M=64")  # fmt: skip
    refused("BLOCK_M=100 must be a multiple of 64 = 16 * WARPS, with WARPS=4", *(x.astype("f2") for x in (q, k, v)),
            kernel="fwd_mma", tile="BLOCK_M=100,BLOCK_N=64,SUB_N=32,WARPS=4,MIN_BLOCKS=1")  # fmt: skip
    refused("BLOCK_M=2048 is too large", q, k, v, kernel="fwd_minimal", tile="BLOCK_M=2048,BLOCK_N=16")
    refused("bytes of shared memory at D=16, and the CPU backend has", q, k, v, kernel="fwd_minimal",
            tile="BLOCK_M=1024,BLOCK_N=1024")  # fmt: skip
    wide = arrays(1, 1, 4, 257)
    refused("fwd_minimal: D=257 is not supported: head dimensions are at most 256", *wide, kernel="fwd_minimal")
    refused("no forward kernel supports B1 H1 S4 D257 float32", *wide)
    many = (np.zeros((65536, 1, 1, 1), np.float32),) * 3
    refused("its grid has 65536 blocks along z, and the limit is 65535", *many)


@pytest.mark.skipif(driver.available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused_at_once() -> None:
    """No hang, no fallback in silence."""
    q, k, v = arrays(1, 1, 4, 8)
    refused("`profile --show` for stored results", q, k, v, backend="cuda", error=sandbox.GpuUnavailable)


@pytest.mark.gpu
def test_devices_must_be_one() -> None:
    """Host and device arrays do not mix."""
    q, k, v = (torch.from_numpy(x) for x in arrays(1, 1, 4, 8))
    refused("q is on cuda:0 and k on cpu: copy both to one", q.cuda(), k, v)
    assert HOST == ("cpu", 0)
