"""The time of attention over one sequence on n GPUs, from compute, bytes and links; written before the measurement.

The comments give the source of each number. The `FITTED` numbers were fitted to two points of 2026-11-21; all other
points are predictions. H200s, 16 heads of 128, bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

H, D, HALF = 16, 128, 2  # heads, head width, bytes of a bfloat16


@dataclass(frozen=True)
class Machine:
    """Per GPU: FLOP/s of a kernel on long rows, bytes per second of memory and links, seconds."""

    forward: float = 686e12  # one H200 alone, S 128k causal, ours (2026-11-21, cuBLAS 772)
    backward: float = 629e12  # bwd_wgmma, S 16k causal, D 128 (experiment 013, cuBLAS 754 … 769)
    short: float = 700.0  # rows at half of that speed: 515 of 686 TFLOP/s at 2k, forward, D 128 causal
    memory: float = 4190e9  # reading 2 GiB (2026-11-21)
    link: float = 271e9  # both directions at once, between two GPUs of a host (2026-11-21)
    network: float = 50e9  # between hosts: 400 Gb/s per GPU, nominal, not measured
    host: int = 8  # GPUs per host
    call: float = 0.6e-3  # FITTED: host time per call that is not hidden (the two points at 32k, forward)
    step: float = 0.1e-3  # FITTED: host time per step of a ring


# Measured on 2026-11-21 with bwd_mma; its speed follows from 405 TFLOP/s of one GPU, forward and backward.
EARLIER = Machine(backward=348e12)
MEASURED = {  # (GPUs, S) -> TFLOP/s a GPU, causal: forward, both; over PyTorch's kernels by cuDNN
    (2, 128 << 10): ((670, 382), (555, 508)),
    (2, 32 << 10): ((471, 332), (493, 456)),
    (4, 128 << 10): ((607, 355), (522, 485)),
    (4, 32 << 10): ((357, 267), (348, 329)),
}


def flops(S: int, causal: bool) -> float:
    """FLOP of the forward; the backward has 2.5 times as many."""
    return 4.0 * H * D * S * S / (2 if causal else 1)


def _speed(peak: float, rows: float, m: Machine) -> float:
    return peak * rows / (rows + m.short)


def _link(n: int, m: Machine) -> float:
    """The bandwidth of the slowest link of a ring."""
    return m.link if n <= m.host else m.network


def ring(S: int, n: int, causal: bool, m: Machine, heads: float = H, link: float = 0.0) -> tuple[float, float]:
    """(forward, backward) in seconds of PyTorch's ring ("alltoall") over n GPUs with S / n rows each.

    n steps. In each a kernel runs on S / n queries and the keys of another GPU, while the next keys are transferred. In
    addition PyTorch's elementwise kernels combine out by LSE and sum gradients in float32; the bytes per element of
    S / n * heads * D are counted from the kernels that it launches.
    """
    rows, link = S / n, link or _link(n, m)
    elements = rows * heads * D
    work = flops(S, causal) * heads / H / n / n  # of one GPU per step
    travel = 2 * elements * HALF / link  # K and V of one GPU
    merge = (6 * n + 32 * (n - 1) + 6) * elements / m.memory  # to float32; out - sigmoid(…) * (out - new); back
    compute = work / _speed(m.forward, rows, m)
    forward = m.call + n * m.step + compute + (n - 1) * max(compute, travel) + merge
    compute = 2.5 * work / _speed(m.backward, rows, m)
    back = travel + 2 * elements * 4 / link  # K and V one way, dK and dV in float32 too
    sums = (62 * n + 30) * elements / m.memory  # dq, dk, dv += …; cat of dk and dv; back to bfloat16
    last = 2 * elements * 4 / link if n > 1 else 0.0  # dK and dV return to their GPU, not hidden
    backward = m.call + n * m.step + compute + (n - 1) * max(compute, back) + last + (sums if n > 1 else 0.0)
    return (forward if n > 1 else forward - merge), backward


def heads(S: int, n: int, causal: bool, m: Machine) -> tuple[float, float]:
    """All-to-all over heads (Jacobs et al. 2023, arXiv:2309.14509): each GPU computes all rows of H / n heads.

    The two exchanges are not hidden. At most H GPUs.
    """
    travel = _exchange(S, n, _link(n, m))
    forward = m.call + flops(S, causal) / n / _speed(m.forward, S, m) + 4 * travel  # q, k, v; out
    backward = m.call + 2.5 * flops(S, causal) / n / _speed(m.backward, S, m) + 5 * travel  # dout, out; dq, dk, dv
    return forward, backward


def _exchange(S: float, n: int, link: float) -> float:
    """Seconds to exchange one tensor of S / n rows and H heads by heads."""
    return S / n * H * D * HALF * (n - 1) / n / link


def both(S: int, n: int, causal: bool, m: Machine) -> tuple[float, float]:
    """All-to-all over heads within a host; between hosts rings of one GPU of each, over the network."""
    inner = min(n, m.host, H)
    outer = n // inner
    if outer == 1:
        return heads(S, n, causal, m)
    slow = _link(n, m)
    travel = _exchange(S / outer, inner, m.link)
    forward, backward = ring(S, outer, causal, replace(m, call=0.0), H / inner, slow)
    return m.call + forward + 4 * travel, m.call + backward + 5 * travel


METHODS = {"ring": ring, "heads": heads, "both": both}


def tflops(method: str, S: int, n: int, causal: bool = True, m: Machine | None = None) -> tuple[float, float]:
    """TFLOP/s per GPU: forward; forward and backward."""
    forward, backward = METHODS[method](S, n, causal, m or Machine())
    work = flops(S, causal) / n * 1e-12
    return work / forward, 3.5 * work / (forward + backward)
