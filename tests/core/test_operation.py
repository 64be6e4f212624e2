"""Operations: their problems, sizes and names."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from sandbox.core.errors import SpecError
from sandbox.core.operation import Operation, OperationProblem, problem_from_json
from sandbox.spec import Problem, Tensor


def operation(**fields: Any) -> Operation:
    usual: dict[str, Any] = {
        "dims": ("M", "N"),
        "inputs": {"x": Tensor("M", "N"), "w": Tensor("N", 3, dtype="int32")},
        "outputs": {"y": Tensor("M", dtype="float32")},
        "reference": lambda x, w: x.sum(-1),
        "name": "mine",
    }
    return Operation(**{**usual, **fields})


PROBLEM = operation().problem("5, 1024", "float16")


def test_a_problem() -> None:
    assert (PROBLEM.M, PROBLEM["N"], PROBLEM.dtype) == (5, 1024, "float16")
    assert (str(PROBLEM), PROBLEM.variant, PROBLEM.widths) == ("M5 N1024 float16", "float16", "M=5, N=1024")
    assert (PROBLEM.float8, PROBLEM.float8_keys, PROBLEM.plain, PROBLEM.invariant) == (False, False, True, False)
    assert (PROBLEM.page_size, PROBLEM.ragged, PROBLEM.head_dims, PROBLEM.kv_dtype) == (0, (), (), "")
    for copy in (pickle.loads(pickle.dumps(PROBLEM)), problem_from_json(PROBLEM.as_json())):
        assert (copy, hash(copy)) == (PROBLEM, hash(PROBLEM))
    assert PROBLEM.as_json() == {"operation": "mine", "sizes": {"M": 5, "N": 1024}, "dtype": "float16"}
    attention = Problem(1, 2, 3, 4, 8)
    assert problem_from_json(attention.as_json()) == attention
    with pytest.raises(AttributeError, match=r"^a problem of mine has no K: it has M, N and dtype$"):
        PROBLEM.K  # noqa: B018
    with pytest.raises(AttributeError, match=r"^_hidden$"):
        PROBLEM._hidden  # noqa: B018
    with pytest.raises(dataclasses.FrozenInstanceError):
        PROBLEM.dtype = "float32"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("size", "rounded"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1023, 1024), (1024, 1024), (1025, 2048)]
)
def test_sizes_of_a_tuning_class_are_powers_of_two(size: int, rounded: int) -> None:
    problem = OperationProblem("mine", (("M", size), ("N", 7)), "float16")
    assert problem.tuning_class == f"mine M<={rounded} N<=8 float16"


def test_bytes_and_flops() -> None:
    """Every input and output once, also one that is updated in place."""
    assert operation().bytes_of(PROBLEM) == 2 * 5 * 1024 + 4 * 1024 * 3 + 4 * 5
    in_place = operation(outputs={"x": Tensor("M", "N")}, reference=lambda x, w: x)
    assert in_place.in_place == ("x",)
    assert in_place.bytes_of(PROBLEM) == 2 * (2 * 5 * 1024) + 4 * 1024 * 3
    assert operation(nbytes=lambda p: p.M + 1).bytes_of(PROBLEM) == 6
    assert operation().flops_of(PROBLEM) == 0
    assert operation(flops=lambda p: p.M * p.N).flops_of(PROBLEM) == 5 * 1024


def test_the_example_is_the_first_problem() -> None:
    assert operation().example == "1024,1024"
    assert operation(cases=("2,3", "4,5")).example == "2,3"
    assert operation(cases=("2,3",), shapes=("6,7",)).example == "6,7"


def test_the_sizes_of_a_printed_problem_are_a_shape() -> None:
    problem = operation().problem("5, 1024", "float16")
    assert operation().problem(f"M{problem.M} N{problem.N}", "float16") == problem
    for other in ("M5", "N1024 M5", "M5 N", "M5 N6 K7", "M5,N1024", "5 1024", ""):
        with pytest.raises(SpecError, match=f"shape '{other}' must be M,N"):
            operation().problem(other, "float16")


def test_operations_are_compared_by_identity() -> None:
    """A registry that was read again has other functions, and so other operations."""
    one, other = operation(), operation()
    assert one != other
    assert len({one, other, one}) == 2
    assert repr(one) == "Operation(mine: x, w -> y)"
    assert repr(operation(name="")) == "Operation(without a name: x, w -> y)"
    assert (one.reads, one.writes, [*one.tensors]) == (("x", "w"), ("y",), ["x", "w", "y"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dims": ("M", "_N")}, "dimension '_N' is the name of a tensor or of an attribute of OperationProblem, or "),
        ({"dims": ("M", "x")}, "dimension 'x' is the name of a tensor"),
        ({"dims": ("M", "widths")}, "dimension 'widths' is the name of a tensor or of an attribute"),
        ({"dims": ("M", "N-1")}, "name 'N-1' must be an identifier"),
        ({"dims": ("M", "class")}, "name 'class' must be an identifier"),
        ({"inputs": {"x-1": Tensor("M", "N")}}, "name 'x-1' must be an identifier"),
        ({"outputs": {"y": Tensor("K")}}, r"y: dimension K is not in dims=\('M', 'N'\)"),
        ({"inputs": {}}, "inputs is empty: an operation needs at least one"),
        ({"shapes": "1,2"}, "shapes='1,2' must be a tuple: add a comma"),
        ({"shapes": ("1,2,3",)}, "shape '1,2,3' must be M,N, such as 1024,1024"),
        ({"cases": ("1,-2",)}, "shape '1,-2' must be M,N"),
    ],
)
def test_operations_that_contradict_themselves(fields: dict[str, Any], message: str) -> None:
    if "dims" in fields and "inputs" not in fields:
        fields = {**fields, "inputs": {"x": Tensor(*fields["dims"])}, "outputs": {"y": Tensor("M")}}
    with pytest.raises(SpecError, match=message):
        operation(**fields)


def test_sizes_are_int32() -> None:
    assert operation().sized({"M": 2**31 - 1, "N": 1}, "float16").M == 2**31 - 1
    with pytest.raises(SpecError, match=r"^N=2147483648 is not supported: kernels receive sizes as int32"):
        operation().sized({"M": 1, "N": 2**31}, "float16")


def test_tensors() -> None:
    tensor = Tensor("M", 3)
    assert (tensor.dims, tensor.dtype, tensor.strided, tensor.aligned, tensor.values) == (
        ("M", 3),
        "",
        False,
        True,
        None,
    )
    assert tensor == Tensor("M", 3)
    assert (tensor.shape(PROBLEM), tensor.dtype_in(PROBLEM), tensor.nbytes(PROBLEM)) == ((5, 3), "float16", 30)
    assert Tensor("M", dtype="int64").nbytes(PROBLEM) == 40
    assert Tensor("M", 1, 1, "N", strided=True).strided
    with pytest.raises(SpecError, match="Tensor=0 must be an integer >= 1"):
        Tensor("M", 0)
    with pytest.raises(SpecError, match="strided=True needs four dimensions, not 5"):
        Tensor(1, 1, 1, 1, 1, strided=True)
    with pytest.raises(SpecError, match="dtype='float64' is not supported: choose one of float32"):
        Tensor("M", dtype="float64")
    with pytest.raises(dataclasses.FrozenInstanceError):
        tensor.dtype = "bool"  # type: ignore[misc]
