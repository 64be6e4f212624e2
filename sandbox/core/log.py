"""Logging: `SANDBOX_DEBUG=1…4`, or Python's own logging of the logger "sandbox".

| SANDBOX_DEBUG | is written to stderr |
| --- | --- |
| 1 | which kernel and tile were chosen, and why |
| 2 | and what is compiled with which options, the compiler's output, what was in the cache |
| 3 | and every launch: grid, block, shared memory |
| 4 | and its arguments; sources, PTX and cubins are kept in .sandbox/kept |
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from .project import FOLDER

CHOICES, COMPILING, LAUNCHES, ARGUMENTS = 20, 15, 10, 5  # levels of Python's logging
KEPT = FOLDER.parent / ".sandbox" / "kept"
logger = logging.getLogger("sandbox")


def configure(knob: str) -> None:
    """Configures the logger for a value of SANDBOX_DEBUG: "" and "0" log nothing, above 4 is 4, other text is 1."""
    level = min(int(knob), 4) if knob.isdecimal() else int(bool(knob))
    if level:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("sandbox: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel((CHOICES, COMPILING, LAUNCHES, ARGUMENTS)[level - 1])


def warn(message: str) -> None:
    """A warning. Without a handler Python prints the message alone, so it begins with the program's name."""
    logger.warning("%s%s", "" if logger.hasHandlers() else "sandbox: ", message)


def keep(name: str, files: Mapping[str, bytes]) -> None:
    """Writes files, by suffix, for inspection; at the highest level only."""
    if logger.isEnabledFor(ARGUMENTS):
        KEPT.mkdir(parents=True, exist_ok=True)
        for suffix, content in files.items():
            (KEPT / f"{name}{suffix}").write_bytes(content)
        logger.log(ARGUMENTS, "kept %s", ", ".join(str(KEPT / f"{name}{suffix}") for suffix in files))


configure(os.environ.get("SANDBOX_DEBUG", ""))
