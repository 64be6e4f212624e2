"""Shapes, dtype and semantics of one attention call."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from . import block_map, dtypes, limits
from .dtypes import FLOAT8, Descale
from .errors import SpecError
from .normalise import Causal, Window, cdiv, integer, normalise_causal, normalise_window, number
from .options import ARRAYS, ELEMENTWISE, OPTIONS, SHOWN, check_products
from .score import Score


@dataclass(frozen=True)
class Problem:
    """Shapes, dtype and semantics of one attention call.

    q: (B, H, Sq, D); k: (B, Hk, Sk, D); v: (B, Hk, Sk, Dv); o: (B, H, Sq, Dv); query head h reads key/value head
    h // (H / Hk). `scale`: None means 1/sqrt(D). `alignment`: in bytes, at most 16, of the address of every row of q, k
    and v, and in a backward of do and o. `mappable`: a tensor map can describe their strides: positive, or 0 in B or H.
    `kv_dtype`: the float8 dtype of k and v if q has 16 bits. `v_dtype`: v's dtype if it is not the float8 of k.
    `out_dtype`: o's dtype; by default q's, for float8 bfloat16. `descale`: the factors by which q, k and v are
    multiplied if k is float8, each a number or the shape of a tensor that broadcasts to (B, heads); () if all are 1.

    Score options, off by default: `window`, `softcap`; the shapes of `alibi`'s slopes, (H,) or (B, H), and of `bias`
    and `mask`, (B, H, Sq, Sk) or 1 in any dimension; `sink`: whether there is one per head; `key_lengths`: whether each
    batch entry has its own number of valid keys, at most Sk; the user's own `score`; `dropout`: the probability that an
    element of P is dropped. A bias has o's dtype, or `bias_dtype`. A window bound above Sq + Sk is replaced by Sq + Sk,
    which hides nothing. Raises SpecError naming the invalid value, UnsupportedProblem for sizes above those in
    core/limits.py.

    A ragged batch: B sequences of at most Sq queries and Sk keys, one after the other in tensors of one batch entry,
    q (1, H, rows, D) and so on; `ragged` is (rows of q, rows of k). The offsets of the sequences are known only on the
    device, unless `lengths` has a pair (queries, keys) for each; B, Sq, Sk and `ragged` are then computed from it.

    A paged batch: keys are stored in pages of `page_size` rows, k (pages, Hk, page_size, D) and v the same; a block
    table of (B, Sk / page_size) page numbers selects them; `key_lengths` is set. `pages`: by default the size of the
    table. Its queries may be ragged: `ragged` is then (rows of q, 0), and the keys in `lengths` are the key lengths.

    `part`: two kernels share the sequences of a ragged batch over pages: "short" has those with at most `short_queries`
    queries, "long" the others.

    `latent`: v is a view of the first Dv columns of k (latent attention, as in DeepSeek's models), so that a kernel may
    read both at once.

    `invariant`: the bits of a row of O and LSE must depend only on its q, its keys and the options (docs/bits.md).
    """

    B: int
    H: int
    Sq: int
    Sk: int
    D: int
    Hk: int = 0  # 0: H
    dtype: str = "float32"
    causal: Causal = False
    scale: float = field(default=None)  # type: ignore[assignment]  # None: 1/sqrt(D)
    alignment: int = 16
    mappable: bool = True
    Dv: int = 0  # 0: D
    window: Window = (None, None)
    softcap: float = 0.0  # 0: none
    alibi: tuple[int, ...] = ()
    bias: tuple[int, ...] = ()
    bias_dtype: str = ""  # "": o's dtype; or "float32"
    bias_boxes: bool = True  # a tensor map can describe the bias: 16-byte alignment, strides as for `mappable`
    mask: tuple[int, ...] = ()
    sink: bool = False
    key_lengths: bool = False
    score: Score | None = None
    dropout: float = 0.0  # an argument of the kernel, not compiled in
    ragged: tuple[int, ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()
    kv_dtype: str = ""  # "": q's
    v_dtype: str = ""  # "": k's
    out_dtype: str = ""  # "": q's, of float8 bfloat16
    descale: Descale = ()
    page_size: int = 0  # 0: no pages
    pages: int = 0
    latent: bool = False
    part: str = ""  # "short", "long": these sequences only
    invariant: bool = False

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name, value in _ragged_fields(self.ragged, self.lengths, self.page_size).items():
            set_(self, name, value)
        for name, least in (("B", 0), ("H", 0), ("Sq", 0), ("Sk", 0), ("Hk", 0), ("D", 1), ("Dv", 0)):
            set_(self, name, integer(name, getattr(self, name), least))
        for name, dtype in dtypes.normalise(self.dtype, self.kv_dtype, self.v_dtype, self.out_dtype).items():
            set_(self, name, dtype)
        limits.check_sizes(self.B, self.H, self.Sq, self.Sk)
        if self.Hk == 0:
            set_(self, "Hk", self.H)
        if self.H and self.H % self.Hk:
            raise SpecError(f"H={self.H} query heads are not a multiple of Hk={self.Hk} key/value heads")
        set_(self, "causal", normalise_causal(self.causal))
        if self.Dv == 0:
            set_(self, "Dv", self.D)
        for option in OPTIONS:
            if option.check:
                set_(self, option.name, option.check(option.name, getattr(self, option.name)))
        set_(self, "scale", 1.0 / math.sqrt(self.D) if self.scale is None else number("scale", self.scale))
        # A bound of Sq + Sk hides nothing; a larger one could overflow, because kernels add bounds and indices as
        # int32.
        set_(self, "window", normalise_window(self.window, self.Sq + self.Sk))
        set_(self, "descale", dtypes.normalise_descale(self.descale, self.dtype_of("K"), self.B, self.H, self.Hk))
        check_products(self.scale, self.softcap, [n for n in self.descale[:2] if isinstance(n, float)])
        if self.latent and self.Dv > self.D:
            raise SpecError(f"latent=True needs Dv <= D, not Dv={self.Dv} with D={self.D}: v is a view of k's columns")
        for name, value in _paged_fields(self.page_size, self.pages, self.B, self.Sk).items():
            set_(self, name, value)
        self._check_tensors()

    def _check_tensors(self) -> None:
        """Validates shapes and dtypes of the score's tensors."""
        set_ = object.__setattr__
        sizes = self.B, self.H, self.Sq, self.Sk
        for name, array in ARRAYS.items():
            value: Any = getattr(self, name, False)  # there is no field `seed`
            if not array.shape_is_field:
                if not isinstance(value, bool):
                    raise SpecError(f"{name}={value!r} must be True or False")
                continue
            set_(self, name, shape := tuple(value or ()))
            if shape and not array.accepts(shape, sizes):
                how = "have four dimensions and " * array.broadcast + array.required(sizes)
                raise SpecError(f"{name} has shape {shape}: it must {how}")
        own = self.dtype_of("O")
        if self.bias_dtype and (not self.bias or self.bias_dtype not in (own, "float32")):
            choice = " or ".join(dict.fromkeys(("float32", own)))
            raise SpecError(f"bias_dtype={self.bias_dtype!r} needs a bias and must be {choice}")
        set_(self, "bias_dtype", "" if self.bias_dtype == own else self.bias_dtype)

    @classmethod
    def from_shape(cls, shape: str, **semantics: Any) -> Problem:
        """The problem of the text `"B,H,S,D"` or `"B,H,Sq,Sk,D"`, where H may be H/Hk and D may be D/Dv, with the other
        fields by name. Also of the sizes alone as a problem is printed, such as "B1 H8/2 S1x2048 D64".

        `lengths` makes it a ragged batch and replaces B and S: pairs, or text such as "64,128x256". `alibi` may also be
        True: one slope per head. `bias` and `mask` may also be text with numbers or names, such as "1,H,Sq,Sk".
        """
        return cls(**_fields_of(shape, semantics))

    def as_json(self) -> dict[str, Any]:
        """The fields, for `from_json`; options that are off are left out."""
        row = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            name: value.as_json() if isinstance(value, Score) else list(value) if isinstance(value, tuple) else value
            for name, value in row.items()
            if name not in _ABSENT or value != (self.D if name == "Dv" else _ABSENT[name])
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Problem:
        """The problem that `as_json` wrote. The tensors of its `score` are TensorLike, without elements."""
        return cls(**{**row, **({"score": Score.from_json(row["score"])} if row.get("score") else {})})

    @property
    def itemsize(self) -> int:
        """Bytes per element of q."""
        return dtypes.ITEMSIZE[self.dtype]

    @property
    def key_itemsize(self) -> int:
        """Bytes per element of k and v."""
        return dtypes.ITEMSIZE[self.kv_dtype or self.dtype]

    @property
    def float8(self) -> bool:
        """Whether q, k and v have a float8 dtype."""
        return self.dtype in FLOAT8

    @property
    def float8_keys(self) -> bool:
        """Whether k and v have a float8 dtype, with or without q: only then is there a descale."""
        return (self.kv_dtype or self.dtype) in FLOAT8

    def dtype_of(self, tensor: str) -> str:
        """The dtype of "Q", "K", "V" or "O", or of a gradient, which has the dtype of its tensor."""
        if tensor in ("O", "dO", "bias"):
            return self.out_dtype or dtypes.default_out_dtype(self.dtype)
        of_keys = self.kv_dtype if tensor in ("K", "V") else ""
        return (self.v_dtype if tensor == "V" else "") or of_keys or self.dtype

    @property
    def head_dims(self) -> tuple[tuple[str, int], ...]:
        """The head dimensions that a kernel limits, by name."""
        return (("D", self.D), ("Dv", self.Dv))

    @property
    def widths(self) -> str:
        """The sizes that determine the shared memory, for messages."""
        return f"D={self.D}" if self.Dv == self.D else f"D={self.D}, Dv={self.Dv}"

    @property
    def tuning_class(self) -> str:
        """The class of problems that share a tuned tile: D, dtype, causal, and Sq, Sk and B * H, each rounded up to a
        power of two. Dv and options do not count."""
        Sq, Sk, heads = (1 << max(n - 1, 0).bit_length() for n in (self.Sq, self.Sk, self.B * self.H))
        mask = f" {self.causal}" if self.causal else ""
        return f"D{self.D} {self.dtype}{mask} Sq<={Sq} Sk<={Sk} heads<={heads}"

    @property
    def batches(self) -> int:
        """Batch entries of the tensors: 1 for a ragged batch."""
        return 1 if self.ragged else self.B

    @property
    def group(self) -> int:
        """Query heads that share keys and values."""
        return self.H // self.Hk if self.Hk else 1

    @property
    def short_queries(self) -> int:
        """The most queries of a short sequence: with the heads of their group they have at most 16 packed rows;
        at least one query."""
        return max(16 // self.group, 1)

    @property
    def short(self) -> bool:
        """Whether it is a ragged batch over pages of which a kernel computes short sequences only."""
        return self.part == "short" or (self.page_size > 0 and bool(self.ragged) and self.Sq <= self.short_queries)

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of each head of q, and of k and v; of keys in pages those of a batch entry."""
        queries, keys = self.ragged or (self.Sq, self.Sk)
        return queries, self.Sk if self.page_size else keys

    def query_tiles(self, BLOCK_M: int) -> int:
        """Tiles of BLOCK_M query rows per head; of a ragged batch an upper bound (include/seqlen.cuh)."""
        return self._tiles(0, BLOCK_M)

    def key_tiles(self, BLOCK_N: int) -> int:
        """Tiles of BLOCK_N keys per head; of a ragged batch an upper bound."""
        return self._tiles(1, BLOCK_N)

    def _tiles(self, which: int, size: int) -> int:
        if not self.ragged:
            return cdiv(self.rows[which], size)
        return self.rows[which] // size + self.B if self.B else 0

    @property
    def key_shape(self) -> tuple[int, int, int]:
        """Batch entries, heads and rows of k and v, or pages, heads and rows of a page."""
        if self.page_size:
            return self.pages, self.Hk, self.page_size
        return self.batches, self.Hk, self.rows[1]

    @property
    def sequences(self) -> tuple[Problem, ...]:
        """The sequences of a ragged batch with known lengths, each as a dense problem of its own, without pages; ()
        without `lengths`."""

        def part(Sq: int, Sk: int) -> Problem:
            sizes = {"b": 1, "i": Sq, "j": Sk}
            cut: dict[str, Any] = {
                name: tuple(
                    1 if n == 1 else sizes.get(axis, n)
                    for n, axis in zip(shape, array.axes[-len(shape) :], strict=True)
                )
                for name, array in ARRAYS.items()
                if array.shape_is_field and (shape := getattr(self, name))
            }
            cut["descale"] = tuple(n if isinstance(n, float) else (1, n[1]) for n in self.descale)
            return dataclasses.replace(self, B=1, Sq=Sq, Sk=Sk, ragged=(), lengths=(), page_size=0, pages=0, **cut)

        return tuple(part(*pair) for pair in self.lengths)

    def one_entry(self, size: int = 0) -> Problem:
        """A dense problem of one batch entry with the same dtypes, head dimensions and score options except
        key_lengths. With a `size`, it has one head, `size` queries and `size` keys, and arrays of one element. With 0,
        heads, Sq, Sk and the shapes of arrays stay, but their B becomes 1."""
        sizes = dict.fromkeys("bhij" if size else "b", 1)
        fields: dict[str, Any] = {"ragged": (), "lengths": (), "page_size": 0, "pages": 0, "key_lengths": False}
        fields |= {
            name: tuple(sizes.get(axis, n) for n, axis in zip(shape, array.axes[-len(shape) :], strict=True))
            for name, array in ARRAYS.items()
            if array.shape_is_field and (shape := getattr(self, name))
        }
        fields |= {"descale": tuple(n if isinstance(n, float) else (1, 1) for n in self.descale)}
        fields |= {"alignment": 16, "mappable": True, "bias_boxes": True, "latent": False, "part": ""}
        fields |= {"H": 1, "Hk": 1, "Sq": size, "Sk": size} if size else {}
        return dataclasses.replace(self, B=1, **fields)

    @cached_property
    def options(self) -> frozenset[str]:
        """The names of the options in core/options.py that are set, without seed and block_map.

        A rule for some options lists those that it allows, such as `p.options <= {"window", "sink"}`: a new option is
        then rejected until it is listed."""
        return frozenset(option.name for option in SHOWN if getattr(self, option.name) != _ABSENT[option.name])

    @property
    def reads_elements(self) -> frozenset[str]:
        """The options that read memory for each score: a bias, a mask, a Score."""
        return self.options & ELEMENTWISE

    @property
    def plain(self) -> bool:
        """Whether Dv is D, v and o have their default dtypes, and no option of core/options.py except `invariant` is
        set."""
        others = (name for name in _ABSENT if name not in ("Dv", "latent", "part", "invariant"))
        return self.Dv == self.D and all(getattr(self, name) == _ABSENT[name] for name in others)

    @property
    def diagonal(self) -> int:
        """The offset between query and key indices. Causal: query i sees keys j <= i + diagonal."""
        return 0 if self.causal == "top-left" else self.Sk - self.Sq

    @property
    def block_map(self) -> tuple[int, int, int, int]:
        """The shape of its block map (core/block_map.py); without a map zeros."""
        return block_map.shape_for(self)

    @property
    def has_block_map(self) -> bool:
        return self.block_map[3] > 0

    @property
    def bias_tiles(self) -> bool:
        """Whether TMA can copy tiles of the bias: it has q's 16-bit dtype and varies along queries and keys."""
        varies = self.bias[2:] == (self.Sq, self.Sk) and self.Sq > 1 and self.Sk % 8 == 0 and not self.ragged
        return varies and self.bias_boxes and not self.bias_dtype and self.itemsize == 2

    @property
    def bounds(self) -> Window:
        """(left, right) of causal and window together: query i sees keys i + diagonal - left to i + diagonal + right.
        None: no bound."""
        left, right = self.window
        return left, 0 if self.causal else right

    @property
    def visible_pairs(self) -> int:
        """The number of (query, key) pairs of one head that causal and window leave visible; of a ragged batch, the sum
        over its sequences."""
        if self.ragged:
            return sum(part.visible_pairs for part in self.sequences)
        left, right = self.bounds
        if left is None and right is None:
            return self.Sq * self.Sk
        places = range(self.diagonal, self.diagonal + self.Sq)
        firsts = (0 if left is None else max(0, i - left) for i in places)
        ends = (self.Sk if right is None else min(self.Sk, i + right + 1) for i in places)
        return sum(max(0, end - first) for first, end in zip(firsts, ends, strict=True))

    @property
    def flops(self) -> int:
        """Forward operations, counted as in FlashAttention's benchmarks: 2·B·H·Sq·Sk·(D + Dv), half of it for causal.
        With a window only visible pairs count; a ragged batch is the sum over its sequences, 0 without `lengths`."""
        return self._flops(self.D + self.Dv)

    def flops_of(self, computes: str, pairs: int | None = None) -> int:
        """`flops` of a "forward", two matrix products, or a "backward", five. `pairs`: the visible pairs of all heads,
        if they were counted."""
        widths = {"forward": self.D + self.Dv, "backward": 3 * self.D + 2 * self.Dv}.get(computes, 0)
        return self._flops(widths) if pairs is None else 2 * pairs * widths

    def _flops(self, widths: int) -> int:
        """Operations of matrix products; `widths`: the sum of their head dimensions."""
        if self.ragged:
            return sum(part._flops(widths) for part in self.sequences)
        if self.window != (None, None):
            return 2 * self.B * self.H * self.visible_pairs * widths
        full = 2 * self.B * self.H * self.Sq * self.Sk * widths
        return full // 2 if self.causal else full

    def __str__(self) -> str:
        heads = f"H{self.H}" if self.Hk == self.H else f"H{self.H}/{self.Hk}"
        lengths = f"S{self.Sq}" if self.Sq == self.Sk else f"S{self.Sq}x{self.Sk}"
        return f"B{self.B} {heads} {lengths} {self.variant}"

    @property
    def variant(self) -> str:
        """The part that selects a compiled variant, as text: head dimensions, dtype, mask, options."""
        widths = f"D{self.D}" if self.Dv == self.D else f"D{self.D}/{self.Dv}"
        mask = {False: (), "bottom-right": ("causal",), "top-left": ("causal-top-left",)}[self.causal]
        of = dtypes.described(self.dtype, self.kv_dtype, self.v_dtype, self.out_dtype)
        latent = ("latent",) if self.latent else ()
        return " ".join((widths, of, *mask, *latent, *self._options()))

    def _options(self) -> Iterator[str]:
        """The options that are set, as text."""
        yield from filter(None, (option.text(self) for option in SHOWN))


# The fields from Dv on, with their defaults: the values of options that are not set.
_ABSENT = {f.name: f.default for f in dataclasses.fields(Problem)[list(Problem.__dataclass_fields__).index("Dv") :]}


# ---- ragged and paged batches: the fields that they set


def _ragged_fields(ragged: Any, lengths: Any, page_size: Any) -> dict[str, Any]:
    """`ragged` and `lengths` of a problem as it keeps them, and B, Sq and Sk where they follow: with pages Sk is a
    multiple of `page_size`, and the rows of k are not counted. Raises SpecError."""
    page_size = integer("page_size", page_size, 0)
    ragged, lengths = tuple(ragged or ()), tuple(lengths or ())
    found: dict[str, Any] = {}
    if lengths:
        pairs = tuple(tuple(integer("lengths", n, 0) for n in pair) for pair in lengths)
        if any(len(pair) != 2 for pair in pairs):
            raise SpecError(f"lengths={lengths} must be pairs: queries and keys of each sequence")
        queries, keys = zip(*pairs, strict=True)
        Sk = cdiv(max(keys), page_size) * page_size if page_size else max(keys)
        found = {"B": len(pairs), "Sq": max(queries), "Sk": Sk}
        used = sum(queries), 0 if page_size else sum(keys)
        lengths, ragged = pairs, ragged or used
    if ragged and (len(ragged) != 2 or not all(0 <= n < 2**31 for n in ragged)):
        raise SpecError(f"ragged={ragged} must be two numbers below 2^31: the rows of q and of k")
    if ragged and page_size:
        ragged = ragged[0], 0
    if lengths and any(n > rows for n, rows in zip(used, ragged, strict=True)):
        raise SpecError(f"lengths={lengths} must not add up to more than ragged={ragged}, the rows of q and of k")
    return {**found, "ragged": ragged, "lengths": lengths}


def _paged_fields(page_size: Any, pages: Any, B: int, Sk: int) -> dict[str, Any]:
    """`page_size` and `pages` of a problem as it keeps them, and `key_lengths`, which pages always have. Raises
    SpecError."""
    page_size, pages = integer("page_size", page_size, 0), integer("pages", pages, 0)
    if not page_size:
        return {"page_size": 0, "pages": 0}
    if Sk % page_size:
        raise SpecError(f"Sk={Sk} must be a multiple of page_size={page_size}")
    pages = pages or B * Sk // page_size
    limits.check_count("pages", pages, "page numbers are int32")
    return {"page_size": page_size, "pages": pages, "key_lengths": True}


# ---- a shape as text, as on the command line

_PRINTED = re.compile(r"B(\d+) H(\d+(?:/\d+)?) S(\d+)(?:x(\d+))? D(\d+(?:/\d+)?)", re.ASCII)  # by Problem.__str__


def _fields_of(shape: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Problem, from the arguments of `Problem.from_shape`. Raises SpecError for invalid text."""
    semantics = dict(given)
    printed = _PRINTED.fullmatch(shape.strip())
    parts = list(filter(None, printed.groups())) if printed else [part.strip() for part in shape.split(",")]
    heads = parts[1].split("/") if len(parts) > 1 else []
    widths = parts[-1].split("/")
    numbers = [*parts[:1], *heads, *parts[2:-1], *widths]
    if (
        len(parts) not in (4, 5) or len(heads) not in (1, 2) or len(widths) not in (1, 2)
        or not all(n.isdecimal() for n in numbers)
    ):  # fmt: skip
        raise SpecError(
            f"shape {shape!r} must be B,H,S,D or B,H,Sq,Sk,D, such as 1,12,1024,64 or 1,8/2,1024,64, or printed sizes, "
            "such as B1 H8/2 S1x1024 D64"
        )
    if not int(heads[0]):
        raise SpecError(f"shape {shape!r}: H=0: a problem has at least one query head")
    lengths = [int(n) for n in parts[2:-1]]
    Hk, Dv = int(heads[-1]), int(widths[-1])
    if len(heads) == 2 and not Hk:
        raise SpecError(f"shape {shape!r}: Hk=0: the number of key/value heads must be at least 1")
    if len(widths) == 2 and not Dv:
        raise SpecError(f"shape {shape!r}: Dv=0: v's head dimension must be at least 1")
    sizes = {"B": int(parts[0]), "H": int(heads[0]), "Sq": lengths[0], "Sk": lengths[-1], "D": int(widths[0])}
    if isinstance(semantics.get("lengths"), str):
        semantics["lengths"] = _lengths_of(semantics["lengths"])
    if pairs := semantics.get("lengths"):
        sizes |= {"B": len(pairs), "Sq": max(q for q, _ in pairs), "Sk": max(k for _, k in pairs)}
    for name, array in ARRAYS.items():
        if semantics.get(name) is True and array.shape_is_field:
            semantics[name] = array.shapes((sizes["B"], sizes["H"], sizes["Sq"], sizes["Sk"]))[0]
        elif isinstance(semantics.get(name), str):
            semantics[name] = _sizes_of(name, semantics[name], {**sizes, "S": sizes["Sk"]})
    return {**sizes, "Hk": Hk, "Dv": Dv, **semantics}


def _lengths_of(text: str) -> tuple[tuple[int, ...], ...]:
    """(queries, keys) of each sequence. `text`: for each one number or queries x keys, with commas between."""
    pairs = [part.strip().split("x") for part in text.split(",")]
    if not all(len(pair) <= 2 and all(n.isdecimal() for n in pair) for pair in pairs):
        raise SpecError(f"lengths {text!r} must be numbers with commas between; 128x256 is 128 queries and 256 keys")
    return tuple((int(pair[0]), int(pair[-1])) for pair in pairs)


def _sizes_of(name: str, text: str, known: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes in `text`: numbers, or names in `known`, with commas between."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() or part in known for part in parts):
        raise SpecError(
            f"{name} {text!r} must be four numbers or names of sizes with commas between, such as 1,H,Sq,Sk"
        )
    return tuple(int(part) if part.isdecimal() else known[part] for part in parts)
