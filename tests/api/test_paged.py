"""sandbox.attention_paged: pages of NumPy arrays and PyTorch tensors, against the gathered keys."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import sandbox
from sandbox.core.errors import LaunchError, UnsupportedProblem

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
        (3, lambda x: np.where(x == x[0, 1], PAGES, x).astype(np.int32), LaunchError, "a page that does not exist"),
        (3, lambda x: x.astype(np.int64), UnsupportedProblem, "block_table is int64: it must be int32"),
        (3, lambda x: x[:2], UnsupportedProblem, r"it must be \(B, max_pages\)"),
        (4, lambda x: x[:2], UnsupportedProblem, "key_lengths has shape"),
        (1, lambda x: x[0], UnsupportedProblem, r"\(pages, page_size, Hk, D\)"),
        (0, lambda x: x.astype(np.float32), UnsupportedProblem, "q is float32"),
    ],
)
def test_what_makes_no_sense(which: int, other: Any, error: type[Exception], said: str) -> None:
    given = arrays()
    given[which] = other(given[which])
    with pytest.raises(error, match=said):
        sandbox.attention_paged(*given)


def test_pages_of_other_sizes() -> None:
    q, k, v, table, lengths = arrays()
    with pytest.raises(UnsupportedProblem, match="k_pages has page_size=8: it must be a positive multiple of 16"):
        sandbox.attention_paged(q, k[:, :8], v[:, :8], table, lengths)
    shapes = f"k_pages has shape {k.shape} and v_pages {v[:, :, :1].shape}"
    with pytest.raises(UnsupportedProblem, match=re.escape(shapes)):
        sandbox.attention_paged(q, k, v[:, :, :1], table, lengths)


def test_no_pages_and_no_keys() -> None:
    q, k, v, table, lengths = arrays()
    for given in ((k[:0], v[:0], table, lengths), (k, v, table[:, :0], lengths), (k, v, table, 0 * lengths)):
        assert (sandbox.attention_paged(q, *given) == 0).all()
