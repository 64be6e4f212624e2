"""FlashAttention's functions: arguments and results in its layout, computed by `sandbox`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import sandbox

from .dropout import softmax_with_signs
from .layers.rotary import apply_rotary_emb

USE_TRITON_ROCM = False
CHECKED = """
import sys, torch
from flash_attn import flash_attn_with_kvcache
flash_attn_with_kvcache(**torch.load(sys.argv[1]))
torch.cuda.is_available() and torch.cuda.synchronize()
"""


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """The keys after which the tests rescale S_dmask: all of a row."""
    return 1 << 30


def _window(window_size: Sequence[Any], causal: bool) -> tuple[int | None, int | None] | None:
    left, right = (None if n < 0 else int(n) for n in window_size)
    right = None if causal else right  # causal already hides the keys to the right
    return None if (left, right) == (None, None) else (left, right)


def _options(scale: Any, causal: bool, window_size: Sequence[Any], softcap: float, alibi_slopes: Any) -> dict[str, Any]:
    found = {"causal": causal, "scale": scale, "window": _window(window_size, causal)}
    found |= {"softcap": softcap} if softcap else {}
    return found | ({"alibi": alibi_slopes} if alibi_slopes is not None else {})


def _dropout(dropout_p: float) -> dict[str, Any]:
    return {"dropout": dropout_p, "seed": int(torch.randint(2**62, ()))} if dropout_p else {}


def _deterministic(out: Any, deterministic: bool) -> Any:
    """`out`, whose backward runs as under torch.use_deterministic_algorithms(True) if `deterministic`."""
    if not deterministic or out.grad_fn is None:
        return out
    node, before = out.grad_fn, torch.are_deterministic_algorithms_enabled()
    while "_Attention" not in node.name():
        node = node.next_functions[0][0]
    node.register_prehook(lambda *_: torch.use_deterministic_algorithms(True))
    node.register_hook(lambda *_: torch.use_deterministic_algorithms(before))
    return out


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[Any] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    options, dropout = _options(softmax_scale, causal, window_size, softcap, alibi_slopes), _dropout(dropout_p)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = sandbox.attention(*heads_first, return_lse=True, **options, **dropout)
    out = _deterministic(out, deterministic).transpose(1, 2)
    if not return_attn_probs:
        return out
    mask = softmax_with_signs(*heads_first[:2], lse, **options, **dropout) if dropout else None
    return out, lse, mask


def flash_attn_kvpacked_func(q: Any, kv: Any, *args: Any, **options: Any) -> Any:
    return flash_attn_func(q, *kv.unbind(2), *args, **options)


def flash_attn_qkvpacked_func(qkv: Any, *args: Any, **options: Any) -> Any:
    return flash_attn_func(*qkv.unbind(2), *args, **options)


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[Any] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Any = None,
) -> Any:  # fmt: skip
    options, dropout = _options(softmax_scale, causal, window_size, softcap, alibi_slopes), _dropout(dropout_p)
    if block_table is not None:
        out, lse = _over_pages(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), max_seqlen_q, block_table, options)
        return (out, lse, None) if return_attn_probs else out
    lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    out, lse = sandbox.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **lengths, **options, **dropout
    )
    _deterministic(out, deterministic)
    if not return_attn_probs:
        return out
    mask = None
    if dropout:
        q_padded, k_padded = (
            _padded(x.detach(), cu, most).transpose(1, 2)
            for x, cu, most in ((q, cu_seqlens_q, max_seqlen_q), (k, cu_seqlens_k, max_seqlen_k))
        )
        lse_padded = _padded(lse.detach().T, cu_seqlens_q, max_seqlen_q).transpose(1, 2)
        ends = {"lengths_q": cu_seqlens_q.diff(), "lengths_k": cu_seqlens_k.diff()}
        mask = softmax_with_signs(q_padded, k_padded, lse_padded, **options, **dropout, **ends)
    return out, lse, mask


def flash_attn_varlen_kvpacked_func(q: Any, kv: Any, *args: Any, **options: Any) -> Any:
    return flash_attn_varlen_func(q, *kv.unbind(1), *args, **options)


def flash_attn_varlen_qkvpacked_func(qkv: Any, cu_seqlens: Any, max_seqlen: int, *args: Any, **options: Any) -> Any:
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(*qkv.unbind(1), *lengths, *args, **options)


def _padded(x: Any, cu_seqlens: Any, most: int) -> Any:
    """(B, most, …) with the sequences of x (rows, …), and 0 after their ends."""
    rows = cu_seqlens[:-1, None].long() + torch.arange(most, device=x.device)
    inside = rows < cu_seqlens[1:, None]
    padded = x[rows.clamp(max=len(x) - 1)]
    return padded * inside.view(*inside.shape, *[1] * (x.ndim - 1)).to(x.dtype)


@torch.no_grad()
def _over_pages(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, key_lengths: Any, most: int, block_table: Any, options: Any
) -> tuple[Any, Any]:
    how = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": most, "return_lse": True}
    return sandbox.attention_paged(q, k, v, block_table, key_lengths.int(), **how, **options)


def _flash_attn_varlen_forward(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Any = None, block_table: Any = None, seqused_k: Any = None,
    num_splits: int = 0, **unused: Any,
) -> tuple[Any, Any, None, None]:  # fmt: skip
    """Of keys in pages. sandbox chooses how many blocks share a row; the caller cannot."""
    if num_splits > 1:
        raise RuntimeError("num_splits > 1 is not supported for ragged queries")
    options = _options(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    return *_over_pages(q, k, v, cu_seqlens_q, seqused_k, max_seqlen_q, block_table, options), None, None


def _check_in_another_process(arguments: dict[str, Any]) -> None:
    """With SANDBOX_CHECKED=1, invalid pages destroy the CUDA context: here that of another process."""
    path = [str(Path(module.__file__).parents[1]) for module in (sandbox, sys.modules[__package__])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "CHECKED_HERE": "1"}
    with tempfile.NamedTemporaryFile() as file:
        torch.save(arguments, file.name)
        command = [sys.executable, "-c", CHECKED, file.name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None, block_table: Any = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[Any] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """num_splits is not used: sandbox chooses how many blocks share a row. A cache without pages is appended to as one
    page per batch entry."""
    if q.is_cuda and os.environ.get("SANDBOX_CHECKED") == "1" and not os.environ.get("CHECKED_HERE"):
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": cache_seqlens}
        _check_in_another_process(given | {"block_table": block_table, "causal": causal, "window_size": window_size})
    if cache_batch_idx is not None:
        raise NotImplementedError("cache_batch_idx is not supported: pass a block_table")
    lengths = torch.as_tensor(cache_seqlens, device=q.device, dtype=torch.int32).expand(len(q)).contiguous()
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if rotary_cos is not None:
        rotary = {"cos": rotary_cos, "sin": rotary_sin, "interleaved": rotary_interleaved, "seqlen_offsets": lengths}
        k = apply_rotary_emb(k, **rotary)
        if causal or options["window"]:
            q = apply_rotary_emb(q, **rotary)
        else:  # all queries have the position of the first new key
            q = apply_rotary_emb(q.flatten(1, 2)[:, None], **rotary)[:, 0].unflatten(1, q.shape[1:3])
    try:
        if k is not None:
            table = block_table
            if table is None:
                table = torch.arange(len(q), device=q.device, dtype=torch.int32)[:, None]
            sandbox.append_kv(k.transpose(1, 2), v.transpose(1, 2), k_cache, v_cache, table, lengths)
            lengths = lengths + k.shape[1]
        q = q.transpose(1, 2)
        if block_table is not None:
            out, lse = sandbox.attention_paged(q, k_cache, v_cache, block_table, lengths, return_lse=True, **options)
        else:
            if cache_leftpad is not None:
                keys = torch.arange(k_cache.shape[1], device=q.device)
                options["mask"] = (keys >= cache_leftpad[:, None])[:, None, None]
            keys_first = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
            out, lse = sandbox.attention_forward(q, *keys_first, key_lengths=lengths, **options)
    except sandbox.SandboxError as error:
        raise RuntimeError(str(error)) from error
    out = out.transpose(1, 2)
    return (out, lse) if return_softmax_lse else out
