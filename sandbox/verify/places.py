"""Where to look for a fault: lines that were changed since the last commit, and lines that match a pattern."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_MOST = 2  # lines that are named
_EDIT = 12  # changed lines up to which the fault is probably one of them


def where_to_look(source: Path, pattern: str) -> tuple[str, ...]:
    """Up to two lines as "FILE:LINE": changed lines that match the pattern; if few lines are changed, the others of
    them; lines of the source that match."""
    changed = _changed_lines(source.parent)
    matching = [(source.name, n) for n in lines(source.read_text(), pattern)]
    few = changed if len(changed) <= _EDIT else []
    found = dict.fromkeys([*(place for place in matching if place in changed), *few, *matching])
    return tuple(f"{file}:{number}" for file, number in list(found)[:_MOST])


def lines(source: str, pattern: str) -> list[int]:
    """Numbers of the lines of a source text that match, without comments."""
    numbered = enumerate(source.splitlines(), 1)
    return [number for number, line in numbered if re.search(pattern, line.partition("//")[0])]


def _changed_lines(folder: Path) -> list[tuple[str, int]]:
    """(file name, line) of the lines of CUDA sources in a folder that differ from the last commit, and of those after
    removed lines. None outside of a git repository."""
    command = ("git", "-C", str(folder), "diff", "--no-color", "--no-ext-diff", "-U0", "HEAD", "--", "*.cu", "*.cuh")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found, file = [], ""
    for line in done.stdout.splitlines():
        if line.startswith("+++ "):
            file = Path(line[4:].strip()).name
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            found += [(file, first + i) for i in range(count)] or [(file, first + 1)]
    return found
