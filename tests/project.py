"""What tests share: where the project is, and commands and kernels in a copy of it (`project_copy`)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from sandbox.spec import Kernel

# Where combinations are too many they are drawn sampled, the same for everybody, so that a verdict can be repeated:
# SANDBOX_SEED=N draws another one.
SEED = int(os.environ.get("SANDBOX_SEED", "20261121"))
# SANDBOX_WIDTHS=all: tests/engine/test_widths.py tries every pair of head widths on the CPU backend too.
ALL_WIDTHS = os.environ.get("SANDBOX_WIDTHS") == "all"
# SANDBOX_MAGNITUDES=all: tests/engine/test_magnitudes.py tries as much on the CPU backend as on a GPU.
ALL_MAGNITUDES = os.environ.get("SANDBOX_MAGNITUDES") == "all"
# Kernels that are asked for few problems, or are another one's source compiled another way: the CPU backend runs one in
# so many of their tests, sampled, unless `-k` asks for them; a GPU runs all.
SELDOM = {"bwd_wgmma_head": 10, "bwd_wgmma_deterministic": 3, "bwd_wgmma_persistent": 10, "fwd_decode_wgmma": 3}
ROOT = Path(__file__).resolve().parent.parent
# Before a command that a test sends SIGINT: that may be ignored here, as after a shell's `&`, which is inherited.
INTERRUPTIBLE = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
)


def dtype_of(kernel: Kernel) -> str:
    """The one that single cases are tried in: with the least room for what is too large."""
    return "float16" if "float16" in kernel.dtypes else kernel.dtypes[0]


def in_project(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """`python -m …` with the copy's own packages, its tables as wide as they need to be."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def new_kernel(project: Path, name: str, **edits: str) -> None:
    """fwd_minimal once more under another name, its spec edited: small, so that a sweep is quick."""
    folder = project / "kernels_cu"
    for suffix in (".cu", ".py"):
        text = (ROOT / "kernels_cu" / f"fwd_minimal{suffix}").read_text().replace("fwd_minimal", name)
        for old, new in (edits if suffix == ".py" else {}).items():
            assert old in text
            text = text.replace(old, new)
        (folder / f"{name}{suffix}").write_text(text)


def leave_process_group() -> None:
    """Of gloo, whose threads PyTorch (2.13) joins with the GIL held. They may want it to end: let them first."""
    import torch

    time.sleep(0.2)
    torch.distributed.destroy_process_group()
