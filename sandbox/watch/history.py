"""The history of a kernel: every version that `watch` has examined, its texts and result; versions can be restored.

It is stored in `.sandbox/history/NAME.jsonl` next to the kernels' folder, one line per version. A text is stored once,
under its digest, in the first version that has it. Several processes may watch the same kernel.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from ..core import atomic, jsonl, registry
from ..core.errors import HistoryError
from ..core.kernel import Kernel
from ..toolchain import nvrtc, sources

Texts = dict[str, str]  # {path below the project: text}


@dataclass(frozen=True)
class Version:
    """One version: its number, its texts, and the result of `watch`.

    `setting`: device and problem; figures are comparable between versions with the same setting. `stage`: as in
    VersionResult.
    """

    number: int
    time: str
    ok: bool
    stage: str
    message: str
    setting: str
    figures: Mapping[str, float]
    texts: Texts = field(repr=False)


def read_texts(kernel: Kernel) -> Texts | None:
    """The current `.cu`, its spec and every project header that it includes. None if `.cu` or spec is missing, as
    during an editor's save, or cannot be read (see `unreadable`)."""
    project = registry.root(kernel)
    try:
        files, _ = sources.included_files(kernel.source, (nvrtc.INCLUDE_DIR,))
        own = [path for path in (kernel.source.with_suffix(".py"), *files) if path.is_relative_to(project)]
        return {str(path.relative_to(project)): _read(path) for path in own}
    except OSError:
        return None


def unreadable(kernel: Kernel) -> str:
    """Why the `.cu` or its spec cannot be read, such as a folder or a symbolic link to itself; "" if both are readable
    or missing."""
    for path in _own_files(kernel):
        try:
            path.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
    return ""


def code_digest(kernel: Kernel, texts: Texts) -> str:
    """Equal for two versions whose code differs only in comments, empty lines and the layout of the spec. All bytes of
    the other kernels count, which may run before this one, such as the preprocess kernel of a backward."""
    digest = hashlib.sha256()
    for path, text in sorted(texts.items()):
        digest.update(path.encode() + b"\0" + (_spec_code(text) if path.endswith(".py") else _cuda_code(text)))
    for file in sorted(kernel.source.parent.iterdir()):
        with suppress(OSError):
            if file.suffix in (".cu", ".py") and file not in _own_files(kernel):
                stat = file.stat()
                digest.update(f"{file.name} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()


@lru_cache(maxsize=256)  # most files of two versions are equal
def _cuda_code(text: str) -> bytes:
    return sources.without_lines(as_bytes(text))


@lru_cache(maxsize=64)
def _spec_code(text: str) -> bytes:
    try:
        return ast.dump(ast.parse(text)).encode()
    except (SyntaxError, ValueError):
        return as_bytes(text)


class History:
    """The versions of one kernel."""

    def __init__(self, kernel: Kernel, folder: Path | None = None):
        self.kernel = kernel
        self.path = (folder or registry.root(kernel) / ".sandbox" / "history") / f"{kernel.name}.jsonl"

    def versions(self) -> list[Version]:
        """All versions, oldest first."""
        return _parsed(jsonl.read(self.path))[0]

    def get(self, number: int) -> Version:
        """The version with that number. Raises HistoryError with the existing numbers."""
        versions = self.versions()
        for version in versions:
            if version.number == number:
                return version
        there = (
            f"there are 1 to {versions[-1].number}"
            if versions
            else "none are stored yet (watch stores one at every save)"
        )
        raise HistoryError(f"{self.kernel.name} has no version {number}: {there}")

    def append(
        self, texts: Texts, *, ok: bool = False, stage: str = "", message: str = "", setting: str = "",
        figures: Mapping[str, float] | None = None,
    ) -> Version:  # fmt: skip
        """Record a version. If texts and result are those of the latest version, returns that one instead."""
        with self._locked() as file:
            known, stored = _parsed(jsonl.parse(file.read()))
            latest = known[-1] if known else None
            same = latest and (latest.texts, latest.ok, latest.stage, latest.setting) == (texts, ok, stage, setting)
            if latest and same:
                return latest
            number = latest.number + 1 if latest else 1
            digests = {path: _digest(text) for path, text in texts.items()}
            entry: dict[str, Any] = {
                "number": number, "time": time.strftime("%Y-%m-%d %H:%M:%S"), "ok": ok, "stage": stage,
                "message": message, "setting": setting, "figures": dict(figures or {}), "files": digests,
                "texts": {digests[path]: text for path, text in texts.items() if digests[path] not in stored},
            }  # fmt: skip
            jsonl.add(file, entry)
        return Version(**{name: entry[name] for name in _FIELDS}, texts=texts)

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        try:
            with jsonl.locked(self.path) as file:
                yield file
        except OSError as error:
            raise HistoryError(f"history {self.path} cannot be written: {error.strerror}") from error

    def diff(self, old: Texts, new: Texts, names: tuple[str, str]) -> str:
        """A unified diff of all files."""
        changed: list[str] = []
        for path in sorted({*old, *new}):
            before, after = (texts.get(path, "").splitlines(keepends=True) for texts in (old, new))
            changed += difflib.unified_diff(before, after, f"{path} ({names[0]})", f"{path} ({names[1]})")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ no newline at end\n" for line in changed)

    def restore(self, number: int) -> tuple[Version | None, list[str]]:
        """Restores the kernel's `.cu` and spec. Returns (the version that records the replaced text, None if an earlier
        version has it; headers that have changed since). Headers are not restored, because other kernels share them.
        """
        wanted = self.get(number)
        current = read_texts(self.kernel) or _what_is_there(self.kernel)
        keep = None
        if not any(version.texts == current for version in self.versions()):
            keep = self.append(current, stage="replaced", message=f"what version {number} replaced")
        own = {str(path.relative_to(registry.root(self.kernel))) for path in _own_files(self.kernel)}
        for path in own & {*wanted.texts}:
            if current.get(path) != wanted.texts[path]:
                atomic.replace(registry.root(self.kernel) / path, as_bytes(wanted.texts[path]))
        return keep, sorted(p for p in wanted.texts if p not in own and current.get(p) != wanted.texts[p])


_FIELDS = ("number", "time", "ok", "stage", "message", "setting", "figures")  # of a Version in its JSON line


def _parsed(entries: list[dict[str, Any]]) -> tuple[list[Version], dict[str, str]]:
    """(the versions, {digest: text})."""
    versions: list[Version] = []
    texts: dict[str, str] = {}
    for entry in entries:
        with suppress(KeyError, TypeError, AttributeError):  # an invalid line
            texts |= entry["texts"]
            named = {path: texts[digest] for path, digest in entry["files"].items()}
            versions.append(Version(**{name: entry[name] for name in _FIELDS}, texts=named))
    return versions, texts


def as_bytes(text: str) -> bytes:
    """The exact bytes of the file: line ends are kept, and bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def _read(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "surrogateescape")


def _digest(text: str) -> str:
    return hashlib.sha256(as_bytes(text)).hexdigest()[:20]


def _own_files(kernel: Kernel) -> tuple[Path, Path]:
    return kernel.source, kernel.source.with_suffix(".py")


def _what_is_there(kernel: Kernel) -> Texts:
    project = registry.root(kernel)
    return {str(p.relative_to(project)): _read(p) for p in _own_files(kernel) if p.is_file()}
