"""What a mask tensor that hides 15 of 16 tiles costs, forward and backward, its block map made in every call.

python experiments/014_scores/masks.py             needs a GPU; a quarter of a minute on an H200

As in walk.py, by a (1, 1, S, S) tensor of bools, one block in 16 exactly. Calls of one shape take turns; before each
launch L2 is flushed and the host gets ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import walk

import sandbox
from sandbox import Problem
from sandbox.bench import environment
from sandbox.bench.timing import Events, Limits, Timing, measure, measure_ceilings
from sandbox.core import jsonl, registry
from sandbox.engine import pipeline
from sandbox.launch.dlpack import view

OUT = Path(__file__).resolve().parent / "masks.jsonl"
LIMITS = Limits(rounds=20, enough=20)
D = 128


def masks(torch: Any, S: int, device: str) -> dict[str, Any]:
    """By name; those that hide 15 of 16 tiles first."""
    rows = S // walk.BLOCK
    sample = torch.rand(rows, rows, generator=torch.Generator().manual_seed(0)).fill_diagonal_(-1)
    on = (sample <= sample.flatten().kthvalue(rows * rows // 16).values).to(device)
    doc = torch.arange(S, device=device) // (S // 16)
    return {
        "one block in 16": on.repeat_interleave(walk.BLOCK, 0).repeat_interleave(walk.BLOCK, 1)[None, None],
        "16 documents": (doc[:, None] == doc)[None, None],
    }


Calls = dict[tuple[str, str], Callable[[], Any]]


def calls(torch: Any, B: int, H: int, S: int, device: str, given: dict[str, Any]) -> Calls:
    """By (what, pass); both passes of each mask give what the kernels below give."""
    q, k, v, dout = (torch.randn(B, H, S, D, device=device, dtype=torch.bfloat16) for _ in range(4))
    found: Calls = {}
    for what, mask in {"plain": None, **given}.items():
        forward = functools.partial(sandbox.attention_forward, q, k, v, mask=mask)
        out, lse = forward(kernel="fwd_wgmma")
        backward = functools.partial(sandbox.attention_backward, dout, q, k, v, out, lse, mask=mask)
        if mask is not None:
            near(out, forward(kernel="fwd_mma")[0])
            for own, other in zip(backward(kernel="bwd_wgmma"), backward(kernel="bwd_mma"), strict=True):
                near(own, other)
        found[what, "forward"] = functools.partial(forward, kernel="fwd_wgmma")
        found[what, "backward"] = functools.partial(backward, kernel="bwd_wgmma")
        found[what, "backward"]()  # compiled, and its plan made
    return found


def near(own: Any, other: Any) -> None:
    off = ((own.float() - other.float()).abs().max() / other.float().abs().max()).item()
    assert off < 2e-2, f"{off} between two kernels"


def of_map(torch: Any, mask: Any) -> Callable[[], Any]:
    """The kernel that makes the map, alone."""
    p = Problem(1, 1, *mask.shape[2:], D, dtype="bfloat16", mask=tuple(mask.shape))
    kernel = registry.get("block_map")
    told = mask.new_empty(p.block_map, dtype=torch.int32)
    tensors = {"mask": view(mask), "block_map": view(told)}
    device = tensors["mask"].device
    prepared = pipeline.prepare(kernel, pipeline.tile_on(device, kernel, p), p, tensors, device)
    pointers = prepared.pointers(tensors)

    def launch(held: Any = told) -> None:  # views hold no memory
        prepared.launch(pointers, torch.cuda.current_stream().cuda_stream)

    return launch


def main(device: str = "cuda", S: int = 16384) -> None:
    import torch

    stopwatch = Events()
    ceilings = measure_ceilings("bfloat16", stopwatch)
    given = masks(torch, S, device)
    for B, H in ((1, 8), (1, 16), (2, 16)):
        asked = calls(torch, B, H, S, device, given)
        if H == 8:
            asked |= {(what, "its map"): of_map(torch, mask) for what, mask in given.items()}
        times = measure({name: stopwatch.ready(call) for name, call in asked.items()}, stopwatch, LIMITS)
        medians = {name: Timing.of(values).median for name, values in times.items()}
        for (what, of), seconds in medians.items():
            whole = medians.get(("plain", of))
            share = f"1/{whole / seconds:.1f}" if whole else ""
            print(f"B{B} H{H} S{S}  {what:16} {of:9} {seconds * 1e6:8.1f} us  {share}", flush=True)
            row = {"what": what, "of": of, "B": B, "H": H, "S": S, "seconds": seconds, "plain": whole}
            jsonl.append(OUT, row | ceilings | environment.describe())
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
