"""Every kernel on inputs of any magnitude: what is finite in exact arithmetic is finite, and no finite garbage either.

Without a GPU a few draws of each kernel in one dtype; with SANDBOX_MAGNITUDES=all, and on a GPU, many in every dtype.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from project import ALL_MAGNITUDES, SEED, takes_causal

from sandbox import reference
from sandbox.core import registry
from sandbox.core.dtypes import FLOAT8
from sandbox.engine import choose, pipeline
from sandbox.launch.dlpack import HOST, Device, numpy_dtype
from sandbox.spec import Kernel, Problem
from sandbox.verify import trial
from sandbox.verify.cases import Array

KERNELS = list(registry.kernels().values())
FORWARD = [k for k in KERNELS if k.computes == "forward" and takes_causal(k)]  # not latent: v is not k here
BACKWARD = [k for k in KERNELS if k.computes == "backward" and takes_causal(k)]
by_name = lambda kernel: kernel.name  # noqa: E731
LARGEST = {"float32": 3.4e38, "bfloat16": 3.39e38, "float16": 65504.0, **FLOAT8}
# Of q, k, v in PyTorch's test `large_bf16_nan_values`, or as large as the dtype allows.
LARGE = {"float32": 1.015625 * 2**50, "bfloat16": 133120.0, "float16": 40960.0, **FLOAT8}
FP32_SUMS = 1e37  # the most that the terms of a sum in fp32 may come to here


def taken(kernel: Kernel, dtype: str, Sq: int, Sk: int, **options: object) -> Problem:
    """A problem of the kernel's, with a D whose scale is a power of two, so that scores are rounded once."""
    problems = (Problem(1, 2, Sq, Sk, D, Hk=1, dtype=dtype, **options) for D in (64, 16))  # type: ignore[arg-type]
    return next(p for p in problems if not kernel.why_unsupported(p))


def tried(kernel: Kernel, device: Device) -> tuple[str, ...]:
    """Its dtypes, or one of them."""
    if device != HOST or ALL_MAGNITUDES:
        return kernel.dtypes
    return (random.Random(f"{SEED} {kernel.name} dtype").choice(kernel.dtypes),)


def outputs(kernel: Kernel, p: Problem, given: dict[str, Array], device: Device) -> dict[str, Array]:
    tile = choose.choose_tile(kernel, p, pipeline.arch_of(device))
    found = trial.launch(kernel, tile, p, given, device).outputs
    return {name: x.astype(np.float64) for name, x in found.items()}


def cast(x: Array, dtype: str) -> Array:
    """Rounded to `dtype`, without infinities."""
    return np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(numpy_dtype(dtype))


def with_forward(p: Problem, given: dict[str, Array]) -> dict[str, Array]:
    """O and LSE too, as a forward leaves them."""
    out, lse = reference.attention(given["Q"], given["K"], given["V"], causal=p.causal, scale=p.scale)
    return {**given, "O": out.astype(numpy_dtype(p.dtype)), "LSE": lse.astype(np.float32)}


# ---- inputs whose result is known exactly


@pytest.mark.parametrize("kernel", FORWARD, ids=by_name)
@pytest.mark.sampled(2)
def test_equal_inputs(kernel: Kernel, device: Device) -> None:
    """All scores of a row are equal, up to 1e12 and, of float32, 1e31: O is V, and LSE the score."""
    for dtype in tried(kernel, device):
        causal = random.Random(f"{SEED} {kernel.name} {dtype}").choice((False, "bottom-right"))
        for Sq, Sk in ((1, 1), (70, 300)):
            p = taken(kernel, dtype, Sq, Sk, causal=causal)
            given = {n: np.full((1, h, s, p.D), LARGE[dtype], numpy_dtype(dtype)) for n, h, s in _shapes(p)}
            found = outputs(kernel, p, given, device)
            np.testing.assert_allclose(found["O"], LARGE[dtype], rtol=4e-3, err_msg=f"{dtype} {Sk}")
            np.testing.assert_allclose(found["LSE"], p.D * LARGE[dtype] ** 2 * p.scale, rtol=1e-3)


@pytest.mark.parametrize("kernel", FORWARD, ids=by_name)
@pytest.mark.sampled(3)
def test_equal_inputs_with_a_large_softcap(kernel: Kernel, device: Device) -> None:
    """A softcap bounds scores, but one of 1e6 and more permits scores of any magnitude."""
    (dtype,) = random.Random(f"{SEED} {kernel.name} softcap").sample(kernel.dtypes, 1)
    score = 64 * LARGE[dtype] ** 2 / 8
    p = Problem(1, 2, 70, 300, 64, Hk=1, dtype=dtype, softcap=score / 0.7)
    if kernel.why_unsupported(p):
        pytest.skip("it does not support softcap")
    given = {n: np.full((1, h, s, p.D), LARGE[dtype], numpy_dtype(dtype)) for n, h, s in _shapes(p)}
    found = outputs(kernel, p, given, device)
    np.testing.assert_allclose(found["O"], LARGE[dtype], rtol=4e-3)
    np.testing.assert_allclose(found["LSE"], p.softcap * np.tanh(0.7), rtol=2e-3)


def _shapes(p: Problem) -> tuple[tuple[str, int, int], ...]:
    return ("Q", p.H, p.Sq), ("K", p.Hk, p.Sk), ("V", p.Hk, p.Sk)


@pytest.mark.parametrize("place", [0, 130, 299], ids=["first", "middle", "last"])
@pytest.mark.parametrize("kernel", FORWARD, ids=by_name)
@pytest.mark.sampled(4)
def test_one_large_score(kernel: Kernel, place: int, device: Device) -> None:
    """One key outweighs all others, in the first tile of a row's walk or in a later one: the maximum moves from 0 to
    1e12."""
    p = taken(kernel, kernel.dtypes[-1], 70, 300)
    value, rng = LARGE[p.dtype], np.random.default_rng(0)
    given = {n: np.full((1, h, s, p.D), value, numpy_dtype(p.dtype)) for n, h, s in _shapes(p)}
    given["K"][:, :, np.arange(300) != place] = 0
    given["V"] = cast(rng.standard_normal(given["V"].shape), p.dtype)
    found = outputs(kernel, p, given, device)
    expected = np.broadcast_to(given["V"][:, :, place, None].astype(np.float64), found["O"].shape)
    np.testing.assert_allclose(found["O"], expected, rtol=4e-3)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kernel", FORWARD, ids=by_name)
def test_what_is_added_to_all_scores_changes_nothing(kernel: Kernel, sign: int, device: Device) -> None:
    """Scores of 0 to 9, and 2^22 or -2^22 more: integers, which fp32 holds. An exponent is right to 2^-12, not 2^-2."""
    dtype = "float16" if "float16" in kernel.dtypes else kernel.dtypes[-1]
    p, rng = taken(kernel, dtype, 70, 300, scale=1.0), np.random.default_rng(0)
    given = {n: rng.integers(0, 2, (1, h, s, p.D)) for n, h, s in _shapes(p)}
    for name in "QK":
        given[name][..., 9:] = 0
    given["V"] = rng.standard_normal(given["V"].shape)
    offset = 0 if dtype == "float8_e4m3" else 2**11  # of 448 there is no such product
    given["Q"][..., 15], given["K"][..., 15] = offset, sign * offset
    narrow = {name: cast(x, dtype) for name, x in given.items()}
    exact, lse = reference.attention(narrow["Q"], narrow["K"], narrow["V"], scale=1.0)
    found = outputs(kernel, p, narrow, device)
    assert abs(found["O"] - exact).max() <= (0.08 if dtype in FLOAT8 else 3e-3)
    np.testing.assert_allclose(found["LSE"], lse, rtol=1e-3)


@pytest.mark.parametrize("kernel", BACKWARD, ids=by_name)
@pytest.mark.sampled(2)
def test_gradients_of_one_hot_rows(kernel: Kernel, device: Device) -> None:
    """Q and K are multiples of the identity: P is the identity, dV is dO, and dS is 0 but for the rounding of O.

    LSE is the only score that counts, scaled and rounded in fp32: 1e4 to 1e11, whose last place is worth more than 1.
    """
    dtype = "bfloat16" if "bfloat16" in kernel.dtypes else kernel.dtypes[-1]
    p, rng = Problem(1, 2, 64, 64, 64, Hk=1, dtype=dtype, scale=0.1), np.random.default_rng(0)
    for power in (8, 12, 15) if dtype == "float16" else (8, 12, 17, 20):
        value = 1.296875 * 2.0**power
        given = {n: cast(np.broadcast_to(value * np.eye(64), (1, h, 64, 64)), dtype) for n, h, _ in _shapes(p)}
        given["V"], given["dO"] = (cast(rng.standard_normal((1, h, 64, 64)), dtype) for h in (p.Hk, p.H))
        given = with_forward(p, given)
        given["LSE"][:] = np.float32(value**2) * np.float32(p.scale)
        found = outputs(kernel, p, given, device)
        expected = given["dO"].astype(np.float64).sum(1, keepdims=True)
        np.testing.assert_allclose(found["dV"], expected, rtol=1e-2, atol=1e-2)
        for name in ("dQ", "dK"):
            assert abs(found[name]).max() <= 0.05 * 2.0**power, (name, power)


@pytest.mark.parametrize("kernel", BACKWARD, ids=by_name)
@pytest.mark.sampled(2)
def test_gradients_of_equal_inputs_are_finite(kernel: Kernel, device: Device) -> None:
    """An LSE of 1e12 in fp32 does not say how many keys share P: each P is 1 at most."""
    for dtype in tried(kernel, device):
        for Sq, Sk in ((1, 1), (70, 130)):
            p = taken(kernel, dtype, Sq, Sk)
            given = {n: np.full((1, h, s, p.D), LARGE[dtype], numpy_dtype(dtype)) for n, h, s in _shapes(p)}
            rng = np.random.default_rng(0)
            given["V"], given["dO"] = (cast(rng.standard_normal((1, h, s, p.D)), dtype) for h, s in ((1, Sk), (2, Sq)))
            found = outputs(kernel, p, with_forward(p, given), device)
            assert np.isfinite(found["dV"]).all(), dtype
            if dtype != "float16":  # dS q may exceed 65504
                assert np.isfinite(found["dQ"]).all(), dtype
                assert np.isfinite(found["dK"]).all(), dtype
            if Sk == 1:
                expected = given["dO"].astype(np.float64).sum(1, keepdims=True)
                np.testing.assert_allclose(found["dV"], expected, rtol=1e-2, atol=1e-2)


def gradients(p: Problem, given: dict[str, Array]) -> dict[str, Array]:
    """dQ, dK and dV of a problem with one key/value head, in float64, from LSE and O as they are given: rounded."""
    q, k, v, dO, out, lse = (given[n].astype(np.float64) for n in ("Q", "K", "V", "dO", "O", "LSE"))
    scores = q @ k.swapaxes(-1, -2) * p.scale
    if p.causal:
        scores[..., ~np.tri(p.Sq, p.Sk, p.Sk - p.Sq, dtype=bool)] = -np.inf
    P = np.exp(np.minimum(scores - np.where(lse == -np.inf, 0, lse)[..., None], 0))
    dS = P * (dO @ v.swapaxes(-1, -2) - (dO * out).sum(-1, keepdims=True))
    sums = {"dQ": dS @ k, "dK": dS.swapaxes(-1, -2) @ q, "dV": P.swapaxes(-1, -2) @ dO}
    return {n: (x if n == "dQ" else x.sum(1, keepdims=True)) * (1 if n == "dV" else p.scale) for n, x in sums.items()}


@pytest.mark.parametrize("kernel", BACKWARD, ids=by_name)
@pytest.mark.sampled(2)
def test_gradients_beside_rows_with_a_large_lse(kernel: Kernel, device: Device) -> None:
    """Scores of three rows are larger by 2^22 than those of the other rows in their tiles; some rows see no key. P of
    the three rows is exact to the precision of the dtype: one FFMA would be off by up to 0.25 in the exponent."""
    dtype, rng = "float16" if "float16" in kernel.dtypes else kernel.dtypes[-1], np.random.default_rng(0)
    for Sq, Sk, causal in ((70, 150, False), (150, 70, "bottom-right")):
        p = taken(kernel, dtype, Sq, Sk, scale=1.0, causal=causal)
        given = {n: rng.integers(0, 2, (1, h, s, p.D)).astype(np.float64) for n, h, s in _shapes(p)}
        given["V"], given["dO"] = (rng.standard_normal((1, h, s, p.D)) for h, s in ((1, Sk), (2, Sq)))
        for name in "QK":
            given[name][..., 9:] = 0
        given["K"][..., 15] = given["Q"][:, :, [3, Sq - 50, Sq - 1], 15] = 2**11
        given = with_forward(p, {name: cast(x, dtype) for name, x in given.items()})
        found = outputs(kernel, p, given, device)
        for name, expected in gradients(p, given).items():
            small = np.arange(p.D) != (-1 if name == "dV" else 15)  # 2^11 times the rounding of dS
            error = abs(found[name] - expected)[..., small].max()
            assert error <= 5e-3 * abs(expected[..., small]).max(), (name, causal, error)


# ---- inputs of all magnitudes


@dataclass(frozen=True)
class Draw:
    """What q, k, v and dO are multiplied by; `kind` of inputs; and the mask."""

    q: float
    k: float
    v: float
    dO: float
    kind: str
    causal: str | bool

    def inputs(self, p: Problem, seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        make = {"normal": rng.standard_normal, "positive": rng.random, "equal": np.ones}[self.kind]
        wide = {n: np.asarray(make((1, h, s, p.D))) * getattr(self, n.lower()) for n, h, s in _shapes(p)}
        wide["dO"] = rng.standard_normal((1, p.H, p.Sq, p.Dv)) * self.dO
        return {name: cast(x, p.dtype) for name, x in wide.items()}


def drawn(sample: random.Random, dtype: str) -> Draw:
    """Magnitudes 1e-20 … 1e30, as the dtype allows."""
    top = {"float16": 4.0, "float8_e4m3": 2.0, "float8_e5m2": 4.0}.get(dtype, 30.0)
    q, k, v, dO = (10.0 ** sample.uniform(-20, top) for _ in range(4))
    return Draw(q, k, v, dO, sample.choice(("normal", "positive", "equal")), sample.choice((False, "bottom-right")))


def fits(p: Problem, given: dict[str, Array], backward: bool) -> bool:
    """Whether fp32 holds every sum, whatever its order, and the dtype what is rounded to it: dS and the gradients, for
    any P from 0 to 1."""
    q, k, v, dO = (float(abs(given[name].astype(np.float64)).max()) for name in ("Q", "K", "V", "dO"))
    sums, rounded = [p.D * q * k * max(p.scale, 1), p.Sk * v], []
    if backward:
        dS = 2 * p.Dv * dO * v
        dQ, dK, dV = dS * p.Sk * k, dS * p.Sq * p.H * q, dO * p.Sq * p.H
        sums += [dS, dQ, dK, dV]
        rounded = [dS, dQ, dK, dV]
    return max(sums) < FP32_SUMS and max(rounded, default=0) < min(LARGEST[p.dtype], FP32_SUMS)


def check_forward(p: Problem, given: dict[str, Array], found: dict[str, Array]) -> None:
    """O lies between the least and the largest value of its column, and LSE is right."""
    _, lse = reference.attention(given["Q"], given["K"], given["V"], causal=p.causal, scale=p.scale)
    seen = lse > -np.inf
    assert np.isfinite(found["O"]).all()
    assert (np.isfinite(found["LSE"]) == seen).all()
    v = given["V"].astype(np.float64)
    slack = 0.1 * abs(v).max() if p.dtype in FLOAT8 else 0.01 * abs(v).max()
    low, high = (np.repeat(f(v, axis=2, keepdims=True), p.H // p.Hk, axis=1) for f in (np.min, np.max))
    hidden = ~seen[..., None]
    assert (((low - slack <= found["O"]) & (found["O"] <= high + slack)) | hidden).all()
    largest = p.D * p.scale * abs(given["Q"].astype(np.float64)).max() * abs(given["K"].astype(np.float64)).max()
    tolerance = (5e-3 if p.dtype in FLOAT8 else 1e-5) * max(1.0, largest) + 1e-3
    assert abs(found["LSE"][seen] - lse[seen]).max(initial=0) <= tolerance


@pytest.mark.parametrize("kernel", FORWARD + BACKWARD, ids=by_name)
@pytest.mark.sampled(4)
def test_any_magnitude(kernel: Kernel, device: Device) -> None:
    backward, sample = kernel.computes == "backward", random.Random(f"{SEED} {kernel.name}")
    for dtype in tried(kernel, device):
        done = 0
        while done < (8 if device == HOST and not ALL_MAGNITUDES else 60):
            draw = drawn(sample, dtype)
            p = taken(kernel, dtype, 70, 150, causal=draw.causal)
            given = draw.inputs(p, done)
            if not fits(p, given, backward):
                continue
            done += 1
            what = f"SANDBOX_SEED={SEED} {kernel.name} {dtype} {draw}"
            try:
                if backward:
                    found = outputs(kernel, p, with_forward(p, given), device)
                    assert all(np.isfinite(x).all() for x in found.values()), [*found]
                else:
                    del given["dO"]
                    check_forward(p, given, outputs(kernel, p, given, device))
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from None
