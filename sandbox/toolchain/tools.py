"""NVIDIA's command-line tools: their paths, and installation hints for missing ones."""

from __future__ import annotations

import os
import shutil

from ..core.errors import ToolchainMissing

REMEDIES = {
    "ncu": "install Nsight Compute, which comes with the CUDA toolkit",
    "nsys": "install Nsight Systems, which comes with the CUDA toolkit",
    "compute-sanitizer": "it comes with the CUDA toolkit (apt-get install cuda-sanitizer-12-9, "
    "or conda install -c nvidia cuda-sanitizer-api); --backend cpu does not need it",
    "nvdisasm": 'pip install "attention-sandbox[sass]"',
}
_FOLDERS = ("/usr/local/cuda/bin", "/opt/cuda/bin")


def find(name: str) -> str | None:
    """The path of a tool such as `ncu` or `nvdisasm`; None if it is not installed.

    Search order: a wheel in this Python environment, PATH (possibly an older toolkit), toolkit folders outside PATH.
    """
    try:
        from cuda.pathfinder import find_nvidia_binary_utility

        found = find_nvidia_binary_utility(name)
    except Exception:  # not installed, or a name unknown to this version
        found = None
    homes = [os.path.join(os.environ[home], "bin") for home in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(home)]
    return found or shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *homes, *_FOLDERS)))


def need(name: str) -> str:
    """Like `find`; raises ToolchainMissing with an installation hint if the tool is missing."""
    if found := find(name):
        return found
    raise ToolchainMissing(f"{name} is neither on the PATH nor in $CUDA_HOME/bin: {REMEDIES[name]}")
