"""A research sandbox for attention kernels in raw CUDA C++: edit a `.cu`, compile, launch, verify, measure."""

from __future__ import annotations

from . import reference
from .arguments import ARGUMENTS
from .attention import attention, attention_forward, reload
from .errors import (
    CacheError,
    CompileError,
    DriverError,
    GpuUnavailable,
    LaunchError,
    SandboxError,
    SpecError,
    ToolchainMissing,
    UnknownKernel,
    UnsupportedProblem,
)
from .registry import kernels
from .run import compile
from .spec import Kernel, Problem, Tile

__all__ = [
    "ARGUMENTS",
    "CacheError",
    "CompileError",
    "DriverError",
    "GpuUnavailable",
    "Kernel",
    "LaunchError",
    "Problem",
    "SandboxError",
    "SpecError",
    "Tile",
    "ToolchainMissing",
    "UnknownKernel",
    "UnsupportedProblem",
    "attention",
    "attention_forward",
    "compile",
    "kernels",
    "reference",
    "reload",
]
