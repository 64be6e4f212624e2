"""The process under the profiler: python -m sandbox.profile.target SUBJECT, with SUBJECT from `Subject.dumps`.

The kernel is compiled, launched a few times for warm-up, and launched again between cuProfilerStart and cuProfilerStop.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..engine import pipeline
from ..engine.choose import choose_kernel
from ..engine.staging import Staged
from ..launch import dlpack, driver
from ..verify import trial
from ..verify.cases import Case, inputs_of
from ..verify.suite import suite_of
from .profiler import Subject

_WARM, _PROFILED = 3, 10  # launches; ncu profiles the first of the second group


def launch(subject: Subject) -> None:
    """Warm-up and profiled launches with random inputs on GPU 0; in an NVTX range if nvtx is installed."""
    p, device = subject.problem, ("cuda", 0)
    kernel, staged = subject.spec(), _tensors(subject)
    if "LSE" in kernel.operation.reads and not kernel.custom:  # O and LSE as in actual use
        forward = choose_kernel(p, "forward", driver.device().arch)
        first = pipeline.prepare(forward, pipeline.tile_on(device, forward, p), p, staged, device)
        first.launch(first.pointers(staged))
    prepared = pipeline.prepare(kernel, subject.tile, p, staged, device)
    pointers = prepared.pointers(staged)
    for _ in range(_WARM):
        prepared.launch(pointers)
    prepared.wait()
    with driver.device(0).profiled(), _range(f"{subject.entry} {p}"):
        for _ in range(_PROFILED):
            prepared.launch(pointers)
        prepared.wait()


def _tensors(subject: Subject) -> dict[str, Staged]:
    """The tensors of the kernel and of a forward on the GPU: q, k, v and dO random, the others uninitialised."""
    kernel, p = subject.spec(), subject.problem
    if kernel.custom:
        return _staged(suite_of(kernel).inputs(Case("profile", p, layout="contiguous")), {}, subject)
    rows = p.batches, p.H, p.rows[0]
    out = np.random.default_rng(1).standard_normal((*rows, p.Dv), np.float32)
    out = out.astype(dlpack.numpy_dtype(p.dtype_of("O")))
    made = {"O": out, "LSE": np.empty(rows, np.float32)}
    return _staged({**inputs_of("forward", Case("profile", p)), "dO": out}, made, subject)


def _staged(given: Mapping[str, Any], made: dict[str, Any], subject: Subject) -> dict[str, Staged]:
    """The inputs `given`, copied to the GPU, and memory like `made`, for the outputs and for scratch."""
    device = "cuda", 0
    made_by_launch = trial.outputs_and_scratch(subject.spec(), subject.problem, subject.tile, device)
    for name, (shape, dtype) in made_by_launch.items():
        made[name] = np.empty(shape, dlpack.numpy_dtype(dtype))
    staged = {name: Staged(dlpack.view(array), device) for name, array in {**given, **made}.items()}
    for name in given:
        staged[name].send()
    return staged


def _range(name: str) -> AbstractContextManager[object]:
    try:
        import nvtx
    except ImportError:
        return nullcontext()
    return nvtx.annotate(name)


if __name__ == "__main__":
    launch(Subject.loads(sys.argv[1]))
