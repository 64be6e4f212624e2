"""Which tiles spill registers with which option: every kernel, every tile in its spec, every option alone. No GPU.

python experiments/014_scores/spills.py                    all; some hours of one core, once
python experiments/014_scores/spills.py bwd_mma bwd_wgmma  these kernels; half an hour of one core

Compiled by the NVRTC that there is, two at a time, and kept in the cache. Prints what spills, or is warned of.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

from sandbox.core import registry
from sandbox.core.errors import UnsupportedProblem
from sandbox.core.score import Score, TensorLike
from sandbox.engine import choose, pipeline
from sandbox.spec import Problem, Tile
from sandbox.toolchain import arch
from sandbox.verify.scores import OPTIONS

Job = tuple[str, Problem, Tile, str]
S = 8192
MORE = {
    "plain": {},
    "a condition": {"score": Score(mask="doc(i) == doc(j)", tensors={"doc": TensorLike((S,), "int32")})},
    "a score": {"score": Score("x - slope(h) * abs(i - j)", tensors={"slope": TensorLike((4,), "float32")})},
}


def jobs(names: list[str]) -> Iterator[Job]:
    """One for each of what the compiler sees."""
    seen = set()
    kernels = [kernel for kernel in registry.kernels().values() if kernel.name in names or not names]
    for kernel, D, causal, target in itertools.product(
        kernels, (64, 128, 256), (False, "bottom-right"), ("sm_80", "sm_90a")
    ):
        dtypes = {"bfloat16"} & {*kernel.dtypes} or kernel.dtypes
        for dtype in dtypes:
            plain = Problem(2, 4, S, S, D, dtype=dtype, causal=causal)
            problems = [replace(plain, **of(plain)) for of in OPTIONS.values()]
            problems += [replace(plain, **options) for options in MORE.values()]
            problems += [replace(plain, lengths=((S, S), (300, 300)))]
            for problem, tile in itertools.product(problems, kernel.tiles):
                number = arch.parse(target)
                if kernel.refuses(problem, number) or choose.refuses_tile(kernel, problem, tile, number):
                    continue
                key = kernel.name, target, str(kernel.defines(problem, tile))
                if key not in seen:
                    seen.add(key)
                    yield kernel.name, problem, tile, target


def spilled(job: Job) -> list[str]:
    """What to say of it."""
    name, problem, tile, target = job
    try:
        compiled = pipeline.compile_problem(registry.get(name), problem, tile, target)
    except UnsupportedProblem:  # an architecture that this NVRTC does not know
        return []
    return [
        f"{one.entry} {target} {problem.variant} {tile}: {one.resources}"
        for one in compiled
        if one.resources.spill_stores or one.resources.spill_loads or one.resources.warnings
    ]


def main(names: list[str]) -> None:
    asked = [*jobs(names)]
    print(len(asked), "to compile", flush=True)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for said in pool.map(spilled, asked):
            for line in said:
                print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
