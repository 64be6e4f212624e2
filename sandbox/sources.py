"""What a CUDA source file is made of: the headers that it includes, found without a compiler.

A cached object is keyed by the content of every file that went into it. The scan over-approximates (it follows an
`#include` inside a false `#if` too), so a key may change needlessly, but never too seldom.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]+(?:"([^"\n]+)"|<([^>\n]+)>|(\S+))', re.MULTILINE)


@lru_cache(maxsize=1024)
def _scan(path: str, size: int, mtime_ns: int) -> tuple[bytes, tuple[str, ...], bool]:
    """(content digest, names it includes, whether an include's name is computed by a macro)."""
    content = Path(path).read_bytes()
    names, computed = [], False
    for quoted, angled, other in _INCLUDE.findall(content):
        computed |= bool(other)
        if not other:
            names.append((quoted or angled).decode())
    return hashlib.sha256(content).digest(), tuple(names), computed


def included_files(source: Path, include_dirs: Sequence[Path]) -> tuple[list[Path], bool]:
    """Every file that `source` includes, directly or not, itself first; and whether the list is complete.

    A name is looked up beside the including file, then in `include_dirs` in order; one that is found nowhere is left
    to the compiler to complain about. The list is incomplete when some `#include` names its file by a macro.
    """
    found: dict[Path, None] = {source: None}
    complete = True
    waiting = [source]
    while waiting:
        path = waiting.pop()
        stat = path.stat()
        _, names, computed = _scan(str(path), stat.st_size, stat.st_mtime_ns)
        complete &= not computed
        for name in names:
            for folder in (path.parent, *include_dirs):
                candidate = folder / name
                if candidate.is_file():
                    if candidate not in found:
                        found[candidate] = None
                        waiting.append(candidate)
                    break
    return list(found), complete


def fingerprint(source: Path, include_dirs: Sequence[Path]) -> str | None:
    """A digest of `source`, of every file it includes and of where each was found; None when that cannot be known."""
    files, complete = included_files(source, include_dirs)
    if not complete:
        return None
    digest = hashlib.sha256()
    for path in files:
        stat = path.stat()
        digest.update(str(path).encode() + b"\0" + _scan(str(path), stat.st_size, stat.st_mtime_ns)[0])
    return digest.hexdigest()
