"""The FlashAttention packages as peers of `bench`, each where it can be imported:

python -m sandbox bench --peers sdpa-flash,sdpa-cudnn,experiments/flash_attention_peers.py
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

from sandbox import Problem, UnsupportedProblem
from sandbox.bench.peers import Contender, Ready


def flash_attention(name: str, module: str, package: str) -> Contender:
    """`flash_attn_func` of `module`: (B, S, H, D) tensors, groups, causal bottom-right; some return LSE too."""

    def prepare(problem: Problem, q: Any, k: Any, v: Any, given: Any = None) -> Ready:
        try:
            function = importlib.import_module(module).flash_attn_func
        except (ImportError, AttributeError) as error:
            raise UnsupportedProblem(f"{name}: {module} cannot be imported ({error}): install {package}") from error
        if not dataclasses.replace(problem, dropout=0.0).plain:
            raise UnsupportedProblem(f"{name}: it is written for causal, scale and dropout alone")
        if problem.dtype == "float32":
            raise UnsupportedProblem(f"{name}: takes float16 and bfloat16")
        if problem.causal == "top-left" and problem.Sq != problem.Sk:
            raise UnsupportedProblem(f"{name}: causal is bottom-right here, so that Sq={problem.Sq} must be Sk")
        queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
        options: dict[str, Any] = {"causal": bool(problem.causal), "softmax_scale": problem.scale}
        if problem.dropout and "dropout_p" not in inspect.signature(function).parameters:
            raise UnsupportedProblem(f"{name}: it knows no dropout")
        if problem.dropout:
            options["dropout_p"] = problem.dropout

        def launch() -> tuple[Any, Any]:
            result = function(queries, keys, values, **options)
            out = result[0] if isinstance(result, tuple) else result
            return out.transpose(1, 2), None

        return Ready(launch, lambda: q.new_full(q.shape, float("nan")))

    return Contender(name, prepare)


peers = [
    flash_attention("fa2", "flash_attn", "flash-attn"),
    flash_attention("fa3", "flash_attn_interface", "FlashAttention's hopper/ folder"),
    flash_attention("fa4", "flash_attn.cute", "flash-attn-cute"),
]
