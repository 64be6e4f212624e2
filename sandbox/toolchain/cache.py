"""The cache of compiled objects on disk: cubins and CPU libraries, keyed by everything that went into them.

An entry is a folder named by its key: the object's files and `entry.json`, which holds a SHA-256 of each file. It is
made in a private folder beside its place and renamed into it, so that an entry is either whole or absent whoever else
writes at the same moment, and every file is checked against its digest before use: a damaged entry is dropped and
rebuilt, never loaded. Objects in here are executed, so the folder belongs to one user and nobody else can write to it.

Beyond `limit` bytes the entries that were used least recently go. Whoever needs an entry's file by its path, as the
host's compiler and loader do, has the cache `in_use` meanwhile: nothing is removed then.
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
_TRIMMED_EVERY = 16  # entries that a process puts, from its first on: looking at some thousands takes 0.1 s
_STAGING = ".new-"  # prefix of folders on their way in or out
_ENTRY = re.compile(r"[0-9a-f]{40}")  # an entry's name; it is one only if it holds entry.json, too
_UNPACKED = re.compile(r"revision-[0-9a-f]{40}|headers-[0-9a-f]{16}")  # old sources, headers that NVRTC unpacks


@dataclass(frozen=True)
class Entry:
    """One cached object: `files` by name, verified when they were read; `meta` as it was put.

    The content is held in memory: another process may clear the cache at any moment.
    """

    key: str
    path: Path
    meta: dict[str, Any]
    files: dict[str, bytes] = field(repr=False)


def directory() -> Path:
    """The cache folder: `$SANDBOX_CACHE_DIR`, else `attention-sandbox` under `$XDG_CACHE_HOME` or `~/.cache`.

    Made with mode 0700 when missing. Raises CacheError when it cannot be made or is not private, and for a path that
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
        raise CacheError(f"cache directory {path} cannot be made ({error.strerror}): {_REMEDY}") from error
    if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(f"cache directory {path} is not private (owner {info.st_uid}, mode {info.st_mode & 0o777:o}): "
                         f"chmod 700 it, or {_REMEDY}")  # fmt: skip
    return path


def make_key(**parts: object) -> str:
    """A key from everything that decides an object's content."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """Entries that are here, and those that are put meanwhile, stay where they are: `clear` waits."""
    with _locked(fcntl.LOCK_SH):
        yield
    _trim()


@contextlib.contextmanager
def _locked(how: int) -> Iterator[None]:
    """The folder itself. Raises BlockingIOError when `how` is not to wait and somebody has it."""
    path = directory()
    try:
        folder = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CacheError(f"cache directory {path} cannot be read ({error.strerror}): {_REMEDY}") from error
    try:
        fcntl.flock(folder, how)
        yield
    finally:
        os.close(folder)  # which also gives it back


def limit() -> int:
    """Bytes that entries may take: `$SANDBOX_CACHE_MB`, by default 4096 MiB. Raises CacheError for no number."""
    chosen = os.environ.get("SANDBOX_CACHE_MB", "") or str(_LIMIT_MIB)
    if not chosen.isdecimal():
        raise CacheError(f"SANDBOX_CACHE_MB={chosen} must be a number of MiB")
    return int(chosen) * 2**20


def get(key: str, files: Iterable[str] = (), meta: Mapping[str, type] = MappingProxyType({})) -> Entry | None:
    """The entry of that key if it is there, undamaged, and has all of `files` and a value of that type for each name in
    `meta`; otherwise it is removed. Raises CacheError when it cannot be read, for want of a file descriptor, say: that
    says nothing about the entry."""
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
        raise CacheError(f"cache entry {path} cannot be read ({error.strerror}): mend that, or {_REMEDY}") from error
    with contextlib.suppress(OSError):  # its time says when it was last used
        os.utime(path)
    return Entry(key, path, kept, found)


def put(key: str, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> Entry:
    """Store an object's files and return its entry.

    When another process has stored the same key meanwhile, that entry stays and is returned, unless it lacks a file or
    a name of `meta`. Raises CacheError when the folder cannot be written.
    """
    root = directory()
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    record = json.dumps({"files": digests, "meta": dict(meta), "made": time.time()})
    kinds = {name: type(value) for name, value in json.loads(record)["meta"].items()}
    try:
        for _ in range(5):  # again only when somebody else clears the cache, or leaves a damaged entry, meanwhile
            staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=root))
            try:
                for name, content in files.items():
                    (staging / name).write_bytes(content)
                (staging / "entry.json").write_text(record)
                with contextlib.suppress(OSError):  # the place is taken: somebody else was first
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
    raise CacheError(f"cache entry {root / key} does not stay as it is written: check the disk, or {_REMEDY}")


@dataclass(frozen=True)
class Listed:
    """An entry as `entries` sees it: `nbytes` on disk; `made` and last `used`, seconds since the epoch."""

    key: str
    meta: dict[str, Any]
    nbytes: int
    made: float
    used: float


def entries() -> Iterator[Listed]:
    """Every entry whose record can be read, by key."""
    for path in sorted(directory().iterdir()):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if not _is_entry(path):
                continue
            recorded = json.loads((path / "entry.json").read_bytes())
            nbytes = sum(file.stat().st_size for file in path.iterdir())
            yield Listed(path.name, {**recorded["meta"]}, nbytes, float(recorded["made"]), path.stat().st_mtime)


def clear() -> int:
    """Remove every entry and what interrupted writers left; returns how many entries there were.

    A folder is an entry only if its name is a key and it holds `entry.json`: other folders may have names of 40 hex
    digits too. Files that are not the cache's own are left alone, and so is what another process may be writing right
    now. Waits for whoever has the cache `in_use`.
    """
    removed = 0
    with _locked(fcntl.LOCK_EX):
        for path in directory().iterdir():
            with contextlib.suppress(OSError):
                if (entry := _is_entry(path)) or _UNPACKED.fullmatch(path.name):
                    removed += entry
                    _remove(path)
                elif path.name.startswith(_STAGING) and time.time() - path.stat().st_mtime > 600:
                    shutil.rmtree(path, ignore_errors=True)
    return removed


def _is_entry(path: Path) -> bool:
    return bool(_ENTRY.fullmatch(path.name)) and (path / "entry.json").is_file()


_puts, _to_trim = itertools.count(), threading.Event()


def _trim() -> None:
    """Remove what was used least recently, if all entries together exceed the limit and nobody has the cache in use."""
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
    """Take an entry out of sight in one step, then delete it: a reader never sees half of it."""
    with contextlib.suppress(OSError):  # somebody else removed it first
        aside = tempfile.mkdtemp(prefix=_STAGING, dir=path.parent)
        try:
            os.rename(path, os.path.join(aside, "removed"))
        finally:
            shutil.rmtree(aside, ignore_errors=True)
