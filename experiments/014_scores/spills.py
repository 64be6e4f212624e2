"""Which tiles spill registers with which option: every kernel, every tile in its spec, every option alone. No GPU.

python experiments/014_scores/spills.py                    all; some hours of sixteen cores, once
python experiments/014_scores/spills.py bwd_mma bwd_wgmma  these kernels
python experiments/014_scores/spills.py --sample 500          so many of them, sampled

Compiled by the NVRTC that there is, two at a time (`--jobs`), and cached. Prints what spills, or is warned of.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, NamedTuple

from sandbox.core import registry
from sandbox.core.dtypes import FLOAT8
from sandbox.core.errors import UnsupportedProblem
from sandbox.core.kernel import Kernel
from sandbox.core.score import Score, TensorLike
from sandbox.engine import choose, pipeline
from sandbox.spec import Problem, Tile
from sandbox.toolchain import arch
from sandbox.verify.scores import OPTIONS

S = 8192
WIDTHS = (64, 96, 128, 192, 256)
TARGETS = ("sm_80", "sm_89", "sm_90a")  # of 8.9 what float8 adds
ALONE: dict[str, Callable[[Problem], dict[str, Any]]] = {
    "plain": lambda p: {},
    **OPTIONS,
    "right window": lambda p: {"window": (None, 100)},
    "a condition": lambda p: {"score": Score(mask="doc(i) == doc(j)", tensors={"doc": TensorLike((p.Sk,), "int32")})},
    "a score": lambda p: {
        "score": Score("x - slope(h) * abs(i - j)", tensors={"slope": TensorLike((p.H,), "float32")})
    },
    "lengths": lambda p: {"lengths": ((p.Sq, p.Sk), (p.Sq // 3, p.Sk // 3))},
    "pages": lambda p: {"page_size": 64, "key_lengths": True},
    "descale": lambda p: {"descale": ((p.B, p.H), (p.B, p.Hk), (p.B, p.Hk))},
    "v of the other float8": lambda p: {"v_dtype": next(iter({*FLOAT8} - {p.dtype}))},
}
OF_FLOAT8 = ("descale", "v of the other float8")
MAY = {("bwd_wgmma", "score"), ("fwd_wgmma_fp8", "score")}  # docs/limits.md


class Job(NamedTuple):
    """What is compiled."""

    kernel: str
    option: str
    problem: Problem
    tile: Tile
    target: str


def problems(kernel: Kernel, target: str) -> Iterator[tuple[str, Problem]]:
    """Every option alone, of those that the kernel takes: (option, problem)."""
    for dtype, D, causal in itertools.product(kernel.dtypes, WIDTHS, (False, "bottom-right")):
        if target == "sm_89" and dtype not in FLOAT8:
            continue
        plain = Problem(2, 4, S, S, D, dtype=dtype, causal=causal)
        for option, of in ALONE.items():
            if option in OF_FLOAT8 and dtype not in FLOAT8:
                continue
            problem = replace(plain, **of(plain))
            if not kernel.refuses(problem, arch.parse(target)):
                yield option, problem


def tiles(kernel: Kernel, problem: Problem, target: str) -> Iterator[Tile]:
    """Those that it may have."""
    return (t for t in kernel.tiles if not choose.unsupported_tile(kernel, problem, t, arch.parse(target)))


def jobs(kernel: Kernel, target: str) -> Iterator[Job]:
    """One for each of what the compiler sees."""
    seen = set()
    for option, problem in problems(kernel, target):
        for tile in tiles(kernel, problem, target):
            key = str(kernel.defines(problem, tile))
            if key not in seen:
                seen.add(key)
                yield Job(kernel.name, option, problem, tile, target)


def spilled(job: Job) -> list[str]:
    """What to say of it."""
    try:
        compiled = pipeline.compile_problem(registry.get(job.kernel), job.problem, job.tile, job.target)
    except UnsupportedProblem:  # an architecture that this NVRTC does not know
        return []
    return [
        f"{one.entry} {job.target} {job.problem.variant} {job.tile}: {one.resources}"
        for one in compiled
        if one.resources.spill_stores or one.resources.spill_loads or one.resources.warnings
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kernels", nargs="*")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    names = options.kernels or [*registry.kernels()]
    asked = [job for name in names for target in TARGETS for job in jobs(registry.get(name), target)]
    if options.sample:
        asked = random.sample(asked, min(options.sample, len(asked)))
    print(len(asked), "to compile", flush=True)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for said in pool.map(spilled, asked):
            for line in said:
                print(line, flush=True)


if __name__ == "__main__":
    main()
