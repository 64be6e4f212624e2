"""Kernel + tile + problem -> compiled, packed, launched, on either backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from . import arch as architectures
from . import driver, nvrtc
from .arguments import ArgumentBlock, Launch, Tensor, encode_for_host
from .choose import choose_tile
from .cpu import build
from .cpu.launch import CpuFunction
from .dlpack import HOST, Device
from .errors import SpecError, UnsupportedProblem
from .nvrtc import Compiled
from .registry import get
from .spec import Arch, Kernel, Problem, Tile, normalise_causal

DEFAULT_ARCH = "sm_90a"  # to report on where there is no GPU
_GRID_LIMITS = (2**31 - 1, 65535, 65535)


@dataclass(frozen=True)
class Prepared:
    """A kernel ready to launch on one problem: loaded, its geometry fixed, its arguments packed.

    `seconds`: what compiling took when it was compiled; `cached`: that was on an earlier occasion.
    """

    kernel: Kernel
    tile: Tile
    problem: Problem
    device: Device
    seconds: float
    cached: bool
    compiled: Compiled | None  # None on the CPU backend
    launch: Launch  # on tensors of the shapes and strides that it was prepared for
    tensor_names: tuple[str, ...]  # whose addresses `launch` takes, in this order

    def pointers(self, tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
        """What `launch` takes, of `tensors` by the names in the spec's `args`."""
        return tuple(tensors[name].pointer for name in self.tensor_names)

    def wait(self) -> None:
        """Until the GPU has done all its work; an error of this kernel's launch is raised here, with its name."""
        if self.device != HOST:
            driver.device(self.device[1]).synchronize(after=f"{self.kernel.name} on {self.problem}, tile {self.tile}")


def prepare(kernel: Kernel, tile: Tile, problem: Problem, tensors: Mapping[str, Tensor], device: Device) -> Prepared:
    """Compile (or find in the cache), load and pack. `tensors` by the names in the spec's `args`.

    Raises CompileError, ToolchainMissing, GpuUnavailable, DriverError; UnsupportedProblem for a grid too large.
    """
    grid, threads = kernel.grid(problem, tile), kernel.block(tile)
    for axis, size, limit in zip("xyz", grid, _GRID_LIMITS, strict=True):
        if size > limit:
            raise UnsupportedProblem(f"{kernel.name}: {problem} needs {size} blocks along {axis}, over {limit}")
    encode = encode_for_host if device == HOST else driver.encode_tensor_map
    arguments = ArgumentBlock(kernel, problem, tile, tensors, encode)
    names = arguments.tensor_names
    defines = tuple(kernel.defines(problem, tile).items())
    smem = kernel.smem_bytes(problem, tile)
    if device == HOST:
        built, cpu_function = _on_cpu(kernel, defines)
        launch = cpu_function.launcher(grid, threads, smem, arguments)
        return Prepared(kernel, tile, problem, device, built.seconds, built.cached, None, launch, names)
    compiled, cuda_function = _on_gpu(kernel, defines, device[1])
    launch = cuda_function.launcher(grid, threads, smem, arguments)
    return Prepared(kernel, tile, problem, device, compiled.seconds, compiled.cached, compiled, launch, names)


@lru_cache(maxsize=512)
def _on_gpu(kernel: Kernel, defines: tuple[tuple[str, int], ...], ordinal: int) -> tuple[Compiled, driver.CudaFunction]:
    device = driver.device(ordinal)
    compiled = nvrtc.compile(kernel.source, kernel.name, arch_name(kernel, device.arch), dict(defines))
    return compiled, driver.CudaFunction(compiled.cubin, kernel.name, device)


@lru_cache(maxsize=512)
def _on_cpu(kernel: Kernel, defines: tuple[tuple[str, int], ...]) -> tuple[build.Built, CpuFunction]:
    built = build.library(kernel.source, kernel.name, dict(defines))
    return built, CpuFunction(built.path, kernel.name)


def forget() -> None:
    """Drop every loaded kernel, so that the next launch reads the sources anew."""
    _on_gpu.cache_clear()
    _on_cpu.cache_clear()


def arch_name(kernel: Kernel, arch: Arch) -> str:
    """The target to compile `kernel` for on a GPU of that compute capability, as "sm_90a"."""
    return f"sm_{arch[0]}{arch[1]}{kernel.arch_suffix}"


def compile(
    kernel: str | Kernel,
    D: int = 128,
    dtype: str = "float16",
    causal: bool | str = False,
    arch: str | None = None,
    tile: Tile | str | None = None,
) -> Compiled:
    """Compile one kernel for one architecture and report what it costs. Needs no GPU.

    D: head width; dtype: "float32", "float16" or "bfloat16"; arch: "sm_90a" and so on, by default the GPU's, or
    sm_90a without one. Returns `.cubin`, `.ptx`, `.resources`, `.log`. Raises CompileError, ToolchainMissing,
    UnsupportedProblem, UnknownKernel.
    """
    kernel = get(kernel) if isinstance(kernel, str) else kernel
    if arch is None:
        arch = arch_name(kernel, driver.device().arch) if driver.available() else DEFAULT_ARCH
    problem = Problem(1, 1, 1, 1, D, dtype=dtype, causal=normalise_causal(causal))
    chosen = choose_tile(kernel, problem, architectures.parse(arch), as_tile(tile))
    return nvrtc.compile(kernel.source, kernel.name, arch, kernel.defines(problem, chosen))


def as_tile(tile: Tile | str | Mapping[str, int] | None) -> Tile | None:
    """A tile as people write it: a Tile, a mapping, or "BLOCK_M=64,BLOCK_N=32"."""
    if tile is None or isinstance(tile, Tile):
        return tile
    if not isinstance(tile, str | Mapping):
        raise SpecError(f"tile={tile!r} must be a Tile, a mapping, or text such as BLOCK_M=64,BLOCK_N=32")
    return Tile.parse(tile) if isinstance(tile, str) else Tile(**tile)
