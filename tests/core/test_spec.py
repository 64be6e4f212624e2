"""Problem, Tile, Kernel: what they hold, and that every refusal names the value."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import pickle
import random
import re
from functools import cached_property, partial

import numpy as np
import pytest
from project import ROOT, check_stored, digest, drawn_problem

from sandbox.core import block_map, options, registry
from sandbox.core.errors import SpecError, UnknownKernel, UnsupportedProblem
from sandbox.spec import COMPUTATIONS, Entry, Kernel, Problem, Score, Tile, cdiv, normalise_causal

P = Problem(2, 4, 7, 9, 64, Hk=2, dtype="float16", causal="bottom-right")


def refuses(message: str):
    return pytest.raises(SpecError, match=re.escape(message))


# ---- Problem


def test_defaults() -> None:
    p = Problem(2, 4, 7, 9, 64)
    assert (p.Hk, p.dtype, p.causal, p.scale) == (4, "float32", False, 0.125)
    assert Problem(1, 1, 1, 1, 1, scale=0).scale == 0.0
    assert p == Problem(2, 4, 7, 9, 64, Hk=4, scale=0.125)
    assert hash(p) == hash(dataclasses.replace(p))
    assert pickle.loads(pickle.dumps(P)) == P


def test_numpy_integers_become_integers() -> None:
    p = Problem(*np.array([2, 4, 7, 9, 64]), Hk=np.int32(2))
    assert {type(n) for n in (p.B, p.H, p.Sq, p.Sk, p.D, p.Hk)} == {int}


@pytest.mark.parametrize("causal", [True, "bottom-right", "top-left", False, None])
def test_causal_is_normalised(causal: object) -> None:
    expected = {True: "bottom-right", None: False}.get(causal, causal)
    assert Problem(1, 1, 1, 1, 8, causal=causal).causal == normalise_causal(causal) == expected


@pytest.mark.parametrize("causal", [1, 0, 1.0, np.True_, np.False_])
def test_causal_takes_what_equals_true_or_false(causal: object) -> None:
    """A plan's key cannot tell them apart."""
    assert normalise_causal(causal) == ("bottom-right" if causal else False)


@pytest.mark.parametrize("causal", [2, -1, [], np.array([True]), np.array(True), "yes", object()])
def test_causal_takes_nothing_else(causal: object) -> None:
    with refuses(f"causal={causal!r} is not known"):
        normalise_causal(causal)


@pytest.mark.parametrize("bound", [2**70, 2**32, 2**31 - 1, 17, np.int64(2**40)])
def test_a_window_is_at_most_all_rows_and_keys(bound: int) -> None:
    """Beyond int32 the argument of the kernel would be another number."""
    p = dataclasses.replace(P, window=(bound, bound))
    assert p.window == (16, 16)
    assert {type(n) for n in p.window} == {int}
    assert dataclasses.replace(P, window=(bound, None)).window == (16, None)
    assert dataclasses.replace(P, window=(None, 15)).window == (None, 15)
    (part,) = Problem(0, 4, 0, 0, 64, lengths=((3, 5),), window=(bound, 1)).sequences
    assert part.window == (8, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"Sq": 2**29 + 1}, "Sq=536870913 is not supported: kernels add row indices and the window's bound in int32"),
        ({"Sk": 2**31}, "Sk=2147483648 is not supported"),
        ({"Sk": 2**40}, "Sk=1099511627776 is not supported"),
        ({"B": 2**17, "H": 2**14}, "B * H = 2147483648 is not supported: heads are counted in int32"),
        ({"Sk": 16, "page_size": 16, "pages": 2**31}, "pages = 2147483648 is not supported: page numbers are int32"),
        ({"lengths": ((2**30, 5),)}, "Sq=1073741824 is not supported"),
    ],
)
def test_what_32_bits_cannot_count_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(UnsupportedProblem, match=re.escape(message)):
        dataclasses.replace(P, **fields)


def test_the_largest_that_can_be_counted() -> None:
    """And every row of the last tile in the widest window."""
    p = dataclasses.replace(P, Sq=2**29, Sk=2**29, window=(2**40, 2**40))
    assert p.Sq + 255 + p.diagonal + p.window[1] < 2**31
    assert p.diagonal - p.window[0] >= -(2**31)
    for Sq, Sk in ((2**29, 0), (0, 2**29)):
        q = dataclasses.replace(p, Sq=Sq, Sk=Sk)
        assert max(Sq + 255 + q.diagonal + q.window[1], q.window[0] - q.diagonal) < 2**31


@pytest.mark.parametrize("name", ["B", "H", "Sq", "Sk", "Hk"])
@pytest.mark.parametrize("value", [-1, 1.0, "2", None, True])
def test_a_size_that_makes_no_sense(name: str, value: object) -> None:
    with refuses(f"{name}={value!r} must be an integer >= 0"):
        dataclasses.replace(P, **{name: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"D": 0}, "D=0 must be an integer >= 1"),
        ({"D": -64}, "D=-64 must be an integer >= 1"),
        ({"D": 64.0}, "D=64.0 must be an integer >= 1"),
        ({"dtype": "float64"}, "dtype='float64' is not supported: choose one of float32, float16, bfloat16"),
        ({"H": 5, "Hk": 2}, "H=5 query heads are not a multiple of Hk=2 key/value heads"),
        ({"H": 2, "Hk": 4}, "H=2 query heads are not a multiple of Hk=4"),
        ({"causal": "left"}, "causal='left' is not known: choose False, True"),
        ({"causal": 1.5}, "causal=1.5 is not known"),
        ({"scale": float("nan")}, "scale=nan must be finite"),
        ({"scale": float("inf")}, "scale=inf must be finite"),
        ({"scale": "big"}, "scale='big' must be a number"),
        ({"scale": (1,)}, "scale=(1,) must be a number"),
    ],
)
def test_a_problem_that_makes_no_sense(values: dict, message: str) -> None:
    with refuses(message):
        dataclasses.replace(P, **values)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("1,12,1024,64", (1, 12, 12, 1024, 1024, 64)),
        ("2,8/2,100,77,40", (2, 8, 2, 100, 77, 40)),
        (" 1 , 2 , 3 , 4 ", (1, 2, 2, 3, 3, 4)),
        ("0,1,0,5,8", (0, 1, 1, 0, 5, 8)),
        ("B2 H8/2 S100x77 D40", (2, 8, 2, 100, 77, 40)),
        (" B1 H12 S1024 D64 ", (1, 12, 12, 1024, 1024, 64)),
    ],
)
def test_from_shape(shape: str, expected: tuple[int, ...]) -> None:
    p = Problem.from_shape(shape, dtype="bfloat16", causal=True)
    assert (p.B, p.H, p.Hk, p.Sq, p.Sk, p.D) == expected
    assert (p.dtype, p.causal) == ("bfloat16", "bottom-right")


@pytest.mark.parametrize(
    "shape",
    [
        "",
        "1",
        "1,2,3",
        "1,2,3,4,5,6",
        "1,2/1/1,3,4",
        "1/1,2,3,4",
        "1,2,x,4",
        "1,-2,3,4",
        "1,2,3.0,4",
        "1,,3,4",
        "1,²,3,4",
        "B1 H2 S3",
        "B1 H2 S3 D4 float16",
        "B1 H2 S²3 D4",
    ],
)
def test_from_shape_refuses(shape: str) -> None:
    with refuses(f"shape {shape!r} must be B,H,S,D or B,H,Sq,Sk,D"):
        Problem.from_shape(shape)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ("1,0,3,8", {}, "shape '1,0,3,8': H=0: a problem has at least one query head"),
        ("1,2/0,3,8", {}, "shape '1,2/0,3,8': Hk=0: the number of key/value heads must be at least 1"),
        ("1,2,3,8/0", {}, "shape '1,2,3,8/0': Dv=0: v's head dimension must be at least 1"),
        (
            "1,2,3,8",
            {"lengths": "3,x"},
            "lengths '3,x' must be numbers with commas between; 128x256 is 128 ",
        ),
        ("1,2,3,8", {"lengths": "3x4x5"}, "lengths '3x4x5' must be numbers with commas between"),
        ("1,2,3,8", {"bias": "1,H,Sq,x"}, "bias '1,H,Sq,x' must be four numbers or names of sizes with commas between"),
        ("1,2,3,8/16", {"latent": True}, "latent=True needs Dv <= D, not Dv=16 with D=8: v is a view of k's columns"),
    ],
)
def test_from_shape_names_the_part_that_is_wrong(shape: str, options: dict, message: str) -> None:
    with refuses(message):
        Problem.from_shape(shape, dtype="float16", **options)


def test_lengths_of_sequences() -> None:
    """They replace B and the numbers of queries and keys, of which the largest count."""
    p = Problem.from_shape("9,4/2,7,8,64", dtype="float16", lengths="3, 5x40,1x2")
    assert (p.B, p.Sq, p.Sk, p.rows, p.lengths) == (3, 5, 40, (9, 45), ((3, 3), (5, 40), (1, 2)))
    sized = Problem.from_shape("2,4/2,7,9,64", dtype="float16", bias="B,1,7,S", mask="1,H,Sq,Sk", latent=True)
    assert (sized.bias, sized.mask, sized.latent) == ((2, 1, 7, 9), (1, 4, 7, 9), True)


class FixedRandom:
    """A generator whose results are given."""

    def __init__(self, *values: object):
        self.values = [*values]

    def random(self, shape: object) -> np.ndarray:
        return np.full(shape, self.values.pop(0))

    def integers(self, low: int, high: int, count: int) -> np.ndarray:
        assert (low, high, count) == (0, 41, len(self.values))
        return np.array(self.values)


@pytest.mark.parametrize(
    ("mask", "drawn", "visible"),
    [
        ((1, 1, 4, 5), (0.3, 0.1, 0.1), True),
        ((1, 1, 4, 5), (0.29, 0.5, 0.5), False),
        ((1, 1, 4, 5), (0.5, 0.09, 0.5), False),  # whole rows
        ((1, 1, 4, 5), (0.5, 0.5, 0.09), False),  # whole keys
        ((1, 1, 1, 5), (0.5, 0.09, 0.5), True),  # not the only one
        ((1, 1, 4, 1), (0.5, 0.5, 0.09), True),
    ],
)
def test_a_random_mask(mask: tuple[int, ...], drawn: tuple[float, ...], visible: bool) -> None:
    found = options._drawn_mask(FixedRandom(*drawn), Problem(1, 1, 4, 5, 8, mask=mask))
    assert found.shape == mask
    assert (found == visible).all()


def test_random_lengths() -> None:
    """The first has most keys, the second none."""
    for given, expected in (([5], [30]), ([5, 6], [30, 0]), ([5, 6, 40], [30, 0, 40])):
        p = Problem(len(given), 1, 4, 40, 8, key_lengths=True)
        assert options._drawn_lengths(FixedRandom(*given), p).tolist() == expected


def test_from_shape_with_values_that_make_no_sense() -> None:
    with refuses("shape '1,8/0,4,8': Hk=0"):
        Problem.from_shape("1,8/0,4,8")
    with refuses("D=0 must be"):
        Problem.from_shape("1,8,4,0")


@pytest.mark.parametrize("Sq", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("Sk", [0, 1, 4, 5, 12])
@pytest.mark.parametrize("causal", [False, "bottom-right", "top-left"])
def test_visible_pairs_by_brute_force(Sq: int, Sk: int, causal) -> None:
    p = Problem(1, 1, Sq, Sk, 8, causal=causal)
    by_name = {
        False: lambda i, j: True,
        "bottom-right": lambda i, j: j <= i + Sk - Sq,
        "top-left": lambda i, j: j <= i,
    }[causal]
    assert p.visible_pairs == sum(by_name(i, j) for i in range(Sq) for j in range(Sk))
    if causal:
        pairs = [(i, j) for i in range(Sq) for j in range(Sk)]
        assert [j <= i + p.diagonal for i, j in pairs] == [by_name(i, j) for i, j in pairs]


def test_flops_by_the_fields_rule() -> None:
    p = Problem(2, 12, 1024, 512, 64, Hk=4)
    assert p.flops == 4 * 2 * 12 * 1024 * 512 * 64
    assert dataclasses.replace(p, causal="top-left").flops == p.flops // 2


def test_a_backward_counts_two_and_a_half_times() -> None:
    p = Problem(2, 12, 1024, 512, 64)
    assert [p.flops_of(computes) for computes in COMPUTATIONS] == [0, p.flops, 0, p.flops * 5 // 2]


def test_itemsize_and_text() -> None:
    assert (P.itemsize, Problem(1, 1, 1, 1, 1).itemsize) == (2, 4)
    assert str(P) == "B2 H4/2 S7x9 D64 float16 causal"
    assert str(Problem(1, 2, 3, 3, 4, causal="top-left")) == "B1 H2 S3 D4 float32 causal-top-left"
    assert [cdiv(0, 4), cdiv(1, 4), cdiv(4, 4), cdiv(5, 4)] == [0, 1, 1, 2]


def shown(value: object) -> object:
    """A property's value; the problems of a ragged batch as texts, which do not list options that are not set."""
    if isinstance(value, tuple) and any(isinstance(x, Problem) for x in value):
        return [*map(str, value)]
    return value


def test_stored_properties() -> None:
    """All that is derived from a problem, for random problems; of most there is a hash."""
    draw, lines = random.Random(0), []
    names = [name for name, value in vars(Problem).items() if isinstance(value, (property, cached_property))]
    dtypes = ("float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2")
    for n in range(500):
        p = drawn_problem(draw, dtypes)
        if p.Sq > 2100 and (p.causal or p.window != (None, None)):
            continue  # visible pairs are counted row by row
        if n % 3 == 2 and not p.page_size:
            lengths = tuple((draw.randrange(70), draw.randrange(70)) for _ in range(p.B))
            p = dataclasses.replace(p, lengths=lengths, ragged=(), bias=(), bias_dtype="", mask=(), score=None)
        found = {name: shown(getattr(p, name)) for name in names if name not in ("options", "reads_elements")}
        found |= {"options": sorted(p.options), "reads": sorted(p.reads_elements), "back": p.flops_of("backward")}
        found |= {"pairs": p.flops_of("forward", 1000), "query": p.query_tiles(48), "key": p.key_tiles(80)}
        lines.append(f"{p}: {found} {[p.dtype_of(name) for name in ('Q', 'V', 'O', 'dV', 'dO', 'bias')]} {p.as_json()}")
    check_stored("problems.txt", [*(line[:400] for line in lines[:8]), digest(lines)])


TRIED_VALUES: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("B", "H", "Sq", "Sk", "Hk", "D", "Dv", "page_size", "pages"),
                    (-1, 0, 1, 2, 3, 4, True, 1.5, "4", None, np.int64(8), 2**29, 2**29 + 1, 2**31 - 1, 2**31)),
    "dtype": ("float16", "half", "float8_e4m3", "float64", "", None),
    "causal": (True, 1, 0, "top-left", "left", 2),
    "scale": (0, -1, 1e-39, 3.4028235e38, 3.4028236e38, float("nan"), float("inf"), "x", None, True),
    "window": (None, (None, None), (0, 0), (1, None), (-1, 0), (None, 16), (17, 99), (1,), (1, 2, 3), (1.5, 0), 3),
    "softcap": (0, 1, -1, 1e-39, 1e39, float("nan"), float("inf"), "1", None, True),
    "alibi": (True, (4,), (2, 4), (1, 4), (3,), (), None, 4),
    "bias": ((1, 1, 7, 9), (2, 4, 7, 9), (7, 9), (1, 1, 1, 1), (2, 4, 7, 8), (0, 1, 7, 9), (1, 1, 1, 7, 9), None),
    "bias_dtype": ("", "float32", "float16", "bfloat16"),
    "mask": ((1, 1, 7, 9), (2, 4, 7, 9), (9,), (1, 1, 8, 9), (2, 1, 1, 9)),
    **dict.fromkeys(("sink", "key_lengths", "latent", "mappable"), (True, False, 1, 0, None, "yes")),
    "dropout": (0, 0.5, 1, 1.0, 1.0000001, -0.1, float("nan"), "x", True, 2**-33, 1 - 2**-33),
    "ragged": ((5, 6), (0, 0), (2**31 - 1, 1), (2**31, 1), (-1, 2), (1,), (1, 2, 3)),
    "lengths": (((7, 9), (1, 0)), ((0, 0),), ((-1, 2),), ((1, 2, 3),), (), ((2**29, 1),), ((2**29 + 1, 1),)),
    "v_dtype": ("", "float16", "float8_e5m2", "float32"),
    "out_dtype": ("", "float16", "float8_e5m2", "float32", "bfloat16"),
    "descale": ((), (1.0, 1.0, 1.0), (1.0,), ((2, 2), 1.0, 1.0), (0.0, 1.0, 1.0), (1e39, 1.0, 1.0),
                ((2, 4), (1, 2), (2, 2))),
}  # fmt: skip


def test_stored_limits() -> None:
    """Which values of each field are accepted, as what, and the messages for others; also beside other options."""
    lines = []
    bases = (P, dataclasses.replace(P, dtype="float8_e4m3"), dataclasses.replace(P, bias=(1, 1, 7, 9)),
             dataclasses.replace(P, lengths=((7, 9), (3, 2)), window=(1, 2)))  # fmt: skip
    for name, values in TRIED_VALUES.items():
        for n, (base, value) in enumerate(itertools.product(bases, values)):
            try:
                shown = repr(getattr(dataclasses.replace(base, **{name: value}), name))
            except Exception as error:
                shown = f"{type(error).__name__}: {error}"
            lines.append(f"{name}={value!r} {n // len(values)}: {shown}")
    messages = {line.partition("=")[0]: line for line in lines if " 0: SpecError" in line}
    check_stored("limits.txt", [*messages.values(), digest(lines)])


# ---- Tile


def test_a_tile_is_a_mapping_and_attributes() -> None:
    tile = Tile(BLOCK_M=64, BLOCK_N=32)
    assert (tile.BLOCK_M, tile["BLOCK_N"], len(tile), dict(tile)) == (64, 32, 2, {"BLOCK_M": 64, "BLOCK_N": 32})
    assert (str(tile), repr(tile)) == ("BLOCK_M=64,BLOCK_N=32", "Tile(BLOCK_M=64,BLOCK_N=32)")
    with pytest.raises(AttributeError, match="tile has no STAGES: it has BLOCK_M, BLOCK_N"):
        _ = tile.STAGES
    with pytest.raises(KeyError):
        tile["STAGES"]


def test_a_tile_is_immutable() -> None:
    tile = Tile(BLOCK_M=64)
    with pytest.raises(AttributeError, match="a tile is immutable: make a new one to change BLOCK_M"):
        tile.BLOCK_M = 32
    with pytest.raises(TypeError):
        tile["BLOCK_M"] = 32  # type: ignore[index]
    dict(tile).clear()
    assert tile.BLOCK_M == 64


def test_tiles_compare_and_hash_by_their_numbers() -> None:
    a, b = Tile(BLOCK_M=64, BLOCK_N=32), Tile(BLOCK_N=32, BLOCK_M=64)
    assert a == b
    assert hash(a) == hash(b)
    assert len({a, b, Tile(BLOCK_M=64, BLOCK_N=16), Tile(BLOCK_M=64)}) == 3


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda tile: pickle.loads(pickle.dumps(tile))])
def test_tiles_travel(duplicate) -> None:
    tile = Tile(BLOCK_M=64, BLOCK_N=32)
    assert duplicate(tile) == tile
    assert str(duplicate(tile)) == str(tile)


@pytest.mark.parametrize("text", ["BLOCK_M=64,BLOCK_N=32", " BLOCK_M=64 , BLOCK_N=32,", "BLOCK_M=64 BLOCK_N=32"])
def test_parse(text: str) -> None:
    assert Tile.parse(text) == Tile(BLOCK_M=64, BLOCK_N=32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("64x32", "tile: '64x32' is not NAME=number, as in BLOCK_M=64,BLOCK_N=32"),
        ("BLOCK_M=", "tile: 'BLOCK_M=' is not NAME=number"),
        ("BLOCK_M=64,BLOCK_N=-1", "tile: 'BLOCK_N=-1' is not NAME=number"),
        ("BLOCK_M=6.4", "tile: 'BLOCK_M=6.4' is not"),
        ("BLOCK_M=²", "tile: 'BLOCK_M=²' is not"),
        ("BLOCK_M=0", "tile: BLOCK_M=0 must be an integer >= 1"),
        ("block_m=64", "tile: 'block_m' must be an upper-case identifier: it becomes a macro"),
        ("=64", "tile: '' must be an upper-case identifier"),
        ("BLOCK_M=64,BLOCK_M=32", "tile: BLOCK_M is set twice in 'BLOCK_M=64,BLOCK_M=32'"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with refuses(message):
        Tile.parse(text)


@pytest.mark.parametrize("value", [0, -64, 64.0, "64", None, True])
def test_a_tile_that_makes_no_sense(value: object) -> None:
    with refuses(f"tile: BLOCK_M={value!r} must be an integer >= 1"):
        Tile(BLOCK_M=value)


# ---- Kernel

FIELDS = {
    "name": "fwd_x", "computes": "forward", "rung": 1, "summary": "", "dtypes": ("float16", "bfloat16"),
    "min_arch": (8, 0),
    "tiles": (Tile(BLOCK_M=64, BLOCK_N=32), Tile(BLOCK_M=32, BLOCK_N=32)), "grid": lambda p, t: (1, 1, 1),
    "block": lambda t: (t.BLOCK_M, 1, 1), "smem_bytes": lambda p, t: 4 * p.D * t.BLOCK_M, "max_D": 128,
    "args": ("Q", "K", "V", "O", "LSE"),
    "supports": lambda p, arch: "no broadcast over B" if p.B > 4 else None,
    "check_tile": lambda p, t, arch: f"BLOCK_N={t.BLOCK_N} must be even" if t.BLOCK_N % 2 else None,
}  # fmt: skip
KERNEL = Kernel(**FIELDS)
LATER = {
    "name": "fwd_x_dq", "grid": lambda p, t: (1, 1, 1), "block": lambda t: (32, 1, 1),
    "smem_bytes": lambda p, t: 4 * t.BLOCK_N, "args": ("dQ",),
}  # fmt: skip


@pytest.mark.parametrize("name", ["bwd_wgmma_head", "bwd_wgmma_persistent"])
def test_kernels_with_one_tile(name: str) -> None:
    """Its BLOCKS are free, if it has them."""
    kernel, problem = registry.get(name), Problem(1, 2, 256, 256, 64)
    numbers = dict(kernel.tiles[0]) | ({"BLOCKS": 7} if "BLOCKS" in kernel.tiles[0] else {})
    assert kernel.why_tile_unsupported(problem, Tile(**numbers)) is None
    assert kernel.why_tile_unsupported(problem, Tile(**numbers | {"STAGES": 3})) == (
        f"{name}: BLOCK_M=128,BLOCK_N=128,STAGES=3 is not supported: the kernel is written for one tile "
        "(use BLOCK_M=128,BLOCK_N=128,STAGES=2)"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "fwd-x"}, "kernel name 'fwd-x' must be an identifier: it is the .cu entry point"),
        ({"computes": "fwd"}, "fwd_x: computes='fwd' must be one of block_map, forward, preprocess, backward"),
        ({"args": ("Q", "K", "V", "O")}, "fwd_x: args must include LSE: every forward kernel has them"),
        ({"dtypes": ()}, "fwd_x: a kernel needs at least one dtype"),
        ({"dtypes": ("float16", "half")}, "fwd_x: dtype 'half' is not one of float32, float16, bfloat16"),
        ({"tiles": ()}, "fwd_x: a kernel needs at least one tile"),
        (
            {"tiles": Tile(BLOCK_M=64)},  # (Tile(BLOCK_M=64)), without a comma
            "fwd_x: tiles=Tile(BLOCK_M=64) must be a tuple: one tile is (Tile(…),), with a comma",
        ),
        (
            {"computes": "backward", "then": (Entry(**{**LATER, "args": ("dQ", "dK")}),)},
            "fwd_x: args must include dO, delta, dV: every backward kernel has them",
        ),
        (
            {"then": (Entry(**{**LATER, "name": "fwd_y"}),)},
            "fwd_x: entry point 'fwd_y' in `then` must begin with fwd_x_",
        ),
        (
            {"tiles": (Tile(BLOCK_M=64), Tile(BLOCK_N=64))},
            "fwd_x: tile BLOCK_N=64 must name the same numbers as BLOCK_M=64",
        ),
        ({"space": {"BLOCK_M": (64,)}}, "fwd_x: space must name BLOCK_M, BLOCK_N, not BLOCK_M"),
        ({"invariant_to": ("runs", "moon")}, "fwd_x: invariant_to: 'moon' is not one of runs, entries, batch,"),
    ],
)
def test_a_spec_that_contradicts_itself(values: dict, message: str) -> None:
    with refuses(message):
        Kernel(**{**FIELDS, **values})


@pytest.mark.parametrize(
    ("values", "arch", "message"),
    [
        (
            {"dtype": "float32"},
            None,
            "fwd_x: dtype float32 is not supported: it must be float16 or bfloat16 (convert the tensors)",
        ),
        ({"D": 129, "Sq": 1}, None, "fwd_x: D=129 is not supported: head dimensions are at most 128"),
        (
            {"D": 300, "Sq": 1},
            None,
            (
                "fwd_x: D=300 is not supported: head dimensions are at most 128 (latent attention, v=k[..., :Dv], has "
                "another kernel, with D <= 576)"
            ),
        ),
        ({}, (7, 5), "fwd_x: compute capability 7.5 is not supported: the kernel needs 8.0 or later"),
        ({"B": 5}, (9, 0), "fwd_x: no broadcast over B"),
    ],
)
def test_refusals_of_a_problem(values: dict, arch, message: str) -> None:
    assert KERNEL.why_unsupported(dataclasses.replace(P, **values), arch) == message


def test_no_kernel_supports_latent_attention_in_float32() -> None:
    wide = Problem(1, 1, 4, 4, 300, dtype="float32")
    refused = registry.get("fwd_minimal").why_unsupported(wide)
    assert refused == "fwd_minimal: D=300 is not supported: head dimensions are at most 256"


def test_refusals_by_a_kernel_of_one_architecture() -> None:
    of_one = dataclasses.replace(KERNEL, min_arch=(9, 0), arch_suffix="a")
    assert of_one.why_unsupported(P, (8, 0)) == (
        "fwd_x: compute capability 8.0 is not supported: the kernel runs on 9.0 only"
    )


def test_refusals_of_keys_that_are_forward_only() -> None:
    backward = registry.get("bwd_mma")
    of = partial(Problem, 1, 2, 4, 32, 64, dtype="float16")
    paged, of_8_bits = of(page_size=16), of(kv_dtype="float8_e4m3")
    said = "bwd_mma: paged keys are not supported: they are forward only (gather the pages into contiguous k and v)"
    assert backward.why_unsupported(paged) == said
    assert backward.why_unsupported(of_8_bits) == (
        "bwd_mma: float8_e4m3 keys with float16 queries are not supported: they are forward only (convert k and v to "
        "float16)"
    )


def test_refusals_of_a_width_with_options() -> None:
    alibi = Problem(1, 2, 4, 32, 192, dtype="float8_e4m3", alibi=(2,))
    said = registry.get("fwd_mma_fp8").why_unsupported(alibi, (9, 0))
    assert said.startswith("fwd_mma_fp8: D=192, Dv=192 with alibi is not supported: with options")
    assert "the limit is 128" in said


def test_what_it_takes() -> None:
    for arch in (None, (8, 0), (12, 1)):
        assert KERNEL.why_unsupported(dataclasses.replace(P, D=128), arch) is None


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (Tile(BLOCK_M=64), "fwd_x: tile BLOCK_M=64 lacks BLOCK_N: set all numbers, such as BLOCK_M="),
        (Tile(BLOCK_M=64, BLOCK_N=32, STAGES=2), "BLOCK_N=32,STAGES=2 has unknown STAGES: set all"),
        (Tile(BLOCK_M=64, STAGES=2), "STAGES=2 lacks BLOCK_N and has unknown STAGES: set all numbers"),
        (Tile(), "fwd_x: tile (empty) lacks BLOCK_M, BLOCK_N: set all numbers"),
        (Tile(BLOCK_M=64, BLOCK_N=33), "fwd_x: BLOCK_N=33 must be even"),
    ],
)
def test_refusals_of_a_tile(tile: Tile, message: str) -> None:
    assert message in (KERNEL.why_tile_unsupported(P, tile) or "")


def test_the_numbers_of_an_invariant_tile() -> None:
    kernel = dataclasses.replace(KERNEL, invariant_tile=lambda p: {"BLOCK_N": 32})
    invariant = dataclasses.replace(P, invariant=True)
    for problem, number in ((invariant, 32), (P, 64)):
        assert kernel.why_tile_unsupported(problem, Tile(BLOCK_M=64, BLOCK_N=number)) is None
    assert kernel.why_tile_unsupported(invariant, Tile(BLOCK_M=64, BLOCK_N=64)) == (
        "fwd_x: BLOCK_N=64 is not supported with invariant=True: it must be 32, because the bits of a row depend on it"
    )
    assert kernel.why_unsupported(invariant) is None
    assert KERNEL.why_unsupported(invariant) == (
        "fwd_x: invariant=True is not supported: the bits of a row depend on the rest of the problem"
    )


def test_what_may_change_without_changing_bits() -> None:
    """Of the names in INVARIANCES those that apply to a kernel."""
    always = ("runs", "entries", "batch", "heads", "strides")
    assert {*KERNEL.invariances} == {*always, "queries", "allocation"}
    more = dataclasses.replace(
        KERNEL, ragged=True, paged=True, numbers={"splits": lambda p, t: 1}, tiles=(Tile(BLOCKS=1, CLUSTER=2),)
    )
    assert {*more.invariances} == {
        *always, "queries", "allocation", "pages", "page_size", "ragged", "SMs", "cluster", "splits"
    }  # fmt: skip
    assert {*registry.get("bwd_minimal").invariances} & {"queries", "allocation"} == set()
    assert registry.get("bwd_preprocess").invariances == registry.get("block_map").invariances == ()


def test_problems_for_a_kernel_of_latent_attention() -> None:
    latent = dataclasses.replace(KERNEL, latent=True, max_D=576, max_Dv=512)
    wide = Problem(1, 1, 4, 4, 576, dtype="float16")
    assert latent.adapted(wide) == dataclasses.replace(wide, latent=True, Dv=512)
    assert latent.adapted(dataclasses.replace(wide, Dv=64)) == dataclasses.replace(wide, latent=True, Dv=64)
    assert dataclasses.replace(latent, max_Dv=0).adapted(wide).Dv == 576
    for kernel, problem in ((KERNEL, wide), (latent, latent.adapted(wide)), (latent, dataclasses.replace(P, Dv=65))):
        assert kernel.adapted(problem) is problem
    assert latent.why_unsupported(wide) == (
        "fwd_x: only latent attention is supported: v must be the view k[..., :Dv] of k, not a copy or another view "
        "(pass v=k[..., :Dv])"
    )
    wider = dataclasses.replace(wide, latent=True, Dv=520)
    assert latent.why_unsupported(wider) == "fwd_x: Dv=520 is not supported: Dv is at most 512"
    assert latent.why_unsupported(latent.adapted(wide)) is None


def test_dtypes_of_tensors() -> None:
    """The macros of a kernel have those that differ from q's."""
    eight = Problem(1, 1, 4, 4, 64, dtype="float8_e4m3", v_dtype="float8_e5m2", out_dtype="float32")
    mixed = Problem(1, 1, 4, 4, 64, dtype="float16", kv_dtype="float8_e4m3", v_dtype="float8_e5m2")
    every = ("Q", "K", "V", "O", "dO", "dQ", "dK", "bias")
    assert [eight.dtype_of(name) for name in every] == [
        "float8_e4m3", "float8_e4m3", "float8_e5m2", "float32", "float32", "float8_e4m3", "float8_e4m3", "float32"
    ]  # fmt: skip
    assert [mixed.dtype_of(name) for name in every] == [
        "float16", "float8_e4m3", "float8_e5m2", "float16", "float16", "float16", "float16", "float16"
    ]  # fmt: skip
    assert [P.dtype_of(name) for name in every] == ["float16"] * 8
    assert dataclasses.replace(eight, out_dtype="").dtype_of("O") == "bfloat16"
    kernel = dataclasses.replace(KERNEL, dtypes=("float16", "float8_e4m3"), float8_keys=True)
    of = {p: {n for n in kernel.defines(p, kernel.tiles[0]) if n.startswith("DTYPE")} for p in (eight, mixed, P)}
    assert of == {
        eight: {"DTYPE_float8_e4m3", "DTYPE_V_float8_e5m2", "DTYPE_O_float32"},
        mixed: {"DTYPE_float16", "DTYPE_K_float8_e4m3", "DTYPE_V_float8_e5m2"},
        P: {"DTYPE_float16"},
    }


@pytest.mark.parametrize(
    ("problem", "arch", "message"),
    [
        ({"dtype": "float8_e4m3"}, (8, 0), "8.0: it needs 8.9 or later (convert q, k and v to bfloat16 and multiply "),
        ({"kv_dtype": "float8_e4m3"}, (8, 6), "8.6: it needs 8.9 or later (convert k and v to bfloat16 and multiply "),
        ({"dtype": "float8_e4m3"}, (8, 9), None),
        ({"kv_dtype": "float8_e4m3"}, None, None),
        ({"D": 256}, None, "fwd_x: D=256 is not supported: head dimensions are at most 128"),
        ({"D": 257}, (9, 0), "at most 128 (latent attention, v=k[..., :Dv], has another kernel, with D <= 576)"),
        ({"D": 257}, (8, 0), "fwd_x: D=257 is not supported: head dimensions are at most 128"),
        ({"D": 257, "dtype": "float8_e4m3"}, (9, 0), "fwd_x: D=257 is not supported: head dimensions are at most 128"),
        ({"D": 64, "Dv": 129}, None, "fwd_x: Dv=129 is not supported: head dimensions are at most 128"),
        ({"ragged": (9, 9)}, None, "fwd_x: ragged batches are not supported: all batch entries must have the same Sq"),
        ({"page_size": 8, "Sk": 8}, None, "the kernel reads no block table (gather the pages into contiguous k and v)"),
    ],
    ids=str,
)
def test_more_refusals_of_a_problem(problem: dict, arch: tuple[int, int] | None, message: str | None) -> None:
    kernel = dataclasses.replace(KERNEL, dtypes=("float16", "float8_e4m3"), float8_keys=True)
    said = kernel.why_unsupported(
        Problem(**{"B": 1, "H": 1, "Sq": 4, "Sk": 4, "D": 64, "dtype": "float16", **problem}), arch
    )
    if message and message.startswith("fwd_x: D"):
        assert said == message
    else:
        assert said is None if message is None else message in (said or "")


def test_defines() -> None:
    assert KERNEL.why_tile_unsupported(P, KERNEL.tiles[0]) is None
    assert KERNEL.defines(P, KERNEL.tiles[0]) == {
        "BLOCK_M": 64, "BLOCK_N": 32, "HEAD_DIM": 64, "SMEM_BYTES": 4 * 64 * 64, "CAUSAL": 1, "DTYPE_float16": 1,
    }  # fmt: skip
    plain = Problem(1, 1, 1, 1, 32, dtype="bfloat16")
    assert KERNEL.defines(plain, KERNEL.tiles[1])["CAUSAL"] == 0
    assert "DTYPE_bfloat16" in KERNEL.defines(plain, KERNEL.tiles[1])


def test_a_kernel_of_several_entries() -> None:
    """One set of macros for all, each entry's shared memory among them."""
    kernel = Kernel(**{**FIELDS, "then": (Entry(**LATER),)})
    assert [entry.name for entry in kernel.entries] == ["fwd_x", "fwd_x_dq"]
    assert [kernel.entry(entry.name) for entry in kernel.entries] == [*kernel.entries]
    with pytest.raises(UnknownKernel, match="fwd_x has no entry point fwd_y: it has fwd_x, fwd_x_dq"):
        kernel.entry("fwd_y")
    defines = kernel.defines(P, kernel.tiles[0])
    assert (defines["SMEM_BYTES"], defines["SMEM_BYTES_DQ"]) == (4 * 64 * 64, 4 * 32)


# ---- what a score is beyond scale and causal

FULL = {
    "Dv": 32, "window": (5, None), "softcap": 30.0, "alibi": (4,), "bias": (1, 4, 7, 9), "bias_dtype": "float32",
    "mask": (2, 1, 1, 9), "sink": True, "key_lengths": True,
    "score": Score("x - slope(h) * (i - j)", mask="j <= i", tensors={"slope": np.zeros(4, np.float32)}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FULL.keys() - {"bias_dtype"}))
def test_each_option_is_part_of_a_problem(name: str) -> None:
    p = dataclasses.replace(P, **{name: FULL[name]})
    assert p != P
    assert not p.plain
    assert str(p) != str(P)
    assert str(p).startswith("B2 H4/2 S7x9 D64")
    assert set(p.as_json()) - set(P.as_json()) == {name}
    again = Problem.from_json(json.loads(json.dumps(p.as_json())))
    assert again == p
    assert hash(again) == hash(p)
    assert again.as_json() == p.as_json()
    assert str(again) == str(p)
    assert pickle.loads(pickle.dumps(p)) == p


def test_a_new_row_is_shown() -> None:
    """Flags, texts, cases and Problem.options follow from the row alone, in the order of the table after `_FIRST`."""
    new, n = options.Option(name="new"), len(options._FIRST)
    assert options.shown((new, *options.OPTIONS)) == (*options.SHOWN[:n], new, *options.SHOWN[n:])


def test_a_plain_problem_is_stored_as_ever() -> None:
    assert P.plain
    assert str(P) == "B2 H4/2 S7x9 D64 float16 causal"
    assert P.as_json() == {
        "B": 2, "H": 4, "Sq": 7, "Sk": 9, "D": 64, "Hk": 2, "dtype": "float16", "causal": "bottom-right",
        "scale": 0.125, "alignment": 16, "mappable": True,
    }  # fmt: skip


def test_all_of_them_together() -> None:
    p = dataclasses.replace(P, **FULL)
    assert Problem.from_json(json.loads(json.dumps(p.as_json()))) == p
    assert str(p) == (
        "B2 H4/2 S7x9 D64/32 float16 causal window=5,none softcap=30 alibi=4 bias=1,4,7,9:float32 mask=2,1,1,9 sink "
        "key_lengths score=(x - slope(h) * (i - j); mask j <= i)"
    )
    options = {**FULL, "bias": "1,H,Sq,Sk", "mask": "B,1,1,S", "alibi": True}
    del options["Dv"]
    assert Problem.from_shape("2,4/2,7,9,64/32", dtype="float16", causal=True, **options) == p


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 5}, "window=5 must be (left, right)"),
        (
            {"window": (1, -1)},
            "window=(1, -1) must be (left, right), the keys visible to either side: each an integer >= 0",
        ),
        ({"softcap": -1.0}, "softcap=-1.0 must be positive"),
        ({"softcap": float("inf")}, "softcap=inf must be finite"),
        ({"softcap": float("nan")}, "softcap=nan must be finite"),
        ({"softcap": 1e39}, "softcap=1e+39 is not supported: kernels compute in float32, whose largest number is"),
        ({"softcap": 1e38}, "softcap=1e+38 is not supported: kernels divide by it in float32"),
        ({"softcap": 1e-38}, "softcap=1e-38 is not supported: kernels divide by it in float32"),
        ({"softcap": 1e-30, "scale": 1e10}, "softcap=1e-30 with a scale of 10000000000.0 is not supported"),
        ({"softcap": 1e30, "scale": 1e-10}, "softcap=1e+30 with a scale of 1e-10 is not supported"),
        ({"scale": 1e39}, "scale=1e+39 is not supported: kernels compute in float32, whose largest number is 3.4e38"),
        ({"scale": -1e39}, "scale=-1e+39 is not supported"),
        ({"scale": 10**400}, "must be a number"),
        ({"scale": float("-inf")}, "scale=-inf must be finite"),
        ({"dropout": float("nan")}, "dropout=nan must be finite"),
        ({"dropout": -0.1}, "dropout=-0.1 must be a probability"),
        ({"dropout": 1.5}, "dropout=1.5 must be a probability"),
        ({"dtype": "float8_e5m2", "descale": (1.0, 1e39, 1.0)}, "descale of k=1e+39 is not supported"),
        ({"dtype": "float8_e5m2", "descale": (1.0, 1.0, float("nan"))}, "descale of v=nan must be finite"),
        ({"dtype": "float8_e5m2", "descale": (1e20, 1e20, 1.0)}, "times the descale of q and k, 1.25e+39, is not"),
        ({"alibi": (2,)}, "alibi has shape (2,): it must be (H,) = (4,) or (B, H) = (2, 4)"),
        (
            {"bias": (7, 9)},
            "bias has shape (7, 9): it must have four dimensions and broadcast to (B, H, Sq, Sk) = (2,",
        ),
        ({"mask": (1, 1, 1, 7)}, "mask has shape (1, 1, 1, 7): it must have four dimensions"),
        ({"bias": (1, 1, 7, 9), "bias_dtype": "bfloat16"}, "bias_dtype='bfloat16' needs a bias and must be"),
        ({"bias_dtype": "float32"}, "bias_dtype='float32' needs a bias"),
        ({"sink": 1.0}, "sink=1.0 must be True or False"),
        ({"score": "x"}, "score='x' must be a sandbox.Score"),
        ({"Dv": -1}, "Dv=-1 must be an integer >= 0"),
    ],
)
def test_an_option_that_makes_no_sense(values: dict, message: str) -> None:
    with refuses(message):
        dataclasses.replace(P, **values)


def test_the_largest_numbers_of_float32() -> None:
    """What rounds to its largest finite number is taken."""
    largest = float(np.finfo(np.float32).max)
    assert dataclasses.replace(P, scale=largest).scale == largest
    assert dataclasses.replace(P, scale=3.4028235677973362e38)
    with np.errstate(over="ignore"), refuses("is not supported"):
        assert np.isinf(np.float32(3.4028235677973366e38))
        dataclasses.replace(P, scale=3.4028235677973366e38)
    for softcap in (2.0**-126, 2.0**126):
        assert dataclasses.replace(P, softcap=softcap, scale=softcap).softcap == softcap


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score": ""}, "Score: score='' must be an expression"),
        ({"mask": None}, "Score: mask=None must be an expression"),
        ({"tensors": {"x": np.zeros(1)}}, "Score: a tensor cannot be called 'x'"),
        ({"tensors": {"export": np.zeros(1)}}, "Score: a tensor cannot be called 'export'"),
        ({"tensors": {"xor_eq": np.zeros(1)}}, "Score: a tensor cannot be called 'xor_eq'"),
        ({"tensors": {"a": np.zeros(1)}}, "Score: tensor a is float64: it must be one of float32, float16"),
        ({"tensors": {"a": np.zeros((1,) * 5, np.float32)}}, "Score: tensor a has shape (1, 1, 1, 1, 1)"),
        ({"tensors": {"a": 1.0}}, "Score: tensor a is of type float, not an array: pass a NumPy"),
        ({"tensors": {"a": np.zeros((), np.float32)}}, "Score: tensor a has no dimension: reshape it to (1,)"),
        ({"score": "x + '\udc80'"}, "must not contain NUL or surrogate"),
        ({"mask": "j <= i\0 + 1"}, "Score: mask='j <= i\\x00 + 1' must not contain NUL"),
    ],
)
def test_a_score_that_makes_no_sense(fields: dict, message: str) -> None:
    with refuses(message):
        Score(**fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x + j//2", "contains //, which begins a comment in C++: leave comments out; / of integers rounds toward"),
        ("x\n - j  // c\n + 1", "contains //, which"),
        ("x /* c */", "contains /*, which begins a comment"),
        ("j = i", "contains the assignment =: write == to compare, or only the new value, without x ="),
        ("where(j = i, x, 0)", "contains the assignment =:"),
        ("x <<= 3", "contains the assignment <<=: write only the new value, without x <<="),
        ("x) * (2", "has a ) that closes nothing"),
        ("j <= i) || (true", "has a ) that closes nothing"),
        ("t[i)", "has a ) that closes nothing"),
        ("abs(x\n - (i)", "has a ( that is not closed"),
        ("0 <= j <= i", "chains comparisons: C++ compares the result of one, true or false, by the other: join "),
        ("0 <= j < i", "chains comparisons: "),
        ("0 <\n j\n < i", "chains comparisons"),
        ("i < j == h", "chains comparisons"),
        ("h || t(0 < j < i)", "chains comparisons"),
        ("j <= i and 1 < j < 2", "chains comparisons"),
        ("i ? true : 0 < j < 1", "chains comparisons"),
        ("not i == j", "negates only the left side of ==: put the comparison in parentheses"),
        ("(not i == j) and i < j", "negates only the left side of ==: put the comparison in parentheses"),
        ("j < (not i == h)", "negates only the left side of ==: put the comparison in parentheses"),
        ("j < not i == h", "chains comparisons"),
        ("i not_eq j < h", "chains comparisons"),
    ],
)  # fmt: skip
def test_an_expression_that_means_something_else(text: str, message: str) -> None:
    """It would compile, and the reference would compute the same wrong values."""
    for name in ("score", "mask"):
        with refuses(f"Score: {name}={text!r} {message}"):
            Score(**{name: text})


@pytest.mark.parametrize(
    "text",
    [
        "(0 < i) == (j < 3)", "((i < j) < h)", "i << 2 < j", "i >> 1 == j >> 1", "i < j and j < 3 or i == 3 xor j < 4",
        "j <= i & i < 3", "i <= j ? true : j == 3", "i < j, j < i", "i == -1 || j >= -1", "not (i == j)", "!t(i) == j",
        "(not (i > j)) == 1",
        "not t(i) && i == j", "static_cast<float>(i) < j", "min<int>(i, j) > 3", "(i > j) < t(3)",
        "\"(//=<<\"[h] < j", "')' < 1'000'000", "[&] { int n = 0; while (n < i) n += (i < j) < h; return n; }() < 3",
    ],
)  # fmt: skip
def test_an_expression_that_means_what_it_says(text: str) -> None:
    assert Score(text, text).mask == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "x"), ({"score": " x + 1 "}, "x + 1"), ({"mask": "j <= i"}, "mask j <= i"),
        ({"score": "x + 1", "mask": "j <= i"}, "x + 1; mask j <= i"),
    ],
)  # fmt: skip
def test_a_score_as_text(fields: dict, text: str) -> None:
    score = Score(**fields)
    assert str(score) == text
    assert (score.changes, score.hides) == ("score" in fields, "mask" in fields)


def test_a_score_has_the_sizes_of_its_block_map() -> None:
    """Those that were remembered for the very array, unless they are passed."""
    blocks, sizes = np.zeros((1, 1, 1, 8), np.int32), (1, 2, 3, 4)
    block_map.remember(blocks, sizes)
    assert Score(mask="j <= i").made_for is None
    score = Score(mask="j <= i").with_blocks(blocks)
    assert (score.made_for, score.described.made_for, score.arrays) == (sizes, sizes, {"score.block-map": blocks})
    assert copy.copy(score).made_for == sizes
    assert score.with_blocks(blocks.copy()).made_for is None
    assert score != Score(mask="j <= i")
    assert Score(mask="j <= i", blocks=blocks, made_for=(5, 6, 7, 8)).made_for == (5, 6, 7, 8)


def test_the_limits_of_a_score() -> None:
    """Four dimensions; characters that can be encoded."""
    tensor = np.zeros((1, 1, 1, 1), np.float32)
    assert Score("x + t(0, 0, 0, 0)", tensors={"t": tensor}).structure[2] == (("t", ((1, 1, 1, 1), "float32")),)
    for character in ("\ud7ff", "\ue000", "\1"):
        assert Score(mask=f"j <= '{character}'").hides
    for character in ("\ud800", "\udfff"):
        with refuses("must not contain NUL or surrogate characters"):
            Score(mask=f"j <= '{character}'")
    for name in (1, "1a", "a-b"):
        with refuses(f"Score: a tensor cannot be called {name!r}: use an identifier"):
            Score(tensors={name: tensor})


def test_a_score_is_a_value() -> None:
    """Equal scores have one hash, because plans are found by them: so its fields cannot be changed."""
    tensors = {"slope": np.zeros(4, np.float32)}
    score = Score("x - slope(h)", "j <= i", tensors)
    tensors["other"] = tensors["slope"]
    assert [*score.tensors] == ["slope"]
    same = copy.deepcopy(score)
    assert (same, hash(same), repr(same)) == (score, hash(score), repr(score))
    with pytest.raises(AttributeError, match=r"Score\.mask cannot be changed"):
        score.mask = "true"


@pytest.mark.parametrize("window", [(None, None), (0, 0), (2, None), (None, 3), (1, 4)])
@pytest.mark.parametrize("causal", [False, "bottom-right", "top-left"])
@pytest.mark.parametrize(("Sq", "Sk"), [(5, 9), (9, 5), (4, 4), (0, 3), (3, 0)])
def test_pairs_in_a_window_by_brute_force(window, causal, Sq: int, Sk: int) -> None:
    p = Problem(1, 1, Sq, Sk, 8, causal=causal, window=window)
    shift, (left, right) = 0 if causal == "top-left" else Sk - Sq, window

    def sees(i: int, j: int) -> bool:
        own = i + shift
        return (not causal or j <= own) and (left is None or own - left <= j) and (right is None or j <= own + right)

    assert p.visible_pairs == sum(sees(i, j) for i in range(Sq) for j in range(Sk))
    if window != (None, None):
        assert p.flops == 4 * p.visible_pairs * 8
        assert p.flops_of("backward") * 2 == p.flops * 5


def test_a_stored_score_names_a_file_of_the_project_by_its_place_in_it() -> None:
    within, elsewhere = ROOT / "sandbox/bench/documents.py", "/somewhere/else.py"
    row = Score("x + 1", file=str(within)).as_json()
    assert row["file"] == "sandbox/bench/documents.py"
    assert Score.from_json(row).file == str(within)
    for file in (elsewhere, ""):
        assert Score.from_json(Score("x + 1", file=file).as_json()).file == file


def test_one_entry_with_a_size_has_one_head() -> None:
    problem = Problem(2, 8, 70, 90, 64, Hk=2, mask=(2, 8, 70, 90), key_lengths=True)
    one = problem.one_entry(16)
    assert (one.B, one.H, one.Hk, one.Sq, one.Sk, one.mask, one.key_lengths) == (1, 1, 1, 16, 16, (1, 1, 1, 1), False)
