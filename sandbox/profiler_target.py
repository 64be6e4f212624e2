"""What a profiler watches: python -m sandbox.profiler_target SUBJECT, as `profiler.Subject.dumps` writes it.

The kernel is compiled, launched until it is warm, and launched again between cuProfilerStart and cuProfilerStop.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from . import dlpack, driver, run
from .cases import Case, make_inputs
from .profiler import Subject
from .staging import Staged

_WARM, _PROFILED = 3, 10  # launches; ncu takes the first of those that are profiled


def launch(subject: Subject) -> None:
    """Random inputs on GPU 0, warm-up, and the launches to profile, in an NVTX range where nvtx is installed."""
    p, device = subject.problem, ("cuda", 0)
    q, k, v = make_inputs(Case("profile", p))
    arrays = {"Q": q, "K": k, "V": v, "O": np.empty_like(q), "LSE": np.empty((p.B, p.H, p.Sq), np.float32)}
    staged = {name: Staged(dlpack.view(array), device) for name, array in arrays.items()}
    for name in ("Q", "K", "V"):
        staged[name].send()
    prepared = run.prepare(subject.spec(), subject.tile, p, staged, device)
    pointers = prepared.pointers(staged)
    for _ in range(_WARM):
        prepared.launch(pointers)
    prepared.wait()
    with driver.device(0).profiled(), _range(f"{subject.kernel} {p}"):
        for _ in range(_PROFILED):
            prepared.launch(pointers)
        prepared.wait()


def _range(name: str) -> AbstractContextManager[object]:
    try:
        import nvtx
    except ImportError:
        return nullcontext()
    return nvtx.annotate(name)


if __name__ == "__main__":
    launch(Subject.loads(sys.argv[1]))
