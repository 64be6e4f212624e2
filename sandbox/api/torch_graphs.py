"""Functions that torch.compile does not trace: their results are constants in the graph, or they run outside of it.

Imported only while the compiler traces: the decorators import the whole compiler, which takes a second.
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
    """`function.apply` outside of the graph, for inputs that may have tangents: a graph would drop them silently."""
    return function.apply(*inputs)
