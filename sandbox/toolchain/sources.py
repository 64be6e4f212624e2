"""Include resolution without a compiler: the headers that a CUDA source file includes, directly or indirectly.

A cached object is keyed by the content of every file that it was compiled from, except the text of comments. The scan
over-approximates: it follows `#include`s inside comments and false `#if`s, and considers a name in every include
folder. A key may therefore change unnecessarily, but a relevant change is never missed. Line numbers count, because the
object contains them.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

# A comment is white space to the preprocessor. Possessive quantifiers: CUDA's headers would cause heavy backtracking.
_GAP = rb"(?>[ \t\v\f]++|/\*(?>[^*]++|\*(?!/))*+\*/)*+"
_INCLUDE = rb"(?:#|%:)" + _GAP + rb"include(?:_next)?\b"
_NAMED = re.compile(
    rb"(?:" + _INCLUDE + rb"|__has_include(?:_next)?" + _GAP + rb"\()" + _GAP + rb'(?:"([^"\n]+)"|<([^>\n]+)>)',
    re.DOTALL,
)
_COMPUTED = re.compile(rb"^" + _GAP + _INCLUDE + _GAP + rb"[A-Za-z_]", re.MULTILINE | re.DOTALL)
_SPLICE = re.compile(rb"\\\r?\n")  # line continuation
# A string, a number (' may separate its digits), a character, or a comment with the white space before it.
_TOKEN = re.compile(
    rb""""(?:[^"\\\n]|\\.)*"|\b\d(?:'?[\w.])*|'(?:[^'\\\n]|\\.)*'|[ \t]*+//[^\n]*|[ \t]*+/\*.*?\*/""", re.DOTALL
)
# A raw string, or a line continuation that may be part of a comment: all bytes of such a file count.
_NO_TOKENS = re.compile(rb'R"|//[^\n]*\\[ \t\r]*\n|[/*]\\[ \t\r]*\n')
_BLANK_LINES = re.compile(rb"(?<!\\)\n(?:[ \t\r]*\n)+")  # not after a line continuation
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# Attributes, such as __launch_bounds__(2 * (64)), may also be between `void` and the name.
_ENTRY = re.compile(r"\b__global__\b[^;{]*?\bvoid\s+(?:__\w+__\s*\((?:[^()]|\([^()]*\))*\)\s*)*+(\w+)\s*\(")
_SETTLED = 2.0  # seconds after which a further edit certainly changes the time stamp


def _scan(path: Path) -> tuple[bytes, tuple[str, ...], bool]:
    """(digest of the content without comments, included names, whether an include name is computed by a macro)."""
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
    return hashlib.sha256(without_comments(content)).digest(), names, bool(_COMPUTED.search(joined))


def code_of(path: Path) -> str:
    """The text of a source, with a space for each comment."""
    return _COMMENT.sub(" ", path.read_text(errors="replace"))


def entry_points(path: Path) -> list[str]:
    """The names of the entry points that a `.cu` or a header declares."""
    return _ENTRY.findall(code_of(path))


def without_comments(content: bytes) -> bytes:
    """C++ without the text of its comments. Every line keeps its number. Unchanged if comments cannot be told from code
    without a preprocessor."""
    return content if _NO_TOKENS.search(content) else _TOKEN.sub(_without_comment, content)


def _without_comment(token: re.Match[bytes]) -> bytes:
    text = token[0].lstrip()
    if not text.startswith((b"//", b"/*")):
        return token[0]
    return (b" " if text.startswith(b"/*") else b"") + b"\n" * text.count(b"\n")


def without_lines(content: bytes) -> bytes:
    """C++ without comments and empty lines: equal for two texts whose code differs only in its line numbers. A file
    that uses __LINE__ keeps its lines."""
    code = without_comments(content)
    return code if b"__LINE__" in code else _BLANK_LINES.sub(b"\n", b"\n" + code + b"\n")


def included_files(source: Path, include_dirs: Sequence[Path]) -> tuple[list[Path], bool]:
    """(files that `source` may include, directly or indirectly, itself first; whether the list is complete).

    A name is looked up in the folder of the including file and in all of `include_dirs`. Names that are not found are
    ignored; the compiler reports them. The list is incomplete if an `#include` computes its name by a macro. Raises
    FileNotFoundError when `source` is missing.
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


def fingerprint(source: Path, include_dirs: Sequence[Path], base: Path | None = None) -> str | None:
    """A digest of the paths of `source` and all included files and of their contents, except the text of comments; None
    if the list is incomplete. `base`: paths in this folder are relative to it."""
    files, complete = included_files(source, include_dirs)
    if not complete:
        return None
    digest = hashlib.sha256()
    for path in files:
        named = path.relative_to(base) if base and path.is_relative_to(base) else path
        digest.update(os.fsencode(named) + b"\0" + _scan(path)[0])
    return digest.hexdigest()


def split_arguments(text: str, begin: int, opening: str = "([{", closing: str = ")]}") -> tuple[list[str], int]:
    """(comma-separated arguments, end) of a call. `begin` is the position after the opening parenthesis, `end` the
    position after the closing one.

    `opening` and `closing`: brackets inside which a comma does not separate arguments.
    """
    arguments, depth = [""], 0
    for at in range(begin, len(text)):
        c = text[at]
        if c == ")" and not depth:
            return arguments, at + 1
        if c == "," and not depth:
            arguments.append("")
            continue
        depth += (c in opening) - (c in closing)
        arguments[-1] += c
    return arguments, len(text)
