"""Shapes, dtype and semantics of one attention call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import block_map, dtypes, limits
from .batches import paged_fields, ragged_fields
from .dtypes import FLOAT8, Descale
from .errors import SpecError
from .integers import cdiv, integer
from .normalise import Causal, Window, normalise_causal, normalise_window, number
from .options import OPTIONS, SHOWN, check_products
from .score import Score
from .shape_text import fields_of


@dataclass(frozen=True)
class Problem:
    """Shapes, dtype and semantics of one attention call.

    q: (B, H, Sq, D); k: (B, Hk, Sk, D); v: (B, Hk, Sk, Dv); o: (B, H, Sq, Dv); query head h reads key/value head
    h // (H / Hk). `scale` None means 1/sqrt(D). `alignment`: bytes, at most 16, that the address of every row of q, k
    and v, and in a backward of do and o, is a multiple of. `mappable`: their strides are such as a tensor map takes,
    positive, or 0 in B or H. `v_dtype`: of v, where it is another float8 than q and k; `out_dtype`: of o, which is q's,
    or of float8 bfloat16, unless said. `descale`: what float8 q, k and v are to be multiplied by, each a number or the
    shape of a tensor that broadcasts to (B, heads); () where they are all 1.

    What a score is beyond scale and causal, absent by default: `window`, `softcap`; the shapes of `alibi`'s slopes,
    (H,) or (B, H), and of `bias` and `mask`, four numbers each 1 or that of (B, H, Sq, Sk); whether there is a `sink`
    for each head and a number of keys that count for each batch entry, of which Sk is then the most; the user's own
    `score`; and the probability `dropout` that an element of P is dropped. A bias has o's dtype, or `bias_dtype`.
    A window bound above Sq + Sk is replaced by Sq + Sk, which hides nothing.
    Raises SpecError naming the value that makes no sense, UnsupportedProblem for sizes beyond those of `limits`.

    A ragged batch: B sequences of at most Sq queries and Sk keys, one after the other in tensors of one batch entry, q
    (1, H, rows, D) and so on; `ragged` says how many rows of q and of k there are. Where they begin only the device
    knows, unless `lengths` says it, a pair (queries, keys) for each, from which B, Sq, Sk and `ragged` follow.

    A paged batch: keys are stored in pages of `page_size` rows, k (pages, Hk, page_size, D) and v the same; a table of
    (B, Sk / page_size) page numbers selects them; `key_lengths` is set. `pages`: by default the size of the table.
    """

    B: int
    H: int
    Sq: int
    Sk: int
    D: int
    Hk: int = 0  # 0: as many as H
    dtype: str = "float32"
    causal: Causal = False
    scale: float = field(default=None)  # type: ignore[assignment]  # None: 1/sqrt(D)
    alignment: int = 16
    mappable: bool = True
    Dv: int = 0  # 0: as D
    window: Window = (None, None)
    softcap: float = 0.0  # 0: none
    alibi: tuple[int, ...] = ()
    bias: tuple[int, ...] = ()
    bias_dtype: str = ""  # "": o's, or "float32"
    bias_boxes: bool = True  # a tensor map describes it: as `alignment` 16 and `mappable`
    mask: tuple[int, ...] = ()
    sink: bool = False
    key_lengths: bool = False
    score: Score | None = None
    dropout: float = 0.0  # the probability that an element of P is dropped; a number, not compiled in
    ragged: tuple[int, ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()
    v_dtype: str = ""  # "": q's
    out_dtype: str = ""  # "": q's, of float8 bfloat16
    descale: Descale = ()
    page_size: int = 0  # 0: no pages
    pages: int = 0

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name, value in ragged_fields(self.ragged, self.lengths).items():
            set_(self, name, value)
        for name, least in (("B", 0), ("H", 0), ("Sq", 0), ("Sk", 0), ("Hk", 0), ("D", 1), ("Dv", 0)):
            set_(self, name, integer(name, getattr(self, name), least))
        for name, dtype in dtypes.normalise(self.dtype, self.v_dtype, self.out_dtype).items():
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
        # Sq + Sk keys to either side hide nothing, and kernels add the bounds to positions in 32 bits.
        set_(self, "window", normalise_window(self.window, self.Sq + self.Sk))
        set_(self, "descale", dtypes.normalise_descale(self.descale, self.dtype, self.B, self.H, self.Hk))
        check_products(self.scale, self.softcap, [n for n in self.descale[:2] if isinstance(n, float)])
        for name, value in paged_fields(self.page_size, self.pages, self.ragged, self.B, self.Sk).items():
            set_(self, name, value)
        self._check_tensors()

    def _check_tensors(self) -> None:
        """Validates shapes and dtypes of the score's tensors."""
        set_ = object.__setattr__
        for name in ("alibi", "bias", "mask"):
            set_(self, name, tuple(getattr(self, name) or ()))
        if self.alibi not in ((), (self.H,), (self.B, self.H)):
            raise SpecError(
                f"alibi={self.alibi} must be the shape of one slope a head, {(self.H,)} or {(self.B, self.H)}"
            )
        full = (self.B, self.H, self.Sq, self.Sk)
        for name in ("bias", "mask"):
            shape = getattr(self, name)
            if shape and (len(shape) != 4 or any(n not in (1, most) for n, most in zip(shape, full, strict=True))):
                raise SpecError(f"{name}={shape} must be four numbers, each 1 or that of (B, H, Sq, Sk) = {full}")
        own = self.dtype_of("O")
        if self.bias_dtype and (not self.bias or self.bias_dtype not in (own, "float32")):
            raise SpecError(f"bias_dtype={self.bias_dtype!r} must be that of a bias: out's dtype, {own}, or float32")
        set_(self, "bias_dtype", "" if self.bias_dtype == own else self.bias_dtype)
        for name in ("sink", "key_lengths"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name}={getattr(self, name)!r} must be True or False: whether there is one")
        if self.score is not None and not isinstance(self.score, Score):
            raise SpecError(f"score={self.score!r} must be a sandbox.Score")

    @classmethod
    def from_shape(cls, shape: str, **semantics: Any) -> Problem:
        """`"B,H,S,D"` or `"B,H,Sq,Sk,D"`, H also as H/Hk, D also as D/Dv, and the other fields by name.

        `lengths` makes it a ragged batch, B and S then being those of its sequences: pairs, or text as "64,128x256".
        `alibi` may also be True, one slope a head; `bias` and `mask` text of numbers, or their names, as "1,H,Sq,Sk".
        """
        return cls(**fields_of(shape, semantics))

    def as_json(self) -> dict[str, Any]:
        """Every field, those that are absent left out: what `from_json` takes."""
        row = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            name: value.as_json() if isinstance(value, Score) else list(value) if isinstance(value, tuple) else value
            for name, value in row.items()
            if name not in _ABSENT or value != (self.D if name == "Dv" else _ABSENT[name])
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Problem:
        """The problem of what `as_json` gave; its `score` without the tensors' numbers."""
        return cls(**{**row, **({"score": Score.from_json(row["score"])} if row.get("score") else {})})

    @property
    def itemsize(self) -> int:
        """Bytes an element of q, k and v."""
        return dtypes.ITEMSIZE[self.dtype]

    @property
    def float8(self) -> bool:
        """Whether q, k and v are of 8 bits."""
        return self.dtype in FLOAT8

    def dtype_of(self, tensor: str) -> str:
        """The dtype of "Q", "K", "V" or "O", or of a gradient, which is as what it belongs to."""
        if tensor in ("O", "dO", "bias"):
            return self.out_dtype or dtypes.default_out_dtype(self.dtype)
        return (self.v_dtype if tensor == "V" else "") or self.dtype

    @property
    def batches(self) -> int:
        """Batch entries of the tensors."""
        return 1 if self.ragged else self.B

    @property
    def group(self) -> int:
        """Query heads that share keys and values."""
        return self.H // self.Hk if self.Hk else 1

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of each head of q, and of k and v."""
        return (self.ragged[0], self.ragged[1]) if self.ragged else (self.Sq, self.Sk)

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
        """Those whose lengths are known, each as a problem of its own: bias, mask and slopes are cut to it."""

        def part(Sq: int, Sk: int) -> Problem:
            cut = {
                name: tuple(1 if n == 1 else own for n, own in zip(shape, (1, self.H, Sq, Sk), strict=True))
                for name in ("bias", "mask")
                if (shape := getattr(self, name))
            }
            alibi = (1, self.H) if len(self.alibi) == 2 else self.alibi
            descale = tuple(n if isinstance(n, float) else (1, n[1]) for n in self.descale)
            own = {"B": 1, "Sq": Sq, "Sk": Sk, "ragged": (), "lengths": (), "alibi": alibi, "descale": descale}
            return dataclasses.replace(self, **own, **cut)  # type: ignore[arg-type]

        return tuple(part(*pair) for pair in self.lengths)

    @property
    def plain(self) -> bool:
        """Whether a score is scale and causal alone, and v as wide as k."""
        return self.Dv == self.D and all(getattr(self, name) == _ABSENT[name] for name in _ABSENT if name != "Dv")

    @property
    def diagonal(self) -> int:
        """What is added to a query's row to find its own place among the keys. Causal: it sees j <= i + diagonal."""
        return 0 if self.causal == "top-left" else self.Sk - self.Sq

    @property
    def block_map(self) -> tuple[int, int, int, int]:
        """The shape of its block map, as core/block_map.py says."""
        return block_map.shape_for(self)

    @property
    def bias_tiles(self) -> bool:
        """Whether tensor maps can copy tiles of the bias: of q's 16 bits, one that varies along rows and keys."""
        varies = self.bias[2:] == (self.Sq, self.Sk) and self.Sq > 1 and self.Sk % 8 == 0 and not self.ragged
        return varies and self.bias_boxes and not self.bias_dtype and self.itemsize == 2

    @property
    def bounds(self) -> Window:
        """(left, right), causal and window in one: query i sees keys i + diagonal - left to i + diagonal + right."""
        left, right = self.window
        return left, (0 if right is None else min(right, 0)) if self.causal else right

    @property
    def visible_pairs(self) -> int:
        """How many (query, key) pairs one head has to score, as far as causal and window say; of a ragged batch, a head
        of each sequence."""
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
        """Forward operations by the field's rule: 2·B·H·Sq·Sk·(D + Dv), half of it for causal; in a window of the
        pairs that are seen; of a ragged batch of its sequences, or 0 where their lengths are not known."""
        return self._flops(self.D + self.Dv)

    def flops_of(self, computes: str, pairs: int | None = None) -> int:
        """`flops`; of a "backward" for five matrix products, not two. `pairs`: that all heads see, where counted."""
        widths = {"forward": self.D + self.Dv, "backward": 3 * self.D + 2 * self.Dv}.get(computes, 0)
        return self._flops(widths) if pairs is None else 2 * pairs * widths

    def _flops(self, widths: int) -> int:
        """Of matrix products whose head widths are that many together."""
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
        """The part that selects a compiled variant: head widths, dtype, mask, options."""
        widths = f"D{self.D}" if self.Dv == self.D else f"D{self.D}/{self.Dv}"
        mask = {False: (), "bottom-right": ("causal",), "top-left": ("causal-top-left",)}[self.causal]
        of = dtypes.described(self.dtype, self.v_dtype, self.out_dtype)
        return " ".join((widths, of, *mask, *self._options()))

    def _options(self) -> Iterator[str]:
        """Those that are set, by the names of the command line."""
        yield from filter(None, (option.text(self) for option in SHOWN))


_ABSENT = {f.name: f.default for f in dataclasses.fields(Problem)[list(Problem.__dataclass_fields__).index("Dv") :]}
