"""Batches of an inference server over pages: mixed batches, prefill over pages, decoding over float8 keys.

python experiments/028_serving/run.py mixed|serving|prefill|float8|tiles … [--rows FILE] [--sample N]      needs a GPU

mixed: a batch of chunks and single tokens beside its chunks alone and its tokens alone. serving: sampled batches beside
FlashAttention-4 and PyTorch's varlen_attn. prefill: pages of 16 to 256 keys beside contiguous keys. float8: float8 keys
beside bfloat16 keys, contiguous and in pages, in sequences of equal and of random lengths. tiles: tiles for pages of
float8 keys. Every line is printed when it is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

import sandbox
from sandbox.bench import benchmark, environment, peers, serving
from sandbox.bench.rows import recorded
from sandbox.bench.sampled_shapes import sampled
from sandbox.bench.timing import Events, Limits, Stopwatch, Timing, measure, measure_ceilings
from sandbox.core import jsonl, registry
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


DECODING = (  # B, H, Hk, Sq, Sk, D
    (128, 32, 8, 1, 2048, 128), (128, 32, 8, 1, 8192, 128), (64, 64, 8, 1, 8192, 128), (64, 64, 8, 2, 8192, 128),
    (64, 64, 8, 4, 8192, 128), (8, 32, 8, 1, 32768, 128), (1, 64, 8, 1, 131072, 128), (32, 32, 8, 1, 4096, 128),
    (64, 32, 2, 1, 8192, 256), (128, 32, 32, 1, 2048, 64),
)  # fmt: skip
KEY_DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def float8(given: argparse.Namespace) -> Iterator[str]:
    """Decoding over float8 keys beside bfloat16 keys; speed relative to the latter."""
    stopwatch, setting = _setting()
    for shape in DECODING:
        for size, of_equal_length in ((0, True), *((n, equal) for n in (16, 64, 256) for equal in (True, False))):
            found = {name: _decoding(shape, size, of_equal_length, name) for name in KEY_DTYPES}
            for launch, _ in found.values():
                launch()  # compiles
            calls = {name: stopwatch.ready(launch) for name, (launch, _) in found.items()}
            samples = measure(calls, stopwatch, Limits(seconds=given.seconds, rounds=20))
            us = {name: round(1e6 * Timing.of(sample).median, 1) for name, sample in samples.items()}
            gbps = found["bfloat16"][1] / us["bfloat16"] * 1e-3
            share = round(gbps / setting["ceiling_read_gbps"], 3)
            ratios = ", ".join(f"{name} {us['bfloat16'] / t:.3f}" for name, t in us.items() if name != "bfloat16")
            keys = f"page {size}, {'equal' if of_equal_length else 'random'} lengths" if size else "contiguous"
            row = {"shape": shape, "keys": keys, "us": us, "bfloat16_of_bandwidth": share, **setting}
            jsonl.append(given.rows.with_name("float8.jsonl"), row)
            times = ", ".join(f"{t:.1f}" for t in us.values())
            yield f"{ratios}, bfloat16 {share:.2f} of the bandwidth: {times} us  {shape} {keys}"


def _decoding(shape: tuple[int, ...], size: int, of_equal_length: bool, dtype: str) -> tuple[Callable[[], object], int]:
    """A call of `attention` or `attention_paged` with keys of this dtype, and the bytes of its keys and values."""
    (B, H, Hk, Sq, Sk, D), kind = shape, {"device": "cuda", "dtype": torch.int32}
    torch.manual_seed(0)
    q = torch.randn(B, H, Sq, D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(B * Sk * Hk * D // 8, device="cuda").repeat(8).to(KEY_DTYPES[dtype]) for _ in range(2))
    options: dict[str, Any] = {"causal": Sq > 1} | ({"descale": (1.0, 1.0, 1.0)} if k.element_size() == 1 else {})
    if not size:
        rows = (x.view(B, Hk, Sk, D) for x in (k, v))
        return partial(sandbox.attention_forward, q, *rows, **options), k.nbytes + v.nbytes
    table = torch.randperm(B * Sk // size, device="cuda").to(torch.int32).view(B, -1)
    lengths = torch.full((B,), Sk, **kind) if of_equal_length else torch.randint(1, Sk + 1, (B,), **kind)
    k, v = (x.view(-1, size, Hk, D) for x in (k, v))
    bytes_read = 2 * int(lengths.sum()) * Hk * D * k.element_size()
    return partial(sandbox.attention_paged, q, k, v, table, lengths, **options), bytes_read


def tiles(given: argparse.Namespace) -> Iterator[str]:
    """Tiles for pages of float8 keys, sequences of random lengths."""
    chosen = [
        Tile(BLOCK_M=rows, BLOCK_N=n, WARPS=warps, STAGES=stages, BLOCKS=132, CLUSTER=cluster)
        for rows in (8, 16, 32)
        for n, warps, stages, cluster in ((32, 4, 2, 1), (32, 4, 2, 2), (32, 4, 3, 1), (32, 8, 2, 1), (16, 4, 3, 1))
    ]
    for B, H, Hk, Sq, Sk, D in DECODING:
        for size in (16, 64):
            one = Problem(B, H, Sq, Sk, D, Hk=Hk, dtype="bfloat16", page_size=size)
            p = replace(one, causal="bottom-right") if Sq > 1 else one
            bf16 = min(timed(p, given).values(), default=float("nan"))
            fewest = next(m for m in (8, 16, 32) if Sq * H // Hk <= m)
            fitting = [t for t in chosen if fewest == t.BLOCK_M]
            found = timed(replace(p, kv_dtype="float8_e4m3"), given, ["fwd_decode"], tiles=fitting)
            listed = ", ".join(
                f"{name.partition(' ')[2]} {t:.1f}" for name, t in sorted(found.items(), key=itemgetter(1))
            )
            yield f"bfloat16 {bf16:.1f} us; {listed}  {(B, H, Hk, Sq, Sk, D)} page {size}"


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {
    "mixed": mixed,
    "serving": sampled_batches,
    "prefill": prefill,
    "float8": float8,
    "tiles": tiles,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--rows", type=Path, default=Path(__file__).with_name("results.jsonl"))
    parser.add_argument("--sample", type=int, default=20, help="Sampled batches. Default: 20.")
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
