"""The reference on sampled rows: what is sampled, and which errors are found."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from sandbox.core.problem import Problem
from sandbox.reference import attention, attention_backward, lse_bound
from sandbox.verify import sampled
from sandbox.verify.sampled import Expected, ExpectedGradients, ExpectedSequences, Verdict

P = Problem(2, 4, 100, 100, 8, Hk=2, dtype="float16", causal="bottom-right")


def drawn(p: Problem = P) -> tuple[torch.Tensor, ...]:
    """q, k, v and dout."""
    rng = np.random.default_rng(0)
    shapes = ((p.H, p.Sq, p.D), (p.Hk, p.Sk, p.D), (p.Hk, p.Sk, p.Dv), (p.H, p.Sq, p.Dv))
    return tuple(torch.from_numpy(rng.standard_normal((p.B, *shape))).half() for shape in shapes)


def correct(p: Problem = P) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attention(*(x.float().numpy() for x in drawn(p)[:3]), causal=p.causal, scale=p.scale)
    return torch.from_numpy(out).half(), torch.from_numpy(lse).float()


# ---- the sample


@pytest.mark.parametrize(("n", "most"), [(0, 4), (1, 4), (4, 4), (5, 4), (100, 4), (100, 2), (3, 3)])
def test_numbers_with_the_first_and_the_last(n: int, most: int) -> None:
    found = sampled.spread(np.random.default_rng(0), n, most)
    assert len(found) == len({*found}) == min(n, most)
    assert found == sorted(found)
    assert found[:1] + found[-1:] == ([0, n - 1] if n else [])
    assert {*sampled.spread(np.random.default_rng(0), n, n - 1 if n > 3 else n)} <= {*range(n)}


def test_every_number_may_be_drawn() -> None:
    rng = np.random.default_rng(0)
    assert {i for _ in range(99) for i in sampled.spread(rng, 6, 3)} == {*range(6)}


@pytest.mark.parametrize(("Sq", "strips"), [(1, 1), (80, 1), (81, 5), (300, 5)])
def test_sampled_rows_and_heads(Sq: int, strips: int) -> None:
    """All rows if they are few, otherwise five strips of 16 rows."""
    p = dataclasses.replace(P, Sq=Sq)
    expected = sampled.expect(p, *drawn(p)[:3])
    found = [(strip.start, strip.stop) for strip in expected.strips]
    assert len(found) == strips
    assert (found[0][0], found[-1][1]) == (0, Sq)
    assert all(stop - start == (16 if strips > 1 else Sq) for start, stop in found)
    assert len(expected.heads) == 4
    assert (expected.heads[0], expected.heads[-1]) == ((0, 0), (1, 3))
    assert {strip.out.shape for strip in expected.strips} == {(4, 1, found[0][1], 8)}


def test_another_seed_is_another_sample() -> None:
    q, k, v, _ = drawn()
    first, again, other = (sampled.expect(P, q, k, v, seed) for seed in (0, 0, 3))
    assert first.heads == again.heads
    assert (first.heads, [s.start for s in first.strips]) != (other.heads, [s.start for s in other.strips])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_bound_of_a_strip(dtype: str) -> None:
    """That of the strip alone; for float32 it allows the rounding of sums."""
    p = dataclasses.replace(P, dtype=dtype)
    q, k, v, _ = (x.float() for x in drawn(p))
    expected = sampled.expect(p, q, k, v)
    bounds = [strip.bound for strip in expected.strips]
    if dtype == "float16":
        assert bounds[0] > 1.5 * min(bounds)  # the first rows see few keys, and have large outputs
    assert all(0 < bound < {"float16": 5e-3, "float32": 5e-6}[dtype] for bound in bounds)
    out, lse = attention(*(x.numpy() for x in (q, k, v)), causal=p.causal)
    assert sampled.compare(expected, torch.from_numpy(out).float(), torch.from_numpy(lse).float()).message == ""


# ---- the comparison


@pytest.fixture(scope="module")
def expected() -> Expected:
    return sampled.expect(P, *drawn()[:3])


def test_the_correct_result(expected: Expected) -> None:
    out, lse = correct()
    found = sampled.compare(expected, out, lse)
    assert found.message == ""
    assert 0 < found.error <= found.bound
    assert sampled.compare(expected, out) == found


def test_the_strip_with_the_largest_ratio(expected: Expected) -> None:
    """Not the one with the largest error."""
    out, lse = correct()
    bounds = [strip.bound for strip in expected.strips]
    last = len(bounds) - 1
    for strip, times in ((0, 1.5), (last, 2.5)):
        b, h = expected.heads[1]
        out = out.double()
        out[b, h, expected.strips[strip].start + 3, 2] = expected.strips[strip].out[1, 0, 3, 2] + times * bounds[strip]
    found = sampled.compare(expected, out, lse)
    assert found.bound == bounds[last]
    assert found.error == pytest.approx(2.5 * bounds[last], rel=1e-4)
    assert found.message == f"error {found.error:.1e} against a bound of {found.bound:.1e}"


@pytest.mark.parametrize("name", ["O", "LSE"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_elements_that_are_not_finite(name: str, value: float, expected: Expected) -> None:
    """Also in rows that are not sampled; of LSE only NaN, because −inf may be right."""
    out, lse = correct()
    rows = {row for strip in expected.strips for row in range(strip.start, strip.stop)}
    row = next(row for row in range(P.Sq) if row not in rows)
    (out if name == "O" else lse)[0, 1, row] = value
    found = sampled.compare(expected, out, lse)
    wrong = name == "O" or np.isnan(value)
    assert found.message == ("an element is not finite, or was not written" if wrong else "")
    assert np.isinf(found.error) == wrong


@pytest.mark.parametrize(("times", "wrong"), [(0.9, False), (1.1, True), (-1.1, True)])
def test_lse_has_a_bound_of_its_own(times: float, wrong: bool, expected: Expected) -> None:
    out, lse = correct()
    (b, h), strip = expected.heads[2], expected.strips[1]
    exact = strip.lse[2, 0, 5]
    bound = float(lse_bound(exact, "float16"))
    lse[b, h, strip.start + 5] = float(exact + times * bound)
    found = sampled.compare(expected, out, lse)
    assert found.error <= found.bound
    said, _, excess = found.message.rpartition(" ")
    assert said == ("LSE exceeds its bound by" if wrong else "")
    assert not wrong or float(excess) == pytest.approx(0.1 * bound, rel=0.05)


def test_outputs_are_poisoned_before_the_call(expected: Expected) -> None:
    calls: list[str] = []

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        calls.append("launch")
        return correct()

    assert expected.check(lambda: calls.append("poison"), launch).message == ""
    assert calls == ["poison", "launch"]


# ---- gradients


def gradients(dout: torch.Tensor, p: Problem = P) -> tuple[torch.Tensor, ...]:
    q, k, v, _ = (x.float().numpy() for x in drawn(p))
    return tuple(torch.from_numpy(x) for x in attention_backward(dout.float().numpy(), q, k, v, causal=p.causal))


@pytest.mark.parametrize(
    ("starts", "strips"),
    [([0], [(0, 16)]), ([0, 15], [(0, 16), (16, 31)]), ([0, 16], [(0, 16), (16, 32)]), ([], []),
     ([0, 15, 16, 31, 40], [(0, 16), (16, 31), (31, 32), (32, 47), (47, 50)])],
)  # fmt: skip
def test_strips_without_overlap(starts: list[int], strips: list[tuple[int, int]]) -> None:
    assert sampled._without_overlap(starts, 50) == strips


@pytest.mark.parametrize("Sq", [1, 16, 17, 20, 32, 100])
def test_sampled_rows_of_gradients(Sq: int) -> None:
    """Each row once at most, always with the first and the last."""
    p = dataclasses.replace(P, Sq=Sq)
    found = sampled.expect_gradients(p, *drawn(p))
    heads = [(0, 0), (1, 3)]
    assert list(dict.fromkeys((b, h) for b, h, *_ in found.strips)) == heads
    for head in heads:
        strips = [(start, stop) for *at, start, stop in found.strips if (*at,) == head]
        assert strips[0][0] == 0
        assert strips[-1][1] == Sq
        assert all(stop <= start for (_, stop), (start, _) in pairwise(strips))
    assert {*found.sums} == {(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 1, 3), (1, 1, 1), (2, 1, 1)}


def test_the_sums_are_those_of_the_strips_alone() -> None:
    """dO is restored afterwards, also after an error."""
    *_, dout = inputs = drawn()
    before = dout.clone()
    found = sampled.expect_gradients(P, *inputs)
    seen: list[torch.Tensor] = []

    def launch() -> tuple[torch.Tensor, ...]:
        seen.append(dout.clone())
        return gradients(dout)

    assert found.check(lambda: None, launch).message == ""
    assert torch.equal(dout, before)
    whole, strips = seen
    assert torch.equal(whole, before)
    kept = torch.zeros_like(before, dtype=torch.bool)
    for b, h, start, stop in found.strips:
        kept[b, h, start:stop] = True
    assert torch.equal(strips, torch.where(kept, before, 0))
    for (which, b, head), sums in found.sums.items():
        np.testing.assert_allclose(sums.expected, gradients(strips)[which][b, head], atol=1e-9)

    def fails() -> tuple[torch.Tensor, ...]:
        if not torch.equal(dout, before):
            raise RuntimeError
        return gradients(dout)

    with pytest.raises(RuntimeError):
        found.check(lambda: None, fails)
    assert torch.equal(dout, before)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_wrong_gradient(which: int) -> None:
    """Twice the bound in one element, of the heads that are summed."""
    *_, dout = inputs = drawn()
    found = sampled.expect_gradients(P, *inputs)
    sums = found.sums[which, 1, 3 if which == 0 else 1]
    bound = sums.verdict("", sums.expected, "float16", P.D).bound

    def launch() -> tuple[torch.Tensor, ...]:
        made = gradients(dout)
        made[which][1, 3 if which == 0 else 1, 60, 2] += 2 * bound
        return made

    verdict = found.check(lambda: None, launch)
    assert verdict.bound == bound
    assert verdict.error == pytest.approx(2 * bound, rel=1e-3)
    name = ("dQ", "dK", "dV")[which]
    assert verdict.message == f"{name}: error {verdict.error:.1e}, bound {bound:.1e}"


def test_gradients_that_are_not_finite() -> None:
    """With the complete dO, in any head."""
    found = sampled.expect_gradients(P, *drawn())

    def launch() -> tuple[torch.Tensor, ...]:
        made = gradients(drawn()[3])
        made[1][0, 1, 7] = np.inf
        return made

    assert found.check(lambda: None, launch) == Verdict(np.inf, 0.0, "an element is not finite, or was not written")


# ---- ragged batches


@dataclasses.dataclass(frozen=True)
class Given:
    """The verdict of a sequence."""

    verdict: Verdict

    def check(self, poison: Any, launch: Any) -> Verdict:
        launch()
        return self.verdict


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [
        ([(1, 2, ""), (3, 4, "")], 1),
        ([(3, 4, ""), (1, 2, "")], 0),
        ([(3, 4, ""), (1, 2, "LSE exceeds")], 1),  # a message counts more than the ratio
        ([(1, 0, ""), (3, 4, "")], 0),
    ],
)
def test_the_worst_sequence(verdicts: list[tuple[float, float, str]], worst: int) -> None:
    lengths = ((5, 7), (3, 4))
    p = Problem(0, 1, 0, 0, 8, lengths=lengths, dtype="float16")
    each = [Given(Verdict(*verdict)) for verdict in verdicts]
    found = ExpectedSequences(("O", "LSE"), tuple(zip(sampled.sequences_of(p), each, strict=True)))  # type: ignore[arg-type]
    assert found.check(lambda: None, lambda: (np.zeros((1, 1, 8, 8)), None)) == each[worst].verdict


@pytest.mark.parametrize("computes", ["forward", "backward"])
def test_sampled_sequences(computes: str) -> None:
    """At most four of those with queries and keys; each with its own rows."""
    lengths = ((5, 7), (0, 3), (4, 0), *(((n, n + 1)) for n in range(1, 8)))
    p = Problem(0, 1, 0, 0, 8, lengths=lengths, dtype="float16")
    Sq, Sk = (sum(n) for n in zip(*lengths, strict=True))
    rng = np.random.default_rng(0)
    inputs = tuple(torch.from_numpy(rng.standard_normal((1, 1, n, 8))).half() for n in (Sq, Sk, Sk, Sq))
    found = sampled.expect_sequences(p, inputs if computes == "backward" else inputs[:3], computes, {})
    numbers = [sequence.b for sequence, _ in found.sequences]
    assert (len(numbers), numbers[0], numbers[-1]) == (4, 0, 9)
    assert not {1, 2} & {*numbers}
    assert found.names == (("O", "LSE") if computes == "forward" else ("dQ", "dK", "dV"))
    for sequence, each in found.sequences:
        assert isinstance(each, Expected if computes == "forward" else ExpectedGradients)
        assert (each.problem.Sq, each.problem.Sk) == lengths[sequence.b]
