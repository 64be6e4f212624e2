"""A user's own CUDA expressions: a modified score, and a mask."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from .block_map import Sizes, sizes_of
from .dtypes import ITEMSIZE
from .errors import SpecError
from .project import from_project, within_project

SIZES = {**ITEMSIZE, "int32": 4, "int64": 8, "bool": 1}  # bytes per element
DTYPES = ("float32", "float16", "bfloat16", "int32", "bool")  # of the tensors that an expression may read
VARIABLES = ("x", "b", "h", "i", "j", "Sq", "Sk")  # of every expression
_CPP = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t class compl const
constexpr const_cast continue decltype default delete do double dynamic_cast else enum explicit export extern false
float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private
protected public register reinterpret_cast return short signed sizeof static static_assert static_cast struct switch
template this thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t
while xor xor_eq
"""
CPP_KEYWORDS = frozenset(_CPP.split())  # of C++17; not allowed as names
FUNCTIONS = ("exp", "log", "tanh", "abs", "min", "max", "where")  # that an expression may call
MOST_DIMENSIONS = 4
_TAKEN = {*VARIABLES, *FUNCTIONS, *CPP_KEYWORDS}
BLOCK_MAP = "score.block-map"  # name of a given block map; the hyphen excludes a tensor of that name


class TensorLike(NamedTuple):
    """Shape and dtype of a tensor, without its elements: all that a compiled kernel and a JSON row depend on."""

    shape: tuple[int, ...]
    dtype: str


class Score:
    """Two expressions in CUDA C++ over `VARIABLES` and tensors, compiled into every kernel. Immutable.

    score: the new value of the score x of query i and key j, in batch entry b and head h. mask: whether query i sees
    key j, in addition to causal, window and mask=. i and j are row indices of q and k; Sq and Sk the numbers of rows.
    tensors: {name: array}, read as `name(i, j)` with one index per dimension, at most four; float32, float16, bfloat16,
    int32 or bool; any strides. Indices must be in range for every b, h, i < Sq and j < Sk. Constants to autograd.

    Two scores are equal if their expressions, `made_for`, and the names, shapes and dtypes of their tensors are equal.
    `file`: the file it was read from. `blocks`: the block map of its mask. `made_for`: the (B, H, Sq, Sk) of that map
    (None: unknown). Raises SpecError naming the invalid value; an expression is compiled when it is first used.
    """

    # Not a dataclass: with the import of `dataclasses` it would take 1.4 ms of `import sandbox`.
    score: str
    mask: str
    tensors: Mapping[str, Any]
    file: str
    blocks: Any
    made_for: Sizes | None
    # `structure`: what equality compares, with `made_for`. `described`: this score with TensorLike in place of tensors,
    # so that it keeps no array alive.
    structure: tuple[str, str, tuple[tuple[str, TensorLike], ...]]
    described: Score
    arrays: Mapping[str, Any]  # tensors and blocks, by their names in plans
    _hash: int  # of `structure`; every attention call needs it
    on_host: ClassVar[Callable[..., tuple[Any, Any, Any]]]  # set in sandbox/__init__.py: it needs a compiler

    def __init__(
        self, score: str = "x", mask: str = "true", tensors: Mapping[str, Any] = MappingProxyType({}), file: str = "",
        blocks: Any = None, made_for: Sizes | None = None,
    ):  # fmt: skip
        score, mask = _expression("score", score), _expression("mask", mask)
        tensors = MappingProxyType(dict(tensors))
        likes = {name: _checked(name, tensor) for name, tensor in tensors.items()}
        if blocks is not None and made_for is None:
            made_for = sizes_of(blocks)
        structure = score, mask, tuple(likes.items())
        arrays = {f"score.{name}": tensor for name, tensor in tensors.items()}
        if blocks is not None:
            arrays[BLOCK_MAP] = blocks
        bare = blocks is None and all(isinstance(x, TensorLike) for x in tensors.values())
        fields = {
            "score": score, "mask": mask, "tensors": tensors, "file": file, "blocks": blocks, "made_for": made_for,
            "structure": structure, "arrays": arrays, "_hash": hash(structure),
            "described": self if bare else _described(score, mask, file, made_for, **likes),
        }  # fmt: skip
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Score.{name} cannot be changed: construct another Score")

    @property
    def changes(self) -> bool:
        """Whether it modifies x."""
        return self.score != "x"

    @property
    def hides(self) -> bool:
        """Whether it may hide a key."""
        return self.mask != "true"

    @property
    def named_by_mask(self) -> set[str]:
        """The names in its mask: variables, functions, tensors, and always "true"."""
        return set(re.findall(r"[A-Za-z_]\w*", self.mask)) | {"true"}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Score) and self.structure == other.structure and self.made_for == other.made_for
        )  # fmt: skip

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Score, (self.score, self.mask, dict(self.tensors), self.file, self.blocks, self.made_for)

    def __repr__(self) -> str:
        return f"Score({self.score!r}, {self.mask!r}, {dict(self.tensors)!r})"

    def __str__(self) -> str:
        shown = [self.score] if self.changes or not self.hides else []
        return "; ".join([*shown, f"mask {self.mask}"] if self.hides else shown)

    def evaluate(self, x: Any, b: int, h: int, i: Any, j: Any, Sq: int, Sk: int) -> tuple[Any, Any, Any]:
        """(new x, its derivative by x, which pairs are visible) of NumPy scores x (M, N), for queries i (M, 1) and keys
        j (1, N), in double precision, compiled by the host compiler. `sandbox.reference` calls it."""
        return self.on_host(x, b, h, i, j, Sq, Sk)

    def with_blocks(self, blocks: Any) -> Score:
        """A copy with the block map that `sandbox.block_map` returned, so that calls do not compute one."""
        return Score(self.score, self.mask, self.tensors, self.file, blocks)

    def as_json(self) -> dict[str, Any]:
        """A row for `from_json`, with shapes and dtypes of the tensors instead of their elements."""
        tensors = {name: {"shape": list(like.shape), "dtype": like.dtype} for name, like in self.structure[2]}
        file = within_project(self.file)
        text = {"score": self.score, "mask": self.mask}
        return text | ({"tensors": tensors} if tensors else {}) | ({"file": file} if file else {})

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Score:
        """The score that `as_json` wrote, with TensorLike in place of tensors."""
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
        from .files import mistakes_of, names_of  # imports threading, which `import sandbox` does not need

        found = names_of(path).get("score")
        if isinstance(found, Callable):  # type: ignore[arg-type]
            with mistakes_of(path, f"score {path}"):
                found = found(problem)  # type: ignore[misc]
        if not isinstance(found, cls):
            raise SpecError(
                f"score {path}: it must define score: a sandbox.Score, or a function of a Problem that returns one"
            )
        return cls(found.score, found.mask, found.tensors, str(path.resolve()), found.blocks, found.made_for)


def _expression(name: str, text: Any) -> str:
    """The expression `name` of a score. Raises SpecError."""
    if not isinstance(text, str) or not text.strip():
        raise SpecError(f"Score: {name}={text!r} must be an expression in CUDA C++, such as {_SUCH_AS[name]!r}")
    if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text):
        raise SpecError(f"Score: {name}={text!r} must not contain NUL or surrogate characters")
    from . import expression  # `import sandbox` does not need it

    expression.check(name, text.strip())
    return text.strip()


def _checked(name: Any, tensor: Any) -> TensorLike:
    """Shape and dtype of a tensor that a score reads as `name`. Raises SpecError."""
    if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
        raise SpecError(
            f"Score: a tensor cannot be called {name!r}: use an identifier that is neither a C++ keyword nor "
            f"one of {', '.join((*VARIABLES, *FUNCTIONS))}"
        )
    like = like_of(tensor, f"tensor {name}")
    if like.dtype not in DTYPES:
        raise SpecError(f"Score: tensor {name} is {like.dtype}: it must be one of {', '.join(DTYPES)}")
    if not like.shape:
        raise SpecError(f"Score: tensor {name} has no dimension: reshape it to (1,) and read {name}(0)")
    if len(like.shape) > MOST_DIMENSIONS:
        raise SpecError(f"Score: tensor {name} has shape {like.shape}: at most four dimensions are supported")
    return like


@lru_cache(maxsize=256)
def _described(score: str, mask: str, file: str, made_for: Sizes | None, /, **likes: TensorLike) -> Score:
    """Cached, so that a Score that is constructed in every call does not construct its `described` every time."""
    return Score(score, mask, likes, file, None, made_for)


_SUCH_AS = {"score": "x - 0.1f * abs(i - j)", "mask": "j <= i"}


def like_of(tensor: Any, what: str = "a tensor") -> TensorLike:
    """Shape and dtype of an array of any library, or of a TensorLike."""
    try:
        shape, dtype = tuple(int(n) for n in tensor.shape), tensor.dtype
    except (AttributeError, TypeError):
        raise SpecError(
            f"Score: {what} is of type {type(tensor).__name__}, not an array: pass a NumPy, CuPy or PyTorch array"
        ) from None
    return TensorLike(shape, str(dtype).rpartition(".")[2])
