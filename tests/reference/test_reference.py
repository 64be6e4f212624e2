"""The dense reference against hand-computed numbers, a scalar loop, PyTorch's autograd and finite differences."""

import math
import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox import reference

LN2, LN3 = math.log(2), math.log(3)
CAUSAL = (False, True, "bottom-right", "top-left")


def column(*numbers):
    """One head with D = 1: (1, 1, S, 1)."""
    return np.array(numbers, np.float64).reshape(1, 1, -1, 1)


def randn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def qkv(seed=0, B=1, H=2, Hk=2, Sq=5, Sk=7, D=3):
    return randn(seed, B, H, Sq, D), randn(seed + 1, B, Hk, Sk, D), randn(seed + 2, B, Hk, Sk, D)


# Three tokens, D = 1, so scale = 1 and S_ij = q_i k_j. With k = (0, ln 2, ln 3) and q = (0, 1, 2),
#   exp(S) = (1 1 1), (1 2 3), (1 4 9)    row sums 3, 6, 14; causal: 1, 1 + 2 = 3, 14
#   v = (0, 3, 6):  O = 9/3 = 3, (6 + 18)/6 = 4, (12 + 54)/14 = 33/7; causal: 0, 6/3 = 2, 33/7
Q3, K3, V3 = column(0, 1, 2), column(0, LN2, LN3), column(0, 3, 6)

# Backward with dO = (1, 3, 98), chosen to clear the denominators. D = 1, so dP_ij = dO_i v_j, delta_i = dO_i O_i and
#   dS_ij = dO_i P_ij (v_j − O_i):
#   row 0: (1/3)·(−3, 0, 3)                        = (−1, 0, 1)         causal: 0, its one key is its output
#   row 1: (3/6)·(1·−4, 2·−1, 3·2)                 = (−2, −1, 3)        causal: (3/3)·(1·−2, 2·1) = (−2, 2)
#   row 2: (98/14)·(1·−33/7, 4·−12/7, 9·9/7)       = (−33, −48, 81)     causal: the same, it sees every key
#   dQ_i = Σ_j dS_ij k_j;  dK_j = Σ_i dS_ij q_i = row 1 + 2 · row 2
#   dV_j = Σ_i P_ij dO_i:  row weights (1 1 1)/3, (1 2 3)/2, (1 4 9)·7    causal: (1), (1 2), (1 4 9)·7
DO3 = column(1, 3, 98)
BY_HAND = {
    False: {
        "out": (3, 4, 33 / 7),
        "lse": (math.log(3), math.log(6), math.log(14)),
        "dq": (LN3, -LN2 + 3 * LN3, -48 * LN2 + 81 * LN3),
        "dk": (-2 - 66, -1 - 96, 3 + 162),
        "dv": (1 / 3 + 1 / 2 + 7, 1 / 3 + 1 + 28, 1 / 3 + 3 / 2 + 63),
    },
    True: {
        "out": (0, 2, 33 / 7),
        "lse": (0, math.log(3), math.log(14)),
        "dq": (0, 2 * LN2, -48 * LN2 + 81 * LN3),
        "dk": (-2 - 66, 2 - 96, 162),
        "dv": (1 + 1 + 7, 2 + 28, 63),
    },
}


@pytest.mark.parametrize("causal", [False, True])
def test_three_tokens_by_hand(causal):
    expected = BY_HAND[causal]
    out, lse = reference.attention(Q3, K3, V3, causal=causal)
    np.testing.assert_allclose(out.ravel(), expected["out"], atol=1e-14)
    np.testing.assert_allclose(lse.ravel(), expected["lse"], atol=1e-14)
    for given_forward in ((), (out, lse)):
        grads = reference.attention_backward(DO3, Q3, K3, V3, *given_forward, causal=causal)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            np.testing.assert_allclose(grad.ravel(), expected[name], rtol=1e-13, atol=1e-12, err_msg=name)


def test_scale_by_hand():
    # D = 4 with one nonzero column: the default scale 1/2 halves S; scale=1 restores the case above.
    wide = [np.concatenate([x, 0 * x, 0 * x, 0 * x], axis=3) for x in (Q3, K3, V3)]
    half = reference.attention(*wide)[1].ravel()
    np.testing.assert_allclose(half[2], math.log(1 + 2 + 3), rtol=1e-14)  # exp(2 · ln k / 2) = k
    np.testing.assert_allclose(reference.attention(*wide, scale=1)[1].ravel(), BY_HAND[False]["lse"], rtol=1e-14)


def test_visible_by_hand():
    for causal in (True, "bottom-right"):
        assert reference.visible(2, 3, causal).tolist() == [[True, True, False], [True, True, True]]
        assert reference.visible(3, 2, causal).tolist() == [[False, False], [True, False], [True, True]]
    assert reference.visible(2, 3, "top-left").tolist() == [[True, False, False], [True, True, False]]
    assert reference.visible(3, 2, "top-left").tolist() == [[True, False], [True, True], [True, True]]
    assert reference.visible(1, 2, False).tolist() == [[True, True]]


@pytest.mark.parametrize("causal", ["bottom_right", "yes", None, 1, 0.0, [True]])
def test_unknown_causal_is_rejected(causal):
    message = f"causal={causal!r} must be one of False, True, 'bottom-right', 'top-left'"
    with pytest.raises(ValueError, match=re.escape(message)):
        reference.attention(*qkv(), causal=causal)


@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 3, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)],  # 3 query heads over 2
        [(1, 2, 4, 8), (1, 2, 5, 8), (1, 2, 4, 8)],  # k and v of two lengths
        [(1, 2, 4, 8), (1, 2, 4, 7), (1, 2, 4, 7)],
        [(2, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)],
        [(2, 4, 8), (2, 4, 8), (2, 4, 8)],
    ],
)
def test_inconsistent_shapes_are_rejected(shapes):
    with pytest.raises(ValueError, match=re.escape("got q {}, k {}, v {}".format(*shapes))):
        reference.attention(*(np.zeros(shape) for shape in shapes))


def test_complex_numbers_are_rejected():
    q = np.zeros((1, 2, 4, 8), complex)
    for call in (reference.attention, reference.naive, lambda *x: reference.attention_backward(*x, x[0])):
        with pytest.raises(ValueError, match="is complex128: its dtype must be real"):
            call(q, q, q)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_pytorch_tensors(dtype):
    """They have the results of NumPy arrays of their dtype, also with a gradient or lazily negated."""
    torch = pytest.importorskip("torch")
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q, k, v, dout = (np.random.default_rng(n).standard_normal((1, 2, 4, 8)).astype(kind) for n in range(4))
    tensors = [torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)) for x in (q, k, v, dout)]
    tensors[1].requires_grad_()
    if dtype == "float32":
        tensors[0], q = torch._neg_view(tensors[0]), -q
    out, lse = reference.attention(q, k, v)
    for call in (
        lambda q, k, v, dout: reference.attention(q, k, v),
        lambda q, k, v, dout: [reference.naive(q, k, v)],
        lambda q, k, v, dout: reference.attention_backward(dout, q, k, v),
        lambda q, k, v, dout: reference.attention_backward(dout, q, k, v, torch.from_numpy(out), torch.from_numpy(lse)),
        lambda q, k, v, dout: reference.flash2(q, k, v, BLOCK_M=2, BLOCK_N=2),
    ):
        for found, expected in zip(call(*tensors), call(q, k, v, dout), strict=True):
            assert np.array_equal(found, expected)
    assert reference.max_error(tensors[1], k) == 0
    assert np.array_equal(reference.round_to(tensors[1], "float16"), reference.round_to(k, "float16"))


def test_gradients_of_wrong_shape_are_rejected():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="dout"):
        reference.attention_backward(q[:, :, 1:], q, k, v)
    with pytest.raises(ValueError, match="lse"):
        reference.attention_backward(q, q, k, v, q, np.zeros((1, 2, 4)))


def scalar_attention(q, k, v, causal, scale):
    """Attention as a scalar loop that implements the semantics without the reference's code."""
    B, H, Sq, D = q.shape
    Hk, Sk = k.shape[1:3]
    out, lse = np.zeros(q.shape), np.full((B, H, Sq), -np.inf)
    for b in range(B):
        for h in range(H):
            hk = h * Hk // H
            for i in range(Sq):
                last = {False: Sk - 1, "top-left": i}.get(causal, i + Sk - Sq)
                keys = [j for j in range(Sk) if j <= last]
                s = [scale * math.fsum(q[b, h, i, d] * k[b, hk, j, d] for d in range(D)) for j in keys]
                if not keys:
                    continue
                total = math.fsum(math.exp(x - max(s)) for x in s)
                lse[b, h, i] = max(s) + math.log(total)
                for d in range(D):
                    weighted = (math.exp(x - max(s)) * v[b, hk, j, d] for x, j in zip(s, keys, strict=True))
                    out[b, h, i, d] = math.fsum(weighted) / total
    return out, lse


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(1, 3), st.integers(0, 6), st.integers(0, 6)),
    D=st.integers(1, 4),
    causal=st.sampled_from(CAUSAL),
    scale=st.sampled_from([None, 1.0, -0.3, 0.0, 20.0]),
    chunk=st.sampled_from([1, 8, 1 << 18]),
)
def test_attention_is_the_scalar_loop(sizes, D, causal, scale, chunk):
    B, Hk, group, Sq, Sk = sizes
    q, k, v = qkv(7, B, Hk * group, Hk, Sq, Sk, D)
    with pytest.MonkeyPatch.context() as patch:  # rows are processed in chunks: no result may depend on where they end
        patch.setattr("sandbox.reference.dense.CHUNK", chunk)
        out, lse = reference.attention(q, k, v, causal=causal, scale=scale)
    expected_out, expected_lse = scalar_attention(q, k, v, causal, D**-0.5 if scale is None else scale)
    np.testing.assert_allclose(out, expected_out, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-11, atol=1e-12)


TORCH_CASES = [
    (2, 4, 4, 9, 9, 8, False),
    (1, 6, 2, 5, 11, 4, True),  # GQA, more keys than queries
    (1, 2, 1, 5, 11, 4, "top-left"),
    (1, 4, 1, 11, 5, 4, "top-left"),  # more queries than keys
]


@pytest.mark.parametrize("case", TORCH_CASES, ids=str)
def test_against_pytorch_autograd(case):
    torch = pytest.importorskip("torch")
    *sizes, causal = case
    q, k, v = qkv(3, *sizes)
    dout = randn(9, *q.shape)
    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    Sq, Sk = q.shape[2], k.shape[2]
    ones = torch.ones(Sq, Sk, dtype=torch.bool)
    mask = {False: ones, "top-left": ones.tril(), True: ones.tril(Sk - Sq)}[causal]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    expected = sdpa(*tensors, attn_mask=mask, scale=0.7, enable_gqa=True)
    expected.backward(torch.tensor(dout))
    out, lse = reference.attention(q, k, v, causal=causal, scale=0.7)
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-11, atol=1e-12)
    grads = reference.attention_backward(dout, q, k, v, out, lse, causal=causal, scale=0.7)
    for grad, tensor in zip(grads, tensors, strict=True):
        np.testing.assert_allclose(grad, tensor.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_top_left_is_pytorch_is_causal():
    torch = pytest.importorskip("torch")
    q, k, v = qkv(5, Sq=4, Sk=6)
    expected = torch.nn.functional.scaled_dot_product_attention(*map(torch.tensor, (q, k, v)), is_causal=True)
    np.testing.assert_allclose(reference.attention(q, k, v, causal="top-left")[0], expected.numpy(), atol=1e-12)


@pytest.mark.parametrize("causal", CAUSAL)
def test_gradients_are_finite_differences(causal):
    q, k, v = qkv(11, H=4, Hk=2, Sq=7, Sk=5)  # bottom-right leaves two rows without keys
    dout = randn(14, *q.shape)
    grads = reference.attention_backward(dout, q, k, v, causal=causal)
    eps = 1e-6
    for which, grad in enumerate(grads):
        direction = randn(20 + which, *grad.shape)
        loss = []
        for sign in (1, -1):
            moved = [x + sign * eps * direction if n == which else x for n, x in enumerate((q, k, v))]
            loss.append((reference.attention(*moved, causal=causal)[0] * dout).sum())
        # Central differences: truncation O(eps²) = 1e-12, cancellation 1e-16 / eps = 1e-10.
        assert abs((loss[0] - loss[1]) / (2 * eps) - (grad * direction).sum()) <= 1e-8


def test_rows_without_keys():
    q, k, v = qkv(H=2, Hk=1, Sq=5, Sk=2)  # bottom-right: rows 0, 1 and 2 see no key
    out, lse = reference.attention(q, k, v, causal=True)
    assert (out[:, :, :3] == 0).all()
    assert (lse[:, :, :3] == -np.inf).all()
    assert np.isfinite(lse[:, :, 3:]).all()
    dq, dk, dv = reference.attention_backward(np.ones_like(q), q, k, v, out, lse, causal=True)
    assert (dq[:, :, :3] == 0).all()
    seeing = reference.attention_backward(np.ones_like(q)[:, :, 3:], q[:, :, 3:], k, v, causal=True)
    np.testing.assert_allclose(dk, seeing[1], rtol=1e-13)
    np.testing.assert_allclose(dv, seeing[2], rtol=1e-13)


@pytest.mark.parametrize(("B", "Sq", "Sk"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)])
@pytest.mark.parametrize("causal", CAUSAL)
def test_empty_axes(B, Sq, Sk, causal):
    q, k, v = qkv(B=B, H=4, Hk=2, Sq=Sq, Sk=Sk)
    out, lse = reference.attention(q, k, v, causal=causal)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert (out == 0).all()
    assert (lse == -np.inf).all()
    grads = reference.attention_backward(np.ones_like(q), q, k, v, causal=causal)
    assert [g.shape for g in grads] == [x.shape for x in (q, k, v)]
    assert all((g == 0).all() for g in grads)


def test_scores_of_minus_infinity_are_masked():
    q, k, v = qkv(H=1, Hk=1, Sq=2, Sk=2, D=1)
    k[:] = -np.inf * np.sign(q[0, 0, 0, 0])  # every score of row 0 is −inf
    q[0, 0, 1] = -q[0, 0, 0]  # every score of row 1 is +inf
    out, lse = reference.attention(q, k, v)
    assert out[0, 0, 0] == 0
    assert lse[0, 0, 0] == -np.inf
    assert np.isnan(out[0, 0, 1])
    assert np.isnan(lse[0, 0, 1])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_low_precision_inputs_are_upcast_exactly(dtype):
    q, k, v = (x.astype(dtype) for x in qkv(2))
    exact = reference.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    for x, expected in zip(reference.attention(q, k, v, causal=True), exact, strict=True):
        assert x.dtype == np.float64
        np.testing.assert_array_equal(x, expected)


def test_strides_do_not_matter():
    x = randn(1, 2, 6, 4, 10)  # (B, S, H, 2 D): transposed, sliced views
    q, k, v = (x[..., n : n + 5].transpose(0, 2, 1, 3) for n in (0, 3, 5))
    k = np.broadcast_to(k[:1], k.shape)  # a batch of stride 0
    packed = [np.ascontiguousarray(y) for y in (q, k, v)]
    np.testing.assert_allclose(reference.attention(q, k, v)[0], reference.attention(*packed)[0], rtol=1e-13)
    grads = reference.attention_backward(q, q, k, v)
    for grad, expected in zip(grads, reference.attention_backward(packed[0], *packed), strict=True):
        np.testing.assert_allclose(grad, expected, rtol=1e-12, atol=1e-13)


def test_backward_uses_the_given_out_and_lse():
    q, k, v = qkv()
    dout, (out, lse) = randn(8, *q.shape), reference.attention(q, k, v)
    expected = reference.attention_backward(dout, q, k, v)
    off_lse = reference.attention_backward(dout, q, k, v, out, lse + LN2)
    np.testing.assert_allclose(off_lse[2], expected[2] / 2, rtol=1e-12)  # P = exp(S − LSE) halves, and dV with it
    off_out = reference.attention_backward(dout, q, k, v, 2 * out, lse)
    np.testing.assert_array_equal(off_out[2], expected[2])  # delta is no part of dV
    assert not np.allclose(off_out[0], expected[0])


def test_memory_stays_modest():
    q, k, v = qkv(H=1, Hk=1, Sq=2000, Sk=2000, D=8)
    tracemalloc.start()
    reference.attention_backward(q, q, k, v, causal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 25e6  # the mask takes 4 MB; one float64 score matrix would take 32 MB


@pytest.mark.parametrize("given", [("out",), ("lse",), ("out", "lse"), ()])
def test_the_backward_computes_the_results_that_are_not_given(given):
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 2, 5, 4)) for _ in range(4))
    results = dict(zip(("out", "lse"), reference.attention(q, k, v), strict=True))
    found = reference.attention_backward(dout, q, k, v, **{name: results[name] for name in given})
    for x, expected in zip(found, reference.attention_backward(dout, q, k, v, **results), strict=True):
        np.testing.assert_array_equal(x, expected)
