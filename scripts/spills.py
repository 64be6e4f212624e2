"""Which tiles spill registers with which option: every kernel, every tile of its spec, every option alone. No GPU.

python scripts/spills.py                    all; several hours on sixteen cores
python scripts/spills.py bwd_mma bwd_wgmma  these kernels
python scripts/spills.py --sample 500       a random sample of 500 compilations

Uses the installed NVRTC, `--jobs` processes, and the compile cache. Prints the entries that spill or have warnings.
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
TARGETS = ("sm_80", "sm_89", "sm_90a")  # sm_89: float8 only
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
MAY = {("bwd_wgmma", "score"), ("fwd_wgmma_fp8", "score")}  # allowed to spill: docs/limits.md


class Job(NamedTuple):
    """One compilation."""

    kernel: str
    option: str
    problem: Problem
    tile: Tile
    target: str


def problems(kernel: Kernel, target: str) -> Iterator[tuple[str, Problem]]:
    """(option, problem) for every option that the kernel supports, each option alone."""
    for dtype, D, causal in itertools.product(kernel.dtypes, WIDTHS, (False, "bottom-right")):
        if target == "sm_89" and dtype not in FLOAT8:
            continue
        plain = Problem(2, 4, S, S, D, dtype=dtype, causal=causal)  # type: ignore[arg-type]
        for option, of in ALONE.items():
            if option in OF_FLOAT8 and dtype not in FLOAT8:
                continue
            problem = replace(plain, **of(plain))
            if not kernel.why_unsupported(problem, arch.parse(target)):
                yield option, problem


def tiles(kernel: Kernel, problem: Problem, target: str) -> Iterator[Tile]:
    """The tiles of the spec that are legal for the problem."""
    return (t for t in kernel.tiles if not choose.why_tile_unsupported(kernel, problem, t, arch.parse(target)))


def jobs(kernel: Kernel, target: str) -> Iterator[Job]:
    """One job for each distinct set of macros."""
    seen = set()
    for option, problem in problems(kernel, target):
        for tile in tiles(kernel, problem, target):
            key = str(kernel.defines(problem, tile))
            if key not in seen:
                seen.add(key)
                yield Job(kernel.name, option, problem, tile, target)


def spilled(job: Job) -> list[str]:
    """One line for each entry that spills registers or has warnings."""
    try:
        compiled = pipeline.compile_problem(registry.get(job.kernel), job.problem, job.tile, job.target)
    except UnsupportedProblem:  # the installed NVRTC does not know this architecture
        return []
    return [
        f"{one.entry} {job.target} {job.problem.variant} {job.tile}: {one.resources}"
        for one in compiled
        if one.resources.spill_stores or one.resources.spill_loads or one.resources.warnings
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help="kernels to compile; all by default")
    parser.add_argument("--sample", type=int, default=0, help="number of randomly chosen compilations; 0: all")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    options = parser.parse_args()
    names = options.kernels or [*registry.kernels()]
    todo = [job for name in names for target in TARGETS for job in jobs(registry.get(name), target)]
    if options.sample:
        todo = random.sample(todo, min(options.sample, len(todo)))
    print(len(todo), "compilations", flush=True)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for lines in pool.map(spilled, todo):
            for line in lines:
                print(line, flush=True)


if __name__ == "__main__":
    main()
