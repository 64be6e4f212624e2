"""Rounding, ulp, and bounds that reject wrong results and NaN."""

import ml_dtypes
import numpy as np
import pytest

from sandbox import reference
from sandbox.reference import (
    backward_magnitudes,
    errors,
    gradient_bound,
    lse_bound,
    max_error,
    naive,
    naive_backward,
    output_bound,
    output_rounding,
    round_to,
    ulp,
)

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
INF, NAN = np.inf, np.nan


def randn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "x", "expected"),
    [
        ("float16", 1 + 2**-11, 1.0),  # halfway between 1 and 1 + 2^-10: to even
        ("float16", 1 + 3 * 2**-11, 1 + 2**-9),  # halfway, the even neighbour is above
        ("float16", 65519.0, 65504.0),
        ("float16", 65520.0, INF),
        ("float16", -1e9, -INF),
        ("bfloat16", 1 + 2**-8, 1.0),
        ("bfloat16", 1 + 3 * 2**-8, 1 + 2**-6),
        ("bfloat16", 1e38, float(np.float32(1e38).astype(ml_dtypes.bfloat16))),
        ("float32", 0.1, float(np.float32(0.1))),
        ("bfloat16", INF, INF),
    ],
)
def test_round_to_by_hand(dtype, x, expected):
    rounded = round_to(np.float32(x), dtype)
    assert rounded.dtype == np.float32
    assert rounded == expected


@pytest.mark.parametrize("dtype", NUMPY)
def test_round_to_is_idempotent_and_within_half_an_ulp(dtype):
    x = randn(0, 1000) * np.float32(10) ** np.random.default_rng(1).integers(-3, 4, 1000)
    rounded = round_to(x, dtype)
    np.testing.assert_array_equal(round_to(rounded, NUMPY[dtype]), rounded)
    assert (abs(rounded.astype(float) - x) <= ulp(x, dtype) / 2).all()
    assert np.isnan(round_to(NAN, dtype))


@pytest.mark.parametrize("dtype", NUMPY)
def test_ulp_is_the_gap_to_the_next_number(dtype):
    form = ml_dtypes.finfo(NUMPY[dtype])
    tiny = float(form.smallest_subnormal)
    x = np.array([1, 1.5, 2, 3.999, 4, 1000, 0.3, float(form.tiny), float(form.tiny) / 2, tiny], NUMPY[dtype])
    above = np.nextafter(x, np.array(INF, NUMPY[dtype]))
    gap = above.astype(np.float64) - x.astype(np.float64)
    np.testing.assert_array_equal(ulp(x, dtype), gap)
    np.testing.assert_array_equal(ulp(-x, dtype), gap)
    assert ulp(0, dtype) == tiny
    assert np.isnan(ulp(INF, dtype))
    assert np.isnan(ulp(NAN, dtype))


def test_an_unknown_dtype_is_rejected():
    for call in (lambda: ulp(1, "float8"), lambda: round_to(1, np.float64), lambda: lse_bound(np.zeros(1), "int8")):
        with pytest.raises(ValueError, match="float16, bfloat16, float32"):
            call()


@pytest.mark.parametrize(
    ("x", "ref", "error"),
    [
        (1.5, 1.0, 0.5),
        (NAN, 1.0, INF),
        (INF, 1.0, INF),
        (1.0, NAN, INF),
        (1.0, INF, INF),
        (NAN, INF, INF),
        (INF, NAN, INF),
        (-INF, INF, INF),
        (NAN, NAN, 0.0),
        (INF, INF, 0.0),
        (-INF, -INF, 0.0),
    ],
)
def test_errors_match_in_kind(x, ref, error):
    np.testing.assert_array_equal(errors([0.0, x], [0.0, ref]), [0, error])
    assert max_error([x, 0.0], [ref, 0.0]) == error


def test_errors_does_not_broadcast():
    with pytest.raises(ValueError, match=r"\(3, 1\)"):
        max_error(np.zeros((3, 1)), np.zeros(3))
    with pytest.raises(ValueError, match=r"\(3, 1\)"):
        output_bound(np.zeros((3, 1)), np.zeros(3), "float32")
    assert max_error(np.zeros((2, 0)), np.zeros((2, 0))) == 0


def test_output_bound_by_hand():
    ref, plain = np.array([[1.0, -3.0]]), np.array([[1.25, -3.0]])
    assert output_bound(ref, plain, "float16") == 2 * 0.25 + 2**-9  # an ulp of float16 in [2, 4) is 2^-9
    assert output_bound(ref, plain, "bfloat16", 3.0) == 3 * 0.25 + 2**-6
    assert output_bound(np.zeros((0, 4)), np.zeros((0, 4)), "float32") == 2**-149


def test_output_bound_ignores_nonfinite_elements():
    ref = np.array([[1.0, NAN], [2.0, 1.0]])
    plain = np.array([[1.5, NAN], [INF, 1.0]])  # finite where ref is not, and the reverse, must not enter
    assert output_bound(ref, plain, "float32") == 2 * 0.5 + 2**-22
    assert np.isfinite(output_bound(np.full((1, 2), NAN), np.zeros((1, 2)), "float32"))
    with pytest.raises(ValueError, match="overflow"):
        output_bound(np.ones((1, 2)), np.full((1, 2), NAN), "float16")


def test_lse_bound_by_hand():
    ref = np.array([0.5, -20.0, -INF, NAN])
    np.testing.assert_allclose(lse_bound(ref, "float32"), [1e-5, 2e-4, 0, 0], rtol=1e-12)
    np.testing.assert_allclose(lse_bound(ref, "bfloat16"), [1e-3, 2e-2, 0, 0], rtol=1e-12)
    passes = errors([0.5, -20.0, 0.0, 0.0], ref) <= lse_bound(ref, "float32")
    assert passes.tolist() == [True, True, False, False]


# --- what sums in fp32 lose ---


def test_magnitudes_by_hand():
    """One query, two keys, D = 1: absolute values of all terms, P with the factor 1 + |S| + |LSE|."""
    q, k, v, dout = (np.array(x, float).reshape(1, 1, -1, 1) for x in ([2.0], [-1.0, 1.0], [3.0, -4.0], [-0.5]))
    out, lse = reference.attention(q, k, v, scale=0.5)
    P = np.exp(np.array([-1.0, 1.0]) - lse[0, 0]) * (1 + 1 + abs(lse[0, 0]))
    dS = P * (0.5 * np.array([3.0, 4.0]) + 0.5 * abs(out[0, 0, 0]))
    expected = 0.5 * dS.sum(), 0.5 * dS * 2, P * 0.5
    for got, wanted in zip(backward_magnitudes(dout, q, k, v, out, lse, scale=0.5), expected, strict=True):
        np.testing.assert_allclose(got.ravel(), wanted, rtol=1e-12)


def test_magnitudes_bound_gradients_and_have_the_same_mask():
    q, k, v, dout = problem("float32")
    k[0, 0, 40], v[0, 1, 50] = NAN, NAN
    out, lse = reference.attention(q, k, v, causal=True)
    grads = reference.attention_backward(dout, q, k, v, out, lse, causal=True)
    for grad, size in zip(grads, backward_magnitudes(dout, q, k, v, out, lse, causal=True), strict=True):
        assert (np.isnan(size) == np.isnan(grad)).all()
        assert (abs(grad) <= size + 1e-12)[np.isfinite(grad)].all()


def test_magnitudes_of_hidden_keys_are_zero():
    q, k, v, dout = (x[:, :, :n] for x, n in zip(problem("float32"), (3, 5, 5, 3), strict=True))
    out, lse = reference.attention(q, k, v, causal="top-left")
    for size in backward_magnitudes(dout, q, k, v, out, lse, causal="top-left")[1:3]:
        assert size[:, :, :3].all()
        assert not size[:, :, 3:].any()


def test_the_gradient_bound_adds_the_rounding_of_sums():
    """One fp32 ulp of the magnitude; with float32 inputs, more for longer sums."""
    ref, plain = np.zeros(3), np.zeros(3)
    least = output_bound(ref, plain, "float16", 3.0)
    assert gradient_bound(ref, plain, [0.5, NAN, 6.0], "float16", terms=64) == least + 2.0**-21  # 6: between 4 and 8
    assert gradient_bound([1.0], [1.25], [1.0], "float32") == 0.75 + 2 * 2.0**-23
    assert gradient_bound([1.0], [1.25], [1.0], "float32", terms=61) == 0.75 + 5 * 2.0**-23


def test_output_rounding_by_hand():
    """One query, two keys, D = 1, |S| = 1."""
    q, k, v = (np.array(x, float).reshape(1, 1, -1, 1) for x in ([2.0], [-1.0, 1.0], [3.0, -4.0]))
    out, lse = reference.attention(q, k, v, scale=0.5)
    P, V, O = np.exp(np.array([-1.0, 1.0]) - lse[0, 0]), v[0, 0, :, 0], out[0, 0, 0, 0]
    expected = 5**0.5 * (P * abs(V)).sum() + 4**0.5 * (P * (V - O) ** 2).sum() ** 0.5
    np.testing.assert_allclose(output_rounding(q, k, v, out, scale=0.5), 2.0**-24 * expected, rtol=1e-12)
    np.testing.assert_allclose(output_rounding(q, k[:, :, :1], v[:, :, :1], v[:, :, :1], scale=0.5), 2.0**-24 * 2 * 3)


def test_output_rounding_is_not_finite_where_the_output_is_not():
    q, k, v, _ = problem("float32")
    k[0, 0, 40], v[0, 1, 50] = NAN, NAN
    out, _ = reference.attention(q, k, v, causal=True)
    assert (np.isfinite(output_rounding(q, k, v, out, causal=True)) == np.isfinite(out)).all()


def test_the_output_bound_accepts_sums_one_term_after_the_other():
    """As a kernel adds them. All products of a score are equal, so that their rounding errors do not cancel."""
    q, k, v = np.ones((1, 1, 1, 256), np.float32), np.empty((1, 1, 200, 256), np.float32), randn(0, 1, 1, 200, 8)
    k[:], v = np.linspace(-4, 4, 200)[:, None], v.astype(np.float32)
    S = np.add.accumulate(k[0, 0], axis=1, dtype=np.float32)[:, -1] / np.float32(16)
    P = np.exp(S - S.max())
    out = np.add.accumulate(P[:, None] * v[0, 0], axis=0, dtype=np.float32)[-1] / P.sum()
    ref, plain = reference.attention(q, k, v)[0], naive(q, k, v)
    error = max_error(out, ref[0, 0, 0])
    assert error > output_bound(ref, plain, "float32")
    assert error <= output_bound(ref, plain, "float32", rounding=output_rounding(q, k, v, ref))


@pytest.mark.parametrize("dtype", NUMPY)
def test_the_gradient_bound_accepts_rows_of_one_key(dtype):
    """Autograd's dS is exactly 0 there; dP - delta has two rounding errors."""
    q, k, v, dout = (x[:, :, :1] for x in problem(dtype))
    out, lse = reference.attention(q, k, v)
    sizes = backward_magnitudes(dout, q, k, v, out, lse)
    rounded = 2.0**-24 * 2 * abs(dout * out).sum() * abs(k).max() / 32**0.5
    (dq, _, _), (plain, _, _) = reference.attention_backward(dout, q, k, v), naive_backward(dout, q, k, v)
    assert not rounded <= output_bound(dq, plain, dtype, 3.0) or dtype != "float32"
    assert rounded <= gradient_bound(dq, plain, sizes[0], dtype)


# --- the bound applied to complete results ---


def problem(dtype, S=64, D=32):
    return [round_to(randn(seed, 1, 2, S, D), dtype).astype(NUMPY[dtype]) for seed in range(4)]


FAULTS = {
    "a NaN": lambda q, k, v: poke(reference.attention(q, k, v, causal=True)[0], NAN),
    "an inf": lambda q, k, v: poke(reference.attention(q, k, v, causal=True)[0], INF),
    "scale 5% off": lambda q, k, v: reference.attention(q, k, v, causal=True, scale=1.05 / 32**0.5)[0],
    "no mask": lambda q, k, v: reference.attention(q, k, v)[0],
    "a diagonal one off": lambda q, k, v: reference.attention(q[:, :, :-1], k, v, causal=True)[0],
    "heads swapped": lambda q, k, v: reference.attention(q[:, ::-1], k, v, causal=True)[0],
    "zeros": lambda q, k, v: np.zeros(q.shape),
}


def poke(x, value):
    x[0, 1, 5, 3] = value
    return x


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_output_bound_rejects(dtype, fault):
    q, k, v, _ = problem(dtype)
    ref, plain = reference.attention(q, k, v, causal=True)[0], naive(q, k, v, causal=True)
    wrong = FAULTS[fault](q, k, v)
    rows = wrong.shape[2]
    rounding = output_rounding(q, k, v, ref, causal=True) if dtype == "float32" else 0.0
    assert not max_error(wrong, ref[:, :, :rows]) <= output_bound(ref, plain, dtype, rounding=rounding)


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("causal", [False, True])
def test_the_bounds_accept_the_rounded_reference_and_naive(dtype, causal):
    q, k, v, dout = problem(dtype)
    ref = reference.attention(q, k, v, causal=causal)[0]
    plain = naive(q, k, v, causal=causal)
    rounding = output_rounding(q, k, v, ref, causal=causal) if dtype == "float32" else 0.0
    bound = output_bound(ref, plain, dtype, rounding=rounding)
    assert max_error(round_to(ref, dtype), ref) <= bound
    assert 0 < max_error(plain, ref) <= bound
    assert bound <= {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}[dtype]  # tight enough to mean something
    expected = reference.attention_backward(dout, q, k, v, causal=causal)
    for grad, ref_grad in zip(naive_backward(dout, q, k, v, causal=causal), expected, strict=True):
        assert max_error(grad, ref_grad) > 0
        assert output_bound(ref_grad, grad, dtype, 3.0) <= {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.8}[dtype]


@pytest.mark.parametrize("dtype", NUMPY)
def test_naive_returns_values_of_its_dtype(dtype):
    q, k, v, dout = problem(dtype, S=20, D=8)
    for x in (naive(q, k, v), *naive_backward(dout, q, k, v)):
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, round_to(x, dtype))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    np.testing.assert_array_equal(naive(*wide, dtype=dtype), naive(q, k, v))
    with pytest.raises(ValueError, match="float64"):
        naive(*wide)  # no dtype to stand for


def test_naive_rounds_scores_by_hand():
    # bfloat16 keeps eight bits. S = (1 + 2^-7) · (255, 254) = (256.99, 255.98), and both round to 256: P is (1/2, 1/2),
    # where S unrounded gives (0.73, 0.27).
    q, k = np.full((1, 1, 1, 1), 1 + 2**-7), np.array([255.0, 254.0]).reshape(1, 1, 2, 1)
    v = np.array([0.0, 1.0]).reshape(1, 1, 2, 1)
    assert naive(q, k, v, scale=1, dtype="bfloat16").item() == 0.5


def test_naive_rounds_every_stored_tensor():
    q, k, v, dout = (x[0, 0].astype(np.float32) for x in problem("bfloat16", S=16, D=8))

    def stored(x):
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)

    S = stored(q @ k.T * 0.25)
    P = np.exp(S - S.max(axis=1, keepdims=True))
    P = stored(P / P.sum(axis=1, keepdims=True))
    dP = stored(dout @ v.T)
    dS = stored(P * (dP - (P * dP).sum(axis=1, keepdims=True)))
    expected = [stored(x) for x in (P @ v, 0.25 * (dS @ k), 0.25 * (dS.T @ q), P.T @ dout)]
    q, k, v, dout = (x[None, None] for x in (q, k, v, dout))
    results = naive(q, k, v, scale=0.25, dtype="bfloat16"), *naive_backward(dout, q, k, v, scale=0.25, dtype="bfloat16")
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_array_equal(x[0, 0], y)


def test_naive_overflows_like_plain_attention():
    q = k = np.full((1, 1, 2, 64), 100.0)  # S = 64 · 1e4 / 8 = 80000 > 65504
    assert np.isnan(naive(q, k, k, dtype="float16")).all()
    assert (naive(q, k, k, dtype="bfloat16") == 100).all()
