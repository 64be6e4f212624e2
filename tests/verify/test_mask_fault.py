"""Which wrong causal mask explains an error."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from sandbox.core.normalise import Causal
from sandbox.core.problem import Problem
from sandbox.reference import attention
from sandbox.verify import mask_fault

P = Problem(2, 4, 16, 24, 8, Hk=2, dtype="float16", causal="bottom-right")
BOUND = 1e-3
ONE_MORE = "each row sees one key too many, the one after its last"
ONE_LESS = "each row misses its last key"
ALL = "rows see every key, as without a causal mask"


def drawn(p: Problem) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"Q": (p.B, p.H, p.Sq, p.D), "K": (p.B, p.Hk, p.Sk, p.D), "V": (p.B, p.Hk, p.Sk, p.D)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def explained(
    p: Problem, shift: int | None, name: str = "O", more_wrong: int = 0, inputs: dict[str, Any] | None = None,
    **options: Any,
) -> str:  # fmt: skip
    """What is said about head (1, 2) if the mask is `shift` keys off; `more_wrong` rows are wrong in another way."""
    given = drawn(p) | (inputs or {})
    q, k, v = (given[x] for x in "QKV")
    rows, keys = np.arange(p.Sq)[:, None], np.arange(p.Sk)
    lengths = given.get("key_lengths", np.full(p.B, p.Sk))
    last = rows + (0 if p.causal == "top-left" else lengths[:, None, None, None] - p.Sq)
    seen = np.ones((p.B, 1, p.Sq, p.Sk), bool) if shift is None else np.broadcast_to(
        keys <= last + shift, (p.B, 1, p.Sq, p.Sk)
    )  # fmt: skip
    own = options.pop("mask", True)
    if "key_lengths" in given:
        options["key_lengths"] = lengths
    got = attention(q, k, v, scale=p.scale, mask=seen & own, **options)[name == "LSE"]
    right = attention(q, k, v, scale=p.scale, causal=p.causal, **options, **({} if own is True else {"mask": own}))
    ref = right[name == "LSE"]
    got[1, 2, :more_wrong] += 1
    bad = ~(abs(got - ref) <= BOUND)
    assert bad[1, 2].any()
    with np.errstate(all="ignore"):
        return mask_fault.explain(name, got, bad, (1, 2), BOUND, p, given)


@pytest.mark.parametrize("name", ["O", "LSE"])
@pytest.mark.parametrize(
    ("causal", "shift", "said"),
    [
        ("bottom-right", 1, ONE_MORE),
        ("bottom-right", -1, ONE_LESS),
        ("bottom-right", None, ALL),
        ("bottom-right", -8, "the mask is aligned top-left"),
        ("bottom-right", 2, ""),
        ("bottom-right", 8, ""),
        ("top-left", 1, ONE_MORE),
        ("top-left", -1, ONE_LESS),
        ("top-left", None, ALL),
        ("top-left", 8, "the mask is aligned bottom-right"),
        ("top-left", -8, ""),
    ],
)
def test_which_mask(causal: Causal, shift: int | None, said: str, name: str) -> None:
    assert explained(dataclasses.replace(P, causal=causal), shift, name) == said


@pytest.mark.parametrize(("more_wrong", "said"), [(4, ONE_MORE), (5, "")])
def test_three_of_four_rows_must_match(more_wrong: int, said: str) -> None:
    """Of 16 wrong rows, here all but the last."""
    p = dataclasses.replace(P, Sq=17, Sk=25)
    assert explained(p, 1, more_wrong=more_wrong) == said


def test_rows_of_a_long_problem_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen of the wrong ones, with the first and the last."""
    rows: list[int] = []
    monkeypatch.setattr(mask_fault, "_fits", lambda *given: rows.append(given[4]) or True)
    p = dataclasses.replace(P, Sq=100, Sk=108)
    assert explained(p, 1) == "the mask is aligned top-left"
    assert (len(rows), rows[0], rows[-1]) == (16, 0, 98)  # the last row sees all keys


@pytest.mark.parametrize("causal", ["bottom-right", "top-left"])
def test_key_lengths(causal: Causal) -> None:
    p = dataclasses.replace(P, causal=causal, key_lengths=True)
    inputs = {"key_lengths": np.array([24, 19], np.int32)}
    assert explained(p, 1, inputs=inputs) == ONE_MORE
    assert explained(p, -1, inputs=inputs) == ONE_LESS


def test_a_mask_of_the_user() -> None:
    mask = np.random.default_rng(1).random((1, 1, 16, 24)) < 0.7
    p = dataclasses.replace(P, mask=mask.shape)
    assert explained(p, 1, inputs={"mask": mask}, mask=mask) == ONE_MORE


def test_options_that_depend_on_the_diagonal() -> None:
    """Candidates are computed with that of "bottom-right"."""
    for causal, said in (("bottom-right", ONE_MORE), ("top-left", "")):
        p = dataclasses.replace(P, causal=causal, alibi=(4,))
        slopes = np.full(4, 0.01)
        assert explained(p, 1, inputs={"slopes": slopes}, alibi=slopes) == said


@pytest.mark.parametrize("other", [{"causal": False}, {"page_size": 8, "key_lengths": True},
                                   {"B": 0, "Sq": 0, "Sk": 0, "lengths": ((16, 24),) * 2}])  # fmt: skip
def test_problems_that_are_not_explained(other: dict[str, Any]) -> None:
    p, given = dataclasses.replace(P, **other), drawn(P)
    wrong = np.ones((2, 4, 16, 8), bool)
    assert mask_fault.explain("O", np.zeros(wrong.shape), wrong, (1, 2), BOUND, p, given) == ""
    assert mask_fault.explain("dQ", np.zeros(wrong.shape), wrong, (1, 2), BOUND, P, given) == ""


def test_a_bound_for_each_element() -> None:
    """That of the row counts."""
    given = drawn(P)
    seen = np.arange(24) <= np.arange(16)[:, None] + 9
    got = attention(given["Q"], given["K"], given["V"], mask=seen)[1]
    bound = np.full((2, 4, 16), BOUND)
    bad = np.ones(got.shape, bool)
    assert mask_fault.explain("LSE", got, bad, (1, 2), bound, P, given) == ONE_MORE
    bound[1, 2, :5] = -1
    assert mask_fault.explain("LSE", got, bad, (1, 2), bound, P, given) == ""
    bound[1, 2, :5], bound[0, 2] = BOUND, -1
    assert mask_fault.explain("LSE", got, bad, (1, 2), bound, P, given) == ONE_MORE
