"""The tiled loops and naive attention against the dense reference: odd shapes, inputs that isolate faults, NaN."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox import reference
from sandbox.reference import flash1, flash2, flash2_backward

CAUSAL = (False, True, "top-left")


def randn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def qkv(seed=0, B=1, H=2, Hk=2, Sq=5, Sk=7, D=3):
    return randn(seed, B, H, Sq, D), randn(seed + 1, B, Hk, Sk, D), randn(seed + 2, B, Hk, Sk, D)


def assert_same(xs, refs, tol=1e-11):
    for x, ref in zip(xs, refs, strict=True):
        np.testing.assert_allclose(x, ref, rtol=tol, atol=tol)


problems = st.fixed_dictionaries(
    {
        "B": st.integers(0, 2),
        "Hk": st.integers(1, 2),
        "group": st.integers(1, 3),
        "Sq": st.integers(0, 20),
        "Sk": st.integers(0, 20),
        "D": st.integers(1, 5),
    }
)
tiles = st.fixed_dictionaries({"BLOCK_M": st.integers(1, 24), "BLOCK_N": st.integers(1, 24)})


@settings(deadline=None, max_examples=150)
@given(p=problems, tile=tiles, causal=st.sampled_from(CAUSAL), scale=st.sampled_from([None, -0.7, 3.0]))
def test_tiled_is_dense(p, tile, causal, scale):
    q, k, v = qkv(4, p["B"], p["Hk"] * p["group"], p["Hk"], p["Sq"], p["Sk"], p["D"])
    dout = randn(8, *q.shape)
    options = {"causal": causal, "scale": scale}
    expected = reference.attention(q, k, v, **options)
    assert_same(flash1(q, k, v, **tile, **options), expected)
    out, lse = flash2(q, k, v, **tile, **options)
    assert_same((out, lse), expected)
    grads = flash2_backward(dout, q, k, v, out, lse, **tile, **options)
    assert_same(grads, reference.attention_backward(dout, q, k, v, **options), 1e-10)


@pytest.mark.parametrize("S", [1, 2, 5, 17, 77, 97, 15, 16, 33])
@pytest.mark.parametrize("causal", CAUSAL)
def test_common_lengths(S, causal):
    tile = {"BLOCK_M": 16, "BLOCK_N": 32}  # S includes BLOCK − 1, BLOCK and BLOCK + 1 of either side
    q, k, v = qkv(1, 1, 2, 1, S, 40, 8)
    expected = reference.attention(q, k, v, causal=causal)
    assert_same(flash1(q, k, v, **tile, causal=causal), expected)
    assert_same(flash2(q, k, v, **tile, causal=causal), expected)


@pytest.mark.parametrize("algorithm", [flash1, flash2])
def test_float32_arithmetic_stays_float32(algorithm):
    q, k, v = (x.astype(np.float32) for x in qkv(1, Sq=33, Sk=65, D=16))
    out, lse = algorithm(q, k, v, BLOCK_M=16, BLOCK_N=32, causal=True, dtype=np.float32)
    assert out.dtype == lse.dtype == np.float32
    true_out, true_lse = reference.attention(q, k, v, causal=True)
    bound = reference.output_bound(true_out, reference.naive(q, k, v, causal=True), "float32")
    assert 0 < reference.max_error(out, true_out) <= bound
    assert (reference.errors(lse, true_lse) <= reference.lse_bound(true_lse, "float32")).all()


def test_float32_backward_is_within_the_gradient_bound():
    q, k, v, dout = (x.astype(np.float32) for x in (*qkv(1, H=4, Hk=2, Sq=33, Sk=65, D=16), randn(9, 1, 4, 33, 16)))
    tile = {"BLOCK_M": 16, "BLOCK_N": 32, "causal": True, "dtype": np.float32}
    grads = flash2_backward(dout, q, k, v, *flash2(q, k, v, **tile), **tile)
    expected = reference.attention_backward(dout, q, k, v, causal=True)
    plain = reference.naive_backward(dout, q, k, v, causal=True)
    for grad, ref, naive in zip(grads, expected, plain, strict=True):
        assert grad.dtype == np.float32
        assert 0 < reference.max_error(grad, ref) <= reference.output_bound(ref, naive, "float32", 3.0)


def test_rows_without_keys():
    q, k, v = qkv(Sq=9, Sk=3)
    for algorithm in (flash1, flash2):
        out, lse = algorithm(q, k, v, BLOCK_M=4, BLOCK_N=2, causal=True)
        assert (out[:, :, :6] == 0).all()
        assert (lse[:, :, :6] == -np.inf).all()
    dq, _, _ = flash2_backward(np.ones_like(q), q, k, v, out, lse, BLOCK_M=4, BLOCK_N=2, causal=True)
    assert (dq[:, :, :6] == 0).all()
    assert (dq[:, :, 7:] != 0).any()


@pytest.mark.parametrize("tile", [(0, 4), (4, 0), (-1, 4)])
def test_an_empty_tile_is_rejected(tile):
    q, k, v = qkv()
    for call in (flash1, flash2):
        with pytest.raises(ValueError, match=f"BLOCK_M={tile[0]}, BLOCK_N={tile[1]}"):
            call(q, k, v, BLOCK_M=tile[0], BLOCK_N=tile[1])


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(("Sq", "Sk"), [(11, 11), (5, 11), (11, 5)])
def test_the_backward_visits_tiles_with_a_visible_pair(monkeypatch, causal, Sq, Sk):
    q, k, v = qkv(H=1, Hk=1, Sq=Sq, Sk=Sk)
    visited = []

    def load(x, row, rows, dtype):
        if np.shares_memory(x, q):
            visited.append(row)
        return x[row : row + rows].astype(dtype)

    monkeypatch.setattr("sandbox.reference.flash_backward.load", load)
    out, lse = reference.attention(q, k, v, causal=causal)
    flash2_backward(q + 1, q, k, v, out, lse, BLOCK_M=4, BLOCK_N=2, causal=causal)
    seen = reference.visible(Sq, Sk, causal)
    corners = ((m0, n0) for n0 in range(0, Sk, 2) for m0 in range(0, Sq, 4))
    assert visited == [m0 for m0, n0 in corners if seen[m0 : m0 + 4, n0 : n0 + 2].any()]


def test_gradients_of_wrong_shape_are_rejected():
    q, k, v = qkv()
    out, lse = flash2(q, k, v, BLOCK_M=4, BLOCK_N=4)
    for name, wrong in (("dout", (q[:, :, 1:], out, lse)), ("out", (q, out[:1, :1], lse)), ("lse", (q, out, out))):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            flash2_backward(wrong[0], q, k, v, *wrong[1:], BLOCK_M=4, BLOCK_N=4)


# --- inputs that point at the fault, through every forward ---

FORWARDS = {
    "dense": reference.attention,
    "flash1": lambda *x, **o: flash1(*x, BLOCK_M=4, BLOCK_N=3, **o),
    "flash2": lambda *x, **o: flash2(*x, BLOCK_M=4, BLOCK_N=3, **o),
    "naive": lambda *x, **o: (reference.naive(*x, **o, dtype="float32"), None),
}


@pytest.fixture(params=FORWARDS)
def forward(request):
    return FORWARDS[request.param]


@pytest.mark.parametrize("causal", CAUSAL)
def test_values_of_one_give_one(forward, causal):  # normalisation
    q, k, v = qkv(Sq=7, Sk=7)
    np.testing.assert_allclose(forward(q, k, np.ones_like(v), causal=causal)[0], 1, rtol=1e-6)


@pytest.mark.parametrize("causal", CAUSAL)
def test_keys_of_zero_give_the_mean(forward, causal):  # the mask alone decides the weights
    q, k, v = qkv(Sq=5, Sk=7)
    out, lse = forward(q, 0 * k, v, causal=causal)
    counts = {False: [7] * 5, True: [3, 4, 5, 6, 7], "top-left": [1, 2, 3, 4, 5]}[causal]
    mean = np.stack([v[:, :, :n].mean(axis=2) for n in counts], axis=2)
    np.testing.assert_allclose(out, mean, atol=1e-6)
    if lse is not None:
        np.testing.assert_allclose(lse, np.broadcast_to(np.log(counts), lse.shape), rtol=1e-12)


def test_values_count_their_column(forward):  # column order
    q, k, v = qkv(D=6)
    expected = np.arange(6.0)
    out = forward(q, k, np.broadcast_to(expected, v.shape))[0]
    np.testing.assert_allclose(out, np.broadcast_to(expected, out.shape), rtol=1e-6)


def test_identity_keys_pick_their_value(forward):  # orientation: a transposed S or P would invert the permutation
    permutation = np.array([2, 0, 3, 1, 5, 4, 7, 6, 9, 8])
    q = 200.0 * np.eye(10)[None, None]
    k, v = np.eye(10)[permutation][None, None], randn(1, 1, 1, 10, 10)
    picked = v[:, :, np.argsort(permutation)]
    np.testing.assert_allclose(forward(q, k, v)[0], picked, rtol=1e-5)


def test_key_heads_are_shared_in_order(forward):
    q, k, v = qkv(H=6, Hk=3)
    v = np.broadcast_to(np.arange(3.0)[:, None, None], v.shape)
    out = forward(q, k, v)[0]
    np.testing.assert_allclose(out[0, :, 0, 0], [0, 0, 1, 1, 2, 2], atol=1e-6)


def test_large_scores_do_not_overflow(forward):
    q, k, v = qkv(Sq=6, Sk=11)
    out = forward(1e3 * q, 1e3 * k, v)[0]  # |S| reaches 1e6, exp(S) would be inf
    nearest = np.argmax(q @ k.swapaxes(2, 3), axis=3)
    np.testing.assert_allclose(out, np.take_along_axis(v, nearest[..., None], axis=2), rtol=1e-5)


def test_an_offset_keeps_the_relative_error_honest(forward):
    q, k, v = (x + offset for x, offset in zip(qkv(Sq=17, Sk=33, D=8), (0.5, 0.5, 3), strict=True))  # no O near 0
    np.testing.assert_allclose(forward(q, k, v)[0], reference.attention(q, k, v)[0], rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_integers_are_exact(dtype):
    # q·k is a small integer and one key dominates, so that naive attention has nothing to round.
    rng = np.random.default_rng(0)
    k, v = 8.0 * np.eye(8)[None, None], rng.integers(-4, 5, (1, 1, 8, 8)).astype(float)
    q = 16.0 * np.eye(8)[rng.integers(0, 8, 5)][None, None]  # the chosen score is 128, the others 0; exp(−128) < 2^−149
    np.testing.assert_array_equal(reference.naive(q, k, v, scale=1, dtype=dtype), (q / 16) @ v)


# --- NaN and inf reach the rows that see them and no others ---


def through(algorithm, dout, q, k, v, causal):
    """(out, lse, dq, dk, dv) of one implementation; naive attention has no LSE."""
    if algorithm == "dense":
        out, lse = reference.attention(q, k, v, causal=causal)
        return out, lse, *reference.attention_backward(dout, q, k, v, out, lse, causal=causal)
    if algorithm == "naive":
        grads = reference.naive_backward(dout, q, k, v, causal=causal, dtype="float16")
        return reference.naive(q, k, v, causal=causal, dtype="float16"), None, *grads
    tile = {"BLOCK_M": 4, "BLOCK_N": 3, "causal": causal}
    out, lse = (flash1 if algorithm == "flash1" else flash2)(q, k, v, **tile)
    return out, lse, *flash2_backward(dout, q, k, v, out, lse, **tile)


@pytest.mark.parametrize("algorithm", ["dense", "flash1", "flash2", "naive"])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensor", ["dout", "q", "k", "v"])
@pytest.mark.parametrize("row", [0, 3, 6])
@pytest.mark.sampled(2)
def test_nan_and_inf_affect_only_rows_that_see_them(algorithm, causal, poison, tensor, row):
    Sq, Sk = (7, 9) if row < 6 else (9, 7)  # the second has rows without keys, and rows that see every key
    q, k, v = qkv(3, 2, 2, 1, Sq, Sk, 4)
    tensors = {"dout": randn(6, *q.shape), "q": q, "k": k, "v": v}
    clean = through(algorithm, **tensors, causal=causal)
    tensors[tensor][0, 0, row, 1] = poison
    dirty = through(algorithm, **tensors, causal=causal)

    seen = reference.visible(Sq, Sk, causal)
    heads = [0] if tensor in ("dout", "q") else [0, 1]  # both query heads read the one key/value head
    rows = np.zeros((2, 2, Sq), bool)  # the (b, h, i) that the poison may reach
    rows[0, heads] = np.arange(Sq) == row if tensor in ("dout", "q") else seen[:, row]
    keys = np.zeros((2, 1, Sk), bool)  # and the keys that such a row sees
    keys[0, 0] = (rows[0].any(axis=0)[:, None] & seen).any(axis=0)
    reaches_forward = tensor != "dout"
    reach = (rows & reaches_forward, rows & reaches_forward, rows, keys, keys)
    for x, y, reached in zip(dirty, clean, reach, strict=True):
        if x is not None:
            np.testing.assert_allclose(x[~reached], y[~reached], rtol=1e-12, atol=1e-12)

    if np.isnan(poison) and reaches_forward:  # … and it does reach them: one column of O for v, the row for q and k
        reached_rows = rows & seen.any(axis=1)
        column = slice(1, 2) if tensor == "v" else slice(None)
        assert np.isnan(dirty[0][reached_rows][:, column]).all()
        assert np.isnan(dirty[2][reached_rows]).all()
