"""sandbox.append_kv: to pages and to dense caches, in place, against NumPy and by attention afterwards."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sandbox
from sandbox.core.errors import LaunchError, UnsupportedProblem

torch = pytest.importorskip("torch")

B, Hk, D, Dv, SIZE, MOST, PAGES = 3, 2, 40, 24, 8, 4, 14
LENGTHS = np.array([7, 0, 20], np.int32)
OFFSETS = np.array([0, 9, 9, 13], np.int32)  # nine rows, none, four; and a row of no sequence


def drawn(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float16)


def pages() -> tuple[Any, ...]:
    """k_pages and v_pages, slices of one array as some servers allocate them, and block_table."""
    both = drawn(PAGES, 2, SIZE, Hk, D)
    table = np.random.default_rng(1).permutation(PAGES)[: B * MOST].reshape(B, MOST).astype(np.int32)
    return both[:, 0], both[:, 1, :, :, :Dv], table


def test_to_pages() -> None:
    k_pages, v_pages, table = pages()
    before, others = [x.copy() for x in (k_pages, v_pages)], k_pages.base[:, 1, :, :, Dv:].copy()
    k_new, v_new = drawn(14, Hk, D), drawn(14, Hk, Dv)
    assert sandbox.append_kv(k_new, v_new, k_pages, v_pages, table, LENGTHS, cu_seqlens=OFFSETS) is None
    for got, expected, new in zip((k_pages, v_pages), before, (k_new, v_new), strict=True):
        for b, n in enumerate(np.diff(OFFSETS)):
            for i in range(n):
                j = LENGTHS[b] + i
                expected[table[b, j // SIZE], j % SIZE] = new[OFFSETS[b] + i]
        assert np.array_equal(got, expected)
    assert np.array_equal(k_pages.base[:, 1, :, :, Dv:], others)


@pytest.mark.parametrize("ragged", [False, True])
def test_to_dense_caches(ragged: bool) -> None:
    """The keys that attention then sees are those of the concatenation."""
    caches, new = (drawn(B, Hk, 30, D), drawn(B, Hk, 30, Dv)), (drawn(B, Hk, 5, D), drawn(B, Hk, 5, Dv))
    expected = [cache.copy() for cache in caches]
    for cache, rows in zip(expected, new, strict=True):
        for b, length in enumerate(LENGTHS):
            cache[b, :, length : length + 5] = rows[b]
    if ragged:
        rows = [x.swapaxes(1, 2).reshape(-1, Hk, x.shape[3]) for x in new]
        sandbox.append_kv(*rows, *caches, None, LENGTHS, cu_seqlens=np.arange(0, 20, 5, dtype=np.int32))
    else:
        sandbox.append_kv(*new, *caches, None, LENGTHS)
    assert all(np.array_equal(got, wanted) for got, wanted in zip(caches, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_conversion_to_float8(dtype: Any) -> None:
    """As PyTorch converts, except that numbers out of range become the largest one."""
    k_new, v_new = torch.from_numpy(drawn(B, Hk, 1, D)).bfloat16(), torch.from_numpy(drawn(B, Hk, 1, Dv)).bfloat16()
    k_new[0, 0, 0, 0] = -1e6
    caches = torch.zeros(B, Hk, 21, D, dtype=dtype), torch.zeros(B, Hk, 21, Dv, dtype=dtype)
    sandbox.append_kv(k_new, v_new, *caches, None, torch.from_numpy(LENGTHS))
    largest = torch.finfo(dtype).max
    for cache, rows in zip(caches, (k_new, v_new), strict=True):
        for b, length in enumerate(LENGTHS):
            wanted = rows[b, :, 0].float().clamp(-largest, largest).to(dtype)
            assert torch.equal(cache[b, :, length].float(), wanted.float())
            assert not cache[b, :, :length].float().any()


def test_a_step_of_a_server() -> None:
    """Rows are appended, then attended to, with the same offsets."""
    k_pages, v_pages, table = (torch.from_numpy(np.ascontiguousarray(x)) for x in pages())
    lengths, offsets = torch.from_numpy(LENGTHS), torch.from_numpy(OFFSETS)
    q, k_new, v_new = (torch.from_numpy(drawn(14, heads, d)) for heads, d in ((4, D), (Hk, D), (Hk, Dv)))
    sandbox.append_kv(k_new, v_new, k_pages, v_pages, table, lengths, cu_seqlens=offsets)
    after = lengths + offsets.diff().int()
    out = sandbox.attention_paged(q, k_pages, v_pages, table, after, cu_seqlens_q=offsets, causal=True)
    keys, values = (sandbox.reference.gather_pages(x.numpy(), table.numpy(), after.numpy()) for x in (k_pages, v_pages))
    assert np.array_equal(keys[0, :, 7:16], k_new[:9].swapaxes(0, 1).numpy())
    expected, _ = sandbox.reference.attention(
        q[9:13].swapaxes(0, 1)[None].numpy(), keys[2:, :, :24], values[2:, :, :24], causal=True
    )
    assert np.abs(out[9:13].swapaxes(0, 1).numpy() - expected[0]).max() < 3e-3


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"block_table": np.full((B, MOST), PAGES, np.int32)},
            LaunchError,
            r"block_table\[0, 0\] is 14, a page that does not exist: k_pages has 14$",
        ),
        (
            {"block_table": np.repeat([[0, 1, -3, 2]], B, 0).astype(np.int32), "key_lengths": np.int32([0, 16, 20])},
            LaunchError,
            r"block_table\[2, 2\] is -3, a page that does not exist: k_pages has 14$",
        ),
        (
            {"key_lengths": np.array([24, 0, 0], np.int32)},
            LaunchError,
            r"key_lengths\[0\] is 24, and 9 new rows make 33: block_table has pages for 32 keys$",
        ),
        ({"cu_seqlens": np.array([0, 9, 3, 13], np.int32)}, LaunchError, r"cu_seqlens decreases from 9 to 3 at cu_s"),
        ({"cu_seqlens": np.array([0, 9, 9, 15], np.int32)}, LaunchError, r"cu_seqlens\[3\] is 15, beyond the last"),
        (
            {"cu_seqlens": OFFSETS[:, None].copy()},
            UnsupportedProblem,
            r"cu_seqlens has shape \(4, 1\): it must be \(B \+ 1,\)",
        ),
        (
            {"cu_seqlens": np.array(0, np.int32)},
            UnsupportedProblem,
            r"cu_seqlens has shape \(\): it must be \(B \+ 1,\)",
        ),
        (
            {"block_table": np.zeros(B * MOST, np.int32)},
            UnsupportedProblem,
            r"block_table has shape \(12,\): it must be \(B, max_pages\)",
        ),
        (
            {"block_table": np.array(0, np.int32)},
            UnsupportedProblem,
            r"block_table has shape \(\): it must be \(B, max_pages\)",
        ),
        ({"cu_seqlens": OFFSETS[:3].copy()}, UnsupportedProblem, "cu_seqlens has 3 elements: it must have B"),
        ({"cu_seqlens": None}, UnsupportedProblem, r"k_new has shape \(14, 2, 40\): it must be \(B, Hk, n, D\)"),
        ({"block_table": np.zeros((2, 4), np.int32)}, UnsupportedProblem, "block_table has 2 rows: it must have B=3"),
        ({"block_table": None}, UnsupportedProblem, "v_new|k_pages"),
        ({"key_lengths": LENGTHS.astype(np.int64)}, UnsupportedProblem, "key_lengths is int64: it must be int32"),
        (
            {"k_pages": np.zeros((PAGES, SIZE, Hk + 1, D), np.float16)},
            UnsupportedProblem,
            r"k_pages has shape \(14, 8, 3, 40\): it must be \(pages, page_size, Hk, D\) with Hk=2 and D=40, as k_new",
        ),
        (
            {"k_pages": np.zeros((PAGES, SIZE + 1, Hk, D), np.float16)},
            UnsupportedProblem,
            r"k_pages has shape \(14, 9, 2, 40\) and v_pages \(14, 8, 2, 24\): they must be the same",
        ),
        ({"k_pages": np.zeros((PAGES, SIZE, Hk, D), np.float32)}, UnsupportedProblem, "k_pages is float32"),
    ],
)
def test_what_makes_no_sense(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    k_pages, v_pages, table = pages()
    given = {"k_pages": k_pages, "block_table": table, "key_lengths": LENGTHS, "cu_seqlens": OFFSETS, **changes}
    with pytest.raises(error, match=said):
        sandbox.append_kv(drawn(14, Hk, D), drawn(14, Hk, Dv), v_pages=v_pages, **given)


def test_an_unsupported_dtype_is_rejected_with_the_name_of_the_array() -> None:
    k_pages, v_pages, table = pages()
    new = drawn(14, Hk, D), drawn(14, Hk, Dv).astype(np.float64)
    with pytest.raises(UnsupportedProblem, match=r"append_kv: v_new: dtype float64 \(NumPy\) is not supported"):
        sandbox.append_kv(*new, k_pages, v_pages, table, LENGTHS, cu_seqlens=OFFSETS)


@pytest.mark.parametrize("calls", [1, 2], ids=["new plan", "known plan"])
def test_autograd_notices_what_was_written(calls: int) -> None:
    """A tensor that was saved for a backward and then changed would give a wrong gradient."""
    k_pages, v_pages, table = (torch.from_numpy(np.ascontiguousarray(x)) for x in pages())
    k_new, v_new = torch.from_numpy(drawn(B, Hk, 1, D)), torch.from_numpy(drawn(B, Hk, 1, Dv))
    for _ in range(calls):
        factor = torch.ones((), dtype=torch.float16, requires_grad=True)
        results = [(factor * x).sum() for x in (k_pages, v_pages, k_new)]
        sandbox.append_kv(k_new, v_new, k_pages, v_pages, table, torch.from_numpy(LENGTHS))
    for y in results[:2]:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
    results[2].backward()
    with torch.inference_mode():
        caches = torch.zeros(B, Hk, 30, D).half(), torch.zeros(B, Hk, 30, Dv).half()  # without a version
        sandbox.append_kv(k_new, v_new, *caches, None, torch.from_numpy(LENGTHS))


def moved(x: np.ndarray) -> Any:
    """A tensor of the same elements that begins one element after a multiple of 16 bytes."""
    x = torch.from_numpy(np.ascontiguousarray(x))
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def test_arrays_that_begin_anywhere() -> None:
    k_pages, v_pages, table = pages()
    given = {"k_new": drawn(14, Hk, D), "v_new": drawn(14, Hk, Dv), "k_pages": k_pages, "v_pages": v_pages}
    given |= {"block_table": table, "key_lengths": LENGTHS, "cu_seqlens": OFFSETS}
    tensors = {name: moved(x) for name, x in given.items()}
    assert all(x.data_ptr() % 16 for x in tensors.values())
    for _ in range(2):
        sandbox.append_kv(**tensors)
    sandbox.append_kv(**given)
    for name, x in given.items():
        assert np.array_equal(tensors[name].numpy(), x), name


@pytest.mark.parametrize("dense", [False, True])
def test_arrays_of_two_libraries(dense: bool) -> None:
    k_pages, v_pages, table = pages()
    if dense:
        k_pages, v_pages, table = drawn(B, Hk, 30, D), drawn(B, Hk, 30, Dv), None
    given = {"k_new": drawn(14, Hk, D), "v_new": drawn(14, Hk, Dv), "k_pages": k_pages, "v_pages": v_pages}
    given |= {"block_table": table, "key_lengths": LENGTHS, "cu_seqlens": OFFSETS}
    for name in given.keys() - ({"block_table"} if dense else {}):
        said = "PyTorch array and v_new a NumPy" if name == "k_new" else f"NumPy array and {name} a PyTorch"
        with pytest.raises(UnsupportedProblem, match=f"^k_new is a {said} array: pass arrays of one library"):
            sandbox.append_kv(**given | {name: torch.from_numpy(np.ascontiguousarray(given[name]))})


def test_a_full_cache() -> None:
    """A message with values; an empty sequence may be full, and nothing is written."""
    caches, new = (drawn(B, Hk, 30, D), drawn(B, Hk, 30, Dv)), (drawn(1, Hk, D), drawn(1, Hk, Dv))
    before, offsets = [x.copy() for x in caches], np.array([0, 0, 0, 1], np.int32)
    with pytest.raises(LaunchError, match=r"key_lengths\[2\] is 30, and 1 new row makes 31: k_pages has room for 30"):
        sandbox.append_kv(*new, *caches, None, np.array([30, 0, 30], np.int32), cu_seqlens=offsets)
    assert all(np.array_equal(x, y) for x, y in zip(caches, before, strict=True))
    sandbox.append_kv(*new, *caches, None, np.array([30, -4, 29], np.int32), cu_seqlens=offsets)
    assert np.array_equal(caches[0][2, :, 29], new[0][0])


def test_the_kernel_checks_the_same() -> None:
    """As `SANDBOX_CHECKED=1` does on a GPU, whose host does not read the values."""
    k_pages, v_pages, table = pages()
    paged = [x.swapaxes(1, 2) for x in (k_pages, v_pages)]
    rows = [x.swapaxes(0, 1)[None] for x in (drawn(14, Hk, D), drawn(14, Hk, Dv))]
    for changed, said in (
        ((table + PAGES, LENGTHS, OFFSETS), "block_table has a page that does not exist"),
        ((table, LENGTHS + 24, OFFSETS), "more keys than block_table, or the cache, has room for"),
        ((table, LENGTHS, np.array([0, 9, 3, 13], np.int32)), "cu_seqlens decreases"),
        ((table, LENGTHS, np.array([0, 9, 9, 15], np.int32)), "ends beyond the last row of k_new"),
    ):
        with pytest.raises(LaunchError, match=said):
            sandbox.call("append_kv", *rows, *changed, *paged)


@pytest.mark.parametrize("which", ["k_pages", "v_pages"])
def test_read_only_pages(which: str, tmp_path: Path) -> None:
    """Also if a plan for writable arrays of this kind exists, and in a read-only memory map."""
    k_pages, v_pages, table = pages()
    given = {"k_pages": k_pages, "v_pages": v_pages}
    new = drawn(14, Hk, D), drawn(14, Hk, Dv)
    sandbox.append_kv(*new, **given, block_table=table, key_lengths=LENGTHS, cu_seqlens=OFFSETS)
    np.save(tmp_path / "pages.npy", given[which])
    read_only = given[which].view()
    read_only.flags.writeable = False
    for array in (read_only, np.load(tmp_path / "pages.npy", mmap_mode="r")):
        before = array.copy()
        with pytest.raises(UnsupportedProblem, match=f"append_kv writes into {which}, which is read-only: pass a wri"):
            sandbox.append_kv(
                *(x + 1 for x in new), **{**given, which: array}, block_table=table, key_lengths=LENGTHS,
                cu_seqlens=OFFSETS,
            )  # fmt: skip
        assert np.array_equal(array, before)


@pytest.mark.parametrize(("flag", "reason"), [(1, "is read-only"), (2, "is exported as a copy")])
def test_dlpack_pages_that_cannot_be_written(flag: int, reason: str) -> None:
    """Flags of a DLPack capsule; the older protocol has none."""

    class Pages:
        def __init__(self, array: np.ndarray, versioned: bool = True):
            self.array, self.versioned = array, versioned

        def __dlpack__(self, max_version: Any = None) -> Any:
            if not self.versioned:
                return self.array.__dlpack__()
            capsule = self.array.__dlpack__(max_version=(1, 0))
            get = ctypes.pythonapi.PyCapsule_GetPointer
            get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
            ctypes.c_uint64.from_address(get(capsule, b"dltensor_versioned") + 24).value |= flag
            return capsule

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

        def __array_namespace__(self) -> Any:
            return np

    caches = np.zeros((B, Hk, 30, D), np.float16), np.zeros((B, Hk, 30, Dv), np.float16)
    others = drawn(B, Hk, 1, D), drawn(B, Hk, 1, Dv), np.zeros((0, 0), np.int32), LENGTHS, np.zeros(0, np.int32)

    def append_to(k_pages: Any) -> Any:
        return sandbox.call("append_kv", *map(Pages, others), k_pages, Pages(caches[1], versioned=False))

    with pytest.raises(UnsupportedProblem, match=f"append_kv writes into k_pages, which {reason}: pass a writable"):
        append_to(Pages(caches[0]))
    assert not caches[0].any()
    writable = Pages(caches[0], versioned=False)
    assert append_to(writable)[0] is writable
    assert caches[0].any()
