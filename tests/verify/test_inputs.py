"""Kinds of inputs, memory layouts, and the problems that commands run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from sandbox.core import registry
from sandbox.core.errors import SpecError
from sandbox.core.problem import Problem
from sandbox.verify import attention, cases, pages, sequences
from sandbox.verify.cases import Case
from sandbox.verify.suite import suite_of

P = Problem(1, 2, 97, 97, 8, dtype="float32")


def inputs(kind: str, p: Problem = P, layout: str = "bhsd") -> dict[str, np.ndarray]:
    return dict(zip("QKV", cases.make_inputs(Case("x", p, kind, layout)), strict=True))


@pytest.mark.parametrize(
    ("kind", "not_finite"),
    [
        ("normal", {}),
        ("nan", {"Q": (3, None, "nan"), "K": (60, 5, "nan"), "V": (80, None, "nan")}),
        ("nan_query", {"Q": (3, None, "nan")}),
        ("inf", {"K": (50, 0, "inf"), "V": (90, None, "-inf")}),
        ("inf_value", {"V": (60, None, "inf")}),
    ],
)
def test_which_elements_are_not_finite(kind: str, not_finite: dict[str, tuple[int, int | None, str]]) -> None:
    for name, x in inputs(kind).items():
        expected = np.zeros(x.shape, bool)
        if name in not_finite:
            row, column, value = not_finite[name]
            expected[:, :, row, slice(None) if column is None else column] = True
            assert {str(number) for number in x[expected]} == {value}
        np.testing.assert_array_equal(~np.isfinite(x), expected)


def test_what_inputs_isolate() -> None:
    usual = inputs("normal")
    assert (inputs("ones_v")["V"] == 1).all()
    assert not inputs("zero_k")["K"].any()
    assert (inputs("ramp_v")["V"] == np.arange(8)).all()
    for name in "QK":
        x = inputs("identity")[name][0, 1]
        assert (x == 4 * np.eye(8)[np.arange(97) % 8]).all()
    assert all({*np.unique(x)} == {-2, -1, 0, 1, 2} for x in inputs("integers").values())
    for kind, (q, k, v), more in (("offset", (1, 1, 1), 0.5), ("large", (5, 3, 3), 0.0)):
        for (name, x), factor in zip(inputs(kind).items(), (q, k, v), strict=True):
            np.testing.assert_allclose(x, usual[name] * factor + more, rtol=1e-6)
    raised, rising, minus_inf = (inputs(kind) for kind in ("raised", "rising", "minus_inf"))
    assert (raised["Q"][..., 0] * raised["K"][..., 0] == 900).all()
    assert (raised["Q"][..., 1:] == usual["Q"][..., 1:]).all()
    scores = rising["Q"] @ rising["K"].swapaxes(2, 3)
    assert (np.diff(scores, axis=3) > 0).all()
    assert (scores[..., 0].min(), scores[..., -1].max()) == (-32, 32)
    assert (minus_inf["Q"][..., 0] == 1).all()
    assert np.isneginf(minus_inf["K"][..., 0]).all()


@pytest.mark.parametrize(
    ("layout", "dtype", "strides", "aligned"),
    [
        ("bhsd", "float16", (2 * 5 * 8, 5 * 8, 8, 1), True),
        ("bshd", "float16", (2 * 5 * 8, 8, 16, 1), True),
        ("offset", "float16", (3 * 8 * 24, 8 * 24, 24, 1), True),
        ("offset", "float8_e4m3", (3 * 8 * 40, 8 * 40, 40, 1), False),
        ("unaligned", "float16", (2 * 6 * 13, 6 * 13, 13, 1), False),
        ("broadcast", "float16", (0, 5 * 8, 8, 1), True),
    ],
)
def test_memory_layouts(layout: str, dtype: str, strides: tuple[int, ...], aligned: bool) -> None:
    """In elements; around a slice is NaN."""
    p = Problem(3, 2, 5, 5, 8, dtype=dtype)
    usual, x = inputs("normal", p)["Q"], inputs("normal", p, layout)["Q"]
    assert tuple(n // x.itemsize for n in x.strides) == strides
    np.testing.assert_array_equal(
        x.astype(float), (usual[:1] if layout == "broadcast" else usual).astype(float) + 0 * x
    )
    assert all(n % 16 == 0 for n in x.strides[:3]) is aligned or layout == "bshd"
    if layout in ("offset", "unaligned"):
        around = x.base.astype(np.float32) if x.base is not None else np.zeros(1)
        assert np.isnan(around).sum() == around.size - x.size


def test_unknown_inputs() -> None:
    for how in ({"inputs": "other"}, {"layout": "other"}):
        with pytest.raises(
            SpecError, match=r"are not supported: choose inputs from normal, .*, and a layout from bhsd, "
        ):
            cases.make_inputs(Case("x", P, **how))  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "value"), [("nan", "nan"), ("nan_query", "nan"), ("inf", "inf"), ("normal", "")])
def test_the_gradient_that_is_not_finite(kind: str, value: str) -> None:
    found = cases.inputs_of("backward", Case("x", P, kind))
    expected = np.zeros(found["dO"].shape, bool)
    expected[:, :, 7] = bool(value)
    np.testing.assert_array_equal(~np.isfinite(found["dO"]), expected)
    assert {str(x) for x in found["dO"][expected]} == ({value} if value else set())


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_inputs_of_a_backward(layout: str) -> None:
    """O is that of these inputs, also if batch entries with options differ; dO and O have the layout."""
    p = dataclasses.replace(P, B=2, dtype="float16", causal="bottom-right")
    found = cases.inputs_of("backward", Case("x", p, "dlse", layout))
    assert [*found] == ["Q", "K", "V", "dO", "O", "LSE", "dLSE"]
    assert found["dO"].strides == found["O"].strides == found["Q"].strides
    assert (found["LSE"].dtype, found["dLSE"].dtype) == (np.float32, np.float32)
    assert found["dLSE"].std() > 0.5
    assert [*cases.inputs_of("forward", Case("x", p, "dlse", layout))] == ["Q", "K", "V"]
    lengths = dataclasses.replace(p, key_lengths=True)
    found = cases.inputs_of("backward", Case("x", lengths, layout=layout))
    assert found["key_lengths"].tolist()[1:] == [0]
    assert not found["O"][1].any()
    assert found["O"][0].any()


# ---- the problems of commands


def test_named_cases() -> None:
    """On the CPU backend with a sixth of the heads and half of the length."""
    large, small = (cases.named_cases(small=which) for which in (False, True))
    assert [(c.name, str(c.problem), c.layout) for c in large] == [
        ("gpt2", "B1 H12 S1024 D64 float16", "bhsd"), ("causal", "B1 H12 S1024 D64 float16 causal", "bhsd"),
        ("cross", "B2 H8 S1000x77 D40 float32", "bhsd"), ("groups", "B2 H12/6 S512 D128 bfloat16 causal", "bshd"),
    ]  # fmt: skip
    assert [(c.problem.H, c.problem.Hk, c.problem.Sq) for c in small] == [
        (2, 2, 512),
        (2, 2, 512),
        (1, 1, 1000),
        (2, 1, 512),
    ]


@pytest.mark.parametrize(("small", "sizes"), [(True, (2, 16, 1, 320)), (False, (16, 128, 1, 4096))])
def test_latent_cases(small: bool, sizes: tuple[int, ...]) -> None:
    one, two = (case.problem for case in cases.latent_cases(small))
    assert (one.B, one.H, one.Hk, one.Sk, one.D, one.Dv) == (*sizes, 576, 512)
    assert (one.Sq, one.page_size, one.causal, one.latent) == (1, 0, False, True)
    assert (two.Sq, two.page_size, two.causal, two.Sk) == (2, 64, "bottom-right", sizes[3])


def test_shapes_of_outputs() -> None:
    p = Problem(2, 4, 5, 7, 16, Hk=2, Dv=8, dtype="float16", bias=(1, 4, 5, 7), sink=True)
    assert attention.outputs_of("forward", p) == {"O": ((2, 4, 5, 8), "float16"), "LSE": ((2, 4, 5), "float32")}
    assert attention.outputs_of("preprocess", p) == {"delta": ((2, 4, 5), "float32")}
    assert attention.outputs_of("backward", p) == {
        "dQ": ((2, 4, 5, 16), "float16"), "dK": ((2, 2, 7, 16), "float16"), "dV": ((2, 2, 7, 8), "float16"),
        "dbias": ((1, 4, 5, 7), "float16"), "dsink": ((4,), "float32"),
    }  # fmt: skip
    plain = dataclasses.replace(p, bias=(), sink=False)
    assert [*attention.outputs_of("backward", plain)] == ["dQ", "dK", "dV"]


def test_keys_in_pages_and_back() -> None:
    """Rows beyond a sequence's length are NaN in its pages and 0 when gathered; unused entries are invalid."""
    p = Problem(2, 2, 3, 32, 8, dtype="float32", page_size=8, key_lengths=True)
    p = dataclasses.replace(p, pages=p.pages + 2)
    x = {name: np.random.default_rng(0).standard_normal((2, 2, 32, 8)).astype(np.float32) for name in "KV"}
    given: dict[str, Any] = {**x, "Q": np.zeros(1), "key_lengths": np.array([21, 8], np.int32)}
    found = pages.in_pages(p, given)
    assert found["K"].shape == (10, 2, 8, 8)
    table = found["block_table"]
    assert (table[0, 3], table[1, 1:].tolist()) == (-1, [2**31 - 1] * 3)
    used = [*table[0, :3], table[1, 0]]
    assert len({*used}) == 4
    assert max(used) < 10
    assert np.isnan(found["K"][used[2], :, 5:]).all()
    assert np.isfinite(found["K"][used[2], :, :5]).all()
    back = pages.gathered(p, {**given, **found})
    assert "block_table" not in back
    for name in "KV":
        np.testing.assert_array_equal(back[name][0, :, :21], x[name][0, :, :21])
        np.testing.assert_array_equal(back[name][1, :, :8], x[name][1, :, :8])
        assert not back[name][0, :, 21:].any()
        assert not back[name][1, :, 8:].any()


def test_sequences_of_a_ragged_batch() -> None:
    p = Problem(0, 2, 0, 0, 8, lengths=((5, 7), (0, 3), (4, 2)))
    found = [*sequences.sequences_of(p)]
    assert [(s.b, s.problem.Sq, s.problem.Sk) for s in found] == [(0, 5, 7), (1, 0, 3), (2, 4, 2)]
    assert [s.queries for s in found] == [slice(0, 5), slice(5, 5), slice(5, 9)]
    assert [s.keys for s in found] == [slice(0, 7), slice(7, 10), slice(10, 12)]
    offsets = sequences.offsets_of(p)
    assert {name: x.tolist() for name, x in offsets.items()} == {
        "cu_seqlens_q": [0, 5, 5, 9], "cu_seqlens_k": [0, 7, 10, 12]
    }  # fmt: skip
    in_pages = Problem(0, 2, 0, 0, 8, lengths=((5, 7), (0, 3)), page_size=4)
    assert [*sequences.offsets_of(in_pages)] == ["cu_seqlens_q"]
    assert [(s.keys, s.key_entries) for s in sequences.sequences_of(in_pages)] == [
        (slice(7), slice(0, 1)), (slice(3), slice(1, 2))
    ]  # fmt: skip
    with pytest.raises(SpecError, match="without lengths is not supported"):
        list(sequences.sequences_of(Problem(2, 2, 0, 0, 8, ragged=(9, 9))))


def test_results_of_sequences_are_put_together() -> None:
    """Rows in their places; gradients of options are sums over the sequences."""
    p = Problem(0, 2, 0, 0, 8, lengths=((2, 3), (4, 1)), sink=True)
    rng = np.random.default_rng(0)
    given = {"Q": rng.standard_normal((1, 2, 6, 8)), "K": rng.standard_normal((1, 2, 4, 8)), "sink": np.ones(2)}
    numbers: list[int] = []

    def compute(own: Any, options: Any) -> dict[str, np.ndarray]:
        numbers.append(options["part"].b)
        return {"dQ": 2 * own["Q"], "dK": 3 * own["K"], "dsink": np.full(2, own["Q"].shape[2]), "LSE": own["Q"][..., 0]}

    found = sequences.by_sequence(p, {**given, **sequences.offsets_of(p)}, compute)
    np.testing.assert_array_equal(found["dQ"], 2 * given["Q"])
    np.testing.assert_array_equal(found["dK"], 3 * given["K"])
    np.testing.assert_array_equal(found["LSE"], given["Q"][..., 0])
    assert found["dsink"].tolist() == [6, 6]
    assert numbers == [0, 1]


def test_layouts_of_a_problem() -> None:
    """What kernels depend on: alignment and strides."""
    suite = suite_of(registry.get("fwd_minimal"))
    p = Problem(2, 2, 5, 5, 8, dtype="float16")
    assert suite.laid_out(p, inputs("normal", p)).alignment == 16
    assert suite.laid_out(p, inputs("normal", p, "unaligned")).alignment == 2
    mixed = {**inputs("normal", p), "V": inputs("normal", p, "unaligned")["V"]}
    assert suite.laid_out(p, mixed).alignment == 2
