"""Inputs of a case, the expected outputs, and their error bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..core.problem import Problem
from ..reference import (
    Gradients,
    attention_backward,
    backward_magnitudes,
    gradient_bound,
    lse_bound,
    naive,
    naive_backward,
    output_bound,
    output_rounding,
)
from .cases import Array, Case, inputs_of
from .scores import block_map
from .sequences import by_sequence, forward


@dataclass(frozen=True)
class ReferenceOutput:
    """One output in float64, and its error bound: one number, or one per element."""

    values: Array
    bound: float | Array


@dataclass(frozen=True)
class Reference:
    """Inputs and expected outputs, by the names in a spec's `args`."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, ReferenceOutput]


@lru_cache(maxsize=8)  # several kernels run the same case, and `watch` runs its cases repeatedly
def reference_of(computes: str, case: Case) -> Reference:
    """Inputs and expected outputs on a case, for kernels that compute "forward", "preprocess", "backward" or
    "block_map".

    The arrays are cached: do not write to them.
    """
    with np.errstate(all="ignore"):  # NaN and inf are among the inputs
        inputs = inputs_of(computes, case)
        return Reference(inputs, _ANSWERS[computes](case.problem, inputs))


def _forward(p: Problem, inputs: Mapping[str, Array]) -> dict[str, ReferenceOutput]:
    def plainly(own: Mapping[str, Array], options: Mapping[str, Any]) -> dict[str, Array]:
        how: dict[str, Any] = {"dtype": p.dtype, "v_dtype": p.dtype_of("V"), "out_dtype": p.dtype_of("O")}
        return {"O": naive(own["Q"], own["K"], own["V"], **options, **how)}

    exact, plain = (by_sequence(p, inputs, compute) for compute in (forward, plainly))
    out, lse = exact["O"], exact["LSE"]
    rounding: Array | float = 0.0
    if p.dtype == "float32":

        def in_float32(own: Mapping[str, Array], options: Mapping[str, Any]) -> dict[str, Array]:
            return {"O": output_rounding(own["Q"], own["K"], own["V"], own["O"], **options)}

        rounding = by_sequence(p, {**inputs, "O": out}, in_float32)["O"]
    bound = output_bound(out, plain["O"], p.dtype_of("O"), rounding=rounding)
    return {"O": ReferenceOutput(out, bound), "LSE": ReferenceOutput(lse, lse_bound(lse, p.dtype))}


def _block_map(p: Problem, inputs: Mapping[str, Array]) -> dict[str, ReferenceOutput]:
    return {"block_map": ReferenceOutput(block_map(p, inputs).astype(np.float64), 0.5)}


def _preprocess(p: Problem, inputs: Mapping[str, Array]) -> dict[str, ReferenceOutput]:
    def summed(dtype: str, change: Callable[[Array], Array] = np.asarray) -> Array:
        return np.einsum("bhsd,bhsd->bhs", *(change(inputs[name].astype(dtype)) for name in ("dO", "O")))

    exact, plain, sizes = summed("f8"), summed("f4"), summed("f8", np.abs)
    if "dLSE" in inputs:
        dlse = inputs["dLSE"]
        exact, plain, sizes = exact - dlse, plain - dlse, sizes + abs(dlse)
    return {"delta": ReferenceOutput(exact, gradient_bound(exact, plain, sizes, "float32", terms=p.Dv))}


def _backward(p: Problem, inputs: Mapping[str, Array]) -> dict[str, ReferenceOutput]:
    """The exact gradients depend on the unrounded O and LSE: the rounding of these inputs is part of the error."""

    def gradients_by(function: Callable[..., Gradients], *args: str, **how: Any) -> dict[str, Array]:
        def compute(own: Mapping[str, Array], options: Mapping[str, Any]) -> dict[str, Array]:
            return function(*(own[name] for name in args), **options, dlse=own.get("dLSE"), **how).named()

        return by_sequence(p, inputs, compute)

    names = ("dO", "Q", "K", "V")
    exact = gradients_by(attention_backward, *names)
    plain = gradients_by(naive_backward, *names, dtype=p.dtype)
    sizes = gradients_by(backward_magnitudes, *names, "O", "LSE")
    dtypes = {"dbias": p.bias_dtype or p.dtype}
    answers = {
        name: ReferenceOutput(x, gradient_bound(x, plain[name], sizes[name], dtypes.get(name, p.dtype), terms=p.D))
        for name, x in exact.items()
    }
    if p.sink:
        as_given = gradients_by(attention_backward, *names, "O", "LSE")
        bound = gradient_bound(exact["dsink"], as_given["dsink"], sizes["dsink"], "float32", 1.0)
        answers["dsink"] = ReferenceOutput(exact["dsink"], bound)
    return answers


_ANSWERS = {"block_map": _block_map, "forward": _forward, "preprocess": _preprocess, "backward": _backward}
