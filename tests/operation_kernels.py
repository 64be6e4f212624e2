"""Kernels of other operations than attention, in a folder of their own: the templates of `new kernel`, and two more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from project import ROOT

from sandbox.core import registry
from sandbox.scaffold import new

FOLDER = ROOT / "tests" / "operations"
NAMES = ("row_softmax", "rms_norm", "rms_norm_backward", "matmul", "stencil", "histogram")


@contextmanager
def kernels_in(folder: Path) -> Iterator[Path]:
    """The folder with these kernels, which SANDBOX_KERNELS names."""
    before = os.environ.get(registry.VARIABLE)
    os.environ[registry.VARIABLE] = str(folder)
    registry.forget()
    try:
        for name in new.TEMPLATE_NAMES:
            new.kernel(name, name)
        for file in sorted(FOLDER.iterdir()):
            if file.suffix in (".cu", ".py"):
                shutil.copy(file, folder)
        registry.forget()
        yield folder
    finally:
        os.environ.pop(registry.VARIABLE)
        if before is not None:
            os.environ[registry.VARIABLE] = before
        registry.forget()
