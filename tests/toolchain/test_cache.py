"""The on-disk cache: entries are complete or absent, with concurrent writers, clearing, damage and crashes."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.core.errors import CacheError
from sandbox.toolchain import cache

KEY = cache.make_key(what="a test")
FILES = {"cubin": b"\x7fELF" * 1000, "ptx": b".version 8.0\n"}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_round_trip(own_cache: Path) -> None:
    assert cache.get(KEY) is None
    put = cache.put(KEY, FILES, {"name": "k sm_90a", "numbers": [1, 2]})
    got = cache.get(KEY)
    assert got == put
    assert got.files == FILES
    assert got.meta == {"name": "k sm_90a", "numbers": [1, 2]}
    assert {path.name: path.read_bytes() for path in got.path.iterdir()}.items() >= FILES.items()
    assert leftovers(own_cache) == []


def test_keys_depend_on_every_part_and_on_nothing_else() -> None:
    assert cache.make_key(a=1, b=("x",)) == cache.make_key(b=("x",), a=1)
    different = [{"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {"a": 1, "b": None}]
    assert len({cache.make_key(**parts) for parts in different}) == len(different)


def test_the_first_of_two_writers_wins(own_cache: Path) -> None:
    cache.put(KEY, {"f": b"first"}, {})
    assert cache.put(KEY, {"f": b"second"}, {}).files == {"f": b"first"}


def hammer(seed: int, keys: list[str]) -> str:
    """Put and get every key in random order; every entry read must be complete."""
    for i in range(len(keys)):
        n = (i * 7 + seed * 11) % len(keys)
        content = keys[n].encode() * 500
        entry = cache.get(keys[n]) or cache.put(keys[n], {"a": content, "b": content[::-1]}, {"n": n})
        if entry.files != {"a": content, "b": content[::-1]} or entry.meta != {"n": n}:
            return f"half an entry: {n}"
    return ""


def keep_clearing(seconds: float) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        cache.clear()
        list(cache.entries())
        time.sleep(0.005)
    return ""


@pytest.mark.parametrize("clearing", [False, True])
def test_many_processes_at_once(own_cache: Path, clearing: bool) -> None:
    keys = [cache.make_key(n=n) for n in range(50)]
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        jobs = [pool.apply_async(hammer, (seed, keys)) for seed in range(3 if clearing else 4)]
        if clearing:
            jobs.append(pool.apply_async(keep_clearing, (0.5,)))
        assert [job.get(60) for job in jobs] == [""] * 4
    assert leftovers(own_cache) == []
    if not clearing:
        assert sorted(entry.key for entry in cache.entries()) == sorted(keys)


def truncate(entry: Path) -> None:
    (entry / "cubin").write_bytes(FILES["cubin"][:-1])


def flip(entry: Path) -> None:
    content = bytearray(FILES["cubin"])
    content[1234] ^= 1
    (entry / "cubin").write_bytes(content)


def lose_file(entry: Path) -> None:
    (entry / "ptx").unlink()


def file_becomes_folder(entry: Path) -> None:
    (entry / "ptx").unlink()
    (entry / "ptx").mkdir()


def lose_record(entry: Path) -> None:
    (entry / "entry.json").unlink()


def record(text: str) -> Callable[[Path], None]:
    def damage(entry: Path) -> None:
        (entry / "entry.json").write_bytes(text.encode("latin1"))

    damage.__name__ = text[:20] or "empty"
    return damage


def entry_becomes_file(entry: Path) -> None:
    for path in entry.iterdir():
        path.unlink()
    entry.rmdir()
    entry.write_text("?")


RECORDS = (
    "", "{", "[]", "3", "null", '"x"', "{}", "\xff\xfe\x00", '{"files": {}}', '{"files": {}, "meta": 7}',
    '{"files": 3, "meta": {}}', '{"files": ["cubin"], "meta": {}}', '{"files": {"cubin": 5}, "meta": {}}',
)  # fmt: skip
DAMAGE = [
    truncate, flip, lose_file, file_becomes_folder, lose_record, entry_becomes_file, *map(record, RECORDS),
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_entry_is_dropped_and_rebuilt(own_cache: Path, damage: Callable[[Path], None]) -> None:
    damage(cache.put(KEY, FILES, {}).path)
    assert cache.get(KEY) is None
    assert list(own_cache.iterdir()) == []
    assert cache.put(KEY, FILES, {}).files == FILES


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_put_replaces_a_damaged_entry(own_cache: Path, damage: Callable[[Path], None]) -> None:
    damage(cache.put(KEY, FILES, {}).path)
    list(cache.entries())  # does not raise
    assert cache.put(KEY, FILES, {"again": True}).meta == {"again": True}
    assert leftovers(own_cache) == []


def test_the_directory_is_private(own_cache: Path) -> None:
    assert stat.S_IMODE(cache.directory().stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_directory_writable_by_others_is_refused(own_cache: Path, mode: int) -> None:
    own_cache.mkdir()
    own_cache.chmod(mode)
    with pytest.raises(CacheError, match=rf"{own_cache} is not private .*mode {mode:o}.*chmod 700.*SANDBOX_CACHE_DIR"):
        cache.get(KEY)


def test_a_directory_of_another_user_is_refused(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.directory()
    monkeypatch.setattr(os, "geteuid", lambda: own_cache.stat().st_uid + 1)
    with pytest.raises(CacheError, match=r"not private .owner .*SANDBOX_CACHE_DIR"):
        cache.put(KEY, FILES, {})


def test_location_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SANDBOX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.directory() == tmp_path / "xdg" / "attention-sandbox"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.directory() == tmp_path / "home" / ".cache" / "attention-sandbox"


def test_a_directory_that_cannot_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    for impossible in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        monkeypatch.setenv("SANDBOX_CACHE_DIR", str(impossible))
        with pytest.raises(CacheError, match=r"cannot be created.*set SANDBOX_CACHE_DIR to a folder of your own"):
            cache.put(KEY, FILES, {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\udcffb"])
def test_a_directory_that_compilers_cannot_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_CACHE_DIR", str(tmp_path / name))
    with pytest.raises(CacheError, match=r"its path .*; set SANDBOX_CACHE_DIR to a folder of your own"):
        cache.directory()
    assert not any(tmp_path.iterdir())
    monkeypatch.setenv("SANDBOX_CACHE_DIR", str(tmp_path / "a'b c,é"))
    assert cache.directory().is_dir()


def test_a_full_disk(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CacheError, match=r"cannot be written .No space left on device.*SANDBOX_CACHE_DIR"):
        cache.put(KEY, FILES, {})
    assert list(own_cache.iterdir()) == []


def test_an_entry_that_cannot_be_read_stays(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of file descriptors, or a transient disk error, does not invalidate the entry."""
    cache.put(KEY, FILES, {})

    def fails(path: Path) -> bytes:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fails)
        with pytest.raises(CacheError, match=rf"{KEY} cannot be read \(Too many open files\)"):
            cache.get(KEY)
    assert cache.get(KEY)


def test_least_recently_used_entries_are_removed(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_CACHE_MB", "1")
    monkeypatch.setattr(cache, "_TRIMMED_EVERY", 1)
    names = [cache.make_key(n=n) for n in range(4)]
    for age, name in enumerate(names[:3]):
        cache.put(name, {"f": bytes(300_000)}, {})
        os.utime(own_cache / name, (1000 + age, 1000 + age))
    assert cache.get(names[0])  # and so names[1] is the oldest
    cache.put(names[3], {"f": bytes(300_000)}, {})
    assert {entry.key for entry in cache.entries()} == {names[0], names[2], names[3]}


def test_no_entry_is_removed_while_the_cache_is_in_use(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_CACHE_MB", "0")
    monkeypatch.setattr(cache, "_TRIMMED_EVERY", 1)
    clearing = threading.Thread(target=cache.clear)
    with cache.in_use():
        cache.put(KEY, FILES, {})
        clearing.start()
        clearing.join(0.3)
        assert cache.get(KEY)
    clearing.join(60)
    assert cache.get(KEY) is None


def test_entries_above_the_limit_are_removed_when_the_cache_is_no_longer_in_use(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOX_CACHE_MB", "0")
    monkeypatch.setattr(cache, "_TRIMMED_EVERY", 1)
    with cache.in_use():
        cache.put(KEY, FILES, {})
        assert cache.get(KEY)
    assert list(cache.entries()) == []


def test_every_sixteenth_entry_the_size_is_compared_with_the_limit(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOX_CACHE_MB", "0")
    monkeypatch.setattr(cache, "_puts", itertools.count(1))
    for n in range(15):
        cache.put(cache.make_key(n=n), {"f": b"x"}, {})
    assert len(list(cache.entries())) == 15
    cache.put(cache.make_key(n=15), {"f": b"x"}, {})
    assert list(cache.entries()) == []


@pytest.mark.parametrize(("beyond", "left"), [(0, 3), (1, 2), (1000, 2), (300_000, 1)])
def test_as_many_entries_are_removed_as_exceed_the_limit(
    own_cache: Path, beyond: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least recently used ones, until the rest has at most the size of the limit."""
    for n in range(3):
        path = cache.put(cache.make_key(n=n), {"f": bytes(1000)}, {}).path
        os.utime(path, (1000 + n, 1000 + n))
    sizes = [entry.nbytes for entry in sorted(cache.entries(), key=lambda entry: entry.used)]
    monkeypatch.setattr(cache, "limit", lambda: max(sum(sizes) - beyond, sizes[-1]))
    cache._to_trim.set()
    with cache.in_use():
        pass
    assert [entry.key for entry in sorted(cache.entries(), key=lambda entry: entry.used)] == [
        cache.make_key(n=n) for n in range(3 - left, 3)
    ]
    assert not cache._to_trim.is_set()


@pytest.mark.parametrize(("value", "nbytes"), [(None, 4 * 2**30), ("", 4 * 2**30), ("0", 0), ("3", 3 * 2**20)])
def test_the_limit_is_in_MiB(value: str | None, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDBOX_CACHE_MB", raising=False)
    if value is not None:
        monkeypatch.setenv("SANDBOX_CACHE_MB", value)
    assert cache.limit() == nbytes


@pytest.mark.parametrize(("age", "there"), [(600, True), (601, False)])
def test_staging_folders_of_interrupted_writers_are_removed_after_ten_minutes(
    own_cache: Path, age: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other writers they may be in use."""
    staging = own_cache / ".new-x"
    staging.mkdir(parents=True)
    os.utime(staging, (5000, 5000))
    monkeypatch.setattr(cache.time, "time", lambda: 5000.0 + age)
    assert cache.clear() == 0
    assert staging.is_dir() == there


def test_clear_removes_headers_that_nvrtc_unpacked(own_cache: Path) -> None:
    """They are no entries. Folders with similar names stay."""
    for n in range(2):
        cache.put(cache.make_key(n=n), FILES, {})
    names = ["headers-" + "0a" * 8, "headers-" + "0a" * 7, "headers-" + "0a" * 9, "revision-" + "0a" * 19]
    for name in names:
        (own_cache / name).mkdir()
    assert cache.clear() == 2
    assert sorted(path.name for path in own_cache.iterdir()) == sorted(names[1:])


def test_clear_removes_old_headers_of_score_expressions(own_cache: Path) -> None:
    """Not young ones, which a compiler may be about to read."""
    old, young = (cache.snippets() / name for name in ("0a" * 6, "0b" * 6))
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "score_snippet.cuh").write_text("")
    os.utime(old, (0, 0))
    assert cache.clear() == 0
    assert [*cache.snippets().iterdir()] == [young]


def test_an_entry_that_cannot_be_read_back(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After five attempts it is an error."""
    tries: list[str] = []
    monkeypatch.setattr(cache, "get", lambda key, *needed: tries.append(key))
    with pytest.raises(
        CacheError, match=f"cache entry .*{KEY} cannot be read back after writing: check the disk, or set"
    ):
        cache.put(KEY, FILES, {})
    assert tries == [KEY] * 5
    assert leftovers(own_cache) == []


def test_a_directory_that_cannot_be_opened(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, flags: int) -> int:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(cache.os, "open", fails)
    with pytest.raises(
        CacheError, match=r"^cache directory .* cannot be read \(Permission denied\): set SANDBOX_CACHE"
    ):
        cache.clear()


def test_a_limit_that_is_not_a_number(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_CACHE_MB", "much")
    with pytest.raises(CacheError, match="SANDBOX_CACHE_MB='much' must be a number of MiB"):
        cache.limit()


def test_clear_removes_entries_and_old_staging_folders_only(own_cache: Path) -> None:
    cache.put(KEY, FILES, {})
    foreign, checkout, unpacked = own_cache / "notes", own_cache / ("0a" * 20), own_cache / ("revision-" + "0a" * 20)
    for folder in (foreign, checkout, unpacked):
        folder.mkdir()
    (foreign / "entry.json").write_text('{"files": {}, "meta": {}, "made": 1.0}')
    (checkout / "work.cu").write_text("mine")  # a folder named by a git commit, for instance
    (own_cache / "todo.txt").write_text("mine")
    fresh, stale = own_cache / ".new-fresh", own_cache / ".new-stale"
    for staging in (fresh, stale):
        staging.mkdir()
        (staging / "cubin").write_bytes(b"half")
    os.utime(stale, (time.time() - 3600,) * 2)
    assert cache.clear() == 1
    assert sorted(path.name for path in own_cache.iterdir()) == [".new-fresh", checkout.name, "notes", "todo.txt"]
    assert (checkout / "work.cu").read_text() == "mine"
    assert cache.clear() == 0


def test_the_limit_does_not_remove_other_folders(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_CACHE_MB", "0")
    monkeypatch.setattr(cache, "_TRIMMED_EVERY", 1)
    foreign = cache.directory() / "notes"
    foreign.mkdir()
    (foreign / "entry.json").write_text('{"files": {}, "meta": {}, "made": 1.0}')
    cache.put(KEY, FILES, {})
    assert list(own_cache.iterdir()) == [foreign]


def without_field(section: str, name: str) -> Callable[[Path], None]:
    def damage(entry: Path) -> None:
        recorded = json.loads((entry / "entry.json").read_text())
        del (recorded[section] if section else recorded)[name]
        (entry / "entry.json").write_text(json.dumps(recorded))

    return damage


INCOMPLETE = {
    "files": without_field("", "files"),
    "meta": without_field("", "meta"),
    "made": without_field("", "made"),
    "a file": without_field("files", "ptx"),
    "seconds": without_field("meta", "seconds"),
}


@pytest.mark.parametrize("damage", INCOMPLETE.values(), ids=INCOMPLETE)
def test_an_entry_without_what_its_reader_needs_is_rebuilt(own_cache: Path, damage: Callable[[Path], None]) -> None:
    meta = {"name": "k", "seconds": 0.5, "numbers": (1, 2)}
    needed = ("cubin", "ptx"), {"seconds": float}
    damage(cache.put(KEY, FILES, meta).path)
    assert cache.put(KEY, FILES, meta).meta["seconds"] == 0.5
    assert cache.get(KEY, *needed)
    damage(own_cache / KEY)
    assert cache.get(KEY, *needed) is None
    assert list(own_cache.iterdir()) == []


def test_entries(own_cache: Path) -> None:
    before = time.time()
    for n in range(3):
        cache.put(cache.make_key(n=n), FILES, {"name": f"kernel {n}"})
    (own_cache / "todo.txt").write_text("mine")
    listed = list(cache.entries())
    assert sorted(entry.meta["name"] for entry in listed) == ["kernel 0", "kernel 1", "kernel 2"]
    for entry in listed:
        assert entry.nbytes == sum(path.stat().st_size for path in (own_cache / entry.key).iterdir())
        assert entry.nbytes > sum(map(len, FILES.values()))
        assert before - 1 <= entry.made <= time.time() + 1
    assert [entry.key for entry in listed] == sorted(entry.key for entry in listed)
    os.utime(own_cache / listed[1].key, (1000, 1000))
    assert [entry.used for entry in cache.entries()][1] == 1000
    (own_cache / listed[0].key / "entry.json").write_text("[]")
    assert next(iter(cache.entries())).key == listed[1].key


def test_a_killed_writer_leaves_nothing_to_read(own_cache: Path) -> None:
    """Killed after all files are written and before the rename."""
    script = (
        "import os, signal\n"
        "from sandbox.toolchain import cache\n"
        "os.rename = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"cache.put({KEY!r}, {{'cubin': b'x' * 100}}, {{}})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (staging,) = own_cache.iterdir()
    assert json.loads((staging / "entry.json").read_text())["files"]
    assert cache.get(KEY) is None
    assert list(cache.entries()) == [] or all(entry.key != KEY for entry in cache.entries())
    assert cache.put(KEY, FILES, {}).files == FILES
    os.utime(staging, (0, 0))
    cache.clear()
    assert list(own_cache.iterdir()) == []
