"""Kernel + tile + problem -> compiled, packed, launched, on either backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from . import arch as architectures
from . import driver, nvrtc
from .arguments import ArgumentBlock, Tensor
from .choose import choose_tile
from .cpu import build
from .cpu.launch import CpuFunction
from .dlpack import HOST, Device
from .errors import UnsupportedProblem
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
    _block: ArgumentBlock
    _launch: Callable[[int], None]
    _lock: threading.Lock

    def __call__(self, pointers: tuple[int, ...], stream: int = 0) -> None:
        """Launch on tensors at these addresses, in the order of the spec's `args`; on the CPU, return when done.

        The tensors' shapes and strides are those that the kernel was prepared for. Safe from several threads.
        """
        with self._lock:  # nobody else refills the arguments until the driver has copied them
            self._block.refill(pointers)
            self._launch(stream)

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
            raise UnsupportedProblem(f"{kernel.name}: {problem} needs a grid of {size} blocks along {axis}, over {limit}")
    arguments = ArgumentBlock(kernel, problem, tensors)
    defines = tuple(kernel.defines(problem, tile).items())
    smem = kernel.smem_bytes(problem, tile)
    compiled, launch = None, None
    if device != HOST:
        compiled, cuda_function = _on_gpu(kernel, defines, device[1])
        launch = cuda_function.launcher(grid, threads, smem, arguments.table)
        seconds, cached = compiled.seconds, compiled.cached
    else:
        built, cpu_function = _on_cpu(kernel, defines)
        launch = lambda stream: cpu_function.launch(grid, threads, smem, arguments.table)  # noqa: E731
        seconds, cached = built.seconds, built.cached
    lock = threading.Lock()
    return Prepared(kernel, tile, problem, device, seconds, cached, compiled, arguments, launch, lock)


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
    return Tile.parse(tile) if isinstance(tile, str) else Tile(**tile)
