"""`sandbox.call`: a kernel of an Operation on arrays of any library."""

from __future__ import annotations

from typing import Any

from ..core import registry
from ..core.errors import UnsupportedProblem
from ..launch.dlpack import library_of
from .call_plan import gradient_of, operation_of, run


def call(name: str, *inputs: Any, tile: Any = None, backend: str | None = None) -> Any:
    """The outputs of kernel `name` for `inputs`, in the order of its Operation: one array, or a tuple of several.

    Arrays may be NumPy, CuPy, PyTorch or any array with `__dlpack__`; outputs are of the same library, on the same
    device. Device arrays are processed on the caller's current stream, host arrays by the CPU backend unless `backend`
    says otherwise. `tile`: as for `sandbox.attention`. Differentiable for PyTorch tensors if the Operation names the
    kernel of its `gradient`.

    Raises UnknownKernel; UnsupportedProblem for arrays that do not fit the operation or the kernel, are not contiguous,
    or do not begin at a multiple of 16 bytes; CompileError, SpecError, ToolchainMissing.
    """
    if not inputs:
        raise UnsupportedProblem(
            f"call({name!r}) without inputs is not supported: pass the arrays that the kernel reads"
        )
    if library_of(inputs[0]).requires_grad(*inputs):
        from .torch_call import recorded

        kernel = registry.get(name)
        backward = gradient_of(kernel)
        forward, gradient = (lambda x: run(name, x, tile, backend)), (lambda x: run(backward.name, x, None, backend))
        outputs = recorded(forward, gradient, operation_of(kernel), operation_of(backward), inputs)
    else:
        outputs = run(name, inputs, tile, backend)
    return outputs[0] if len(outputs) == 1 else outputs
