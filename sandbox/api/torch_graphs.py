"""Functions that torch.compile does not trace: those whose results are constants in a graph, and those outside of it.

Imported only while the compiler traces: the decorators import all of it, which takes a second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import torch_arguments
from .dispatch import run_forward

text_of_kernel_at = torch.compiler.assume_constant_result(torch_arguments.text_of_kernel_at)
text_of_options = torch.compiler.assume_constant_result(torch_arguments.text_of_options)
run_outside = torch.compiler.disable(run_forward)


@torch.compiler.disable
def apply(function: Any, *inputs: Any) -> tuple[Tensor, ...]:
    """Where there may be tangents, which a compiled graph would drop without an error."""
    return function.apply(*inputs)
