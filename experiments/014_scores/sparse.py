"""The Hopper forward on block-sparse masks and documents with their block map, beside the plain problem.

python experiments/014_scores/sparse.py                needs a GPU; half a minute on an H200
python experiments/014_scores/sparse.py KERNEL KERNEL  several kernels, such as a renamed copy of fwd_wgmma.cu

Problems of one length are interleaved. Before each launch the GPU idles until the host is ahead, and L2 is flushed.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sandbox
from sandbox import Problem, Score
from sandbox.bench import environment
from sandbox.bench.timing import Events, Limits, Timing, measure, measure_ceilings
from sandbox.core import jsonl

OUT = Path(__file__).resolve().parent / "sparse.jsonl"
LIMITS = Limits(rounds=20, noise_samples=20)
BLOCK = 128  # queries and keys per block of the mask


def blocks(torch: Any, S: int, share: int, device: str) -> Score:
    """One block in `share`, randomly, and those on the diagonal, so that every row has visible keys."""
    rows = S // BLOCK
    shown = torch.rand(rows, rows, generator=torch.Generator().manual_seed(0)) < 1 / share - 1 / rows
    shown |= torch.eye(rows, dtype=torch.bool)
    return Score(mask=f"on(i / {BLOCK}, j / {BLOCK})", tensors={"on": shown.to(device)})


def documents(torch: Any, S: int, count: int, device: str) -> Score:
    """`count` documents of equal length."""
    doc = torch.arange(S, device=device, dtype=torch.int32) // (S // count)
    return Score(mask="doc(i) == doc(j)", tensors={"doc": doc})


def cases(torch: Any, device: str, S: int, short: int) -> list[tuple[str, int, int, dict[str, Any]]]:
    """(name, B, S, options); the plain problem before those that are compared with it."""
    return [
        ("plain", 1, S, {}),
        ("one block in 16", 1, S, {"score": blocks(torch, S, 16, device)}),
        ("one block in 4", 1, S, {"score": blocks(torch, S, 4, device)}),
        ("16 documents", 1, S, {"score": documents(torch, S, 16, device)}),
        ("plain", 2, short, {}),
        ("eight documents", 2, short, {"score": documents(torch, short, 8, device)}),
        ("causal", 2, short, {"causal": True}),
        ("eight documents, causal", 2, short, {"score": documents(torch, short, 8, device), "causal": True}),
    ]


def main(
    kernels: tuple[str, ...] = ("fwd_wgmma",), device: str = "cuda", S: int = 16384, short: int = 8192, H: int = 16
) -> None:
    import torch

    stopwatch = Events()
    ceilings = measure_ceilings("bfloat16", stopwatch)
    every = cases(torch, device, S, short)
    for n in (S, short):
        own = [case for case in every if case[2] == n]
        calls = {
            (kernel, what): launch(torch, kernel, B, H, n, device, options)
            for what, B, _, options in own
            for kernel in kernels
        }
        times = measure({name: stopwatch.ready(call) for name, call in calls.items()}, stopwatch, LIMITS)
        for what, B, _, options in own:
            visible = pairs(torch, options.get("score"), n, bool(options.get("causal")))
            for kernel in kernels:
                timing = Timing.of(times[kernel, what])
                tflops = 4 * B * H * visible * 128 / timing.median / 1e12
                print(f"{what:24} {kernel} S {n:6}  {timing.median * 1e6:8.1f} us  {tflops:6.1f} TFLOP/s", flush=True)
                row = {"what": what, "kernel": kernel, "B": B, "H": H, "S": n, "seconds": timing.median}
                jsonl.append(OUT, row | {"tflops": tflops} | ceilings | environment.describe())


def launch(torch: Any, kernel: str, B: int, H: int, S: int, device: str, options: dict[str, Any]) -> Callable[[], Any]:
    """A call with its own tensors and a precomputed block map; its result is compared with that of fwd_mma."""
    q, k, v = (torch.randn(B, H, S, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    if score := options.get("score"):
        options = options | {"score": score.with_blocks(sandbox.block_map(score, Problem(B, H, S, S, 128)))}
    call = functools.partial(sandbox.attention_forward, q, k, v, **options)
    off = (call(kernel=kernel)[0].float() - call(kernel="fwd_mma")[0].float()).abs().max().item()
    assert off < 2e-2, f"{off} between two kernels"
    return functools.partial(call, kernel=kernel)


def pairs(torch: Any, score: Score | None, S: int, causal: bool) -> int:
    """The number of visible (query, key) pairs of a head, from the tensors of `blocks` and `documents`."""
    if score is None:
        return S * (S + 1) // 2 if causal else S * S
    if "on" in score.tensors:
        return int(score.tensors["on"].sum()) * BLOCK**2
    lengths = torch.bincount(score.tensors["doc"].long()).tolist()
    return sum(n * (n + 1) // 2 if causal else n * n for n in lengths)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", default=["fwd_wgmma"])
    main(tuple(parser.parse_args().kernels))
