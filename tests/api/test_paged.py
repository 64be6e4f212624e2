"""sandbox.attention_paged: pages of NumPy arrays and PyTorch tensors, against the gathered keys."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

import sandbox
from sandbox.api import plan
from sandbox.core.errors import LaunchError, SpecError, UnsupportedProblem
from sandbox.engine import choose
from sandbox.reference import max_error, naive, output_bound

torch = pytest.importorskip("torch")

B, H, Hk, Sq, D, SIZE, MOST, PAGES = 3, 8, 2, 2, 64, 16, 5, 20
LENGTHS = np.array([70, 0, 33], np.int32)


def arrays() -> list[Any]:
    rng = np.random.default_rng(3)
    q = rng.standard_normal((B, H, Sq, D)).astype(np.float16)
    k, v = (rng.standard_normal((PAGES, SIZE, Hk, D)).astype(np.float16) for _ in "kv")
    table = rng.permutation(PAGES)[: B * MOST].reshape(B, MOST).astype(np.int32)
    table[1:, 3:] = -1  # of keys that do not count
    return [q, k, v, table, LENGTHS]


def test_as_the_gathered_keys() -> None:
    q, k, v, table, lengths = arrays()
    out, lse = sandbox.attention_paged(q, k, v, table, lengths, causal=True, return_lse=True)
    keys, values = (sandbox.reference.gather_pages(x, table, lengths) for x in (k, v))
    right, right_lse = sandbox.attention(q, keys, values, causal=True, key_lengths=lengths, return_lse=True)
    assert out.shape == q.shape
    assert (out[1] == 0).all()
    assert (lse[1] == -np.inf).all()
    assert np.abs(out.astype(np.float32) - right).max() < 2e-3
    assert np.allclose(lse, right_lse, atol=1e-3)


def test_float8() -> None:
    """Its bits, its numbers by which it is multiplied, and out of another dtype; the compiler goes around it."""
    q, k, v, table, lengths = (torch.from_numpy(x) for x in arrays())
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    of_k = torch.tensor([[0.5, 2.0]])
    call = lambda *given: sandbox.attention_paged(*given, causal=True, descale=(2.0, of_k, 3.0))  # noqa: E731
    out = call(q, k, v, table, lengths)
    assert out.dtype == torch.bfloat16
    keys, values = (sandbox.reference.gather_pages(x.float().numpy(), table.numpy(), lengths.numpy()) for x in (k, v))
    keys *= of_k.numpy()[:, :, None, None]
    exact, _ = sandbox.reference.attention(q.float().numpy() * 2, keys, values * 3, causal=True, key_lengths=LENGTHS)
    assert np.abs(out.float().numpy() - exact).max() < 2e-2
    assert torch.equal(torch.compile(call, backend="eager")(q, k, v, table, lengths), out)
    with pytest.raises(UnsupportedProblem, match="descale"):
        sandbox.attention_paged(q, k, v, table, lengths)


@pytest.mark.parametrize("of", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.sampled(4)
def test_float8_pages(of: Any, dtype: Any) -> None:
    """16-bit queries over float8 pages that append_kv wrote: within the bound of 16-bit keys with these values."""
    q, k, v, table, lengths = (torch.from_numpy(x) for x in arrays())
    q, k, v, of_k = q.to(dtype), k.to(of), v.to(of), torch.tensor([[0.5, 2.0], [1.0, 1.0], [0.25, 4.0]])
    new = [torch.randn(B, Hk, 2, D).to(dtype) for _ in "kv"]
    sandbox.append_kv(*new, k, v, table, lengths)
    lengths += 2
    call = lambda *given: sandbox.attention_paged(*given, causal=True, descale=(1.0, of_k, 3.0))  # noqa: E731
    out = call(q, k, v, table, lengths)
    assert out.dtype == dtype
    keys, values = (sandbox.reference.gather_pages(x.float().numpy(), table.numpy(), lengths.numpy()) for x in (k, v))
    options = {"causal": True, "key_lengths": lengths.numpy(), "descale": (1.0, of_k.numpy(), 3.0)}
    inputs, name = (q.float().numpy(), keys, values), str(dtype).removeprefix("torch.")
    exact, plain = sandbox.reference.attention(*inputs, **options)[0], naive(*inputs, **options, dtype=name)
    assert max_error(out.float().numpy(), exact) <= output_bound(exact, plain, name)
    assert torch.equal(torch.compile(call, backend="eager")(q, k, v, table, lengths), out)


def test_float8_pages_that_make_no_sense() -> None:
    q, k, v, table, lengths = (torch.from_numpy(x) for x in arrays())
    eighth = [x.to(torch.float8_e4m3fn) for x in (k, v)]
    with pytest.raises(UnsupportedProblem, match="k_pages is float8_e4m3: it needs descale"):
        sandbox.attention_paged(q, *eighth, table, lengths)
    with pytest.raises(
        UnsupportedProblem, match="float8_e4m3: convert both to float16, the dtype of q, or both to float8"
    ):
        sandbox.attention_paged(q, k, eighth[1], table, lengths, descale=(1, 1, 1))
    with pytest.raises(
        UnsupportedProblem, match="q is float32 and k_pages is float8_e4m3: convert both to one dtype; float8"
    ):
        sandbox.attention_paged(q.float(), *eighth, table, lengths, descale=(1, 1, 1))
    with pytest.raises(UnsupportedProblem, match="fwd_decode_wgmma: float8_e4m3 keys with float16 queries"):
        sandbox.attention_paged(q, *eighth, table, lengths, descale=(1, 1, 1), kernel="fwd_decode_wgmma")
    with pytest.raises(SpecError, match="with float16, only with float8: multiply q, k and v by their factors"):
        sandbox.attention_paged(q, k, v, table, lengths, descale=(1, 1, 2))


def test_tensors_and_the_compiler() -> None:
    """Table and lengths are read when the kernel runs; a compiled graph is whole; gradients are refused."""
    tensors = [torch.from_numpy(x) for x in arrays()]
    expected = torch.from_numpy(sandbox.attention_paged(*arrays(), causal=True, softcap=5.0))
    call = lambda *given: sandbox.attention_paged(*given, causal=True, softcap=5.0)  # noqa: E731
    assert torch.equal(call(*tensors), expected)
    assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(*tensors), expected)
    tensors[4] = tensors[4] - 1
    assert not torch.equal(call(*tensors), expected)
    tensors[0].requires_grad_()
    with pytest.raises(UnsupportedProblem, match="no gradient"):
        call(*tensors)
    with torch.no_grad():
        assert call(*tensors).shape == (B, H, Sq, D)


@pytest.mark.parametrize(
    ("which", "other", "error", "said"),
    [
        (
            3,
            lambda x: np.where(x == x[0, 1], PAGES, x).astype(np.int32),
            LaunchError,
            r"block_table\[0, 1\] is \d+, a page that does not exist",
        ),
        (3, lambda x: x.astype(np.int64), UnsupportedProblem, "block_table is int64: it must be int32"),
        (3, lambda x: x[:2], UnsupportedProblem, r"it must be \(B, max_pages\)"),
        (3, lambda x: None, UnsupportedProblem, "block_table is None, not an array"),
        (4, lambda x: x[:2], UnsupportedProblem, "key_lengths has shape"),
        (4, lambda x: None, UnsupportedProblem, "key_lengths is None, not an array"),
        (4, lambda x: x[None], UnsupportedProblem, r"key_lengths has shape \(1, 3\): it must be \(B,\)"),
        (1, lambda x: x[0], UnsupportedProblem, r"\(pages, page_size, Hk, D\)"),
        (0, lambda x: x.astype(np.float32), UnsupportedProblem, "q is float32 and k_pages is float16"),
    ],
)
def test_what_makes_no_sense(which: int, other: Any, error: type[Exception], said: str) -> None:
    given = arrays()
    given[which] = other(given[which])
    with pytest.raises(error, match=said):
        sandbox.attention_paged(*given)


def test_pages_of_other_sizes() -> None:
    """The same bits for pages of 16 rows, of 8 and of 1."""
    q, k, v, table, lengths = arrays()
    for kernel in ("fwd_decode", "fwd_mma", "fwd_block2d"):
        expected = sandbox.attention_paged(q, k, v, table, lengths, kernel=kernel)
        for size in (8, 1):
            small, per_page = (x.reshape(-1, size, Hk, D) for x in (k, v)), np.arange(SIZE // size)
            finer = (table[:, :, None] * len(per_page) + per_page).reshape(B, -1).astype(np.int32)
            out = sandbox.attention_paged(q, *small, finer, lengths, kernel=kernel)
            assert out.tobytes() == expected.tobytes()
    with pytest.raises(UnsupportedProblem, match="k_pages has page_size=0: it must be at least 1"):
        sandbox.attention_paged(q, k[:, :0], v[:, :0], table, lengths)
    shapes = f"k_pages has shape {k.shape} and v_pages {v[:, :, :1].shape}"
    with pytest.raises(UnsupportedProblem, match=re.escape(shapes)):
        sandbox.attention_paged(q, k, v[:, :, :1], table, lengths)


def test_no_pages_and_no_keys() -> None:
    q, k, v, table, lengths = arrays()
    for given in ((k[:0], v[:0], table), (k, v, table[:, :0]), (k, v, table)):
        assert (sandbox.attention_paged(q, *given, 0 * lengths) == 0).all()


# ---- a different number of queries per sequence

OFFSETS = np.array([0, 40, 41, 47], np.int32)  # a prompt, a token of a sequence without keys, and the last 6 of 33 keys


def ragged(total: int = 47, columns: int = D) -> list[Any]:
    q = np.random.default_rng(4).standard_normal((total, H, columns)).astype(np.float16)
    _, k, v, table, lengths = arrays()
    return [q, k[..., :columns], v[..., :columns], table, lengths]


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        (64, {"causal": True}),
        (64, {"kernel": "fwd_mma", "window": (20, 0), "sink": True, "softcap": 3.0}),
        (64, {"kernel": "fwd_decode", "bias": True}),
        (59, {"causal": True, "bias": True}),
    ],
)
@pytest.mark.sampled(2)
def test_ragged_queries(columns: int, options: dict[str, Any]) -> None:
    """Each sequence has the result that it has alone with the gathered keys."""
    q, k, v, table, lengths = ragged(columns=columns)
    rng = np.random.default_rng(5)
    if "bias" in options:
        options = {**options, "bias": rng.standard_normal((B, 1, 40, MOST * SIZE)).astype(np.float32)}
    if "sink" in options:
        options = {**options, "sink": rng.standard_normal(H).astype(np.float32)}
    out, lse = sandbox.attention_paged(
        q, k, v, table, lengths, cu_seqlens_q=OFFSETS, max_seqlen_q=40, return_lse=True, **options
    )
    assert (out.shape, lse.shape) == (q.shape, (H, len(q)))
    options = {name: x for name, x in options.items() if name != "kernel"}
    keys, values = (sandbox.reference.gather_pages(x, table, lengths) for x in (k, v))
    for b in range(B):
        rows, n = slice(*OFFSETS[b : b + 2]), int(lengths[b])
        own = options
        if "bias" in options:
            own = {**options, "bias": options["bias"][b : b + 1, :, : rows.stop - rows.start, :n]}
        one = (q[rows].swapaxes(0, 1)[None], keys[b : b + 1, :, :n], values[b : b + 1, :, :n])
        expected, expected_lse = sandbox.reference.attention(*one, **own)
        assert np.abs(out[rows].swapaxes(0, 1) - expected[0]).max(initial=0) < 3e-3
        assert np.allclose(lse[:, rows], expected_lse[0], atol=1e-3)


def test_ragged_queries_and_the_compiler() -> None:
    """One graph; other offsets do not need another one."""
    tensors = [torch.from_numpy(x) for x in (*ragged(), OFFSETS)]
    call = lambda *given: sandbox.attention_paged(*given[:5], cu_seqlens_q=given[5], causal=True)  # noqa: E731
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for offsets in (OFFSETS, np.array([0, 1, 2, 47], np.int32)):
        tensors[5] = torch.from_numpy(offsets)
        assert torch.equal(compiled(*tensors), call(*tensors))


def test_few_queries_per_sequence_choose_the_decoding_kernel() -> None:
    tokens = sandbox.Problem(64, 8, 4, 4096, 128, Hk=2, dtype="bfloat16", page_size=16, ragged=(80, 0))
    problems = [tokens, *(dataclasses.replace(tokens, Sq=Sq, ragged=(8192, 0)) for Sq in (16, 17, 8192))]
    chosen = [choose.choose_kernel(p, "forward", (9, 0)).name for p in problems]
    assert chosen == ["fwd_decode", "fwd_decode", "fwd_wgmma", "fwd_wgmma"]


@pytest.mark.parametrize(
    ("offsets", "total", "more", "error", "said"),
    [
        ([0, 41, 40, 47], 47, {}, LaunchError, "cu_seqlens_q decreases from 41 to 40"),
        ([0, 40, 41, 48], 47, {}, LaunchError, r"cu_seqlens_q\[3\] is 48, beyond the last row: q has 47"),
        ([0, 40, 41], 47, {}, UnsupportedProblem, r"block_table has shape \(3, 5\): it must be \(B, max_pages\), B=2"),
        ([0, 40, 41, 47.0], 47, {}, UnsupportedProblem, "cu_seqlens_q is float64: it must be int32"),
        (None, 47, {"max_seqlen_q": 4}, UnsupportedProblem, "q has shape"),
        (None, 0, {"max_seqlen_q": 4}, UnsupportedProblem, "max_seqlen_q=4 without cu_seqlens_q"),
    ],
)
def test_ragged_queries_that_make_no_sense(
    offsets: Any, total: int, more: dict[str, Any], error: type[Exception], said: str
) -> None:
    given, cu_seqlens = ragged(total) if total else arrays(), None if offsets is None else np.array(offsets)
    if cu_seqlens is not None and cu_seqlens.dtype == np.int64:
        cu_seqlens = cu_seqlens.astype(np.int32)
    with pytest.raises(error, match=said):
        sandbox.attention_paged(*given, cu_seqlens_q=cu_seqlens, **more)


def test_keys_beyond_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU only kernels can check it."""
    q, k, v, table, lengths = arrays()
    with pytest.raises(LaunchError, match=r"key_lengths\[\d\] is \d+: block_table has pages for \d+ keys"):
        sandbox.attention_paged(q, k, v, table, lengths + 11)
    monkeypatch.setattr(plan, "check_contents", lambda *_: None)
    with pytest.raises(LaunchError, match="block_table has a page that does not exist"):
        sandbox.attention_paged(q, k, v, np.where(table == table[0, 1], PAGES, table).astype(np.int32), lengths)
    for kernel in ("fwd_decode", "fwd_mma", "fwd_block2d"):
        with pytest.raises(LaunchError, match="key_lengths has more keys than block_table has pages for"):
            sandbox.attention_paged(q, k, v, table, lengths + 11, kernel=kernel)
