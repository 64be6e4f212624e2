"""Kernels of other operations than attention, in a folder of their own: the templates of `new kernel`, and the examples
of docs/custom-operations.md."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from project import ROOT

from sandbox.core import registry
from sandbox.scaffold import new

PAGE = ROOT / "docs" / "custom-operations.md"
NAMES = ("row_softmax", "rms_norm", "rms_norm_backward", "matmul", "stencil", "histogram", "column_sum")
_FILE = re.compile(r"^```\w+\n(?://|#) (\w+\.(?:cu|py))\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@contextmanager
def kernels_in(folder: Path) -> Iterator[Path]:
    """The folder with these kernels, which SANDBOX_KERNELS names."""
    before = os.environ.get(registry.VARIABLE)
    os.environ[registry.VARIABLE] = str(folder)
    registry.forget()
    try:
        for name in new.TEMPLATE_NAMES:
            new.kernel(name, name)
        for name, text in _FILE.findall(PAGE.read_text()):
            (folder / name).write_text(text)
        registry.forget()
        yield folder
    finally:
        os.environ.pop(registry.VARIABLE)
        if before is not None:
            os.environ[registry.VARIABLE] = before
        registry.forget()
