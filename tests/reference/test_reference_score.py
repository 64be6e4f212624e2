"""Score options: the dense reference against autograd on the plain formula, and the tiled reference against it."""

from __future__ import annotations

import itertools
import re
import secrets
from typing import Any

import numpy as np
import pytest
import torch

import sandbox
from sandbox import reference

B, H, HK, SQ, SK, D, DV = 2, 4, 2, 7, 11, 5, 3


class Cubic:
    """A custom score: x + 0.05 x³ − 0.1 j / Sk, visible where (i + j) % 3."""

    def evaluate(self, x, b, h, i, j, Sq, Sk):
        return x + 0.05 * x**3 - 0.1 * j / max(Sk, 1), 1 + 0.15 * x**2, np.broadcast_to((i + j) % 3 != 0, x.shape)


OPTIONS = ("window", "softcap", "alibi", "bias", "mask", "sink", "key_lengths", "score", "dropout")


def draw(name: str, rng: np.random.Generator, lengths: tuple[int, int]) -> Any:
    """A random value of an option, in one of its forms."""
    Sq, Sk = lengths
    forms = [(B, H, Sq, Sk), (1, H, Sq, Sk), (B, 1, 1, Sk), (1, 1, Sq, 1), (Sq, Sk), (H, 1, Sk)]
    form = forms[rng.integers(len(forms))]
    return {
        "window": lambda: [(2, 1), (None, 3), (4, None), (0, 0)][rng.integers(4)],
        "softcap": lambda: float(rng.uniform(0.5, 5)),
        "alibi": lambda: rng.random([(H,), (B, H)][rng.integers(2)]),
        "bias": lambda: rng.standard_normal(form),
        "mask": lambda: rng.random(form) < 0.6,
        "sink": lambda: rng.standard_normal(H),
        "key_lengths": lambda: np.array([rng.integers(0, Sk + 1), Sk]),
        "score": Cubic,
        "dropout": lambda: float(rng.uniform(0.1, 0.9)),
    }[name]()


def plain(q, k, v, causal, scale, o):
    """The score formula on complete PyTorch tensors in float64. (out, lse), −inf in rows without visible keys."""
    group, Sq = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    b, i, j = torch.arange(B)[:, None, None, None], torch.arange(Sq)[:, None], torch.arange(k.shape[2])
    Sk = torch.full((B,), k.shape[2]) if o.get("key_lengths") is None else torch.from_numpy(o["key_lengths"])
    Sk = Sk[b]
    own = i + (0 if causal == "top-left" else Sk - Sq)
    x = scale * (q @ k.mT)
    if o.get("softcap"):
        x = o["softcap"] * torch.tanh(x / o["softcap"])
    if o.get("alibi") is not None:
        x = x - torch.from_numpy(o["alibi"])[..., None, None] * (own - j).abs()
    if o.get("bias") is not None:
        x = x + o["bias"]
    seen = (j < Sk) & torch.ones_like(x, dtype=torch.bool)
    if o.get("score"):
        x = x + 0.05 * x**3 - 0.1 * j.double() / Sk.clamp(min=1)
        seen = seen & ((i + j) % 3 != 0)
    if causal:
        seen = seen & (j <= own)
    left, right = o.get("window") or (None, None)
    if left is not None:
        seen = seen & (j >= own - left)
    if right is not None:
        seen = seen & (j <= own + right)
    if o.get("mask") is not None:
        seen = seen & torch.from_numpy(o["mask"])
    x = torch.where(seen, x, -torch.inf)
    if o.get("sink") is not None:
        x = torch.cat([x, o["sink"][:, None, None].expand(B, -1, Sq, 1)], 3)
    some = (x > -torch.inf).any(3, keepdim=True)
    x = torch.where(some, x, 0.0)  # a row without anything, whose softmax would be NaN
    P = torch.where(some, torch.softmax(x, 3), 0.0)[..., : k.shape[2]]
    if o.get("dropout"):
        P = P * torch.from_numpy(reference.dropout_keep(o["seed"], *P.shape, o["dropout"])) / (1 - o["dropout"])
    return P @ v, torch.where(some[..., 0], torch.logsumexp(x, 3), -torch.inf)


def problem(seed: int, names: tuple[str, ...]):
    """Random inputs with any causal alignment and lengths, and random values of the named options."""
    rng = np.random.default_rng(seed)
    lengths = [(SQ, SK), (SK, SQ)][rng.integers(2)]
    causal = [False, True, "top-left"][rng.integers(3)]
    shapes = ((B, H, lengths[0], D), (B, HK, lengths[1], D), (B, HK, lengths[1], DV), (B, H, lengths[0], DV))
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    dlse = rng.standard_normal((B, H, lengths[0]))
    options = {n: draw(n, rng, lengths) for n in names}
    if "dropout" in options:
        options["seed"] = seed
    return q, k, v, dout, dlse, {"causal": causal, "scale": 0.7}, options


def expected(q, k, v, dout, dlse, call, options):
    """(out, lse, dq, dk, dv, dbias, dsink) of PyTorch; None for absent options."""
    leaves = {n: torch.from_numpy(x).requires_grad_() for n, x in (("q", q), ("k", k), ("v", v))}
    leaves |= {n: torch.from_numpy(options[n]).requires_grad_() for n in ("bias", "sink") if n in options}
    o = {**options, **{n: leaves[n] for n in ("bias", "sink") if n in leaves}}
    out, lse = plain(leaves["q"], leaves["k"], leaves["v"], call["causal"], call["scale"], o)
    loss = (out * torch.from_numpy(dout)).sum() + torch.where(lse.isinf(), 0, lse * torch.from_numpy(dlse)).sum()
    got = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))
    grads = [None if got.get(n) is None else got[n].numpy() for n in ("q", "k", "v", "bias", "sink")]
    return out.detach().numpy(), lse.detach().numpy(), *grads


def compare(seed: int, names: tuple[str, ...]) -> None:
    print(f"seed {seed}, {', '.join(names)}")  # pytest shows it where a test fails
    q, k, v, dout, dlse, call, options = problem(seed, names)
    wanted = expected(q, k, v, dout, dlse, call, options)
    tile = {"BLOCK_M": 3, "BLOCK_N": 4}
    for forward, backward in (
        (reference.attention, reference.attention_backward),
        (lambda *x, **o: reference.flash1(*x, **tile, **o), None),
        (lambda *x, **o: reference.flash2(*x, **tile, **o), lambda *x, **o: reference.flash2_backward(*x, **tile, **o)),
    ):
        out, lse = forward(q, k, v, **call, **options)
        found = [out, lse]
        if backward:
            grads = backward(dout, q, k, v, out, lse, dlse=dlse, **call, **options)
            found += [*grads, grads.dbias, grads.dsink]
        for name, x, ref in zip(("out", "lse", "dq", "dk", "dv", "dbias", "dsink"), found, wanted, strict=False):
            assert (x is None) == (ref is None), name
            if ref is not None:
                np.testing.assert_allclose(x, ref, rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_each_option_against_autograd(name: str, seed: int) -> None:
    compare(seed, (name,))


@pytest.mark.parametrize("sample", range(12))
def test_several_options_sampled_against_autograd(sample: int) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    compare(seed, tuple(map(str, rng.permutation(OPTIONS)[: 2 + sample % 3])))


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_makes_a_difference(name: str) -> None:
    q, k, v, _, _, call, options = problem(3, (name,))
    out, _ = reference.attention(q, k, v, **call)
    assert abs(reference.attention(q, k, v, **call, **options)[0] - out).max() > 1e-3


@pytest.mark.parametrize(
    "names", [("window",), ("softcap",), ("alibi",), ("bias",), ("sink",), ("score",), ("dropout",), OPTIONS]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_naive_is_close_to_the_reference_and_within_its_bound(names: tuple[str, ...], dtype: str) -> None:
    q, k, v, dout, dlse, call, options = problem(1, names)
    q, k, v, dout = (reference.round_to(x, dtype) for x in (q, k, v, dout))
    out, lse = reference.attention(q, k, v, **call, **options)
    plain_out = reference.naive(q, k, v, **call, **options, dtype=dtype)
    eps = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23}[dtype]
    assert 0 < abs(plain_out - out).max() < 30 * eps * abs(out).max()
    grads = reference.attention_backward(dout, q, k, v, dlse=dlse, **call, **options).named()
    plain_grads = reference.naive_backward(dout, q, k, v, dlse=dlse, dtype=dtype, **call, **options).named()
    sizes = reference.backward_magnitudes(dout, q, k, v, out, lse, dlse=dlse, **call, **options).named()
    assert grads.keys() == plain_grads.keys() == sizes.keys()
    for name, grad in grads.items():
        assert plain_grads[name].shape == grad.shape == sizes[name].shape
        assert abs(plain_grads[name] - grad).max() < 100 * eps * abs(grad).max(), name
        assert (abs(grad) <= sizes[name] * (1 + 1e-12)).all(), name


def test_nan_behind_every_kind_of_mask_has_no_effect() -> None:
    q, k, v, dout, _, _, _ = problem(5, ())
    Sq, Sk = q.shape[2], k.shape[2]
    hidden = np.ones(Sk, bool)
    hidden[2] = False

    class Hides:
        def evaluate(self, x, b, h, i, j, Sq, Sk):
            return x, np.ones_like(x), np.broadcast_to(j != 2, x.shape)

    bias = np.zeros((1, 1, Sq, Sk))
    bias[..., 2] = np.nan
    spoilt_k, spoilt_v = k.copy(), v.copy()
    spoilt_k[:, :, 2], spoilt_v[:, :, 2] = np.nan, np.inf
    for options in (
        {"mask": hidden},
        {"score": Hides()},
        {"mask": hidden, "bias": bias},
        {"mask": hidden, "softcap": 2.0},
    ):
        out, lse = reference.attention(q, spoilt_k, spoilt_v, **options)
        assert np.isfinite(out).all()
        assert np.isfinite(lse).all()
        for grad in reference.attention_backward(dout, q, spoilt_k, spoilt_v, **options).named().values():
            assert np.isfinite(grad).all()
    last = np.array([2, 2])
    spoilt_k[:, :, 3:], spoilt_v[:, :, 3:] = np.nan, np.nan
    assert np.isfinite(reference.attention(q, spoilt_k, spoilt_v, key_lengths=last)[0]).all()


@pytest.mark.parametrize("sink", [False, True])
def test_rows_without_visible_keys(sink: bool) -> None:
    q, k, v, dout, dlse, _, _ = problem(5, ())
    options: Any = {"mask": np.zeros((1, 1), bool)} | ({"sink": np.arange(H) * 1.0} if sink else {})
    out, lse = reference.attention(q, k, v, **options)
    assert not out.any()
    assert (lse == (np.arange(H)[:, None] if sink else -np.inf)).all()
    grads = reference.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    assert not any(grad.any() for grad in grads)
    if sink:
        np.testing.assert_allclose(grads.dsink, dlse.sum((0, 2)))  # LSE is the sink itself


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": np.zeros((3, SQ, SK))}, "bias has shape"),
        ({"mask": np.zeros((2, 2), bool)}, "mask has shape"),
        ({"alibi": np.zeros(3)}, "alibi has shape (3,): it must broadcast to (2, 4)"),
        ({"sink": np.zeros(1)}, "sink has shape (1,): it must be (4,)"),
        ({"key_lengths": np.zeros(3, int)}, "key_lengths has shape (3,): it must be (2,)"),
        ({"key_lengths": np.array([2.5, 3])}, "key_lengths is float64: its dtype must be integer"),
        ({"mask": np.ones((SQ, SK), int)}, "mask is int64: its dtype must be bool"),
        ({"mask": np.ones((SQ, SK))}, "mask is float64: its dtype must be bool"),
        ({"bias": np.ones((SQ, SK), bool)}, "bias is bool: its dtype must be real"),
        ({"descale": (1.0, 2.0)}, "descale=(1.0, 2.0) must have three elements"),
        ({"dropout": 0.5, "seed": 1.5}, "seed=1.5 must be an integer, or an array of one"),
        ({"dropout": 0.5, "seed": np.zeros(2, int)}, "seed=array([0, 0]) must be an integer, or an array of one"),
    ],
)
def test_invalid_options_are_rejected(options: Any, message: str) -> None:
    q, k, v = np.zeros((B, H, SQ, D)), np.zeros((B, HK, SK, D)), np.zeros((B, HK, SK, DV))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        reference.attention(q, k, v, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": -1}, {"softcap": np.nan}, {"softcap": "a"}, {"scale": np.nan}, {"scale": np.inf}, {"scale": "a"},
        {"window": (-1, 0)}, {"window": (2.5, 0)}, {"window": (True, 1)}, {"window": 5}, {"window": (1, 2, 3)},
        {"window": ()}, {"window": "ab"}, {"score": "x"}, {"dropout": np.nan, "seed": 1}, {"dropout": "a", "seed": 1},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_values_are_rejected_as_by_the_kernels(options: Any) -> None:
    """With the same message."""
    q = np.zeros((1, 1, 4, 8), np.float32)
    with pytest.raises(sandbox.SpecError) as expected:
        sandbox.attention(q, q, q, **options)
    for call in (
        lambda: reference.attention(q, q, q, **options),
        lambda: reference.attention_backward(q, q, q, q, **options),
        lambda: reference.flash2(q, q, q, BLOCK_M=2, BLOCK_N=2, **options),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(str(expected.value))}$"):
            call()


def test_values_that_mean_no_option() -> None:
    q = np.random.default_rng(0).standard_normal((1, 1, 4, 8), np.float32)
    expected = reference.attention(q, q, q)[0]
    for options in ({"softcap": None}, {"dropout": None}, {"window": None}, {"window": [None, None]}):
        assert np.array_equal(reference.attention(q, q, q, **options)[0], expected)
    dropped, options = reference.attention(q, q, q, dropout=0.5, seed=2**64 - 5)[0], {"dropout": 0.5}
    for seed in (-5, np.array([-5]), torch.tensor([-5])):
        assert np.array_equal(reference.attention(q, q, q, seed=seed, **options)[0], dropped)


@pytest.mark.parametrize("window", [(1, 2), (None, 0), (3, None), (0, 0)])
@pytest.mark.parametrize(("Sq", "Sk"), [(7, 11), (11, 7)])
def test_tile_ranges_are_exact(window, Sq: int, Sk: int) -> None:
    shape = reference.semantics.Shape(1, 1, 1, Sq, Sk, 1, 1)
    for causal, M, N in itertools.product((False, True, "top-left"), (1, 3), (1, 4)):
        head = reference.score.ScoreOptions(shape, causal, None, window=window).head(0, 0)
        seen = head.visible(0, Sq, 0, Sk)
        for m0 in range(0, Sq, M):
            columns = np.flatnonzero(seen[m0 : m0 + M].any(0))
            assert head.key_range(m0, M) == ((columns[0], columns[-1] + 1) if columns.size else (0, 0))
        for n0 in range(0, Sk, N):
            rows = np.flatnonzero(seen[:, n0 : n0 + N].any(1))
            assert head.query_range(n0, N) == ((rows[0], rows[-1] + 1) if rows.size else (0, 0))


def test_an_unknown_option_is_named() -> None:
    q = np.zeros((1, 1, 2, 4))
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo': the options are causal, scale, window"):
        reference.attention(q, q, q, foo=1)


def test_a_window_beyond_64_bits_hides_nothing() -> None:
    q, k, v = (np.random.default_rng(0).standard_normal((1, 1, 5, 4)) for _ in range(3))
    for call in (reference.attention, lambda *x, **o: reference.flash2(*x, BLOCK_M=2, BLOCK_N=2, **o)):
        expected = call(q, k, v, window=(None, 1))[0]
        assert np.array_equal(call(q, k, v, window=(2**70, 1))[0], expected)


@pytest.mark.parametrize("which", ["q", "k", "v", "bias", "mask", "sink"])
def test_a_masked_array_is_rejected(which: str) -> None:
    arrays = {"q": np.zeros((1, 1, 5, 4)), "k": np.zeros((1, 1, 5, 4)), "v": np.zeros((1, 1, 5, 4)),
              "bias": np.zeros((5, 5)), "mask": np.ones((5, 5), bool), "sink": np.zeros(1)}  # fmt: skip
    q, k, v, *options = {**arrays, which: np.ma.array(arrays[which])}.values()
    bias, mask, sink = options
    given = {"bias": bias, "mask": mask, "sink": sink}
    for call in (
        lambda: reference.attention(q, k, v, **given),
        lambda: reference.attention_backward(q, q, k, v, **given),
        lambda: reference.flash1(q, k, v, BLOCK_M=2, BLOCK_N=2, **given),
        lambda: reference.flash2_backward(q, q, k, v, q, q[..., 0], BLOCK_M=2, BLOCK_N=2, **given),
    ):
        with pytest.raises(ValueError, match="a MaskedArray is not supported"):
            call()
