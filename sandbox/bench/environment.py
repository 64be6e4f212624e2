"""The environment of a measurement, which every stored row contains."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.errors import SandboxError
from ..launch import driver
from ..toolchain import nvrtc

_PACKAGE_FOLDERS = ("kernels_cu", "sandbox")
_PACKAGES = ("numpy", "torch", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "triton")


def describe() -> dict[str, Any]:
    """Device, driver, NVRTC, clocks (MHz) and power (W), commit, Python, packages, processor. Unknown values are
    None."""
    row: dict[str, Any] = {
        "commit": commit(),
        "python": platform.python_version(),
        "processor": _processor(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "nvrtc": None,
        "device": None,
        "driver": None,
        "clocks": None,
    }
    with suppress(SandboxError):
        row["nvrtc"] = nvrtc.version()
    with suppress(SandboxError):
        row["device"] = driver.device().name
        row["driver"] = driver.driver_version()
        row["clocks"] = clocks()
    return row


def clocks() -> dict[str, str] | None:
    """Current SM and memory clock, power and power limit from nvidia-smi; None without nvidia-smi."""
    wanted = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "driver_version")
    said = _output("nvidia-smi", f"--query-gpu={','.join(wanted)}", "--format=csv,noheader")
    return dict(zip(wanted, said.splitlines()[0].split(", "), strict=False)) if said else None


def commit() -> str | None:
    """The commit of this checkout. If there are changes, or new files in the packages, "+" and their digest are
    appended, so that equal strings mean equal sources. None outside of a checkout."""
    here = str(Path(__file__).resolve().parent)
    revision, root = (_output("git", "-C", here, "rev-parse", what) for what in ("HEAD", "--show-toplevel"))
    if not revision:
        return None
    changes = [_output("git", "-C", root, "diff", "HEAD", "--binary")]
    new = _output("git", "-C", root, "ls-files", "--others", "--exclude-standard", *_PACKAGE_FOLDERS)
    for name in new.splitlines():
        with suppress(OSError):
            changes.append(name + Path(root, name).read_text("latin1"))
    digest = hashlib.sha256("\0".join(changes).encode()).hexdigest()[:8]
    return f"{revision[:12]}+{digest}" if any(changes) else revision[:12]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
