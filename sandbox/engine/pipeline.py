"""Kernel + tile + problem -> compiled, arguments packed, launched, on either backend."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from ..core import registry
from ..core.errors import CompileError, NoFastCompilation, SpecError, UnsupportedProblem
from ..core.kernel import Arch, Entry, Kernel
from ..core.normalise import normalise_causal
from ..core.operation import Operation
from ..core.problem import Problem
from ..core.registry import entry_owner
from ..core.score import BLOCK_MAP
from ..core.tile import Tile
from ..cpu import build
from ..cpu.launch import CpuFunction
from ..launch import arguments, driver, parameters
from ..launch.arguments import OPTIONAL_OUTPUTS, ArgumentBlock, Launch, argument_kinds, zeroed_of
from ..launch.dlpack import HOST, Device
from ..launch.tensor_maps import Tensor, encode_for_host
from ..toolchain import arch as architectures
from ..toolchain import cache, nvrtc, snippets, sources
from ..toolchain.nvrtc import Compiled, Resources
from .choose import choose_kernel, choose_tile, why_grid_unsupported
from .launches import EntryLaunch, make_launch

DEFAULT_ARCH = "sm_90a"  # the target without a GPU, and the default of `python -m sandbox compile`


@dataclass(frozen=True)
class Prepared:
    """A kernel ready to launch on one problem: loaded, its geometry fixed, its arguments packed.

    `launch` runs everything that the kernel needs: for a backward also preprocess, and the zeroing of scratch.
    `seconds`: compile time; `cached`: the binary came from the cache, and `seconds` is the time of the earlier compile.
    """

    kernel: Kernel
    tile: Tile
    problem: Problem
    device: Device
    seconds: float
    cached: bool
    compiled: tuple[Compiled, ...]  # one per entry; empty on the CPU backend, and for a fast compilation
    launch: Launch  # for tensors of the shapes and strides passed to `prepare`
    tensor_names: tuple[str, ...]  # tensors that the kernel uses, including scratch
    order: tuple[str, ...]  # names of the tensors whose addresses `launch` takes

    def pointers(self, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        """The argument of `launch`; `tensors` by the names in the spec's `args`."""
        return tuple(tensors[name].pointer for name in self.order)

    def wait(self) -> None:
        """Wait for all work of the GPU. An error of this kernel's launch is raised here, with its name."""
        if self.device != HOST:
            driver.device(self.device[1]).synchronize(after=f"{self.kernel.name} on {self.problem}, tile {self.tile}")


def prepare(
    kernel: Kernel, tile: Tile, problem: Problem, tensors: Mapping[str, Tensor], device: Device,
    order: Sequence[str] = (), fast: bool = False,
) -> Prepared:  # fmt: skip
    """Compile (or find in the cache), load and pack. `tensors` by the names in the spec's `args`; scratch may be
    absent. `order`: names of the tensors whose addresses `launch` takes, in this order; all tensors that the kernel
    uses must be among them. `fast`: as for `load`.

    A backward also computes the gradients of bias and sink if `tensors` has "dbias" or "dsink". If `tensors` has
    "dLSE", an input, the gradients include the part that comes through LSE.

    An entry whose grid is empty is not launched. Raises what `load` raises, and UnsupportedProblem for a grid that is
    too large.
    """
    arch = arch_of(device)
    required = [choose_kernel(problem, computes, arch) for computes in _prerequisites(kernel, problem, tensors)]
    own = parts(kernel, tile, problem, device)
    every = [*(Part(other, tile_on(device, other, problem), problem) for other in required), *own]

    def load_part(part: Part) -> Loaded:
        return load(part.kernel, part.tile, part.problem, device, fast and part.kernel is kernel)

    if len(every) == 1:  # starting a thread takes 0.2 ms
        loads = [load_part(every[0])]
    else:
        with ThreadPoolExecutor() as pool:  # compile in parallel
            loads = [*pool.map(load_part, every)]
    launches: list[EntryLaunch] = []
    for part, its_load in zip(every, loads, strict=True):
        launches += _launches(part, tensors, device, its_load)
    launches.sort(key=lambda one: not one.entry.launch_first)
    loaded = loads[len(required)]
    names = tuple(dict.fromkeys(name for one in launches for name in one.arguments.tensor_names))
    order = tuple(order) or names
    zeroed = {name: n for part in own for name, n in zeroed_of(part.kernel, part.problem, part.tile).items()}
    launch = make_launch(launches, zeroed, order, device)
    compiled = () if fast else loaded.compiled
    return Prepared(kernel, tile, problem, device, loaded.seconds, loaded.cached, compiled, launch, names, order)


class Part(NamedTuple):
    """A kernel that `Prepared.launch` runs, its tile, and the part of the problem that the kernel computes."""

    kernel: Kernel
    tile: Tile
    problem: Problem
    overlaps: bool = False  # programmatic dependent launch: may start before the previous kernel has ended


def parts(kernel: Kernel, tile: Tile, problem: Problem, device: Device) -> tuple[Part, ...]:
    """The kernels that compute `problem` in one call of `Prepared.launch`: usually `kernel` alone. For a ragged batch
    over pages in which some sequences may have few queries and others many, they are `kernel` and
    `kernel.short_sequences`, if the latter supports the problem.

    With one sequence the second kernel would compute all or nothing: `kernel` computes it also if it is short.

    The second kernel is launched after `kernel` and overlaps its last blocks (programmatic dependent launch): it fills
    the SMs that become idle. Each kernel finds its sequences on the device."""
    alone = Part(kernel, tile, problem)
    if not (kernel.short_sequences and problem.ragged and problem.page_size and not problem.short) or problem.B == 1:
        return (alone,)
    other, short = registry.get(kernel.short_sequences), replace(problem, part="short")
    try:
        its_tile = tile_on(device, other, short)
    except UnsupportedProblem:
        return (alone,)
    return alone._replace(problem=replace(problem, part="long")), Part(other, its_tile, short, overlaps=True)


def scratch_of(kernel: Kernel, problem: Problem, tile: Tile, device: Device) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the scratch of the kernels that `parts` returns."""
    found: dict[str, tuple[int, ...]] = {}
    for part in parts(kernel, tile, problem, device):
        found |= arguments.scratch_of(part.kernel, part.problem, part.tile)
    return found


def _prerequisites(kernel: Kernel, problem: Problem, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """The computations that must run before `kernel`."""
    if kernel.custom:
        return
    if problem.has_block_map and kernel.computes in ("forward", "backward") and BLOCK_MAP not in tensors:
        yield "block_map"
    if kernel.computes == "backward":
        yield "preprocess"


def _launches(part: Part, tensors: Mapping[str, Tensor], device: Device, loaded: Loaded) -> Iterator[EntryLaunch]:
    kernel, tile, problem, overlaps = part
    encode, kinds = encode_for_host if device == HOST else driver.encode_tensor_map, argument_kinds(kernel)
    for entry, function in zip(kernel.entries, loaded.functions, strict=True):
        if any(name in entry.args and name not in tensors for name in OPTIONAL_OUTPUTS):
            continue
        sizes = kernel.launch_sizes(entry, problem, tile)
        if reason := why_grid_unsupported(kernel, sizes.grid, problem):
            raise UnsupportedProblem(reason)
        block = ArgumentBlock(entry, problem, tile, tensors, encode, kinds)
        yield EntryLaunch(
            entry, function, sizes.grid, sizes.block, sizes.smem_bytes, block,
            entry.programmatic_launch or overlaps, sizes.cluster,
        )  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """A kernel's entries, loaded on one device, and the results of compiling them; fields as in Prepared."""

    functions: tuple[driver.CudaFunction | CpuFunction, ...]
    compiled: tuple[Compiled, ...]
    seconds: float
    cached: bool
    max_threads: tuple[int, ...]  # per entry: __launch_bounds__, 0 if it has none


@snippets.explaining  # a compile error in the expressions of a Score quotes them
def load(kernel: Kernel, tile: Tile, problem: Problem, device: Device, fast: bool = False) -> Loaded:
    """Compile `kernel` for `problem`, or find it in the cache, and load it. Raises CompileError, ToolchainMissing,
    GpuUnavailable, DriverError; SpecError if the spec's `args` do not match the compiled parameters, or its `block`
    exceeds the __launch_bounds__.

    `fast`: on a GPU, compile with `nvrtc.compile_fast`, for a launch of which only the results matter, not the
    resources and times. Raises NoFastCompilation if that is not supported, or the kernel then needs too many registers
    to be launched."""
    defines = kernel.defines(problem, tile)
    if (
        (problem.ragged or problem.page_size or kernel.custom)
        and device != HOST
        and os.environ.get("SANDBOX_CHECKED", "0") not in ("", "0")
    ):
        defines["CHECKED_KERNELS"] = 1
    generated, fast = snippets.folders(problem), fast and device != HOST
    what = kernel, tuple(defines.items()), generated, device, fast
    failed, error = _compile_errors.get(what, (None, None))
    if error and failed and failed == _source_fingerprint(kernel, generated):
        raise error()
    loaded = _load(*what)
    _check_block_sizes(kernel, tile, loaded.max_threads)
    if fast:
        _check_launchable(kernel, problem, tile, loaded.compiled)
    return loaded


def _check_launchable(kernel: Kernel, problem: Problem, tile: Tile, compiled: Sequence[Compiled]) -> None:
    for entry, made in zip(kernel.entries, compiled, strict=True):
        r = made.resources
        if not occupancy(entry, problem, tile, r, architectures.parse(made.arch)).blocks_per_sm:
            threads = math.prod(entry.block(tile))
            message = f"{entry.name} cannot be launched after the fast compilation: {r.registers} registers, {threads} "
            raise NoFastCompilation(f"{message}threads per block; compile it with optimisation")


def _check_block_sizes(kernel: Kernel, tile: Tile, max_threads: Sequence[int]) -> None:
    for entry, most in zip(kernel.entries, max_threads, strict=True):
        parameters.check_block_size(entry.name, entry.block(tile), most)


def _max_threads(compiled: Sequence[Compiled]) -> tuple[int, ...]:
    return tuple(nvrtc.max_threads(made.ptx, made.entry) for made in compiled)


def _source_fingerprint(kernel: Kernel, folders: tuple[Path, ...]) -> str | None:
    """Fingerprint of a kernel's source and of all headers that NVRTC or the C++ compiler reads from the project,
    `folders` (the header generated from a Score) or the environment's include path; None if it is unknown."""
    try:
        return sources.fingerprint(kernel.source, build.searched(kernel.source, folders))
    except FileNotFoundError:  # a missing file: the compiler's message has more detail
        return None


# Compile errors, with the fingerprint of the source before the compile. The command `check` requests one variant many
# times; only an edited source is compiled again, including one that was edited during the compile. A new exception is
# raised each time: a stored one would keep its traceback, and with it the arrays of every caller on the stack.
_Variant = tuple[Kernel, tuple[tuple[str, int], ...], tuple[Path, ...], Device, bool]
_compile_errors: dict[_Variant, tuple[str | None, Callable[[], CompileError]]] = {}


@lru_cache(maxsize=512)
def _load(
    kernel: Kernel, defines: tuple[tuple[str, int], ...], folders: tuple[Path, ...], device: Device, fast: bool
) -> Loaded:
    what, before = (kernel, defines, folders, device, fast), _source_fingerprint(kernel, folders)
    try:
        loaded = _compile_and_load(*what)
    except CompileError as error:
        new_error = partial(CompileError, source=error.source, options=error.options, log=error.log)
        _compile_errors[what] = before, partial(new_error, str(error))
        raise
    _compile_errors.pop(what, None)
    return loaded


def _compile_and_load(
    kernel: Kernel, defines: tuple[tuple[str, int], ...], folders: tuple[Path, ...], device: Device, fast: bool
) -> Loaded:
    names, kinds = [entry.name for entry in kernel.entries], argument_kinds(kernel)
    # The size of the kernel argument `score` (struct Score in score.cuh); 16 bytes without options.
    score_bytes = dict(defines).get("SCORE_BYTES", 16)
    parameters.check_element_types(kernel)
    if device == HOST:
        with cache.in_use():  # the file must exist until it is loaded
            built = build.library(kernel.source, names, dict(defines), folders)
            functions = tuple(CpuFunction(built.path, name) for name in names)
        for entry, function in zip(kernel.entries, functions, strict=True):
            parameters.check_arguments(entry, function.parameters, kernel.source, score_bytes, kinds)
        return Loaded(functions, (), built.seconds, built.cached, tuple(f.max_threads for f in functions))
    gpu = driver.device(device[1])
    compiled = _compiled(kernel, arch_name(kernel, gpu.arch), dict(defines), folders, fast)
    for entry, made in zip(kernel.entries, compiled, strict=True):
        parameters.check_arguments(entry, nvrtc.parameters(made.ptx, entry.name), kernel.source, score_bytes, kinds)
    on_gpu = tuple(driver.CudaFunction(c.cubin, c.entry, gpu) for c in compiled)
    return Loaded(on_gpu, compiled, compiled[0].seconds, compiled[0].cached, _max_threads(compiled))


def _compiled(
    kernel: Kernel, arch: str, defines: Mapping[str, object], folders: Sequence[Path] = (), fast: bool = False
) -> tuple[Compiled, ...]:
    compile_entry = nvrtc.compile_fast if fast else nvrtc.compile
    return tuple(compile_entry(kernel.source, entry.name, arch, defines, folders=folders) for entry in kernel.entries)


@snippets.explaining
def compile_problem(kernel: Kernel, problem: Problem, tile: Tile, arch: str) -> tuple[Compiled, ...]:
    """Every entry of a kernel, compiled for `problem` and `tile`, in the order of `Kernel.entries`.

    Raises CompileError, ToolchainMissing; SpecError if the spec's `block` exceeds the __launch_bounds__.
    """
    compiled = _compiled(kernel, arch, kernel.defines(problem, tile), snippets.folders(problem))
    _check_block_sizes(kernel, tile, _max_threads(compiled))
    return compiled


def forget() -> None:
    """Discards all loaded kernels, so that the next launch reads the sources again."""
    _load.cache_clear()
    _compile_errors.clear()


def arch_of(device: Device) -> Arch | None:
    """A GPU's compute capability; None for the CPU backend."""
    return None if device == HOST else driver.device(device[1]).arch


def tile_on(device: Device, kernel: Kernel, problem: Problem, tile: Tile | None = None, *, tuned: bool = False) -> Tile:
    """`tile` if it is not None; else the tuned tile for this device (if `tuned`), or the spec's best.

    Raises UnsupportedProblem with the reason of the kernel or of the tile.
    """
    if device == HOST:
        return choose_tile(kernel, problem, None, tile)
    gpu = driver.device(device[1])
    named = gpu.name if tuned else ""
    return choose_tile(kernel, problem, gpu.arch, tile, gpu=named, multiprocessors=gpu.sm_count)


def arch_name(kernel: Kernel, arch: Arch) -> str:
    """The compile target of `kernel` on a GPU of that compute capability, such as "sm_90a"."""
    return f"{architectures.name_of(arch)}{kernel.arch_suffix}"


def target_of(kernel: Kernel, arch: str | None = None) -> str:
    """The compile target of `kernel` for `arch`. If `arch` has no suffix, such as "sm_90", the kernel's is added.
    None: this machine's GPU, or sm_90a without a GPU. Raises UnsupportedProblem for an unknown architecture."""
    if arch is None:
        return arch_name(kernel, driver.device().arch) if driver.available() else DEFAULT_ARCH
    found = architectures.parse(arch)
    return arch_name(kernel, found) if arch == architectures.name_of(found) else arch


def compile(
    kernel: str | Kernel,
    D: int = 128,
    dtype: str = "float16",
    causal: bool | str = False,
    arch: str | None = None,
    tile: Tile | str | None = None,
) -> Compiled:
    """Compile a kernel for one architecture; returns one of its entry points, with its resource usage. Needs no GPU.

    kernel: a kernel (its first entry point), or the name of an entry point, such as "bwd_minimal_dq". D: head
    dimension; causal: the mask; both only for attention; a custom operation (sandbox.spec.Operation) is compiled for
    its `example`: the first of its `shapes`, else of its `cases`; if it has neither, 1024 for each dimension.
    dtype: of q, k and v, one of the kernel's, such as "float16" (fwd_wgmma_fp8 needs "float8_e4m3" or "float8_e5m2").
    arch: such as "sm_80"; "sm_90" means sm_90a for kernels with wgmma; default: that of the GPU, or sm_90a without one.
    Returns `.cubin`, `.ptx`, `.resources`, `.log`. Raises CompileError, ToolchainMissing, UnsupportedProblem,
    UnknownKernel, SpecError.
    """
    owner = kernel if isinstance(kernel, Kernel) else entry_owner(kernel)
    if isinstance(owner.computes, Operation):
        own: Any = owner.computes.problem(owner.computes.example, dtype)
        problem: Problem = own
    else:  # adapted: for a kernel that supports latent attention only, v is a view of k
        problem = owner.adapted(Problem(1, 1, 1, 1, D, dtype=dtype, causal=normalise_causal(causal)))
    target = target_of(owner, arch)
    chosen = choose_tile(owner, problem, architectures.parse(target), as_tile(tile))
    return compile_entry(owner, kernel if isinstance(kernel, str) else kernel.name, problem, chosen, target)


def compile_entry(kernel: Kernel, entry: str, problem: Problem, tile: Tile, arch: str) -> Compiled:
    """`compile_problem` for one entry. Raises UnknownKernel if the kernel has no such entry."""
    name = kernel.entry(entry).name
    return next(c for c in compile_problem(kernel, problem, tile, arch) if c.entry == name)


def occupancy(entry: Entry, problem: Problem, tile: Tile, resources: Resources, arch: Arch) -> architectures.Occupancy:
    """Resident blocks of an entry per SM, and the limiting resource."""
    smem = entry.smem_bytes(problem, tile) + resources.smem_static
    return architectures.occupancy(arch, math.prod(entry.block(tile)), resources.registers, smem)


def as_tile(tile: Tile | str | Mapping[str, int] | None) -> Tile | None:
    """A user's tile as a Tile: a Tile, a mapping, or text with all its numbers, such as "BLOCK_M=64,BLOCK_N=32"."""
    if tile is None or isinstance(tile, Tile):
        return tile
    if not isinstance(tile, str | Mapping):
        raise SpecError(f"tile={tile!r} must be a Tile, a mapping, or text such as BLOCK_M=64,BLOCK_N=32")
    return Tile.parse(tile) if isinstance(tile, str) else Tile(**tile)
