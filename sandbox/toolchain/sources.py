"""What a CUDA source file is made of: the headers that it includes, found without a compiler.

A cached object is keyed by the content of every file that went into it. The scan over-approximates (it follows an
`#include` inside a comment or a false `#if`, and takes every file of that name that any folder holds), so a key may
change needlessly, but never too seldom.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

# A comment is white space to the preprocessor. Possessive, or CUDA's own headers, full of comments, take for ever.
_GAP = rb"(?>[ \t\v\f]++|/\*(?>[^*]++|\*(?!/))*+\*/)*+"
_INCLUDE = rb"(?:#|%:)" + _GAP + rb"include(?:_next)?\b"
_NAMED = re.compile(
    rb"(?:" + _INCLUDE + rb"|__has_include(?:_next)?" + _GAP + rb"\()" + _GAP + rb'(?:"([^"\n]+)"|<([^>\n]+)>)',
    re.DOTALL,
)
_COMPUTED = re.compile(rb"^" + _GAP + _INCLUDE + _GAP + rb"[A-Za-z_]", re.MULTILINE | re.DOTALL)
_SPLICE = re.compile(rb"\\\r?\n")  # a backslash joins a line to the next
_SETTLED = 2.0  # seconds after which a further edit is sure to change a file's time stamp


def _scan(path: Path) -> tuple[bytes, tuple[str, ...], bool]:
    """(content digest, names it includes, whether an include's name is computed by a macro)."""
    stat = path.stat()
    if time.time() - stat.st_mtime < _SETTLED:
        return _read(str(path))
    return _remembered(str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=1024)
def _remembered(path: str, *version: int) -> tuple[bytes, tuple[str, ...], bool]:
    return _read(path)


def _read(path: str) -> tuple[bytes, tuple[str, ...], bool]:
    content = Path(path).read_bytes()
    joined = _SPLICE.sub(b"", content)
    names = tuple(os.fsdecode(quoted or angled) for quoted, angled in _NAMED.findall(joined))
    return hashlib.sha256(content).digest(), names, bool(_COMPUTED.search(joined))


def included_files(source: Path, include_dirs: Sequence[Path]) -> tuple[list[Path], bool]:
    """Every file that `source` may include, directly or not, itself first; and whether the list is complete.

    A name is looked up beside the including file and in all of `include_dirs`, whichever of them a compiler would
    prefer; one that is found nowhere is left to the compiler to complain about. The list is incomplete when some
    `#include` names its file by a macro. Raises FileNotFoundError when `source` is missing.
    """
    found: dict[Path, None] = {source: None}
    complete = True
    waiting = [source]
    while waiting:
        path = waiting.pop()
        _, names, computed = _scan(path)
        complete &= not computed
        for name in names:
            for folder in (path.parent, *include_dirs):
                candidate = folder / name
                if candidate not in found and candidate.is_file():
                    found[candidate] = None
                    waiting.append(candidate)
    return list(found), complete


def fingerprint(source: Path, include_dirs: Sequence[Path]) -> str | None:
    """A digest of `source`, of every file it includes and of where each was found; None when that cannot be known."""
    files, complete = included_files(source, include_dirs)
    if not complete:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(os.fsencode(path) + b"\0" + _scan(path)[0])
    return digest.hexdigest()


def split_arguments(text: str, begin: int, opening: str = "([{", closing: str = ")]}") -> tuple[list[str], int]:
    """What stands between commas from `begin`, behind an opening parenthesis, to its closing one; the place behind it.

    `opening` and `closing`: the brackets between which a comma separates nothing.
    """
    pieces, depth = [""], 0
    for at in range(begin, len(text)):
        c = text[at]
        if c == ")" and not depth:
            return pieces, at + 1
        if c == "," and not depth:
            pieces.append("")
            continue
        depth += (c in opening) - (c in closing)
        pieces[-1] += c
    return pieces, len(text)
