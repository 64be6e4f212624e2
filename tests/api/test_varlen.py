"""sandbox.attention_varlen: ragged batches of NumPy arrays and PyTorch tensors, against each sequence alone."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import warnings
from typing import Any

import numpy as np
import pytest

import sandbox
from sandbox.api import dispatch, options, plan
from sandbox.core.errors import LaunchError, SpecError, UnsupportedProblem
from sandbox.launch.dlpack import library_of
from sandbox.spec import Problem

torch = pytest.importorskip("torch")

LENGTHS = (5, 0, 70, 1, 33)
OFFSETS = np.cumsum([0, *LENGTHS]).astype(np.int32)


def arrays(H: int = 4, Hk: int = 2, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((sum(LENGTHS), heads, 32)).astype(np.float32) for heads in (H, Hk, Hk))  # type: ignore[return-value]


def alone(x: Any, b: int) -> Any:
    return x[OFFSETS[b] : OFFSETS[b + 1]].swapaxes(0, 1)[None]


def test_each_sequence_is_as_attention_makes_it() -> None:
    q, k, v = arrays()
    out, lse = sandbox.attention_varlen(q, k, v, OFFSETS, causal=True, return_lse=True)
    assert out.shape == q.shape
    assert out.flags.c_contiguous
    assert lse.shape == (4, sum(LENGTHS))
    for b, rows in enumerate(itertools.pairwise(OFFSETS)):
        if not LENGTHS[b]:
            continue
        own, own_lse = sandbox.attention(alone(q, b), alone(k, b), alone(v, b), causal=True, return_lse=True)
        assert np.array_equal(own[0].swapaxes(0, 1), out[slice(*rows)])
        assert np.array_equal(own_lse[0], lse[:, slice(*rows)])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(4)
def test_options_and_gradients_sampled(seed: int) -> None:
    sample, rng = random.Random(seed), np.random.default_rng(seed)
    queries, keys = ([sample.choice((0, 1, 7, 40)) for _ in range(4)] for _ in "qk")
    offsets = [torch.tensor(np.cumsum([0, *n]), dtype=torch.int32) for n in (queries, keys)]
    q, k, v = (torch.tensor(rng.standard_normal((sum(n), 2, 16)), dtype=torch.float32, requires_grad=True)
               for n in (queries, keys, keys))  # fmt: skip
    most = max(queries), max(keys)
    options: dict[str, Any] = {
        "causal": sample.choice((False, True, "top-left")), "softcap": sample.choice((0.0, 3.0)),
        "window": sample.choice((None, (9, 4))), "alibi": torch.rand(4, 2), "sink": torch.randn(2, requires_grad=True),
        "bias": torch.randn(4, 2, *most, requires_grad=True),
    }  # fmt: skip
    longest = {"max_seqlen_q": most[0], "max_seqlen_k": most[1]}
    out, lse = sandbox.attention_varlen(q, k, v, *offsets, **longest, return_lse=True, **options)
    weights = torch.randn_like(out)
    learned = [q, k, v, options["sink"], options["bias"]]
    found = torch.autograd.grad((out * weights).sum(), learned, retain_graph=True)

    parts, lses = [], []
    for b in range(4):
        x = slice(*offsets[0][b : b + 2].tolist())
        y = slice(*offsets[1][b : b + 2].tolist())
        own = {**options, "alibi": options["alibi"][b], "bias": options["bias"][b : b + 1, :, : queries[b], : keys[b]]}
        heads_first = (t.transpose(0, 1)[None] for t in (q[x], k[y], v[y]))
        o, l = sandbox.attention(*heads_first, return_lse=True, **own)
        parts.append(o[0].transpose(0, 1))
        lses.append(l[0])
    said = f"seed {seed}: {queries} x {keys}, {options['causal']}"
    torch.testing.assert_close(out, torch.cat(parts), rtol=0, atol=0, msg=lambda text: f"{said}: {text}")
    assert torch.equal(lse, torch.cat(lses, 1)), said
    wanted = torch.autograd.grad((torch.cat(parts) * weights).sum(), learned)
    for name, a, b_ in zip(("q", "k", "v", "sink", "bias"), found, wanted, strict=True):
        torch.testing.assert_close(a, b_, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{said}, d{n}: {text}")


def test_compiled_and_nested_tensors_agree() -> None:
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays()]
    offsets = torch.tensor(OFFSETS)
    out = sandbox.attention_varlen(*tensors, offsets, causal=True)
    weights = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weights).sum(), tensors)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q: Any, k: Any, v: Any, offsets: Any) -> Any:
        return sandbox.attention_varlen(q, k, v, offsets, causal=True) * weights

    for a, b in zip(gradients, torch.autograd.grad(compiled(*tensors, offsets).sum(), tensors), strict=True):
        assert torch.equal(a, b)
    nested = [torch.nested.nested_tensor_from_jagged(x.detach(), offsets=offsets.long()) for x in tensors]
    leaves = [x.requires_grad_() for x in nested]
    result = sandbox.attention(*(x.transpose(1, 2) for x in leaves), causal=True)
    assert result.is_nested
    assert torch.equal(result.transpose(1, 2).values(), out)
    (result.transpose(1, 2).values() * weights).sum().backward()
    for a, leaf in zip(gradients, leaves, strict=True):
        assert torch.equal(a, leaf.grad.values())


def test_lengths_of_nested_keys_and_values() -> None:
    """They must be equal, not the same tensor."""
    made = lambda *lengths: torch.nested.nested_tensor(  # noqa: E731
        [torch.ones(n, 2, 16) for n in lengths], layout=torch.jagged
    ).transpose(1, 2)
    q, k, v, other = made(3, 1), made(5, 2), made(5, 2), made(2, 5)
    assert k.transpose(1, 2).offsets() is not v.transpose(1, 2).offsets()
    out = sandbox.attention(q, k, v, kernel="fwd_minimal")
    assert torch.equal(out.transpose(1, 2).values(), torch.ones(4, 2, 16))
    with pytest.raises(UnsupportedProblem, match=r"^k and v are nested tensors of different lengths"):
        sandbox.attention(q, k, other)
    gaps = torch.nested.narrow(torch.ones(2, 5, 2, 16), 1, torch.tensor([0, 1]), torch.tensor([3, 2]), torch.jagged)
    with pytest.raises(UnsupportedProblem, match=r"^k has gaps, or another ragged dimension: pass the transpose"):
        sandbox.attention(q, gaps.transpose(1, 2), v)


def test_nested_tensors_that_make_no_sense() -> None:
    dense = torch.zeros(2, 4, 5, 16)
    rows = [torch.zeros(n, 4, 16) for n in (5, 3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about the other layout
        strided = torch.nested.nested_tensor(rows)
    attention, supported = sandbox.attention, "nested tensors are supported as q, k and v of attention, with"
    for _ in range(2):
        sandbox.attention_forward(dense, dense, dense)  # later calls are compared with this one
    wide = torch.nested.nested_tensor([x[None] for x in rows], layout=torch.jagged)
    for call, said in (
        (lambda: attention(strided, strided, strided), "q is a nested tensor with layout torch.strided: make it with"),
        (lambda: attention(jagged, strided, jagged), "k is a nested tensor with layout torch.strided"),
        (lambda: attention(wide, wide, wide), "q is a nested tensor of 5 dimensions"),
        (lambda: attention(jagged, jagged, dense), "v is not a nested tensor, and q is"),
        (lambda: attention(dense, jagged, jagged), supported),
        (lambda: sandbox.attention_forward(jagged, jagged, jagged), supported),
        (lambda: sandbox.attention_forward(strided, strided, strided), supported),
        (lambda: sandbox.attention_backward(*[jagged] * 6), supported),
    ):
        with pytest.raises(UnsupportedProblem, match=re.escape(said)):
            call()


def test_the_shape_of_a_mask() -> None:
    """In a message: its sizes are max_seqlen_*, where they were passed."""
    q = np.zeros((16, 4, 32), np.float32)
    offsets, mask = np.array([0, 10, 16], np.int32), np.ones((2, 4, 10, 10), bool)
    defaults = "were not passed: their defaults are the number of rows of q and k"
    default = "was not passed: its default is the number of rows of"
    for longest, said in (
        ({}, f"max_seqlen_k) = (2, 4, 16, 16); max_seqlen_q and max_seqlen_k {defaults}"),
        ({"max_seqlen_q": 10}, f"max_seqlen_k) = (2, 4, 10, 16); max_seqlen_k {default} k"),
        ({"max_seqlen_q": 9, "max_seqlen_k": 9}, "max_seqlen_k) = (2, 4, 9, 9)"),
    ):
        message = f"mask has shape (2, 4, 10, 10): it must broadcast to (B, H, max_seqlen_q, {said}"
        with pytest.raises(UnsupportedProblem, match=f"^{re.escape(message)}$"):
            sandbox.attention_varlen(q, q, q, offsets, mask=mask, **longest)
    pages, table = np.zeros((4, 16, 4, 32), np.float32), np.zeros((2, 1), np.int32)
    message = f"(B, H, max_seqlen_q, Sk) = (2, 4, 16, 16); max_seqlen_q {default} q"
    with pytest.raises(UnsupportedProblem, match=f"{re.escape(message)}$"):
        sandbox.attention_paged(q, pages, pages, table, offsets[1:], cu_seqlens_q=offsets, mask=mask)


@pytest.mark.parametrize(
    ("offsets", "error", "said"),
    [
        (np.array([1, 5, 109], np.int32), LaunchError, r"cu_seqlens_q\[0\] is 1: cu_seqlens must begin with 0"),
        (np.array([0, 50, 40], np.int32), LaunchError, r"cu_seqlens_q decreases from 50 to 40 at cu_seqlens_q\[2\]"),
        (
            np.array([0, 50, 200], np.int32),
            LaunchError,
            r"cu_seqlens_q\[2\] is 200, beyond the last row: q has 109 rows",
        ),
        (np.array([0, 50, 109]), UnsupportedProblem, "int32"),
        (np.zeros((2, 2), np.int32), UnsupportedProblem, r"\(B \+ 1,\)"),
    ],
)
def test_offsets_that_make_no_sense(offsets: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        sandbox.attention_varlen(*arrays(), offsets)


def test_no_sequences_and_no_rows() -> None:
    none = np.zeros((0, 2, 16), np.float32)
    for offsets in (np.zeros(1, np.int32), np.zeros(4, np.int32)):
        out, lse = sandbox.attention_varlen(none, none, none, offsets, return_lse=True)
        assert out.shape == (0, 2, 16)
        assert lse.shape == (2, 0)


def test_tensors_of_four_dimensions_are_another_function() -> None:
    with pytest.raises(UnsupportedProblem, match=r"must be \(rows, heads, D\)"):
        sandbox.attention_varlen(*(x[None] for x in arrays()), OFFSETS)
    with pytest.raises(UnsupportedProblem, match="cu_seqlens_q is of type list, not an array"):
        sandbox.attention_varlen(*arrays(), OFFSETS.tolist())


def with_max(most_q: Any, most_k: Any, name: str = "bias", **options: Any) -> Any:
    """The longest of LENGTHS is 70."""
    shape = 1, 1, *(109 if most is None else most for most in (most_q, most_k))
    extra = np.ones(shape, bool) if name == "mask" else np.zeros(shape, np.float32)
    given = {name: extra, "max_seqlen_q": most_q, "max_seqlen_k": most_k}
    return sandbox.attention_varlen(*arrays(), OFFSETS, **given, **options)


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("longest", [(69, 70), (70, 69), (69, None), (None, 69), (0, 0)])
def test_a_sequence_longer_than_max_seqlen_is_reported(
    name: str, longest: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last rows would not be written, or its last keys not be seen. On a GPU only kernels can check it."""
    with pytest.raises(
        LaunchError, match=r"sequence \d has \d+ (queries|keys), more than max_seqlen_[qk]=(69|0): pass "
    ):
        with_max(*longest, name)
    monkeypatch.setattr(plan, "check_contents", lambda *_: None)
    with pytest.raises(LaunchError, match="a sequence is longer than max_seqlen"):
        with_max(*longest, name)


def test_a_negative_max_seqlen_is_reported() -> None:
    with pytest.raises(SpecError, match="max_seqlen_q=-1 must be an integer >= 0"):
        sandbox.attention_varlen(*arrays(), OFFSETS, max_seqlen_q=-1)


@pytest.mark.parametrize("longest", [(70, 70), (None, 70), (109, 109), (1000, 1000), (None, None)])
def test_max_seqlen_of_the_longest_or_more(longest: tuple[Any, Any]) -> None:
    most = tuple(None if n is None else min(n, 109) for n in longest)
    assert np.array_equal(with_max(*most), sandbox.attention_varlen(*arrays(), OFFSETS))


def test_a_backward_with_a_sequence_longer_than_max_seqlen(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.swapaxes(0, 1)[None] for x in arrays())
    bias = np.zeros((1, 1, 60, 60), np.float32)
    dense = options.collect("attention_varlen", q, False, None, {"bias": bias})
    ragged, more = options.ragged(*dense, (OFFSETS, OFFSETS), (60, 60))
    lse = np.zeros((1, 4, 109), np.float32)
    monkeypatch.setattr(plan, "check_contents", lambda *_: None)  # the kernels' own check
    for kernel in ("bwd_minimal", "bwd_block2d"):
        with pytest.raises(LaunchError, match="a sequence is longer than max_seqlen"):
            dispatch.run_backward((q, q, k, v, q, lse, *more), options.replace(ragged, kernel=kernel))


def test_what_may_stay_unwritten_on_a_gpu_is_nan() -> None:
    """Where a bias or mask has fewer rows than the batch; nothing is filled otherwise."""
    filled = Problem(4, 2, 64, 64, 32, ragged=(109, 109), bias=(1, 1, 64, 64))
    assert plan.may_stay_unwritten(filled) == ("O", "LSE", "dQ", "dK", "dV")
    assert plan.may_stay_unwritten(dataclasses.replace(filled, Sq=109, bias=(1, 1, 109, 64)))
    for whole in (Problem(4, 2, 109, 109, 32, ragged=(109, 109)), Problem(4, 2, 64, 64, 32)):
        assert plan.may_stay_unwritten(whole) == ()
    for like, dtype in ((np.zeros(1), "float32"), (np.zeros(1), "bfloat16"), (torch.zeros(1), "bfloat16")):
        library = library_of(like)
        made = plan._nan_filled(library, library.allocator(like, (2, 3), (3, 1), dtype))()
        assert (made != made).all()


@pytest.mark.gpu
def test_rows_beyond_max_seqlen_on_a_gpu() -> None:
    """NaN, also in gradients; the other rows and sequences as ever."""
    q, k, v = (torch.tensor(x, device="cuda", requires_grad=True) for x in arrays())
    offsets = torch.tensor(OFFSETS, device="cuda")
    bias = torch.zeros(1, 1, 60, 60, device="cuda")
    given = {"bias": bias, "max_seqlen_q": 60, "max_seqlen_k": 60, "causal": "top-left"}
    out, lse = sandbox.attention_varlen(q, k, v, offsets, **given, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out[:65].sum() + out[75:].sum(), (q, k, v))
    expected = sandbox.attention_varlen(q, k, v, offsets, causal="top-left")
    beyond = torch.zeros(109, dtype=torch.bool, device="cuda")
    beyond[65:75] = True  # of the sequence of rows 5 to 75
    for x in (out, lse.T, dq, dk, dv):
        assert torch.equal(x.isnan().flatten(1).all(1), beyond)
        assert torch.equal(x.isnan().flatten(1).any(1), beyond)
    assert (out - expected)[~beyond].abs().max() < 1e-3
