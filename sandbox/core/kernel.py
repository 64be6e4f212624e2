"""The description of a kernel: how its entry points are launched, and what they support.

Frozen, self-validating values with no third-party import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from .dtypes import FLOAT8_ARCH, ITEMSIZE
from .errors import SpecError, UnknownKernel
from .options import macros
from .problem import Problem
from .tile import Tile

Arch = tuple[int, int]  # compute capability, e.g. (9, 0)
Dim3 = tuple[int, int, int]


class Computation(NamedTuple):
    """The tensors that every kernel of one kind reads and writes, by their names in `args`."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


COMPUTATIONS = {  # in the order in which kernels are listed
    "block_map": Computation((), ("block_map",)),  # launched first if there is a mask or a Score's mask
    "forward": Computation(("Q", "K", "V"), ("O", "LSE")),
    "preprocess": Computation(("dO", "O"), ("delta",)),
    "backward": Computation(("dO", "Q", "K", "V", "LSE", "delta"), ("dQ", "dK", "dV")),  # launched after preprocess
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How one entry point of a `.cu` is launched.

    `args` names its parameters in order; `sandbox.launch.arguments` gives each name its C type and its value.
    """

    name: str
    grid: Callable[[Problem, Tile], Dim3]
    block: Callable[[Tile], Dim3]
    smem_bytes: Callable[[Problem, Tile], int]  # dynamic shared memory
    args: tuple[str, ...]
    numbers: Mapping[str, Callable[[Problem, Tile], int]] = field(default_factory=dict, hash=False)
    """int32 arguments of this entry only, by their names in `args`. The IO model of `profile` reads some of them."""
    programmatic_launch: bool = False
    """True: programmatic dependent launch. The entry may start before the previous one has ended, and must call
    `griddepcontrol_wait` before it reads the previous one's results."""
    launch_first: bool = False
    """True (only in `then`): launched before the main entry, and before other kernels, such as preprocess."""
    cluster: Callable[[Tile], int] = lambda tile: 1
    """Blocks per cluster, along x (include/cluster.cuh)."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise SpecError(f"kernel name {self.name!r} must be an identifier: it is the .cu entry point")


@dataclass(frozen=True, kw_only=True)
class Kernel(Entry):
    """A kernel: its main entry point and everything that Python knows about it.

    `then`: further entry points of the same `.cu`, launched after it in order, on the same tensors with the same tile.
    `source` is filled in by the registry: the `.cu` beside the spec.
    """

    computes: Literal["block_map", "forward", "preprocess", "backward"]
    rung: int
    summary: str  # one line for `list`: the idea of this rung
    dtypes: tuple[str, ...]
    min_arch: Arch
    tiles: tuple[Tile, ...]  # best first; a tile that `tune` stored for the GPU and problem class precedes them
    space: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)  # values that `tune` tries
    then: tuple[Entry, ...] = ()
    macros: Mapping[str, int] = field(default_factory=dict, hash=False)  # additional, if kernels share a `.cu`
    scratch: Mapping[str, Callable[[Problem, Tile], tuple[int, int]]] = field(default_factory=dict, hash=False)
    """{name: (elements, how many of the first must be zero)} of scratch whose size `SCRATCH` does not give."""
    default: bool = False  # True: `attention` may choose it; else it is chosen by name only
    ragged: bool = False  # True: it takes ragged batches; it finds its rows by include/seqlen.cuh
    paged: bool = False  # True: it takes keys in pages, which it finds by `key_address`
    deterministic: bool = True  # False: sums by atomics, in any order
    test_share: int = 1
    """The CPU backend runs a sample of one in `test_share` of the kernel's tests: more than 1 for kernels for few
    problems, and for those that share their source with another one."""
    max_D: int = 256
    supports: Callable[[Problem, Arch | None], str | None] = lambda problem, arch: None
    check_tile: Callable[[Problem, Tile, Arch | None], str | None] = lambda problem, tile, arch: None
    rank: Callable[[Problem, Tile], float] = lambda problem, tile: 0  # the tile with the smallest is tried first
    preference: int = 0  # among kernels of one rung: `attention` tries the largest first
    first_for: Callable[[Problem], bool] = lambda problem: False
    """Problems for which it is faster than higher rungs, as measured: `attention` tries it before them."""
    arch_suffix: str = ""  # "a": compiled for sm_90a, with architecture-specific instructions
    source: Path = Path()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.computes not in COMPUTATIONS:
            raise SpecError(f"{self.name}: computes={self.computes!r} must be one of {', '.join(COMPUTATIONS)}")
        if not self.dtypes:
            raise SpecError(f"{self.name}: a kernel needs at least one dtype")
        given, named = COMPUTATIONS[self.computes], {name for entry in self.entries for name in entry.args}
        if missing := [name for name in (*given.reads, *given.writes) if name not in named]:
            raise SpecError(
                f"{self.name}: args must include {', '.join(missing)}: every {self.computes} kernel has them"
            )
        for entry in self.then:
            if not entry.name.startswith(f"{self.name}_"):
                raise SpecError(f"{self.name}: entry point {entry.name!r} in `then` must begin with {self.name}_")
        if not self.tiles:
            raise SpecError(f"{self.name}: a kernel needs at least one tile")
        for tile in self.tiles:
            if set(tile) != set(self.tiles[0]):
                raise SpecError(f"{self.name}: tile {tile} must name the same numbers as {self.tiles[0]}")
        if self.space and set(self.space) != set(self.tiles[0]):
            raise SpecError(f"{self.name}: space must name {', '.join(self.tiles[0])}, not {', '.join(self.space)}")
        for dtype in self.dtypes:
            if dtype not in ITEMSIZE:
                raise SpecError(f"{self.name}: dtype {dtype!r} is not one of {', '.join(ITEMSIZE)}")

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every entry point, in launch order, except those with `launch_first`."""
        return (self, *self.then)

    def entry(self, name: str) -> Entry:
        """The entry point of that name. Raises UnknownKernel, since an earlier version may lack it."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise UnknownKernel(f"{self.name} has no entry point {name}: it has {', '.join(e.name for e in self.entries)}")

    def why_unsupported(self, problem: Problem, arch: Arch | None = None) -> str | None:
        """Why this kernel cannot take `problem` on `arch` (None: the CPU backend), as a sentence; None if it can."""
        if problem.dtype not in self.dtypes:
            return f"{self.name}: dtype {problem.dtype} is not supported: use {' or '.join(self.dtypes)}"
        if arch is not None and arch < self.min_arch:
            need, have = (".".join(map(str, a)) for a in (self.min_arch, arch))
            later = "and no other" if self.arch_suffix == "a" else "or later"
            return f"{self.name}: needs compute capability {need} {later}, this is {have}"
        if problem.float8 and arch is not None and arch < FLOAT8_ARCH:
            return (
                f"{self.name}: {problem.dtype} needs compute capability 8.9 or later, whose tensor cores support it; "
                f"this is {arch[0]}.{arch[1]}: convert q, k and v to bfloat16 and multiply them by their descale"
            )
        if problem.ragged and not self.ragged:
            return f"{self.name}: ragged batches are not supported: call it once per sequence, or choose another kernel"
        if problem.page_size and not self.paged:
            return f"{self.name}: paged keys are not supported: use fwd_decode, or gather the pages"
        for name, width in (("D", problem.D), ("Dv", problem.Dv)):
            if self.max_D < width:
                return f"{self.name}: {name}={width} is not supported: head dimensions are at most {self.max_D}"
        if reason := self.supports(problem, arch):
            return f"{self.name}: {reason}"
        return None

    def why_tile_unsupported(self, problem: Problem, tile: Tile, arch: Arch | None = None) -> str | None:
        """Why `tile` is illegal for `problem`, as a sentence; None if it is legal."""
        if set(tile) != set(self.tiles[0]):
            return f"{self.name}: tile {tile or '(empty)'} must set {', '.join(self.tiles[0])} and nothing else"
        reason = self.check_tile(problem, tile, arch)
        return f"{self.name}: {reason}" if reason else None

    def defines(self, problem: Problem, tile: Tile) -> dict[str, int]:
        """The macros for geometry, dtype and score options of the `.cu`, the same for all its entries.

        SMEM_BYTES is the shared memory of the main entry, NAME; that of a further entry, NAME_dq, is SMEM_BYTES_DQ.
        """
        smem = {entry.name.removeprefix(self.name).upper(): entry.smem_bytes(problem, tile) for entry in self.entries}
        return {
            **tile,
            **self.macros,
            "HEAD_DIM": problem.D,
            **{f"SMEM_BYTES{suffix}": nbytes for suffix, nbytes in smem.items()},
            "CAUSAL": int(bool(problem.causal)),
            f"DTYPE_{problem.dtype}": 1,
            **({f"DTYPE_{of}_{problem.dtype_of(of)}": 1 for of in "VO"} if problem.float8 else {}),
            **macros(problem),
        }
