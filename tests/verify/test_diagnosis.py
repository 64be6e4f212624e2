"""The cause of a wrong result: from attention weights, and from runs of small problems with planted faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from project import kernel_copy

from sandbox.core import registry
from sandbox.core.kernel import Kernel
from sandbox.launch.dlpack import HOST
from sandbox.reference import attention
from sandbox.spec import Problem
from sandbox.verify import check, diagnosis, weights
from sandbox.verify.cases import Case
from sandbox.verify.weights import Weights, cause_of

M = N = 32
SQ, SK, D = 64, 128, 64
EDIT = Callable[[Weights], tuple[np.ndarray, np.ndarray]]


def correct(Sk: int = SK, causal: bool = False) -> Weights:
    """What a correct kernel gives."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((SQ, D)), rng.standard_normal((Sk, D))
    expected, lse = attention(q[None, None], k[None, None], np.eye(Sk)[None, None], causal=causal)
    cut = [slice(c, c + 16) for c in range(0, D, 16)]
    parts = np.array([[q[:, a] @ k[:, b].T / 8 for b in cut] for a in cut])
    seen = np.arange(Sk)[None] <= np.arange(SQ)[:, None] + (Sk - SQ if causal else Sk)
    P, LSE = expected[0, 0], lse[0, 0]
    return Weights(P.copy(), P, LSE.copy(), LSE, q @ k.T / 8, parts, seen, M, N)


def without(keys: slice, twice: int = 0) -> EDIT:
    """Some keys count `twice` times, in O and l."""

    def edit(w: Weights) -> tuple[np.ndarray, np.ndarray]:
        times = np.ones(w.got.shape[1])
        times[keys] = twice
        sums = (w.expected * times).sum(1)
        return w.expected * times / sums[:, None], w.lse + np.log(sums)

    return edit


def of_scores(change: Callable[[Weights], np.ndarray]) -> EDIT:
    """The softmax of other scores."""

    def edit(w: Weights) -> tuple[np.ndarray, np.ndarray]:
        x = np.where(w.seen, change(w), -np.inf)
        lse = np.log(np.exp(x).sum(1))
        return np.exp(x - lse[:, None]), lse

    return edit


def alpha(w: Weights) -> np.ndarray:
    """exp(m of all keys − m up to the key's tile)."""
    running = np.maximum.accumulate(np.where(w.seen, w.scores, -np.inf).reshape(SQ, -1, N).max(2), axis=1)
    return np.repeat(np.exp(running[:, -1:] - running), N, axis=1)


def swapped(x: np.ndarray, distance: int, axis: int) -> np.ndarray:
    return np.take(x, np.arange(x.shape[axis]) ^ distance, axis)


def padded(w: Weights) -> tuple[np.ndarray, np.ndarray]:
    """17 keys beyond the last, with score 0 and value 0."""
    lse = np.log(np.exp(w.lse) + 17)
    return w.expected * np.exp(w.lse - lse)[:, None], lse


def times_rows(x: np.ndarray, rows: slice, factor: float) -> np.ndarray:
    found = x.copy()
    found[rows] *= factor
    return found


def in_tile(w: Weights, t: int, change: np.ndarray) -> np.ndarray:
    found = w.scores.copy()
    found[:, t * N : (t + 1) * N] = change
    return found


FAULTS: dict[str, tuple[EDIT, str]] = {
    "a tile is missing": (without(slice(64, 96)), "key tile 2 of 4 is missing from S"),
    "the last tile": (without(slice(96, 128)), "key tile 3 of 4 (the last one) is missing from S"),
    "P V of a tile": (lambda w: (w.expected * (np.arange(SK) >= 32), w.lse),
                      "key tile 0 of 4 (the first one) is missing from P V"),
    "a tile twice": (without(slice(32, 64), 2), "key tile 1 of 4 counts 2 times"),
    "some keys of every tile": (without(slice(24, 128, 32)), "missing"),
    "no rescale of O": (lambda w: (w.expected * alpha(w), w.lse), "O is not rescaled"),
    "no rescale of l": (lambda w: (w.expected / (s := (w.expected * alpha(w)).sum(1))[:, None], w.lse + np.log(s)),
                        "row sum l is not rescaled"),
    "l without a tile": (lambda w: (w.expected / (s := w.expected[:, 32:].sum(1))[:, None], w.lse + np.log(s)),
                         "row sum l does not count key tile 0"),
    "no division": (lambda w: (w.expected * np.exp(w.lse - w.scores.max(1))[:, None], w.lse), "not divided by the row"),
    "half of O": (lambda w: (w.expected / 2, w.lse), "O is 0.5 times"),
    "padding counts": (padded, "l counts 17 keys with score 0"),
    "scale": (of_scores(lambda w: w.scores * 1.5), "scores are 1.5 times"),
    "a step of D": (of_scores(lambda w: w.scores - w.parts[2, 2]), "columns 32 to 47 of Q and K count 0 times"),
    "a factor of a step": (of_scores(lambda w: w.scores + 0.08 * w.parts[1, 1]),
                           "columns 16 to 31 of Q and K count 1.1 times"),
    "a step of K": (of_scores(lambda w: w.scores - w.parts[1, 1] + w.parts[1, 0]),
                    "columns 16 to 31 of Q are multiplied with columns 0 to 15 of K"),
    "K of another tile": (of_scores(lambda w: in_tile(w, 2, w.scores[:, 32:64])),
                          "scores of key tile 2 are those of key tile 1"),
    "S accumulates": (of_scores(lambda w: in_tile(w, 1, w.scores[:, :32] + w.scores[:, 32:64])),
                      "scores of key tile 1 contain those of key tile 0"),
    "V of another tile": (lambda w: (swapped(w.expected, 32, 1), w.lse),
                          "P of key tile 0 multiplies the values of key tile 1"),
    "order of keys": (lambda w: (swapped(w.expected, 1, 1), w.lse), "P of key 0 multiplies the value of key 1"),
    "order of rows": (lambda w: (swapped(w.expected, 8, 0), w.lse), "row 0 has the result of row 8; LSE is that"),
    "Q of other rows": (lambda w: (swapped(w.expected, 8, 0), swapped(w.lse, 8, 0)),
                        "row 0 has the result of row 8; O and LSE"),
    "m as LSE": (lambda w: (w.expected, w.scores.max(1)), "only LSE is wrong: it is the row maximum"),
    "LSE in base 2": (lambda w: (w.expected, w.lse / np.log(2)), "only LSE is wrong: it is in base 2"),
    "LSE of other rows": (lambda w: (w.expected, np.roll(w.lse, 8)), "LSE of other rows, 8 apart"),
    "unwritten LSE": (lambda w: (w.expected, times_rows(w.lse, slice(3, 9), np.nan)), "not finite, from row 3"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_is_named(fault: str) -> None:
    """Also with the rounding of bfloat16."""
    w = correct()
    edit, said = FAULTS[fault]
    got, lse = edit(w)
    rng = np.random.default_rng(1)
    for noise in (0, 2e-3):
        found = cause_of(w._replace(got=got * (1 + noise * rng.standard_normal(got.shape)), lse=lse))
        assert found, fault
        assert said in found.what


@pytest.mark.parametrize("causal", [False, True])
def test_correct_weights_have_no_cause(causal: bool) -> None:
    w = correct(causal=causal)
    assert cause_of(w) is None
    rng = np.random.default_rng(1)
    assert cause_of(w._replace(got=w.got * (1 + 3e-3 * rng.standard_normal(w.got.shape)))) is None


@pytest.mark.parametrize(
    ("shift", "said"),
    [
        (1, "each row sees one key too many"),
        (-1, "each row misses its last visible key"),
        (SK, "keys that the mask hides"),
    ],
)
def test_a_wrong_mask(shift: int, said: str) -> None:
    w = correct(causal=True)
    seen = np.arange(SK)[None] <= np.arange(SQ)[:, None] + SK - SQ + shift
    x = np.where(seen, w.scores, -np.inf)
    lse = np.log(np.exp(x).sum(1))
    found = cause_of(w._replace(got=np.exp(x - lse[:, None]), lse=lse))
    assert found
    assert said in found.what


@pytest.mark.parametrize(("wrong", "said"), [(np.nan, "not finite, from row 40"), (9.0, "first row 40")])
def test_the_first_row_with_a_wrong_lse(wrong: float, said: str) -> None:
    """Rows before it that see no key count, too: here the first 32."""
    w = correct(Sk=32, causal=True)
    lse = w.lse.copy()
    lse[40::5] = wrong
    found = cause_of(w._replace(lse=lse))
    assert found
    assert said in found.what


def test_an_lse_that_is_not_a_sum() -> None:
    """exp(score - LSE) overflows."""
    w = correct()
    found = cause_of(w._replace(got=w.got / 2, lse=np.full_like(w.lse, -1e4)))
    assert found
    assert "O is 0.5 times" in found.what


def test_no_cause_is_claimed_for_noise() -> None:
    """Wrong in another way than any cause: at most the half of the kernel is named."""
    w, rng = correct(), np.random.default_rng(2)
    got = rng.random(w.got.shape)
    assert cause_of(w._replace(got=got / got.sum(1, keepdims=True), lse=w.lse + 1)) is None


def test_lines_ignore_comments() -> None:
    source = "// alpha\nx = 1;\nO *= alpha;  // rescale\n"
    assert list(weights.lines(source, weights.RESCALE)) == [3]


# ---- kernels


def faulty(folder: Path, old: str, new: str, name: str = "fwd_minimal") -> Kernel:
    kernel = registry.get(name)
    return dataclasses.replace(
        kernel, source=kernel_copy(kernel, folder, kernel.source.name, lambda text: text.replace(old, new))
    )


def cause(kernel: Kernel, problem: Problem, **how: str) -> str:
    result = check.verify(kernel, Case("planted", problem, **how), HOST, explain=True)
    assert result.ok is False
    return result.cause


PLAIN = Problem(1, 2, 100, 111, 64, dtype="float16")
GROUPS = dataclasses.replace(PLAIN, B=2, H=4, Hk=2)


@pytest.mark.parametrize(
    ("old", "new", "problem", "how", "said"),
    [
        ("to_float(Q.row(b, h, query_row)[d])", "to_float(Q.row(b, 0, query_row)[d])", PLAIN, {}, "reads Q of head 0"),
        ("O.row(b, h, query_row)[d]", "O.row(b, h, query_row)[d ^ 1]", PLAIN, {}, "column 0 of O has the values of"),
        ("d < HEAD_DIM_V; ++d)\n        O.row", "d < HEAD_DIM_V - 8; ++d)\n        O.row",
         PLAIN, {}, "O is not written in 128 of 128 rows: 0 to 127, columns 56 to 63"),
        ("head.key_view(K), b, h / group, n0", "head.key_view(K), b, h % 2, n0", GROUPS, {"layout": "bshd"},
         "reads K of key/value head 1, batch entry 0, instead of 0, 0; wrong only if query heads share"),
        ("head.key_view(V), b, h / group, n0", "head.key_view(K), b, h / group, n0", PLAIN, {}, "K is read as V"),
    ],
)  # fmt: skip
def test_planted_faults(old: str, new: str, problem: Problem, how: dict[str, str], said: str, tmp_path: Path) -> None:
    found = cause(faulty(tmp_path, old, new), problem, **how)
    assert said in found
    assert found.startswith("O on planted, first wrong at b 0, h")


def test_the_input_whose_nan_is_wrong(tmp_path: Path) -> None:
    """Without the test for visible keys, P = 0 of a masked key is multiplied with NaN."""
    kernel = faulty(tmp_path, "if (!Head::HAS_MASK || visible(j)) o +=", "o +=")
    found = cause(kernel, dataclasses.replace(PLAIN, causal="bottom-right"), inputs="nan")
    assert "nan in row 80 of V reaches row 0 of O, which does not see it" in found


def test_only_dense_forwards_without_options() -> None:
    kernel = registry.get("fwd_minimal")
    assert diagnosis.supported(kernel, PLAIN)
    assert not diagnosis.supported(kernel, dataclasses.replace(PLAIN, softcap=3.0))
    assert not diagnosis.supported(registry.get("bwd_minimal"), PLAIN)
    assert str(diagnosis.diagnose(registry.get("bwd_minimal"), Case("none", PLAIN), HOST, kernel.tiles[0])) == ""
