"""The Hopper backward: right on the GPU, where it stands beside cuDNN and FlashAttention-4, and where its time goes.

python experiments/013_hopper_backward/run.py            tests, sweep, grid, parts; some three minutes on an H200
python experiments/013_hopper_backward/run.py grid       only that

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
from sandbox.spec import Tile
from sandbox.verify import check as checking

HERE = Path(__file__).resolve().parent
MASKS = (False, "bottom-right")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# FlashAttention-4 (cute, sm90) where cuBLAS reached 772 TFLOP/s: S = 512 .. 16k, without and with causal.
FLASH_4 = {
    64: ((337, 403, 463, 488, 508, 519), (214, 312, 380, 474, 482, 511)),
    128: ((365, 468, 550, 567, 592, 607), (241, 359, 461, 509, 553, 593)),
    256: ((249, 304, 338, 363, 377, 378), (177, 246, 300, 338, 365, 380)),
}


def tests() -> None:
    """Hopper's verbs by themselves, then the kernel: 250 repeats and all."""
    files = ["tests/cpu/test_hopper.py", "tests/engine/test_backward.py", "tests/engine/test_kernels.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "gpu", *files]
    subprocess.run([*command, "-k", "hopper or bwd_wgmma"], check=False)


def sweep() -> None:
    """Everything that `check` tries; the bench checks each problem again before it times it."""
    results = list(checking.sweep([registry.get("bwd_wgmma")], ("cuda", driver.device().ordinal)))
    bad = [r for r in results if r.ok is False]
    print(f"sweep: {sum(r.ok is True for r in results)} ok, {len(bad)} wrong", flush=True)
    for r in bad[:12]:
        print(f"  {r.case} {r.problem}: {r.tensor} error {r.error} bound {r.bound} {r.message[:300]}", flush=True)


def measure(
    problems: Sequence[Problem], names: Sequence[str], tiles: Sequence[Tile] = (), seconds: float = 0.1
) -> list[Row]:
    """Beside cuDNN, stored."""
    rows: list[Row] = []
    kernels = [registry.get(name) for name in names]

    def kept():
        limits = Limits(rounds=30, seconds=seconds)
        for row in benchmark.run(
            kernels, problems, [PEERS["sdpa-cudnn"]], tiles=tiles, limits=limits, computes="backward"
        ):
            rows.append(row)
            yield row

    for _ in recorded(kept(), HERE / "results.jsonl"):
        pass
    for r in rows:
        if r.message:
            print(f"  {r.contender} on {r.problem}: {r.message[:300]}")
    return rows


def grid() -> None:
    """The 36 points of the paper's grid: TFLOP/s, and over the better of cuDNN and a scaled FlashAttention-4."""
    rows = measure(benchmark.GRIDS["paper"]("float16"), ["bwd_wgmma"])
    speed = {(r.contender, r.problem): r.tflops for r in rows}
    ceiling = rows[0].setting["ceiling_tflops"]
    print(f"TFLOP/s, cuDNN, FlashAttention-4 scaled (ratio to the better); cuBLAS {ceiling:.0f}")
    means: dict[int, list[float]] = {}
    for D, causal in itertools.product((64, 128, 256), MASKS):
        cells = []
        for i, S in enumerate(LENGTHS):
            p = Problem(16384 // S, 2048 // D, S, S, D, dtype="float16", causal=causal)  # type: ignore[arg-type]
            mine, cudnn = speed.get(("bwd_wgmma", p)) or math.nan, speed.get(("sdpa-cudnn", p)) or math.nan
            flash = FLASH_4[D][bool(causal)][i] * ceiling / 772
            means.setdefault(D, []).append(mine / max(cudnn, flash))
            cells.append(f"{mine:.0f} {cudnn:.0f} {flash:.0f} ({means[D][-1]:.2f})")
        print(f"| D = {D}{', causal' if causal else ''} | {' | '.join(cells)} |", flush=True)
    for D, ratios in means.items():
        print(f"geometric mean at D = {D}: {statistics.geometric_mean(ratios):.3f}", flush=True)


def tiles() -> None:
    """Every tile of the spec."""
    kernel = registry.get("bwd_wgmma")
    for D, causal in itertools.product((64, 128, 256), MASKS):
        lengths = (512, 2048, 16384)
        problems = [Problem(16384 // S, 2048 // D, S, S, D, dtype="float16", causal=causal) for S in lengths]  # type: ignore[arg-type]
        fitting = [tile for tile in kernel.tiles if kernel.unsupported_tile(problems[0], tile, (9, 0)) is None]
        rows = measure(problems, ["bwd_wgmma"], fitting, seconds=0.06)
        for name in dict.fromkeys(r.contender for r in rows):
            cells = [f"{r.tflops or 0:.0f}" for r in rows if r.contender == name]
            print(f"| D = {D}{', causal' if causal else ''} | {name} | {' | '.join(cells)} |", flush=True)


def parts() -> None:
    """Where the time goes: each kernel that one call launches, by PyTorch's profiler."""
    import torch

    import sandbox

    for D, S, causal in itertools.product((64, 128, 256), (512, 16384), MASKS):
        shape = (16384 // S, 2048 // D, S, D)
        dout, q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(4))
        out, lse = sandbox.attention_forward(q, k, v, causal=causal)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(6):
                sandbox.attention_backward(dout, q, k, v, out, lse, causal=causal, kernel="bwd_wgmma")
            torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        for event in profile.events():
            times.setdefault(event.name[:16], []).append(event.device_time)
        cells = [f"{name} {statistics.median(us):.0f}" for name, us in times.items()]
        print(f"D {D} S {S} {causal or 'full'} us: {', '.join(cells)}", flush=True)


STAGES = {"tests": (tests, 120), "sweep": (sweep, 90), "grid": (grid, 150), "parts": (parts, 60), "tiles": (tiles, 150)}


def main() -> None:
    if len(sys.argv) > 1:
        STAGES[sys.argv[1]][0]()
        return
    for stage, (_, limit) in STAGES.items():
        start = time.perf_counter()
        try:
            code: object = subprocess.run([sys.executable, __file__, stage], timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit} s"
        print(f"--- {stage}: {code}, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
