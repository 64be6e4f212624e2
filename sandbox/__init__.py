"""A research sandbox for attention kernels in raw CUDA C++: edit a `.cu`, compile, launch, verify, measure.

The modules that compile and launch are imported on first use: `import sandbox` takes a few milliseconds.
"""

from __future__ import annotations

from .core import interrupts as _interrupts  # noqa: F401  first, because the other imports are slow

# isort: split
import importlib
from typing import TYPE_CHECKING, Any

from .api.attention import attention, attention_backward, attention_forward, attention_paged, attention_varlen
from .api.dispatch import reload
from .core.errors import (
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
from .core.score import Score

if TYPE_CHECKING:
    from . import reference
    from .api.call import append_kv, block_map, call
    from .api.rotation import rotate
    from .api.torch_slot import use_in_torch
    from .core.kernel import Kernel
    from .core.problem import Problem
    from .core.registry import kernels
    from .core.tile import Tile
    from .engine.pipeline import compile


def _evaluate(score: Score, *arguments: Any) -> tuple[Any, Any, Any]:
    from .cpu.expressions import evaluate

    return evaluate(score, *arguments)


Score.on_host = _evaluate

_LATER = {
    "Kernel": ".core.kernel",
    "Problem": ".core.problem",
    "Tile": ".core.tile",
    "append_kv": ".api.call",
    "block_map": ".api.call",
    "call": ".api.call",
    "compile": ".engine.pipeline",
    "kernels": ".core.registry",
    "reference": ".reference",
    "rotate": ".api.rotation",
    "use_in_torch": ".api.torch_slot",
}  # {public name: the module that defines it}, imported on first use

__all__ = [
    "CacheError",
    "CompileError",
    "DriverError",
    "GpuUnavailable",
    "Kernel",
    "LaunchError",
    "Problem",
    "SandboxError",
    "Score",
    "SpecError",
    "Tile",
    "ToolchainMissing",
    "UnknownKernel",
    "UnsupportedProblem",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_paged",
    "attention_varlen",
    "block_map",
    "call",
    "compile",
    "kernels",
    "reference",
    "reload",
    "rotate",
    "use_in_torch",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LATER[name], __name__)
    globals()[name] = value = getattr(module, name, module)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
