"""Times kernels of an Operation and its peers, the PyTorch expressions of its spec, on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..core.errors import UnsupportedProblem
from ..core.kernel import Kernel
from ..core.operation import Operation, OperationProblem
from ..core.tile import Tile
from ..engine import pipeline
from ..launch.arguments import scratch_of
from ..launch.dlpack import library_of, view
from ..launch.host import host_array
from ..reference import max_error, ulp
from ..verify.cases import Case
from ..verify.references import ReferenceOutput
from ..verify.sampled import Verdict
from ..verify.suite import suite_of
from . import benchmark
from .benchmark import Expectation
from .inputs import as_tensor, torch_dtype
from .peers import Contender, Ready
from .rows import Row
from .timing import Limits, Stopwatch

_PEERS = 4.0  # factor of the bounds for peers


@dataclass(frozen=True)
class _Expected:
    """The outputs of the reference, all elements. `peers`: with larger bounds, because an expression may round
    intermediate results, and outputs that a kernel computes in fp32, to this dtype."""

    outputs: Mapping[str, ReferenceOutput]
    peers: str = ""

    def check(self, poison: Callable[[], None], launch: Callable[[], tuple[Any, ...]]) -> Verdict:
        poison()
        verdicts = [Verdict(0.0, 0.0)]
        for (name, answer), got in zip(self.outputs.items(), launch(), strict=True):
            error, bound = max_error(host_array(got.detach()), answer.values), float(answer.bound)
            if self.peers and bound:
                largest = abs(answer.values[np.isfinite(answer.values)]).max(initial=0)
                bound = _PEERS * (bound + float(ulp(largest, self.peers)))
            message = "" if error <= bound else f"{name}: error {error:.3g} exceeds its bound {bound:.3g}"
            verdicts.append(Verdict(error, bound, message))
        return max(verdicts, key=lambda v: (bool(v.message), v.error / v.bound if v.bound else v.error))


def contenders_of(kernels: Sequence[Kernel], tiles: Sequence[Tile], names: Sequence[str] | None) -> list[Contender]:
    """The kernels, each with every tile, and peers of their operation (`names`; None: all). Raises UnsupportedProblem
    for an unknown peer."""
    operation = _operation_of(kernels)
    if unknown := [name for name in names or () if name not in operation.peers]:
        known = ", ".join(operation.peers) or "none"
        raise UnsupportedProblem(f"peer {unknown[0]!r} is not known: {operation.name} has {known}")
    found = [
        Contender(f"{kernel.name} {tile}" if tile else kernel.name, partial(_prepare_kernel, kernel, tile), kernel.name)
        for kernel in kernels
        for tile in tiles or (None,)
    ]
    chosen = operation.peers if names is None else names
    return found + [Contender(name, partial(_prepare_peer, name, operation)) for name in chosen]


def _operation_of(kernels: Sequence[Kernel]) -> Operation:
    operations = {kernel.operation.name: kernel.operation for kernel in kernels}
    (operation, *others) = operations.values()
    if others or not isinstance(operation, Operation):
        raise UnsupportedProblem(f"{', '.join(operations)} cannot be timed together: name kernels of one operation")
    return operation


class Bench:
    """Inputs on a GPU and expected outputs of one problem."""

    def __init__(self, kernel: Kernel, problem: Any, device: str = "cuda:0"):
        reference = suite_of(kernel).reference(Case("bench", problem, layout="contiguous"))
        self.inputs = {name: as_tensor(x, device) for name, x in reference.inputs.items()}
        self.expected = _Expected(reference.outputs)
        self._kernel, self._problem = kernel, problem

    def prepare(self, tile: Tile) -> Ready:
        """The kernel with a tile."""
        return _prepare_kernel(self._kernel, tile, self._problem, self.inputs)


def run(
    kernels: Sequence[Kernel], problems: Sequence[OperationProblem], contenders: Sequence[Contender], *,
    mode: str = "events", limits: Limits | None = None, seed: int = 0,
) -> Iterator[Row]:  # fmt: skip
    """`benchmark.run` for kernels of one Operation, with `contenders_of` them."""
    benchmark.need_gpu()
    rows = partial(time_contenders, kernels[0], contenders, limits or Limits())
    return benchmark.measured(problems, rows, mode, seed)


def time_contenders(
    kernel: Kernel, contenders: Sequence[Contender], limits: Limits, problem: Any, stopwatch: Stopwatch,
    setting: Mapping[str, Any], device: str = "cuda:0",
) -> list[Row]:  # fmt: skip
    """All contenders on one problem of the operation of `kernel`: each is checked, the correct ones are timed in turns,
    and each is checked again."""
    operation = kernel.operation
    assert isinstance(operation, Operation)
    bench = Bench(kernel, problem, device)
    peers = replace(bench.expected, peers=problem.dtype)
    expected: list[Expectation] = [bench.expected if c.kernel else peers for c in contenders]
    entries = [
        benchmark.enter(c, problem, partial(c.prepare, problem, bench.inputs), which, stopwatch)
        for c, which in zip(contenders, expected, strict=True)
    ]
    work = operation.flops_of(problem), operation.bytes_of(problem)
    return benchmark.rows_of(
        problem, contenders, entries, expected, stopwatch, limits, setting, computes=operation.name, work=work
    )


def _prepare_kernel(kernel: Kernel, tile: Tile | None, problem: Any, inputs: Mapping[str, Any]) -> Ready:
    import torch

    some = next(iter(inputs.values()))
    outputs = {
        name: inputs[name].clone()
        if name in inputs
        else torch.empty(shape, dtype=torch_dtype(dtype), device=some.device)
        for name, (shape, dtype) in suite_of(kernel).outputs(problem).items()
    }
    tensors = {**inputs, **outputs}
    device = view(some).device
    chosen = pipeline.tile_on(device, kernel, problem, tile, tuned=True)
    for name, shape in scratch_of(kernel, problem, chosen).items():
        tensors[name] = torch.empty(shape, dtype=torch.float32, device=some.device)
    views = {name: view(x) for name, x in tensors.items()}
    prepared = pipeline.prepare(kernel, chosen, problem, views, device)
    pointers, results = prepared.pointers(views), tuple(outputs.values())
    stream = library_of(some).stream(device[1]) if device[0] == "cuda" else int

    def launch() -> tuple[Any, ...]:
        prepared.launch(pointers, stream())
        return results

    def poison() -> None:
        for name, x in outputs.items():
            if name in inputs:
                x.copy_(inputs[name])
            else:
                x.fill_(math.nan if x.is_floating_point() else 1)

    arch = prepared.compiled[0].arch if prepared.compiled else ""
    return Ready(launch, poison, str(chosen), arch, keep_alive=tuple(tensors.values()))


def _prepare_peer(name: str, operation: Operation, problem: Any, inputs: Mapping[str, Any]) -> Ready:
    import torch

    def launch() -> tuple[Any, ...]:
        found = operation.peers[name](torch, *inputs.values())
        return tuple(found) if isinstance(found, (tuple, list)) else (found,)

    launch()  # raises what the expression raises
    return Ready(launch, lambda: None)
