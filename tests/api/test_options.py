"""The keyword arguments of the public functions, and the `Options` object."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from project import ROOT, check_stored

import sandbox
from sandbox.api import options, plan, validate
from sandbox.api.options import DEFAULT, Options, basic_options, collect, plain_options, replace
from sandbox.core.errors import LaunchError, SpecError
from sandbox.core.options import ARRAYS, OPTIONS, score_structure
from sandbox.launch import dlpack

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
    parameters = inspect.signature(function).parameters
    arrays = [Q] * sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) got an unexpected .* 'widow': did you mean window"):
        function(*arrays, widow=(1, 0))
    own = {p.name for p in parameters.values() if p.default is not p.empty}
    every = ", ".join(sorted(FUNCTIONS[function] | own))
    with pytest.raises(TypeError, match=f"'zzz': the options are {every}$"):
        function(*arrays, zzz=1)
    for name in own:
        with pytest.raises(TypeError, match=f"'{name}s': did you mean {name}"):
            function(*arrays, **{f"{name}s": 1})
    for name, use in options._COUNTERPARTS.items():
        if name not in FUNCTIONS[function] and name not in parameters:
            with pytest.raises(TypeError, match=re.escape(f"keyword argument '{name}': use {use}") + "$"):
                function(*arrays, **{name: 1})


def test_a_seed_is_checked_also_without_dropout() -> None:
    with pytest.raises(SpecError, match="seed='abc' must be an integer"):
        collect("attention", Q, False, None, {"seed": "abc"})


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
    assert not collect("attention", Q, True, None, {"dropout": 0.0, "seed": 3})[0].has_more


def test_basic_options_are_the_constructor() -> None:
    given = {"causal": True, "scale": 0.5, "kernel": "k", "tile": "t", "backend": "cpu", "deterministic": True}
    assert basic_options(**given) == Options(**given)
    for causal, scale in ((False, None), (True, None), (True, 0.5), ("top-left", None)):
        assert plain_options(causal, scale) == Options(causal=causal, scale=scale)
    assert options.backward_options(Options(**given, softcap=2.0), False) == Options(
        causal=True, scale=0.5, backend="cpu", softcap=2.0
    )
    assert replace(Options(softcap=2.0), causal=True) == Options(causal=True, softcap=2.0)
    assert hash(basic_options(causal=True)) == hash(Options(causal=True))
    assert basic_options() == plain_options(False, None) == DEFAULT


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
    assert {*options.FIELD_OPTIONS} | arrays <= options.FORWARD
    assert {*options.FIELD_OPTIONS} <= {*Options._fields}
    assert {*options.DIFFERENTIABLE} <= arrays
    fields = {field.name for field in dataclasses.fields(sandbox.Problem)} | {"seed", "block_map"}
    assert {option.name for option in OPTIONS} <= fields


def test_help_describes_every_keyword_argument() -> None:
    said = sandbox.attention_forward.__doc__
    assert said.startswith("Exact attention")
    assert [name for name in options.FORWARD if f"{name}: " not in said] == []


def test_the_shapes_of_arrays() -> None:
    sizes, alibi, bias = (2, 4, 7, 9), ARRAYS["alibi"], ARRAYS["bias"]
    assert alibi.accepts((4,), sizes)
    assert alibi.accepts((2, 4), sizes)
    assert not any(alibi.accepts(shape, sizes) for shape in ((1,), (2,), (1, 4), (4, 2), (1, 2, 4), ()))
    assert bias.accepts((1, 4, 1, 9), sizes)
    assert not any(bias.accepts(shape, sizes) for shape in ((9,), (4, 7, 9), (3, 4, 7, 9), (2, 4, 7, 0)))
    assert alibi.required(sizes) == "be (H,) = (4,) or (B, H) = (2, 4)"
    assert bias.required(sizes) == "broadcast to (B, H, Sq, Sk) = (2, 4, 7, 9)"


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


# ---- arrays that no kernel can read


F32 = np.float32


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def seen(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str = "float32") -> dlpack.ArrayView:
    return dlpack.ArrayView(4096, shape, strides, dtype, dlpack.HOST, None)


@pytest.mark.parametrize(
    ("shape", "strides", "readable"),
    [
        ((2, 2, 3), (6, 3, 1), True),
        ((2, 2, 3), (8, 3, 1), False),
        ((2, 2, 3), (3, 6, 1), False),
        ((2, 2, 3), (12, 6, 2), False),
        ((1, 2, 3), (99, 3, 1), True),  # one batch entry: its stride does not matter
        ((2, 2, 1), (2, 1, 99), True),
        ((2, 0, 3), (8, 3, 2), True),  # no element
    ],
)
def test_lse_is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], readable: bool) -> None:
    B, H, Sq = shape
    found = validate.unreadable({"lse": seen(shape, strides)}, sandbox.Problem(B, H, Sq, 5, 8))
    assert found == ([] if readable else ["lse"])


@pytest.mark.parametrize(
    ("Dv", "strides", "readable"),
    [
        (8, (48, 24, 8, 1), True),
        (8, (1, 2, 4, 1), True),
        (8, (96, 48, 16, 2), False),
        (2, (24, 12, 4, 2), False),
        (1, (6, 3, 1, 0), True),  # one column: its stride does not matter
    ],
)
def test_dout_has_any_strides_but_that_of_a_column(Dv: int, strides: tuple[int, ...], readable: bool) -> None:
    problem = sandbox.Problem(2, 2, 3, 5, 8, Dv=Dv)
    found = validate.unreadable({"dout": seen((2, 2, 3, Dv), strides)}, problem)
    assert found == ([] if readable else ["dout"])


@pytest.mark.parametrize(("keys", "step", "readable"), [(5, 1, True), (5, 2, False), (1, 9, True), (5, 0, False)])
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_keys_of_a_bias_and_of_a_mask_are_contiguous(name: str, keys: int, step: int, readable: bool) -> None:
    """One key for all may have any stride."""
    views = {name: seen((2, 2, 3, keys), (120, 60, 20, step))}
    found = validate.unreadable(views, sandbox.Problem(2, 2, 3, 5, 8, **{name: (2, 2, 3, keys)}))
    assert found == ([] if readable else [name])


@pytest.mark.parametrize(
    ("changes", "latent"),
    [
        ({}, True),
        ({"pointer": 4098}, False),
        ({"dtype": "bfloat16"}, False),
        ({"shape": (2, 1, 5, 64)}, True),
        ({"shape": (2, 1, 5, 65)}, False),
        ({"shape": (2, 1, 0, 32)}, False),
        ({"strides": (320, 7, 64, 1)}, True),  # one head: its stride does not matter
        ({"strides": (320, 320, 65, 1)}, False),
        ({"strides": (321, 320, 64, 1)}, False),
    ],
)
def test_values_that_are_the_first_columns_of_the_keys(changes: dict[str, Any], latent: bool) -> None:
    k = dlpack.ArrayView(4096, (2, 1, 5, 64), (320, 320, 64, 1), "float16", dlpack.HOST, None)
    own = {"pointer": 4096, "shape": (2, 1, 5, 32), "strides": k.strides, "dtype": "float16", **changes}
    v = dlpack.ArrayView(**own, device=dlpack.HOST, owner=None)
    assert validate._latent({"k": k, "v": v}) == latent
    assert not validate._latent({"k": k, "v": v, "dout": k})


@pytest.mark.parametrize(
    ("shape", "strides", "mappable"),
    [
        ((3, 2, 16, 8), (256, 8, 16, 1), True),
        ((3, 2, 16, 8), (256, 2**33 - 8, 16, 1), True),
        ((3, 2, 16, 8), (256, 2**33, 16, 1), False),
        ((3, 2, 16, 8), (257, 8, 16, 1), False),
        ((1, 2, 16, 8), (999, 8, 16, 1), True),
        ((0, 2, 16, 8), (999, 8, 16, 1), True),
        ((2, 2, 16, 8), (256, 128, 8, 1), False),
    ],
)
def test_pages_whose_rows_have_one_stride(shape: tuple[int, ...], strides: tuple[int, ...], mappable: bool) -> None:
    assert validate._mappable_pages(seen(shape, strides, "float16")) == mappable


# ---- contents of host arrays


def append(
    lengths: tuple[int, ...], rows: int = 3, table: Any = ((0, 1), (2, 3)), offsets: tuple[int, ...] | None = None
) -> None:
    """`check_append` of caches (2, 1, 16, 8) or pages (4, 1, 16, 8)."""
    dense = table is None
    validate.check_append(
        np.zeros((2, 1, rows, 8), F32) if offsets is None else np.zeros((1, 1, rows, 8), F32),
        np.zeros((2 if dense else 4, 1, 16, 8), F32),
        None if dense else np.array(table, np.int32),
        int32(*lengths),
        None if offsets is None else int32(*offsets),
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: append((29, 0)), None),
        (lambda: append((30, 0)), "key_lengths[0] is 30, and 3 new rows make 33: block_table has pages for 32 keys"),
        (lambda: append((0, 31), rows=1), None),
        (
            lambda: append((0, 32), rows=1),
            "key_lengths[1] is 32, and 1 new row makes 33: block_table has pages for 32 ",
        ),
        (lambda: append((99, 99), rows=0), None),
        (lambda: append((-5, 29)), None),
        (lambda: append((13, 13), table=None), None),
        (
            lambda: append((13, 14), table=None),
            "key_lengths[1] is 14, and 3 new rows make 17: k_pages has room for 16 ",
        ),
        (
            lambda: append((0, 0), table=((4, 0), (0, 0))),
            "block_table[0, 0] is 4, a page that does not exist: k_pages has 4",
        ),
        (lambda: append((0, 14), table=((0, 9), (3, -1))), "block_table[1, 1] is -1, a page that does not exist"),
        (lambda: append((13, 16), table=((3, 9), (9, 0))), None),  # only pages of new rows are read
        (lambda: append((14, 16), table=((3, 9), (9, 0))), "block_table[0, 1] is 9"),
        (lambda: append((30, 29), offsets=(0, 2, 3)), None),
        (lambda: append((31, 29), offsets=(0, 2, 3)), "key_lengths[0] is 31, and 2 new rows make 33"),
        (lambda: append((0, 0), offsets=(1, 2, 3)), "cu_seqlens[0] is 1: cu_seqlens must begin with 0"),
        (lambda: append((0, 0), offsets=(0, 3, 2)), "cu_seqlens decreases from 3 to 2 at cu_seqlens[2]"),
        (lambda: append((0, 0), offsets=(0, 3, 4)), "cu_seqlens[2] is 4, beyond the last row: k_new has 3 rows"),
        (lambda: append((0, 99), offsets=(0, 3, 3)), None),
        (lambda: append((99, 99), offsets=(0, 3)), None),  # shapes that do not fit are left to the kernel
        (lambda: append((99, 99, 99)), None),
        (lambda: append((99, 99), table=((0, 1),)), None),
        (lambda: validate._check_lengths("q", int32(0, 4, 9), 5), None),
        (
            lambda: validate._check_lengths("q", int32(0, 4, 9), 4),
            "sequence 1 has 5 queries, more than max_seqlen_q=4: pass max_seqlen_q=5 or more, and a bias",
        ),
        (lambda: validate._check_lengths("k", int32(0, 4, 4), 3), "sequence 0 has 4 keys, more than max_seqlen_k=3"),
    ],
)
def test_contents_that_a_kernel_would_reject(call: Callable[[], None], message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(LaunchError, match=f"^{re.escape(message)}"):
        call()


# ---- which calls are accepted


class Chosen(Exception):
    """Raised in place of the compilation."""


def arrays(*shapes: tuple[int, ...], dtype: Any = np.float16) -> list[np.ndarray]:
    return [np.zeros(shape, dtype) for shape in shapes]


Q4, K2 = (2, 4, 9, 16), (2, 2, 11, 16)
LAID_OUT: dict[str, Callable[[], Any]] = {  # q, k, v that are accepted or not
    "usual": lambda: arrays(Q4, K2, K2),
    "three dimensions": lambda: arrays(Q4[1:], K2, K2),
    "another batch": lambda: arrays(Q4, (1, *K2[1:]), (1, *K2[1:])),
    "another D": lambda: arrays(Q4, (*K2[:3], 8), K2),
    "another Sk": lambda: arrays(Q4, K2, (2, 2, 10, 16)),
    "another Dv": lambda: arrays(Q4, K2, (2, 2, 11, 8)),
    "Dv = 0": lambda: arrays(Q4, K2, (2, 2, 11, 0)),
    "D = 0": lambda: arrays((2, 4, 9, 0), (2, 2, 11, 0), K2),
    "three heads": lambda: arrays((2, 3, 9, 16), K2, K2),
    "no heads of k": lambda: arrays(Q4, (2, 0, 11, 16), (2, 0, 11, 16)),
    "float64": lambda: arrays(Q4, K2, K2, dtype=np.float64),
    "int8": lambda: arrays(Q4, K2, K2, dtype=np.int8),
    "two dtypes": lambda: [*arrays(Q4, K2), np.zeros(K2, np.float32)],
    "k with a stride in D": lambda: [*arrays(Q4), np.zeros((2, 2, 11, 32), np.float16)[..., ::2], *arrays(K2)],
    "q with a stride in D": lambda: [np.zeros((2, 4, 16, 9), np.float16).swapaxes(2, 3), *arrays(K2, K2)],
    "unaligned rows": lambda: [np.zeros((2, 4, 9, 17), np.float16)[..., 1:], *arrays(K2, K2)],
    "a list": lambda: [[1.0], *arrays(K2, K2)],
    "float8": lambda: arrays(Q4, K2, K2, dtype=ml_dtypes.float8_e4m3fn),
    "latent": lambda: [*arrays((2, 4, 9, 64)), k := np.zeros((2, 1, 11, 64), np.float16), k[..., :32]],
}
KEYWORDS: list[dict[str, Any]] = [
    {},
    *({"causal": causal} for causal in (True, "top-left", "left", 2, None)),
    *({"scale": scale} for scale in (0, 0.5, "x", float("nan"), np.ones(1), np.ones(2))),
    *({"window": window} for window in ((1, 2), (None, 3), (-1, 0), 3)),
    *({"softcap": n} for n in (0, 1.5, -1, float("inf"))),
    *({"dropout": p, "seed": seed} for p in (0.25, 1.0, -0.1, 1.5) for seed in (3, None, np.zeros(2, np.int64))),
    {"dropout": 0.25, "seed": 2**63}, {"dropout": 0.25, "seed": -1}, {"dropout": 0.25, "seed": 1.5}, {"seed": 4},
    *({"alibi": np.zeros(shape, F32)} for shape in ((4,), (2, 4), (1, 4), (3,), ())),
    *({"alibi": np.zeros(4, dtype)} for dtype in (np.float16, np.float64)),
    *({"bias": np.zeros(shape, F32)} for shape in ((2, 4, 9, 11), (9, 11), (1, 1, 1, 11), (4, 1, 1),
                                                          (2, 4, 9, 12), (11,))),
    *({"bias": np.zeros((9, 11), dtype)} for dtype in (np.float16, np.float64)),
    {"bias": np.broadcast_to(np.zeros((1, 1, 9, 11), F32), (2, 4, 9, 11))},
    {"bias": np.zeros((11, 9), F32).T},
    *({"mask": np.zeros(shape, dtype)} for shape in ((2, 4, 9, 11), (9, 11), (9,)) for dtype in (np.bool_, np.int32)),
    *({"sink": np.zeros(shape, F32)} for shape in ((4,), (2, 4), (3,))),
    *({"key_lengths": np.zeros(shape, np.int32)} for shape in ((2,), (3,), (2, 1))),
    {"key_lengths": np.zeros(2, np.int64)},
    *({"kernel": name} for name in ("fwd_minimal", "fwd_block2d", "bwd_minimal", "fwd_wgmma", "no", 3)),
    *({"kernel": "fwd_minimal", "tile": tile} for tile in (
        "BLOCK_M=32,BLOCK_N=16", {"BLOCK_M": 32}, "x", {"BLOCK_M": 0},
    )),
    *({"backend": name} for name in ("cpu", "gpu")),
    *({"descale": n} for n in ((1.0, 2.0, 3.0), (1.0,), 2.0, (np.ones((2, 4), F32), 1.0, np.ones((1, 2), F32)),
                               (0.0, 1.0, 1.0), (np.ones((2, 4)), 1.0, 1.0))),
    *({"descale": (1.0, 1.0, 1.0), "out_dtype": n} for n in ("float32", "float16", "float64", np.float32)),
    {"score": sandbox.Score("x * 2")}, {"score": sandbox.Score("x", mask="i > j"), "causal": True}, {"score": "x"},
]  # fmt: skip


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls of the public functions, with names."""
    for name, make in LAID_OUT.items():
        yield f"attention {name}", lambda make=make: sandbox.attention(*make())
    for keywords in KEYWORDS:
        shown = {name: f"{x.dtype}{x.shape}" if hasattr(x, "dtype") else x for name, x in keywords.items()}
        for layout in ("usual", "float8") if "descale" in keywords or not keywords else ("usual",):
            yield f"attention {layout} {shown}", lambda k=keywords, n=layout: sandbox.attention(*LAID_OUT[n](), **k)
    rows, keys = (20, 4, 16), (30, 2, 16)
    for offsets in (int32(0, 9, 20), int32(0, 20), int32(), int32(0, 9, 20)[:, None], np.array([0, 20]), [0, 20]):
        shown = f"{getattr(offsets, 'dtype', 'list')}{getattr(offsets, 'shape', '')}"
        yield f"varlen {shown}", lambda o=offsets: sandbox.attention_varlen(*arrays(rows, keys, keys), o, o)
        yield (
            f"varlen {shown}, 2",
            lambda o=offsets: sandbox.attention_varlen(*arrays(rows, keys, keys), o, int32(0, 3, 30)),
        )
    for longest in (
        {"max_seqlen_q": 12},
        {"max_seqlen_q": 12, "max_seqlen_k": 25},
        {"max_seqlen_q": -1},
        {"max_seqlen_k": 1.5},
    ):
        bias = np.zeros((2, 1, 12, 25), F32)
        for more in ({}, {"bias": bias}):
            yield (
                f"varlen {longest} {[*more]}",
                lambda k=longest | more: sandbox.attention_varlen(
                    *arrays(rows, keys, keys), int32(0, 9, 20), int32(0, 9, 30), **k
                ),
            )
    pages = (7, 16, 2, 16)
    for table in (
        np.zeros((2, 3), np.int32),
        np.zeros((3, 3), np.int32),
        np.zeros(6, np.int32),
        np.zeros((2, 3), np.int64),
    ):
        for lengths in (int32(4, 40), int32(4), np.zeros(2, np.int64)):
            yield (
                f"paged {table.dtype}{table.shape} {lengths.dtype}{lengths.shape}",
                lambda t=table, n=lengths: sandbox.attention_paged(*arrays(Q4, pages, pages), t, n),
            )
    for shape in ((2, 4, 16), (2, 4, 1, 16), (3, 4, 1, 16), (2, 3, 1, 16), (2, 4, 1, 8)):
        yield (
            f"paged {shape}",
            lambda shape=shape: sandbox.attention_paged(
                *arrays(shape, pages, pages), np.zeros((2, 3), np.int32), int32(4, 40)
            ),
        )
    for changed, other in (
        (0, arrays(Q4)[0]), (0, np.zeros(Q4, F32)), (0, np.zeros((2, 4, 8, 16), np.float16)),
        (4, np.zeros(K2, np.float16)),
        (5, np.zeros((2, 4, 9), np.float16)), (5, np.zeros((2, 4, 10), F32)), (1, arrays(K2)[0]),
    ):  # fmt: skip
        given = [*arrays(Q4, Q4, K2, K2, Q4), np.zeros((2, 4, 9), F32)]
        given[changed] = other
        yield f"backward {changed} {other.dtype}{other.shape}", lambda given=given: sandbox.attention_backward(*given)


def test_stored_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, tile and problem of each call, or its error; nothing is compiled."""

    def prepare(kernel: Any, tile: Any, problem: Any, tensors: Any, device: Any, *rest: Any) -> None:
        raise Chosen(f"{kernel.name} {tile} {problem.as_json()} {sorted(tensors)}")

    monkeypatch.setattr(plan.pipeline, "prepare", prepare)
    lines = []
    for name, call in calls():
        try:
            call()
        except Chosen as chosen:
            lines.append(f"{name}: {chosen}")
        except Exception as error:
            lines.append(f"{name}: {type(error).__name__}: {error}".partition(": the forward kernels are")[0][:400])
        else:
            lines.append(f"{name}: no launch")
    check_stored("calls.txt", (line.replace("\n", " ") for line in lines))
