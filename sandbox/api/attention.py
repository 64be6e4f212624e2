"""The public functions: attention on arrays of any library, dense, ragged and paged, and its gradients."""

from __future__ import annotations

from functools import cache
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

from ..core.errors import UnsupportedProblem
from ..launch.dlpack import library_of
from .dispatch import known, run_backward, run_forward
from .options import (
    BACKWARD,
    CU_SEQLENS,
    PAGED,
    ForwardKeywords,
    Options,
    check_dimensions,
    check_int32,
    check_keywords,
    collect,
    paged,
    plain_options,
    ragged,
    replace,
)

if TYPE_CHECKING:
    from typing import Unpack

    from .options import BackwardKeywords, PagedKeywords


def attention_forward(
    q: Any, k: Any, v: Any, *, causal: bool | str = False, scale: float | None = None,
    **options: Unpack[ForwardKeywords],
) -> tuple[Any, Any]:  # fmt: skip
    """Exact attention (no approximation), computed tile by tile with an online softmax: FlashAttention-2 (Dao 2023,
    arXiv:2307.08691, Algorithm 1); on Hopper GPUs with the warp specialisation of FlashAttention-3 (Shah et al. 2024,
    arXiv:2407.08608). Autograd does not record it.

    q: (B, H, Sq, D); k: (B, Hk, Sk, D); v: (B, Hk, Sk, Dv), where Hk divides H. Dtypes: float32, float16 or bfloat16,
    the same for all; or float8 (e4m3fn, e5m2), where k has q's dtype and v either of the two; or q in float16 or
    bfloat16 with k and v in float8. float8 has no gradient. Any strides with a unit stride in D. NumPy, CuPy, PyTorch
    or other DLPack arrays, all of one library and on one device. Latent attention (forward only): v may be a view of
    the first Dv columns of k. Then the limits are D <= 576 and Dv <= 512 in float16 and bfloat16, on Hopper GPUs and
    the CPU backend; for D > 256 the kernel reads the memory shared by k and v only once.
    causal: False; True or "bottom-right": query i attends to keys j <= i + Sk - Sq; "top-left": j <= i.
    scale: 1/sqrt(D) by default; an array of one element is converted to a float.

    options: those of `ForwardKeywords` in options.py, whose description `help` shows at the end.

    Returns out, (B, H, Sq, Dv), of q's dtype (for float8: `out_dtype`), library and device; and lse, (B, H, Sq)
    float32, the natural log-sum-exp of the scores, the sink included. A fully masked row has out 0 and lse -inf; with
    a sink, lse is sink[h]. On a GPU the work is queued on the caller's current stream. If `backend` is not that of
    the arrays, they are copied to its device, and the results back.

    Raises UnsupportedProblem naming the unsupported value; SpecError for an invalid value of an option or a tile;
    TypeError for an unknown keyword argument; UnknownKernel, CompileError, ToolchainMissing, GpuUnavailable,
    DriverError, LaunchError.
    """
    if options:
        opts, arrays = collect("attention_forward", q, causal, scale, options)
    else:
        opts, arrays = plain_options(causal, scale), ()
    arrays, library = (q, k, v, *arrays), library_of(q, "q")
    if found := known(library, "forward", opts, arrays):
        out, lse = found[0](arrays, found[1])
        return out, lse
    if library.intercepts(*arrays):
        if opts.descale:
            from . import torch_ops

            return torch_ops.float8_forward(arrays, opts)
        from . import torch_autograd

        return torch_autograd.unrecorded(arrays, opts)
    return run_forward(arrays, opts)


if attention_forward.__doc__ and ForwardKeywords.__doc__:  # not with python -OO
    attention_forward.__doc__ = f"{cleandoc(attention_forward.__doc__)}\n\n{cleandoc(ForwardKeywords.__doc__)}"


def attention(
    q: Any, k: Any, v: Any, *, causal: bool | str = False, scale: float | None = None, return_lse: bool = False,
    **options: Unpack[ForwardKeywords],
) -> Any:  # fmt: skip
    """softmax(scale * q k^T, masked) v, with the options of `attention_forward`; returns out, or (out, lse) with
    `return_lse`.

    Differentiable once for PyTorch tensors, in q, k, v, bias, sink, and through lse; an operator for torch.compile.
    Under torch.autocast q, k and v are cast as for PyTorch's own attention.
    `kernel` and `tile` apply to the forward. The kernel of the backward is selected automatically, a deterministic one
    under torch.use_deterministic_algorithms(True). All options except bias and sink are constants to autograd: one that
    is a tensor and requires a gradient raises UnsupportedProblem.

    PyTorch's jagged nested tensors, (B, H, j, D) with a length per batch entry, are a ragged batch, as in
    `attention_varlen`; out and lse are nested, too.
    """
    if options:
        opts, arrays = collect("attention", q, causal, scale, options)
    else:
        opts, arrays = plain_options(causal, scale), ()
    if getattr(q, "is_nested", False):
        from . import torch_autograd

        arrays, opts = torch_autograd.ragged_of_nested((q, k, v), arrays, opts)
        out, lse = (torch_autograd.nested_as(q, x) for x in _attend(arrays, opts, True))
    else:
        out, lse = _attend((q, k, v, *arrays), opts, return_lse)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, causal: bool | str = False, scale: float | None = None, return_lse: bool = False,
    **options: Unpack[ForwardKeywords],
) -> Any:  # fmt: skip
    """`attention` of sequences of different lengths, stored one after the other without padding. A query attends only
    to keys of its own sequence. The host never waits for the GPU.

    q: (total_q, H, D); k: (total_k, Hk, D); v: (total_k, Hk, Dv); any strides with a unit stride in D.
    cu_seqlens_q: (B + 1,) int32, on the same device: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q; it
    starts with 0 and does not decrease. cu_seqlens_k: the same for k and v; by default cu_seqlens_q. A sequence may be
    empty, and have more queries than keys or fewer. In rows after the last sequence, out, lse and the gradients are
    uninitialised.

    The options are those of `attention`; i, j, Sq and Sk are relative to a sequence, and b is its index. bias and mask
    broadcast to (B, H, max_seqlen_q, max_seqlen_k); sequence b reads the first rows and columns of bias[b] and mask[b].
    max_seqlen_q and max_seqlen_k are total_q and total_k by default; larger values are reduced to the defaults. Without
    bias and mask they have no effect. With a bias or mask, a sequence longer than max_seqlen_* is an error on the CPU
    backend. On a GPU, out, lse and gradients are NaN for its queries from max_seqlen_q on; its keys from max_seqlen_k
    on are hidden, and their gradients are NaN. With SANDBOX_CHECKED=1 such a sequence is an error on a GPU, too.

    Returns out, (total_q, H, Dv), or (out, lse) with `return_lse`, lse (H, total_q) float32. Differentiable as
    `attention` is. Invalid cu_seqlens are an error on the CPU backend and with SANDBOX_CHECKED=1; otherwise the results
    on a GPU are undefined, but no memory outside of the arrays is accessed. Raises the exceptions of
    `attention_forward`.
    """
    offsets = cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    opts, arrays = ragged(
        *collect("attention_varlen", q, causal, scale, options), offsets, (max_seqlen_q, max_seqlen_k)
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dimensions(name, x, "(rows, heads, D)")
    for name, x in zip(CU_SEQLENS, offsets, strict=True):
        check_int32(name, x)
    heads_first = tuple(x.swapaxes(0, 1)[None] for x in (q, k, v))
    out, lse = _attend((*heads_first, *arrays), opts, True)
    out = out[0].swapaxes(0, 1)
    return (out, lse[0]) if return_lse else out


def attention_paged(
    q: Any, k_pages: Any, v_pages: Any, block_table: Any, key_lengths: Any, *, cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None, causal: bool | str = False, scale: float | None = None, return_lse: bool = False,
    **options: Unpack[PagedKeywords],
) -> Any:  # fmt: skip
    """`attention` to the first key_lengths[b] keys of each batch entry, which are stored in pages (PagedAttention, Kwon
    et al. 2023, arXiv:2309.06180). Forward only. Keys are not gathered, and the host never waits for the GPU: the
    kernel reads block_table and key_lengths, so a CUDA graph may be replayed after their contents change.

    q: (B, H, Sq, D), of the dtypes of `attention_forward`. k_pages: (pages, page_size, Hk, D); v_pages: (pages,
    page_size, Hk, Dv); any strides with a unit stride in D. block_table: (B, max_pages) int32: key j of batch entry b
    is row j % page_size of page block_table[b, j // page_size]; pages may be shared. key_lengths: (B,) int32, at most
    max_pages * page_size. All on q's device. Entries of the table for keys beyond key_lengths are not read. Negative
    lengths count as 0.

    cu_seqlens_q: (B + 1,) int32, for a different number of queries per batch entry, such as prompts and single tokens
    in one batch: q is (total_q, H, D), and the queries of entry b are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], as
    in `attention_varlen`.

    The options are those of `attention`; Sk is key_lengths[b] ("bottom-right": the last query attends to the last valid
    key); bias and mask broadcast to (B, H, Sq, max_pages * page_size). With cu_seqlens_q, Sq in this shape is
    max_seqlen_q, by default total_q; larger values are reduced to total_q. Without bias and mask, max_seqlen_q has no
    effect. Passing max_seqlen_q without cu_seqlens_q raises UnsupportedProblem.

    Returns out, (B, H, Sq, Dv), or (out, lse) with `return_lse`, lse (B, H, Sq) float32; with cu_seqlens_q they are
    (total_q, H, Dv) and (H, total_q). There is no gradient. A page number out of range, a key length beyond the table
    and invalid cu_seqlens_q are errors on the CPU backend and with SANDBOX_CHECKED=1. Otherwise a GPU clamps them to
    the tensors: there is no out-of-bounds access, but the results are wrong. Raises the exceptions of
    `attention_forward`.
    """
    check_keywords("attention_paged", options, PAGED)
    check_dimensions("q", q, "(B, H, Sq, D)" if cu_seqlens_q is None else "(total_q, H, D)")
    check_dimensions("key_lengths", key_lengths, "(B,)")
    check_int32("key_lengths", key_lengths)
    check_dimensions("block_table", block_table, "(B, max_pages)")
    opts, arrays = collect("attention_paged", q, causal, scale, {**options, "key_lengths": key_lengths})
    if cu_seqlens_q is not None:
        check_int32("cu_seqlens_q", cu_seqlens_q)
        opts, arrays = ragged(opts, arrays, (cu_seqlens_q,), (max_seqlen_q, None))
        q = q.swapaxes(0, 1)[None]
    elif max_seqlen_q is not None:
        raise UnsupportedProblem(f"max_seqlen_q={max_seqlen_q} without cu_seqlens_q is not supported: Sq is q.shape[2]")
    opts, arrays = paged(opts, arrays, block_table)
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        check_dimensions(name, x, "(pages, page_size, Hk, D)")
    out, lse = _attend_pages((q, k_pages.swapaxes(1, 2), v_pages.swapaxes(1, 2), *arrays), opts)
    if cu_seqlens_q is not None:
        out, lse = out[0].swapaxes(0, 1), lse[0]
    return (out, lse) if return_lse else out


def _attend_pages(arrays: tuple[Any, ...], options: Options) -> tuple[Any, Any]:
    """(out, lse) of q, pages of k and v, and the arrays that `options.array_names` names."""
    # needs_autograd is also true if PyTorch has to intercept the call
    if not library_of(arrays[0]).needs_autograd(*arrays, options.scale):
        return run_forward(arrays, options)
    if options.descale:
        from . import torch_ops

        return torch_ops.float8_forward(arrays, options)
    from . import torch_autograd

    return torch_autograd.paged_forward(arrays, options)


def attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, causal: bool | str = False, scale: float | None = None,
    deterministic: bool = False, **options: Unpack[BackwardKeywords],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The gradients of sum(dout * out) by FlashAttention-2 (Dao 2023, arXiv:2307.08691, Algorithm 2).

    q, k, v and the options as in `attention_forward`; out (B, H, Sq, Dv) and lse (B, H, Sq) as it returned them; dout
    (B, H, Sq, Dv), of q's dtype. A dout or out without unit stride in the last dimension (such as an expanded dout) and
    a non-contiguous lse are copied; the logger "sandbox" reports it. deterministic: use only kernels whose results are
    bitwise equal in every call. invariant: implies deterministic; in addition, the gradients of a batch entry do not
    depend on other entries.

    Returns dq, dk, dv, of the shapes, dtype, library and device of q, k, v; dk and dv sum over the query heads that
    share a key/value head. Fully masked query rows and keys have gradient 0. The gradients of bias and sink, and those
    through lse, are available through autograd of `attention` only. Memory in addition to inputs and results: delta,
    (B, H, Sq) float32; with a mask its block map, unless it is passed (`sandbox.block_map`); kernels that accumulate dQ
    in global memory also need about B * H * Sq * D floats, with Sq and D rounded up; bwd_wgmma_split_group stores dK
    and dV per query head, bwd_wgmma_stream_k partial dK and dV of at most 263 blocks of 64 or 128 keys.

    Raises the exceptions of `attention_forward`.
    """
    if (dropout := options.get("dropout")) and options.get("seed") is None:
        raise UnsupportedProblem(f"attention_backward: dropout={dropout} needs the seed of the forward: pass seed=")
    opts, more = collect("attention_backward", q, causal, scale, options, BACKWARD)
    if deterministic:
        opts = replace(opts, deterministic=deterministic)
    arrays = dout, q, k, v, out, lse, *more
    if library_of(dout, "dout").intercepts(*arrays):
        from . import torch_autograd

        return torch_autograd.gradients(arrays, opts)
    dq, dk, dv = run_backward(arrays, opts)
    return dq, dk, dv


def _attend(arrays: tuple[Any, ...], options: Options, with_lse: bool) -> tuple[Any, Any]:
    """(out, lse) of q, k, v and the arrays that `options.array_names` names; unless `with_lse`, lse may be None."""
    library = library_of(arrays[0], "q")
    if found := known(library, "forward", options, arrays):
        plan, addresses, requires_grad = found
        if not requires_grad or not library.grad_enabled():
            out, lse = plan(arrays, addresses)
            return out, lse
        if not options.descale:
            return _autograd().record(arrays, options, found, with_lse)
    arrays = *library.cast(*arrays[:3]), *arrays[3:]
    if library.needs_autograd(*arrays, options.scale):
        if options.descale:
            from . import torch_ops

            return torch_ops.float8_forward(arrays, options)
        from . import torch_autograd

        return torch_autograd.attention(arrays, options, with_lse)
    return run_forward(arrays, options)


@cache
def _autograd() -> Any:
    """The module `torch_autograd`, cached: an import statement would take 0.3 µs in each call."""
    from . import torch_autograd

    return torch_autograd
