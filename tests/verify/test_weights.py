"""The causes that follow from attention weights: from where on each is named, and with which numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sandbox.verify import weights
from sandbox.verify.weights import Cause, Weights

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN: not compared
Array = np.ndarray
N = 32  # keys of a tile
STAGE = "stage, its address or its barrier is that of another tile"


def softmax(x: Array, seen: Array) -> tuple[Array, Array]:
    x = np.where(seen, x, -np.inf)
    lse = np.log(np.exp(x).sum(1))
    return np.exp(x - lse[:, None]), lse


def sample(Sq: int = 64, Sk: int = 128, causal: bool = False, tile: int = N, steps: int = 0) -> Weights:
    """The weights of a correct kernel for random scores: sums of `steps` products with random parts."""
    rng = np.random.default_rng(0)
    parts = 0.7 * rng.standard_normal((steps, steps, Sq, Sk))
    scores = np.einsum("ssij->ij", parts) if steps else rng.standard_normal((Sq, Sk))
    seen = np.arange(Sk)[None] <= np.arange(Sq)[:, None] + (Sk - Sq if causal else Sk)
    P, lse = softmax(scores, seen)
    return Weights(P.copy(), P, lse.copy(), lse, scores, parts, seen, tile, tile, *no_columns(Sq, Sk))


def no_columns(Sq: int, Sk: int) -> tuple[Array, Array]:
    """Q and K of scores that are given."""
    return np.zeros((Sq, 0)), np.zeros((Sk, 0))


def small(expected: Any, got: Any = None, seen: Any = None) -> Weights:
    """The weights of a few keys; LSE is 1."""
    P = np.array(expected, float)
    lse = np.ones(len(P))
    read = np.ones(P.shape, bool) if seen is None else np.array(seen, bool)
    return Weights(P if got is None else np.array(got, float), P, lse, lse, np.log(P) + 1, P[None, None], read, N, N,
                   *no_columns(*P.shape))  # fmt: skip


def first(w: Weights, n: int) -> Weights:
    """Its first rows."""
    per_row = (w.got, w.expected, w.lse, w.expected_lse, w.scores)
    return Weights(*(x[:n] for x in per_row), w.parts[:, :, :n], w.seen[:n], w.M, w.N, w.Q[:n], w.K)


def said(cause: Cause | None) -> str:
    return cause.what if cause else ""


# ---- what counts as correct


def test_elements_of_two_percent_of_the_largest_are_compared() -> None:
    w = small([[1, 0.021, 0.019, 0.5]], got=[[2, 0.021, 0.5, 0.5]], seen=[[1, 1, 1, 0]])
    assert w.compared.tolist() == [[True, True, False, False]]
    assert np.array_equal(w.ratio, [[2, 1, np.nan, np.nan]], equal_nan=True)


def test_weights_relative_to_the_kernels_own_sum() -> None:
    w = small([[0.5, 0.25, 0.25]], seen=[[1, 1, 0]])._replace(lse=np.array([1 + np.log(2)]))
    assert np.allclose(w.by_own_sum, [[0.25, 0.125, 0]])


@pytest.mark.parametrize(
    ("expected", "lse", "correct"),
    [(3.0, 3.009, True), (3.0, 2.991, True), (3.0, 3.011, False), (3.0, np.nan, False), (-np.inf, 7.0, True)],
)
def test_a_correct_lse(expected: float, lse: float, correct: bool) -> None:
    """To 0.01; a row that sees no key does not count."""
    w = small([[0.5, 0.5], [0.5, 0.5]])
    assert w._replace(expected_lse=np.array([1, expected]), lse=np.array([1, lse])).lse_correct is correct


@pytest.mark.parametrize(
    ("row", "correct"),
    [
        ([1.0, 0.5, 0.05], True),
        ([1.029, 0.5, 0.05], True),
        ([1.031, 0.5, 0.05], False),
        ([1.0, 0.516, 0.05], False),
        ([1.0, 0.484, 0.05], False),
        ([1.0, 0.514, 0.05], True),
        ([1.0, 0.5, 0.0529], True),  # as for a tenth of the largest
        ([1.0, 0.5, 0.0531], False),
    ],
)
def test_a_correct_row(row: list[float], correct: bool) -> None:
    """To 3% of each weight, or of a tenth of the largest."""
    w = small([[1, 0.5, 0.05]] * 2, got=[[1, 0.5, 0.05], row])
    assert w.correct.tolist() == [True, correct]


def test_matching_rows() -> None:
    """Equal but for a factor and an angle with a cosine of 0.998."""
    rows = np.array([[1, 0], [0, 1], [1, 1], [0, 0], [1, 0.062], [1, 0.065], [-1, 0]])
    assert weights.matches(rows, np.array([[0, 3], [2e-3, 0]])).tolist() == [1, 0, -1, -1, 1, -1, -1]


# ---- numbers that are not finite


@pytest.mark.parametrize(
    ("causal", "rows", "said_where"),
    [
        (True, slice(3, 9), "in rows with hidden keys, first row 3"),
        (True, slice(3, 64), "in 61 of 64 rows, first row 3"),  # the last one sees all keys
        (False, slice(3, 9), "in 6 of 64 rows, first row 3"),
    ],
)
def test_where_weights_are_not_finite(causal: bool, rows: slice, said_where: str) -> None:
    w = sample(causal=causal)
    w.got[rows, 100] = np.inf
    found = weights.cause_of(w)
    assert found
    assert found.what.startswith(f"O is NaN or infinite {said_where}, although")
    assert found.lines == weights.EXP


def test_no_row_sees_all_keys() -> None:
    """Rows with hidden keys are then no special rows."""
    w = first(sample(causal=True), 20)
    w.got[4] = np.nan
    assert "in 1 of 20 rows, first row 4" in said(weights.cause_of(w))


def test_a_row_that_sees_no_key_has_lost_nothing() -> None:
    w = sample(Sq=64, Sk=60, causal=True)
    assert not w.seen[3].any()
    lse = np.where(np.arange(64) < 4, -np.inf, w.expected_lse)
    expected = np.where(w.seen, w.expected, 0)
    w = w._replace(lse=lse, expected_lse=lse, got=expected, expected=expected)
    assert weights.wrong_half(w) == Cause(said(weights.wrong_half(w)), weights.VALUES)
    lse = np.where(np.arange(64) < 7, -np.inf, lse)
    assert "first in row 4:" in said(weights.wrong_half(w._replace(lse=lse)))
    assert weights.wrong_half(w._replace(lse=w.expected_lse + 1)) is None


# ---- masks


def with_hidden(w: Weights, seen: Array) -> Weights:
    """The kernel applies the mask `seen`."""
    got, lse = softmax(w.scores, seen)
    return w._replace(got=got, lse=lse)


ROW, KEY = np.arange(64)[:, None], np.arange(128)[None]
DIAGONAL = ROW + 64  # the last key of each row
ALL_BUT_ONE = ROW + KEY > 0
HIDDEN = "keys that the mask hides have a weight"


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (KEY <= DIAGONAL + 1, "each row sees one key too many, the one after its last"),
        (KEY <= DIAGONAL + 2,
         f"{HIDDEN} (row 0 reads key 66): the mask is not applied in the tile on the diagonal"),
        (KEY // N <= DIAGONAL // N,
         f"{HIDDEN} (row 0 reads key 95): the mask is not applied in the tile on the diagonal"),
        (KEY < 128,
         f"{HIDDEN} (row 0 reads key 127): the mask is not applied in the row"),
        ((KEY <= DIAGONAL) | (ROW >= 40),  # the tile on the diagonal is the last one
         f"{HIDDEN} (row 40 reads key 127): the mask is not applied in the row"),
        ((KEY <= DIAGONAL) | (KEY == 127) & (ROW < 9),
         f"{HIDDEN} (row 0 reads key 127): the mask is not applied in the row"),
        (KEY <= DIAGONAL, ""),
    ],
)  # fmt: skip
def test_hidden_keys(seen: Array, expected: str) -> None:
    found = weights.hidden_keys_have_weight(with_hidden(sample(causal=True), seen))
    assert said(found) == expected
    assert found is None or found.lines == weights.MASK


@pytest.mark.parametrize(
    ("axis", "expected"),
    [(0, "row 0 has the result of row 1; LSE is that of its own row: O is stored at the wrong row"),
     (1, "P of key 0 multiplies the value of key 1: the order of keys in P and V differs")],
)  # fmt: skip
def test_hidden_keys_that_are_those_of_other_rows_or_keys(axis: int, expected: str) -> None:
    """LSE is correct, so that the mask is."""
    w = sample(causal=True)
    moved = in_order(w, np.arange(w.expected.shape[axis]) ^ 1, axis)
    assert said(weights.cause_of(moved)) == expected
    wrong = said(weights.cause_of(moved._replace(lse=w.lse + 0.02)))
    assert "too many" in wrong or "the mask is not applied" in wrong


def test_hidden_keys_beyond_the_diagonal() -> None:
    seen = KEY // 16 <= DIAGONAL // 16 + 1
    found = weights.hidden_keys_have_weight(with_hidden(sample(causal=True, tile=16), seen))
    assert said(found) == f"{HIDDEN} (row 0 reads key 95): the mask is not applied in the row"


@pytest.mark.parametrize(("weight", "named"), [(0.021, True), (0.019, False)])
def test_hidden_keys_of_two_percent_of_the_largest_weight(weight: float, named: bool) -> None:
    w = sample(causal=True)
    w.got[5] /= w.got[5].max()
    w.got[5, 100] = weight
    assert bool(weights.hidden_keys_have_weight(w._replace(lse=w.lse + 0.1))) is named
    assert weights.hidden_keys_have_weight(w) is None  # the mask is right if LSE is


@pytest.mark.parametrize(("others", "named"), [(6, True), (7, False)])
def test_most_rows_see_one_key_too_many(others: int, named: bool) -> None:
    """Of 63 rows with hidden keys nine in ten."""
    differs = np.isin(ROW, range(others))
    seen = np.where(differs, (KEY <= DIAGONAL) | (KEY == 90), KEY <= DIAGONAL + 1)
    for more in (seen, seen | (KEY == DIAGONAL + 1)):  # another key, or two
        found = weights.hidden_keys_have_weight(with_hidden(sample(causal=True), more))
        assert said(found).startswith("each row sees one key too many") is named


# ---- keys that are missing or in another place


def missing(w: Weights, keys: Array, in_sum: bool = False) -> Weights:
    """Some weights are 0, in O alone or also in LSE."""
    got = np.where(keys, 0, w.expected)
    left = got.sum(1)
    return w._replace(got=got / left[:, None], lse=w.lse + np.log(left)) if in_sum else w._replace(got=got)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (KEY // N == 0, "key tile 0 of 4 (the first one) is missing"),
        (KEY // N == 1, "key tile 1 of 4 is missing"),
        ((KEY > 0) & (KEY < 32), "key tile 0 of 4 (the first one) is missing"),  # a key may be too small to be seen
        ((KEY > 1) & (KEY < 32), "keys 2 to 31 of key tile 0 of 4 are missing"),
        ((KEY >= 33) & (KEY < 64), "key tile 1 of 4 is missing"),
        ((KEY >= 34) & (KEY < 64), "keys 34 to 63 of key tile 1 of 4 are missing"),
        ((KEY >= 32) & (KEY < 96), "key tiles 1 to 2 of 4 are missing"),
        (KEY < 64, "key tiles 0 to 1 of 4 (the first one) are missing"),
        ((KEY >= 96) & (KEY < 127), "key tile 3 of 4 (the last one) is missing"),
        ((KEY >= 96) & (KEY < 126), "key tile 3 of 4 is missing"),
        ((KEY >= 77) & (KEY < 85), "keys 77 to 84 of key tile 2 of 4 are missing"),
        ((KEY % N >= 8) & (KEY % N < 24), "keys 8 to 23 of every key tile are missing"),
        ((KEY % N < 24) & (KEY >= 64), "keys 0 to 23 of every key tile are missing"),
        ((KEY % N >= 24) & (KEY >= 96), "keys 120 to 127 of key tile 3 of 4 (the last one) are missing"),
    ],
)
@pytest.mark.parametrize("in_sum", [False, True])
def test_which_keys_are_missing(keys: Array, expected: str, in_sum: bool) -> None:
    found = weights.missing_keys(missing(sample(), keys & (ROW >= 0), in_sum))
    where, lines = ("S (so from both O and l)", weights.RANGE) if in_sum else ("P V (l counts them)", weights.VALUES)
    assert found == Cause(f"{expected} from {where}", lines)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (KEY == DIAGONAL, "each row misses its last visible key"),
        (KEY // N == DIAGONAL // N,
         "the last key tile that a row sees is missing from P V (l counts them), first in row 0: key 64"),
        ((KEY >= 32) & (KEY < 64),
         "visible keys are missing from P V (l counts them), first in row 0: keys 32 to 63"),
    ],
)  # fmt: skip
def test_which_visible_keys_are_missing(keys: Array, expected: str) -> None:
    w = sample(causal=True)
    large = np.where(w.seen, 1 / w.seen.sum(1, keepdims=True), 0)  # all are large enough to be compared
    w = missing(w._replace(expected=large, scores=np.zeros_like(large)), keys)
    assert said(weights.missing_keys(first(w, 32) if "tile" in expected else w)) == expected


@pytest.mark.parametrize(("left", "named"), [(0.019, True), (0.021, False)])
def test_two_percent_of_a_weight_is_missing(left: float, named: bool) -> None:
    w = sample()
    assert bool(weights.missing_keys(w._replace(got=np.where(KEY // N == 2, left, 1) * w.expected))) is named


@pytest.mark.parametrize(
    ("share", "error", "named"), [(0.08, 1.5, True), (0.12, 1.5, False), (0.2, 1.05, True), (0.2, 1.07, False)]
)
def test_other_weights_are_correct_if_keys_are_missing(share: float, error: float, named: bool) -> None:
    """All but a tenth of them, to 6%."""
    w = sample()
    large = np.full_like(w.expected, 1 / 128)
    w = w._replace(expected=large, scores=w.lse[:, None] + np.log(large))
    wrong = np.random.default_rng(0).random(large.shape) < share / 0.75  # of the other three tiles
    got = np.where(KEY // N == 2, 0, np.where(wrong, error, 1)) * large
    assert bool(weights.missing_keys(w._replace(got=got))) is named


def counted(w: Weights, times: Array) -> Weights:
    """O and l count each key so many times."""
    sums = (w.expected * times).sum(1)
    return w._replace(got=w.expected * times / sums[:, None], lse=w.lse + np.log(sums))


@pytest.mark.parametrize(
    ("Sk", "tile", "times", "expected"),
    [
        (128, 1, 2, "key tile 1 of 4 counts 2 times"),
        (128, 3, 3, "key tile 3 of 4 counts 3 times"),
        (144, 4, 2, "key tile 4 of 5 counts 2 times"),
        (128, 1, 2.09, "key tile 1 of 4 counts 2 times"),
        (128, 1, 2.11, ""),
        (128, 1, 1, ""),
        (128, 1, 0, ""),
        (32, 0, 2, "key tile 0 of 1 counts 2 times"),
        (512, 15, 2, "key tile 15 of 16 counts 2 times"),
        (528, 15, 2, ""),  # too many keys
    ],
)
def test_how_often_a_tile_counts(Sk: int, tile: int, times: float, expected: str) -> None:
    found = weights.moved_keys(counted(sample(Sk=Sk), np.where(np.arange(Sk) // N == tile, times, 1)))
    assert found == (Cause(expected, weights.RANGE) if expected else None)


def test_few_keys_of_which_some_count_twice() -> None:
    times = np.where(np.arange(32) < 16, 2, 1)
    assert said(weights.moved_keys(counted(sample(Sk=32, tile=16), times))) == "key tile 0 of 2 counts 2 times"
    assert said(weights.moved_keys(counted(sample(Sk=32, tile=8), times))) == "key tile 0 of 4 counts 2 times"
    assert weights.moved_keys(counted(sample(Sk=31), np.where(np.arange(31) < 16, 2, 1))) is None  # one group of 16


def in_order(w: Weights, order: Any, axis: int = 1) -> Weights:
    return w._replace(got=np.take(w.expected, order, axis))


@pytest.mark.parametrize(
    ("group", "with_group", "tile", "expected"),
    [
        (1, 2, 32, f"P of key tile 0 multiplies the values of key tile 1: the V {STAGE}"),
        (2, 3, 32, "P of keys 32 to 47 multiplies the values of keys 48 to 63: the row of V in P V is wrong"),
        (2, 3, 16, f"P of key tile 2 multiplies the values of key tile 3: the V {STAGE}"),
    ],
)  # fmt: skip
def test_values_of_other_keys(group: int, with_group: int, tile: int, expected: str) -> None:
    groups = np.arange(8)
    groups[[group, with_group]] = with_group, group
    w = in_order(sample(tile=tile), (16 * groups[:, None] + np.arange(16)).ravel())
    assert weights.moved_keys(w) == Cause(expected, weights.VALUES)
    assert weights.moved_keys(w._replace(lse=w.lse + 0.02)) is None  # the scores are wrong
    assert weights.moved_keys(w._replace(lse=np.full(64, -np.inf))) is None
    assert weights.moved_keys(w._replace(seen=ALL_BUT_ONE)) is None


def test_the_values_of_two_keys_are_exchanged() -> None:
    order = np.arange(128)
    order[[5, 77]] = 77, 5
    w = in_order(sample(), order)
    text = "P of key 5 multiplies the value of key 77: the order of keys in P and V differs"
    assert weights.values_of_other_keys(w) == Cause(text, weights.VALUES)
    assert weights.values_of_other_keys(w._replace(lse=w.lse + 0.02)) is None
    order[77] = 77  # the value of key 5 is that of key 77, too
    assert weights.values_of_other_keys(in_order(w, order)) is None
    w.got[:, 5] = np.random.default_rng(1).random(64)
    assert weights.values_of_other_keys(w) is None  # only one key is read in another place


@pytest.mark.parametrize(("unknown", "named"), [(12, True), (13, False)])
def test_most_values_are_those_of_other_keys(unknown: int, named: bool) -> None:
    """Of 128 keys nine in ten."""
    w = in_order(sample(), np.arange(128) ^ 1)
    w.got[:, :unknown] = np.random.default_rng(1).random((64, unknown))
    assert bool(weights.values_of_other_keys(w)) is named


@pytest.mark.parametrize(("others", "named"), [(1, True), (2, False)])
def test_wrong_rows_are_those_of_other_rows(others: int, named: bool) -> None:
    """Of 12 or 13 wrong rows nine in ten, here 5 to 10 and 21 to 26."""
    order = np.arange(64)
    order[5:11], order[21:27] = order[21:27].copy(), order[5:11].copy()
    w = in_order(sample(), order, axis=0)
    w.got[40 : 40 + others] = np.random.default_rng(1).random((others, 128))
    found = weights.rows_of_others(w)
    own = "LSE is that of its own row: O is stored at the wrong row"
    assert said(found) == (f"row 5 has the result of row 21; {own}" if named else "")
    assert not found or found.lines == weights.STORE
    found = weights.rows_of_others(w._replace(lse=w.lse[order]))
    both = "O and LSE are both of that row: Q is loaded, or results are stored, at the wrong row"
    assert said(found) == (f"row 5 has the result of row 21; {both}" if named else "")
    assert not found or found.lines == weights.ROWS
    assert weights.rows_of_others(w._replace(seen=ALL_BUT_ONE, lse=w.lse + 0.02)) is None


# ---- factors of weights


def test_factors_of_groups() -> None:
    """Of 16 keys; small weights do not count."""
    expected = np.full((1, 20), 0.01)
    got = expected * np.r_[np.full(8, 2.0), np.full(8, 4.0), 3, 3, 5, 5]
    middle, spread = weights._group_factors(small(expected, got))
    assert np.allclose(middle, [[3, 4]])
    assert np.allclose(spread, [[1 / 3, 1 / 4]])
    w = small([[2.1e-3, 1.9e-3, 1e-3, 0.5]], got=[[2.1e-3, 9.5e-3, 1e-3, 1]], seen=[[1, 1, 1, 0]])
    middle, _ = weights._group_factors(w)
    assert np.allclose(middle, 3)  # of 1 and 5


def unrescaled(w: Weights, factor: Any = 2.0) -> Weights:
    """Keys before the 16 with the row's maximum have a factor."""
    groups = np.arange(w.got.shape[1]) // 16
    return w._replace(got=w.expected * np.where(groups < w.scores.argmax(1)[:, None] // 16, factor, 1))


def test_a_factor_of_earlier_keys() -> None:
    text = (
        "O is not rescaled correctly when a later key tile raises the row maximum: keys before it have 2 times their "
        "weight relative to later keys"
    )
    w = unrescaled(sample())
    assert weights.not_rescaled(w) == Cause(text, weights.RESCALE)
    assert said(weights.not_rescaled(w._replace(lse=w.lse + 0.02, got=3 * w.got))) == f"{text} (LSE is wrong, too)"
    assert "0.333 times" in said(weights.not_rescaled(unrescaled(sample(), 1 / 3)))
    assert "1.07 times" in said(weights.not_rescaled(unrescaled(sample(), 1.07)))
    assert weights.not_rescaled(unrescaled(sample(), 1.05)) is None


@pytest.mark.parametrize(("group", "named"), [(4, True), (3, False)])
def test_at_least_four_groups_of_earlier_keys(group: int, named: bool) -> None:
    scores = first(sample(), 1).scores
    scores[0, 16 * group] = 5
    P, lse = softmax(scores, scores < 9)
    w = first(sample(), 1)._replace(scores=scores, expected=P, lse=lse, expected_lse=lse)
    assert bool(weights.not_rescaled(unrescaled(w))) is named


@pytest.mark.parametrize(
    ("rows", "later", "noise", "named"),
    [
        (20, 0, 0, True),
        (8, 0, 0, False),  # a fifth of the earlier groups
        (64, 0.06, 0, True),
        (64, 0.16, 0, False),  # a tenth of the later ones
        (64, 0, 0.1, True),
        (64, 0, 0.16, False),  # 6% within a group
    ],
)
def test_groups_have_the_factor_of_a_missing_rescale(rows: int, later: float, noise: float, named: bool) -> None:
    """In enough rows; later groups have none; within a group it is constant."""
    w, rng = sample(), np.random.default_rng(5)
    other = np.repeat(np.where(rng.random((64, 8)) < later, 1.2, 1), 16, axis=1)
    factor = np.where(np.arange(64) < rows, 2.0, 1)[:, None]
    got = unrescaled(w, factor).got * np.where(unrescaled(w).got == w.expected, other, 1)
    found = weights.not_rescaled(w._replace(got=got * (1 + noise * rng.uniform(-1, 1, got.shape))))
    assert bool(found) is named


def divided_by(w: Weights, s: Array) -> Weights:
    """The row sum l is s times as large."""
    return w._replace(got=w.expected / s[:, None], lse=w.expected_lse + np.log(s))


@pytest.mark.parametrize(("others", "named"), [(6, True), (7, False)])
def test_a_factor_is_that_of_most_rows(others: int, named: bool) -> None:
    """Nine in ten: of their weights, and of the rows."""
    w = sample()
    w = w._replace(got=w.expected / 2)
    text = "O is 0.5 times the expected values in all rows: a constant factor of P or of the store"
    expected = Cause(text, weights.FINALIZE) if named else None
    uneven = w.got.copy()
    uneven[:others, ::2] *= 1.5
    assert weights.factor_of_a_row(w._replace(got=uneven)) == expected
    w.got[:others] *= 1.5
    assert weights.factor_of_a_row(w) == expected


@pytest.mark.parametrize(("uneven", "named"), [(1.05, True), (1.07, False)])
def test_weights_of_a_row_have_the_same_factor(uneven: float, named: bool) -> None:
    """To 6%."""
    w = sample()
    w.got[:] = np.where(KEY % 4 == 0, uneven, 1) * w.expected / 2
    assert bool(weights.factor_of_a_row(w)) is named


@pytest.mark.parametrize(("factor", "named"), [(1.031, True), (1.029, False), (0.969, True), (0.971, False)])
def test_a_constant_factor_of_three_percent(factor: float, named: bool) -> None:
    assert bool(weights._constant(sample(), np.full(64, factor))) is named


def sums(w: Weights) -> Array:
    """l relative to the row maximum."""
    return np.exp(w.lse - w.scores.max(1))


@pytest.mark.parametrize(("share", "named"), [(1, True), (0.91, True), (0.89, False)])
def test_a_missing_division(share: float, named: bool) -> None:
    """The factor is l, or more: an earlier maximum was subtracted."""
    w = sample()
    expected = Cause("O is not divided by the row sum l", weights.FINALIZE) if named else None
    assert weights._undivided(w, share * sums(w)) == expected
    assert weights._undivided(w._replace(lse=w.lse + 0.02), share * sums(w)) is None
    assert bool(weights._undivided(first(w, 3), share * sums(w)[:3])) is named
    assert weights._undivided(first(w, 2), sums(w)[:2]) is None


def test_a_factor_that_does_not_follow_the_row_sum() -> None:
    w = of_scores(sample(), 6 * sample().scores)
    w = w._replace(scores=6 * w.scores, expected_lse=w.lse)
    few = np.flatnonzero(sums(w) < 1.2)  # too small a sum to tell
    assert len(few) > 10
    assert weights._undivided(first(w, 64), np.where(sums(w) < 1.2, sums(w), np.nan)) is None
    w = sample()
    assert weights._undivided(w, sums(w)[::-1]) is None
    assert weights._undivided(w, np.where(np.arange(64) < 7, 1.1, 2) * np.ones(64)) is None


@pytest.mark.parametrize(("count", "named"), [(17, 17), (17.09, 17), (16.91, 17), (17.11, 0), (40, 40)])
def test_how_many_padding_keys_count(count: float, named: int) -> None:
    w = sample()
    found = weights.factor_of_a_row(divided_by(w, 1 + count / np.exp(w.lse)))
    text = f"l counts {named} keys with score 0 beyond the last key: the mask of the last, partial key tile is not app"
    assert said(found).startswith(text) is bool(named)


def test_one_padding_key() -> None:
    w = sample(Sk=12)
    assert "l counts 1 keys" in said(weights.factor_of_a_row(divided_by(w, 1 + 1 / np.exp(w.lse))))
    assert "keys with score 0" not in said(weights.factor_of_a_row(divided_by(w, 1 + 0.49 / np.exp(w.lse))))


@pytest.mark.parametrize(
    ("uneven", "rows", "named"), [(0.04, range(1, 64, 2), True), (0.06, range(1, 64, 2), False), (0.2, range(6), True),
                                  (0.2, range(7), False)]
)  # fmt: skip
def test_padding_keys_count_equally_in_all_rows(uneven: float, rows: range, named: bool) -> None:
    """To 5%, in nine of ten."""
    w = sample()
    count = np.full(64, 17.0)
    count[rows[::2]] *= 1 + uneven
    count[rows[1::2]] *= 1 - uneven
    found = weights.factor_of_a_row(divided_by(w, 1 + count / np.exp(w.lse)))
    assert said(found).startswith("l counts 17 keys") is named


def l_of(w: Weights, wrong: Array) -> Weights:
    """l is 1.5 to 3 times as large in some rows."""
    return divided_by(w, np.where(wrong, np.random.default_rng(3).uniform(1.5, 3, len(wrong)), 1))


@pytest.mark.parametrize(
    ("share", "early", "expected"),
    [
        (1.0, 0, "the row sum l is not rescaled by alpha when a later key tile raises the row maximum"),
        (0.3, 0, "the row sum l is not rescaled by alpha when a later key tile raises the row maximum"),
        (0.1, 0, ""),
        (1.0, 2, "the row sum l is too large (its keys, its start value or the sum over the lanes of a row)"),
        (0.15, 2, ""),
        (0.3, 9, "the row sum l is too large (its keys, its start value or the sum over the lanes of a row)"),
    ],
)
def test_rows_with_a_wrong_sum(share: float, early: int, expected: str) -> None:
    """Only rows with a later maximum, or others, too: the first of those whose maximum is in the first 16 keys."""
    w = sample()
    group = w.scores.argmax(1) // 16
    later = np.flatnonzero(group > 1)
    wrong = np.isin(np.arange(64), [*later[: round(share * len(later))], *np.flatnonzero(group == 0)[:early]])
    assert said(weights.factor_of_a_row(l_of(w, wrong))) == expected


@pytest.mark.parametrize("causal", [False, True])
def test_the_maximum_in_the_first_tile(causal: bool) -> None:
    """Rows with the maximum in its later keys are neither early nor late."""
    w = sample(causal=causal)
    group = w.expected.argmax(1) // 16
    assert (group == 1).sum() >= 6
    assert "not rescaled by alpha" in said(weights.factor_of_a_row(l_of(w, group >= 1)))
    assert weights._wrong_sum(l_of(w, group == 1), 1 / np.exp(l_of(w, group == 1).lse - w.lse)) is None


@pytest.mark.parametrize(
    ("times", "wrong", "expected"),
    [
        (0, 32, "the row sum l does not count key tile 1 of 4, first in row 3 (32 of 64 rows)"),
        (2, 61, "the row sum l counts twice key tile 1 of 4, first in row 3 (61 of 64 rows)"),
        (2, 31, ""),  # too few for four tiles
        (3, 61, ""),
        (2.04, 61, "the row sum l counts twice key tile 1 of 4, first in row 3 (61 of 64 rows)"),
        (2.06, 61, ""),
        (1, 61, ""),
    ],
)
def test_tiles_in_the_row_sum(times: float, wrong: int, expected: str) -> None:
    w = sample()
    w = divided_by(w, (w.expected * np.where(np.arange(128) // N == 1, times, 1)).sum(1))
    found = weights._sum_of_tiles(w, (np.arange(64) >= 3) & (np.arange(64) < 3 + wrong))
    assert found == (Cause(expected, weights.ROW_SUM) if expected else None)


# ---- wrong scores


def of_scores(w: Weights, scores: Array) -> Weights:
    got, lse = softmax(scores, w.seen)
    return w._replace(got=got, lse=lse)


@pytest.mark.parametrize(
    ("tiles", "added", "expected"),
    [
        (4, False, f"the scores of key tile 0 are those of key tile 1: the K {STAGE}"),
        (4, True, "the scores of key tile 0 contain those of key tile 1: S is not reset to 0 before Q K^T"),
        (2, True, "the scores of key tile 0 contain those of key tile 1: S is not reset to 0 before Q K^T"),
        (16, True, "the scores of key tile 0 contain those of key tile 1: S is not reset to 0 before Q K^T"),
        (17, True, ""),
        (1, True, ""),
    ],
)  # fmt: skip
def test_scores_of_another_tile(tiles: int, added: bool, expected: str) -> None:
    w = sample(Sk=tiles * 8, tile=8)
    scores = w.scores.copy()
    scores[:, :8] = added * scores[:, :8] + scores[:, 8:16] if tiles > 1 else 2 * scores
    found = weights.scores_of_other_keys(of_scores(w, scores))
    assert found == (Cause(expected, weights.QK if added else weights.KEYS) if expected else None)


@pytest.mark.parametrize(
    ("times", "noise", "named"), [(1, 0.05, True), (1, 0.2, False), (0.91, 0, True), (0.89, 0, False)]
)
def test_scores_of_another_tile_but_for_rounding(times: float, noise: float, named: bool) -> None:
    w = sample()
    scores = w.scores.copy()
    scores[:, :N] = times * scores[:, N : 2 * N] + noise * np.random.default_rng(1).standard_normal((64, N))
    w = of_scores(w, scores)
    assert bool(weights.scores_of_other_keys(w)) is named
    assert weights.scores_of_other_keys(w._replace(seen=ALL_BUT_ONE)) is None


def test_scores_of_another_tile_after_one_that_nothing_explains() -> None:
    w = sample()
    scores = w.scores.copy()
    scores[:, :N] = np.random.default_rng(1).standard_normal((64, N))
    scores[:, 2 * N : 3 * N] = scores[:, 3 * N :]
    assert "key tile 2 are those of key tile 3" in said(weights.scores_of_other_keys(of_scores(w, scores)))


def test_correct_scores() -> None:
    w = sample(steps=2)
    assert weights.scores_of_other_keys(w) is None
    assert weights.wrong_scores(w) is None
    assert weights.wrong_scores(of_scores(w, 1.04 * w.scores)) is None
    assert said(weights.wrong_scores(of_scores(w, 1.06 * w.scores))).startswith("the scores are 1.06 times")


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (1.5, 0, "columns 16 to 31 of Q and K count 1.5 times in S = Q K^T"),
        (0, 0, "columns 16 to 31 of Q and K count 0 times in S = Q K^T"),
        (1.06, 0, "columns 16 to 31 of Q and K count 1.1 times in S = Q K^T"),
        (1.04, 0, ""),
        (0, 1, "in S = Q K^T, columns 16 to 31 of Q are multiplied with columns 0 to 15 of K"),
        (1, 0.55, "in S = Q K^T, columns 16 to 31 of Q are multiplied with columns 0 to 15 of K"),
        (1, 0.45, ""),
        (0.8, 0.45, "columns 16 to 31 of Q and K count 0.8 times in S = Q K^T"),
    ],
)
def test_products_of_columns(own: float, other: float, expected: str) -> None:
    w = sample(steps=3)
    found = weights.wrong_scores(of_scores(w, w.scores + (own - 1) * w.parts[1, 1] + other * w.parts[1, 0]))
    assert said(found) == expected


def scaled(w: Weights, noise: float = 0) -> bool:
    x = 1.5 * w.scores + noise * np.random.default_rng(1).standard_normal(w.scores.shape)
    return bool(weights.wrong_scores(of_scores(w, x)))


def test_enough_weights_for_the_products_of_columns() -> None:
    """Four rows with more than eight weights; four weights for each product."""
    w = sample(Sk=40, steps=2)
    assert scaled(first(w, 4))
    assert not scaled(first(w, 3))
    assert [scaled(sample(Sk=n, steps=1)) for n in (8, 16)] == [False, True]
    assert [scaled(sample(Sq=n, Sk=16, steps=5)) for n in (6, 30)] == [False, True]
    assert [scaled(sample(steps=n)) for n in (8, 9)] == [True, False]
    assert [scaled(sample(steps=2), noise) for noise in (0.05, 0.075)] == [True, False]


# ---- single tiles and LSE


@pytest.mark.parametrize(
    ("Sk", "wrong", "factor", "expected"),
    [
        (128, [2], 2, "only the weights of key tile 2 of 4 are wrong, and LSE is correct: P or V of that tile"),
        (80, [2], 2, "only the weights of key tile 2 of 3 are wrong, and LSE is correct: P or V of that tile"),
        (64, [1], 2, ""),
        (160, [1, 4], 2, "only the weights of key tile 1 of 5 are wrong, and LSE is correct: P or V of that tile"),
        (160, [1, 2, 4], 2, ""),
        (128, [2], 1.061, "only the weights of key tile 2 of 4 are wrong, and LSE is correct: P or V of that tile"),
        (128, [2], 1.059, ""),
    ],
)
def test_weights_of_single_tiles(Sk: int, wrong: list[int], factor: float, expected: str) -> None:
    w = sample(Sk=Sk)
    w = w._replace(got=np.where(np.isin(np.arange(Sk) // N, wrong), factor, 1) * w.expected)
    assert said(weights._some_tiles(w)) == expected
    assert weights._some_tiles(w._replace(lse=w.lse + 0.02)) is None
    assert said(weights.wrong_half(w)).startswith("LSE is correct and O is wrong")


RAMP = np.linspace(0, 1, 64)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lse, top: top, "it is the row maximum m without log(l)"),
        (lambda lse, top: top + 0.019, "it is the row maximum m without log(l)"),
        (lambda lse, top: np.where(np.arange(64) < 6, 9, top), "it is the row maximum m without log(l)"),
        (lambda lse, top: lse - top, "it is log(l) without the row maximum m"),
        (lambda lse, top: lse / np.log(2), "it is in base 2: multiply by ln 2"),
        (lambda lse, top: -lse, "it is the negative LSE"),
        (lambda lse, top: lse - 0.25, "it is -0.25 off in all rows"),
        (lambda lse, top: lse + 1 + 0.019 * RAMP, "it is +1.01 off in all rows"),
        (lambda lse, top: np.roll(lse, 1), "rows have the LSE of other rows, 1 apart"),
        (lambda lse, top: np.roll(lse, -16), "rows have the LSE of other rows, 16 apart"),
        (lambda lse, top: np.r_[lse[2:62], lse[:4]], "rows have the LSE of other rows, 2 apart"),
        (lambda lse, top: np.where(np.arange(64) < 36, np.roll(lse, 4), 9), "rows have the LSE of other rows, 4 apart"),
        (lambda lse, top: np.where(RAMP > 0.9, np.nan, lse), "it is not written, or not finite, from row 57"),
        (lambda lse, top: np.where(np.arange(64) % 4 == 2, 9, lse),
         "in 25% of the rows, first row 2: the final logarithm or its store"),
        (lambda lse, top: np.where(np.arange(64) < 28, np.roll(lse, 4), 9),
         "in 100% of the rows, first row 0: the final logarithm or its store"),
        (lambda lse, top: lse + 1 + 0.021 * RAMP, "in 100% of the rows, first row 0: the final logarithm or its store"),
        (lambda lse, top: top + 0.021 * (-1) ** np.arange(64),
         "in 100% of the rows, first row 0: the final logarithm or its store"),
        (lambda lse, top: np.where(np.arange(64) < 7, 9, top),
         "in 100% of the rows, first row 0: the final logarithm or its store"),
    ],
)  # fmt: skip
def test_what_lse_is(change: Any, expected: str) -> None:
    w = sample()
    found = weights.cause_of(w._replace(lse=change(w.lse, w.scores.max(1))))
    separator = ", " if expected.startswith("in ") and "%" in expected else ": "
    assert found == Cause(f"O is correct, only LSE is wrong{separator}{expected}", weights.LSE)


def test_a_row_sum_that_is_too_small() -> None:
    w = sample()
    found = weights.factor_of_a_row(divided_by(w, np.random.default_rng(3).uniform(0.55, 0.8, 64)))
    assert said(found).startswith("the row sum l is too small (")
