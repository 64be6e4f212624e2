"""Spec of `append_kv.cu`."""

from dataclasses import replace
from typing import Any

from sandbox.spec import ITEMSIZE, Arch, Dim3, Kernel, Operation, Tensor, Tile, cdiv


def offsets(rng: Any, shape: tuple[int, ...]) -> Any:
    """At most three rows per sequence."""
    counts = rng.integers(0, 4, shape)
    counts[:1] = 0
    return counts.cumsum()


def append(k_new: Any, v_new: Any, block_table: Any, key_lengths: Any, cu_seqlens: Any, k: Any, v: Any) -> Any:
    """k and v, (pages, Hk, page_rows, D), with the new rows of each sequence after its first key_lengths keys."""
    k, v, size = k.copy(), v.copy(), k.shape[2]
    for b, length in enumerate(key_lengths):
        if len(cu_seqlens):
            rows = [x[0, :, cu_seqlens[b] : cu_seqlens[b + 1]] for x in (k_new, v_new)]
        else:
            rows = [k_new[b], v_new[b]]
        for i in range(rows[0].shape[1]):
            j = max(int(length), 0) + i
            page = block_table[b, j // size] if len(block_table) else b
            k[page, :, j % size], v[page, :, j % size] = rows[0][:, i], rows[1][:, i]
    return k, v


def operation_for(pages: str = "") -> Operation:
    """`pages`: the dtype of the pages, by default that of the new rows, whose values are then copied exactly."""
    cache = {name: Tensor("pages", "Hk", "page_rows", d, dtype=pages, strided=True, aligned=False)
             for name, d in (("k_pages", "D"), ("v_pages", "Dv"))}  # fmt: skip
    # B sequences, k_new of N entries with n rows: N = B, or with cu_seqlens N = 1. offsets: B + 1, or 0 without
    # cu_seqlens; table_rows: B, or 0 without block_table.
    return Operation(
        dims=("B", "N", "n", "offsets", "table_rows", "max_pages", "pages", "page_rows", "Hk", "D", "Dv"),
        inputs={
            "k_new": Tensor("N", "Hk", "n", "D", strided=True, aligned=False),
            "v_new": Tensor("N", "Hk", "n", "Dv", strided=True, aligned=False),
            "block_table": Tensor(
                "table_rows",
                "max_pages",
                dtype="int32",
                aligned=False,
                values=lambda rng, s: rng.permutation(s[0] * s[1]).reshape(s),
            ),
            "key_lengths": Tensor("B", dtype="int32", aligned=False, values=lambda rng, s: rng.integers(-1, 5, s)),
            "cu_seqlens": Tensor("offsets", dtype="int32", aligned=False, values=offsets),
            **cache,
        },
        outputs=cache,
        reference=append,
        bound=None if pages else lambda p, exact: 0.0,
        nbytes=lambda p: p.N * p.n * p.Hk * (p.D + p.Dv) * (ITEMSIZE[p.dtype] + ITEMSIZE[pages or p.dtype]),
        cases=(
            "3,1,10,4,3,2,7,16,2,64,64",
            "3,3,9,0,3,4,13,4,2,40,24",
            "2,2,5,0,0,1,2,12,3,59,64",
            "4,1,12,5,0,1,4,9,1,128,128",
            "1,1,1,2,1,9,9,1,4,7,9",
        ),
        shapes=("64,64,1,0,64,16,1024,16,8,128,128", "64,1,4096,65,64,32,2048,16,8,128,128"),
    )


def grid(p: Any, t: Tile) -> Dim3:
    """A warp per row and head."""
    return cdiv(p.N * p.n, t.WARPS), p.Hk, 1


def supports(p: Any, arch: Arch | None) -> str | None:
    """The sizes that must agree."""
    rules = (
        (
            p.offsets in (0, p.B + 1),
            f"cu_seqlens has {p.offsets} elements: it must have B + 1, and key_lengths has B={p.B}",
        ),
        (
            p.N == 1 if p.offsets else p.N == p.B,
            f"k_new has {p.N} batch entries: with cu_seqlens it must have 1"
            if p.offsets
            else f"k_new and key_lengths have B={p.N} and B={p.B}: they must be the same",
        ),
        (p.table_rows in (0, p.B), f"block_table has {p.table_rows} rows: it must have B={p.B}, as key_lengths"),
        (
            p.table_rows or p.pages == p.B,
            f"k_pages has {p.pages} batch entries: without block_table it must have B={p.B}",
        ),
        (not p.table_rows or p.page_rows, "k_pages has page_size=0: it must be at least 1"),
    )
    return next((reason for holds, reason in rules if not holds), None)


kernel = Kernel(
    name="append_kv",
    computes=operation_for(),
    summary="appends rows of K and V to pages or dense caches",
    dtypes=("float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"),
    tiles=(Tile(WARPS=4),),
    space={"WARPS": (1, 2, 4, 8)},
    grid=grid,
    block=lambda t: (32 * t.WARPS, 1, 1),
    supports=supports,
    args=("k_new", "v_new", "block_table", "key_lengths", "cu_seqlens", "k_pages", "v_pages", "N", "n", "B", "offsets",
          "table_rows", "max_pages", "pages", "page_rows", "D", "Dv"),
)  # fmt: skip
kernels = (
    kernel,
    *(
        replace(
            kernel,
            name=f"append_kv_{name}",
            computes=operation_for(f"float8_{name}"),
            summary=f"append_kv to pages in float8_{name}",
            dtypes=("float32", "float16", "bfloat16"),
            macros={f"PAGES_{name.upper()}": 1},
        )
        for name in ("e4m3", "e5m2")
    ),
)
