"""The Hopper kernel: right on the GPU, which tile is fastest where, and where it stands beside cuDNN and FA2.

python experiments/008_hopper/run.py         tests, sweep, grid, tiles, small, real; some three minutes on an H100
python experiments/008_hopper/run.py grid    only that

Each stage is a process of its own with a time limit, so that a kernel that hangs costs one stage.
"""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sandbox import Problem
from sandbox.bench import benchmark
from sandbox.bench.peers import PEERS
from sandbox.bench.rows import Row, recorded
from sandbox.bench.timing import Limits
from sandbox.core import registry
from sandbox.launch import driver
from sandbox.spec import Kernel, Tile
from sandbox.verify import check as checking

HERE = Path(__file__).resolve().parent
MASKS = (False, "bottom-right")
# What FlashAttention-4 reaches at S = 8k and 16k, without and with causal, where cuBLAS reaches 700 TFLOP/s.
FLASH_4 = {64: ((521, 553), (513, 525)), 128: ((636, 656), (590, 689)), 256: ((697, 693), (657, 694))}


def tests() -> None:
    """TMA, wgmma and mbarriers by themselves, then the kernel: 250 repeats, sweep and all."""
    files = ["tests/cpu/test_hopper.py", "tests/engine/test_kernels.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *files]
    subprocess.run([*command, "-k", "hopper or fwd_wgmma"], check=False)


def sweep() -> None:
    """Everything that `check` tries; the bench checks each problem again before it times it."""
    results = list(checking.sweep([registry.get("fwd_wgmma")], ("cuda", driver.device().ordinal)))
    bad = [r for r in results if r.ok is False]
    print(f"sweep: {sum(r.ok is True for r in results)} ok, {len(bad)} wrong", flush=True)
    for r in bad[:12]:
        print(f"  {r.case}: error {r.error} bound {r.bound} lse {r.lse_excess} {r.message[:300]}", flush=True)


def measure(
    problems: Sequence[Problem], kernels: Sequence[Kernel], tiles: Sequence[Tile] = (), rounds: int = 30
) -> list[Row]:
    """Beside cuDNN and FlashAttention-2, stored."""
    peers = [PEERS[name] for name in ("sdpa-cudnn", "sdpa-flash")]
    rows: list[Row] = []

    def kept():
        for row in benchmark.run(kernels, problems, peers, tiles=tiles, limits=Limits(rounds=rounds, seconds=0.1)):
            rows.append(row)
            yield row

    for _ in recorded(kept(), HERE / "results.jsonl"):
        pass
    for r in rows:
        if r.message:
            print(f"  {r.contender} on {r.problem}: {r.message[:300]}")
    return rows


def ratios(rows: Sequence[Row], contender: str) -> dict[Problem, tuple[float, float]]:
    """TFLOP/s, and over cuDNN's."""
    speed = {(r.contender, r.problem): r.tflops for r in rows}
    pairs = {p: (speed[contender, p], speed["sdpa-cudnn", p]) for _, p in speed}
    return {p: (mine, mine / theirs) for p, (mine, theirs) in pairs.items() if mine and theirs}


def mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return statistics.geometric_mean(values) if values else math.nan


def grid() -> None:
    """All 36 points of the paper's grid."""
    rows = measure(benchmark.GRIDS["paper"]("float16"), [registry.get("fwd_wgmma")])
    found, ceiling = ratios(rows, "fwd_wgmma"), rows[0].setting["ceiling_tflops"]
    print(f"TFLOP/s (ratio to cuDNN), S = 512 .. 16k; in brackets what 8k and 16k should reach; cuBLAS {ceiling:.0f}")
    for D, causal in itertools.product((64, 128, 256), MASKS):
        cells = [f"{t:.0f} ({r:.2f})" for p, (t, r) in found.items() if (p.D, p.causal) == (D, causal)]
        due = [f"{t * ceiling / 700:.0f}" for t in FLASH_4[D][bool(causal)]]
        print(f"| D = {D}{', causal' if causal else ''} | {' | '.join(cells)} | [{', '.join(due)}] |")
    for D in (64, 128, 256):
        print(f"geometric mean at D = {D}: {mean([r for p, (_, r) in found.items() if p.D == D]):.3f}")
    print(f"geometric mean: {mean([r for _, r in found.values()]):.3f}", flush=True)


def tiles() -> None:
    """Every tile of the spec: what its `rank` is made from."""
    kernel = registry.get("fwd_wgmma")
    for D, causal in itertools.product((64, 128, 256), MASKS):
        lengths = (512, 1024, 4096, 16384)
        problems = [Problem(16384 // S, 2048 // D, S, S, D, dtype="float16", causal=causal) for S in lengths]  # type: ignore[arg-type]
        rows = measure(problems, [kernel], kernel.tiles, rounds=12)
        for name in dict.fromkeys(r.contender for r in rows if r.kernel):
            cells = [f"{t:.0f} ({r:.2f})" for t, r in ratios(rows, name).values()]
            if cells:
                print(
                    f"| D = {D}{', causal' if causal else ''} | {name.split()[1]} | {' | '.join(cells)} |", flush=True
                )


def small() -> None:
    """Few heads, short rows: is there a size from which down fwd_mma is faster?"""
    heads = ((1, 12, 64), (8, 12, 64), (1, 16, 128), (1, 8, 256))
    problems = [
        Problem(B, H, S, S, D, dtype="float16", causal=causal)  # type: ignore[arg-type]
        for (B, H, D), S, causal in itertools.product(heads, (64, 128, 256, 512, 1024), MASKS)
    ]
    rows = measure(problems, [registry.get(name) for name in ("fwd_wgmma", "fwd_mma")], rounds=12)
    us = {(r.contender, r.problem): 1e6 * r.timing.median for r in rows if r.timing}
    for p in problems:
        mine, below = us.get(("fwd_wgmma", p)), us.get(("fwd_mma", p))
        if mine and below:
            print(
                f"{p!s:34} fwd_wgmma {mine:6.1f} us, fwd_mma {below:6.1f} us ({below / mine:.2f})",
                flush=True,
            )


def real() -> None:
    """Problems as models have them, bfloat16: odd lengths, few heads, grouped heads, few keys."""
    causal = ((1, 16, 16, 8191, 8191, 128), (8, 12, 12, 1024, 1024, 64), (2, 16, 16, 4000, 4000, 96))
    causal += ((1, 32, 8, 8192, 8192, 128), (4, 32, 8, 2048, 2048, 128), (1, 8, 8, 16384, 16384, 256))
    whole = ((64, 16, 16, 197, 197, 64), (8, 20, 20, 1500, 1500, 64), (2, 10, 10, 4096, 77, 64))
    whole += ((2, 10, 10, 4096, 4096, 64), (1, 24, 24, 4608, 4608, 128))
    problems = [
        Problem(B, H, Sq, Sk, D, Hk=Hk, dtype="bfloat16", causal=mask)
        for shapes, mask in ((causal, MASKS[1]), (whole, MASKS[0]))
        for B, H, Hk, Sq, Sk, D in shapes
    ]
    for p, (mine, ratio) in ratios(measure(problems, [registry.get("fwd_wgmma")]), "fwd_wgmma").items():
        print(f"{p!s:40} {mine:.0f} ({ratio:.2f})", flush=True)


def main() -> None:
    stages = {"tests": (tests, 120), "sweep": (sweep, 60), "grid": (grid, 120), "tiles": (tiles, 120)}
    stages |= {"small": (small, 60), "real": (real, 60)}
    if len(sys.argv) > 1:
        stages[sys.argv[1]][0]()
        return
    for stage, (_, limit) in stages.items():
        start = time.perf_counter()
        try:
            code = subprocess.run([sys.executable, __file__, stage], timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit} s"
        print(f"--- {stage}: {code}, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
