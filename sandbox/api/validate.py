"""Validation of a caller's arrays and options, and the problem that they define."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.dtypes import FLOAT8, ITEMSIZE, OF_16_BITS, default_out_dtype
from ..core.errors import LaunchError, UnsupportedProblem
from ..core.normalise import cdiv, normalise_causal
from ..core.options import ARRAYS, Sizes
from ..core.problem import Problem
from ..core.score import BLOCK_MAP
from ..launch.array_view import DTYPE_NAMES, boxes
from ..launch.dlpack import HOST, ArrayView, Device, dense_strides, layout
from ..launch.dlpack import view as view_of
from ..launch.host import host_array
from .options import BLOCK_TABLE, CU_SEQLENS, DESCALE, DIFFERENTIABLE, FIELD_OPTIONS, Options


def problem_of(views: Mapping[str, ArrayView], options: Options) -> Problem:
    """The problem that arrays define. `views`: by the names that plans use: q, k, v and `options.array_names`; in a
    backward also dout, out and lse. The caller's names may differ (k_pages; see `argument_name`).

    Raises UnsupportedProblem naming the unsupported value, SpecError for an invalid option."""
    q, k, v = views["q"], views["k"], views["v"]
    for name in ("q", "k", "v"):
        _check_tensor(argument_name(name, views), views[name])
    (_, q_shape), (k_name, k_shape), (v_name, v_shape) = given = [_as_given(name, views) for name in ("q", "k", "v")]
    for name, view in views.items():
        if view.device != q.device:
            raise UnsupportedProblem(
                f"q is on {_name(q.device)} and {argument_name(name, views)} on {_name(view.device)}: copy both to one"
            )
    _check_dtypes(views)
    for name, view, shape in ((k_name, k, k_shape), (v_name, v, v_shape)):
        if view.shape[0] != q.shape[0] and BLOCK_TABLE not in views:
            raise UnsupportedProblem(f"q has shape {q_shape} and {name} {shape}: B must be the same")
    if k.shape[3] != q.shape[3]:
        raise UnsupportedProblem(f"q has shape {q_shape} and {k_name} {k_shape}: D must be the same")
    if v.shape[:3] != k.shape[:3]:
        raise UnsupportedProblem(
            f"{k_name} has shape {k_shape} and {v_name} {v_shape}: they must be the same, except for the last dimension"
        )
    B, H, Sq, D = q.shape
    Hk, Sk = k.shape[1:3]
    for name, shape in given:
        if shape[-1] == 0:
            raise UnsupportedProblem(f"{name} has shape {shape}: its last dimension must be at least 1")
    if H % Hk if Hk else H:
        pages = f" (its shape is (pages, page_size, Hk, D) = {k_shape})" if BLOCK_TABLE in views else ""
        raise UnsupportedProblem(f"q has H={H} heads and {k_name} has Hk={Hk}{pages}: H must be a multiple of Hk")
    fields: dict[str, Any] = {name: getattr(options, name) for name in FIELD_OPTIONS}
    if options.max_seqlen:
        fields["ragged"] = Sq, Sk
        B, Sq, Sk = _batch(views, options.max_seqlen)
    if BLOCK_TABLE in views:
        fields["page_size"], fields["pages"] = k.shape[2], k.shape[0]
        Sk = _most_keys(views, B)
    fields |= _float8(views, options)
    fields |= _shapes(views, (B, H, Sq, Sk), options, fields.get("out_dtype", ""))
    causal = normalise_causal(options.causal)
    memory = layout(views[name] for name in ("q", "k", "v", "dout", "out") if name in views)
    if BLOCK_TABLE in views:
        memory["mappable"] &= all(_mappable_pages(view) for view in (k, v))
    if "bias" in views:
        memory["bias_boxes"] = boxes(views["bias"])  # whether a tensor map can describe it
    fields |= {"causal": causal, "scale": options.scale, "latent": _latent(views), **memory}
    problem = Problem(B, H, Sq, Sk, D, Hk=Hk, dtype=q.dtype, Dv=v.shape[3], **fields)
    if BLOCK_MAP in views:
        _check_map(views[BLOCK_MAP], problem)
    return problem


def _check_dtypes(views: Mapping[str, ArrayView]) -> None:
    """Raises UnsupportedProblem for a combination of the dtypes of q, k and v that no kernel supports."""
    q, k, v = (views[name].dtype for name in ("q", "k", "v"))
    k_name, v_name = (argument_name(name, views) for name in ("k", "v"))
    if k != q and not (k in FLOAT8 and q in OF_16_BITS):
        keys = f"; {k} keys need q in float16, bfloat16 or {k}" if k in FLOAT8 else ""
        raise UnsupportedProblem(f"q is {q} and {k_name} is {k}: convert both to one dtype{keys}")
    if v != k and not (v in FLOAT8 and k in FLOAT8):
        both = "float8" if q in FLOAT8 else f"{q}, the dtype of q{', or both to float8' if q in OF_16_BITS else ''}"
        raise UnsupportedProblem(f"{k_name} is {k} and {v_name} is {v}: convert both to {both}")


def _mappable_pages(view: ArrayView) -> bool:
    """Whether one tensor map can describe the rows of all pages (pages, Hk, page_size, D): the step from the last row
    of a page to the first row of the next one is the row stride, too; and strides are below 2^34 bytes
    (tensor_maps.box_of)."""
    far = any(stride * ITEMSIZE[view.dtype] >= 2**34 for stride in view.strides[1:3])
    return not far and (view.shape[0] <= 1 or view.strides[0] == view.shape[2] * view.strides[2])


def _latent(views: Mapping[str, ArrayView]) -> bool:
    """Whether v is a view of the first columns of k: latent attention. It is forward only."""
    k, v = views["k"], views["v"]
    if "dout" in views or v.pointer != k.pointer or v.dtype != k.dtype or v.shape[3] > k.shape[3] or 0 in v.shape:
        return False
    return all(n == 1 or x == y for n, x, y in zip(k.shape[:3], k.strides, v.strides, strict=False))


def _check_map(view: ArrayView, p: Problem) -> None:
    if p.mask:
        raise UnsupportedProblem(
            "score has a block map, which contains only the mask of the score: omit mask=, or pass the score without "
            "with_blocks"
        )
    assert p.score is not None
    if p.page_size or p.ragged or not p.score.hides:
        what = "a paged batch" if p.page_size else "a ragged batch" if p.ragged else "a Score without a mask"
        raise UnsupportedProblem(
            f"score has a block map, which is not supported for {what}: pass the score without with_blocks"
        )
    if (
        view.shape != p.block_map
        or view.dtype != "int32"
        or view.strides != dense_strides(view.shape)
        or view.alignment < 16
    ):
        raise UnsupportedProblem(
            f"score has a block map of shape {view.shape}, {view.dtype}: it must be the array that sandbox.block_map "
            f"returns for the score and {p}: shape {p.block_map}, int32, contiguous, aligned to 16 bytes"
        )
    named = p.score.named_by_mask
    if p.key_lengths and "Sk" in named:
        raise UnsupportedProblem(
            "score has a block map, and its mask reads Sk, which with key_lengths differs between batch entries: "
            "omit Score.with_blocks"
        )
    if p.score.made_for is None:
        return
    # {size: names; if the mask uses one of them, the map depends on this size}. A map always depends on Sk, because its
    # bits beyond the Sk for which it was made are 0. So the set for "Sk" is `named` itself: `names & named` is then
    # never empty, as `named_by_mask` contains "true" even if the mask has no names.
    used_by = {"B": {"b"}, "H": {"h"}, "Sq": {"i", "Sq"}, "Sk": named}
    for (size, names), made, own in zip(used_by.items(), p.score.made_for, (p.B, p.H, p.Sq, p.Sk), strict=True):
        if made != own and names & named:
            raise UnsupportedProblem(
                f"score has a block map that was made for {size}={made}, and this problem has {size}={own}: make "
                "another one with sandbox.block_map"
            )


def _batch(views: Mapping[str, ArrayView], longest: tuple[int | None, int | None]) -> tuple[int, int, int]:
    """The number of sequences, and the maximum number of queries and of keys of a sequence."""
    queries = views[CU_SEQLENS[0]]
    for name, view in ((name, views[name]) for name in CU_SEQLENS if name in views):
        if len(view.shape) != 1 or view.shape[0] < 1 or view.shape != queries.shape:
            raise UnsupportedProblem(
                f"{name} has shape {view.shape}: it must be (B + 1,), equal for cu_seqlens_q and cu_seqlens_k"
            )
    most = (
        rows if most is None else min(rows, most)
        for rows, most in zip((views["q"].shape[2], views["k"].shape[2]), longest, strict=True)
    )
    return queries.shape[0] - 1, *most  # type: ignore[return-value]


def _most_keys(views: Mapping[str, ArrayView], B: int) -> int:
    """The maximum number of keys per batch entry that the block table can hold. Validates pages and table."""
    table, (pages, _, page_size, _) = views[BLOCK_TABLE], views["k"].shape
    if table.dtype != "int32":
        raise UnsupportedProblem(f"{BLOCK_TABLE} is {table.dtype}: it must be int32")
    if len(table.shape) != 2 or table.shape[0] != B:
        raise UnsupportedProblem(f"{BLOCK_TABLE} has shape {table.shape}: it must be (B, max_pages), B={B}")
    if not page_size:
        raise UnsupportedProblem("k_pages has page_size=0: it must be at least 1")
    return table.shape[1] * page_size if pages else 0


def _float8(views: Mapping[str, ArrayView], options: Options) -> dict[str, Any]:
    """The fields of a Problem for float8: the dtypes of k, v and out, descale. Raises UnsupportedProblem for float8
    without descale, and for its gradient."""
    dtype, dtype_k = views["q"].dtype, views["k"].dtype
    name = "q" if dtype in FLOAT8 else argument_name("k", views)
    if dtype_k in FLOAT8 and "dout" in views:
        raise UnsupportedProblem(
            f"{name} is {dtype_k}, which has no gradient: convert q, k and v to float16 or bfloat16"
        )
    if dtype_k in FLOAT8 and not options.descale:
        raise UnsupportedProblem(
            f"{name} is {dtype_k}: it needs descale, the factors of q, k and v: three numbers, such as (1.0, 1.0, "
            "1.0), or float32 arrays of shape (B, heads)"
        )
    for name in DESCALE:
        if name in views and views[name].dtype != "float32":
            raise UnsupportedProblem(f"{argument_name(name, views)} is {views[name].dtype}: it must be float32")
    shapes = (views[name].shape if name in views else () for name in DESCALE)
    descale = tuple(s if n is None else n for n, s in zip(options.descale, shapes, strict=False))
    out_dtype = options.out_dtype or default_out_dtype(dtype)
    return {"kv_dtype": dtype_k, "v_dtype": views["v"].dtype, "out_dtype": out_dtype, "descale": descale}


def _check_tensor(name: str, view: ArrayView) -> None:
    if view.dtype not in ITEMSIZE:
        raise UnsupportedProblem(f"{name} is {view.dtype}: convert to one of {DTYPE_NAMES}")
    if len(view.shape) != 4:
        raise UnsupportedProblem(f"{name} has shape {view.shape}: it must be (B, heads, S, D), four dimensions")
    if view.strides[3] != 1 and view.shape[3] > 1 and 0 not in view.shape:
        raise UnsupportedProblem(
            f"{name} has stride {view.strides[3]} in D: it must be 1 (pass a contiguous copy of {name})"
        )


DTYPES = {name: array.dtype for name, array in ARRAYS.items() if array.dtype}  # {array: its only dtype}


def _shapes(views: Mapping[str, ArrayView], sizes: Sizes, options: Options, out_dtype: str) -> dict[str, Any]:
    """The fields of a Problem for the arrays of score options.

    A dimension of stride 0 that may broadcast has size 1 in the Problem. If the call computes the gradient of the
    bias, the bias keeps its full shape, which its gradient has, too.
    """
    whole = "dbias" in options.gradients
    found: dict[str, Any] = {}
    for name, array in ((name, array) for name, array in ARRAYS.items() if name in views):
        view = views[name]
        if array.dtype and view.dtype != array.dtype:
            raise UnsupportedProblem(f"{name} is {view.dtype}: it must be {array.dtype}")
        if not array.axes:
            if math.prod(view.shape) != 1:
                raise UnsupportedProblem(f"{name} has shape {view.shape}: it must have one element")
            continue
        missing = len(array.axes) - len(view.shape) if array.broadcast else 0
        shape = (*(1,) * missing, *view.shape)
        if not array.accepts(shape, sizes):
            required = array.required(sizes)
            if options.max_seqlen and array.broadcast:
                required = _of_sequences(required, options.max_seqlen, paged=BLOCK_TABLE in views)
            raise UnsupportedProblem(f"{name} has shape {view.shape}: it must {required}")
        if array.broadcast and not (whole and name in DIFFERENTIABLE):
            shape = (*(1,) * missing, *(n if s else 1 for n, s in zip(view.shape, view.strides, strict=True)))
        found[name] = shape if array.shape_is_field else True
    if bias := views.get("bias"):
        if bias.dtype not in (out_dtype, "float32"):
            raise UnsupportedProblem(f"bias is {bias.dtype}: it must be float32, or {out_dtype}, the dtype of out")
        found["bias_dtype"] = bias.dtype
    return found


def _of_sequences(required: str, longest: tuple[int | None, int | None], paged: bool) -> str:
    """The text `required` for a ragged batch: with max_seqlen_q and max_seqlen_k in place of Sq and Sk, and their
    defaults."""
    names = ["max_seqlen_q"] if paged else ["max_seqlen_q", "max_seqlen_k"]
    for name, dim in zip(names, ("Sq", "Sk"), strict=False):
        required = required.replace(dim, name)
    missing = [name for name, n in zip(names, longest, strict=False) if n is None]
    if not missing:
        return required
    were, defaults = ("were", "their defaults are") if len(missing) > 1 else ("was", "its default is")
    return (
        f"{required}; {' and '.join(missing)} {were} not passed: {defaults} the number of rows of "
        f"{' and '.join(name[-1] for name in missing)}"
    )


def unreadable(views: Mapping[str, ArrayView], p: Problem) -> list[str]:
    """Names of the arrays with a layout that no kernel can read. Validates dout, out, lse and dlse against q and v
    first."""
    rows = p.batches, p.H, p.rows[0]
    wide = *rows, p.Dv
    found = [
        name
        for name, array in ARRAYS.items()
        if array.axes.endswith("j") and name in views and getattr(p, name)[-1] > 1 and views[name].strides[-1] != 1
    ]
    for name, shape, dtype in (("dout", wide, p.dtype), ("out", wide, p.dtype), ("lse", rows, "float32"),
                               ("dlse", rows, "float32")):  # fmt: skip
        if name not in views:
            continue
        view = views[name]
        if view.shape != shape:
            dims = "(B, H, Sq)" if shape == rows else "(B, H, Sq, Dv)"
            raise UnsupportedProblem(
                f"{name} has shape {view.shape}: it must be {dims} = {shape}, the shape of the "
                f"{name.removeprefix('d')} that attention_forward returns"
            )
        if view.dtype != dtype:
            because = "" if shape == rows else f", because q is {p.dtype}"
            raise UnsupportedProblem(f"{name} is {view.dtype}: it must be {dtype}{because}")
        wanted = dense_strides(shape) if shape == rows else (*view.strides[:3], 1)
        if 0 not in shape and any(s != w for n, s, w in zip(shape, view.strides, wanted, strict=True) if n > 1):
            found.append(name)
    return found


def check_contents(p: Problem, arrays: Mapping[str, Any]) -> None:
    """Raises LaunchError for contents of host arrays that the CPU backend rejects: cu_seqlens that do not match q or k,
    sequences longer than max_seqlen, pages that do not exist. The kernels check the same, but their messages name no
    value. `arrays`: by the names that plans use, as in `problem_of`; q, k and v are not read."""
    for which, name, rows in zip("qk", CU_SEQLENS, p.rows, strict=True):
        if name in arrays:
            _check_offsets(name, argument_name(which, arrays), host_array(arrays[name]), rows)
            _check_lengths(which, host_array(arrays[name]), p.Sk if which == "k" else p.Sq)
    if BLOCK_TABLE not in arrays:
        return
    table = host_array(arrays[BLOCK_TABLE])
    for b, length in enumerate(host_array(arrays["key_lengths"])):
        if length > p.Sk:
            raise LaunchError(f"key_lengths[{b}] is {length}: block_table has pages for {p.Sk} keys")
        _check_pages(table, b, 0, cdiv(max(int(length), 0), p.page_size), p.pages)


def check_append(k_new: Any, k_pages: Any, block_table: Any, key_lengths: Any, cu_seqlens: Any) -> None:
    """`check_contents` for `append_kv`: new rows (B, Hk, n, D), or (1, Hk, total, D) with cu_seqlens, and pages (pages,
    Hk, page_size, D), or caches without a block_table. Shapes that do not fit are left to the kernel's spec."""
    given = [x for x in (block_table, key_lengths, cu_seqlens) if x is not None]
    if any(view_of(x).device != HOST for x in given):
        return
    B, (pages, _, page_size, _), most = key_lengths.shape[0], k_pages.shape, 1
    lengths, counts = host_array(key_lengths), np.full(k_new.shape[0], k_new.shape[2])
    if cu_seqlens is not None:
        if tuple(cu_seqlens.shape) != (B + 1,):
            return
        _check_offsets("cu_seqlens", "k_new", host_array(cu_seqlens), k_new.shape[2])
        counts = np.diff(host_array(cu_seqlens))
    if block_table is not None:
        table, most = host_array(block_table), block_table.shape[-1]
    if len(counts) != B or (block_table is not None and tuple(block_table.shape) != (B, most)):
        return
    room = f"{'k_pages has room' if block_table is None else 'block_table has pages'} for {most * page_size} keys"
    for b, (length, rows) in enumerate(zip(np.maximum(lengths, 0).tolist(), counts.tolist(), strict=True)):
        if rows and length + rows > most * page_size:
            added = f"{rows} new row{'s make' if rows > 1 else ' makes'} {length + rows}"
            raise LaunchError(f"key_lengths[{b}] is {length}, and {added}: {room}")
        if rows and block_table is not None:
            _check_pages(table, b, length // page_size, cdiv(length + rows, page_size), pages)


def _check_pages(table: NDArray[Any], b: int, first: int, end: int, pages: int) -> None:
    used = table[b, first:end]
    for i in np.flatnonzero((used < 0) | (used >= pages))[:1]:
        raise LaunchError(
            f"block_table[{b}, {first + i}] is {used[i]}, a page that does not exist: k_pages has {pages}"
        )


def _check_offsets(name: str, tensor: str, offsets: NDArray[Any], rows: int) -> None:
    if offsets[0] != 0:
        raise LaunchError(f"{name}[0] is {offsets[0]}: cu_seqlens must begin with 0")
    for b in np.flatnonzero(offsets[1:] < offsets[:-1])[:1]:
        raise LaunchError(f"{name} decreases from {offsets[b]} to {offsets[b + 1]} at {name}[{b + 1}]")
    if offsets[-1] > rows:
        raise LaunchError(f"{name}[{len(offsets) - 1}] is {offsets[-1]}, beyond the last row: {tensor} has {rows} rows")


def _check_lengths(which: str, offsets: NDArray[Any], most: int) -> None:
    what = "queries" if which == "q" else "keys"
    for b, length in enumerate(np.diff(offsets)):
        if length > most:
            raise LaunchError(
                f"sequence {b} has {length} {what}, more than max_seqlen_{which}={most}: pass "
                f"max_seqlen_{which}={length} or more, and a bias or mask of that size"
            )


def argument_name(name: str, names: Container[str]) -> str:
    """The name of an array in the public function: the k of a paged batch is k_pages."""
    if name in DESCALE:
        return f"descale of {name[-1]}"
    if name == BLOCK_MAP:
        return "the block map of score"
    return f"{name}_pages" if name in ("k", "v") and BLOCK_TABLE in names else name


def _as_given(name: str, views: Mapping[str, ArrayView]) -> tuple[str, tuple[int, ...]]:
    """Name and shape of q, k or v in the public function: `attention_varlen` and `attention_paged` transpose them."""
    first, heads, rows, D = shape = views[name].shape
    if BLOCK_TABLE in views and name != "q":
        shape = first, rows, heads, D
    elif CU_SEQLENS[0] in views:
        shape = rows, heads, D
    return argument_name(name, views), shape


def _name(device: Device) -> str:
    return "cpu" if device == HOST else f"{device[0]}:{device[1]}"
