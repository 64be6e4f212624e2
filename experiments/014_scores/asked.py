"""What was asked of the options of a score: five problems, forward and backward, and whether each is as fast.

python experiments/014_scores/asked.py          needs a GPU; half a minute on an H200
python experiments/014_scores/asked.py NUMBER   one problem's kernels, compiled and run once, not timed

A target is a share of what the best of the peers reached where a matrix product reaches 772 TFLOP/s, scaled by the
product of this run.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import sandbox
from sandbox.bench import benchmark, environment
from sandbox.bench.grids import DOCUMENTS
from sandbox.bench.inputs import BenchInputs, asked_of
from sandbox.bench.peers import Contender, Ready
from sandbox.bench.timing import Events, Limits, measure_ceilings
from sandbox.core import jsonl, registry
from sandbox.core.problem import Problem
from sandbox.core.score import BLOCK_MAP, Score

OUT = Path(__file__).resolve().parent / "asked.jsonl"
PRODUCT = 772
PLAIN = Problem(2, 16, 8192, 8192, 128, dtype="bfloat16")
CAUSAL = replace(PLAIN, causal=True)
DOCUMENTS_OF_1024 = replace(CAUSAL, score=Score.from_file(DOCUMENTS, CAUSAL))
PROBLEMS = {  # the peer's TFLOP/s and how many times them are asked, forward and backward
    "window 1024": (replace(CAUSAL, window=(1024, None)), (507, 1.05), (451, 1.05)),  # FlashAttention-4
    "softcap 50": (replace(CAUSAL, softcap=50.0), (297, 1.4), (388, 1.05)),  # FlashAttention-4
    "slopes": (replace(CAUSAL, alibi=(16,)), (355, 1.4), (371, 1.05)),  # flex_attention
    "eight documents": (DOCUMENTS_OF_1024, (256, 1.6), (253, 1.05)),  # flex_attention
    "bias (1, 1, S, S)": (replace(PLAIN, bias=(1, 1, 8192, 8192)), (344, 1.2), (300, 1.05)),  # cuDNN
}
KERNELS = {"forward": "fwd_wgmma", "backward": "bwd_wgmma"}


def seen(p: Problem) -> float:
    """Which share of the pairs that are counted is seen: a document's own, of eight."""
    n = p.Sq // 8
    return 8 * n * (n + 1) / (p.Sq * p.Sk) if p.score else 1.0


def entrants(name: str, problem: Problem) -> list[Contender]:
    """The kernel; of a condition with its block map as it is given, and then made in each launch."""
    [own] = benchmark.ours([registry.get(name)])

    def prepare(p: Problem, *inputs: Any, given: BenchInputs) -> Ready:
        told = sandbox.block_map(asked_of(p, given)["score"], p)
        return own.prepare(p, *inputs, given={**given, BLOCK_MAP: told})

    return [replace(own, name=f"{name}, map given", prepare=prepare), own] if problem.score else [own]


def main(numbers: list[int]) -> None:
    stopwatch = Events()
    setting = {**measure_ceilings("bfloat16", stopwatch), **environment.describe()}
    product = setting["ceiling_tflops"]
    limits = Limits(rounds=1, enough=1, warmup=1) if numbers else Limits(rounds=60, seconds=0.2, noise=0.001)
    for number, (what, (problem, *asked)) in enumerate(PROBLEMS.items()):
        for (computes, name), (tflops, times) in zip(KERNELS.items(), asked, strict=True):
            if numbers and number not in numbers:
                continue
            inputs = benchmark.make_inputs(problem, computes=computes)
            for row in benchmark.compete(
                problem, entrants(name, problem), inputs, stopwatch, limits, setting, computes
            ):
                if numbers:
                    continue
                jsonl.append(OUT, row.as_json())
                own, target = (row.tflops or 0) * seen(problem), times * tflops * product / PRODUCT
                asks = f"{target:5.1f} asked, {times} x {tflops} x {product:.0f} / {PRODUCT}"
                says = "met" if own >= target else f"MISSED {row.message}"
                print(f"{what:18} {row.contender:22} {own:6.1f} of {asks}: {own / target:.3f} {says}", flush=True)


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]])
