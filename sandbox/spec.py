"""What a kernel is asked (`Problem`), how it is cut (`Tile`) and what it can do (`Kernel`).

Frozen, self-validating values with no third-party import, so that a spec in `kernels_cu/` imports this module alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .errors import SpecError, UnknownKernel

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes an element
Causal = Literal[False, "bottom-right", "top-left"]
Arch = tuple[int, int]  # compute capability, e.g. (9, 0)
Dim3 = tuple[int, int, int]


class Computation(NamedTuple):
    """What every kernel of a kind reads and writes, by the names in its `args`."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


COMPUTATIONS = {  # in the order in which kernels are listed
    "forward": Computation(("Q", "K", "V"), ("O", "LSE")),
    "delta": Computation(("dO", "O"), ("delta",)),
    "backward": Computation(("dO", "Q", "K", "V", "LSE", "delta"), ("dQ", "dK", "dV")),  # launched after a delta
}


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def _integer(name: str, value: Any, least: int) -> int:
    """`value`, also a NumPy integer, as an int."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise SpecError(f"{name}={value!r} must be an integer >= {least}")
    return operator.index(value)


def normalise_causal(causal: bool | str) -> Causal:
    """`causal=` as people write it -> the alignment it names. True is "bottom-right"."""
    if causal is False or causal is None:
        return False
    if causal is True or causal == "bottom-right":
        return "bottom-right"
    if causal == "top-left":
        return "top-left"
    raise SpecError(f'causal={causal!r} is not known: choose False, True (= "bottom-right") or "top-left"')


@dataclass(frozen=True)
class Problem:
    """Shapes, dtype and semantics of one attention call.

    q, o: (B, H, Sq, D); k, v: (B, Hk, Sk, D); query head h reads key/value head h // (H / Hk).
    `scale` None means 1/sqrt(D). `alignment`: bytes, at most 16, that the address of every row of q, k and v, and in
    a backward of do and o, is a multiple of. `mappable`: their strides are such as a tensor map takes, positive, or 0
    in B or H. Raises SpecError naming the value that makes no sense.
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

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name, least in (("B", 0), ("H", 0), ("Sq", 0), ("Sk", 0), ("Hk", 0), ("D", 1)):
            set_(self, name, _integer(name, getattr(self, name), least))
        if self.dtype not in ITEMSIZE:
            raise SpecError(f"dtype={self.dtype!r} is not supported: choose one of {', '.join(ITEMSIZE)}")
        if self.Hk == 0:
            set_(self, "Hk", self.H)
        if self.H and self.H % self.Hk:
            raise SpecError(f"H={self.H} query heads are not a multiple of Hk={self.Hk} key/value heads")
        set_(self, "causal", normalise_causal(self.causal))
        try:
            set_(self, "scale", 1.0 / math.sqrt(self.D) if self.scale is None else float(self.scale))
        except (TypeError, ValueError):
            raise SpecError(f"scale={self.scale!r} must be a number") from None
        if not math.isfinite(self.scale):
            raise SpecError(f"scale={self.scale!r} must be finite")

    @classmethod
    def from_shape(cls, shape: str, **semantics: Any) -> Problem:
        """`"B,H,S,D"` or `"B,H,Sq,Sk,D"`, H also as H/Hk, and the other fields by name."""
        parts = [part.strip() for part in shape.split(",")]
        heads = parts[1].split("/") if len(parts) > 1 else []
        numbers = [*parts[:1], *heads, *parts[2:]]
        if len(parts) not in (4, 5) or len(heads) not in (1, 2) or not all(n.isdecimal() for n in numbers):
            raise SpecError(f"shape {shape!r} must be B,H,S,D or B,H,Sq,Sk,D, such as 1,12,1024,64 or 1,8/2,1024,64")
        lengths = [int(n) for n in parts[2:-1]]
        Hk = int(heads[-1])
        if len(heads) == 2 and not Hk:
            raise SpecError(f"shape {shape!r}: Hk=0 key/value heads serve no query head")
        return cls(int(parts[0]), int(heads[0]), lengths[0], lengths[-1], int(parts[-1]), Hk=Hk, **semantics)

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return ITEMSIZE[self.dtype]

    @property
    def diagonal(self) -> int:
        """Query i sees keys j <= i + diagonal (when causal)."""
        return self.Sk - self.Sq if self.causal == "bottom-right" else 0

    @property
    def visible_pairs(self) -> int:
        """How many (query, key) pairs one head has to score."""
        if not self.causal:
            return self.Sq * self.Sk
        return sum(min(max(i + self.diagonal + 1, 0), self.Sk) for i in range(self.Sq))

    @property
    def flops(self) -> int:
        """Forward floating-point operations by the field's rule: 4·B·H·Sq·Sk·D, half of it for causal."""
        full = 4 * self.B * self.H * self.Sq * self.Sk * self.D
        return full // 2 if self.causal else full

    def flops_of(self, computes: str) -> int:
        """`flops`, or 2.5 times as many for a "backward": five matrix products instead of two."""
        return {"forward": self.flops, "backward": self.flops * 5 // 2}.get(computes, 0)

    def __str__(self) -> str:
        heads = f"H{self.H}" if self.Hk == self.H else f"H{self.H}/{self.Hk}"
        lengths = f"S{self.Sq}" if self.Sq == self.Sk else f"S{self.Sq}x{self.Sk}"
        mask = {False: "", "bottom-right": " causal", "top-left": " causal-top-left"}[self.causal]
        return f"B{self.B} {heads} {lengths} D{self.D} {self.dtype}{mask}"


class Tile(Mapping[str, int]):
    """The named numbers that fix a kernel's tiles, e.g. `Tile(BLOCK_M=64, BLOCK_N=32)`; read as `tile.BLOCK_M`.

    Immutable and hashable. Each number reaches the `.cu` as a macro of its name.
    """

    __slots__ = ("_numbers",)
    _numbers: dict[str, int]

    def __init__(self, **numbers: int):
        for name, value in numbers.items():
            if not name.isupper() or not name.isidentifier():
                raise SpecError(f"tile: {name!r} must be an upper-case identifier: it becomes a macro")
            numbers[name] = _integer(f"tile: {name}", value, 1)
        object.__setattr__(self, "_numbers", numbers)

    @classmethod
    def parse(cls, text: str) -> Tile:
        """`"BLOCK_M=64,BLOCK_N=32"` -> Tile. Raises SpecError naming the part it cannot read."""
        numbers: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.replace(" ", ",").split(","))):
            name, equals, value = part.partition("=")
            if not equals or not value.strip().isdecimal():
                raise SpecError(f"tile: {part!r} is not NAME=number, as in BLOCK_M=64,BLOCK_N=32")
            if name.strip() in numbers:
                raise SpecError(f"tile: {name.strip()} is named twice in {text!r}")
            numbers[name.strip()] = int(value)
        return cls(**numbers)

    def __getattr__(self, name: str) -> int:
        try:
            return self._numbers[name]
        except KeyError:
            raise AttributeError(f"tile has no {name}: it has {', '.join(self._numbers)}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a tile is immutable: make a new one to change {name}")

    def __getitem__(self, name: str) -> int:
        return self._numbers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._numbers.items())))

    def __reduce__(self) -> tuple:
        return _tile, (self._numbers,)

    def __repr__(self) -> str:
        return f"Tile({self})"

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self._numbers.items())


def _tile(numbers: dict[str, int]) -> Tile:
    return Tile(**numbers)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How one entry point of a `.cu` is launched.

    `args` names its parameters in order; `sandbox.arguments` gives each name its C type and its value.
    """

    name: str
    grid: Callable[[Problem, Tile], Dim3]
    block: Callable[[Tile], Dim3]
    smem_bytes: Callable[[Problem, Tile], int]  # dynamic shared memory
    args: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise SpecError(f"kernel name {self.name!r} must be an identifier: it is the .cu entry point")


@dataclass(frozen=True, kw_only=True)
class Kernel(Entry):
    """An entry point that people name, with everything Python knows of it.

    `then`: further entry points of the same `.cu`, launched after it in order, on the same tensors with the same tile.
    `source` is filled in by the registry: the `.cu` beside the spec.
    """

    computes: Literal["forward", "delta", "backward"]
    rung: int
    summary: str  # one line for `list`: the idea of this rung
    dtypes: tuple[str, ...]
    min_arch: Arch
    tiles: tuple[Tile, ...]  # best first, until `tune` has found a better one for a GPU and a class of problems
    space: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)  # what `tune` tries for each number
    then: tuple[Entry, ...] = ()
    deterministic: bool = True  # False: sums by atomics, in any order
    max_D: int = 256
    supports: Callable[[Problem, Arch | None], str | None] = lambda problem, arch: None
    check_tile: Callable[[Problem, Tile, Arch | None], str | None] = lambda problem, tile, arch: None
    rank: Callable[[Problem, Tile], float] = lambda problem, tile: 0  # of the tiles the smallest is tried first
    arch_suffix: str = ""  # "a": the kernel uses instructions of that very architecture, as sm_90a
    source: Path = Path()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.computes not in COMPUTATIONS:
            raise SpecError(f"{self.name}: computes={self.computes!r} must be one of {', '.join(COMPUTATIONS)}")
        if not self.dtypes:
            raise SpecError(f"{self.name}: a kernel needs at least one dtype")
        given, named = COMPUTATIONS[self.computes], {name for entry in self.entries for name in entry.args}
        if missing := [name for name in (*given.reads, *given.writes) if name not in named]:
            raise SpecError(f"{self.name}: args must name {', '.join(missing)}: the {self.computes} is given them all")
        for entry in self.then:
            if not entry.name.startswith(f"{self.name}_"):
                raise SpecError(f"{self.name}: then: {entry.name!r} must begin with {self.name}_")
        if not self.tiles:
            raise SpecError(f"{self.name}: a kernel needs at least one tile")
        for tile in self.tiles:
            if set(tile) != set(self.tiles[0]):
                raise SpecError(f"{self.name}: tile {tile} names other numbers than {self.tiles[0]}")
        if self.space and set(self.space) != set(self.tiles[0]):
            raise SpecError(f"{self.name}: space names {', '.join(self.space)}, a tile {', '.join(self.tiles[0])}")
        for dtype in self.dtypes:
            if dtype not in ITEMSIZE:
                raise SpecError(f"{self.name}: dtype {dtype!r} is not one of {', '.join(ITEMSIZE)}")

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every entry point, in the order of the launches."""
        return (self, *self.then)

    def entry(self, name: str) -> Entry:
        """The entry point of that name. Raises UnknownKernel, since a version of old may lack it."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise UnknownKernel(f"{self.name} has no entry {name}: it has {', '.join(e.name for e in self.entries)}")

    def refuses(self, problem: Problem, arch: Arch | None = None) -> str | None:
        """Why this kernel cannot take `problem` on `arch` (None: the CPU backend), as a sentence; None if it can."""
        if problem.dtype not in self.dtypes:
            return f"{self.name}: dtype {problem.dtype} is not built: it takes {', '.join(self.dtypes)}"
        if arch is not None and arch < self.min_arch:
            need, have = (".".join(map(str, a)) for a in (self.min_arch, arch))
            return f"{self.name}: needs compute capability {need} or later, this is {have}"
        if self.max_D < problem.D:
            return f"{self.name}: D={problem.D} is too large: head widths up to {self.max_D} are built"
        if reason := self.supports(problem, arch):
            return f"{self.name}: {reason}"
        return None

    def refuses_tile(self, problem: Problem, tile: Tile, arch: Arch | None = None) -> str | None:
        """Why `tile` is illegal for `problem`, as a sentence; None if it is legal."""
        if set(tile) != set(self.tiles[0]):
            return f"{self.name}: tile {tile or '(empty)'} must name {', '.join(self.tiles[0])} and nothing else"
        reason = self.check_tile(problem, tile, arch)
        return f"{self.name}: {reason}" if reason else None

    def defines(self, problem: Problem, tile: Tile) -> dict[str, int]:
        """The macros that carry geometry, dtype and mask from the spec to the `.cu`, alike for all its entries.

        SMEM_BYTES is the first entry's shared memory; that of a later one, NAME_dq, is SMEM_BYTES_DQ.
        """
        smem = {entry.name.removeprefix(self.name).upper(): entry.smem_bytes(problem, tile) for entry in self.entries}
        return {
            **tile,
            "HEAD_DIM": problem.D,
            **{f"SMEM_BYTES{suffix}": nbytes for suffix, nbytes in smem.items()},
            "CAUSAL": int(bool(problem.causal)),
            f"DTYPE_{problem.dtype}": 1,
        }
