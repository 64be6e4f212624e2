"""`sandbox.attention` of float8: descale, dtypes, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import sandbox
from sandbox.core.errors import SpecError, UnsupportedProblem
from sandbox.core.problem import Problem
from sandbox.engine import choose
from sandbox.reference import attention, lse_bound, max_error, naive, output_bound

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def tensors(*dtypes: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    rng = np.random.default_rng(0)
    shapes = ((2, 4, 37, 32), (2, 2, 50, 32), (2, 2, 50, 32))
    made = (torch.from_numpy(rng.standard_normal(s, np.float32)) for s in shapes)
    return tuple(x.to(device, dtype) for x, dtype in zip(made, dtypes, strict=True))


def check(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> None:
    inputs = tuple(x.float().numpy() for x in (q, k, v))
    words = (str(x.dtype).removeprefix("torch.").removesuffix("fn") for x in (q, v))
    of_q, of_v = words
    exact, _ = attention(*inputs, **options)
    out_dtype = str(out.dtype).removeprefix("torch.")
    plain = naive(*inputs, **options, dtype=of_q, v_dtype=of_v, out_dtype=out_dtype)
    assert max_error(out.float().numpy(), exact) <= output_bound(exact, plain, out_dtype)


@pytest.mark.parametrize("of_v", [E4M3, E5M2])
@pytest.mark.parametrize("of_q", [E4M3, E5M2])
@pytest.mark.parametrize("out_dtype", [None, torch.float16, "float32"])
@pytest.mark.sampled(4)
def test_dtypes(of_q, of_v, out_dtype) -> None:
    q, k, v = tensors(of_q, of_q, of_v)
    out = sandbox.attention(q, k, v, causal=True, descale=(1.5, 0.5, 2.0), out_dtype=out_dtype)
    assert out.dtype == {None: torch.bfloat16, "float32": torch.float32}.get(out_dtype, out_dtype)
    check(out, q, k, v, causal=True, descale=(1.5, 0.5, 2.0))


def test_descale_of_every_head() -> None:
    """Tensors for some, numbers for others; broadcast; with steps of the score after it; 0, as of a head of zeros."""
    q, k, v = tensors(E4M3, E4M3, E4M3)
    of_q, of_v = torch.rand(2, 4) + 0.5, torch.rand(1, 2) + 0.5
    of_q[1, 2] = 0
    slopes = torch.rand(4)
    for options in ({}, {"softcap": 2.0}, {"alibi": slopes}):
        out, lse = sandbox.attention(q, k, v, descale=(of_q, 0.5, of_v), return_lse=True, **options)
        told = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        told["descale"] = (of_q.numpy(), 0.5, of_v.numpy())
        check(out, q, k, v, **told)
        exact = attention(*(x.float().numpy() for x in (q, k, v)), **told)[1]
        assert (abs(lse.numpy() - exact) <= lse_bound(exact, "float8_e4m3")).all()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["fwd_minimal", "fwd_block2d", "fwd_decode", "fwd_mma_fp8", "fwd_wgmma_fp8"])
def test_descale_of_a_head_of_zeros(name: str, causal: bool) -> None:
    """All its keys weigh alike; what is masked weighs nothing."""
    q, k, v = tensors(E4M3, E4M3, E4M3, device="cuda")
    descale = torch.tensor([[1.0, 0.0, 2.0, 0.0]], device="cuda"), torch.tensor([[0.5, 0.0]], device="cuda"), 1.0
    out = sandbox.attention(q, k, v, descale=descale, causal=causal, kernel=name)
    told = *(x.cpu().numpy() for x in descale[:2]), 1.0
    check(out.cpu(), q.cpu(), k.cpu(), v.cpu(), descale=told, causal=causal)


def test_a_tensor_is_read_at_each_call() -> None:
    q, k, v = tensors(E4M3, E4M3, E4M3)
    of_v = torch.ones(2, 2)
    first = sandbox.attention(q, k, v, descale=(1, 1, of_v), out_dtype="float32")
    of_v *= 2
    assert torch.equal(sandbox.attention(q, k, v, descale=(1, 1, of_v), out_dtype="float32"), 2 * first)


def test_a_number_is_not_another_number() -> None:
    q, k, v = tensors(E4M3, E4M3, E4M3)
    first, second = (sandbox.attention(q, k, v, descale=(1, 1, n), out_dtype="float32") for n in (1.0, 2.0))
    assert torch.equal(second, 2 * first)


@pytest.mark.parametrize("name", ["fwd_mma_fp8", "fwd_wgmma_fp8"])
def test_maxima_that_rise(name) -> None:
    """Keys that outdo all before them by far, tiles later: what was summed up until then has to shrink."""
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, 1, 400, 32), np.float32)) for _ in range(3))
    k[..., 200:, :] *= 4
    k[..., 390:, :] *= 4
    q, k, v = (x.to(E4M3) for x in (q, k, v))
    out, lse = sandbox.attention_forward(q, k, v, descale=(1.0, 1.0, 1.0), kernel=name)
    check(out, q, k, v)
    exact = attention(*(x.float().numpy() for x in (q, k, v)))[1]
    assert (abs(lse.numpy() - exact) <= lse_bound(exact, "float8_e4m3")).all()


@pytest.mark.parametrize("window", [None, (398, None)])
@pytest.mark.parametrize("name", ["fwd_mma_fp8", "fwd_wgmma_fp8"])
@pytest.mark.sampled(2)
def test_negative_maxima_that_rise(name, window) -> None:
    """Scores that are all below zero, and far less so tiles later: as integers they are in the opposite order."""
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, 1, 400, 32), np.float32)) for _ in range(3))
    q, k = abs(q) + 1, -abs(k) - 1
    k[..., 200:, :] /= 4
    q, k, v = (x.to(E4M3) for x in (q, k, v))
    check(sandbox.attention(q, k, v, descale=(1.0, 1.0, 1.0), kernel=name, window=window), q, k, v, window=window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["fwd_mma_fp8", "fwd_wgmma_fp8"])
@pytest.mark.sampled(2)
def test_maxima_that_rise_beyond_any_float(name, causal) -> None:
    """By more than the exponents that a float has, tiles later, in some rows: one taken too early is infinite."""
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, 1, 400, 32), np.float32)) for _ in range(3))
    q[..., ::3, :] *= 40
    k[..., 300:, :] *= 100
    q, k, v = (x.to(E4M3) for x in (q, k, v))
    check(sandbox.attention(q, k, v, descale=(1.0, 1.0, 1.0), kernel=name, causal=causal), q, k, v, causal=causal)


@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_long_sums(out_dtype) -> None:
    """Tensor cores round what they sum up towards zero: values of one sign, over thousands of keys, show it. Some of
    the keys that come last outdo all before them, so that sums put away by then have to shrink."""
    rng = np.random.default_rng(0)
    q, k = (torch.from_numpy(rng.standard_normal((1, 1, rows, 32), np.float32)) for rows in (64, 9500))
    k[..., 9000:, :] *= 2
    v = torch.ones(1, 1, 9500, 32)
    v[..., 9000:, :] = 0.5
    q, k, v = (x.to(E4M3) for x in (q, k, v))
    check(sandbox.attention(q, k, v, descale=(1, 1, 1), out_dtype=out_dtype, kernel="fwd_wgmma_fp8"), q, k, v)


def test_numpy() -> None:
    q, k, v = (x.float().numpy().astype(ml_dtypes.float8_e4m3fn) for x in tensors(E4M3, E4M3, E4M3))
    out = sandbox.attention(q, k, v, descale=(1, 1, 1))
    assert (type(out), out.dtype) == (np.ndarray, ml_dtypes.bfloat16)
    assert sandbox.attention(q, k, v, descale=(1, 1, 1), out_dtype=np.float32).dtype == np.float32
    with pytest.raises(UnsupportedProblem, match=r"float8_e4m3 with infinities"):
        sandbox.attention(*(x.astype(ml_dtypes.float8_e4m3) for x in (q, k, v)), descale=(1, 1, 1))


def test_ragged() -> None:
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in tensors(E4M3, E4M3, E4M3))
    ends = torch.tensor([0, 20, 37], dtype=torch.int32), torch.tensor([0, 5, 50], dtype=torch.int32)
    of_v = torch.tensor([[1.0, 2.0], [3.0, 0.5]])
    out = sandbox.attention_varlen(q, k, v, *ends, causal=True, descale=(1, 1, of_v))
    for b, (a, z, first, last) in enumerate(((0, 20, 0, 5), (20, 37, 5, 50))):
        own = (q[a:z], k[first:last], v[first:last])
        alone = tuple(x.transpose(0, 1)[None] for x in own)
        numbers = of_v[b : b + 1].numpy()
        check(out[a:z].transpose(0, 1)[None], *alone, causal=True, descale=(1.0, 1.0, numbers))


def test_the_compiler_goes_around_it() -> None:
    q, k, v = tensors(E4M3, E4M3, E4M3)

    @torch.compile(backend="eager")
    def twice(q, k, v):
        return 2 * sandbox.attention(q, k, v, descale=(1.0, 1.0, 1.0))

    assert torch.equal(twice(q, k, v), 2 * sandbox.attention(q, k, v, descale=(1.0, 1.0, 1.0)))


@pytest.mark.parametrize("function", ["attention", "attention_forward", "attention_paged"])
def test_calls_that_pytorch_intercepts_are_refused(function: str) -> None:
    """There is no operator for a dispatch mode to see. Recorded gradients are refused first."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    q, k, v = tensors(E4M3, E4M3, E4M3)
    more = ()
    if function == "attention_paged":
        k, v = (x.new_zeros(4, 16, *x.shape[1::2]) for x in (k, v))
        more = torch.zeros(q.shape[0], 2, dtype=torch.int32), torch.full(q.shape[:1], 20, dtype=torch.int32)
    call = lambda q: getattr(sandbox, function)(q, k, v, *more, descale=(1.0, 1.0, 1.0))  # noqa: E731
    call(q)
    with Mode(), pytest.raises(UnsupportedProblem, match=r"^attention of float8 is not a PyTorch operator"):
        call(q)
    with Mode(), pytest.raises(UnsupportedProblem, match=r"^attention of float8 has no gradient"):
        call(q.requires_grad_())
    with Mode(), torch.no_grad(), pytest.raises(UnsupportedProblem, match=r"^attention of float8 is not a PyTorch op"):
        call(q)


def test_refusals() -> None:
    q, k, v = tensors(E4M3, E4M3, E4M3)
    one = (1, 1, 1)
    with pytest.raises(UnsupportedProblem, match=r"q is float8_e4m3: it needs descale, the factors of q, k and v"):
        sandbox.attention(q, k, v)
    with pytest.raises(UnsupportedProblem, match=r"has no gradient: pass detached tensors, or convert"):
        sandbox.attention(q.requires_grad_(), k, v, descale=one)
    q = q.detach()
    lse = torch.zeros(q.shape[:3])
    for given in ((q, k, v), (q.half(), k, v)):
        with pytest.raises(UnsupportedProblem, match=r"is float8_e4m3, which has no gradient: convert q, k and v to"):
            sandbox.attention_backward(q.half(), *given, q.half(), lse)
    with pytest.raises(TypeError, match="'descale': use q, k and v in float16 or bfloat16: float8 has no gradient"):
        sandbox.attention_backward(q.half(), q, k, v, q.half(), lse, descale=one)
    with pytest.raises(SpecError, match="with float32, only with float8: multiply q, k and v by their factors"):
        sandbox.attention(q.float(), k.float(), v.float(), descale=(*one[:2], 2))
    with pytest.raises(SpecError, match=r"must have three elements"):
        sandbox.attention(q, k, v, descale=(1, 1))
    with pytest.raises(SpecError, match=r"descale of k is -1.0: it must be positive"):
        sandbox.attention(q, k, v, descale=(1, -1, 1))
    with pytest.raises(SpecError, match=r"descale of v has shape \(2, 4\): it must broadcast to \(B, heads\)"):
        sandbox.attention(q, k, v, descale=(1, 1, torch.ones(2, 4)))
    with pytest.raises(UnsupportedProblem, match=r"descale of v must be float32: dtype float64"):
        sandbox.attention(q, k, v, descale=(1, 1, torch.ones(2, 2, dtype=torch.float64)))
    with pytest.raises(UnsupportedProblem, match=r"k is float8_e4m3 and v is float32: convert both to float8"):
        sandbox.attention(q, k, v.float(), descale=one)
    with pytest.raises(
        UnsupportedProblem, match=r"k is float8_e4m3 and v is float16: .* float16, the dtype of q, or both to float8"
    ):
        sandbox.attention(q.half(), k, v.half(), descale=one)
    with pytest.raises(
        UnsupportedProblem, match=r"k is float32 and v is float8_e4m3: convert both to float32, the dtype of q"
    ):
        sandbox.attention(q.float(), k.float(), v, descale=one)
    with pytest.raises(SpecError, match=r"out_dtype='int8' is not supported with dtype='float8_e4m3'"):
        sandbox.attention(q, k, v, descale=one, out_dtype="int8")
    with pytest.raises(UnsupportedProblem, match=r"not supported on compute capability 8.0: it needs 8.9 or later"):
        choose.choose_kernel(Problem(1, 1, 8, 8, 64, dtype="float8_e4m3"), "forward", (8, 0))


def test_rotate() -> None:
    """Products stay, numbers that stick out are spread; alike in NumPy and PyTorch, whatever the layout."""
    rng = np.random.default_rng(0)
    for D in (64, 96, 7):
        q, k = (rng.standard_normal((2, 3, s, D), np.float32) for s in (5, 9))
        a, b = sandbox.rotate(q, k)
        np.testing.assert_allclose(a @ b.swapaxes(2, 3), q @ k.swapaxes(2, 3), atol=1e-4)
        assert a.dtype == np.float32
        turned = torch.from_numpy(q).transpose(1, 2).contiguous().transpose(1, 2)
        assert np.array_equal(sandbox.rotate(turned, torch.from_numpy(k))[0].numpy(), a)
    assert not np.allclose(a, sandbox.rotate(q, k, seed=1)[0])
    one = np.zeros((1, 64), np.float32)
    one[0, 3] = 8
    assert (abs(sandbox.rotate(one, one)[0]) == 1).all()
    with pytest.raises(UnsupportedProblem, match="D must be the same"):
        sandbox.rotate(one, one[:, :32])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_rotate_overflows_only_if_the_result_does(dtype: str) -> None:
    """The largest result is half of the largest number; without the factor it would be 11.3 times as large. The result
    is the rounded product with the matrix."""
    kind = getattr(torch, dtype)
    D, most = 128, torch.finfo(kind).max / 2
    signs = torch.from_numpy(np.where(np.random.default_rng(0).random(D) < 0.5, -1.0, 1.0))
    q = (signs * (most / D**0.5)).to(kind)[None]
    matrix = sandbox.rotate(torch.eye(D, dtype=torch.float64), q)[0]
    found = [sandbox.rotate(q, q)[0]]
    if dtype != "bfloat16":
        found.append(torch.from_numpy(sandbox.rotate(q.numpy(), q.numpy())[0]))
    for rotated in found:
        assert rotated.dtype == kind
        expected = float((q.double() @ matrix)[0, 0])
        assert float(rotated[0, 0]) == pytest.approx(expected, rel=torch.finfo(kind).eps, abs=0)
        assert abs(rotated[0, 1:].double()).max() < most / 1000


BOTH = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@BOTH
@pytest.mark.parametrize("of_k", [E4M3, E5M2])
def test_queries_of_any_magnitude_over_float8_keys(of_k: torch.dtype, where: str) -> None:
    """bfloat16 queries become halves times a power of two, row by row: the bits do not depend on that power."""
    (q, k, v), exponents = tensors(torch.bfloat16, of_k, of_k, device=where), (-18, -14, -1, 14, 15, 16, 30, 60)
    given = {"kernel": "fwd_decode", "descale": (1.0, 1.0, 1.0)}
    first = sandbox.attention(q, k, v, scale=0.25, **given)
    check(*(x.cpu() for x in (first, q, k, v)), scale=0.25)
    for n in exponents:
        assert torch.equal(sandbox.attention(q * 2.0**n, k, v, scale=0.25 * 2.0**-n, **given), first)
    other = q.clone()
    for row, n in enumerate((*exponents, -115, -130)):  # rows of different magnitude in one tile, also zeros, infinity
        other[:, :, row] *= 2.0**n
    other[:, :, 20], other[:, :, 21, 0] = 0.0, torch.inf
    out = sandbox.attention(other, k, v, scale=0.25, **given)
    assert not out[:, :, 21].isfinite().any()
    finite = [row for row in range(other.shape[2]) if row != 21]
    check(*(x.cpu() for x in (out[:, :, finite], other[:, :, finite], k, v)), scale=0.25)


@BOTH
@pytest.mark.parametrize("causal", [False, True])
def test_zeros_times_a_small_descale(where: str, causal: bool) -> None:
    """Queries that are zeros have the smallest factor: times the smallest scale it is not 0, as -INF * 0 is NaN."""
    q, k, v = tensors(torch.bfloat16, E4M3, E4M3, device=where)
    q[:, :, 3:6] = 0.0
    for of_k in (1e-8, torch.tensor([[0.5, 0.0]], device=where)):
        out = sandbox.attention(q, k, v, kernel="fwd_decode", descale=(1.0, of_k, 1.0), causal=causal)
        told = of_k.cpu().numpy() if isinstance(of_k, torch.Tensor) else of_k
        check(*(x.cpu() for x in (out, q, k, v)), descale=(1.0, told, 1.0), causal=causal)


@BOTH
def test_queries_with_small_and_large_elements_over_float8_keys(where: str) -> None:
    """Elements of 2^-30 of the row's largest one count where the key is 0 at the largest one."""
    q, k, v = tensors(torch.bfloat16, E4M3, E4M3, device=where)
    q[..., 0], k[..., 0] = 2.0**30, 0.0
    out = sandbox.attention(q, k, v, kernel="fwd_decode", descale=(1.0, 1.0, 1.0))
    check(*(x.cpu() for x in (out, q, k, v)))
