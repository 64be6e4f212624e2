"""NVIDIA's programs: where they are on this machine."""

from __future__ import annotations

import shutil


def find(name: str) -> str | None:
    """The path of `ncu`, `nvdisasm` and so on; None where there is none.

    One that came as a wheel into this environment goes before one on PATH, which may be of an older toolkit.
    """
    try:
        from cuda.pathfinder import find_nvidia_binary_utility

        found = find_nvidia_binary_utility(name)
    except Exception:  # not installed, or a name that this version does not know
        found = None
    return found or shutil.which(name)
