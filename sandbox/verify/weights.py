"""What is wrong with a forward kernel, from the attention weights that it applies: O for values that are one-hot.

With V[j] = the unit vector of key j, O[i, j] is the weight with which row i reads key j, P[i, j] / l[i]. A fault
changes these weights in a way that names it: a missing key tile has weight 0, a missing rescale multiplies the weights
of earlier tiles by exp(m_new − m_old), a missing division multiplies all weights of a row. `CAUSES` has one function
for each fault, the most specific first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_EXACT = 0.03  # relative error of a weight that counts as correct: P and O are rounded to bfloat16
_MOST = 0.9  # share of the elements that must agree with a cause
_SMALLEST = 0.02  # weights below this share of the row's largest are not compared
_LARGEST = 1e6  # a larger weight relative to the kernel's own sum: LSE is not a sum
_GROUP = 16  # keys of the smallest step of a kernel


class Cause(NamedTuple):
    """What is wrong, and a pattern of the source lines where to look for it."""

    what: str
    lines: str


class Weights(NamedTuple):
    """Weights (Sq, Sk) and LSE (Sq,) of one head, as measured and as expected. `scores`: scaled, without mask.
    `parts`: (steps, steps, Sq, Sk); [x, y] is the scaled product of the x-th 16 columns of Q and the y-th 16 columns of
    K. `seen`: the visible elements. M, N: rows and keys of a tile. Q, K: (Sq, D) and (Sk, D), Q times the scale."""

    got: Array
    expected: Array
    lse: Array
    expected_lse: Array
    scores: Array
    parts: Array
    seen: Array
    M: int
    N: int
    Q: Array
    K: Array

    @property
    def compared(self) -> Array:
        """Elements that are large enough for a ratio."""
        top = self.expected.max(axis=1, keepdims=True)
        return self.seen & (self.expected > _SMALLEST * top)

    @property
    def by_own_sum(self) -> Array:
        """The weights relative to the kernel's own row sum, from its LSE."""
        return np.where(self.seen, np.exp(self.scores - self.lse[:, None]), 0)

    @property
    def ratio(self) -> Array:
        """got / expected where they are compared, else NaN."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.compared, self.got / self.expected, np.nan)

    @property
    def lse_correct(self) -> bool:
        seen = np.isfinite(self.expected_lse)
        return bool(np.all(abs(self.lse - self.expected_lse)[seen] < 0.01))

    @property
    def correct(self) -> Array:
        """Rows whose weights are all correct."""
        off = abs(self.got - self.expected) > _EXACT * np.maximum(
            self.expected, self.expected.max(1, keepdims=True) / 10
        )
        return ~off.any(axis=1)


def cause_of(w: Weights) -> Cause | None:
    """The first cause that explains the weights; None if they are correct or no cause does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN stands for weights that are not compared
        if not np.isfinite(w.got).all():
            return not_finite(w)
        if w.correct.all():
            return wrong_lse(w) if not w.lse_correct else None
        return next(filter(None, (find(w) for find in CAUSES)), None)


def not_finite(w: Weights) -> Cause:
    """NaN or infinity, although all inputs are finite."""
    rows = np.nonzero(~np.isfinite(w.got).all(axis=1))[0]
    if lost := _lost_statistics(w):
        return lost
    hides = bool(np.asarray((~w.seen).any(axis=1))[rows].all() and w.seen.all(axis=1).any())
    where = "in rows with hidden keys" if hides else f"in {len(rows)} of {len(w.got)} rows"
    return Cause(
        f"O is NaN or infinite {where}, first row {rows[0]}, although the inputs are finite: exp "
        "of a score above the row maximum m, -inf - -inf, or a division by l = 0",
        EXP,
    )


def _lost_statistics(w: Weights) -> Cause | None:
    """LSE is −inf although the row sees keys."""
    lost = np.isfinite(w.expected_lse) & (w.lse == -np.inf)
    if not lost.any():
        return None
    first = int(np.nonzero(lost)[0][0])
    return Cause(
        f"LSE is -inf in rows that see keys, first in row {first}: the row maximum m or the sum l is lost", EXP
    )


def keys(first: int, last: int) -> str:
    return f"key {first}" if first == last else f"keys {first} to {last}"


def hidden_keys_have_weight(w: Weights) -> Cause | None:
    """Keys that the mask hides have a weight. (With a correct LSE the mask is right, and V is that of other keys.)"""
    read = ~w.seen & (w.got > _SMALLEST * w.got.max(axis=1, keepdims=True))
    some = read.any(axis=1)
    if not some.any() or w.lse_correct:
        return None
    row = int(np.nonzero(some)[0][0])
    if (read.sum(axis=1)[some] == 1).mean() > _MOST and (read & np.roll(w.seen, 1, axis=1))[some].any(1).mean() > _MOST:
        return Cause("each row sees one key too many, the one after its last", MASK)
    last, end = (np.array([np.nonzero(x)[0].max(initial=-1) for x in y]) for y in (w.seen, read))
    diagonal = (last // w.N == end // w.N)[some].mean() > _MOST and (end // w.N < w.got.shape[1] // w.N - 1)[some].any()
    where = "in the tile on the diagonal" if diagonal else "in the row"
    return Cause(
        f"keys that the mask hides have a weight (row {row} reads {keys(int(end[row]), int(end[row]))}): the "
        f"mask is not applied {where}",
        MASK,
    )


def missing_keys(w: Weights) -> Cause | None:
    """Visible keys with weight 0; the other weights are correct, relative to the correct l or to the kernel's own."""
    missing = w.compared & (w.got < 0.02 * w.expected)
    affected = np.asarray(missing.any(1))
    if not affected.any():
        return None
    for base, where in ((w.expected, "P V (l counts them)"), (w.by_own_sum, "S (so from both O and l)")):
        off = abs(w.got - base) > 2 * _EXACT * np.maximum(base, base.max(1, keepdims=True) / 10)
        if (off & ~missing)[affected & np.isfinite(w.lse)].mean() < 1 - _MOST:
            return _missing(missing, affected, w, where)
    return None


def _missing(missing: Array, affected: Array, w: Weights, where: str) -> Cause:
    """Which keys are missing: the same in all rows, or the last ones that each row sees."""
    pattern = VALUES if "P V" in where else RANGE
    rows, columns = (np.nonzero(x)[0] for x in (affected, missing.any(0)))
    last, compared, end = (
        np.array([np.nonzero(x)[0].max(initial=-1) for x in y]) for y in (w.seen, w.compared, missing)
    )
    begin = np.array([np.nonzero(x)[0].min(initial=len(x)) for x in missing])
    if (last[affected] == begin[affected]).mean() > _MOST:
        return Cause("each row misses its last visible key", MASK)
    if not w.seen.all():
        row = int(rows[0])
        which = (
            "the last key tile that a row sees is missing"
            if (end == compared)[affected].mean() > _MOST
            else ("visible keys are missing")
        )
        return Cause(f"{which} from {where}, first in row {row}: {keys(begin[row], end[row])}", pattern)
    first, final, N, Sk = int(columns[0]), int(columns[-1]), w.N, w.got.shape[1]
    tiles, steps = np.unique(columns // N), np.unique(columns % N // 8) * 8
    whole = first % N < 2
    if len(steps) * 8 <= N // 2 + 8 and tiles.size > 1:
        return Cause(f"keys {steps[0]} to {steps[-1] + 7} of every key tile are missing from {where}", pattern)
    which = f"key tile {tiles[0]}" if tiles.size == 1 else f"key tiles {tiles[0]} to {tiles[-1]}"
    partial = ""
    if final >= Sk - 2:
        partial = " (the last, partial one)" if Sk % N else " (the last one)"
    elif first < 2:
        partial = " (the first one)"
    verb = "is" if whole and tiles.size == 1 else "are"
    part = "" if whole else f"{keys(first, final)} of "
    return Cause(f"{part}{which} of {-(-Sk // N)}{partial} {verb} missing from {where}", pattern)


def moved_keys(w: Weights) -> Cause | None:
    """The weights of some keys multiply the values of others, or some keys count several times; by groups of 16."""
    if not w.seen.all() or not np.isfinite(w.lse).all() or not w.by_own_sum.max(initial=0) < _LARGEST:
        return None
    groups = w.got.shape[1] // _GROUP
    got, own = (x[:, : groups * _GROUP].reshape(len(x), groups, _GROUP) for x in (w.got, w.by_own_sum))
    A = own.transpose(0, 2, 1).reshape(-1, groups)
    b = got.transpose(0, 2, 1).reshape(-1, groups)
    if groups < 2 or groups > 32:
        return None
    times, *_ = np.linalg.lstsq(A, b, rcond=None)  # [from, to]
    if np.std(A @ times - b) > _EXACT * np.std(b) or abs(times - np.round(times)).max() > 0.1:
        return None
    times = np.round(times).astype(int)
    wrong = np.argwhere(times != np.eye(groups, dtype=int))
    if not len(wrong):
        return None
    per_tile = max(1, w.N // _GROUP)
    moved = [(g, to) for g, to in wrong if g != to and times[g, to] > 0]
    if moved and not w.lse_correct:  # wrong scores
        return None
    if moved:
        g, to = moved[0]
        if g // per_tile != to // per_tile:
            return Cause(
                f"P of key tile {g // per_tile} multiplies the values of key tile {to // per_tile}: the V "
                "stage, its address or its barrier is that of another tile",
                VALUES,
            )
        span = [keys(16 * x, 16 * x + 15) for x in (g, to)]
        return Cause(f"P of {span[0]} multiplies the values of {span[1]}: the row of V in P V is wrong", VALUES)
    twice = [int(g) for g, to in wrong if times[g, to] > 1]
    if twice:
        t = twice[0] // per_tile
        return Cause(f"key tile {t} of {-(-w.got.shape[1] // w.N)} counts {times[twice[0], twice[0]]} times", RANGE)
    return None


def values_of_other_keys(w: Weights) -> Cause | None:
    """The weight of key j multiplies the value of another key."""
    moved = matches(w.expected.T, w.got.T)
    wrong = (moved != np.arange(len(moved))) & (moved >= 0)
    if not w.lse_correct or wrong.sum() < 2 or (moved < 0).mean() > 1 - _MOST:
        return None
    j = int(np.nonzero(wrong)[0][0])
    return Cause(
        f"P of key {j} multiplies the value of key {int(moved[j])}: the order of keys in P and V differs", VALUES
    )


def matches(rows: Array, among: Array) -> Array:
    """For each row, the index of the row of `among` that is equal but for a factor, −1 if there is none."""
    a, b = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (rows, among))
    cosine = a @ b.T
    at = cosine.argmax(axis=1)
    return np.where(cosine[np.arange(len(a)), at] > 0.998, at, -1)


def rows_of_others(w: Weights) -> Cause | None:
    """A row has the weights of another row."""
    from_row, own = matches(w.got, w.expected), np.arange(len(w.got))
    wrong = ~w.correct
    if not (w.seen.all() or w.lse_correct) or ((from_row < 0) | (from_row == own))[wrong].mean() > 1 - _MOST:
        return None
    i = int(np.nonzero(wrong & (from_row >= 0) & (from_row != own))[0][0])
    same = np.mean(abs(w.lse - w.expected_lse[from_row])[wrong] < 0.01) > _MOST
    where = (
        "O and LSE are both of that row: Q is loaded, or results are stored, at the wrong row"
        if same
        else ("LSE is that of its own row: O is stored at the wrong row")
    )
    return Cause(f"row {i} has the result of row {from_row[i]}; {where}", ROWS if same else STORE)


def not_rescaled(w: Weights) -> Cause | None:
    """Weights of different key tiles have different factors, as if O was not multiplied by alpha."""
    factor, spread = _group_factors(w)
    if np.nanmedian(spread) > 2 * _EXACT:
        return None
    top = np.nanargmax(np.where(w.seen, w.scores, -np.inf), axis=1) // _GROUP
    after = np.arange(factor.shape[1])[None] >= top[:, None]
    last = np.nanmedian(np.where(after, factor, np.nan), axis=1)
    relative = factor / last[:, None]
    constant = np.nanmean(np.where(after & ~np.isnan(relative), abs(relative - 1) < 2 * _EXACT, np.nan))
    before = relative[~after & ~np.isnan(relative)]
    if constant < _MOST or before.size < 4 or (abs(before - 1) > 2 * _EXACT).mean() < 0.2:
        return None
    much = float(np.median(before[abs(before - 1) > 2 * _EXACT]))
    also = "" if w.lse_correct else " (LSE is wrong, too)"
    return Cause(
        f"O is not rescaled correctly when a later key tile raises the row maximum: keys before it have "
        f"{much:.3g} times their weight relative to later keys{also}",
        RESCALE,
    )


def _group_factors(w: Weights) -> tuple[Array, Array]:
    """got / expected by groups of 16 keys, (Sq, groups), and its spread in a group."""
    ratio = np.where(w.seen & (np.maximum(w.got, w.expected) > 2e-3), w.got / np.maximum(w.expected, 1e-12), np.nan)
    Sq, Sk = ratio.shape
    padded = np.full((Sq, -(-Sk // _GROUP) * _GROUP), np.nan)
    padded[:, :Sk] = ratio
    groups = padded.reshape(Sq, -1, _GROUP)
    middle = np.nanmedian(groups, axis=2)
    return middle, np.nanmedian(abs(groups / middle[..., None] - 1), axis=2)


def factor_of_a_row(w: Weights) -> Cause | None:
    """All weights of a row have the same wrong factor."""
    ratio = w.ratio
    factor = np.nanmedian(ratio, axis=1)
    spread = np.nanmax(abs(ratio / factor[:, None] - 1), axis=1)
    some = np.isfinite(factor)
    if (spread[some] < 2 * _EXACT).mean() < _MOST:
        return None
    return next(filter(None, (find(w, factor) for find in (_undivided, _wrong_sum, _constant))), None)


def _undivided(w: Weights, factor: Array) -> Cause | None:
    top = np.where(w.seen, w.scores, -np.inf).max(axis=1)
    some = np.isfinite(factor)
    l = np.exp(w.expected_lse - top)  # relative to the maximum; a kernel may subtract an earlier one
    if w.lse_correct and (factor[some] > 1.2).mean() > _MOST:
        r = np.corrcoef(np.log(factor[some]), np.log(l[some]))[0, 1] if some.sum() > 2 else 0
        if r > 0.6 and np.median(factor[some] / l[some]) > 0.9:
            return Cause("O is not divided by the row sum l", FINALIZE)
    return None


def _wrong_sum(w: Weights, factor: Array) -> Cause | None:
    """O is divided by the wrong l; LSE has the same error."""
    some = np.isfinite(factor) & np.isfinite(w.lse)
    from_lse = np.exp(w.expected_lse - w.lse)
    if (abs(factor / from_lse - 1)[some] < 2 * _EXACT).mean() < _MOST:
        return None
    wrong = some & (abs(factor - 1) > _EXACT)
    extra = np.exp(w.lse) - np.exp(w.expected_lse)
    count = np.median(extra[wrong])
    if count > 0.5 and (abs(extra[wrong] / count - 1) < 0.05).mean() > _MOST and abs(count - round(count)) < 0.1:
        return Cause(
            f"l counts {count:.0f} keys with score 0 beyond the last key: the mask of the last, partial "
            "key tile is not applied",
            MASK,
        )
    if found := _sum_of_tiles(w, wrong):
        return found
    top = np.where(w.seen, w.scores, -np.inf).argmax(axis=1) // _GROUP
    early = some & (top == 0)
    first_tile = some & (top < max(1, w.N // _GROUP))
    right = abs(factor - 1) < _EXACT
    several = some & ~first_tile
    if several.any() and right[early].mean() > _MOST and (~right[several]).mean() > 0.2:
        return Cause("the row sum l is not rescaled by alpha when a later key tile raises the row maximum", RESCALE)
    if (~right[some]).mean() > 0.2:
        how = "too large" if np.median(factor[wrong]) < 1 else "too small"
        return Cause(f"the row sum l is {how} (its keys, its start value or the sum over the lanes of a row)", ROW_SUM)
    return None


def _sum_of_tiles(w: Weights, wrong: Array) -> Cause | None:
    """How often l counts each key tile."""
    tiles = -(-w.got.shape[1] // w.N)
    if wrong.sum() < 8 * tiles:
        return None
    share = np.stack([w.expected[wrong, t * w.N : (t + 1) * w.N].sum(1) for t in range(tiles)], axis=1)
    sums = np.exp(w.lse - w.expected_lse)[wrong]
    times, *_ = np.linalg.lstsq(share, sums, rcond=None)
    if np.std(share @ times - sums) > _EXACT * np.std(sums) or abs(times - np.round(times)).max() > 0.05:
        return None
    t = int(np.nonzero(np.round(times) != 1)[0][0]) if (np.round(times) != 1).any() else -1
    how = {0: "does not count", 2: "counts twice"}
    if t < 0 or int(np.round(times[t])) not in how:
        return None
    rows = np.nonzero(wrong)[0]
    return Cause(
        f"the row sum l {how[int(np.round(times[t]))]} key tile {t} of {tiles}, first in row {rows[0]} "
        f"({len(rows)} of {len(wrong)} rows)",
        ROW_SUM,
    )


def _constant(w: Weights, factor: Array) -> Cause | None:
    middle = np.nanmedian(factor)
    if np.nanmean(abs(factor / middle - 1) < _EXACT) < _MOST or abs(middle - 1) < _EXACT:
        return None
    return Cause(
        f"O is {middle:.3g} times the expected values in all rows: a constant factor of P or of the store", FINALIZE
    )


def scores_of_other_keys(w: Weights) -> Cause | None:
    """The weights of a key tile are those of the scores of another tile, or of a sum of tiles."""
    tiles, Sq = w.got.shape[1] // w.N, len(w.got)
    if not 2 <= tiles <= 16 or not w.seen.all():
        return None
    cut = [x[:, : tiles * w.N].reshape(Sq, tiles, w.N) for x in (np.log(np.maximum(w.got, 1e-7)), w.scores)]
    logs, scores = (x - x.mean(axis=2, keepdims=True) for x in cut)
    A = scores.transpose(0, 2, 1).reshape(-1, tiles)
    for t in range(tiles):
        b = logs[:, t].reshape(-1)
        times, *_ = np.linalg.lstsq(A, b, rcond=None)
        if np.std(A @ times - b) > 0.1 * np.std(b) or abs(times - np.round(times)).max() > 0.1:
            continue
        times = np.atleast_1d(np.round(times))
        others = [u for u in range(tiles) if u != t and times[u]]
        if others and times[t]:
            return Cause(
                f"the scores of key tile {t} contain those of key tile {others[0]}: S is not reset to 0 before Q K^T",
                QK,
            )
        if others:
            return Cause(
                f"the scores of key tile {t} are those of key tile {others[0]}: the K stage, its "
                "address or its barrier is that of another tile",
                KEYS,
            )
    return None


def wrong_scores(w: Weights) -> Cause | None:
    """Scores are another combination of the products of 16 columns of Q and 16 columns of K than the sum over equal
    columns, or have other factors of single columns."""
    use = w.compared & (w.got > 1e-4)
    rows = [i for i in range(len(use)) if use[i].sum() > 8][:96]
    steps = len(w.parts)
    if len(rows) < 4 or steps > 8:
        return None
    found = _factors_of_terms(w, {i: w.parts[:, :, i, use[i]].reshape(steps * steps, -1) for i in rows}, use)
    if found is None:
        return _single_columns(w, rows, use)
    found = found.reshape(steps, steps)
    own, other = np.diag(found), found - np.diag(np.diag(found))
    if (abs(own - 1) < 0.05).all() and (abs(other) < 0.05).all():
        return None
    if (abs(found) < 0.06).all():
        return Cause("all scores of a row are equal: S = Q K^T is 0, or has no step of the columns", QK)
    if np.ptp(own) < 0.06 and (abs(other) < 0.06).all():
        return Cause(f"the scores are {own.mean():.3g} times the expected ones: the scale", SCALE)
    off = np.maximum(abs(own - 1), abs(other).max(axis=1))
    s = int((off > 0.1).argmax()) if (off > 0.1).any() else int(off.argmax())
    span = f"columns {16 * s} to {16 * s + 15}"
    if abs(other[s]).max() > 0.5:
        u = int(abs(other[s]).argmax())
        return Cause(f"in S = Q K^T, {span} of Q are multiplied with columns {16 * u} to {16 * u + 15} of K", QK)
    if abs(own[s] - 1) < 0.05:
        return None
    return Cause(f"{span} of Q and K count {abs(round(own[s], 1)):g} times in S = Q K^T", QK)


def _factors_of_terms(w: Weights, terms: dict[int, Array], use: Array) -> Array | None:
    """The factors with which the terms (terms, keys) of a row's scores add up to the logarithms of its weights; None if
    they do not, or if there are too few weights to tell."""
    logs = [np.log(w.got[i, use[i]]) for i in terms]
    A = np.concatenate([(x - x.mean(1, keepdims=True)).T for x in terms.values()])
    b = np.concatenate([x - x.mean() for x in logs])
    found, *_ = np.linalg.lstsq(A, b, rcond=None)
    return None if np.std(A @ found - b) > 0.06 or len(b) < 4 * len(found) else np.asarray(found)


def _single_columns(w: Weights, rows: list[int], use: Array) -> Cause | None:
    """At most a quarter of the columns of Q and K have another factor than 1 in the scores, all the same one."""
    found = _factors_of_terms(w, {i: (w.K[use[i]] * w.Q[i]).T for i in rows}, use)
    if found is None:
        return None
    wrong = np.nonzero(abs(found - 1) > 0.2)[0]
    if not 0 < len(wrong) <= len(found) // 4 or np.ptp(found[wrong]) > 0.2:
        return None
    which = f"column {wrong[0]}" if len(wrong) == 1 else f"{len(wrong)} columns, from column {wrong[0]} on,"
    count = "counts" if len(wrong) == 1 else "count"
    return Cause(f"{which} of Q and K {count} {abs(round(found[wrong].mean(), 1)):g} times in S = Q K^T", QK)


def _some_tiles(w: Weights) -> Cause | None:
    """Weights are wrong in some key tiles, at most half of them, and LSE is correct."""
    tiles = -(-w.got.shape[1] // w.N)
    off = abs(w.got - w.expected) > 2 * _EXACT * w.expected.max(1, keepdims=True)
    by_tile = np.array([off[:, t * w.N : (t + 1) * w.N].any() for t in range(tiles)])
    if tiles > 2 and w.lse_correct and 0 < by_tile.sum() <= tiles // 2:
        t = int(np.nonzero(by_tile)[0][0])
        return Cause(
            f"only the weights of key tile {t} of {tiles} are wrong, and LSE is correct: P or V of that tile", VALUES
        )
    return None


def wrong_half(w: Weights) -> Cause | None:
    """LSE is -inf although the row sees keys, or LSE is correct and O is wrong."""
    if lost := _lost_statistics(w):
        return lost
    if w.lse_correct:
        return Cause("LSE is correct and O is wrong: P V, the load of V, the rescale or the store of O", VALUES)
    return None


def wrong_lse(w: Weights) -> Cause | None:
    """O is correct, LSE is wrong."""
    some = np.isfinite(w.expected_lse)
    got, ref = w.lse[some], w.expected_lse[some]
    wrong = ~(abs(got - ref) < 0.01)
    first = int(np.nonzero(some)[0][wrong][0])
    head = "O is correct, only LSE is wrong"
    if not np.isfinite(got[wrong]).all():
        return Cause(f"{head}: it is not written, or not finite, from row {first}", LSE)
    top = np.where(w.seen, w.scores, -np.inf).max(axis=1)[some]
    for name, values in (
        ("the row maximum m without log(l)", top),
        ("log(l) without the row maximum m", ref - top),
        ("in base 2: multiply by ln 2", ref / np.log(2)),
        ("the negative LSE", -ref),
    ):
        if (abs(got - values) < 0.02).mean() > _MOST:
            return Cause(f"{head}: it is {name}", LSE)
    if np.ptp(got - ref) < 0.02:
        return Cause(f"{head}: it is {np.mean(got - ref):+.3g} off in all rows", LSE)
    near = [
        d for d in (1, 2, 4, 8, 16, 32, 64) for s in (-d, d) if np.mean(abs(got - np.roll(ref, s))[d:-d] < 0.01) > 0.5
    ]
    if near:
        return Cause(f"{head}: rows have the LSE of other rows, {near[0]} apart", LSE)
    return Cause(f"{head}, in {wrong.mean():.0%} of the rows, first row {first}: the final logarithm or its store", LSE)


EXP = r"fmaxf|max\(|shift|update_max|raise_max|lane_max|exp2?f?\("
MASK = r"masked|apply_mask|score_mod_and_mask|fully_visible|head\.raw|visible\("
RANGE = r"for \(.*(keys\.end|tiles|n0|j <)|n_block_range|keys\.end|\.end\b"
RESCALE = r"\balpha\b|rescale|scale_O"
FINALIZE = r"inverse|finalize|/ l\b"
ROW_SUM = r"\bl\b.*\+|row_sum|\bsum\b"
VALUES = r"mma_AB|V_smem|mn_major|VPipeline::(wait|tile_at)|\bo \+="
KEYS = r"K_smem|KPipeline::(wait|tile_at|load)|k_major"
QK = r"mma_QK|k_step|\bq \*|mma_ABt|k_major"
SCALE = r"exponent|scale|unit|LOG2E"
ROWS = r"O\.row|query_row|row0|first_row|2 \* half|8 \* half"
STORE = r"O\.row|store"
LSE = r"\bLSE\["

CAUSES: tuple[Callable[[Weights], Cause | None], ...] = (
    moved_keys,
    values_of_other_keys,  # also of hidden keys, if LSE is correct
    rows_of_others,
    hidden_keys_have_weight,
    missing_keys,
    factor_of_a_row,
    wrong_scores,
    scores_of_other_keys,
    not_rescaled,
    _some_tiles,
    wrong_half,
)
