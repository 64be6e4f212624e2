"""attention where PyTorch looks on: torch.func, forward-mode, subclasses, dispatch modes, tracers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import sandbox
from sandbox.core import registry
from sandbox.core.errors import UnsupportedProblem
from sandbox.engine import pipeline
from sandbox.launch import dlpack

torch = pytest.importorskip("torch")
from torch import func  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, 2, S, 8, generator=GENERATOR) for S in (5, 7, 7))
MANY = torch.stack([Q, Q + 1, Q - 1])
CALLS = {
    "attention": sandbox.attention,
    "attention_forward": lambda q, k, v: sandbox.attention_forward(q, k, v)[0],
    "attention_backward": lambda q, k, v: sandbox.attention_backward(q, q, k, v, *sandbox.attention_forward(q, k, v))[
        1
    ],
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def same_signature(compute) -> None:
    """`compute` of our attention is `compute` of PyTorch's."""
    ours = compute(sandbox.attention)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = compute(torch.nn.functional.scaled_dot_product_attention)
    for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (ours, theirs)), strict=True):
        assert x.shape == y.shape
        assert ((x - y).abs() < 1e-5).all()


TRANSFORMED = {
    "vmap": lambda a: func.vmap(lambda q: a(q, K, V))(MANY),
    "vmap along another": lambda a: func.vmap(lambda q, k: a(q, k, V), (2, None), 1)(MANY.movedim(0, 2), K),
    "vmap of vmap": lambda a: func.vmap(func.vmap(lambda q: a(q, K, V)))(torch.stack([MANY, MANY])),
    "grad": lambda a: func.grad(lambda q, k, v: a(q, k, v).square().sum(), (0, 1, 2))(Q, K, V),
    "vmap of grad": lambda a: func.vmap(func.grad(lambda q: a(q, K, V).square().sum()))(MANY),
    "grad of vmap": lambda a: func.grad(lambda q: func.vmap(lambda q: a(q, K, V))(q).square().sum())(MANY),
    "vjp": lambda a: func.vjp(lambda q: a(q, K, V), Q)[1](Q)[0],
    "jacrev": lambda a: func.jacrev(lambda q: a(q, K, V))(Q),
    "functionalize": lambda a: func.functionalize(lambda q: a(q, K, V))(Q),
}


@pytest.mark.parametrize("compute", TRANSFORMED.values(), ids=TRANSFORMED)
def test_torch_func(compute) -> None:
    same_signature(compute)


def test_gradients_of_a_batch_at_once() -> None:
    """torch.autograd.grad(is_grads_batched=True), as vectorised Jacobians ask."""
    q = Q.clone().requires_grad_()
    same_signature(lambda a: torch.autograd.grad(a(q, K, V), q, MANY, is_grads_batched=True)[0])


@pytest.mark.parametrize("of_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize(
    "option", [{"window": (2, 0)}, {"dropout": 0.5, "seed": 1}, {"sink": V[0, :, 0, 0]}], ids=["window", "seed", "sink"]
)
def test_gradients_of_a_batch_at_once_with_an_option_are_refused(option: dict, of_lse: bool) -> None:
    q = Q.clone().requires_grad_()
    out, lse = sandbox.attention(q, K, V, return_lse=True, **option)
    result, many = (lse, MANY[..., 0]) if of_lse else (out, MANY)
    with pytest.raises(UnsupportedProblem, match=r"is_grads_batched=True .* once for each gradient"):
        torch.autograd.grad(result, q, many, is_grads_batched=True)
    seen = sandbox.attention(q.as_subclass(Named), K, V, **option)
    with pytest.raises(UnsupportedProblem, match=r"is_grads_batched=True .* once for each gradient"):
        torch.autograd.grad(seen, q, MANY, is_grads_batched=True)


@every_call
def test_vmap_of_each_call(call) -> None:
    for got, q in zip(func.vmap(lambda q: call(q, K, V))(MANY), MANY, strict=True):
        assert ((got - call(q, K, V)).abs() < 1e-5).all()


def dual(call) -> object:
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(Q, torch.ones_like(Q)), K, V)


@pytest.mark.parametrize(
    "differentiate",
    [
        dual,
        lambda call: dual(torch.compile(call, backend="aot_eager")),
        lambda call: func.jvp(lambda q: call(q, K, V), (Q,), (Q,)),
        lambda call: func.jacfwd(lambda q: call(q, K, V))(Q),
        lambda call: func.hessian(lambda q: call(q, K, V).sum())(Q),
    ],
    ids=["dual numbers", "compiled", "jvp", "jacfwd", "hessian"],
)
@every_call
@pytest.mark.sampled(3)
def test_forward_mode_is_refused(call, differentiate) -> None:
    """No tangent is lost in silence."""
    with pytest.raises(UnsupportedProblem, match="attention has no forward-mode derivative: differentiate in reverse"):
        differentiate(call)


def test_forward_mode_by_dout_is_refused() -> None:
    q = Q.clone().requires_grad_()
    out = sandbox.attention(q, K, V)
    with forward_ad.dual_level(), pytest.raises(UnsupportedProblem, match="has no forward-mode derivative"):
        torch.autograd.grad(out, q, forward_ad.make_dual(Q, Q))


@every_call
def test_constants_inside_forward_mode(call) -> None:
    with forward_ad.dual_level():
        inside = call(Q, K, V)
    assert torch.equal(inside, call(Q, K, V))


def test_a_second_derivative_is_refused_in_torch_func() -> None:
    once = func.grad(lambda q: sandbox.attention(q, K, V).sum())
    with pytest.raises(UnsupportedProblem, match="attention cannot be differentiated twice"):
        func.grad(lambda q: once(q).sum())(Q)


# ---- tensors without numbers, and tracers


class Named(torch.Tensor):
    """A subclass that only bears another name."""


@every_call
def test_subclasses(call) -> None:
    """One with memory is computed on and stays what it was; one without gets what it is due."""
    out = call(Q.as_subclass(Named), K, V)
    assert type(out) is Named
    assert torch.equal(out.as_subclass(torch.Tensor), call(Q, K, V))
    fakes = torch._subclasses.FakeTensorMode()
    out = call(*map(fakes.from_tensor, (Q, K, V)))
    assert type(out) is torch._subclasses.FakeTensor
    assert out.shape == call(Q, K, V).shape


@pytest.fixture
def distributed():
    """A group of this process alone."""
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@every_call
def test_distributed_tensors_are_refused(call, distributed) -> None:
    from torch.distributed.tensor import distribute_tensor

    whole = distribute_tensor(Q, distributed)
    for arrays in ((whole, whole, whole), (Q, whole, whole), (whole, K, V)):
        with pytest.raises(UnsupportedProblem, match=r"attention does not take a DTensor: pass .*to_local\(\)"):
            call(*arrays)


@every_call
@pytest.mark.filterwarnings("ignore:.*MaskedTensors:UserWarning")
def test_masked_tensors_are_refused(call) -> None:
    masked = torch.masked.masked_tensor(Q, Q > 0)
    for arrays in ((masked, masked, masked), (masked, K, V), (Q, masked, masked)):
        with pytest.raises(UnsupportedProblem, match=r"attention does not take a MaskedTensor: .* mask="):
            call(*arrays)


@every_call
def test_dispatch_modes(call) -> None:
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert type(call(Q, K, V)) is torch._subclasses.FakeTensor
    seen = []

    class Seeing(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            seen.append(str(f))
            return f(*args, **(kwargs or {}))

    with Seeing():
        out = call(Q, K, V)
    assert torch.equal(out, call(Q, K, V))
    assert any("sandbox.attention" in name for name in seen)


@every_call
@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_it(call, mode: str, pre_dispatch: bool) -> None:
    traced = make_fx(lambda q: call(q, K, V), None, mode, pre_dispatch=pre_dispatch, _allow_non_fake_inputs=True)(Q)
    assert "torch.ops.sandbox.attention" in traced.code
    assert torch.equal(traced(Q + 1), call(Q + 1, K, V))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_records_it() -> None:
    traced = torch.jit.trace(lambda q: sandbox.attention(q, K, V), Q, check_trace=False)
    assert torch.equal(traced(Q + 1), sandbox.attention(Q + 1, K, V))


# ---- options that the compiler has to carry


COMPILED = {
    "attention": lambda q: sandbox.attention(q, K, V),
    "attention_forward": lambda q: sandbox.attention_forward(q, K, V)[0],
    "attention_backward": lambda q: sandbox.attention_backward(q, q, K, V, q, q[..., 0])[0],
    "options": lambda q: sandbox.attention(q, K, V, window=(2, 0), softcap=3.0, dropout=0.5, seed=1),
    "attention_varlen": lambda q: sandbox.attention_varlen(q[0], q[0], q[0], torch.tensor([0, 2], dtype=torch.int32)),
}


@pytest.mark.parametrize("call", COMPILED.values(), ids=COMPILED)
def test_the_compiler_comes_first(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a process may be a compiled one; an eager call between does not make it compile again."""
    monkeypatch.setattr(dlpack, "_TORCH", dlpack._PyTorch())  # an adapter that has found nothing yet
    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    first = compiled(Q)
    assert torch.equal(first, call(Q))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(first, compiled(Q))


@pytest.mark.parametrize(
    "tile",
    ["BLOCK_M=32,BLOCK_N=16", {"BLOCK_M": 32, "BLOCK_N": 16}, sandbox.Tile(BLOCK_M=32, BLOCK_N=16)],
    ids=["text", "mapping", "Tile"],
)
@pytest.mark.sampled(2)
def test_the_compiler_carries_a_tile(tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is written, and another one when it changes."""
    seen = []
    real = pipeline.tile_on

    def record(device, kernel, problem, tile=None, **options):
        seen.append(tile)
        return real(device, kernel, problem, tile, **options)

    monkeypatch.setattr(pipeline, "tile_on", record)
    compiled = torch.compile(sandbox.attention, backend="aot_eager", fullgraph=True)
    for wanted in (tile, {"BLOCK_M": 64, "BLOCK_N": 16}, {"BLOCK_M": 64, "BLOCK_N": 8}):
        sandbox.reload()
        assert ((compiled(Q, K, V, kernel="fwd_minimal", tile=wanted) - sandbox.attention(Q, K, V)).abs() < 1e-5).all()
        assert pipeline.as_tile(wanted) in seen
        seen.clear()


def test_the_compiler_carries_a_kernel_of_ones_own(tmp_path: Path) -> None:
    """An object runs its own source, not what the registry has under its name."""
    ours = registry.get("fwd_minimal")
    source = tmp_path / "fwd_minimal.cu"
    source.write_text(ours.source.read_text().replace("final_row.O_scale);", "2 * final_row.O_scale);"))
    theirs = dataclasses.replace(ours, source=source)
    compiled = torch.compile(sandbox.attention, backend="aot_eager", fullgraph=True)
    expected = sandbox.attention(Q, K, V, kernel=ours)
    assert torch.equal(sandbox.attention(Q, K, V, kernel=theirs), 2 * expected)
    for kernel, factor in ((ours, 1), (theirs, 2), ("fwd_minimal", 1), (theirs, 2)):
        assert torch.equal(compiled(Q, K, V, kernel=kernel), factor * expected)
        assert torch.equal(func.vmap(lambda q, kernel=kernel: sandbox.attention(q, K, V, kernel=kernel))(Q[None])[0],
                           factor * expected)  # fmt: skip
