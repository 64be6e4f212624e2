"""The FlashAttention packages as peers of `bench`. A package that cannot be imported supports no problem.

python -m sandbox bench --peers sdpa-flash,sdpa-cudnn,sandbox/bench/flash_attention_peers.py
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping
from typing import Any

from sandbox.bench.peers import Contender, Ready
from sandbox.core.errors import UnsupportedProblem
from sandbox.core.problem import Problem

# FlashAttention-4 compiles a kernel for seconds; with this, it keeps it for later runs. Read when it is imported.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def flash_attention(name: str, module: str, package: str, paged: bool = True) -> Contender:
    """`flash_attn_func` of `module`: (B, S, H, D) tensors, grouped heads, bottom-right causal mask; some versions also
    return LSE. For ragged batches `flash_attn_varlen_func`: (rows, H, D) tensors and cu_seqlens; with `paged` also keys
    in pages, else it is timed on gathered keys."""

    def prepare(problem: Problem, q: Any, k: Any, v: Any, option_tensors: Any = None) -> Ready:
        try:
            of_module = importlib.import_module(module)
            function = of_module.flash_attn_varlen_func if problem.ragged else of_module.flash_attn_func
        except (ImportError, AttributeError) as error:
            raise UnsupportedProblem(f"{name}: {module} cannot be imported ({error}): install {package}") from error
        if problem.dtype == "float32":
            raise UnsupportedProblem(f"{name}: float32 is not supported: it takes float16 and bfloat16")
        if problem.causal == "top-left" and any(n != m for n, m in problem.lengths or ((problem.Sq, problem.Sk),)):
            raise UnsupportedProblem(f"{name}: a top-left mask with Sq != Sk is not supported: causal is bottom-right")
        tensors = [x[0].transpose(0, 1) if problem.ragged else x.transpose(1, 2) for x in (q, k, v)]
        options = {"causal": bool(problem.causal), "softmax_scale": problem.scale}
        if problem.ragged:
            options |= {"cu_seqlens_q": option_tensors["cu_seqlens_q"], "max_seqlen_q": problem.Sq}
            options["max_seqlen_k"] = problem.Sk
            if not problem.page_size:
                options["cu_seqlens_k"] = option_tensors["cu_seqlens_k"]
        signature = inspect.signature(function)
        if problem.page_size:
            tensors[1:], pages = _paged(name, problem, option_tensors, signature)
            options |= pages
        options |= _options(name, problem, option_tensors or {}, signature)

        def launch() -> tuple[Any, Any]:
            result = function(*tensors, **options)
            out = result[0] if isinstance(result, tuple) else result
            return out.transpose(0, 1)[None] if problem.ragged else out.transpose(1, 2), None

        return Ready(launch, lambda: q.new_full((*q.shape[:3], problem.Dv), float("nan")))

    return Contender(name, prepare, ragged=True, paged=paged)


def _paged(
    name: str, p: Problem, option_tensors: Mapping[str, Any], signature: inspect.Signature
) -> tuple[list[Any], dict[str, Any]]:
    """Pages of K and V, (pages, page_size, Hk, D), and the keyword arguments for them. Raises UnsupportedProblem."""
    if not p.ragged or not {"page_table", "seqused_k"} <= signature.parameters.keys():
        raise UnsupportedProblem(f"{name}: pages are not supported by this package, or only with ragged queries")
    pages = [option_tensors[x].transpose(1, 2) for x in "KV"]
    return pages, {"page_table": option_tensors["block_table"], "seqused_k": option_tensors["key_lengths"]}


def _options(name: str, p: Problem, option_tensors: Mapping[str, Any], signature: inspect.Signature) -> dict[str, Any]:
    """Keyword arguments for the options, without causal and scale. The default of window_size is the value for no
    bound. Raises UnsupportedProblem with the options that the function does not have."""
    known = signature.parameters
    unbound = (known["window_size"].default or (None,))[0] if "window_size" in known else None
    window = tuple(unbound if n is None else n for n in (p.window[0], 0 if p.causal else p.window[1]))
    arguments = {  # {option: (keyword, value)}
        "softcap": ("softcap", p.softcap),
        "dropout": ("dropout_p", p.dropout),
        "alibi": ("alibi_slopes", option_tensors.get("slopes")),
        "window": ("window_size", window),
    }
    used = p.options - {"ragged"} - ({"page_size", "key_lengths"} if p.page_size else set())
    missing = [name for name in sorted(used) if name not in arguments or arguments[name][0] not in known]
    takes_Dv = p.Dv == p.D or (name != "fa2" and (p.D, p.Dv) == (192, 128))  # DeepSeek's head dimensions
    if missing := [*missing, *["Dv"] * (not takes_Dv)]:
        raise UnsupportedProblem(f"{name}: {', '.join(missing)} not supported by this package")
    return dict(arguments[name] for name in used)


peers = [
    flash_attention("fa2", "flash_attn", "flash-attn", paged=False),
    flash_attention("fa3", "flash_attn_interface", "FlashAttention's hopper/ folder"),
    flash_attention("fa4", "flash_attn.cute", "flash-attn-cute"),
]
