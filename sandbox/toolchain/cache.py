"""The on-disk cache of compiled objects: cubins and CPU libraries, keyed by everything that they depend on.

An entry is a folder named by its key. It contains the object's files and `entry.json`, with a SHA-256 of each file.
Entries are written to a staging folder and renamed, so that they are either complete or absent, also with concurrent
writers. Every file is checked against its digest before use; a damaged entry is removed and rebuilt. Cached objects are
executed; the folder therefore belongs to one user, and no other user may write to it.

Above `limit` bytes the least recently used entries are removed. Code that accesses an entry's files by path, such as
the host compiler and loader, holds the lock `in_use`; no entry is removed meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..core.errors import CacheError
from ..core.files import refused_path

_REMEDY = "set SANDBOX_CACHE_DIR to a folder of your own"
_LIMIT_MIB = 4096
_TRIMMED_EVERY = 16  # trim after every 16th put of a process: scanning some thousand entries takes 0.1 s
_STAGING = ".new-"  # prefix of folders that are being added or removed
_ENTRY = re.compile(r"[0-9a-f]{40}")  # name of an entry, which must also contain entry.json
_UNPACKED = re.compile(
    r"revision-[0-9a-f]{40}|headers-[0-9a-f]{16}"
)  # sources of other versions; headers unpacked by NVRTC


@dataclass(frozen=True)
class Entry:
    """One cached object: `files` by name, verified when read; `meta` as passed to `put`.

    The content is in memory, because another process may clear the cache at any time.
    """

    key: str
    path: Path
    meta: dict[str, Any]
    files: dict[str, bytes] = field(repr=False)


def directory() -> Path:
    """The cache folder: `$SANDBOX_CACHE_DIR`, else `attention-sandbox` under `$XDG_CACHE_HOME` or `~/.cache`.

    Created with mode 0700 if missing. Raises CacheError if it cannot be created, is not private, or has a path that
    compilers cannot read.
    """
    chosen = os.environ.get("SANDBOX_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(chosen) if chosen else Path(base) / "attention-sandbox"
    if reason := refused_path(path):
        raise CacheError(f"cache directory {str(path)!r} is not supported: {reason}; {_REMEDY}")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise CacheError(f"cache directory {path} cannot be created ({error.strerror}): {_REMEDY}") from error
    if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(f"cache directory {path} is not private (owner {info.st_uid}, mode {info.st_mode & 0o777:o}): "
                         f"chmod 700 it, or {_REMEDY}")  # fmt: skip
    return path


def snippets() -> Path:
    """The folder of the headers of score expressions, a folder each; it may be missing."""
    return directory() / "snippets"


def make_key(**parts: object) -> str:
    """The key of an object, from everything that its content depends on."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """Shared lock: no entry is removed while it is held; `clear` waits."""
    with _locked(fcntl.LOCK_SH):
        yield
    _trim()


@contextlib.contextmanager
def _locked(how: int) -> Iterator[None]:
    """Lock the cache folder. Raises BlockingIOError if `how` is non-blocking and the lock is taken."""
    path = directory()
    try:
        folder = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CacheError(f"cache directory {path} cannot be read ({error.strerror}): {_REMEDY}") from error
    try:
        fcntl.flock(folder, how)
        yield
    finally:
        os.close(folder)  # also releases the lock


def limit() -> int:
    """Maximum size of all entries in bytes: `$SANDBOX_CACHE_MB`, default 4096 MiB. Raises CacheError if malformed."""
    chosen = os.environ.get("SANDBOX_CACHE_MB", "") or str(_LIMIT_MIB)
    if not chosen.isdecimal():
        raise CacheError(f"SANDBOX_CACHE_MB={chosen!r} must be a number of MiB, such as 4096")
    return int(chosen) * 2**20


def get(key: str, files: Iterable[str] = (), meta: Mapping[str, type] = MappingProxyType({})) -> Entry | None:
    """The entry with this key, or None. An entry that is damaged, or lacks one of `files` or a value of the given type
    for a name in `meta`, is removed. Raises CacheError if it cannot be read for an unrelated reason, such as a lack of
    file descriptors."""
    path = directory() / key
    try:
        recorded = json.loads((path / "entry.json").read_bytes())
        found = {name: (path / name).read_bytes() for name in recorded["files"]}
        if {name: hashlib.sha256(content).hexdigest() for name, content in found.items()} != recorded["files"]:
            raise ValueError("digest")
        kept, _ = {**recorded["meta"]}, float(recorded["made"])
        if {*files} - {*found} or not all(isinstance(kept[name], kind) for name, kind in meta.items()):
            raise ValueError("incomplete")
    except (ValueError, KeyError, TypeError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
        if os.path.lexists(path):
            _remove(path)
        return None
    except OSError as error:
        raise CacheError(f"cache entry {path} cannot be read ({error.strerror}): repair it, or {_REMEDY}") from error
    with contextlib.suppress(OSError):  # the modification time is the time of last use
        os.utime(path)
    return Entry(key, path, kept, found)


def put(key: str, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> Entry:
    """Store an object's files and return its entry.

    If another process has stored the same key meanwhile, that entry is kept and returned, unless it lacks a file or a
    name of `meta`. Raises CacheError if the folder cannot be written.
    """
    root = directory()
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    record = json.dumps({"files": digests, "meta": dict(meta), "made": time.time()})
    kinds = {name: type(value) for name, value in json.loads(record)["meta"].items()}
    try:
        for _ in range(5):  # repeated only if another process clears the cache or leaves a damaged entry
            staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=root))
            try:
                for name, content in files.items():
                    (staging / name).write_bytes(content)
                (staging / "entry.json").write_text(record)
                with contextlib.suppress(OSError):  # another process stored this key first
                    os.rename(staging, root / key)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            if entry := get(key, files, kinds):
                if next(_puts) % _TRIMMED_EVERY == 0:
                    _to_trim.set()
                _trim()
                return entry
    except OSError as error:
        raise CacheError(f"cache directory {root} cannot be written ({error.strerror}): {_REMEDY}") from error
    raise CacheError(f"cache entry {root / key} cannot be read back after writing: check the disk, or {_REMEDY}")


@dataclass(frozen=True)
class Listed:
    """Summary of an entry: `nbytes` on disk; times `made` and last `used`, in seconds since the epoch."""

    key: str
    meta: dict[str, Any]
    nbytes: int
    made: float
    used: float


def entries() -> Iterator[Listed]:
    """Every entry with a readable record, sorted by key."""
    for path in sorted(directory().iterdir()):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if not _is_entry(path):
                continue
            recorded = json.loads((path / "entry.json").read_bytes())
            nbytes = sum(file.stat().st_size for file in path.iterdir())
            yield Listed(path.name, {**recorded["meta"]}, nbytes, float(recorded["made"]), path.stat().st_mtime)


def clear() -> int:
    """Remove every entry, the headers of score expressions and the remains of interrupted writers; returns the number
    of entries removed.

    A folder is an entry only if its name is a key and it contains `entry.json`. Other files are not touched, nor are
    headers and staging folders younger than ten minutes. Waits until no process has the cache `in_use`.
    """
    removed = 0
    with _locked(fcntl.LOCK_EX):
        for path in directory().iterdir():
            with contextlib.suppress(OSError):
                if (entry := _is_entry(path)) or _UNPACKED.fullmatch(path.name):
                    removed += entry
                    _remove(path)
                elif path.name.startswith(_STAGING) and _is_old(path):
                    shutil.rmtree(path, ignore_errors=True)
        for header in snippets().glob("*"):
            if _is_old(header):
                shutil.rmtree(header, ignore_errors=True)
    return removed


def _is_old(path: Path) -> bool:
    """Whether it was last used ten minutes ago: no process writes it or is about to read it."""
    return time.time() - path.stat().st_mtime > 600


def _is_entry(path: Path) -> bool:
    return bool(_ENTRY.fullmatch(path.name)) and (path / "entry.json").is_file()


_puts, _to_trim = itertools.count(), threading.Event()


def _trim() -> None:
    """Remove the least recently used entries above the limit, unless a process has the cache in use."""
    if not _to_trim.is_set():
        return
    with contextlib.suppress(BlockingIOError), _locked(fcntl.LOCK_EX | fcntl.LOCK_NB):
        _to_trim.clear()
        there = sorted(entries(), key=lambda entry: entry.used)
        excess = sum(entry.nbytes for entry in there) - limit()
        for entry in there:
            if excess <= 0:
                break
            _remove(directory() / entry.key)
            excess -= entry.nbytes


def _remove(path: Path) -> None:
    """Rename the entry, then delete it, so that readers never see an incomplete one."""
    with contextlib.suppress(OSError):  # another process removed it first
        aside = tempfile.mkdtemp(prefix=_STAGING, dir=path.parent)
        try:
            os.rename(path, os.path.join(aside, "removed"))
        finally:
            shutil.rmtree(aside, ignore_errors=True)
