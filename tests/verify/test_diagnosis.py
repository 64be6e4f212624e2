"""The cause of a wrong result: from attention weights, and from runs of small problems with planted faults."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from project import kernel_copy

from sandbox.core import registry
from sandbox.core.errors import UnsupportedProblem
from sandbox.core.kernel import Kernel
from sandbox.core.tile import Tile
from sandbox.launch.dlpack import HOST
from sandbox.reference import attention
from sandbox.spec import Problem
from sandbox.verify import check, diagnosis, places, weights
from sandbox.verify.cases import Case, make_inputs
from sandbox.verify.weights import Weights, cause_of


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine that runs other tests at the same time."""
    monkeypatch.setattr(diagnosis, "_BUDGET_SECONDS", 60.0)


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
    return Weights(P.copy(), P, LSE.copy(), LSE, q @ k.T / 8, parts, seen, M, N, q / 8, k)


def without(keys: slice | np.ndarray, twice: int = 0) -> EDIT:
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


def spread(w: Weights) -> np.ndarray:
    """A factor between 1.5 and 3 for each weight."""
    return np.random.default_rng(3).uniform(1.5, 3, w.got.shape)


FAULTS: dict[str, tuple[EDIT, str]] = {
    "a tile is missing": (without(slice(64, 96)), "key tile 2 of 4 is missing from S"),
    "the last tile": (without(slice(96, 128)), "key tile 3 of 4 (the last one) is missing from S"),
    "P V of a tile": (lambda w: (w.expected * (np.arange(SK) >= 32), w.lse),
                      "key tile 0 of 4 (the first one) is missing from P V"),
    "a tile twice": (without(slice(32, 64), 2), "key tile 1 of 4 counts 2 times"),
    "some keys of every tile": (without(np.flatnonzero(np.arange(SK) % N // 8 == 2)),
                                "keys 16 to 23 of every key tile are missing from S"),
    "no rescale of O": (lambda w: (w.expected * alpha(w), w.lse), "O is not rescaled"),
    "no rescale of l": (lambda w: (w.expected / (s := (w.expected * alpha(w)).sum(1))[:, None], w.lse + np.log(s)),
                        "row sum l is not rescaled"),
    "l without a tile": (lambda w: (w.expected / (s := w.expected[:, 32:].sum(1))[:, None], w.lse + np.log(s)),
                         "row sum l does not count key tile 0"),
    "l with a tile twice": (lambda w: (w.expected / (s := 1 + w.expected[:, 64:96].sum(1))[:, None], w.lse + np.log(s)),
                            "row sum l counts twice key tile 2"),
    "no division": (lambda w: (w.expected * np.exp(w.lse - w.scores.max(1))[:, None], w.lse), "not divided by the row"),
    "half of O": (lambda w: (w.expected / 2, w.lse), "O is 0.5 times"),
    "padding counts": (padded, "l counts 17 keys with score 0"),
    "scale": (of_scores(lambda w: w.scores * 1.5), "scores are 1.5 times"),
    "no scores": (of_scores(lambda w: 0 * w.scores), "all scores of a row are equal: S = Q K^T is 0"),
    "a step of D": (of_scores(lambda w: w.scores - w.parts[2, 2]), "columns 32 to 47 of Q and K count 0 times"),
    "a factor of a step": (of_scores(lambda w: w.scores + 0.08 * w.parts[1, 1]),
                           "columns 16 to 31 of Q and K count 1.1 times"),
    "the last column": (of_scores(lambda w: w.scores - w.Q[:, 63:] @ w.K[:, 63:].T),
                        "column 63 of Q and K counts 0 times"),
    "a column twice": (of_scores(lambda w: w.scores + w.Q[:, 5:6] @ w.K[:, 5:6].T),
                       "column 5 of Q and K counts 2 times"),
    "every 8th column": (of_scores(lambda w: w.scores - w.Q[:, 7::8] @ w.K[:, 7::8].T),
                         "8 columns, from column 7 on, of Q and K count 0 times"),
    "a step of K": (of_scores(lambda w: w.scores - w.parts[1, 1] + w.parts[1, 0]),
                    "columns 16 to 31 of Q are multiplied with columns 0 to 15 of K"),
    "a step of K, too": (of_scores(lambda w: w.scores + w.parts[2, 0]),
                         "columns 32 to 47 of Q are multiplied with columns 0 to 15 of K"),
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
    "log(l) as LSE": (lambda w: (w.expected, w.lse - w.scores.max(1)), "only LSE is wrong: it is log(l) without"),
    "negative LSE": (lambda w: (w.expected, -w.lse), "only LSE is wrong: it is the negative LSE"),
    "LSE + 1": (lambda w: (w.expected, w.lse + 1), "only LSE is wrong: it is +1 off in all rows"),
    "LSE of -inf": (lambda w: (w.expected * spread(w), np.where(np.arange(SQ) < 5, w.lse, -np.inf)),
                    "LSE is -inf in rows that see keys, first in row 5"),
    "V of other keys of a tile": (lambda w: (swapped(w.expected, 16, 1), w.lse),
                                  "P of keys 0 to 15 multiplies the values of keys 16 to 31"),
    "P of a tile": (lambda w: (w.expected * np.where(np.arange(SK) // N == 2, spread(w), 1), w.lse),
                    "only the weights of key tile 2 of 4 are wrong"),
    "l is too large": (lambda w: (w.expected / spread(w)[:, :1], w.lse + np.log(spread(w)[:, 0])), "l is too large"),
    "l is too small": (lambda w: (w.expected * spread(w)[:, :1], w.lse - np.log(spread(w)[:, 0])), "l is too small"),
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


@pytest.mark.parametrize("fault", FAULTS)
def test_a_cause_must_explain_the_weights(fault: str) -> None:
    """With a further error of 30% in each weight, no cause is named; if LSE is correct, the half of the kernel is."""
    w = correct()
    got, lse = FAULTS[fault][0](w)
    rng = np.random.default_rng(3)
    found = cause_of(w._replace(got=got * np.exp(0.3 * rng.standard_normal(got.shape)), lse=lse))
    assert found is None or found.what.startswith(("LSE is correct and O is wrong", "LSE is -inf"))


@pytest.mark.parametrize("fault", ["a tile twice", "V of another tile", "V of other keys of a tile"])
def test_moved_keys_explain_the_weights_but_for_rounding(fault: str) -> None:
    w = correct()
    got, lse = FAULTS[fault][0](w)
    rng = np.random.default_rng(3)
    for noise, explained in ((0.01, True), (0.05, False)):
        inexact = w._replace(got=got * np.exp(noise * rng.standard_normal(got.shape)), lse=lse)
        assert bool(weights.moved_keys(inexact)) is explained


@pytest.mark.parametrize("fault", ["l without a tile", "l with a tile twice"])
def test_tiles_explain_the_row_sums_but_for_rounding(fault: str) -> None:
    w = correct()
    _, lse = FAULTS[fault][0](w)
    rng = np.random.default_rng(3)
    for noise, explained in ((1e-4, True), (0.006, False)):
        inexact = w._replace(lse=lse + noise * rng.standard_normal(SQ))
        assert bool(weights._sum_of_tiles(inexact, np.ones(SQ, bool))) is explained


@pytest.mark.parametrize("fault", [name for name in FAULTS if "LSE" in name and name != "unwritten LSE"])
def test_a_wrong_lse_is_named_only_if_all_rows_have_it(fault: str) -> None:
    w = correct()
    _, lse = FAULTS[fault][0](w)
    found = cause_of(w._replace(lse=np.where(np.isfinite(lse), lse, 9) + np.random.default_rng(3).normal(0, 0.2, SQ)))
    assert found
    assert "the final logarithm or its store" in found.what


@pytest.mark.parametrize(("tiles", "named"), [((), False), ((1,), True), ((1, 2), True), ((0, 1, 2), False)])
def test_single_tiles_are_named_if_they_are_at_most_half(tiles: tuple[int, ...], named: bool) -> None:
    w = correct()
    wrong = np.isin(np.arange(SK) // N, tiles)
    found = weights._some_tiles(w._replace(got=w.got * np.where(wrong, spread(w), 1)))
    assert bool(found) is named
    assert not found or f"key tile {tiles[0]} of 4" in found.what


@pytest.mark.parametrize(
    ("Sk", "keys", "said"),
    [
        (128, slice(32, 96), "key tiles 1 to 2 of 4 are missing from S"),
        (112, slice(96, 112), "key tile 3 of 4 (the last, partial one) is missing from S"),
        (128, slice(40, 48), "keys 40 to 47 of key tile 1 of 4 are missing from S"),
    ],
)
def test_which_keys_are_missing(Sk: int, keys: slice, said: str) -> None:
    w = correct(Sk)
    got, lse = without(keys)(w)
    found = cause_of(w._replace(got=got, lse=lse))
    assert found
    assert found.what.startswith(said)


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


# ---- faults of a kernel, computed in NumPy

Tensors = dict[str, np.ndarray]
FAULT = Callable[[Problem, Tensors, Tensors], None]  # (problem, inputs, correct outputs to change)
TILE = Tile(BLOCK_M=16, BLOCK_N=16)
SHORT = Problem(1, 1, 32, 32, 16)


@dataclasses.dataclass(frozen=True)
class Faulty(diagnosis._Examined):
    """Attention in float64 with a fault, in place of launches. Without a time limit."""

    change: FAULT = lambda p, inputs, outputs: None

    def launch(self, problem: Problem, inputs: Tensors, fill: int = 0xFF) -> Tensors:
        given = [inputs[name] for name in "QKV"]
        outputs = dict(zip(("O", "LSE"), attention(*given, causal=problem.causal, scale=problem.scale), strict=True))
        self.change(problem, {**inputs, "fill": np.full(1, fill, np.uint8).repeat(8).view(np.float64)}, outputs)
        return outputs


def examined(change: FAULT) -> Faulty:
    return Faulty(registry.get("fwd_minimal"), HOST, TILE, False, math.inf, change)


def diagnosed(change: FAULT, problem: Problem, **how: str) -> diagnosis.Diagnosis:
    with np.errstate(all="ignore"):
        return diagnosis._diagnose(examined(change), Case("planted", problem, **how))


def wrong_if(condition: Callable[[Problem, Tensors], bool]) -> FAULT:
    """O is twice as large on some problems."""

    def change(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        outputs["O"] *= 2 if condition(p, inputs) else 1

    return change


CONDITIONS: list[tuple[Callable[[Problem, Tensors], bool], dict[str, Any], str]] = [
    (lambda p, x: True, {}, ""),
    (lambda p, x: bool(p.causal), {"causal": "bottom-right"}, "correct without a causal mask"),
    (lambda p, x: p.Sk > 16, {}, "correct if a row has one key tile, wrong with two"),
    (lambda p, x: p.Sq > 16, {}, ""),  # with two query tiles; the number of key tiles does not matter
    (lambda p, x: p.Sk % 16 > 0, {"Sk": 40}, "correct with whole tiles, wrong if the last key tile is partial"),
    (lambda p, x: p.Sq % 16 > 0, {"Sq": 40}, "correct with whole tiles, wrong if the last query tile is partial"),
    (lambda p, x: p.Sk > p.Sq, {"Sk": 64}, "correct with whole tiles, wrong with other lengths of queries and keys"),
    (lambda p, x: p.Sq > p.Sk, {"Sq": 64}, "correct with more keys than queries, wrong with fewer"),
    (lambda p, x: p.H > 1, {"H": 2, "Hk": 2}, "correct with one head, wrong with two"),
    (lambda p, x: p.B > 1, {"B": 2}, "correct with one batch entry, wrong with two"),
    (lambda p, x: p.Hk < p.H, {"H": 2}, "wrong only if query heads share key/value heads"),
    (lambda p, x: not x["Q"].flags.c_contiguous, {"layout": "bshd"},
     "correct with contiguous tensors, wrong with other strides"),
    (lambda p, x: abs(x["Q"]).max() > 8, {"inputs": "large"}, "correct with small scores, wrong with large ones"),
    (lambda p, x: (p.Sq, p.Sk) == (32, 48), {"Sk": 48}, "correct with whole tiles, wrong with other lengths of"),
    (lambda p, x: (p.Sq, p.Sk) == (48, 48), {"Sq": 48, "Sk": 48},
     "correct with whole tiles, wrong with 48 queries and 48 keys"),
]  # fmt: skip


@pytest.mark.parametrize(("condition", "case", "said"), CONDITIONS, ids=[str(case) for _, case, _ in CONDITIONS])
def test_the_condition_of_a_fault(
    condition: Callable[[Problem, Tensors], bool], case: dict[str, Any], said: str
) -> None:
    how = {name: case[name] for name in ("layout", "inputs") if name in case}
    problem = dataclasses.replace(SHORT, **{name: x for name, x in case.items() if name not in how})
    found = diagnosed(wrong_if(condition), problem, **how)
    assert found.on
    assert found.condition.startswith(said)
    assert bool(found.condition) == bool(said)


def test_a_correct_kernel_has_no_diagnosis() -> None:
    problem = dataclasses.replace(SHORT, B=2, H=4, Hk=2, Sq=40, Sk=50, causal="bottom-right")
    assert diagnosed(lambda *given: None, problem, layout="bshd") == diagnosis.Diagnosis()


def test_no_further_problem_is_run_after_the_time_limit() -> None:
    late = dataclasses.replace(examined(wrong_if(lambda p, x: p.B > 1)), deadline=-math.inf)
    assert diagnosis._diagnose(late, Case("planted", dataclasses.replace(SHORT, B=2))) == diagnosis.Diagnosis()


@pytest.mark.parametrize(
    ("wrong", "said"), [("O", "V or P is read from shared"), ("LSE", "Q or K is read from shared")]
)
def test_nan_of_unwritten_shared_memory(wrong: str, said: str) -> None:
    """NaN in O although K = 0; in LSE, too, if it is in the scores."""

    def change(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        outputs["O"][:, :, 20:] = np.nan
        outputs[wrong][:, :, 20:] = np.nan

    assert diagnosed(change, SHORT).cause.startswith(said)


def test_nan_of_large_scores_is_not_that_of_shared_memory() -> None:
    def change(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        if inputs["K"].any():
            outputs["O"][:, :, 20:] = np.nan

    assert "O is NaN or infinite in 12 of 32 rows, first row 20" in diagnosed(change, SHORT).cause


def test_an_infinite_lse_is_not_that_of_shared_memory() -> None:
    """A row sum of 0: O is NaN, LSE is -inf."""

    def change(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        outputs["O"][:, :, 20:] = np.nan
        outputs["LSE"][:, :, 20:] = -np.inf

    assert diagnosed(change, SHORT).cause.startswith("LSE is -inf in rows that see keys, first in row 20")


@pytest.mark.parametrize(
    ("name", "where", "said"),
    [
        ("O", np.s_[:, :, 5:9], "O is not written in 4 of 32 rows: 5 to 8"),
        ("O", np.s_[:, :, 5:9:2], "O is not written in 2 of 32 rows: 5 to 5 and others"),
        ("O", np.s_[..., 8:], "O is not written in 32 of 32 rows: 0 to 31, columns 8 to 15"),
        ("LSE", np.s_[:, :, 31:], "LSE is not written in 1 of 32 rows: 31 to 31"),
    ],
)
def test_unwritten_elements(name: str, where: Any, said: str) -> None:
    def change(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        outputs[name][where] = inputs["fill"]

    assert diagnosed(change, SHORT).cause == said


def test_exp_overflows_with_large_inputs_only() -> None:
    def change(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        if abs(inputs["Q"]).max() > 8:
            outputs["O"][:, :, 3] = np.inf

    found = diagnosed(change, SHORT, inputs="large")
    assert found.cause.startswith("exp overflows: the row maximum is not subtracted")
    assert found.condition == "correct with small scores, wrong with large ones"


@pytest.mark.parametrize("name", ["Q", "K", "V"])
def test_nan_that_a_row_sees_and_does_not_get(name: str) -> None:
    """Two tiles of 16 keys would not have the key that is NaN."""

    def change(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        if not np.isfinite(inputs[name]).all():
            outputs["O"][...] = 0

    found = diagnosed(change, dataclasses.replace(SHORT, Sq=100, Sk=100), inputs="nan")
    assert re.match(rf"nan in row \d+ of {name} does not reach row \d+ of O, which sees it", found.cause)


@pytest.mark.parametrize("names", ["QKK", "QVV", "QVK", "QKQ", "QQV", "KKV"])
def test_one_tensor_in_place_of_another(names: str) -> None:
    def change(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        outputs["O"] = attention(*(inputs[name] for name in names), causal=p.causal, scale=p.scale)[0]

    said = [f"{name} is read as {own}" for own, name in zip("QKV", names, strict=True) if own != name]
    assert diagnosed(change, SHORT).cause == f"another tensor is read: {' and '.join(said)}"


def test_columns_of_o() -> None:
    """Values of other columns, and columns that are wrong in another way."""

    def reversed_columns(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        outputs["O"][..., 4:] = outputs["O"][..., :3:-1].copy()

    def halved_columns(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        outputs["O"][..., 12:] -= 1

    said = diagnosed(reversed_columns, SHORT).cause
    assert said == "column 4 of O has the values of column 15 (12 of 16 columns are wrong)"
    said = diagnosed(halved_columns, SHORT).cause
    assert said == "only columns of O are wrong, the first is 12 (4 of 16): P V or their store"


@pytest.mark.parametrize("causal", [False, "bottom-right", "top-left"])
def test_measured_weights(causal: Any) -> None:
    """From several launches, the last one with fewer keys than columns of V."""
    problem = dataclasses.replace(SHORT, Sq=20, Sk=40, D=32, Dv=32, causal=causal)
    w = diagnosis._measure(examined(lambda *given: None), Case("correct", problem))
    assert np.allclose(w.got, w.expected)
    assert np.array_equal(w.seen, w.expected > 0)
    assert np.allclose(w.by_own_sum, w.expected)
    assert np.allclose(w.parts[0, 0] + w.parts[1, 1], w.scores)
    assert not np.allclose(w.parts[0, 1], w.parts[1, 0])
    assert (w.M, w.N) == (16, 16)
    assert cause_of(w) is None


HEADS = Problem(2, 4, 16, 16, 16, Hk=2)


@pytest.mark.parametrize(
    ("of_q", "of_k", "of_v", "said"),
    [
        ((0, 3), (1, 1), (1, 1), "head 2 of batch entry 1 reads Q of head 3, batch entry 0"),
        ((1, 2), (0, 1), (1, 1), "reads K of key/value head 1, batch entry 0, instead of 1, 1"),
        ((1, 2), (1, 1), (0, 0), "reads V of key/value head 0, batch entry 0, instead of 1, 1"),
        ((1, 2), (1, 0), (1, 0), "reads K and V of key/value head 0, batch entry 1, instead of 1, 1"),
        ((0, 1), (0, 0), (0, 0), "O of head 2, batch entry 1 is that of head 1, batch entry 0"),
    ],
)
def test_a_head_that_reads_another(
    of_q: tuple[int, int], of_k: tuple[int, int], of_v: tuple[int, int], said: str
) -> None:
    case = Case("planted", HEADS)
    q, k, v = make_inputs(case)
    out, _ = attention(q, k, v)
    out[1, 2] = attention(*(x[None, None] for x in (q[of_q], k[of_k], v[of_v])))[0][0, 0]
    found = diagnosis._wrong_head(case, {"O": out})
    assert found == (f"query head 2 of batch entry 1 {said}" if said.startswith("reads") else said)


# ---- which problems are run, and how


@pytest.mark.parametrize(
    ("M", "N", "Sq", "Sk"),
    [
        (16, 16, 32, 32),
        (64, 32, 128, 128),
        (64, 64, 128, 128),
        (64, 256, 128, 512),
        (24, 32, 48, 64),
        (384, 64, 512, 768),
    ],
)
def test_the_simplest_problem(M: int, N: int, Sq: int, Sk: int) -> None:
    """One head; whole tiles, at least two of keys; at most 512 queries."""
    e = dataclasses.replace(examined(lambda *given: None), tile=Tile(BLOCK_M=M, BLOCK_N=N))
    problem = dataclasses.replace(SHORT, B=3, H=4, Hk=2, Sq=99, Sk=99, causal="top-left")
    expected = dataclasses.replace(problem, B=1, H=1, Hk=1, Sq=Sq, Sk=Sk)
    assert diagnosis._simplest(e, problem) == expected


def test_tiles_without_block_sizes() -> None:
    e = dataclasses.replace(examined(lambda *given: None), tile=Tile(THREADS=128))
    assert (e.M, e.N) == (64, 64)


def probes(problem: Problem, M: int = 32, N: int = 16, **how: str) -> list[tuple[Any, ...]]:
    """(condition, kind, B, H, Hk, Sq, Sk, inputs, layout) of the problems that differ from the simplest one."""
    e = dataclasses.replace(examined(lambda *given: None), tile=Tile(BLOCK_M=M, BLOCK_N=N))
    found = diagnosis._variations(e, Case("planted", problem, **how), diagnosis._simplest(e, problem))
    return [
        (x.condition, x.kind, p.B, p.H, p.Hk, p.Sq, p.Sk, x.case.inputs, x.case.layout)
        for x in found
        if (p := x.case.problem)
    ]


def test_each_property_of_the_failing_case_is_tried() -> None:
    """Alone, with as few tiles as possible; then the case itself with one head."""
    problem = Problem(3, 4, 70, 90, 16, Hk=2, dtype="float16", causal="bottom-right")
    as_usual = ("normal", "bhsd")
    assert probes(problem, layout="bshd", inputs="large") == [
        ("correct with whole tiles, wrong if the last key tile is partial", "", 1, 1, 1, 64, 55, *as_usual),
        ("correct with whole tiles, wrong if the last query tile is partial", "", 1, 1, 1, 47, 64, *as_usual),
        ("correct with whole tiles, wrong with other lengths of queries and keys", "", 1, 1, 1, 64, 80, *as_usual),
        ("correct with more keys than queries, wrong with fewer", "", 1, 1, 1, 128, 64, *as_usual),
        ("correct with one head, wrong with two", "heads", 1, 2, 2, 32, 16, *as_usual),
        ("correct with one batch entry, wrong with two", "heads", 2, 1, 1, 32, 16, *as_usual),
        ("wrong only if query heads share key/value heads", "heads", 1, 4, 2, 32, 16, *as_usual),
        ("correct with contiguous tensors, wrong with other strides", "strides", 2, 2, 2, 32, 16, "normal", "bshd"),
        ("correct with small scores, wrong with large ones", "inputs", 1, 1, 1, 96, 96, "large", "bhsd"),
        ("correct with whole tiles, wrong with 70 queries and 90 keys", "inputs", 1, 1, 1, 70, 90, "large", "bhsd"),
    ]


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ((1, 1, 64, 64), 1),
        ((1, 1, 64, 512), 3),
        ((1, 1, 512, 512), 1),
        ((1, 1, 544, 544), 0),  # too large to be run itself
        ((1, 1, 64, 528), 2),
        ((1, 1, 64, 48), 4),  # fewer keys than the simplest problem: as with a partial tile
        ((1, 2, 64, 64), 2),
        ((2, 1, 64, 64), 2),
    ],
)
def test_only_properties_of_the_failing_case_are_tried(sizes: tuple[int, ...], count: int) -> None:
    assert len(probes(Problem(*sizes, 16, dtype="float16"))) == count


@pytest.mark.parametrize(("M", "N", "sizes"), [(16, 32, (96, 96)), (64, 40, (128, 160)), (20, 16, (100, 96))])
def test_problems_with_special_inputs_have_their_rows(M: int, N: int, sizes: tuple[int, int]) -> None:
    """NaN and infinities are in rows before row 96; the tiles are whole."""
    (probe, _) = probes(Problem(1, 1, 2 * M, 2 * M, 16, dtype="float16"), M, N, inputs="inf")[-2:]
    assert probe[5:8] == (*sizes, "inf")
    assert probe[0] == "wrong with infinities in the inputs"


def test_strides_of_one_batch_entry() -> None:
    (found,) = [probe[2:] for probe in probes(SHORT, layout="offset") if probe[1] == "strides"]
    assert found == (1, 2, 2, 32, 16, "normal", "offset")


def test_inputs_without_a_name_of_their_own() -> None:
    assert "wrong with inputs 'ramp_v'" in [probe[0] for probe in probes(SHORT, inputs="ramp_v")]


@pytest.mark.parametrize("other", [{"Dv": 8}, {"softcap": 2.0}, {"page_size": 16, "Sk": 112}, {"dtype": "float8_e4m3"},
                                   {"lengths": ((5, 7),), "B": 0, "Sq": 0, "Sk": 0}])  # fmt: skip
def test_only_plain_problems_are_examined(other: dict[str, Any]) -> None:
    kernel = registry.get("fwd_minimal")
    assert diagnosis.supported(kernel, PLAIN)
    assert not diagnosis.supported(kernel, dataclasses.replace(PLAIN, **other))


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, ""),
        ({"places": ("a.cu:3",), "on": "B1"}, ""),
        ({"cause": "a cause"}, "a cause"),
        ({"condition": "if partial", "on": "B1"}, "if partial; found on B1"),
        (
            {"cause": "a cause", "condition": "if partial", "places": ("a.cu:3", "a.cu:5"), "on": "B1"},
            "a cause; if partial; found on B1; look at a.cu:3, a.cu:5",
        ),
    ],
)
def test_a_diagnosis_as_text(parts: dict[str, Any], text: str) -> None:
    assert str(diagnosis.Diagnosis(**parts)) == text


def test_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to two lines of the source; none without a cause."""
    monkeypatch.setattr(places, "_changed_lines", lambda folder: [])
    e = examined(lambda *given: None)
    lines = e.kernel.source.read_text().splitlines()
    found = e.said("a cause", "a condition", r"\balpha\b")
    assert (found.cause, found.condition, found.on) == ("a cause", "a condition", "")
    numbers = [n for n, line in enumerate(lines, 1) if "alpha" in line.partition("//")[0]]
    assert found.places == tuple(f"fwd_minimal.cu:{n}" for n in numbers[:2])
    assert e.said("", "a condition", r"\balpha\b").places == ()
    assert e.said("a cause", "", "").places == ()


def test_a_launch_has_the_given_memory_and_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def launch(kernel: Kernel, tile: Tile, problem: Problem, inputs: Tensors, device: Any, **how: Any) -> Any:
        given.append(how)
        return type("", (), {"outputs": {}})

    monkeypatch.setattr(diagnosis.trial, "launch", launch)
    inputs = dict(zip("QKV", make_inputs(Case("x", SHORT)), strict=True))
    e = diagnosis._Examined(registry.get("fwd_minimal"), HOST, TILE, True, math.inf)
    e.launch(SHORT, inputs)
    e.launch(SHORT, inputs, fill=0)
    assert given == [{"fast": True, "fill": 0xFF}, {"fast": True, "fill": 0}]


@pytest.mark.parametrize(("name", "factor", "wrong"), [("O", 1, False), ("O", 2, True), ("LSE", 2, True)])
def test_outputs_of_a_wrong_case(name: str, factor: float, wrong: bool) -> None:
    def change(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        outputs[name] *= factor

    found = examined(change).wrong(Case("x", SHORT))
    assert (set(found) == {"O", "LSE"}) if wrong and found else found is None

    def without_lse(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        change(p, inputs, outputs)
        del outputs["LSE"]  # the kernel does not write it

    assert (examined(without_lse).wrong(Case("x", SHORT)) is not None) is (wrong and name == "O")


def test_a_probe_that_fails_leaves_the_result_without_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*given: Any, **how: Any) -> Any:
        raise UnsupportedProblem("no")

    monkeypatch.setattr(diagnosis.trial, "launch", launch)
    assert diagnosis.diagnose(registry.get("fwd_minimal"), Case("x", SHORT), HOST, TILE) == diagnosis.Diagnosis()


# ---- details of the causes


def planted(change: Callable[[Problem, Tensors, Tensors], None], problem: Problem = SHORT, **how: str) -> str:
    return diagnosed(change, problem, **how).cause


def test_not_a_number_that_depends_on_memory_is_not_unwritten() -> None:
    """NaN if the memory was NaN, and −1 if it was 0."""

    def change(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        outputs["O"][:, :, 20:] = np.nan if np.isnan(inputs["fill"][0]) else -1

    assert "not written" not in planted(change)


@pytest.mark.parametrize(
    ("rows", "text"),
    [([4], "4 to 4"), ([4, 5, 6], "4 to 6"), ([0, 1, 3], "0 to 1 and others"), ([2, 9, 10], "2 to 2 and others")],
)
def test_the_first_run_of_rows(rows: list[int], text: str) -> None:
    assert diagnosis._first_run(np.array(rows)) == text


def test_nan_in_two_heads_whose_strides_are_wrong() -> None:
    """Neither unwritten nor an input that is not finite: an address."""

    def change(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        if not inputs["Q"].flags.c_contiguous:
            outputs["O"][:, :, 3] = np.nan

    found = diagnosed(change, SHORT, layout="bshd")
    assert found.cause == "the address of a batch entry, head or row"
    assert found.condition == "correct with contiguous tensors, wrong with other strides"


@pytest.mark.parametrize("name", ["Q", "K", "V"])
@pytest.mark.parametrize(("inputs", "values"), [("nan", ("nan",) * 3), ("inf", ("", "inf", "-inf"))])
def test_an_input_that_reaches_a_row_that_does_not_see_it(name: str, inputs: str, values: tuple[str, ...]) -> None:
    """Row 2 of O gets it; rows and keys are those of the special values."""
    value = values["QKV".index(name)]

    def change(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        if not np.isfinite(inputs[name]).all():
            outputs["O"][:, :, 2] = np.nan

    if value:
        row = {"nan": {"Q": 3, "K": 60, "V": 80}, "inf": {"K": 50, "V": 90}}[inputs][name]
        said = planted(change, dataclasses.replace(SHORT, Sq=100, Sk=100, causal="bottom-right"), inputs=inputs)
        assert said == f"{value} in row {row} of {name} reaches row 2 of O, which does not see it"


def test_inputs_that_are_wrong_together_only() -> None:
    def change(p: Problem, inputs: Tensors, outputs: Tensors) -> None:
        if not any(np.isfinite(inputs[name]).all() for name in "QKV"):
            outputs["O"][:, :, 2] = 9

    said = planted(change, dataclasses.replace(SHORT, Sq=100, Sk=100), inputs="nan")
    assert said == "NaN or infinity reaches rows that do not see it, or does not reach rows that do"


@pytest.mark.parametrize("inputs", ["normal", "large", "raised", "rising"])
def test_inputs_without_scores(inputs: str) -> None:
    found = diagnosis._zero_scores(Case("x", SHORT, inputs=inputs))
    assert found
    assert [*found] == ["Q", "K", "V"]
    assert not found["K"].any()
    assert found["Q"].any()


@pytest.mark.parametrize("inputs", ["nan", "inf", "ramp_v"])
def test_inputs_whose_scores_cannot_be_zero(inputs: str) -> None:
    assert diagnosis._zero_scores(Case("x", SHORT, inputs=inputs)) is None


def test_an_element_is_wrong_from_two_percent_on() -> None:
    """Of the largest output."""
    case = Case("x", SHORT)
    out, tolerance = diagnosis._reference(case)
    expected, _ = attention(*make_inputs(case))
    np.testing.assert_array_equal(out, expected)
    assert tolerance == pytest.approx(0.02 * abs(expected).max())


def columns(change: Callable[[np.ndarray, float], None]) -> str:
    """What is said about the columns of O, after a change that knows the tolerance."""
    out, tolerance = diagnosis._reference(Case("x", SHORT))
    change(out[0, 0], tolerance)
    return diagnosis._columns(Case("x", SHORT), {"O": out})


@pytest.mark.parametrize(
    ("rows", "error", "others", "named"),
    [
        (10, 1.01, 0, True),  # more than 3 of 10 rows
        (9, 1.01, 0, False),
        (32, 0.99, 0, False),
        (10, 1.01, 0.24, True),  # the other columns are correct to a quarter of the tolerance
        (10, 1.01, 0.26, False),
    ],
)
def test_which_columns_are_wrong(rows: int, error: float, others: float, named: bool) -> None:
    def change(O: np.ndarray, tolerance: float) -> None:
        O[:, :5] += others * tolerance
        O[:rows, 5:7] += error * tolerance

    said = "only columns of O are wrong, the first is 5 (2 of 16): P V or their store"
    assert columns(change) == (said if named else "")


def test_columns_that_are_all_wrong_or_not_finite() -> None:
    def all_wrong(O: np.ndarray, tolerance: float) -> None:
        O += 9

    def not_finite(O: np.ndarray, tolerance: float) -> None:
        O[:, 5] = np.nan

    assert columns(all_wrong) == ""
    assert columns(not_finite) == ""


@pytest.mark.parametrize(("share", "named"), [(0.985, True), (0.975, False)])
def test_a_tensor_in_place_of_another_explains_nearly_all_elements(share: float, named: bool) -> None:
    case = Case("x", dataclasses.replace(SHORT, Sq=48))
    q, k, _ = make_inputs(case)
    out, _ = attention(q, k, k)
    out.reshape(-1)[round(share * out.size) :] += 9
    assert diagnosis._wrong_tensor(case, {"O": out}) == ("another tensor is read: K is read as V" if named else "")
    two = dataclasses.replace(case, problem=dataclasses.replace(SHORT, H=2, Hk=2))
    q, k, _ = make_inputs(two)
    assert diagnosis._wrong_tensor(two, {"O": attention(q, k, k)[0]}) == ""


@pytest.mark.parametrize(("share", "named"), [(0.96, True), (0.94, False)])
def test_another_head_explains_nearly_all_elements(share: float, named: bool) -> None:
    case = Case("x", HEADS)
    q, k, v = make_inputs(case)
    correct, _ = attention(q, k, v)
    for wrong, said in (
        (
            attention(q[1:, 2:3], k[:1, 1:], v[1:, 1:])[0][0, 0],
            "query head 2 of batch entry 1 reads K of key/value head 1",
        ),
        (
            attention(q[:1, 3:], k[1:, 1:], v[1:, 1:])[0][0, 0],
            "head 2 of batch entry 1 reads Q of head 3, batch entry 0",
        ),
        (correct[0, 1], "O of head 2, batch entry 1 is that of head 1, batch entry 0"),
    ):
        out = correct.copy()
        out[1, 2] = wrong
        out[1, 2].reshape(-1)[round(share * wrong.size) :] += 9
        found = diagnosis._wrong_head(case, {"O": out})
        assert found.startswith(said) if named else found == ""


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


@pytest.mark.parametrize("causal", [False, "bottom-right"])
@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("fwd_block2d", "__syncthreads();  // every row has used the previous V", "// every row has used the",
         "O depends on the order of threads: a race, such as a missing barrier"),
        ("fwd_mma", "V_rows, j * BLOCK_N", "V_rows, (j + 1) * BLOCK_N",
         "P of key tile 0 multiplies the values of key tile 1"),
    ],
)  # fmt: skip
def test_faults_that_hidden_keys_would_conceal(
    name: str, old: str, new: str, said: str, causal: Any, tmp_path: Path
) -> None:
    """A fault that does not depend on the mask is examined without one."""
    kernel = faulty(tmp_path, old, new, name)
    found = cause(kernel, dataclasses.replace(PLAIN, Sq=256, Sk=256, causal=causal))
    assert said in found
    assert "causal" not in found


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
