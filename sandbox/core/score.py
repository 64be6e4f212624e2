"""A user's own CUDA expressions: a modified score, and a mask."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from .block_map import Sizes, sizes_of
from .dtypes import ITEMSIZE
from .errors import SpecError
from .files import mistakes_of, names_of
from .project import from_project, within_project

SIZES = {**ITEMSIZE, "int32": 4, "int64": 8, "bool": 1}  # bytes an element
DTYPES = ("float32", "float16", "bfloat16", "int32", "bool")  # of the tensors that an expression may read
VARIABLES = ("x", "b", "h", "i", "j", "Sq", "Sk")  # what every expression knows
_CPP = """
alignas alignof and asm auto bool break case catch char class const constexpr continue decltype default delete do double
else enum explicit extern false float for friend goto if inline int long mutable namespace new noexcept not nullptr
operator or private protected public register return short signed sizeof static struct switch template this throw true
try typedef typename union unsigned using virtual void volatile while xor
"""
CPP_KEYWORDS = frozenset(_CPP.split())  # what nothing in a `.cu` can be called
FUNCTIONS = ("exp", "log", "tanh", "abs", "min", "max", "where")  # and may call
MOST_DIMENSIONS = 4
_TAKEN = {*VARIABLES, *FUNCTIONS, *CPP_KEYWORDS}
BLOCK_MAP = "score.block-map"  # what kernels know a given block map by; no tensor of an expression can be called so


class TensorLike(NamedTuple):
    """What a tensor is like, without its numbers: all of it that a compiled kernel and a stored row know."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, eq=False)
class Score:
    """Two expressions in CUDA C++ over `VARIABLES` and tensors, compiled into every kernel.

    score: what the score x of query i and key j, in batch entry b and head h, becomes. mask: whether key j is seen, as
    one more condition. i and j count rows of q and k; Sq and Sk are how many there are. tensors: {name: array}, read as
    `name(i, j)` with as many indices as it has dimensions, at most four; float32, float16, bfloat16, int32 or bool; any
    strides. Indices must lie inside, for every b, h, i < Sq and j < Sk. Constants to autograd.

    Two are equal when their texts and the names, shapes and dtypes of their tensors are equal. `file` is where it was
    read from, `blocks` the block map of its mask, `made_for` the (B, H, Sq, Sk) that `sandbox.block_map` made it for
    (None: not known), which is compared too. Raises SpecError naming what makes no sense; whether an expression
    compiles shows when it is first used.
    """

    score: str = "x"
    mask: str = "true"
    tensors: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""
    blocks: Any = None
    made_for: Sizes | None = None
    # All that two equal ones share; and the same without the tensors' numbers, which keeps no array alive.
    structure: tuple[str, str, tuple[tuple[str, TensorLike], ...]] = field(init=False, repr=False)
    described: Score = field(init=False, repr=False)
    arrays: Mapping[str, Any] = field(init=False, repr=False)  # its tensors and blocks, by the names that plans have
    _hash: int = field(init=False, repr=False)  # of its structure: every attention call needs it
    on_host: ClassVar[Callable[..., tuple[Any, Any, Any]]]  # filled in by the package, which knows of compilers

    def __post_init__(self) -> None:
        for name in ("score", "mask"):
            text = getattr(self, name)
            if not isinstance(text, str) or not text.strip():
                raise SpecError(f"Score: {name}={text!r} must be an expression in CUDA C++, such as {_SUCH_AS[name]!r}")
            if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text):
                raise SpecError(f"Score: {name}={text!r} has characters that no source file holds: NUL or surrogates")
            object.__setattr__(self, name, text.strip())
        for name, tensor in self.tensors.items():
            if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
                raise SpecError(f"Score: a tensor cannot be called {name!r}: choose another name")
            like = like_of(tensor)
            if like.dtype not in DTYPES:
                raise SpecError(f"Score: tensor {name} is {like.dtype}: it must be one of {', '.join(DTYPES)}")
            if not like.shape:
                raise SpecError(f"Score: tensor {name} has no dimension: reshape it to (1,) and read {name}(0)")
            if len(like.shape) > MOST_DIMENSIONS:
                raise SpecError(f"Score: tensor {name} has shape {like.shape}: at most four dimensions can be read")
        tensors = dict(self.tensors)
        likes = {name: like_of(tensor) for name, tensor in tensors.items()}
        object.__setattr__(self, "tensors", MappingProxyType(tensors))
        object.__setattr__(self, "structure", (self.score, self.mask, tuple(likes.items())))
        object.__setattr__(self, "_hash", hash(self.structure))
        named = {f"score.{name}": tensor for name, tensor in tensors.items()}
        object.__setattr__(self, "arrays", named if self.blocks is None else named | {BLOCK_MAP: self.blocks})
        bare = all(isinstance(x, TensorLike) for x in tensors.values()) and self.blocks is None
        if self.blocks is not None and self.made_for is None:
            object.__setattr__(self, "made_for", sizes_of(self.blocks))
        described = self if bare else _described(self.score, self.mask, self.file, self.made_for, **likes)
        object.__setattr__(self, "described", described)

    @property
    def changes(self) -> bool:
        """Whether it does anything to x."""
        return self.score != "x"

    @property
    def hides(self) -> bool:
        """Whether it may hide a key."""
        return self.mask != "true"

    @property
    def named_by_mask(self) -> set[str]:
        """The names in its condition: variables, functions, tensors; "true" alone where it hides nothing."""
        return set(re.findall(r"[A-Za-z_]\w*", self.mask)) | {"true"}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Score) and self.structure == other.structure and self.made_for == other.made_for
        )  # fmt: skip

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:  # a MappingProxyType cannot be pickled
        return Score, (self.score, self.mask, dict(self.tensors), self.file, self.blocks, self.made_for)

    def __str__(self) -> str:
        shown = [self.score] if self.changes or not self.hides else []
        return "; ".join([*shown, f"sees {self.mask}"] if self.hides else shown)

    def evaluate(self, x: Any, b: int, h: int, i: Any, j: Any, Sq: int, Sk: int) -> tuple[Any, Any, Any]:
        """(what x becomes, its derivative, which are seen) of NumPy scores x (M, N), for query rows i (M, 1) and keys
        j (1, N), in double precision by the host compiler: called by `sandbox.reference`."""
        return self.on_host(x, b, h, i, j, Sq, Sk)

    def with_blocks(self, blocks: Any) -> Score:
        """The same with the block map of its mask, of `sandbox.block_map`, so that no call makes one of its own."""
        return dataclasses.replace(self, blocks=blocks, made_for=None)

    def as_json(self) -> dict[str, Any]:
        """What `from_json` takes; the tensors without their numbers."""
        tensors = {name: {"shape": list(like.shape), "dtype": like.dtype} for name, like in self.structure[2]}
        file = within_project(self.file)
        text = {"score": self.score, "mask": self.mask}
        return text | ({"tensors": tensors} if tensors else {}) | ({"file": file} if file else {})

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Score:
        """As `described`, of what `as_json` gave."""
        tensors = {
            name: TensorLike(tuple(like["shape"]), like["dtype"]) for name, like in row.get("tensors", {}).items()
        }
        return cls(row["score"], row["mask"], tensors, from_project(row.get("file", "")))

    @classmethod
    def from_file(cls, path: str | Path, problem: Any) -> Score:
        """The `score` that a Python file defines: a Score, or a function of the problem that returns one."""
        path = Path(path)
        if not path.is_file():
            raise SpecError(f"score {path}: there is no such file")
        found = names_of(path).get("score")
        if isinstance(found, Callable):  # type: ignore[arg-type]
            with mistakes_of(path, f"score {path}"):
                found = found(problem)  # type: ignore[misc]
        if not isinstance(found, cls):
            raise SpecError(f"score {path}: it must define score, a sandbox.Score or a function of the problem to one")
        return dataclasses.replace(found, file=str(path.resolve()))


@lru_cache(maxsize=256)
def _described(score: str, mask: str, file: str, made_for: Sizes | None, /, **likes: TensorLike) -> Score:
    """One object for all scores of a structure: those that are made anew at each call make no other."""
    return Score(score, mask, likes, file, None, made_for)


_SUCH_AS = {"score": "x - 0.1f * abs(i - j)", "mask": "j <= i"}


def like_of(tensor: Any) -> TensorLike:
    """Shape and dtype of an array of any library, or of a TensorLike."""
    try:
        shape, dtype = tuple(int(n) for n in tensor.shape), tensor.dtype
    except (AttributeError, TypeError):
        raise SpecError(f"Score: a {type(tensor).__name__} is no tensor: it has no shape or dtype") from None
    return TensorLike(shape, str(dtype).rpartition(".")[2])
