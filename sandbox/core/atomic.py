"""Writes whole files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Replaces a file atomically: readers get the old content or the new one. The permissions stay; a new file
    gets 0644."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException:  # such as a full disk
        os.unlink(name)
        raise
