"""Mask tensors that hide 15 of 16 blocks, forward and backward; each call makes the block map. See README.md.

python experiments/014_scores/masks.py             needs a GPU; 15 seconds on an H200

A (1, 1, S, S) tensor of bools with exactly one visible block in 16. Calls of one shape are interleaved; before each
launch L2 is flushed and the host gets ahead.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sparse

import sandbox
from sandbox import Problem
from sandbox.bench import environment
from sandbox.bench.timing import Events, Limits, Timing, measure, measure_ceilings
from sandbox.core import jsonl, registry
from sandbox.engine import pipeline
from sandbox.launch.dlpack import view

OUT = Path(__file__).resolve().parent / "masks.jsonl"
LIMITS = Limits(rounds=20, noise_samples=20)
D = 128


def masks(torch: Any, S: int, device: str) -> dict[str, Any]:
    """{name: mask}."""
    rows = S // sparse.BLOCK
    order = torch.rand(rows, rows, generator=torch.Generator().manual_seed(0)).fill_diagonal_(-1)
    on = (order <= order.flatten().kthvalue(rows * rows // 16).values).to(device)
    doc = torch.arange(S, device=device) // (S // 16)
    return {
        "one block in 16": on.repeat_interleave(sparse.BLOCK, 0).repeat_interleave(sparse.BLOCK, 1)[None, None],
        "16 documents": (doc[:, None] == doc)[None, None],
    }


Calls = dict[tuple[str, str], Callable[[], Any]]


def calls(torch: Any, B: int, H: int, S: int, device: str, masked: dict[str, Any]) -> Calls:
    """{(name, direction): call}; the results are compared with those of the mma.sync kernels."""
    q, k, v, dout = (torch.randn(B, H, S, D, device=device, dtype=torch.bfloat16) for _ in range(4))
    found: Calls = {}
    for what, mask in {"plain": None, **masked}.items():
        forward = functools.partial(sandbox.attention_forward, q, k, v, mask=mask)
        out, lse = forward(kernel="fwd_wgmma")
        backward = functools.partial(sandbox.attention_backward, dout, q, k, v, out, lse, mask=mask)
        if mask is not None:
            near(out, forward(kernel="fwd_mma")[0])
            for own, other in zip(backward(kernel="bwd_wgmma"), backward(kernel="bwd_mma"), strict=True):
                near(own, other)
        found[what, "forward"] = functools.partial(forward, kernel="fwd_wgmma")
        found[what, "backward"] = functools.partial(backward, kernel="bwd_wgmma")
        found[what, "backward"]()  # compiles, and fills the plan cache
    return found


def near(own: Any, other: Any) -> None:
    off = ((own.float() - other.float()).abs().max() / other.float().abs().max()).item()
    assert off < 2e-2, f"{off} between two kernels"


def of_map(torch: Any, mask: Any) -> Callable[[], Any]:
    """The kernel that makes the block map."""
    p = Problem(1, 1, *mask.shape[2:], D, dtype="bfloat16", mask=tuple(mask.shape))
    kernel = registry.get("block_map")
    block_map = mask.new_empty(p.block_map, dtype=torch.int32)
    tensors = {"mask": view(mask), "block_map": view(block_map)}
    device = tensors["mask"].device
    prepared = pipeline.prepare(kernel, pipeline.tile_on(device, kernel, p), p, tensors, device)
    pointers = prepared.pointers(tensors)

    def launch(alive: Any = block_map) -> None:  # views do not keep the memory alive
        prepared.launch(pointers, torch.cuda.current_stream().cuda_stream)

    return launch


def main(device: str = "cuda", S: int = 16384) -> None:
    import torch

    stopwatch = Events()
    ceilings = measure_ceilings("bfloat16", stopwatch)
    masked = masks(torch, S, device)
    for B, H in ((1, 8), (1, 16), (2, 16)):
        measured = calls(torch, B, H, S, device, masked)
        if H == 8:
            measured |= {(what, "its map"): of_map(torch, mask) for what, mask in masked.items()}
        times = measure({name: stopwatch.ready(call) for name, call in measured.items()}, stopwatch, LIMITS)
        medians = {name: Timing.of(values).median for name, values in times.items()}
        for (what, of), seconds in medians.items():
            whole = medians.get(("plain", of))
            share = f"1/{whole / seconds:.1f}" if whole else ""
            print(f"B{B} H{H} S{S}  {what:16} {of:9} {seconds * 1e6:8.1f} us  {share}", flush=True)
            row = {"what": what, "of": of, "B": B, "H": H, "S": S, "seconds": seconds, "plain": whole}
            jsonl.append(OUT, row | ceilings | environment.describe())
        torch.cuda.empty_cache()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
