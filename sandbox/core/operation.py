"""Operations: what a kernel computes, by a NumPy reference, if it is not one of attention's computations."""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import SpecError
from .normalise import integer
from .problem import Problem
from .score import SIZES


@dataclass(frozen=True, init=False)
class Tensor:
    """A tensor of an operation: its dimensions, each a name or a number, and its dtype ("": that of the problem).

    It is contiguous, and begins at a multiple of 16 bytes. `values(rng, shape)`: random input values, from a NumPy
    generator; the default is standard normal, or 0 and 1 for integers and bool. `strided`: four dimensions, any strides
    with a unit stride in the last one; the kernel's parameter is a View (include/view.cuh). `aligned=False`: it may
    begin at the address of any element; the kernel does not copy several elements at once.
    """

    dims: tuple[str | int, ...]
    dtype: str = ""
    values: Callable[[Any, tuple[int, ...]], Any] | None = None
    strided: bool = False
    aligned: bool = True

    def __init__(
        self, *dims: str | int, dtype: str = "", values: Callable[[Any, tuple[int, ...]], Any] | None = None,
        strided: bool = False, aligned: bool = True,
    ):  # fmt: skip
        object.__setattr__(self, "dims", tuple(d if isinstance(d, str) else integer("Tensor", d, 1) for d in dims))
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "strided", strided)
        object.__setattr__(self, "aligned", aligned)
        if strided and len(dims) != 4:
            raise SpecError(f"Tensor: strided=True needs four dimensions, not {len(dims)}")
        if dtype and dtype not in SIZES:
            raise SpecError(f"Tensor: dtype={dtype!r} is not supported: choose one of {', '.join(SIZES)}")

    def shape(self, problem: OperationProblem) -> tuple[int, ...]:
        """Its shape in a problem."""
        return tuple(problem[d] if isinstance(d, str) else d for d in self.dims)

    def dtype_in(self, problem: OperationProblem) -> str:
        """Its dtype in a problem."""
        return self.dtype or problem.dtype

    def nbytes(self, problem: OperationProblem) -> int:
        """Its size in a problem, in bytes."""
        return math.prod(self.shape(problem)) * SIZES[self.dtype_in(problem)]


@dataclass(frozen=True)
class OperationProblem:
    """A problem of an operation: the size of each dimension, read as `problem.M`, and the dtype.

    It has the properties of `Problem` that the engine reads.
    """

    operation: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str

    score = None
    ragged: tuple[int, ...] = field(default=(), init=False, repr=False)
    page_size: int = field(default=0, init=False, repr=False)
    float8: bool = field(default=False, init=False, repr=False)
    float8_keys: bool = field(default=False, init=False, repr=False)
    kv_dtype: str = field(default="", init=False, repr=False)
    plain: bool = field(default=True, init=False, repr=False)
    invariant: bool = field(default=False, init=False, repr=False)
    head_dims: tuple[tuple[str, int], ...] = field(default=(), init=False, repr=False)

    def __getitem__(self, name: str) -> int:
        return dict(self.sizes)[name]

    def __getattr__(self, name: str) -> int:
        sizes = {} if name.startswith("_") or name == "sizes" else dict(self.sizes)
        if name not in sizes:
            raise AttributeError(f"a problem of {self.operation} has no {name}: it has {', '.join(sizes)} and dtype"
                                 if sizes else name)  # fmt: skip
        return sizes[name]

    def __str__(self) -> str:
        return " ".join((*(f"{name}{size}" for name, size in self.sizes), self.dtype))

    @property
    def variant(self) -> str:
        """What selects the compiled variant, as text: kernels are compiled for a dtype, not for sizes."""
        return self.dtype

    @property
    def widths(self) -> str:
        """The sizes, for messages about shared memory."""
        return ", ".join(f"{name}={size}" for name, size in self.sizes)

    @property
    def tuning_class(self) -> str:
        """The class of problems that share a tuned tile: sizes are rounded up to powers of two."""
        sizes = (f"{name}<={1 << max(size - 1, 0).bit_length()}" for name, size in self.sizes)
        return " ".join((self.operation, *sizes, self.dtype))

    def as_json(self) -> dict[str, Any]:
        """The fields, for `from_json`."""
        return {"operation": self.operation, "sizes": dict(self.sizes), "dtype": self.dtype}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> OperationProblem:
        """The problem that `as_json` wrote."""
        return cls(row["operation"], tuple(row["sizes"].items()), row["dtype"])


def problem_from_json(row: Mapping[str, Any]) -> Any:
    """The Problem or OperationProblem whose `as_json` is `row`."""
    return OperationProblem.from_json(row) if "operation" in row else Problem.from_json(row)


_RESERVED = {*OperationProblem.__dataclass_fields__, *vars(OperationProblem)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """What a kernel computes: named dimensions, the tensors that it reads and writes, and a reference in NumPy.

    An output that is also an input, under the same name and with the same Tensor, is updated in place.

    `dims`: the names of the sizes, in the order of `--shape`. Every size must occur in the shape of an input.
    `reference(*inputs)`: the outputs (one array, or a tuple in the order of `outputs`) of float64 arrays; inputs of
    integers and bool stay as they are. It is also called with float32 arrays, to derive the error bound.
    `bound(problem, exact)`: the largest absolute error of an output whose exact values are `exact`; the default
    is derived from the dtype and from the float32 result. `flops(problem)`, `nbytes(problem)`: the work of one call;
    the default of `nbytes` counts every input and output once.

    `shapes`: problems of `run`, `bench` and other commands without --shape, on a GPU. `cases`: small problems of
    `check`, and of `run` and `watch` on the CPU backend. Both have defaults. `isolate`: {name: f(arrays)}: special
    inputs for `check` that isolate a fault; f receives the random inputs by name and changes the arrays in place.
    `peers`: {name: f(torch, *inputs)}: the same operation in PyTorch, timed by `bench`. `gradient`: the name of the
    kernel of its backward, see docs/custom-operations.md. `name`: by default that of its first kernel.

    Raises SpecError.
    """

    dims: tuple[str, ...]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    reference: Callable[..., Any]
    bound: Callable[[Any, Any], float] | None = None
    flops: Callable[[Any], int] | None = None
    nbytes: Callable[[Any], int] | None = None
    shapes: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    isolate: Mapping[str, Callable[[Any], object]] = field(default_factory=dict)
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    gradient: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for what in ("dims", "shapes", "cases"):
            if isinstance(getattr(self, what), str):
                raise SpecError(f"Operation: {what}={getattr(self, what)!r} must be a tuple: add a comma")
            set_(self, what, tuple(getattr(self, what)))
        if not callable(self.reference):
            raise SpecError(f"Operation: reference={self.reference!r} must be a function of the inputs")
        for what in ("inputs", "outputs"):
            if not getattr(self, what):
                raise SpecError(f"Operation: {what} is empty: an operation needs at least one")
            for name, tensor in getattr(self, what).items():
                if not isinstance(tensor, Tensor):
                    raise SpecError(f"Operation: {what}: {name}={tensor!r} must be a Tensor, such as Tensor('M', 'N')")
        self._check_names()
        known = {d for tensor in self.inputs.values() for d in tensor.dims}
        if missing := [name for name in self.dims if name not in known]:
            raise SpecError(
                f"Operation: dimension {missing[0]} is not determined: no input has it in its shape; use a number "
                "instead, such as Tensor(256), or add an input that has it"
            )
        for shape in (*self.shapes, *self.cases):
            self.problem(shape, "float32")

    def _check_names(self) -> None:
        differ = [name for name in self.in_place if self.inputs[name] != self.outputs[name]]
        if differ:
            raise SpecError(
                f"Operation: {differ[0]} is an input and an output with different Tensors: give the output another "
                "name, or, if the array is updated in place, the same Tensor"
            )
        if self.gradient and self.in_place:
            raise SpecError(
                f"Operation: gradient={self.gradient!r} is not supported for {self.in_place[0]}, which is updated in "
                "place: autograd saves inputs and outputs for the backward; give the output another name"
            )
        for name in (*self.dims, *self.inputs, *self.outputs):
            if not name.isidentifier() or keyword.iskeyword(name):
                raise SpecError(f"Operation: name {name!r} must be an identifier")
        for name in self.dims:
            if name in _RESERVED or name.startswith("_") or name in self.tensors:
                raise SpecError(
                    f"Operation: dimension {name!r} is the name of a tensor or of an attribute of OperationProblem, or "
                    "begins with _: choose another"
                )
        for name, tensor in self.tensors.items():
            if unknown := [d for d in tensor.dims if isinstance(d, str) and d not in self.dims]:
                raise SpecError(f"Operation: {name}: dimension {unknown[0]} is not in dims={self.dims}")

    def __repr__(self) -> str:
        return f"Operation({self.name or 'without a name'}: {', '.join(self.inputs)} -> {', '.join(self.outputs)})"

    @property
    def in_place(self) -> tuple[str, ...]:
        """The names of the inputs that are also outputs."""
        return tuple(name for name in self.outputs if name in self.inputs)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Inputs and outputs by name."""
        return {**self.inputs, **self.outputs}

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the inputs."""
        return tuple(self.inputs)

    @property
    def writes(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return tuple(self.outputs)

    def problem(self, shape: str, dtype: str) -> OperationProblem:
        """The problem of a text such as "4096,8192", one size for each of `dims`, or of the sizes of a printed problem,
        "M4096 N8192". Raises SpecError."""
        sizes = self._sizes(shape)
        if sizes is None:
            raise SpecError(f"shape {shape!r} must be {','.join(self.dims)}, such as {self.example}")
        return self.sized(sizes, dtype)

    def _sizes(self, shape: str) -> dict[str, int] | None:
        """The sizes of a text; None if it does not have one for each of `dims`."""
        parts = [part.strip() for part in shape.split(",")]
        if len(parts) == 1 < len(self.dims):
            printed = shape.split()
            if len(printed) != len(self.dims) or not all(map(str.startswith, printed, self.dims)):
                return None
            parts = [part.removeprefix(name) for part, name in zip(printed, self.dims, strict=True)]
        if len(parts) != len(self.dims) or not all(part.isdecimal() for part in parts):
            return None
        return dict(zip(self.dims, map(int, parts), strict=True))

    @property
    def example(self) -> str:
        """The text of a problem: the first of `shapes`, else of `cases`, that is a list of sizes; without one, 1024 for
        each dimension."""
        return next(filter(self._sizes, (*self.shapes, *self.cases)), ",".join(["1024"] * len(self.dims)))

    def sized(self, sizes: Mapping[str, int], dtype: str) -> OperationProblem:
        """The problem with these sizes. Raises SpecError for sizes that int32 does not hold."""
        for name, size in sizes.items():
            if size >= 2**31:
                raise SpecError(f"{name}={size} is not supported: kernels receive sizes as int32, at most 2^31 - 1")
        return OperationProblem(self.name, tuple((name, sizes[name]) for name in self.dims), dtype)

    def bytes_of(self, problem: OperationProblem) -> int:
        """Bytes that one call must move."""
        if self.nbytes:
            return self.nbytes(problem)
        return sum(tensor.nbytes(problem) for tensor in (*self.inputs.values(), *self.outputs.values()))

    def flops_of(self, problem: OperationProblem) -> int:
        """Floating-point operations of one call; 0 if the spec does not say."""
        return self.flops(problem) if self.flops else 0
