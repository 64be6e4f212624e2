"""`sandbox.append_kv`: appends keys and values to a cache, in place. Imported on demand."""

from __future__ import annotations

from typing import Any

from ..core.errors import UnsupportedProblem
from .call import call
from .options import check_dimensions, check_int32


def append_kv(
    k_new: Any, v_new: Any, k_pages: Any, v_pages: Any, block_table: Any, key_lengths: Any, *, cu_seqlens: Any = None
) -> None:
    """Writes new keys and values after the first key_lengths keys of each sequence, in place, in one launch. The host
    never waits for the GPU: the kernel reads block_table, key_lengths and cu_seqlens.

    k_new: (B, Hk, n, D); v_new: (B, Hk, n, Dv). With cu_seqlens, (B + 1,) int32, k_new is (total, Hk, D) and v_new
    (total, Hk, Dv), and rows cu_seqlens[b] to cu_seqlens[b + 1] belong to sequence b. k_pages: (pages, page_size, Hk,
    D); v_pages: (pages, page_size, Hk, Dv); any strides with a unit stride in D. block_table: (B, max_pages) int32,
    contiguous, as for `attention_paged`; None: k_pages and v_pages are dense caches (B, Hk, S, D) and (B, Hk, S, Dv).
    key_lengths: (B,) int32, before the call, which does not change it. The new rows of two sequences must not be in one
    place. Pages have the dtype of the new rows, or float8: values are then converted without a factor, and those beyond
    the range become the largest number.

    A page number out of range, a row beyond the table or the cache and invalid cu_seqlens are errors on the CPU backend
    and with SANDBOX_CHECKED=1; else a GPU does not write such rows. Raises UnsupportedProblem naming the unsupported
    value; CompileError, ToolchainMissing, GpuUnavailable, DriverError, LaunchError.
    """
    dense, packed = block_table is None, cu_seqlens is not None
    for name, x in (("k_new", k_new), ("v_new", v_new)):
        check_dimensions(name, x, "(total, Hk, D)" if packed else "(B, Hk, n, D)")
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        check_dimensions(name, x, "(B, Hk, S, D)" if dense else "(pages, page_size, Hk, D)")
    check_dimensions("key_lengths", key_lengths, "(B)")
    check_int32("key_lengths", key_lengths)
    none = key_lengths[:0]
    if packed:
        check_int32("cu_seqlens", cu_seqlens)
        k_new, v_new = (x.swapaxes(0, 1)[None] for x in (k_new, v_new))
    if not dense:
        check_int32("block_table", block_table)
        k_pages, v_pages = (x.swapaxes(1, 2) for x in (k_pages, v_pages))
    table, offsets = none.reshape(0, 0) if dense else block_table, cu_seqlens if packed else none
    call(_kernel_for(k_new, k_pages), k_new, v_new, table, key_lengths, offsets, k_pages, v_pages)


def _kernel_for(k_new: Any, k_pages: Any) -> str:
    """The name of the kernel for these dtypes. Raises UnsupportedProblem if there is none."""
    if k_pages.dtype == k_new.dtype:
        return "append_kv"
    names = [str(x.dtype).rpartition(".")[2] for x in (k_new, k_pages)]
    kernel = {"float8_e4m3fn": "append_kv_e4m3", "float8_e5m2": "append_kv_e5m2"}.get(names[1])
    if kernel is None:
        raise UnsupportedProblem(
            f"k_new is {names[0]} and k_pages is {names[1]}: pages must have the dtype of k_new, or float8_e4m3fn or "
            "float8_e5m2"
        )
    return kernel
