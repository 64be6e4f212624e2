"""attention under PyTorch's autograd, its compiler and its own checks of operators."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import sandbox
from sandbox.core import registry
from sandbox.core.errors import SpecError, UnsupportedProblem
from sandbox.engine import choose
from sandbox.launch.dlpack import Device

torch = pytest.importorskip("torch")


def tensors(device: Device, *, dtype=torch.float32, Hk: int = 2, Sk: int = 13, grad: bool = True):
    """q, k, v of 4 query heads, on that device."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 9, 16), (2, Hk, Sk, 16), (2, Hk, Sk, 16))
    made = (torch.randn(shape, generator=generator).to(device[0], dtype) for shape in shapes)
    return tuple(x.requires_grad_(grad) for x in made)


def plain(q, k, v, causal: bool = False):
    """PyTorch's attention, whose mask is top-left."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


@pytest.mark.parametrize("causal", [False, "top-left"])
def test_gradients(causal, device: Device) -> None:
    """Those of PyTorch's own attention, through a sum (whose gradient is one expanded number) and a weighted sum."""
    q, k, v = tensors(device)
    weights = torch.randn_like(q)
    for loss in (lambda out: out.sum(), lambda out: (out * weights).sum(), lambda out: out.mT[..., ::2].sum()):
        ours = torch.autograd.grad(loss(sandbox.attention(q, k, v, causal=causal)), (q, k, v))
        theirs = torch.autograd.grad(loss(plain(q, k, v, bool(causal))), (q, k, v))
        for x, y in zip(ours, theirs, strict=True):
            assert ((x - y).abs() < 1e-5).all()


def test_only_what_is_asked_for(device: Device) -> None:
    """A tensor that needs no gradient gets none; under no_grad nothing is recorded."""
    from sandbox.api import torch_ops

    q, k, v = tensors(device, grad=False)
    k.requires_grad_()
    out, lse = sandbox.attention(q, k, v, return_lse=True)
    context = SimpleNamespace(
        saved_tensors=(q, k, v, out, lse), causal="", scale=None, backend=None, needs_input_grad=(False, True, False)
    )
    gradients = torch_ops._backward_formula(context, torch.ones_like(out), None)
    assert [x is not None for x in gradients] == [False, True, False, *[False] * 5]
    out.sum().backward()
    assert (q.grad, v.grad) == (None, None)
    assert k.grad.shape == k.shape
    with torch.no_grad():
        assert not sandbox.attention(q, k, v).requires_grad
    assert not sandbox.attention(q, k.detach(), v).requires_grad


def test_the_options_reach_both_directions(device: Device) -> None:
    """Scale, mask, kernel, tile and backend."""
    q, k, v = tensors(device)
    options = {"scale": 0.4, "causal": "bottom-right", "backend": device[0]}
    out, lse = sandbox.attention(q, k, v, kernel="fwd_minimal", tile={"BLOCK_M": 32, "BLOCK_N": 16}, return_lse=True,
                                 **options)  # fmt: skip
    dout = torch.randn_like(out)
    expected = sandbox.attention_backward(dout, q, k, v, out, lse, **options)
    for x, y in zip(torch.autograd.grad(out, (q, k, v), dout), expected, strict=True):
        assert torch.equal(x, y)


def test_each_option_survives_an_operator() -> None:
    """All fields of Options are arguments of the operators, in the JSON string, or come back from it."""
    from sandbox.api import torch_arguments, torch_ops
    from sandbox.api.options import DEFAULT, Options

    table, bias = torch.zeros(9), torch.zeros(4, 9, 13)
    score = sandbox.Score("x + t(i)", tensors={"t": table})
    given = Options(**dict.fromkeys(Options._fields, 0.5) | {  # further options are numbers
        "causal": True, "kernel": "fwd_minimal", "tile": "BLOCK_M=32,BLOCK_N=16", "backend": "cpu",
        "deterministic": True, "window": (3, None), "score": score.described, "invariant": True,
        "descale": (0.5, 1.0, None), "out_dtype": "float32", "max_seqlen": (9, None),
        "array_names": ("bias", "score.t"), "gradients": ("dbias",),
    })  # fmt: skip
    assert all(getattr(given, name) != getattr(DEFAULT, name) for name in Options._fields)
    *differentiable, others, text = torch_ops.spread_options(given, (bias, table))
    found, arrays = torch_arguments.options_of(differentiable, others, text)
    arguments = {"causal", "scale", "kernel", "tile", "backend", "deterministic", "gradients"}
    assert {name for name, a, b in zip(Options._fields, found, given, strict=True) if a != b} == arguments
    assert arrays[0] is bias
    assert arrays[1] is table


@pytest.mark.parametrize("scored", [False, True], ids=["plain", "with a bias"])
def test_a_result_without_a_gradient_is_none_to_the_backward(scored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lse: its part of the backward is left out. Of out: zeros. And which gradients are computed."""
    from sandbox.api import torch_ops
    from sandbox.api.options import Options

    called: list[tuple[object, ...]] = []
    name = "_call_scored_backward" if scored else "call_operator"
    real = getattr(torch_ops, name)
    q, k, v = tensors(("cpu", 0))
    arrays = (q, k, v, torch.zeros(4, 9, 13, requires_grad=True)) if scored else (q, k, v)
    out, lse = torch_ops.forward(arrays, Options(array_names=("bias",) if scored else ()))
    monkeypatch.setattr(torch_ops, name, lambda *inputs: called.append(inputs[0 if scored else 2 :]) or real(*inputs))
    expected = torch.autograd.grad(out.sum(), arrays, retain_graph=True)
    torch.autograd.grad(lse.sum(), arrays, retain_graph=True)
    for x, y in zip(expected, torch.autograd.grad(sandbox.attention(q, k, v).sum(), (q, k, v)), strict=False):
        assert (x - y).abs().max() < 1e-5
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(dq, expected[0])
    dlse = [inputs[6] if scored else inputs[-1] for inputs in called]
    assert [x is None for x in dlse] == [True, False, True]
    assert [bool(inputs[0].any()) for inputs in called] == [True, False, True]
    if scored:
        assert [inputs[-1] for inputs in called] == ["dbias", "dbias", "dbias"]


def test_out_dtype_of_a_compiled_call() -> None:
    q, k, v = tensors(("cpu", 0), dtype=torch.float16, grad=False)
    compiled = torch.compile(sandbox.attention, backend="aot_eager", fullgraph=True)
    for call in (sandbox.attention, compiled):
        assert call(q, k, v, out_dtype=torch.float16).dtype == torch.float16
        with pytest.raises(SpecError, match="out_dtype='float32' is not supported with dtype='float16'"):
            call(q, k, v, out_dtype=torch.float32)


def test_lse_has_a_gradient(device: Device) -> None:
    """Alone, and beside out; LSE's derivative by a score is P."""
    q, k, v = tensors(device)
    for call in (sandbox.attention, torch.compile(sandbox.attention, backend="aot_eager", fullgraph=True)):
        for out_too in (False, True):
            out, lse = call(q, k, v, return_lse=True)
            found = torch.autograd.grad((lse * lse).sum() + (out.sum() if out_too else 0), (q, k))
            S = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
            true = torch.logsumexp(S, -1)
            values = torch.softmax(S, -1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
            wanted = torch.autograd.grad((true * true).sum() + (values.sum() if out_too else 0), (q, k))
            for x, y in zip(found, wanted, strict=True):
                assert (x - y).abs().max() < 1e-4


@pytest.mark.filterwarnings("ignore:Input .* is not a double precision")
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """By finite differences, with the float32 kernels of the first rung: a loose step."""
    choice = lambda problem, computes, *rest: registry.get(  # noqa: E731
        {"forward": "fwd_minimal", "preprocess": "bwd_preprocess", "backward": "bwd_minimal"}[computes]
    )
    sandbox.reload()
    monkeypatch.setattr(choose, "choose_kernel", choice)
    q, k, v = (x[:1, :, :5, :4].detach().requires_grad_() for x in tensors(device))
    attend = lambda q, k, v: sandbox.attention(q, k, v, causal=causal)  # noqa: E731
    assert torch.autograd.gradcheck(attend, (q, k, v), eps=1e-2, atol=5e-3, rtol=1e-2, nondet_tol=0.0)
    sandbox.reload()


def test_a_second_derivative_is_refused(device: Device) -> None:
    """Where it is asked for, not before."""
    q, k, v = tensors(device)
    (dq,) = torch.autograd.grad(sandbox.attention(q, k, v).sum(), q, create_graph=True)
    assert torch.isfinite(dq).all()
    with pytest.raises(UnsupportedProblem, match="attention cannot be differentiated twice"):
        dq.sum().backward()


def test_deterministic_algorithms(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own switch decides."""
    from sandbox.api import torch_autograd

    asked = []
    real = torch_autograd.known
    record = lambda *args: asked.append(args[2].deterministic) or real(*args)  # noqa: E731
    monkeypatch.setattr(torch_autograd, "known", record)
    q, k, v = tensors(device)
    for switch in (False, True):
        torch.use_deterministic_algorithms(switch)
        try:
            sandbox.attention(q, k, v).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False, True]


@pytest.mark.parametrize("lying", ["bhsd", pytest.param("bshd", marks=pytest.mark.complete)])
def test_opcheck(lying: str, device: Device) -> None:
    """PyTorch's checks of an operator: schema, autograd, fake tensors, and tracing with sizes left open."""
    from sandbox.api import torch_ops

    q, k, v = tensors(device)
    if lying == "bshd":
        q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    torch.library.opcheck(torch_ops._forward, (q, k, v, "", None, None, "", None))
    torch.library.opcheck(torch_ops._forward, (q, k, v, "top-left", 0.3, "fwd_minimal", "BLOCK_M=32,BLOCK_N=16", None))
    with torch.no_grad():
        out, lse = sandbox.attention(q, k, v, return_lse=True)
    inputs = (torch.randn_like(out), q.detach(), k.detach(), v.detach(), out, lse)
    torch.library.opcheck(torch_ops._backward, (*inputs, "", None, None, "", None, False))


MINIMAL = registry.get("fwd_minimal")


class Block(torch.nn.Module):
    """Causal self-attention with its projections."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out_of = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        B, S, C = x.shape
        q, k, v = (y.view(B, S, 2, 16).transpose(1, 2) for y in self.into(x).split(C, dim=-1))
        out = sandbox.attention(q, k, v, causal=True, kernel=MINIMAL if S == 11 else None)
        return self.out_of(out.transpose(1, 2).reshape(B, S, C))


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor's advice
def test_torch_compile(device: Device) -> None:
    """One graph, whatever the length; the same outputs and gradients as eager code's."""
    torch.manual_seed(0)
    block = Block().to(device[0])
    compiled = torch.compile(block, fullgraph=True, backend="inductor" if device[0] == "cuda" else "aot_eager")
    for S in (7, 9, 11):
        x = torch.randn(2, S, 32, device=device[0])
        results = []
        for call in (block, compiled):
            block.zero_grad()
            y = call(x)
            y.square().sum().backward()
            results.append([y.detach(), *(p.grad.clone() for p in block.parameters())])
        for a, b in zip(*results, strict=True):
            assert ((a - b).abs() <= 1e-4 * (1 + a.abs())).all()
    with torch.no_grad():
        assert ((compiled(x) - block(x)).abs() < 1e-5).all()


@pytest.mark.gpu
def test_a_cuda_graph_captures_forward_and_backward() -> None:
    """A training step's attention, replayed on other numbers."""
    q, k, v = tensors(("cuda", 0))
    weights = torch.randn_like(q)
    step = lambda: torch.autograd.grad((sandbox.attention(q, k, v) * weights).sum(), (q, k, v))  # noqa: E731
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(captured, step(), strict=True):
        assert ((x - y).abs() < 1e-5).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_in_half_precision(dtype) -> None:
    """The path that training takes, against float32."""
    q, k, v = (torch.randn(2, 8, 300, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    weights = torch.randn_like(q)
    ours = torch.autograd.grad((sandbox.attention(q, k, v, causal=True) * weights).sum(), (q, k, v))
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    theirs = torch.autograd.grad((plain(*leaves, causal=True) * weights.float()).sum(), leaves)
    for x, y in zip(ours, theirs, strict=True):
        assert ((x.float() - y).abs() < 0.02 * y.abs().max()).all()
