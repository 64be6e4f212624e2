"""The keyword arguments of the public functions, and the `Options` object."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re

import numpy as np
import pytest
from project import ROOT

import sandbox
from sandbox.api import options
from sandbox.api.options import DEFAULT, Options, collect, launch_options, plain_options, replace
from sandbox.core.options import ARRAYS, OPTIONS, Array, score_structure

Q = np.zeros((1, 2, 8, 16), np.float32)
FUNCTIONS = {
    sandbox.attention: options.FORWARD,
    sandbox.attention_forward: options.FORWARD,
    sandbox.attention_varlen: options.FORWARD,
    sandbox.attention_paged: options.PAGED,
    sandbox.attention_backward: options.BACKWARD,
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_an_unknown_keyword_argument_is_a_type_error(function) -> None:
    arrays = [Q] * sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in inspect.signature(function).parameters.values())
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected .* 'widow': did you mean window"):
        function(*arrays, widow=(1, 0))
    with pytest.raises(TypeError, match="'zzz': the options are alibi, "):
        function(*arrays, zzz=1)


@pytest.mark.parametrize("name", ["key_lengths", "descale"])
def test_keyword_arguments_that_not_every_function_has(name: str) -> None:
    for function, known in FUNCTIONS.items():
        if name not in known and function is not sandbox.attention_paged:
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
                function(*[Q] * 6, **{name: None})


def test_defaults_do_not_change_the_options() -> None:
    absent = {**dict.fromkeys(options.FORWARD - {"causal", "scale"}), "softcap": 0.0, "dropout": 0.0}
    assert collect("attention", Q, False, None, absent) == (DEFAULT, ())
    assert collect("attention", Q, False, None, {}) == (DEFAULT, ())
    assert not collect("attention", Q, True, None, {"dropout": 0.0, "seed": 3})[0].scored


def test_launch_options_are_the_constructor() -> None:
    given = {"causal": True, "scale": 0.5, "kernel": "k", "tile": "t", "backend": "cpu", "deterministic": True}
    assert launch_options(**given) == Options(**given)
    for causal, scale in ((False, None), (True, None), (True, 0.5), ("top-left", None)):
        assert plain_options(causal, scale) == Options(causal=causal, scale=scale)
    assert options.backward_options(Options(**given, softcap=2.0), False) == Options(
        causal=True, scale=0.5, backend="cpu", softcap=2.0
    )
    assert replace(Options(softcap=2.0), causal=True) == Options(causal=True, softcap=2.0)
    assert hash(launch_options(causal=True)) == hash(Options(causal=True))


def test_the_order_of_keyword_arguments_does_not_matter() -> None:
    one = {"bias": Q, "mask": Q > 0, "sink": Q[0, :, 0, 0]}
    first, arrays = collect("attention", Q, False, None, one)
    second, others = collect("attention", Q, False, None, dict(reversed(one.items())))
    assert first == second
    assert all(x is y for x, y in zip(arrays, others, strict=True))


def test_options_are_passed_by_keyword() -> None:
    """Neither constructed by position nor unpacked, so that a new field breaks nothing."""
    for file in (ROOT / "sandbox").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Options":
                assert not node.args, f"{file.name}:{node.lineno}"


def test_the_table_of_options_and_the_keyword_arguments_agree() -> None:
    arrays = {option.name for option in OPTIONS if option.array}
    assert arrays == {*options.ARRAYS}
    assert {*options.VALUES} | arrays <= options.FORWARD
    assert {*options.VALUES} <= {*Options._fields}
    assert {*options.DIFFERENTIABLE} <= arrays
    fields = {field.name for field in dataclasses.fields(sandbox.Problem)} | {"seed", "block_map"}
    assert {option.name for option in OPTIONS} <= fields


def test_an_array_may_have_sizes_of_its_own() -> None:
    table, sizes = Array("hn", lambda rng, p: None), (2, 4, 7, 9)
    assert table.accepts((4, 63), sizes)
    assert not any(table.accepts(shape, sizes) for shape in ((3, 63), (4, 0), (4,), (1, 4, 63)))
    assert table.required(sizes) == "be (4, n)"
    assert ARRAYS["alibi"].required(sizes) == "be (H,) = (4,) or (B, H) = (2, 4)"


def test_the_structs_of_host_and_device_have_the_same_order() -> None:
    """Their sizes are compared by the compiler."""
    every = sandbox.Problem(2, 4, 8, 8, 8, dtype="float8_e4m3", window=(1, 1), dropout=0.1, alibi=(2, 4), sink=True,
                            softcap=1.0, bias=(2, 4, 8, 8), mask=(2, 4, 8, 8), key_lengths=True, ragged=(16, 16),
                            descale=((2, 4),) * 3)  # fmt: skip
    paged = sandbox.Problem(2, 4, 8, 16, 8, dtype="float16", page_size=16, key_lengths=True, softcap=1.0, alibi=(4,))
    text = (ROOT / "kernels_cu/include/score.cuh").read_text()
    struct = re.sub("//.*", "", text).partition("struct Score {")[2].partition("};")[0]
    for problem in (every, paged):
        names = [name for name, _ in score_structure(problem)._fields_ if "_stride_" not in name]
        found = [re.search(rf"\b{name}[,;]", struct).start() for name in names]
        assert found == sorted(found), dict(zip(names, found, strict=True))
