"""Gradients of the backward kernels beside PyTorch's autograd, on shared memory. See README.md beside this file.

python experiments/010_autograd_parity/run.py             prints a table, appends rows to results.jsonl, draws the
                                                          errors nearest to their bound
python experiments/010_autograd_parity/run.py plot        draws the figure again
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from rich.console import Console
from show import NAMES, draw, slices, table

import sandbox
from sandbox import reference
from sandbox.bench import environment
from sandbox.cli.output import plain as plain_json
from sandbox.core import registry
from sandbox.launch import dlpack, driver
from sandbox.spec import ITEMSIZE, Kernel, Problem
from sandbox.verify.cases import Case, make_inputs

HERE = Path(__file__).resolve().parent
REFERENCE_GAP = 1e-13  # a few hundred float64 roundings
Gradients = tuple[torch.Tensor, ...]


def make_cases(long: bool) -> list[Case]:
    """Short sequences for the CPU backend; `long` ones of several tiles for a GPU."""
    n = (lambda S: 4 * S + 1) if long else (lambda S: S)
    return [
        Case("no mask", Problem(1, 2, n(96), n(96), 64)),
        Case("causal", Problem(1, 2, n(96), n(96), 64, causal="bottom-right")),
        Case("more keys than rows", Problem(1, 2, n(33), n(96), 64, causal="bottom-right")),
        Case("rows without visible keys", Problem(1, 2, n(96), n(33), 64, causal="bottom-right")),
        Case("keys without visible rows", Problem(1, 2, n(33), n(96), 64, causal="top-left")),
        Case("rows with all keys visible", Problem(1, 2, n(96), n(33), 64, causal="top-left")),
        Case("grouped heads", Problem(2, 4, n(50), n(50), 64, Hk=2, causal="bottom-right")),
        Case("odd head width", Problem(1, 2, n(40), n(60), 37)),
        Case("wide heads", Problem(1, 2, n(40), n(60), 128, causal="bottom-right")),
        Case("large magnitudes", Problem(1, 2, n(77), n(97), 64, causal="bottom-right"), inputs="large"),
        Case("one row, one key", Problem(1, 2, 1, 1, 64)),
    ]


# ---- arrays: made by CuPy (or NumPy), shared with PyTorch


def make_arrays(case: Case, xp: ModuleType) -> list[Any]:
    """dO, q, k, v as arrays of `xp`, (B, H, S, D) views of (B, S, H, D) memory; the numbers do not depend on `xp`.
    bfloat16 is passed as uint16, which every CuPy supports."""
    q, k, v = make_inputs(case)
    dout = np.random.default_rng(1).standard_normal(q.shape, np.float32).astype(q.dtype)
    bits = (np.ascontiguousarray(x.swapaxes(1, 2)).view(f"u{x.itemsize}") for x in (dout, q, k, v))
    return [xp.asarray(x).view(q.dtype).swapaxes(1, 2) for x in bits]


def as_tensor(array: Any) -> torch.Tensor:
    """The same memory as a PyTorch tensor, by DLPack; bfloat16, which NumPy does not export, as uint16."""
    half = array.dtype.name == "bfloat16"
    tensor = torch.from_dlpack(array.view(np.uint16) if half else array)
    assert tensor.data_ptr() == dlpack.view(array).pointer, "DLPack made a copy"
    return tensor.view(torch.bfloat16) if half else tensor


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().cpu().numpy()


# ---- gradients


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Textbook attention in the dtype of the inputs; a row without visible keys has probabilities 0."""
    k, v = (x.repeat_interleave(problem.H // problem.Hk, dim=1) for x in (k, v))
    scores = (q @ k.mT) * problem.scale
    hidden = torch.zeros(problem.Sq, problem.Sk, dtype=torch.bool, device=q.device)
    if problem.causal:
        hidden = torch.ones_like(hidden).triu(problem.diagonal + 1)
    return scores.masked_fill(hidden, -math.inf).softmax(dim=-1).masked_fill(hidden, 0) @ v


def autograd(tensors: list[torch.Tensor], problem: Problem, dtype: torch.dtype) -> Gradients:
    """PyTorch's gradients of sum(dO * plain), computed in `dtype`."""
    dout, *inputs = (x.to(dtype) for x in tensors)
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(plain(*leaves, problem), leaves, dout)


def ours(kernel: Kernel, arrays: list[Any], problem: Problem, xp: ModuleType) -> Gradients:
    """The gradients by one kernel, from the same memory."""
    dout, q, k, v = arrays
    options = {"causal": problem.causal, "scale": problem.scale}
    out, lse = sandbox.attention_forward(q, k, v, **options)
    for x in (q, k, v):
        xp.full(x.nbytes, 255, np.uint8)  # NaN in every dtype, in the memory that the allocator reuses for the results
    return tuple(map(as_tensor, sandbox.attention_backward(dout, q, k, v, out, lse, kernel=kernel, **options)))


@dataclasses.dataclass
class Expected:
    """The reference of one case: PyTorch's gradients in float64, and the project's bound, made of the errors of
    PyTorch's gradients in the input dtype (`yardstick`). `reference_gap`: error of the NumPy reference, relative to the
    largest magnitude."""

    refs: list[np.ndarray]
    yardstick: Gradients
    bounds: list[float]
    reference_gap: float

    @classmethod
    def of(cls, arrays: list[Any], problem: Problem) -> Expected:
        tensors = [as_tensor(x) for x in arrays]
        options = {"causal": problem.causal, "scale": problem.scale}
        inputs = [as_numpy(x) for x in tensors]
        refs = [as_numpy(x) for x in autograd(tensors, problem, torch.float64)]
        yardstick = autograd(tensors, problem, tensors[0].dtype)
        sizes = reference.backward_magnitudes(*inputs, *reference.attention(*inputs[1:], **options), **options)
        own = reference.attention_backward(*inputs, **options)
        bounds = [
            reference.gradient_bound(ref, as_numpy(x), size, problem.dtype)
            for ref, x, size in zip(refs, yardstick, sizes, strict=True)
        ]
        gap = max(reference.max_error(x, r) / s.max() for x, r, s in zip(own, refs, sizes, strict=True))
        return cls(refs, yardstick, bounds, gap)

    def errors(self, gradients: Gradients) -> list[np.ndarray]:
        """|gradient - reference| of dQ, dK, dV, elementwise, in units of their bounds."""
        found = zip(gradients, self.refs, self.bounds, strict=True)
        return [reference.errors(as_numpy(x), ref) / bound for x, ref, bound in found]


def compare(case: Case, kernels: list[Kernel], xp: ModuleType) -> Iterator[tuple[dict[str, Any], list[np.ndarray]]]:
    """A row for PyTorch's gradients in the input dtype and for each kernel, with its `Expected.errors`."""
    problem = case.problem
    arrays = make_arrays(case, xp)
    expected = Expected.of(arrays, problem)
    head = {"case": case.name, "problem": str(problem), "dtype": problem.dtype, "reference_gap": expected.reference_gap}
    for kernel in (None, *kernels):
        row = {"contender": kernel.name if kernel else "autograd", **head}
        try:
            gradients = ours(kernel, arrays, problem, xp) if kernel else expected.yardstick
        except sandbox.UnsupportedProblem as reason:
            yield {**row, "ok": None, "message": str(reason)}, []
            continue
        errors = expected.errors(gradients)
        shares = [float(x.max(initial=0)) for x in errors]  # NaN counts as inf
        row |= {name: {"error": s * b, "bound": b} for name, s, b in zip(NAMES, shares, expected.bounds, strict=True)}
        yield {**row, "ok": all(share <= 1 for share in shares), "worst": NAMES[int(np.argmax(shares))]}, errors


# ---- the command


def measure(options: argparse.Namespace, xp: ModuleType) -> list[dict[str, Any]]:
    """Appends all rows to results.jsonl; writes the errors of the kernel nearest to a bound to worst_BACKEND.npz."""
    where = {"backend": options.backend, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **environment.describe()}
    kernels = [k for k in registry.kernels().values() if k.computes == "backward" and k.name in options.kernels]
    cases = [case for case in make_cases(options.backend == "cuda") if case.name in options.cases]
    rows: list[dict[str, Any]] = []
    worst: tuple[float, dict[str, Any]] = (-1.0, {})
    with (options.out / "results.jsonl").open("a") as file:
        for case, dtype in itertools.product(cases, options.dtypes):
            typed = dataclasses.replace(case, problem=dataclasses.replace(case.problem, dtype=dtype))
            found = list(compare(typed, kernels, xp))
            for row, errors in found:
                rows.append(row)
                file.write(json.dumps(plain_json({**row, **where}), allow_nan=False) + "\n")
                if row["contender"] != "autograd" and errors:
                    share = max(float(x.max(initial=0)) for x in errors)
                    title = f"{row['contender']}: {row['problem']} ({row['case']})"
                    worst = max(worst, (share, {"title": title, **slices(errors, found[0][1])}), key=lambda w: w[0])
    if worst[1]:
        np.savez_compressed(options.out / f"worst_{options.backend}.npz", **worst[1])
    return rows


@contextlib.contextmanager
def one_stream(backend: str) -> Iterator[ModuleType]:
    """The array library; on a GPU with one stream for CuPy, PyTorch and the kernels."""
    if backend == "cpu":
        yield np
        return
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        yield cupy
        stream.synchronize()


def default_backend() -> str:
    return "cuda" if driver.available() and torch.cuda.is_available() and importlib.util.find_spec("cupy") else "cpu"


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 if a gradient is outside of its bound, or the NumPy reference differs from PyTorch's float64."""
    names = [case.name for case in make_cases(False)]
    kernels = [kernel.name for kernel in registry.kernels().values() if kernel.computes == "backward"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["measure", "plot"], default="measure")
    parser.add_argument("--backend", choices=["cuda", "cpu"], default=default_backend())
    parser.add_argument("--kernels", nargs="+", choices=kernels, default=kernels)
    parser.add_argument("--dtypes", nargs="+", choices=list(ITEMSIZE), default=list(ITEMSIZE))
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=HERE, help="folder for rows and figures")
    options = parser.parse_args(argv)
    if options.what == "plot":
        for stored in sorted(options.out.glob("worst_*.npz")):
            print(draw(options.out, stored.stem.removeprefix("worst_")))
        return 0
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False  # the yardstick accumulates in fp32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with one_stream(options.backend) as xp:
        rows = measure(options, xp)
    gap = max(row["reference_gap"] for row in rows)
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table(rows))
    print(f"NumPy's float64 reference against PyTorch's float64 autograd: {gap:.1e} of the magnitude")
    print(draw(options.out, options.backend))
    wrong = [row for row in rows if row["ok"] is False]
    print(f"{len(wrong)} of {sum(row['ok'] is not None for row in rows)} results outside of their bound")
    return int(bool(wrong) or not gap <= REFERENCE_GAP)


if __name__ == "__main__":
    sys.exit(main())
