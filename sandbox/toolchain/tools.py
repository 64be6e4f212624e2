"""NVIDIA's programs: where they are on this machine, and how to get those that are not."""

from __future__ import annotations

import os
import shutil

from ..core.errors import ToolchainMissing

REMEDIES = {
    "ncu": "install Nsight Compute, which comes with the CUDA toolkit",
    "nsys": "install Nsight Systems, which comes with the CUDA toolkit",
    "compute-sanitizer": "it comes with the CUDA toolkit (apt-get install cuda-sanitizer-12-9, "
    "or conda install -c nvidia cuda-sanitizer-api); --backend cpu needs none of it",
    "nvdisasm": 'pip install "attention-sandbox[sass]"',
}
_FOLDERS = ("/usr/local/cuda/bin", "/opt/cuda/bin")


def find(name: str) -> str | None:
    """The path of `ncu`, `nvdisasm` and so on; None where there is none.

    One that came as a wheel into this environment goes before one on PATH, which may be of an older toolkit; last come
    the folders of a toolkit that is not on PATH.
    """
    try:
        from cuda.pathfinder import find_nvidia_binary_utility

        found = find_nvidia_binary_utility(name)
    except Exception:  # not installed, or a name that this version does not know
        found = None
    homes = [os.path.join(os.environ[home], "bin") for home in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(home)]
    return found or shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *homes, *_FOLDERS)))


def need(name: str) -> str:
    """`find`. Raises ToolchainMissing with how to get it."""
    if found := find(name):
        return found
    raise ToolchainMissing(f"{name} is not on the PATH nor in $CUDA_HOME/bin: {REMEDIES[name]}")
