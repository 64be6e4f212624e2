"""Every option of a score through the public door: NumPy and PyTorch, differentiated, compiled, refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import sandbox
from sandbox import Score, SpecError, UnsupportedProblem, reference
from sandbox.api import dispatch
from sandbox.launch.dlpack import Device

B, H, HK, SQ, SK, D = 2, 4, 2, 19, 33, 16


def options() -> dict[str, dict[str, Any]]:
    """One call's options after the other, as NumPy arrays."""
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    doc = (np.arange(SK) // 9).astype(np.int32)
    snippet = Score("x + 0.1 * x * x * gain(h)", mask="doc(j) == doc(i)", tensors={"gain": draw(H), "doc": doc})
    return {
        "window": {"window": (9, 2)}, "softcap": {"softcap": 1.5}, "alibi": {"alibi": abs(draw(H))},
        "bias": {"bias": draw(1, H, SQ, SK)}, "bias of two dimensions": {"bias": draw(SQ, SK)},
        "bias along keys": {"bias": draw(B, 1, 1, SK)}, "bias along queries": {"bias": draw(H, SQ, 1)},
        "mask": {"mask": rng.random((B, 1, SQ, SK)) < 0.5}, "padding": {"mask": rng.random((B, 1, 1, SK)) < 0.7},
        "sink": {"sink": draw(H)}, "key_lengths": {"key_lengths": np.array([20, 0], np.int32)},
        "score": {"score": snippet}, "dropout": {"dropout": 0.3, "seed": 77},
        "many": {"window": (15, None), "softcap": 2.0, "bias": draw(1, H, SQ, SK), "sink": draw(H), "score": snippet,
                 "alibi": abs(draw(B, H)), "key_lengths": np.array([30, 33], np.int32), "dropout": 0.2, "seed": -5},
    }  # fmt: skip


NAMES = tuple(options())


def inputs(Dv: int = D) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(1)
    shapes = (B, H, SQ, D), (B, HK, SK, D), (B, HK, SK, Dv), (B, H, SQ, Dv)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def as_torch(given: dict[str, Any], device: Device) -> dict[str, Any]:
    """The options as tensors; those that have gradients are leaves."""
    put = lambda x: torch.from_numpy(x).to(device[0]) if isinstance(x, np.ndarray) else x  # noqa: E731
    found = {name: put(x) for name, x in given.items()}
    if "score" in found:
        tensors = {name: put(x) for name, x in found["score"].tensors.items()}
        found["score"] = Score(found["score"].score, found["score"].mask, tensors)
    for name in ("bias", "sink"):
        if name in found:
            found[name].requires_grad_()
    return found


def leaves(device: Device, Dv: int = D) -> list[torch.Tensor]:
    return [torch.from_numpy(x).to(device[0]).requires_grad_() for x in inputs(Dv)[:3]]


@pytest.mark.parametrize("option", ["alibi", "score"])
def test_a_tensor_without_a_gradient_refuses_to_be_differentiated_by(option: str) -> None:
    """In reverse and forward mode, compiled, and after a route was made without gradients; detached it is a number."""
    q, k, v, _ = map(torch.from_numpy, inputs())
    value = torch.rand(H)
    leaf = value.clone().requires_grad_()
    what, other = {
        "alibi": ("alibi", r"alibi\.detach\(\), or bias=-slopes"),
        "score": ("score's tensor gain", r"gain\.detach\(\), or compute what the score adds, and pass it as bias="),
    }[option]
    message = f"{what} is a tensor that requires a gradient, and attention has no gradient for it: pass {other}"

    def given(x: torch.Tensor) -> dict[str, Any]:
        return {option: x if option == "alibi" else Score("x * gain(h)", tensors={"gain": x})}

    def call(x: torch.Tensor) -> torch.Tensor:
        return sandbox.attention(q, k, v, **given(x))

    expected = call(value)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(call(leaf), expected)
        with pytest.raises(UnsupportedProblem, match=message):
            call(leaf)
    assert torch.equal(call(leaf.detach()), expected)
    with pytest.raises(UnsupportedProblem, match=message):
        torch.func.grad(lambda x: call(x).sum())(value)
    with pytest.raises(UnsupportedProblem, match=message):
        torch.func.jvp(call, (value,), (value,))
    with pytest.raises(UnsupportedProblem, match=message):
        torch.compile(sandbox.attention, backend="eager")(q, k, v, **given(leaf))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(4)
def test_numpy(name: str) -> None:
    q, k, v, dout = inputs()
    given = options()[name]
    out, lse = sandbox.attention_forward(q, k, v, causal=True, **given)
    true, true_lse = reference.attention(q, k, v, causal=True, **given)
    assert abs(out - true).max() < 2e-5
    np.testing.assert_allclose(lse, true_lse, atol=2e-5)
    found = sandbox.attention_backward(dout, q, k, v, out, lse, causal=True, **given)
    wanted = reference.attention_backward(dout, q, k, v, causal=True, **given)
    assert len(found) == 3
    for x, y in zip(found, wanted, strict=True):
        assert abs(x - y).max() < 2e-4


def gradients(call: Any, device: Device, name: str, Dv: int = D) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Of a loss of out and lse, (by PyTorch, by the reference), of everything that has one."""
    given = options()[name]
    tensors, qkv = as_torch(given, device), leaves(device, Dv)
    dout = torch.from_numpy(inputs(Dv)[3]).to(device[0])
    out, lse = call(*qkv, causal="top-left", return_lse=True, **tensors)
    counted = lse > -torch.inf
    dlse = torch.where(counted, torch.linspace(-1, 1, SQ, device=device[0]), 0)
    of = dict(zip(("dQ", "dK", "dV"), qkv, strict=True))
    of |= {f"d{n}": tensors[n] for n in ("bias", "sink") if n in tensors}
    loss = (out * dout).sum() + (torch.where(counted, lse, 0) * dlse).sum()
    found = dict(zip(of, torch.autograd.grad(loss, list(of.values())), strict=True))
    wanted = reference.attention_backward(
        inputs(Dv)[3], *inputs(Dv)[:3], causal="top-left", dlse=dlse.cpu().numpy(), **given
    )
    return found, wanted.named()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(4)
def test_gradients_of_everything(name: str, device: Device) -> None:
    found, wanted = gradients(sandbox.attention, device, name)
    assert found.keys() == wanted.keys()
    for which, x in found.items():
        assert x.shape == wanted[which].shape
        assert abs(x.cpu().numpy() - wanted[which]).max() < 3e-4, which


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(8)
def test_torch_compile(name: str, device: Device) -> None:
    call = torch.compile(sandbox.attention, backend="aot_eager", fullgraph=True)
    found, wanted = gradients(call, device, name, Dv=24)
    for which, x in found.items():
        assert abs(x.cpu().numpy() - wanted[which]).max() < 3e-4, which


def test_the_compiler_knows_a_score_by_its_texts() -> None:
    """One that is made anew for each call is no reason to compile again; another text is."""
    from torch._dynamo.testing import CompileCounter

    q, k, v = leaves(("cpu", 0))
    graphs = CompileCounter()
    compiled = torch.compile(sandbox.attention, backend=graphs, fullgraph=True)
    for text, count in (("x - 0.1f * abs(i - j)", 1), ("x - 0.1f * abs(i - j)", 1), ("2 * x", 2)):
        out = compiled(q, k, v, score=Score(text))
        assert torch.equal(out, sandbox.attention(q, k, v, score=Score(text)))
        assert graphs.frame_count == count


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(8)
def test_opcheck(name: str, device: Device) -> None:
    from sandbox.api import torch_ops
    from sandbox.api.options import collect

    given = as_torch(options()[name], device)
    qkv = leaves(device)
    arguments = torch_ops.spread_options(*collect("attention", qkv[0], False, None, given))
    how = "top-left", None, None, "", None
    torch.library.opcheck(torch.ops.sandbox.scored_attention_forward.default, (*qkv, *arguments, *how))
    out, lse = torch.ops.sandbox.scored_attention_forward(*qkv, *arguments, *how)
    still = [x.detach() if isinstance(x, torch.Tensor) else x for x in (*qkv, out, lse, *arguments)]
    wanted = " ".join(f"d{n}" for n in ("bias", "sink") if n in given)
    backward = (torch.randn_like(out), *still[:5], None, *still[5:], *how, False, wanted)
    torch.library.opcheck(torch.ops.sandbox.scored_attention_backward.default, backward)


def test_one_plan_for_other_numbers() -> None:
    q, k, v, _ = inputs()
    bias = options()["bias"]["bias"]
    sandbox.reload()
    first = sandbox.attention(q, k, v, bias=bias)
    plans = len(dispatch._plans)
    bias += 1.0 * np.arange(SK, dtype=np.float32)
    second = sandbox.attention(q, k, v, bias=bias)
    assert len(dispatch._plans) == plans == 1
    assert abs(second - first).max() > 0.1
    assert abs(second - reference.attention(q, k, v, bias=bias)[0]).max() < 2e-5


@pytest.mark.parametrize("kind", ["expanded", "transposed", "reversed", "one for all keys, expanded"])
def test_a_bias_lies_as_it_likes(kind: str, device: Device) -> None:
    q, k, v = leaves(device)
    whole = torch.randn(SK, SQ, generator=torch.Generator().manual_seed(0)).to(device[0])
    bias = {
        "expanded": lambda: whole.mT.contiguous().expand(B, H, SQ, SK),
        "transposed": lambda: whole.mT,
        "reversed": lambda: whole.mT.contiguous()[None, :, :].flip(0),
        "one for all keys, expanded": lambda: whole[0, :, None].expand(SQ, SK),
    }[kind]().detach().requires_grad_()  # fmt: skip
    out = sandbox.attention(q, k, v, bias=bias)
    true, _ = reference.attention(*inputs()[:3], bias=bias.detach().cpu().numpy())
    assert abs(out.detach().cpu().numpy() - true).max() < 2e-5
    (found,) = torch.autograd.grad(out.sum(), bias)
    wanted = reference.attention_backward(np.ones_like(true), *inputs()[:3], bias=bias.detach().cpu().numpy())
    assert found.shape == bias.shape
    assert abs(found.cpu().numpy() - wanted.dbias).max() < 3e-4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bias": np.zeros((3, SK), np.float32)}, "bias has shape (3, 33): it must broadcast to (B, H, Sq, Sk) = "),
        ({"bias": np.zeros((SQ, SK), np.float16)}, "bias is float16: it must be float32, or float32, the dtype of out"),
        ({"mask": np.zeros((SQ, SK), np.float32)}, "mask is float32: it must be bool"),
        ({"mask": np.zeros((1, 1, 1, 1, SK), bool)}, "mask has shape (1, 1, 1, 1, 33): it must broadcast to"),
        ({"alibi": np.zeros(3, np.float32)}, "alibi has shape (3,): it must be (H,) = (4,) or (B, H) = (2, 4)"),
        ({"alibi": np.zeros(4, np.float16)}, "alibi is float16: it must be float32"),
        ({"sink": np.zeros((2, 4), np.float32)}, "sink has shape (2, 4): it must be (H,) = (4,)"),
        ({"key_lengths": np.zeros(2, np.int64)}, "key_lengths is int64: it must be int32"),
        ({"key_lengths": np.zeros(3, np.int32)}, "key_lengths has shape (3,): it must be (B,) = (2,)"),
        ({"window": 3}, "window=3 must be (left, right)"),
        ({"softcap": -1.0}, "softcap=-1.0 must be positive"),
        ({"score": "x + 1"}, "score='x + 1' must be a sandbox.Score"),
        ({"sink": torch.zeros(4)}, "q is a NumPy array and sink a PyTorch array: pass arrays of one library"),
        ({"score": Score("x + t(h)", tensors={"t": torch.zeros(4)})}, "and score.t a PyTorch array"),
    ],
)
def test_refusals_name_the_value_and_the_remedy(given: dict[str, Any], message: str) -> None:
    q, k, v, _ = inputs()
    with pytest.raises((UnsupportedProblem, SpecError)) as caught:
        sandbox.attention(q, k, v, **given)
    assert message in str(caught.value)


def test_vmap_says_what_to_do_instead() -> None:
    q, k, v = (torch.from_numpy(x) for x in inputs()[:3])
    with pytest.raises(UnsupportedProblem, match="make the mapped dimension part of B"):
        torch.func.vmap(lambda q: sandbox.attention(q, k, v, softcap=2.0))(q[None])


@pytest.mark.gpu
def test_a_graph_replays_with_other_numbers() -> None:
    q, k, v = (x.detach() for x in leaves(("cuda", 0)))
    bias = torch.from_numpy(options()["bias"]["bias"]).cuda()
    sandbox.attention(q, k, v, bias=bias)  # compiles, which a capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sandbox.attention(q, k, v, bias=bias)
    bias.normal_()
    graph.replay()
    true, _ = reference.attention(*inputs()[:3], bias=bias.cpu().numpy())
    assert abs(out.cpu().numpy() - true).max() < 2e-5


WIDE = 2**31 - 1, 2**32, 2**64  # of which int32 holds the first alone, and no sum with it


@pytest.mark.parametrize("bound", WIDE)
@pytest.mark.parametrize("side", [0, 1])
def test_a_window_as_wide_as_can_be_hides_nothing(bound: int, side: int) -> None:
    """Out and gradients of every kernel are those of the other bound alone, by NumPy."""
    q, k, v, dout = inputs()
    wide, alone = [5, 5], [5, 5]
    wide[side], alone[side] = bound, None  # type: ignore[call-overload]
    for causal in (False, "top-left"):
        true, true_lse = reference.attention(q, k, v, causal=causal, window=alone)
        truly = reference.attention_backward(dout, q, k, v, causal=causal, window=alone)
        for name in ("fwd_minimal", "fwd_block2d"):
            out, lse = sandbox.attention_forward(q, k, v, causal=causal, window=wide, kernel=name)
            assert abs(out - true).max() < 2e-5, name
            np.testing.assert_allclose(lse, true_lse, atol=2e-5)
        for name in ("bwd_minimal", "bwd_block2d"):
            found = sandbox.attention_backward(dout, q, k, v, out, lse, causal=causal, window=wide, kernel=name)
            for x, y in zip(found, truly, strict=True):
                assert abs(x - y).max() < 2e-4, name


@pytest.mark.parametrize("how", ["eager", "compiled", "functionalized"])
def test_a_wide_window_of_tensors(how: str) -> None:
    """Also of NumPy's integers, which no JSON text holds."""
    qkv, plain = leaves(("cpu", 0)), leaves(("cpu", 0))
    call = sandbox.attention
    if how == "compiled":
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    expected = sandbox.attention(*plain, window=(None, 3))
    wanted = torch.autograd.grad(expected.sum(), plain)
    for window in ((2**32, 3), [2**31 - 1, 3], (np.int64(2**40), np.int32(3))):
        torch.compiler.reset()  # else the second number is a variable to the compiler
        if how == "functionalized":
            out = torch.func.functionalize(lambda q, k, v, window=window: call(q, k, v, window=window))(*qkv)
        elif how == "compiled" and type(window[0]) is not int:
            continue  # a constant of NumPy's is an array to the compiler
        else:
            out = call(*qkv, window=window)
            for x, y in zip(torch.autograd.grad(out.sum(), qkv), wanted, strict=True):
                assert torch.equal(x, y)
        assert torch.equal(out, expected)


def test_a_wide_window_in_the_slot() -> None:
    q, k, v = (torch.from_numpy(x).transpose(1, 2).half() for x in inputs()[:3])
    bounds = {"window_size_left": 2**31 - 1, "window_size_right": 2**32}
    rest = None, None, SQ, SK, 0.0, False, False
    with sandbox.use_in_torch():
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *rest, **bounds)
        none, none_lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *rest)
    assert abs(out - none).max() < 2e-3
    assert abs(lse - none_lse).max() < 1e-3


@pytest.mark.parametrize("before", [False, True], ids=["first", "after a plan for ints"])
def test_a_plan_does_not_take_what_only_compares_equal(before: bool) -> None:
    """The answer is the same whatever was called before."""
    q, k, v, _ = inputs()
    sandbox.reload()
    bias = np.zeros((B, 1, SQ, SK), np.float32)
    x, offsets = np.ascontiguousarray(q[0].swapaxes(0, 1)), np.array([0, SQ], np.int32)
    ragged = {"cu_seqlens_q": offsets, "bias": bias[:1, :, :, :SQ]}
    if before:
        causal = sandbox.attention(q, k, v, causal=True)
        sandbox.attention(q, k, v, window=(3, 1))
        sandbox.attention_varlen(x, x, x, **ragged, max_seqlen_q=SQ)
    for window in ((3.0, 1.0), (3, True), (3, "1"), (3, 1, 1), (3,)):
        with pytest.raises(SpecError, match=r"must be \(left, right\)"):
            sandbox.attention(q, k, v, window=window)
    for most in (float(SQ), True, "19"):
        with pytest.raises(SpecError, match=r"max_seqlen_q=.* must be an integer >= 0"):
            sandbox.attention_varlen(x, x, x, **ragged, max_seqlen_q=most)
    for yes in (1, 1.0, np.True_):
        found = sandbox.attention(q, k, v, causal=yes)
        assert not before or np.array_equal(found, causal)
    windowed = sandbox.attention(q, k, v, window=(np.int64(3), np.int8(1)))
    assert np.array_equal(windowed, sandbox.attention(q, k, v, window=[3, 1]))


@pytest.mark.parametrize("which", ["q", "k", "v", "bias", "mask", "sink", "score.t"])
def test_a_masked_array_is_refused(which: str) -> None:
    """Also where a plan for plain arrays of that kind exists."""
    q, k, v, _ = inputs()
    every = {"q": q, "k": k, "v": v, "bias": np.zeros((SQ, SK), np.float32), "mask": np.ones((SQ, SK), bool),
             "sink": np.zeros(H, np.float32), "score.t": np.zeros(H, np.float32)}  # fmt: skip

    def call(**given: Any) -> Any:
        q, k, v, bias, mask, sink, t = given.values()
        score = Score("x + t(h)", tensors={"t": t})
        return sandbox.attention(q, k, v, bias=bias, mask=mask, sink=sink, score=score)

    call(**every)
    with pytest.raises(UnsupportedProblem, match=f"{re.escape(which)} is a MaskedArray: its mask would be"):
        call(**{**every, which: np.ma.array(every[which])})


def test_the_gradient_of_a_bias_without_dimensions() -> None:
    """One number for every score: softmax does not see it, LSE grows by it."""
    qkv = leaves(("cpu", 0))
    bias = torch.tensor(0.5, requires_grad=True)
    for call in (sandbox.attention, torch.compile(sandbox.attention, backend="aot_eager", fullgraph=True)):
        out, lse = call(*qkv, bias=bias, return_lse=True)
        for loss, wanted in ((out.square().sum(), 0.0), (lse.sum(), float(lse.numel()))):
            (found,) = torch.autograd.grad(loss, bias, retain_graph=True)
            assert found.shape == ()
            assert abs(found - wanted) < 1e-3
