"""The description of a kernel: how its entry points are launched, and what they support.

Frozen, self-validating values with no third-party import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .dtypes import FLOAT8_ARCH, ITEMSIZE, OF_16_BITS
from .errors import SpecError, UnknownKernel
from .files import mistake
from .operation import Operation
from .options import macros
from .problem import Problem
from .tile import Tile

Arch = tuple[int, int]  # compute capability, e.g. (9, 0)
Dim3 = tuple[int, int, int]


class Computation(NamedTuple):
    """One of attention's computations: the tensors that its kernels read and write, by their names in `args`."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


_ATTENTION = (  # in the order in which kernels are listed
    Computation("block_map", (), ("block_map",)),  # launched first if there is a mask or a Score's mask
    Computation("forward", ("Q", "K", "V"), ("O", "LSE")),
    Computation("preprocess", ("dO", "O"), ("delta",)),
    Computation("backward", ("dO", "Q", "K", "V", "LSE", "delta"), ("dQ", "dK", "dV")),  # launched after preprocess
)
COMPUTATIONS = {computation.name: computation for computation in _ATTENTION}

HOPPER_SMS = 132  # of an H100 or H200 (SXM): a wave of blocks if one block runs per SM
SM_SMEM = 233472  # bytes of shared memory of an SM of 9.0 and 10.x, with the 1 KiB that each block reserves
BLOCK_SMEM = SM_SMEM - 1024  # and the most of one block

INVARIANCES = {  # what may change while the bits of a row stay the same (`Kernel.invariant_to`)
    "runs": "another launch",
    "entries": "values and lengths of other batch entries",
    "batch": "number of batch entries, and the index of the entry that has the compared rows",
    "heads": "number and order of heads",
    "queries": "which other queries are in the call (those of a whole prefill, those of a chunk, or none)",
    "allocation": "keys allocated beyond key_lengths",
    "pages": "keys in pages instead of contiguous, and the order of the pages",
    "page_size": "keys per page",
    "ragged": "a ragged batch instead of a dense one",
    "SMs": "number of SMs (BLOCKS of the tile)",
    "splits": "number of splits of the keys",
    "cluster": "blocks per cluster (CLUSTER of the tile)",
    "strides": "strides and alignment of the tensors",
}
# `invariant_to` of a forward kernel without splits in which the bits of a row do not depend on other rows, nor on where
# its keys are stored.
ROW_INDEPENDENT = tuple(name for name in INVARIANCES if name not in ("SMs", "splits", "cluster"))


class BoxRows(NamedTuple):
    """A tensor map of an operation's matrix (rows, columns) with 16-bit elements: one TMA copy moves `rows(tile)` rows
    of 64 columns (include/swizzle.cuh)."""

    tensor: str
    rows: Callable[[Tile], int]


class LaunchSizes(NamedTuple):
    """Blocks and threads along x, y and z, dynamic shared memory in bytes, and blocks per cluster."""

    grid: Dim3
    block: Dim3
    smem_bytes: int
    cluster: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How one entry point of a `.cu` is launched.

    `args` names its parameters in order; `sandbox.launch.arguments` gives each name its C type and its value.
    """

    name: str
    grid: Callable[[Problem, Tile], Dim3]
    block: Callable[[Tile], Dim3]
    smem_bytes: Callable[[Problem, Tile], int] = lambda problem, tile: 0  # dynamic shared memory
    args: tuple[str, ...]
    numbers: Mapping[str, Callable[[Problem, Tile], int]] = field(default_factory=dict, hash=False)
    """int32 arguments of this entry only, by their names in `args`. The IO model of `profile` reads some of them."""
    unused: Callable[[Problem, Tile], tuple[str, ...]] = lambda problem, tile: ()
    """Tensors and tensor maps among `args` that the code does not read for this problem and tile: they are zeros."""
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

    `then`: further entry points of the same `.cu`, on the same tensors with the same tile; launched in this order after
    the main one, unless they have `launch_first`. `source` is filled in by the registry: the `.cu` beside the spec.
    """

    computes: Operation | Literal["block_map", "forward", "preprocess", "backward"]
    rung: int = 0  # its position on a ladder of attention kernels
    summary: str = ""  # one line for `list`: the idea of this rung
    dtypes: tuple[str, ...]
    min_arch: Arch = (7, 5)
    tiles: tuple[Tile, ...] = (Tile(),)
    """In the order in which they are tried; with a `rank`, this is the order of tiles of equal rank. A tile that `tune`
    stored for the GPU and problem class precedes them."""
    space: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)  # values that `tune` tries
    then: tuple[Entry, ...] = ()
    macros: Mapping[str, int] = field(default_factory=dict, hash=False)  # additional, if kernels share a `.cu`
    macros_of: Callable[[Problem, Tile], Mapping[str, int]] = lambda problem, tile: {}
    """Additional macros, if the code depends on numbers that are not macros, such as lengths."""
    scratch: Mapping[str, Callable[[Problem, Tile], tuple[int, int]]] = field(default_factory=dict, hash=False)
    """{name: (elements of 4 bytes, how many of the first must be zero)}. A custom operation's kernel lists all its
    scratch, an attention kernel only scratch whose size or zeroed part differs from that in `SCRATCH` of
    launch/arguments.py."""
    zeroed: tuple[str, ...] = ()  # outputs of an operation that must be zero before the launch, such as sums by atomics
    maps: Mapping[str, BoxRows] = field(default_factory=dict, hash=False)  # tensor maps of an operation's matrices
    default: bool = False  # True: `attention` may choose it; else it is chosen by name only
    ragged: bool = False  # True: it takes ragged batches; it finds its rows by include/seqlen.cuh
    paged: bool = False  # True: it takes keys in pages; it finds them by include/seqlen.cuh
    float8_keys: bool = False  # True: it takes float8 keys and values with 16-bit queries
    deterministic: bool = True  # False: sums by atomics, in any order
    invariant_to: tuple[str, ...] = ()
    """What may change without changing the bits of a row, with the same tile: names in `INVARIANCES`. `bits` confirms
    it by experiment."""
    invariant_tile: Callable[[Problem], Mapping[str, int]] | None = None
    """With `invariant=True`: the numbers of the tile that determine the bits of a row. They follow from dtypes, head
    dimensions and options alone. None: `invariant=True` is not supported."""
    test_share: int = 1
    """The CPU backend runs a sample of one in `test_share` of the kernel's tests: more than 1 for kernels for few
    problems, and for those that share their source with another one."""
    max_D: int = 256
    max_Dv: int = 0  # 0: max_D
    latent: bool = False  # True: it takes latent attention only (`Problem.latent`): it reads v from k
    supports: Callable[[Problem, Arch | None], str | None] = lambda problem, arch: None
    check_tile: Callable[[Problem, Tile, Arch | None], str | None] = lambda problem, tile, arch: None
    rank: Callable[[Problem, Tile], float] = lambda problem, tile: 0  # the tile with the smallest rank is tried first
    short_sequences: str = ""
    """Name of the kernel that computes the short sequences of a ragged batch over pages in the same launch; "": this
    kernel computes them."""
    preference: int = 0  # among kernels of one rung: `attention` tries the largest first
    first_for: Callable[[Problem], bool] = lambda problem: False
    """Problems for which it is faster than the other kernels, as measured or estimated: `attention` tries it before
    them."""
    arch_suffix: str = ""  # "a": compiled for sm_90a, with architecture-specific instructions
    source: Path = Path()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.computes, Operation):
            self._check_operation(self.computes)
        elif self.computes not in COMPUTATIONS:
            raise SpecError(
                f"{self.name}: computes={self.computes!r} must be one of {', '.join(COMPUTATIONS)}, or an Operation"
            )
        elif not self.rung:
            raise TypeError("Kernel.__init__() missing 1 required keyword-only argument: 'rung'")
        if not self.dtypes:
            raise SpecError(f"{self.name}: a kernel needs at least one dtype")
        given, named = self.operation, {name for entry in self.entries for name in entry.args}
        named |= {self.maps[name].tensor for name in named if name in self.maps}
        if missing := [name for name in (*given.reads, *given.writes) if name not in named]:
            raise SpecError(f"{self.name}: args must include {', '.join(missing)}: every {given.name} kernel has them")
        for entry in self.then:
            if not entry.name.startswith(f"{self.name}_"):
                raise SpecError(f"{self.name}: entry point {entry.name!r} in `then` must begin with {self.name}_")
        if not isinstance(self.tiles, tuple) or not all(isinstance(tile, Tile) for tile in self.tiles):
            raise SpecError(f"{self.name}: tiles={self.tiles!r} must be a tuple: one tile is (Tile(…),), with a comma")
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
        for name in self.invariant_to:
            if name not in INVARIANCES:
                raise SpecError(f"{self.name}: invariant_to: {name!r} is not one of {', '.join(INVARIANCES)}")

    def _check_operation(self, operation: Operation) -> None:
        """Validates the fields that belong to an operation, and gives it a name."""
        if not operation.name:
            object.__setattr__(operation, "name", self.name)
        if unknown := [name for name in self.zeroed if name not in operation.outputs]:
            raise SpecError(f"{self.name}: zeroed: {unknown[0]} is not an output of {operation.name}")
        for name, box in self.maps.items():
            if len(operation.tensors[box.tensor].dims if box.tensor in operation.tensors else ()) != 2:
                raise SpecError(f"{self.name}: maps: {name}: {box.tensor} is not a matrix of {operation.name}")
        known = {*operation.tensors, *operation.dims, *self.scratch, *self.maps}
        for entry in self.entries:
            if stray := [name for name in entry.args if name not in known and name not in entry.numbers]:
                raise SpecError(
                    f"{entry.name}: args: {stray[0]} is not known: it must be a tensor or a dimension of "
                    f"{operation.name} ({', '.join((*operation.tensors, *operation.dims))}), or one of scratch, "
                    "numbers and maps"
                )

    @property
    def custom(self) -> bool:
        """Whether it computes an Operation, not one of attention's computations."""
        return isinstance(self.computes, Operation)

    @property
    def operation(self) -> Operation | Computation:
        """What the kernel computes."""
        return self.computes if isinstance(self.computes, Operation) else COMPUTATIONS[self.computes]

    @property
    def invariances(self) -> tuple[str, ...]:
        """The names in `INVARIANCES` that apply to it."""
        if self.computes not in ("forward", "backward"):
            return ()
        forward, tile = self.computes == "forward", self.tiles[0]
        applies = {"queries": forward, "allocation": forward, "pages": self.paged, "page_size": self.paged}
        applies |= {"ragged": self.ragged, "SMs": "BLOCKS" in tile, "cluster": "CLUSTER" in tile}
        applies["splits"] = "splits" in self.numbers
        return tuple(name for name in INVARIANCES if applies.get(name, True))

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The main entry point, then those in `then`, in this order. Entries with `launch_first` are launched before
        the others."""
        return (self, *self.then)

    def entry(self, name: str) -> Entry:
        """The entry point of that name. Raises UnknownKernel, since an earlier version may lack it."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise UnknownKernel(f"{self.name} has no entry point {name}: it has {', '.join(e.name for e in self.entries)}")

    def why_unsupported(self, problem: Problem, arch: Arch | None = None) -> str | None:
        """Why this kernel cannot take `problem` on `arch` (None: the CPU backend), as a sentence; None if it can. A
        sentence may end with a remedy in parentheses, to which `choose.why_unsupported` adds another kernel."""
        if getattr(problem, "operation", "") != (self.operation.name if self.custom else ""):
            return f"{self.name}: it computes {self.operation.name}: {problem} is a problem of another operation"
        if problem.dtype not in self.dtypes:
            dtypes = " or ".join(self.dtypes)
            return f"{self.name}: dtype {problem.dtype} is not supported: it must be {dtypes} (convert the tensors)"
        if arch is not None and arch < self.min_arch:
            need, have = (".".join(map(str, a)) for a in (self.min_arch, arch))
            needs = f"runs on {need} only" if self.arch_suffix == "a" else f"needs {need} or later"
            return f"{self.name}: compute capability {have} is not supported: the kernel {needs}"
        forward_only = "they are forward only" if self.computes == "backward" else ""
        if problem.kv_dtype and not self.float8_keys:
            keys = f"{problem.kv_dtype} keys with {problem.dtype} queries"
            why = forward_only or "k and v must have the dtype of q"
            return f"{self.name}: {keys} are not supported: {why} (convert k and v to {problem.dtype})"
        if problem.float8_keys and arch is not None and arch < FLOAT8_ARCH:
            tensors = "k and v" if problem.kv_dtype else "q, k and v"
            return (
                f"{self.name}: {problem.dtype_of('K')} is not supported on compute capability {arch[0]}.{arch[1]}: it "
                f"needs 8.9 or later (convert {tensors} to bfloat16 and multiply them by their descale)"
            )
        if problem.ragged and not self.ragged:
            return (
                f"{self.name}: ragged batches are not supported: all batch entries must have the same Sq and Sk (call "
                "it once per sequence)"
            )
        if problem.page_size and not self.paged:
            return (
                f"{self.name}: paged keys are not supported: {forward_only or 'the kernel reads no block table'} "
                "(gather the pages into contiguous k and v)"
            )
        if problem.invariant and self.invariant_tile is None and self.computes in ("forward", "backward"):
            return f"{self.name}: invariant=True is not supported: the bits of a row depend on the rest of the problem"
        if self.latent and not problem.latent:
            return (
                f"{self.name}: only latent attention is supported: v must be the view k[..., :Dv] of k, not a copy or "
                "another view (pass v=k[..., :Dv])"
            )
        for name, width in problem.head_dims:
            most = (name == "Dv" and self.max_Dv) or self.max_D
            if most < width:
                dimensions = f"{name} is" if self.max_Dv else "head dimensions are"
                latent = self.computes == "forward" and width > 256 and not self.latent
                latent = latent and not problem.latent and not problem.invariant and problem.dtype in OF_16_BITS
                latent = latent and (arch is None or arch[0] == 9)
                hint = " (latent attention, v=k[..., :Dv], has another kernel, with D <= 576)" if latent else ""
                return f"{self.name}: {name}={width} is not supported: {dimensions} at most {most}{hint}"
        if reason := self.supports(problem, arch):
            return f"{self.name}: {reason}"
        return None

    def adapted(self, problem: Problem) -> Problem:
        """`problem` for this kernel: with v as a view of k, at most as wide as the kernel supports, if it supports only
        latent attention."""
        if not self.latent or problem.latent or problem.Dv > problem.D:
            return problem
        return replace(problem, latent=True, Dv=min(problem.Dv, self.max_Dv or self.max_D))

    def why_tile_unsupported(self, problem: Problem, tile: Tile, arch: Arch | None = None) -> str | None:
        """Why `tile` is not valid for `problem`, as a sentence; None if it is."""
        if set(tile) != set(self.tiles[0]):
            return f"{self.name}: {self._wrong_numbers(tile)}"
        if problem.invariant and self.invariant_tile:
            for number, value in self.invariant_tile(problem).items():
                if tile[number] != value:
                    return (
                        f"{self.name}: {number}={tile[number]} is not supported with invariant=True: it must be "
                        f"{value}, because the bits of a row depend on it"
                    )
        reason = self.check_tile(problem, tile, arch)
        return f"{self.name}: {reason}" if reason else None

    def _wrong_numbers(self, tile: Tile) -> str:
        """What a tile with other numbers than those of the spec lacks or has in addition."""
        example = self.tiles[0]
        missing, unknown = ([n for n in a if n not in b] for a, b in ((example, tile), (tile, example)))
        reasons = (f"lacks {', '.join(missing)}" * bool(missing), f"has unknown {', '.join(unknown)}" * bool(unknown))
        use = f"set all numbers, such as {example}" if example else "omit tile: the kernel has no such numbers"
        return f"tile {tile or '(empty)'} {' and '.join(filter(None, reasons))}: {use}"

    def launch_sizes(self, entry: Entry, problem: Problem, tile: Tile) -> LaunchSizes:
        """What the spec's functions say about a launch of one of its entries. Raises SpecError, with the line, for a
        function that raises, and for a result of another type."""
        arguments: dict[str, tuple[Any, ...]] = {
            "grid": (problem, tile), "block": (tile,), "smem_bytes": (problem, tile), "cluster": (tile,)
        }  # fmt: skip
        found = {}
        for name, given in arguments.items():
            try:
                found[name] = getattr(entry, name)(*given)
            except Exception as error:
                spec = self.source.with_suffix(".py")
                raise SpecError(f"{entry.name}: {name} in {spec.name}{mistake(error, spec)}") from error
        for name in ("grid", "block"):
            sizes = found[name]
            if not isinstance(sizes, tuple) or len(sizes) != 3 or not all(isinstance(size, int) for size in sizes):
                raise SpecError(f"{entry.name}: {name} is {sizes!r}: it must be a tuple of three integers")
        return LaunchSizes(**found)

    @staticmethod
    def _own_dtypes(problem: Problem) -> str:
        """The tensors whose dtype may differ from that of q."""
        return "VO" if problem.float8 else "KV" if problem.kv_dtype else ""

    def defines(self, problem: Problem, tile: Tile) -> dict[str, int]:
        """The macros for geometry, dtypes and options of the `.cu`, the same for all its entries.

        SMEM_BYTES is the shared memory of the main entry, NAME; that of a further entry, NAME_dq, is SMEM_BYTES_DQ.
        """
        sizes = {entry.name.removeprefix(self.name).upper(): entry.smem_bytes(problem, tile) for entry in self.entries}
        smem = {f"SMEM_BYTES{suffix}": nbytes for suffix, nbytes in sizes.items()}
        own = {**self.macros, **self.macros_of(problem, tile)}
        if self.custom:
            return {**tile, **own, **smem, f"DTYPE_{problem.dtype}": 1}
        return {
            **tile,
            **own,
            "HEAD_DIM": problem.D,
            **smem,
            "CAUSAL": int(bool(problem.causal)),
            f"DTYPE_{problem.dtype}": 1,
            **{f"DTYPE_{of}_{problem.dtype_of(of)}": 1 for of in self._own_dtypes(problem)},
            **macros(problem),
        }
