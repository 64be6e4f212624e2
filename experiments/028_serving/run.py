"""Batches of an inference server over pages: mixed batches, prefill over pages, few queries over float8 pages.

python experiments/028_serving/run.py mixed|serving|prefill|float8 … [--rows FILE] [--sample N]      needs a GPU

mixed: a batch of chunks and single tokens beside its chunks alone and its tokens alone. serving: sampled batches beside
FlashAttention-4 and PyTorch's varlen_attn. prefill: pages of 16 to 256 keys beside contiguous keys. float8: the tiles
for 2 to 16 queries, and e5m2 pages three times. Every line is printed when it is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sandbox.bench import benchmark, environment, peers, serving
from sandbox.bench.rows import recorded
from sandbox.bench.sampled_shapes import sampled
from sandbox.bench.timing import Events, Limits, Stopwatch, measure_ceilings
from sandbox.core import registry
from sandbox.core.problem import Problem
from sandbox.engine import choose
from sandbox.spec import Tile

ROOT = Path(__file__).resolve().parents[2]
FA4 = "sandbox/bench/flash_attention_peers.py"
START = time.monotonic()
Timed = dict[str, float]  # {contender: µs}


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:4.0f} s] {text}", flush=True)


def name_of(p: Problem) -> str:
    """A short name: how many tokens and chunks, heads, page size."""
    long = [f"{q}x{k}" for q, k in p.lengths if q > p.short_queries]
    tokens = [k for q, k in p.lengths if q <= p.short_queries]
    of_keys = f" with {sum(tokens)} keys" if tokens else ""
    return f"{len(tokens)} tokens{of_keys}, chunks {' '.join(long) or '-'}, H{p.H}/{p.Hk} D{p.D} page {p.page_size}"


@cache
def _setting() -> tuple[Stopwatch, dict[str, Any]]:
    """The stopwatch, and what the rows say about the machine."""
    benchmark.need_gpu()
    stopwatch = Events(0)
    return stopwatch, {"mode": "events", "seed": 0, **environment.describe(), **measure_ceilings("bfloat16", stopwatch)}


def timed(
    p: Problem, given: argparse.Namespace, names: Sequence[str] = (), others: Sequence[Any] = (),
    tiles: Sequence[Tile] = (),
) -> Timed:  # fmt: skip
    """The contenders' times on a problem, by default that of the kernel that `attention` chooses."""
    stopwatch, setting = _setting()
    kernels = [registry.get(name) for name in names] or [choose.choose_kernel(p, "forward", (9, 0))]
    contenders = [*benchmark.kernel_contenders(kernels, tiles), *others]
    limits = Limits(seconds=given.seconds)
    rows = benchmark.time_contenders(p, contenders, benchmark.make_inputs(p), stopwatch, limits, setting)
    torch.cuda.empty_cache()  # the next problem's tensors have other sizes
    found = {}
    for row in recorded(rows, given.rows):
        if row["ms"]:
            found[row["contender"]] = 1e3 * row["ms"]
        elif row["message"]:
            say(f"    {row['contender']}: {row['message'][:160]}")
    return found


def mixed(given: argparse.Namespace) -> Iterator[str]:
    """Throughput of mixed batches over that of their parts: (time of the chunks + time of the tokens) / time."""
    problems = [p for p in sampled("serving", 40, given.seed, "bfloat16") if 0 < _longs(p) < len(p.lengths)]
    for p in problems[: given.sample]:
        of_part = [
            serving.of_lengths(lengths, p.H, p.Hk, p.D, p.page_size, dtype=p.dtype)
            for lengths in ([x for x in p.lengths if x[0] > p.short_queries], [x for x in p.lengths if x[0] == 1])
        ]
        whole, long, short = (min(timed(part, given).values(), default=float("nan")) for part in (p, *of_part))
        yield f"{(long + short) / whole:5.3f} of its parts: {whole:7.1f} us, {long:7.1f} + {short:7.1f}  {name_of(p)}"


def _longs(p: Problem) -> int:
    return sum(queries > p.short_queries for queries, _ in p.lengths)


def sampled_batches(given: argparse.Namespace) -> Iterator[str]:
    """Our kernels beside the peers on the first sampled batches."""
    others = [*peers.get("varlen"), *(peer for peer in peers.get(str(ROOT / FA4)) if peer.name == "fa4")]
    for p in sampled("serving", 20, given.seed, "bfloat16")[: given.sample]:
        times = timed(p, given, others=others)
        own = min((t for name, t in times.items() if name.startswith("fwd")), default=float("nan"))
        best = min((t for name, t in times.items() if not name.startswith("fwd")), default=float("nan"))
        listed = ", ".join(f"{name} {t:.1f}" for name, t in times.items())
        yield f"{best / own:5.2f} of the best peer: {listed} us  {name_of(p)}"


PREFILL = ((4, 4096, 8192, 32, 8, 64), (4, 4096, 8192, 32, 8, 128), (2, 4096, 8192, 32, 2, 256))


def prefill(given: argparse.Namespace) -> Iterator[str]:
    """Pages beside contiguous keys of the same ragged batch."""
    for B, Sq, Sk, H, Hk, D in PREFILL:
        for size in given.pages:
            p = serving.of_lengths(((Sq, Sk),) * B, H, Hk, D, size, dtype="bfloat16")
            if size == given.pages[0]:
                rows = min(timed(serving.gathered(p), given, ["fwd_wgmma"]).values(), default=float("nan"))
                yield f"contiguous: {rows:7.1f} us, {p.visible_pairs * 4 * H * D / rows * 1e-6:4.0f} TFLOP/s  D{D}"
            pages = min(timed(p, given, ["fwd_wgmma"]).values(), default=float("nan"))
            yield f"{rows / pages:5.3f} of contiguous: {pages:7.1f} us  D{D} page {size}"


def float8(given: argparse.Namespace) -> Iterator[str]:
    """Tiles for 2 to 16 queries over float8 keys, beside bfloat16 keys; e5m2 pages of 64 three times."""
    tiles = [
        Tile(BLOCK_M=32, BLOCK_N=n, WARPS=warps, STAGES=stages, BLOCKS=132, CLUSTER=1)
        for n, warps, stages in ((32, 8, 2), (16, 4, 3))
    ]
    for Sq, size in ((4, 0), (4, 64), (3, 0), (8, 0)):
        wide = Problem(64, 64, Sq, 8192, 128, Hk=8, dtype="bfloat16", causal="bottom-right", page_size=size)
        bf16 = min(timed(wide, given).values(), default=float("nan"))
        narrow = timed(replace(wide, kv_dtype="float8_e4m3"), given, ["fwd_decode"], tiles=tiles)
        listed = ", ".join(f"{bf16 / t:.2f} x ({t:.1f} us, {name.partition(' ')[2]})" for name, t in narrow.items())
        yield f"{Sq} queries, page {size}: bf16 {bf16:.1f} us; e4m3 {listed}"
    for size, dtype in ((64, "float8_e5m2"), (64, "float8_e4m3"), (16, "float8_e5m2")):
        p = Problem(32, 32, 1, 4096, 128, Hk=8, dtype="bfloat16", kv_dtype=dtype, page_size=size)
        times = [min(timed(p, given, ["fwd_decode"]).values(), default=float("nan")) for _ in range(3)]
        yield f"{dtype} page {size}: {', '.join(f'{t:.1f}' for t in times)} us"


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "mixed": mixed,
    "serving": sampled_batches,
    "prefill": prefill,
    "float8": float8,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--rows", type=Path, default=Path(__file__).with_name("results.jsonl"))
    parser.add_argument("--sample", type=int, default=6, help="Sampled batches. Default: 6.")
    parser.add_argument("--seed", type=int, default=39)
    parser.add_argument("--pages", type=int, nargs="+", default=(16, 32, 64, 128, 256), help="Page sizes of prefill.")
    parser.add_argument("--seconds", type=float, default=0.1, help="GPU time of each contender.")
    given = parser.parse_args()
    for part in given.parts:
        say(f"{part}: {PARTS[part].__doc__}")
        for line in PARTS[part](given):
            say(line)


if __name__ == "__main__":
    main()
