"""What the commands run and expect of a kernel: test cases, inputs, expected outputs, error maps.

The commands ask `suite_of(kernel)`, and do not depend on the operation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ..core.kernel import Arch, Kernel
from ..core.operation import Operation
from ..core.problem import Problem
from ..core.tile import Tile
from ..launch.array_view import boxes
from ..launch.dlpack import Device, layout, view
from . import attention, operations, references
from .cases import Array, Case, inputs_of, latent_cases, named_cases, sweep_cases
from .error_map import ErrorMap, locate
from .references import Reference, ReferenceOutput
from .scores import visible_pairs

Outputs = dict[str, tuple[tuple[int, ...], str]]  # {name: (shape, dtype)}


class Suite(Protocol):
    """The problems and expectations of one operation. Functions without a problem choose it for the kernel."""

    @property
    def strided(self) -> tuple[str, ...]:
        """Outputs (B, H, S, D) with any strides; all others are contiguous."""

    def problem(self, kernel: Kernel, shape: str, dtype: str, **semantics: Any) -> Problem:
        """The problem of the text of --shape. Raises SpecError."""

    def named_cases(self, kernel: Kernel, small: bool) -> list[Case]:
        """The cases of `run`; `small`: for the CPU backend."""

    def sweep_cases(self, kernel: Kernel) -> Iterator[Case]:
        """The cases of `check`."""

    def quick_cases(self, kernel: Kernel, device: Device) -> list[Case]:
        """The cases of `watch`: the first one is timed."""

    def tile_case(self, kernel: Kernel, tile: Tile) -> Case:
        """A small case for a tile."""

    def small_problems(self, kernel: Kernel, tile: Tile) -> list[Problem]:
        """The problems of `sanitize`."""

    def shipped_tiles(self, kernel: Kernel, arch: Arch | None) -> list[tuple[Tile, Problem]]:
        """The tiles that are selected for large problems, each with a small problem."""

    def inputs(self, case: Case) -> dict[str, Array]:
        """The inputs of a case, by the names in a spec's `args`."""

    def reference(self, case: Case) -> Reference:
        """Inputs and expected outputs of a case; cached. Raises SandboxError for an error in the operation."""

    def laid_out(self, problem: Problem, inputs: Mapping[str, Array]) -> Problem:
        """The problem with the properties of these inputs that kernels depend on, such as their alignment."""

    def outputs(self, problem: Problem) -> Outputs:
        """Shape and dtype of each output."""

    def flops(self, problem: Problem, inputs: Mapping[str, Any] | None = None) -> int:
        """Operations, by convention; 0 if unknown. With `inputs`, those that masks hide do not count."""

    def locate(
        self, name: str, got: Array, answer: ReferenceOutput, kernel: Kernel, problem: Problem, tile: Tile,
        inputs: Mapping[str, Array],
    ) -> ErrorMap | None:  # fmt: skip
        """Where an output is wrong; None if it is correct."""


@dataclasses.dataclass(frozen=True)
class _Attention:
    """One of attention's computations."""

    computes: str
    strided: tuple[str, ...] = ("O", "dQ", "dK", "dV")

    def problem(self, kernel: Kernel, shape: str, dtype: str, **semantics: Any) -> Problem:
        return Problem.from_shape(shape, dtype=dtype, **semantics)

    def named_cases(self, kernel: Kernel, small: bool) -> list[Case]:
        return latent_cases(small) if kernel.latent else named_cases(small)

    def sweep_cases(self, kernel: Kernel) -> Iterator[Case]:
        return sweep_cases(kernel)

    def quick_cases(self, kernel: Kernel, device: Device) -> list[Case]:
        return attention.quick_cases(kernel, device)

    def tile_case(self, kernel: Kernel, tile: Tile) -> Case:
        return attention.tile_case(kernel, tile)

    def small_problems(self, kernel: Kernel, tile: Tile) -> list[Problem]:
        return attention.small_problems(kernel, tile)

    def shipped_tiles(self, kernel: Kernel, arch: Arch | None) -> list[tuple[Tile, Problem]]:
        return attention.shipped_tiles(kernel, arch)

    def inputs(self, case: Case) -> dict[str, Array]:
        return inputs_of(self.computes, case)

    def reference(self, case: Case) -> Reference:
        return references.reference_of(self.computes, case)

    def laid_out(self, problem: Problem, inputs: Mapping[str, Array]) -> Problem:
        strides = layout(view(inputs[name]) for name in ("Q", "K", "V", "dO", "O") if name in inputs)
        if problem.bias:
            strides["bias_boxes"] = boxes(view(inputs["bias"]))
        return dataclasses.replace(problem, **strides)

    def outputs(self, problem: Problem) -> Outputs:
        return attention.outputs_of(self.computes, problem)

    def flops(self, problem: Problem, inputs: Mapping[str, Any] | None = None) -> int:
        return problem.flops_of(self.computes, visible_pairs(problem, inputs) if inputs else None)

    def locate(
        self, name: str, got: Array, answer: ReferenceOutput, kernel: Kernel, problem: Problem, tile: Tile,
        inputs: Mapping[str, Array],
    ) -> ErrorMap | None:  # fmt: skip
        return locate(name, got, answer.values, answer.bound, kernel, problem, tile, inputs)


@dataclasses.dataclass(frozen=True)
class _Custom:
    """An Operation."""

    operation: Operation
    strided: tuple[str, ...] = ()

    def problem(self, kernel: Kernel, shape: str, dtype: str, **semantics: Any) -> Any:
        return self.operation.problem(shape, operations.dtype_of(kernel, dtype))

    def named_cases(self, kernel: Kernel, small: bool) -> list[Case]:
        return operations.named_cases(self.operation, kernel, small)

    def sweep_cases(self, kernel: Kernel) -> Iterator[Case]:
        return operations.sweep_cases(self.operation, kernel)

    def quick_cases(self, kernel: Kernel, device: Device) -> list[Case]:
        return operations.quick_cases(self.operation, kernel, device)

    def tile_case(self, kernel: Kernel, tile: Tile) -> Case:
        return operations.tile_case(self.operation, kernel, tile)

    def small_problems(self, kernel: Kernel, tile: Tile) -> Any:
        return operations.sanitized_problems(self.operation, kernel, tile)

    def shipped_tiles(self, kernel: Kernel, arch: Arch | None) -> Any:
        return operations.shipped_tiles(self.operation, kernel, arch)

    def inputs(self, case: Case) -> dict[str, Array]:
        return operations.inputs_of(self.operation, case)

    def reference(self, case: Case) -> Reference:
        return operations.reference_of(self.operation, case)

    def laid_out(self, problem: Problem, inputs: Mapping[str, Array]) -> Problem:
        return problem

    def outputs(self, problem: Any) -> Outputs:
        return {name: (t.shape(problem), t.dtype_in(problem)) for name, t in self.operation.outputs.items()}

    def flops(self, problem: Any, inputs: Mapping[str, Any] | None = None) -> int:
        return self.operation.flops_of(problem)

    def locate(
        self, name: str, got: Array, answer: ReferenceOutput, kernel: Kernel, problem: Problem, tile: Tile,
        inputs: Mapping[str, Array],
    ) -> ErrorMap | None:  # fmt: skip
        return operations.locate(self.operation, name, got, answer, tile)


def suite_of(kernel: Kernel) -> Suite:
    """The suite of what `kernel` computes."""
    computes = kernel.computes
    return _Custom(computes) if isinstance(computes, Operation) else _Attention(computes)
