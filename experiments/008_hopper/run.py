"""The Hopper kernel: right on the GPU, and which of its steps is worth what, beside cuDNN and FlashAttention-2.

python experiments/008_hopper/run.py            tests, sweep, bench; some three minutes on an H100
python experiments/008_hopper/run.py bench 128  only that

Each stage is a process of its own with a time limit, so that a kernel that hangs costs one stage.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from sandbox import Problem, bench, driver, registry
from sandbox import check as checking
from sandbox.peers import PEERS
from sandbox.rows import Row, recorded
from sandbox.spec import Tile
from sandbox.timing import Limits

HERE = Path(__file__).resolve().parent
PERSISTENT, ONE_PIECE = 132, 10**6  # blocks: as many as an H100 has multiprocessors, or one for each piece
LENGTHS = (1024, 4096, 16384)


def tile(M: int, N: int, stages: int = 2, ping_pong: int = 2, overlap: int = 2, blocks: int = PERSISTENT) -> Tile:
    return Tile(BLOCK_M=M, BLOCK_N=N, STAGES=stages, PING_PONG=ping_pong, OVERLAP=overlap, BLOCKS=blocks)


def steps(M: int, N: int) -> list[Tile]:
    """The simplest design first, then each of the two overlaps, then both, then both without staying on the SM."""
    flags = [tile(M, N, ping_pong=p, overlap=o) for p, o in ((1, 1), (2, 1), (1, 2), (2, 2))]
    return [*flags, tile(M, N, blocks=ONE_PIECE)]


VARIANTS = {
    64: [*steps(192, 128), tile(192, 128, stages=3), tile(128, 128), tile(128, 176), tile(128, 192)],
    128: [*steps(128, 128), tile(128, 160), tile(128, 176), tile(192, 80)],
    256: [*steps(128, 80), tile(128, 64), tile(128, 64, ping_pong=1)],
}


def tests() -> None:
    """TMA, wgmma and mbarriers by themselves, then the kernel."""
    files = ["tests/test_hopper.py", "tests/test_kernels.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *files, "-k"]
    subprocess.run([*command, "hopper or (fwd_wgmma and not repeats and not sweep)"], check=False)


def sweep() -> None:
    """Everything that `check` tries; the bench checks each variant again before it times it."""
    kernel, device = registry.get("fwd_wgmma"), ("cuda", driver.device().ordinal)
    results = list(checking.sweep([kernel], device))
    bad = [r for r in results if r.ok is False]
    print(f"sweep: {sum(r.ok is True for r in results)} ok, {len(bad)} wrong", flush=True)
    for r in bad[:12]:
        print(f"  {r.case}: error {r.error} bound {r.bound} lse {r.lse_excess} {r.message[:300]}", flush=True)


def measure(D: int) -> None:
    """Every variant at one head width on six problems; TFLOP/s, and the ratio to cuDNN."""
    problems = [
        Problem(16384 // S, 2048 // D, S, S, D, dtype="float16", causal=causal)  # type: ignore[arg-type]
        for causal in (False, "bottom-right")
        for S in LENGTHS
    ]
    peers = [PEERS[name] for name in ("sdpa-cudnn", "sdpa-flash")]
    kernel = registry.get("fwd_wgmma")
    rows: list[Row] = []

    def kept():
        for row in bench.run([kernel], problems, peers, tiles=VARIANTS[D], limits=Limits(rounds=30, seconds=0.1)):
            rows.append(row)
            yield row

    for _ in recorded(kept(), HERE / "results.jsonl"):
        pass
    speed = {(r.contender, r.problem): r.tflops for r in rows}
    head = "".join(f"{f'{S // 1024}k':>13}" for S in LENGTHS)
    print(f"D = {D}: TFLOP/s (ratio to cuDNN)\n{'':68}{head}{head}   (second half: causal)")
    for name in dict.fromkeys(r.contender for r in rows):
        cells = []
        for problem in problems:
            mine, theirs = speed[name, problem], speed["sdpa-cudnn", problem]
            cells.append(f"{mine:.0f} ({mine / theirs:.2f})" if mine and theirs else "-")
        print(f"{name:68}" + "".join(f"{cell:>13}" for cell in cells))
    print(f"cuBLAS reaches {rows[0].setting.get('ceiling_tflops', 0):.0f}", flush=True)
    for r in rows:
        if r.message:
            print(f"  {r.contender} on {r.problem}: {r.message[:300]}")


def main() -> None:
    if len(sys.argv) > 1:
        stage = {"tests": tests, "sweep": sweep, "bench": measure}[sys.argv[1]]
        stage(*map(int, sys.argv[2:]))
        return
    for arguments, limit in ((["tests"], 120), (["sweep"], 120), *((["bench", str(D)], 110) for D in VARIANTS)):
        start = time.perf_counter()
        try:
            code = subprocess.run([sys.executable, __file__, *arguments], timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit} s"
        print(f"--- {' '.join(arguments)}: {code}, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
