"""What torch.compile does not look into: functions whose results are constants to it, and those outside of its graphs.

Imported where it looks on, and nowhere else: what marks them imports all of it, a second for who compiles nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from . import torch_float8, torch_op, torch_scored
from .torch_op import Results

text_of_kernel_at = torch.compiler.assume_constant_result(torch_op.text_of_kernel_at)
text_of_options = torch.compiler.assume_constant_result(torch_scored.text_of_options)
float8_attention = torch.compiler.disable(torch_float8.no_dispatch_modes)


@torch.compiler.disable
def apply(function: Any, *inputs: Any) -> Results:
    """Where there may be tangents, which a compiled graph would lose in silence."""
    return function.apply(*inputs)
