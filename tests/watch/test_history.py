"""The history of a kernel: no recorded version is lost, with several writers and after a crash."""

from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path

import pytest

from sandbox.core import registry
from sandbox.core.errors import HistoryError
from sandbox.watch import history
from sandbox.watch.history import History, read_texts

KERNEL = registry.get("fwd_minimal")


@pytest.fixture
def versions(tmp_path: Path) -> History:
    return History(KERNEL, tmp_path)


def test_texts_are_the_source_the_spec_and_the_headers() -> None:
    texts = read_texts(KERNEL)
    headers = (
        *(
            "block_map",
            "clocks",
            "cu_seqlens",
            "dropout",
            "dual",
            "element",
            "mask",
            "ptx",
            "reduce",
            "score",
            "score_mod",
            "seqlen",
        ),
        *("paged_keys", "tensor", "timeline", "view"),
    )
    assert texts
    assert set(texts) == {
        "kernels_cu/fwd_minimal.cu",
        "kernels_cu/fwd_minimal.py",
        *(f"kernels_cu/include/{name}.cuh" for name in headers),
    }
    assert texts["kernels_cu/fwd_minimal.cu"] == KERNEL.source.read_text()


def test_a_file_that_is_being_replaced() -> None:
    assert read_texts(dataclasses.replace(KERNEL, source=KERNEL.source.with_name("gone.cu"))) is None


def test_a_text_is_written_once(versions: History) -> None:
    versions.append({"a": "x" * 1000, "b": "first"}, ok=True, stage="ok", figures={"registers": 72.0})
    versions.append({"a": "x" * 1000, "b": "second"}, ok=False, stage="wrong", message="no")
    assert versions.path.read_text().count("x" * 1000) == 1
    first, second = versions.versions()
    assert (first.number, first.ok, first.figures) == (1, True, {"registers": 72.0})
    assert (second.number, second.texts) == (2, {"a": "x" * 1000, "b": "second"})


def test_the_same_again_is_no_new_version(versions: History) -> None:
    versions.append({"a": "1"}, ok=True, stage="ok", setting="cpu")
    assert versions.append({"a": "1"}, ok=True, stage="ok", setting="cpu").number == 1
    assert versions.append({"a": "1"}, ok=True, stage="ok", setting="another").number == 2
    assert versions.append({"a": "2"}, ok=True, stage="ok", setting="another").number == 3
    assert versions.append({"a": "1"}, ok=True, stage="ok", setting="another").number == 4


@pytest.mark.parametrize("rest", ['{"number": 3, "te', "\n", '{"other": "program"}\n', "\xff\xfe"])
def test_a_line_that_was_cut_off(versions: History, rest: str) -> None:
    for n in "12":
        versions.append({"a": n}, stage="ok")
    with versions.path.open("a") as file:
        file.write(rest)
    assert [v.number for v in versions.versions()] == [1, 2]
    assert versions.append({"a": "3", "b": "1"}, stage="ok").number == 3
    assert [v.texts for v in versions.versions()] == [{"a": "1"}, {"a": "2"}, {"a": "3", "b": "1"}]


def test_a_text_that_was_cut_off_is_written_again(versions: History) -> None:
    versions.append({"a": "1"}, stage="ok")
    whole = versions.path.read_text()
    versions.path.write_text(whole[: len(whole) // 2])
    assert versions.versions() == []
    versions.append({"a": "1"}, stage="ok")
    assert versions.get(1).texts == {"a": "1"}


def write(folder: Path, who: int) -> None:
    for n in range(20):
        History(KERNEL, folder).append({"a": f"{who} {n}"}, stage="ok")


def test_two_writers(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write, args=(tmp_path, who)) for who in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = History(KERNEL, tmp_path).versions()
    assert [v.number for v in found] == list(range(1, 41))
    assert {v.texts["a"] for v in found} == {f"{who} {n}" for who in range(2) for n in range(20)}


def test_a_version_that_is_not_there(versions: History) -> None:
    versions.append({"a": "1"}, stage="ok")
    with pytest.raises(HistoryError, match="fwd_minimal has no version 2: there are 1 to 1"):
        versions.get(2)


def test_a_kernel_without_versions(versions: History) -> None:
    none = r"^fwd_minimal has no version 1: none are stored yet \(watch stores one at every save\)$"
    with pytest.raises(HistoryError, match=none):
        versions.get(1)
    for n in "123":
        versions.append({"a": n}, stage="ok")
    with pytest.raises(HistoryError, match=r"^fwd_minimal has no version 0: there are 1 to 3$"):
        versions.get(0)
    assert versions.get(2).texts == {"a": "2"}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match="cannot be written"):
        History(KERNEL, tmp_path / "file" / "below").append({"a": "1"})


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> History:
    """A project with one kernel, one header and one version."""
    folder = tmp_path / "kernels_cu"
    (folder / "include").mkdir(parents=True)
    monkeypatch.setattr(registry, "FOLDER", folder)
    (folder / "mine.cu").write_text('#include "include/own.cuh"\nfirst\n')
    (folder / "mine.py").write_text("spec 1\n")
    (folder / "include" / "own.cuh").write_text("header 1\n")
    kernel = dataclasses.replace(KERNEL, name="mine", source=folder / "mine.cu")
    texts = read_texts(kernel)
    assert texts
    assert set(texts) == {"kernels_cu/mine.cu", "kernels_cu/mine.py", "kernels_cu/include/own.cuh"}
    made = History(kernel)
    made.append(texts, ok=True, stage="ok")
    return made


def test_restoring_never_loses_the_current_text(project: History) -> None:
    source = project.kernel.source
    source.chmod(0o640)
    source.write_text(source.read_text() + "second\n")
    project.kernel.source.with_suffix(".py").write_text("spec 2\n")
    (source.parent / "include" / "own.cuh").write_text("header 2\n")
    keep, headers = project.restore(1)
    assert keep
    assert (keep.number, keep.stage) == (2, "replaced")
    assert project.get(2).texts["kernels_cu/mine.cu"].endswith("second\n")
    assert source.read_text().endswith("first\n")
    assert source.stat().st_mode & 0o777 == 0o640
    assert source.with_suffix(".py").read_text() == "spec 1\n"
    assert headers == ["kernels_cu/include/own.cuh"]
    assert (source.parent / "include" / "own.cuh").read_text() == "header 2\n"
    project.restore(2)
    assert source.read_text().endswith("second\n")


def test_restoring_is_byte_exact(project: History) -> None:
    """Line ends, and bytes that are not UTF-8."""
    source = project.kernel.source
    content = b'#include "include/own.cuh"\r\n// caf\xe9, \xff\r\nlast'
    source.write_bytes(content)
    number = project.append(read_texts(project.kernel) or {}).number
    source.write_text("another\n")
    project.restore(number)
    assert source.read_bytes() == content


def test_restoring_what_was_deleted(project: History) -> None:
    project.kernel.source.unlink()
    keep, _ = project.restore(1)
    assert keep
    assert project.kernel.source.read_text().endswith("first\n")
    assert project.restore(1) == (None, []) or history.read_texts(project.kernel) == project.get(1).texts


def test_what_is_recorded_already_is_not_recorded_again(project: History) -> None:
    """In any version. Only files that differ are written; other files of the version are not restored."""
    source = project.kernel.source
    project.append({"kernels_cu/mine.cu": "x"}, stage="ok")
    before = source.stat().st_mtime_ns
    assert project.restore(1) == (None, [])
    assert source.stat().st_mtime_ns == before
    keep, headers = project.restore(2)
    assert (keep, headers) == (None, [])
    assert source.read_text() == "x"
    assert source.with_suffix(".py").read_text() == "spec 1\n"
    assert [v.number for v in project.versions()] == [1, 2]
    keep, _ = project.restore(1)
    assert keep
    assert (keep.number, keep.message, keep.ok) == (3, "what version 1 replaced", False)


def test_files_that_cannot_be_read(project: History) -> None:
    """A missing one, as during an editor's save, is no fault."""
    spec = project.kernel.source.with_suffix(".py")
    assert history.unreadable(project.kernel) == ""
    spec.unlink()
    assert history.unreadable(project.kernel) == ""
    spec.mkdir()
    assert history.unreadable(project.kernel) == f"{spec} cannot be read: Is a directory"
    project.kernel.source.unlink()
    assert history.unreadable(project.kernel) == f"{spec} cannot be read: Is a directory"


def test_code_that_is_no_python(project: History) -> None:
    """Every byte counts."""
    texts = "x = 1", "x  =  1 # one", "x = (", "x = ( ", "\0"
    digests = {history.code_digest(project.kernel, {"k.py": text}) for text in texts}
    assert len(digests) == 4


def test_a_difference_names_files_and_versions(project: History) -> None:
    old = project.get(1).texts
    new = {**old, "kernels_cu/mine.py": "spec 2", "kernels_cu/include/new.cuh": "x\n"}
    assert project.diff(old, new, ("#1", "now")) == (
        "--- kernels_cu/include/new.cuh (#1)\n+++ kernels_cu/include/new.cuh (now)\n@@ -0,0 +1 @@\n+x\n"
        "--- kernels_cu/mine.py (#1)\n+++ kernels_cu/mine.py (now)\n@@ -1 +1 @@\n-spec 1\n"
        "+spec 2\n\\ no newline at end\n"
    )
