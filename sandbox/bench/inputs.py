"""Tensors of the options in a benchmark, and the arguments of `sandbox.attention` for a problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..api.attention import attention_forward, attention_varlen
from ..core.problem import Problem
from ..verify.scores import option_values, score_inputs
from ..verify.sequences import offsets_of

BenchInputs = Mapping[str, Any]  # PyTorch tensors, by their names in a spec's `args`


def make_bench_inputs(problem: Problem, like: Any) -> dict[str, Any]:
    """Tensors of the problem's options, on the device of `like`, a PyTorch tensor. All sequences of a latent
    problem have Sk keys."""
    found = score_inputs(problem) | (offsets_of(problem) if problem.ragged else {})
    if problem.latent and problem.key_lengths:
        found["key_lengths"] = np.full(problem.B, problem.Sk, np.int32)
    return {name: as_tensor(x, like.device) for name, x in found.items()}


_ML_DTYPES = {"bfloat16": np.int16, "float8_e4m3fn": np.int8, "float8_e5m2": np.int8}  # not known to torch.from_numpy


def as_tensor(x: Any, device: Any) -> Any:
    """A NumPy array as a PyTorch tensor on `device`."""
    import torch

    bits = _ML_DTYPES.get(x.dtype.name)
    tensor = torch.from_numpy(np.ascontiguousarray(x.view(bits) if bits else x)).to(device)
    return tensor.view(getattr(torch, x.dtype.name)) if bits else tensor


def torch_dtype(name: str) -> Any:
    """The PyTorch dtype with our name for it."""
    import torch

    return getattr(torch, "float8_e4m3fn" if name == "float8_e4m3" else name)


def forward_of(problem: Problem, q: Any, k: Any, v: Any, option_tensors: BenchInputs) -> tuple[Any, Any]:
    """O and LSE of our own forward, as (B, H, Sq, Dv) and (B, H, Sq)."""
    options = asked_of(problem, option_tensors)
    if not problem.ragged:
        return attention_forward(q, k, v, **options)
    options |= {"max_seqlen_q": problem.Sq, "max_seqlen_k": problem.Sk, "return_lse": True}
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    out, lse = attention_varlen(q, k, v, option_tensors["cu_seqlens_q"], option_tensors["cu_seqlens_k"], **options)
    return out.transpose(0, 1)[None], lse[None]


def asked_of(problem: Problem, option_tensors: BenchInputs) -> dict[str, Any]:
    """The options of `sandbox.attention` for the problem."""
    options = option_values(problem, option_tensors)
    return options | ({"out_dtype": problem.dtype_of("O")} if problem.float8 else {})
