"""Checks this machine for the driver, GPU, NVRTC, compilers, packages and tools, with hints for what is missing."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ..core.errors import SandboxError
from ..cpu import compiler
from ..launch import driver
from ..toolchain import cache, nvrtc, tools


@dataclass(frozen=True)
class Finding:
    """Result of one check. `required`: the sandbox does not work without it."""

    what: str
    ok: bool
    found: str
    remedy: str = ""
    required: bool = False


_PACKAGES = {
    "torch": "PyTorch tensors, and comparison with autograd: pip install torch",
    "cupy": "CuPy arrays: pip install cupy-cuda12x (or cupy-cuda13x)",
    "ml_dtypes": "pip install ml_dtypes",
    "watchfiles": 'detects saves for watch: pip install "attention-sandbox[watch]"',
    "matplotlib": 'plots: pip install "attention-sandbox[plot]"',
    "jinja2": 'HTML pages (--html): pip install "attention-sandbox[html]"',
}
_TOOLS = {
    "ncu": "profiles of one launch",
    "nsys": "timeline of a program",
    "compute-sanitizer": "races and invalid accesses on a GPU",
    "nvdisasm": "machine code",
}

READERS = (  # programs that open the output files, here or elsewhere
    "files of --html open in any browser, without a network",
    "files of timeline --trace open in ui.perfetto.dev and chrome://tracing",
    "reports of profile open in Nsight Compute and Nsight Systems, those of ncu as text with profile KERNEL --show",
)


def examine() -> list[Finding]:
    """Run all checks. Does not raise."""
    findings = [Finding("Python", True, sys.version.split()[0])]
    findings += _gpu()
    findings.append(_try("NVRTC", nvrtc.version, required=True))
    findings.append(_try("CUDA headers", lambda: ", ".join(map(str, nvrtc.include_dirs())), required=True))
    findings.append(_try("host C++ compiler", _compiler))
    findings.append(_try("cache", lambda: str(cache.directory()), required=True))
    findings += [_package(name, remedy) for name, remedy in _PACKAGES.items()]
    findings += [_tool(name, use) for name, use in _TOOLS.items()]
    return findings


def _gpu() -> list[Finding]:
    try:
        count = driver.device_count()
        found = [Finding("NVIDIA driver", True, f"supports CUDA {driver.driver_version()}")]
        for i in range(count):
            d = driver.device(i)
            smem = d.smem_per_block // 1024
            text = f"{d.name}, sm_{d.arch[0]}{d.arch[1]}, {d.sm_count} SMs, {smem} KiB shared memory per block"
            found.append(Finding(f"GPU {i}", True, text))
        return found
    except SandboxError as error:
        return [Finding("GPU", False, "-", f"{error}; only bench, profile and tune need a GPU")]


def _compiler() -> str:
    return compiler.find().identity.splitlines()[0]


def _try(what: str, look: Callable[[], str], required: bool = False) -> Finding:
    try:
        return Finding(what, True, look())
    except SandboxError as error:
        return Finding(what, False, "-", str(error), required)


def _package(name: str, remedy: str) -> Finding:
    """Looks at package metadata instead of importing: an import of CuPy or PyTorch takes seconds."""
    distributions = importlib.metadata.packages_distributions().get(name, [])
    if not distributions:
        return Finding(name, False, "-", remedy)
    return Finding(name, True, ", ".join(f"{d} {importlib.metadata.version(d)}" for d in sorted(set(distributions))))


def _tool(name: str, use: str) -> Finding:
    path = tools.find(name)
    return Finding(name, path is not None, path or "-", f"{use}: {tools.REMEDIES[name]}")
