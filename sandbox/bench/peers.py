"""Peers: attention by somebody else, timed beside ours. Their backward is PyTorch's autograd through their forward.

A peer is a `Contender`, and so is a kernel of ours. One more is a function `prepare` away: write
`peers = [Contender(...)]` into a Python file and name the file where a peer's name is expected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import UnsupportedProblem
from ..core.files import names_of
from ..core.problem import Problem
from .flex import flex_modifications
from .ragged import ask_varlen_attn

_SHARE = 0.25  # of the GPU's memory, which a peer may take for its scores: two such peers and the inputs fit


@dataclass(frozen=True)
class Ready:
    """A contender prepared for one problem's tensors.

    `launch` queues one call on PyTorch's current stream and returns (O, LSE or None), or (dQ, dK, dV). After `poison`,
    whatever the next call does not write is NaN.
    """

    launch: Callable[[], tuple[Any, ...]]
    poison: Callable[[], None]
    tile: str = ""
    arch: str = ""
    keep_alive: tuple[Any, ...] = ()  # tensors that the launch uses by their addresses alone
    checked: Callable[[], tuple[Any, ...]] | None = None  # of a peer that drops elements of its own choice: without


@dataclass(frozen=True)
class Contender:
    """Who takes part. `prepare(problem, q, k, v)`, or (problem, q, k, v, dout) for a backward, PyTorch tensors
    (B, H or Hk, S, D), either gives a Ready or raises UnsupportedProblem with the sentence that says why not. Of a
    problem that is not plain it is also told, by the keyword `option_tensors`, the tensors that the score reads.
    `kernel` is the name of a kernel of ours, "" for a peer."""

    name: str
    prepare: Callable[..., Ready]
    kernel: str = ""
    ragged: bool = False  # whether a peer is asked for ragged batches


def get(name: str) -> list[Contender]:
    """The peer of that name, or those of a Python file. Raises UnsupportedProblem with the names there are."""
    if name in PEERS:
        return [PEERS[name]]
    if name.endswith(".py") and Path(name).is_file():
        found = names_of(name).get("peers")
        if isinstance(found, (list, tuple)) and all(isinstance(peer, Contender) for peer in found):
            return list(found)
        raise UnsupportedProblem(
            f"{name} must define `peers`, a list of sandbox.bench.peers.Contender: it has {found!r}"
        )
    raise UnsupportedProblem(
        f"peer {name!r} is not known: choose from {', '.join(PEERS)}, or name a Python file that defines `peers`"
    )


def backward(peer: Contender) -> Contender:
    """The peer's backward: autograd through its forward, which is not timed."""

    def prepare(problem: Problem, q: Any, k: Any, v: Any, dout: Any, **option_tensors: Any) -> Ready:
        import torch

        inputs = tuple(x.detach().requires_grad_() for x in (q, k, v))
        with torch.enable_grad():
            out, _ = peer.prepare(problem, *inputs, **option_tensors).launch()
        if not out.requires_grad:
            raise UnsupportedProblem(f"{peer.name}: it has no backward")

        def launch() -> tuple[Any, ...]:
            return torch.autograd.grad(out, inputs, dout, retain_graph=True)

        _try(peer.name, launch)

        def poison() -> None:
            for x in inputs:
                _poison(x)()

        return Ready(launch, poison)

    return Contender(peer.name, prepare, ragged=peer.ragged)


def _poison(q: Any) -> Callable[[], None]:
    """PyTorch's allocator gives out again what has just been freed: NaN, of the size of the result to come."""

    def poison() -> None:
        q.new_full(q.shape, float("nan"))

    return poison


def _check_mask(name: str, problem: Problem) -> None:
    if problem.causal == "bottom-right" and problem.Sq != problem.Sk:
        raise UnsupportedProblem(f"{name}: is_causal is top-left here, so that Sq={problem.Sq} must be Sk={problem.Sk}")


def _check_memory(name: str, problem: Problem, bytes_a_score: int, q: Any) -> None:
    if q.device.type != "cuda":
        return
    import torch

    need = problem.B * problem.H * problem.Sq * problem.Sk * bytes_a_score
    have = _SHARE * torch.cuda.get_device_properties(q.device).total_memory
    if need > have:
        raise UnsupportedProblem(
            f"{name}: its scores take {need / 1e9:.0f} GB, over the {have / 1e9:.0f} GB it may have"
        )


# ---- PyTorch's scaled_dot_product_attention, one backend at a time


def _sdpa(name: str, backend: str) -> Contender:
    def prepare(problem: Problem, q: Any, k: Any, v: Any, option_tensors: Any = None) -> Ready:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        _check_mask(name, problem)
        if backend == "MATH":
            _check_memory(name, problem, 16, q)  # S, S with its mask, P, each fp32, and one to spare
        options: dict[str, Any] = {"is_causal": bool(problem.causal), "scale": problem.scale}
        if not problem.plain:
            options |= {"dropout_p": problem.dropout, **_attn_mask(name, problem, option_tensors)}
        if problem.Hk != problem.H and backend == "EFFICIENT_ATTENTION":  # it knows no groups: not timed, but read
            k, v = (x.repeat_interleave(problem.H // problem.Hk, dim=1) for x in (k, v))
        elif problem.Hk != problem.H:
            options["enable_gqa"] = True
        chosen = getattr(SDPBackend, backend)

        def launch() -> tuple[Any, Any]:
            with sdpa_kernel(chosen):
                return scaled_dot_product_attention(q, k, v, **options), None

        _try(name, launch)
        return Ready(launch, _poison(q))

    return Contender(name, prepare)


def _attn_mask(name: str, problem: Problem, option_tensors: Any) -> dict[str, Any]:
    """A bias or a mask as SDPA takes it, beside which it takes no causality of its own. Raises UnsupportedProblem."""
    p = problem
    others = {"window": p.window != (None, None), "softcap": p.softcap, "alibi": p.alibi, "sink": p.sink,
              "key_lengths": p.key_lengths, "score": p.score}  # fmt: skip
    if asked := [option for option, there in others.items() if there]:
        raise UnsupportedProblem(f"{name}: it knows no {', '.join(asked)}")
    if (p.bias and p.mask) or p.bias_dtype:
        raise UnsupportedProblem(f"{name}: it takes a bias of q's dtype, or a mask, and not both")
    found = option_tensors.get("bias", option_tensors.get("mask"))
    if found is None:
        return {}
    if p.causal:
        raise UnsupportedProblem(f"{name}: it takes a bias or a mask, or is_causal, and not both")
    return {"attn_mask": found.expand(*found.shape[:2], p.Sq, p.Sk)}


def _try(name: str, launch: Callable[[], object]) -> None:
    """A first call. PyTorch says in warnings why a backend does not take a problem; they become the refusal."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            launch()
        except RuntimeError as error:
            reasons = (str(warning.message).partition(" (Triggered")[0].strip() for warning in said)
            own = [r for r in reasons if "not used because" not in r and "runtime disabled" not in r]
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise UnsupportedProblem(f"{name}: {'; '.join(own) or first_line}") from error


# ---- others


def _eager(problem: Problem, q: Any, k: Any, v: Any, option_tensors: Any = None) -> Ready:
    """Plain PyTorch, every score in memory, in the input dtype."""
    import torch

    if not problem.plain:
        raise UnsupportedProblem("eager: it is written for scale and causal alone")

    _check_memory("eager", problem, 2 * problem.itemsize, q)
    if problem.causal and problem.diagonal < 0:
        raise UnsupportedProblem(f"eager: with Sq={problem.Sq} > Sk={problem.Sk} a row sees no key, and softmax is NaN")
    group = problem.H // problem.Hk
    hidden = None
    if problem.causal:
        hidden = torch.ones(problem.Sq, problem.Sk, dtype=torch.bool, device=q.device).triu_(problem.diagonal + 1)

    def launch() -> tuple[Any, Any]:
        keys, values = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
        scores = torch.matmul(q, keys.transpose(-1, -2)).mul_(problem.scale)
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        return torch.matmul(torch.softmax(scores, dim=-1), values), None

    return Ready(launch, _poison(q))


def _flex(problem: Problem, q: Any, k: Any, v: Any, option_tensors: Any = None) -> Ready:
    """PyTorch's flex_attention, compiled by Inductor to Triton. Compiling takes seconds for each problem."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if problem.causal and problem.diagonal < 0:
        raise UnsupportedProblem(f"flex: with Sq={problem.Sq} > Sk={problem.Sk} a row sees no key")
    torch._dynamo.reset()  # else the ninth problem would run uncompiled
    compiled = torch.compile(flex_attention, dynamic=False)
    options: dict[str, Any] = {"scale": problem.scale, "enable_gqa": problem.Hk != problem.H}
    score_mod, seen = flex_modifications(problem, option_tensors or {})
    if score_mod:
        options["score_mod"] = score_mod
    if seen:
        B = problem.B if problem.key_lengths or problem.mask[:1] > (1,) or problem.score else None
        H = problem.H if problem.mask[1:2] > (1,) or problem.score else None
        options["block_mask"] = create_block_mask(seen, B, H, problem.Sq, problem.Sk, device=str(q.device))

    def launch() -> tuple[Any, Any]:
        return compiled(q, k, v, **options), None

    return Ready(launch, _poison(q))


def _triton(problem: Problem, q: Any, k: Any, v: Any, option_tensors: Any = None) -> Ready:
    raise UnsupportedProblem(
        "triton: its package holds no attention (the fused-attention tutorial is a file of its repository): take flex, "
        "which Triton compiles, or name a Python file that defines `peers`"
    )


def _varlen(problem: Problem, q: Any, k: Any, v: Any, option_tensors: Any = None) -> Ready:
    """PyTorch's FlashAttention-2 on a ragged batch."""
    launch = ask_varlen_attn(problem, q, k, v, option_tensors)
    _try("varlen", launch)
    return Ready(launch, _poison(q))


_ALL = (
    _sdpa("sdpa-flash", "FLASH_ATTENTION"),
    _sdpa("sdpa-cudnn", "CUDNN_ATTENTION"),
    _sdpa("sdpa-efficient", "EFFICIENT_ATTENTION"),
    _sdpa("sdpa-math", "MATH"),
    Contender("eager", _eager),
    Contender("flex", _flex),
    Contender("triton", _triton),
    Contender("varlen", _varlen, ragged=True),
)
PEERS = {peer.name: peer for peer in _ALL}
DEFAULT = tuple(peer.name for peer in _ALL[:5])  # those that PyTorch alone has, without compiling
