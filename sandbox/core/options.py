"""The options of a problem, one row each: everything about an option except its arithmetic.

Score options (VOCABULARY.md), and those for ragged batches, pages, float8 and `invariant`; also `seed` and `block_map`,
which belong to dropout and masks. The arithmetic is in kernels_cu/include/score_mod.cuh and mask.cuh, and in
sandbox/reference/score.py. Macros and the fields of the kernel argument `score` follow from the table: an option that
is not used has neither. `Score` of score.cuh declares the fields in the same order.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .block_map import has_element_bits
from .dtypes import described_descale
from .errors import SpecError
from .normalise import FLOAT32_NORMAL, FLOAT32_OVERFLOW, Window, normalise_window, number
from .score import Score

if TYPE_CHECKING:
    from .problem import Problem

_POINTER, _STRIDE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

Sizes = tuple[int, int, int, int]  # B, H, Sq, Sk


class Number(NamedTuple):
    """A number in the kernel argument `score`. It is present if `present` returns True, by default if the option's
    macro is set."""

    name: str
    ctype: type
    value: Callable[[Problem], Any]
    present: Callable[[Problem], bool] | None = None


class ScoreTensor(NamedTuple):
    """A tensor in the argument `score`: its name, its shape, and the fields of its address and of its strides.

    The caller's tensor may lack leading dimensions of the shape: their strides are 0. If there are fewer stride fields
    than dimensions, the stride of the last dimension must be 1.
    """

    name: str
    shape: tuple[int, ...]
    pointer: str
    strides: tuple[str, ...]


class Array(NamedTuple):
    """The array that a caller passes for an option.

    `axes`: a letter for each dimension: b, h, i and j have the sizes B, H, Sq and Sk. If b is not the only letter, the
    array may lack it. `draw` returns the elements for test cases, from a NumPy generator;
    the caller converts their dtype.
    """

    axes: str
    draw: Callable[[Any, Problem], Any]
    dtype: str = ""  # "": that of out, or float32
    broadcast: bool = False  # True: dimensions may be 1, and leading ones missing
    shape_is_field: bool = True  # the Problem field is the array's shape; False: it is True if there is an array
    argument: str = ""  # its name in a spec's `args`, if it is not the option's

    def shapes(self, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
        """The shapes that it may have for these (B, H, Sq, Sk). `broadcast` also allows others."""
        known = dict(zip("bhij", sizes, strict=True))
        shape = tuple(known[axis] for axis in self.axes)
        return (shape[1:], shape) if len(shape) > 1 and self.axes[0] == "b" and not self.broadcast else (shape,)

    def accepts(self, shape: tuple[int, ...], sizes: Sizes) -> bool:
        """Whether an array may have this shape, with all dimensions of `axes` if it broadcasts."""
        return any(
            len(shape) == len(other)
            and all(n == most or (n == 1 and self.broadcast) for n, most in zip(shape, other, strict=True))
            for other in self.shapes(sizes)
        )

    def required(self, sizes: Sizes) -> str:
        """The text after "must" in a message: be one of `shapes`, or broadcast to it."""
        symbols = dict(zip("bhij", ("B", "H", "Sq", "Sk"), strict=True))
        texts = []
        for shape in self.shapes(sizes):
            named = tuple(symbols[axis] for axis in self.axes[-len(shape) :])
            texts.append(f"{named} = {shape}")
        return (f"broadcast to {texts[0]}" if self.broadcast else f"be {' or '.join(texts)}").replace("'", "")


class Option:
    """One row of the table. Not a dataclass, which would take 0.8 ms of `import sandbox`."""

    def __init__(
        self,
        *,
        name: str,  # of the keyword argument, and of the field of `Problem`
        macro: str = "",
        level: Callable[[Problem], int] = lambda p: 0,  # value of the macro; 0: not set
        numbers: tuple[Number, ...] = (),
        tensors: Callable[[Problem], Iterator[ScoreTensor]] | None = None,  # None: its `array`
        array: Array | None = None,
        # (name, value) -> the normalised value; raises SpecError. None: `array` describes the option, or other fields
        # of Problem determine it, or Problem validates it itself (ragged, page_size, kv_dtype, descale).
        check: Callable[[str, Any], Any] | None = None,
        gradient: bool = False,
        diagonal: bool = False,  # whether its effect on a score depends on Problem.diagonal
        same_for_group: bool = False,  # whether it depends neither on the query head nor on the query row
        flag: Mapping[str, Any] | None = None,  # arguments of click.option; None: no flag
        flag_name: str = "",  # if it is not `name`
        cases: Mapping[str, Callable[[Problem], dict[str, Any]]] | None = None,  # test cases of `check`
        timed: Callable[[Problem], tuple[dict[str, Any], ...]] = lambda p: (),  # options timed by `bench --grid scores`
        text: Callable[[Problem], str] = lambda p: "",  # in `Problem.variant`; "" if it is not used
    ):
        self.name, self.macro, self.level = name, macro, level
        self.numbers, self.tensors, self.array, self.check, self.gradient = numbers, tensors, array, check, gradient
        self.diagonal, self.same_for_group = diagonal, same_for_group
        self.flag, self.flag_name, self.cases, self.timed, self.text = flag or {}, flag_name, cases or {}, timed, text

    def tensors_of(self, p: Problem) -> Iterator[ScoreTensor]:
        """The tensors that a problem reads for this option."""
        if self.tensors:
            yield from self.tensors(p)
        elif self.array and (value := getattr(p, self.name)):
            axes, sizes = self.array.axes, dict(zip("bhij", (p.B, p.H, p.Sq, p.Sk), strict=True))
            shape = value if self.array.shape_is_field else tuple(sizes[axis] for axis in axes)
            shape = (*(1,) * (len(axes) - len(shape)), *shape)
            yield from _tensor(self.argument, shape, axes.removesuffix("j"))

    @property
    def argument(self) -> str:
        """The name of its array in a spec's `args`."""
        return (self.array.argument if self.array else "") or self.name


def _tensor(name: str, shape: tuple[int, ...], axes: str) -> Iterator[ScoreTensor]:
    if shape:
        yield ScoreTensor(name, shape, name, tuple(f"{name}_stride_{axis}" for axis in axes))


def _cu_seqlens(p: Problem) -> Iterator[ScoreTensor]:
    for name in ("cu_seqlens_q", "cu_seqlens_k")[: 1 if p.page_size else 2]:
        yield from _tensor(name, (p.B + 1,) if p.ragged else (), "b")


def _descales(p: Problem) -> Iterator[ScoreTensor]:
    for x, shape in zip("qkv", p.descale, strict=False):
        if isinstance(shape, tuple):
            yield from _tensor(f"descale_{x}", shape, "bh")


def _snippet_tensors(p: Problem) -> Iterator[ScoreTensor]:
    for name, like in p.score.structure[2] if p.score else ():
        strides = tuple(f"score_{name}_stride_{i}" for i in range(len(like.shape)))
        yield ScoreTensor(f"score.{name}", like.shape, f"score_{name}", strides)


def _window_level(p: Problem) -> int:
    """1 for a left bound, plus 2 for a right bound, unless causal, which has its own macro."""
    left, right = p.window
    return (left is not None) | (right is not None and not p.causal) << 1


def _same_for_every_key(shape: tuple[int, ...]) -> int:
    return 4 if shape[3] == 1 else 0


def _softcap_level(p: Problem) -> int:
    return 1 + 2 * (p.softcap > 5000) if p.softcap else 0  # above: BELOW_LARGE in score_mod.cuh is false


def _bias_level(p: Problem) -> int:
    """1, or 2 for float32 where out is not; plus 4 if all keys have the same, plus 8 if TMA can copy tiles of it."""
    return (2 if p.bias_dtype else 1) | _same_for_every_key(p.bias) | 8 * p.bias_tiles if p.bias else 0


def _descale_level(p: Problem) -> int:
    """The sum of 8 for float8 keys, and 1, 2, 4 if the descale of q, k, v is a tensor, not a number."""
    return sum(bit for bit, x in zip((1, 2, 4), p.descale, strict=False) if isinstance(x, tuple)) + 8 * p.float8_keys


def _snippet_level(p: Problem) -> int:
    if not p.score:
        return 0
    from .snippet import digest  # `import sandbox` does not need it

    return digest(p.score)


def _constant_descale(p: Problem) -> tuple[float, ...]:
    return tuple(x if isinstance(x, float) else 1.0 for x in p.descale or (1.0, 1.0, 1.0))


def _threshold(p: Problem) -> int:
    return round(p.dropout * 65536)


def _dropout_factor(p: Problem) -> float:
    return 0.0 if _threshold(p) > 0xFFFF else 1 / (1 - p.dropout)  # 0: every element is dropped


def _window(name: str, value: Any) -> Window:
    if type(value) in (tuple, list) and len(value) == 2:  # a fast path: what it is in most calls
        left, right = value
        if (left is None or type(left) is int) and (right is None or type(right) is int):
            return left, right  # Problem rejects negative ones
    return normalise_window(value)


def _softcap(name: str, value: Any) -> float:
    value = number(name, value or 0.0)
    if value < 0:
        raise SpecError(f"{name}={value!r} must be positive, or 0 for none")
    return value


def _dropout(name: str, value: Any) -> float:
    value = number(name, value or 0.0)
    if not 0 <= value <= 1:
        raise SpecError(f"{name}={value!r} must be a probability, 0 <= {name} <= 1")
    return value


def _drawn_mask(rng: Any, p: Problem) -> Any:
    """Hides some elements, and some rows and keys completely."""
    rows, keys = p.mask[2:]
    hidden = rng.random(p.mask) < 0.3
    return ~(hidden | (rng.random((rows, 1)) < 0.1 * (rows > 1)) | (rng.random(keys) < 0.1 * (keys > 1)))


def _drawn_lengths(rng: Any, p: Problem) -> Any:
    """With several batch entries, one has length 0. With pages and ragged queries: those of `Problem.lengths`."""
    lengths = rng.integers(0, p.Sk + 1, p.B)
    lengths[:1], lengths[1:2] = p.Sk - p.Sk // 4, 0
    if p.page_size and p.lengths:
        lengths[:] = [keys for _, keys in p.lengths]
    return lengths


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SpecError(f"{name}={value!r} must be True or False")
    return value


def _score(name: str, value: Any) -> Score | None:
    if value is not None and not isinstance(value, Score):
        raise SpecError(f'{name}={value!r} must be a sandbox.Score, such as sandbox.Score("x - 0.1f * abs(i - j)")')
    return value


def _shape_text(name: str) -> Callable[[Problem], str]:
    def text(p: Problem) -> str:
        dtype = f":{p.bias_dtype}" if name == "bias" and p.bias_dtype else ""
        return f"{name}={','.join(map(str, getattr(p, name)))}{dtype}" if getattr(p, name) else ""

    return text


def _lengths_text(p: Problem) -> str:
    if p.lengths:
        return "lengths=" + ",".join(str(q) if q == k else f"{q}x{k}" for q, k in p.lengths)
    return f"ragged={p.ragged[0]},{p.ragged[1]}" if p.ragged else ""


_BASE = (
    Number("Sq", _INT, lambda p: p.Sq),
    Number("Sk", _INT, lambda p: p.Sk),
    Number("diagonal", _INT, lambda p: p.diagonal),
    Number("scale", _FLOAT, lambda p: p.scale * _constant_descale(p)[0] * _constant_descale(p)[1]),
)

OPTIONS: tuple[Option, ...] = (
    Option(
        name="window", macro="WINDOW", level=_window_level, check=_window, diagonal=True,
        numbers=(
            Number("left", _INT, lambda p: p.bounds[0] or 0),
            Number("right", _INT, lambda p: p.bounds[1] or 0),
        ),
        flag={"metavar": "L,R", "help": "Window: keys visible to the left and right; none,0 has no bound on the left."},
        cases={
            "window": lambda p: {"window": (max(2, p.Sk // 3), max(1, p.Sk // 8))},
            "left window": lambda p: {"window": (max(2, p.Sk // 5), None)},
        },
        timed=lambda p: ({"window": (1024, 0), "causal": "bottom-right"},),
        text=lambda p: (
            "window=" + ",".join("none" if n is None else str(n) for n in p.window) if p.window != (None, None) else ""
        ),
    ),
    Option(
        name="softcap", macro="SOFTCAP", level=_softcap_level, check=_softcap, same_for_group=True,
        numbers=(Number("softcap", _FLOAT, lambda p: p.softcap),),
        flag={"type": float, "default": 0.0, "help": "Replace scores x by SOFTCAP * tanh(x / SOFTCAP). Default: off."},
        cases={"softcap": lambda p: {"softcap": 2.0}},
        timed=lambda p: ({"softcap": 50.0, "causal": "bottom-right"},),
        text=lambda p: f"softcap={p.softcap:g}" if p.softcap else "",
    ),
    Option(
        name="dropout", macro="DROPOUT", level=lambda p: p.dropout > 0, check=_dropout,
        numbers=(
            Number("dropout_threshold", ctypes.c_uint32, lambda p: min(_threshold(p), 0xFFFF) << 16),
            Number("dropout_factor", _FLOAT, _dropout_factor),
        ),
        flag={"type": float, "default": 0.0, "metavar": "P", "help": "Dropout probability. Default: 0."},
        cases={"dropout": lambda p: {"dropout": 0.3}, "all dropped": lambda p: {"dropout": 1.0}},
        text=lambda p: f"dropout={p.dropout:g}" if p.dropout else "",
    ),
    Option(
        name="ragged", macro="RAGGED", level=lambda p: bool(p.ragged), tensors=_cu_seqlens,
        numbers=(
            Number("bottom_right", _INT, lambda p: p.causal != "top-left", lambda p: p.key_lengths or bool(p.ragged)),
            Number("rows_q", _INT, lambda p: p.rows[0]),
            Number("rows_k", _INT, lambda p: p.rows[1], lambda p: bool(p.ragged and not p.page_size)),
            Number("sequences", _INT, lambda p: p.B),
        ),
        flag={
            "help": "Ragged batch: for each sequence its length, or QUERIESxKEYS; 64,128x256 is two sequences. --shape "
            "must still have all its numbers, but its B and S are ignored."
        },
        flag_name="lengths",
        text=_lengths_text,
    ),
    Option(
        name="key_lengths", macro="KEY_LENGTHS", level=lambda p: p.key_lengths, same_for_group=True,
        array=Array("b", _drawn_lengths, "int32", shape_is_field=False),
        flag={"is_flag": True, "help": "Random number of valid keys per batch entry."},
        cases={"key_lengths": lambda p: {"key_lengths": True}},
        timed=lambda p: ({"key_lengths": True},),
        text=lambda p: "key_lengths" if p.key_lengths else "",
    ),
    Option(
        name="page_size", macro="PAGE_SIZE", level=lambda p: p.page_size, same_for_group=True,
        numbers=(Number("pages", _INT, lambda p: p.pages),),
        tensors=lambda p: _tensor("block_table", (p.B, p.Sk // p.page_size) if p.page_size else (), "bi"),
        flag={
            "type": int, "default": 0, "metavar": "ROWS", "help": "Paged keys and values: keys per page. Default: none."
        },
        text=lambda p: f"page_size={p.page_size}" if p.page_size else "",
    ),
    Option(
        name="alibi", macro="ALIBI", level=lambda p: bool(p.alibi), diagonal=True,
        array=Array("bh", lambda rng, p: rng.uniform(0.05, 0.5, p.alibi), "float32", argument="slopes"),
        flag={"is_flag": True, "help": "Random ALiBi slopes, one per head."},
        cases={"alibi": lambda p: {"alibi": (p.B, p.H)}},
        timed=lambda p: ({"alibi": (p.H,), "causal": "bottom-right"},),
        text=_shape_text("alibi"),
    ),
    Option(
        name="bias", macro="BIAS", level=_bias_level, gradient=True,
        array=Array("bhij", lambda rng, p: rng.standard_normal(p.bias), broadcast=True),
        flag={
            "metavar": "SHAPE",
            "help": "Random bias of SHAPE: four numbers or names, such as 1,H,Sq,Sk or 1,1,512,512.",
        },
        cases={
            "bias": lambda p: {"bias": (1, p.H, p.Sq, p.Sk)},
            "row bias": lambda p: {"bias": (p.B, 1, 1, p.Sk), "bias_dtype": "float32"},
        },
        timed=lambda p: ({"bias": (1, 1, p.Sq, p.Sk)}, {"bias": (1, p.H, p.Sq, p.Sk)}),
        text=_shape_text("bias"),
    ),
    Option(
        name="mask", macro="MASK", level=lambda p: 1 | _same_for_every_key(p.mask) if p.mask else 0,
        array=Array("bhij", _drawn_mask, "bool", broadcast=True),
        flag={"metavar": "SHAPE", "help": "Random boolean mask of SHAPE: four numbers or names, such as B,1,1,Sk."},
        cases={
            "mask": lambda p: {"mask": (p.B, 1, p.Sq, p.Sk)},
            "padding": lambda p: {"mask": (p.B, 1, 1, p.Sk)},
        },
        timed=lambda p: ({"mask": (1, 1, p.Sq, p.Sk)}, {"mask": (p.B, 1, 1, p.Sk)}),
        text=_shape_text("mask"),
    ),
    Option(
        name="sink", macro="SINK", level=lambda p: p.sink, gradient=True,
        array=Array("h", lambda rng, p: rng.standard_normal(p.H), "float32", shape_is_field=False),
        flag={"is_flag": True, "help": "Random attention sink, one per head."},
        cases={"sink": lambda p: {"sink": True}},
        timed=lambda p: ({"sink": True, "causal": "bottom-right"},),
        text=lambda p: "sink" if p.sink else "",
    ),
    Option(
        name="seed", tensors=lambda p: _tensor("seed", (1,) if p.dropout else (), ""),
        array=Array("", lambda rng, p: rng.integers(-(2**63), 2**63, 1), "int64", shape_is_field=False),
    ),
    Option(
        name="kv_dtype",
        flag={"default": "", "metavar": "DTYPE", "help": "float8 dtype of k and v, with 16-bit q. Default: q's dtype."},
    ),
    Option(
        name="descale", macro="DESCALE", level=_descale_level, tensors=_descales,
        numbers=(
            Number("descale", _FLOAT, lambda p: _constant_descale(p)[2], lambda p: p.float8_keys),
            Number("group", _INT, lambda p: p.group, lambda p: p.float8_keys),
        ),
        text=lambda p: described_descale(p.descale) if p.descale else "",
    ),
    Option(
        name="block_map", macro="BLOCK_MAP",
        level=lambda p: (2 if has_element_bits(p) else 1) if p.has_block_map else 0,
        tensors=lambda p: _tensor("block_map", p.block_map if p.has_block_map else (), "bhi"),
    ),
    Option(
        name="invariant", macro="INVARIANT", level=lambda p: p.invariant, check=_flag, same_for_group=True,
        flag={
            "is_flag": True,
            "help": "Request invariant=True: the bits of a row of O depend only on its q, keys, values, and the "
            "options.",
        },
        text=lambda p: "invariant" if p.invariant else "",
    ),
    Option(
        name="score", macro="SCORE_SNIPPET", level=_snippet_level, check=_score,
        tensors=_snippet_tensors,
        flag={"metavar": "FILE.py", "help": "Python file that defines `score`, a sandbox.Score."},
        text=lambda p: f"score=({p.score})" if p.score else "",
    ),
)  # fmt: skip
BY_NAME = {option.name: option for option in OPTIONS}
ARRAYS = {option.name: option.array for option in OPTIONS if option.array}
# Options that read memory for each score: arrays whose elements depend on a query or a key, and a user's own tensors.
ELEMENTWISE = frozenset((*(name for name, array in ARRAYS.items() if {*array.axes} - {*"bh"}), "score"))
DIAGONAL = frozenset(option.name for option in OPTIONS if option.diagonal)
# With no other options, the query heads of a group can share a tile (packed GQA: `with_packed_heads` in api/plan.py for
# one query, packed_gqa.py for few).
SAME_FOR_GROUP = frozenset(option.name for option in OPTIONS if option.same_for_group)
BY_ARGUMENT = {BY_NAME[name].argument: array for name, array in ARRAYS.items()}  # by the name in a spec's `args`
_FIRST = (  # stored results have texts in this order
    "window", "softcap", "alibi", "bias", "mask", "sink", "key_lengths", "ragged", "page_size", "kv_dtype", "descale",
    "score", "dropout", "invariant",
)  # fmt: skip
_PARTS = frozenset(("seed", "block_map"))  # of dropout and of a mask: no fields of Problem


def shown(options: Iterable[Option]) -> tuple[Option, ...]:
    """The options in the order of texts, command-line flags and cases: those in `_FIRST`, then all others."""
    found = (option for option in options if option.name not in _PARTS)
    return tuple(sorted(found, key=lambda option: (*_FIRST, option.name).index(option.name)))


SHOWN = shown(OPTIONS)


def check_products(scale: float, softcap: float, descale: Sequence[float]) -> None:
    """Raises SpecError if scale * descale of q * descale of k overflows in float32; with a softcap, also if the
    softcap, its reciprocal, or this factor (unless 0) divided by softcap is not a normal number of float32."""
    factor = scale * math.prod(descale)
    if not abs(factor) < FLOAT32_OVERFLOW:
        raise SpecError(
            f"scale={scale!r} times the descale of q and k, {factor!r}, is not supported: kernels compute in float32, "
            "whose largest number is 3.4e38: pass a smaller scale or descale"
        )
    if not softcap:
        return
    if not FLOAT32_NORMAL <= softcap <= 1 / FLOAT32_NORMAL:
        raise SpecError(
            f"softcap={softcap!r} is not supported: kernels divide by it in float32, so it must be between 1.2e-38 "
            "and 8.5e37; pass 0 for no softcap"
        )
    if factor and not FLOAT32_NORMAL <= abs(factor) / softcap < FLOAT32_OVERFLOW:
        raise SpecError(
            f"softcap={softcap!r} with a scale of {factor!r} is not supported: kernels multiply by scale / softcap in "
            "float32, whose normal numbers are 1.2e-38 to 3.4e38 in magnitude; pass 0 for no softcap"
        )


def macros(problem: Problem) -> dict[str, int]:
    """The macros for the options of a problem, for Dv if it differs from D, and for `part`."""
    found = {option.macro: int(option.level(problem)) for option in OPTIONS if option.macro}
    used = {name: value for name, value in found.items() if value}
    if used:
        used["SCORE_BYTES"] = ctypes.sizeof(score_structure(problem))
    if problem.Dv != problem.D:
        used["HEAD_DIM_V"] = problem.Dv
    if problem.short or problem.part:
        used["SHORT_SEQUENCES" if problem.short else "LONG_SEQUENCES"] = problem.short_queries
    return used


def _numbers(problem: Problem) -> Iterator[Number]:
    yield from _BASE
    for option in OPTIONS:
        for one in option.numbers:
            if one.present(problem) if one.present else option.level(problem):
                yield one


def score_numbers(problem: Problem) -> dict[str, Any]:
    """The fields of the argument `score` that are numbers."""
    return {one.name: one.value(problem) for one in _numbers(problem)}


def score_tensors(problem: Problem) -> Iterator[ScoreTensor]:
    """The tensors in the argument `score`, in the order of their fields."""
    for option in OPTIONS:
        yield from option.tensors_of(problem)


def score_structure(problem: Problem) -> type[ctypes.Structure]:
    """`Score` of include/score.cuh, as it is compiled for this problem."""
    fields: list[tuple[str, type]] = [(one.name, one.ctype) for one in _numbers(problem)]
    for tensor in score_tensors(problem):
        fields += [(tensor.pointer, _POINTER), *((name, _STRIDE) for name in tensor.strides)]
    if problem.score and not problem.score.structure[2]:
        fields += [("snippet", _INT)]  # without tensors: an empty struct in C++ takes space, too
    return type("Score", (ctypes.Structure,), {"_fields_": fields})
