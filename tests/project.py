"""Shared helpers of tests: sampling, and commands and kernels in a copy of the project (`project_copy`)."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from sandbox.core import registry
from sandbox.spec import Kernel

# Seed for sampling where there are too many combinations. It is fixed, so that results are reproducible;
# SANDBOX_SEED=N selects another sample.
SEED = int(os.environ.get("SANDBOX_SEED", "20261121"))
# "sampled" for `make test`; "quick" for `make quick`; "all" for `make test-all`, which samples nothing.
SAMPLE = os.environ.get("SANDBOX_SAMPLE", "sampled")
# The folders whose tests are unit tests, except those with the marker `slow`.
QUICK_FOLDERS = ("core", "reference", "launch", "bench", "profile", "jobs")
# SANDBOX_WIDTHS=all: tests/engine/test_widths.py runs every pair of head dimensions on the CPU backend.
ALL_WIDTHS = os.environ.get("SANDBOX_WIDTHS") == "all"
# SANDBOX_MAGNITUDES=all: tests/engine/test_magnitudes.py tries as much on the CPU backend as on a GPU.
ALL_MAGNITUDES = os.environ.get("SANDBOX_MAGNITUDES") == "all"
# {kernel: n}: the CPU backend runs a random sample of one in n of its tests, unless `-k` is used; a GPU runs all.
SELDOM = {kernel.name: kernel.test_share for kernel in registry.kernels().values() if kernel.test_share > 1}
ROOT = Path(__file__).resolve().parent.parent
# Prefix of a command that receives SIGINT: restores its handler, because an ignored SIGINT (after a shell's `&`) is
# inherited.
INTERRUPTIBLE = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
)


def dtype_of(kernel: Kernel) -> str:
    """The dtype of single test cases: float16 if supported, which has the smallest range."""
    return "float16" if "float16" in kernel.dtypes else kernel.dtypes[0]


def in_project(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """`python -m …` with the packages of the copy, and tables of full width."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def new_kernel(project: Path, name: str, **edits: str) -> None:
    """A copy of fwd_minimal with another name and edits of its spec: its sweep is fast."""
    folder = project / "kernels_cu"
    for suffix in (".cu", ".py"):
        text = (ROOT / "kernels_cu" / f"fwd_minimal{suffix}").read_text().replace("fwd_minimal", name)
        for old, new in (edits if suffix == ".py" else {}).items():
            assert old in text
            text = text.replace(old, new)
        (folder / f"{name}{suffix}").write_text(text)


def kernel_copy(kernel: Kernel, folder: Path, file: str, change: Callable[[str], str]) -> Path:
    """The source of a kernel, copied to `folder` with all headers. `change` is applied to the text of `file`: the
    source or a header."""
    source = folder / kernel.source.name
    shutil.copytree(ROOT / "kernels_cu" / "include", folder / "include")
    shutil.copy(kernel.source, source)
    changed = source if file == source.name else folder / "include" / file
    before = changed.read_text()
    changed.write_text(change(before))
    assert changed.read_text() != before
    return source


def leave_process_group() -> None:
    """Destroys a gloo process group. PyTorch (2.13) joins its threads while holding the GIL, which they may need to
    end: give them time first."""
    import torch

    time.sleep(0.2)
    torch.distributed.destroy_process_group()


STORED = ROOT / "tests" / "stored"


def is_stored(name: str) -> bool:
    """Whether `check_stored` has this text, or writes it: a new kernel has none at first."""
    return (STORED / name).is_file() or bool(os.environ.get("SANDBOX_STORE"))


def check_stored(name: str, lines: Iterable[str]) -> None:
    """Compares a text with the file `name` of `tests/stored`, and shows the lines that differ. SANDBOX_STORE=1 writes
    the file instead: its diff then shows what a change affects."""
    path, text = STORED / name, "".join(f"{line}\n" for line in lines)
    if os.environ.get("SANDBOX_STORE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = path.read_text().splitlines() if path.is_file() else []
    changed = [*difflib.unified_diff(before, text.splitlines(), "stored", "now", n=0, lineterm="")]
    assert not changed, "\n".join([*changed[:40], "SANDBOX_STORE=1 pytest … stores the new text"])
