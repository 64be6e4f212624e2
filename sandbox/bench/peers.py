"""Peers: attention from other projects, timed in the same run. Their backward is PyTorch's autograd of their forward.

A peer is a `Contender`, like a kernel of ours. To add one, define `peers = [Contender(...)]` in a Python file, and pass
the file in place of a peer's name.
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
from .latent import prepare_flash_mla
from .ragged import prepare_varlen_attn

_SHARE = 0.25  # of the GPU's memory for the scores of one peer: two such peers and the inputs fit


@dataclass(frozen=True)
class Ready:
    """A contender prepared for one problem's tensors.

    `launch` queues one call on PyTorch's current stream and returns (O, LSE or None), or (dQ, dK, dV). After `poison`,
    all elements that the next call does not write are NaN.
    """

    launch: Callable[[], tuple[Any, ...]]
    poison: Callable[[], None]
    tile: str = ""
    arch: str = ""
    keep_alive: tuple[Any, ...] = ()  # tensors of which the launch has only the addresses
    checked: Callable[[], tuple[Any, ...]] | None = None  # for a peer with dropout: the same call with dropout 0


@dataclass(frozen=True)
class Contender:
    """One implementation in a benchmark. `prepare(problem, q, k, v)`, or (problem, q, k, v, dout) for a backward, takes
    PyTorch tensors (B, H or Hk, S, D). It returns a Ready, or raises UnsupportedProblem with the reason. For a problem
    that is not `plain` it also receives the keyword `option_tensors`: the tensors of its options, by name. `kernel` is
    the name of our kernel, "" for a peer."""

    name: str
    prepare: Callable[..., Ready]
    kernel: str = ""
    ragged: bool = False  # whether a peer supports ragged batches
    paged: bool = False  # whether a peer supports paged keys; it finds them in option_tensors


def get(name: str) -> list[Contender]:
    """The peer with that name, or the peers of a Python file. Raises UnsupportedProblem with the known names."""
    if name in PEERS:
        return [PEERS[name]]
    if name.endswith(".py") and Path(name).is_file():
        found = names_of(name).get("peers")
        if isinstance(found, (list, tuple)) and all(isinstance(peer, Contender) for peer in found):
            return list(found)
        raise UnsupportedProblem(
            f"{name} must define `peers`, a list of sandbox.bench.peers.Contender: it has {found!r}"
        )
    if name.endswith(".py"):
        raise UnsupportedProblem(f"peers {name}: there is no such file")
    known = ", ".join(peer for peer in PEERS if peer != "triton")  # which supports no problem
    raise UnsupportedProblem(
        f"peer {name!r} is not known: choose from {known}, or name a Python file that defines `peers`"
    )


def backward(peer: Contender) -> Contender:
    """The peer's backward: autograd of its forward. Only the backward is timed."""

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
    """Fills memory of the size of the next result with NaN and frees it: PyTorch's allocator then reuses it."""

    def poison() -> None:
        q.new_full(q.shape, float("nan"))

    return poison


def _check_mask(name: str, problem: Problem) -> None:
    if problem.causal == "bottom-right" and problem.Sq != problem.Sk:
        raise UnsupportedProblem(
            f"{name}: a bottom-right mask with Sq={problem.Sq}, Sk={problem.Sk} is not supported: is_causal is top-left"
        )


def _check_memory(name: str, problem: Problem, bytes_a_score: int, q: Any) -> None:
    if q.device.type != "cuda":
        return
    import torch

    need = problem.B * problem.H * problem.Sq * problem.Sk * bytes_a_score
    have = _SHARE * torch.cuda.get_device_properties(q.device).total_memory
    if need > have:
        raise UnsupportedProblem(
            f"{name}: {problem} is not supported: its scores take {need / 1e9:.0f} GB, and the limit, a "
            f"quarter of the GPU's memory, is {have / 1e9:.0f} GB"
        )


# ---- PyTorch's scaled_dot_product_attention, one backend at a time


def _sdpa(name: str, backend: str) -> Contender:
    def prepare(problem: Problem, q: Any, k: Any, v: Any, option_tensors: Any = None) -> Ready:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        _check_mask(name, problem)
        if backend == "MATH":
            _check_memory(name, problem, 16, q)  # S, masked S, P, each fp32, and one more
        options: dict[str, Any] = {"is_causal": bool(problem.causal), "scale": problem.scale}
        if not problem.plain:
            options |= {"dropout_p": problem.dropout, **_attn_mask(name, problem, option_tensors)}
        if problem.Hk != problem.H and backend == "EFFICIENT_ATTENTION":  # no grouped heads; the copy is not timed
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
    """A bias or a mask as SDPA's attn_mask, which excludes is_causal. Raises UnsupportedProblem."""
    p = problem
    if others := p.options - {"bias", "mask", "dropout"}:
        raise UnsupportedProblem(f"{name}: {', '.join(sorted(others))} not supported by this peer")
    if (p.bias and p.mask) or p.bias_dtype:
        raise UnsupportedProblem(f"{name}: only a bias of q's dtype or a mask is supported, not both")
    found = option_tensors.get("bias", option_tensors.get("mask"))
    if found is None:
        return {}
    if p.causal:
        raise UnsupportedProblem(f"{name}: a bias or mask together with is_causal is not supported")
    return {"attn_mask": found.expand(*found.shape[:2], p.Sq, p.Sk)}


def _try(name: str, launch: Callable[[], object]) -> None:
    """A first call. PyTorch gives the reasons why a backend does not support a problem in warnings; they become the
    error message."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            launch()
        except RuntimeError as error:
            reasons = (str(warning.message).partition(" (Triggered")[0].strip() for warning in caught)
            own = [r for r in reasons if "not used because" not in r and "runtime disabled" not in r]
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise UnsupportedProblem(f"{name}: {'; '.join(own) or first_line}") from error


# ---- others


def _eager(problem: Problem, q: Any, k: Any, v: Any, option_tensors: Any = None) -> Ready:
    """Plain PyTorch operations in the input dtype, with all scores in memory."""
    import torch

    if not problem.plain:
        raise UnsupportedProblem("eager: only scale and causal are supported")

    _check_memory("eager", problem, 2 * problem.itemsize, q)
    if problem.causal and problem.diagonal < 0:
        raise UnsupportedProblem(
            f"eager: causal with Sq={problem.Sq} > Sk={problem.Sk} is not supported: rows without keys give NaN"
        )
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
    """PyTorch's flex_attention, compiled by Inductor to Triton. Compiling takes seconds per problem."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if problem.causal and problem.diagonal < 0:
        raise UnsupportedProblem(
            f"flex: causal with Sq={problem.Sq} > Sk={problem.Sk} is not supported: some rows have no keys"
        )
    torch._dynamo.reset()  # otherwise the ninth problem would run uncompiled
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
        "triton: not supported: its package contains no attention (the fused-attention tutorial is a file of its "
        "repository): use flex, which Triton compiles, or a Python file that defines `peers`"
    )


def _varlen(problem: Problem, q: Any, k: Any, v: Any, option_tensors: Any = None) -> Ready:
    """PyTorch's FlashAttention-2 on a ragged batch."""
    launch = prepare_varlen_attn(problem, q, k, v, option_tensors)
    _try("varlen", launch)
    return Ready(launch, _poison(q))


def _flash_mla(problem: Problem, q: Any, k: Any, v: Any, option_tensors: Any = None) -> Ready:
    """FlashMLA's decoding kernel for Hopper."""
    launch = prepare_flash_mla(problem, q, option_tensors)
    _try("flash-mla", launch)
    return Ready(launch, lambda: q.new_full((*q.shape[:3], problem.Dv), float("nan")))


_ALL = (
    _sdpa("sdpa-flash", "FLASH_ATTENTION"),
    _sdpa("sdpa-cudnn", "CUDNN_ATTENTION"),
    _sdpa("sdpa-efficient", "EFFICIENT_ATTENTION"),
    _sdpa("sdpa-math", "MATH"),
    Contender("eager", _eager),
    Contender("flex", _flex),
    Contender("triton", _triton),
    Contender("varlen", _varlen, ragged=True),
    Contender("flash-mla", _flash_mla, paged=True),
)
PEERS = {peer.name: peer for peer in _ALL}
DEFAULT = tuple(peer.name for peer in _ALL[:5])  # those that need only PyTorch, without compiling
