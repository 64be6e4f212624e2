"""What hidden tiles cost the Hopper forward: sparse masks and documents with their block map, beside the plain problem.

python experiments/014_scores/walk.py           needs a GPU; half a minute on an H200
PYTHONPATH=OTHER python …/walk.py               the same of another checkout, such as the commit before
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sandbox
from sandbox import Problem, Score
from sandbox.bench import environment
from sandbox.core import jsonl

OUT = Path(__file__).resolve().parent / "walk.jsonl"
LAUNCHES = 20
BLOCK = 128  # queries and keys of what is hidden or shown


def blocks(torch: Any, S: int, share: int, device: str) -> Score:
    """One block in `share`, by lot, and those on the diagonal, so that every row sees something."""
    rows = S // BLOCK
    shown = torch.rand(rows, rows, generator=torch.Generator().manual_seed(0)) < 1 / share - 1 / rows
    shown |= torch.eye(rows, dtype=torch.bool)
    return Score(mask=f"on(i / {BLOCK}, j / {BLOCK})", tensors={"on": shown.to(device)})


def documents(torch: Any, S: int, count: int, device: str) -> Score:
    """`count` documents of one length."""
    doc = torch.arange(S, device=device, dtype=torch.int32) // (S // count)
    return Score(mask="doc(i) == doc(j)", tensors={"doc": doc})


def timed(torch: Any, call: Callable[[], Any]) -> float:
    """Median seconds of so many launches, one after the other."""
    samples = []
    for i in range(LAUNCHES + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        samples += [begin.elapsed_time(end) * 1e-3] if i >= 3 else []
    return statistics.median(samples)


def cases(torch: Any, device: str, S: int, short: int) -> list[tuple[str, int, int, dict[str, Any]]]:
    """(what, B, S, options); the plain problem before what it is compared with."""
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
    device: str = "cuda", S: int = 16384, short: int = 8192, H: int = 16, timed: Callable[..., float] = timed
) -> None:
    import torch

    for what, B, length, options in cases(torch, device, S, short):
        q, k, v = (torch.randn(B, H, length, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
        if score := options.get("score"):
            options["score"] = score.with_blocks(sandbox.block_map(score, Problem(B, H, length, length, 128)))
        call = lambda kernel: sandbox.attention_forward(q, k, v, **options, kernel=kernel)[0]  # noqa: B023, E731
        off = (
            (call("fwd_wgmma").float() - call("fwd_mma").float()).abs().max().item()
        )  # which scans the map tile by tile
        assert off < 2e-2, f"{what}: {off} between two kernels"
        seconds = timed(torch, lambda: call("fwd_wgmma"))  # noqa: B023
        seen = pairs(torch, score, length, bool(options.get("causal")))
        row = {
            "what": what,
            "B": B,
            "H": H,
            "S": length,
            "seconds": seconds,
            "tflops": 4 * B * H * seen * 128 / seconds / 1e12,
        }
        print(
            f"{what:24} S {length:6}  {seconds * 1e6:8.1f} us  {row['tflops']:6.1f} TFLOP/s of the pairs seen",
            flush=True,
        )
        if device == "cuda":
            jsonl.append(OUT, row | environment.describe())


def pairs(torch: Any, score: Score | None, S: int, causal: bool) -> int:
    """How many (query, key) pairs a head sees, as the tensors of `blocks` and `documents` tell it."""
    if score is None:
        return S * (S + 1) // 2 if causal else S * S
    if "on" in score.tensors:
        return int(score.tensors["on"].sum()) * BLOCK**2
    lengths = torch.bincount(score.tensors["doc"].long()).tolist()
    return sum(n * (n + 1) // 2 if causal else n * n for n in lengths)


if __name__ == "__main__":
    main()
