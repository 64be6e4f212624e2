"""`watch`: each save gets a report, and no fault of a kernel ends the loop."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from project import INTERRUPTIBLE, in_project, new_kernel

from sandbox.cpu import compiler

pytest.importorskip("watchfiles")


class Person:
    """A user who edits a kernel of a project while `watch` runs."""

    def __init__(self, project: Path, backend: str, *options: str):
        self.folder = project / "kernels_cu"
        command = [
            *INTERRUPTIBLE,
            sys.executable,
            "-m",
            "sandbox",
            "watch",
            "mine",
            "--backend",
            backend,
            "--json",
            *options,
        ]
        self.process = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def sees(self) -> dict[str, Any]:
        """Waits for the next verdict and returns it."""
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)

    def edits(self, old: str, new: str, file: str = "mine.cu", mends: tuple[str, str] | None = None) -> dict[str, Any]:
        """Saves an edit, and returns the next screen."""
        path = self.folder / file
        text = path.read_text()
        for before, after in filter(None, (mends, (old, new))):
            assert before in text
            text = text.replace(before, after)
        path.write_text(text)
        return self.sees()


@pytest.fixture
def person(project_copy: Path) -> Iterator[Callable[..., Person]]:
    """Starts `watch` on a copy of fwd_minimal called `mine`, and interrupts it at the end."""
    new_kernel(project_copy, "mine")
    started = []

    def start(backend: str, *options: str) -> Person:
        started.append(Person(project_copy, backend, *options))
        return started[-1]

    yield start
    for each in started:
        each.process.send_signal(signal.SIGINT)
        try:
            _, stderr = each.process.communicate(timeout=60)
        finally:
            each.process.kill()
        assert each.process.returncode == 0
        assert stderr == ""


WRITTEN = "query_row < head.Sq ? to_float"
SCALE = "dot * head_scale()"
START = "float m = -INF, l = 0.0f;"


def line_of(folder: Path, text: str) -> int:
    (number,) = [n for n, line in enumerate((folder / "mine.cu").read_text().splitlines(), 1) if text in line]
    return number


def test_a_scripted_person(person: Callable[..., Person]) -> None:
    me = person("cpu", "--timeout", "3")
    first = me.sees()
    assert (first["number"], first["found"]["stage"]) == (1, "ok")

    said = me.edits(START, "float m = -INF, l = 0.0f")["found"]
    assert said["stage"] == "compile"
    assert f"mine.cu({line_of(me.folder, 'const Range keys')}): error" in said["message"]
    assert "^" in said["message"]

    said = me.edits(WRITTEN, WRITTEN.replace("<", "<="), mends=("l = 0.0f", "l = 0.0f;"))["found"]
    assert said["stage"] == "sanitize"
    finding = said["findings"][0]
    assert finding["what"].startswith("out of bounds, read of 2 bytes, 0 bytes past the end of Q (1, 2, 67, 16)")
    assert finding["what"].endswith(" in block (2,1,0) thread (3,0,0)")
    assert finding["on"].startswith("B1 H2/1 S67x37 D16")
    assert said["message"] == f"{finding['what']}\non {finding['on']}"
    assert said["findings"][0]["places"][0]["line"] == line_of(me.folder, "query_row <= head.Sq")

    me.edits("query_row <= head.Sq", "query_row < head.Sq")
    said = me.edits(SCALE, "dot * 2.0f * score.scale", "include/score_mod.cuh")["found"]
    assert said["stage"] == "wrong"
    assert "O is wrong in" in said["message"]
    assert said["results"][0]["where"]["wrong"] > 0

    me.edits("dot * 2.0f * score.scale", SCALE, "include/score_mod.cuh")
    loop = ' while (score.Sq > 96) asm volatile("");'  # only on larger problems
    said = me.edits(START, START + loop)
    assert said["found"]["stage"] == "hang"
    assert "did not finish within 3 s while running B1 H2 S192 D64" in said["found"]["message"]

    last = me.edits(loop, "")
    assert (last["found"]["stage"], last["number"]) == ("ok", 8)
    assert last["previous"]["number"] == 6
    assert last["best"]["number"] == 1
    assert last["figures"] == first["figures"]


def test_a_crash_and_a_spec(person: Callable[..., Person]) -> None:
    me = person("cpu")
    me.sees()
    said = me.edits(START, START + " if (score.Sq > 96) *reinterpret_cast<volatile int*>(8) = 1;")["found"]
    assert said["stage"] == "crash"
    assert said["message"].startswith("it accessed memory that is not there (SIGSEGV) while running B1 H2 S192 D64")
    me.edits(" if (score.Sq > 96) *reinterpret_cast<volatile int*>(8) = 1;", "")

    said = me.edits('summary="', 'summery="', "mine.py")["found"]
    assert said["stage"] == "spec"
    assert "mine.py, line 5: TypeError" in said["message"]
    assert "summery" in said["message"]
    last = me.edits('summery="', 'summary="', "mine.py")
    assert (last["found"]["stage"], last["number"]) == ("ok", 5)

    last = me.edits("tiles=(Tile(BLOCK_M=64, BLOCK_N=32), ", "tiles=(Tile(BLOCK_M=96, BLOCK_N=32), ", "mine.py")
    assert last["found"]["stage"] == "ok"
    if last["found"]["cost"]:
        assert last["figures"]["smem"] > last["previous"]["figures"]["smem"]


@pytest.mark.complete
def test_a_problem_of_ones_own(person: Callable[..., Person]) -> None:
    """A kernel that prints, one that ends for no problem, and one with an uninitialised variable."""
    me = person("cpu", "--timeout", "3", "--shape", "1,1,33,8", "--dtype", "float32")
    me.sees()
    prints = START + r' if (query_row == 32) printf("row %d\n", query_row);'
    said = me.edits(START, prints)["found"]
    assert (said["stage"], said["output"]) == ("ok", "row 32\n")

    loops = START + ' while (score.Sq) asm volatile("");'
    said = me.edits(prints, loops)["found"]
    assert said["stage"] == "hang"
    assert said["message"].startswith("mine did not finish within 3 s: does it end?\non B1 ")

    if compiler.find().is_gcc:  # no other compiler finds it
        said = me.edits(loops, "float m = -INF, l;")["found"]
        assert (said["stage"], len(said["findings"])) == ("sanitize", 1)
        assert said["findings"][0]["what"].startswith("O depends on uninitialised local variables: ")


def test_a_file_that_cannot_be_read(person: Callable[..., Person]) -> None:
    me = person("cpu", "--shape", "1,1,17,16", "--tile", "BLOCK_M=64,BLOCK_N=32")
    me.sees()

    def refused(path: Path, why: str) -> None:
        said = me.sees()
        assert (said["number"], said["found"]["stage"]) == (0, "spec")
        assert said["found"]["message"].startswith(f"{path} cannot be read: {why}")

    source, spec = me.folder / "mine.cu", me.folder / "mine.py"
    for path in (source, spec):
        text = path.read_text()
        path.unlink()
        path.mkdir()
        refused(path, "Is a directory")
        path.rmdir()
        path.symlink_to(path)
        refused(path, "Too many levels of symbolic links")
        path.unlink()
        path.write_text(text)
        assert me.sees()["found"]["stage"] == "ok"


@pytest.mark.gpu
def test_a_scripted_person_on_a_gpu(person: Callable[..., Person]) -> None:
    """Errors that a CUDA context does not survive, and a kernel that does not end."""
    me = person("cuda", "--timeout", "5")
    first = me.sees()
    assert first["found"]["stage"] == "ok"
    assert first["figures"]["tflops"] > 0

    for fault, what in (
        ("*reinterpret_cast<volatile int*>(8) = 1;", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("__trap();", "CUDA_ERROR_"),
        ("while (score.Sq) __threadfence();", "did not finish within 5 s while running"),
    ):
        said = me.edits(START, f"{START} {fault}")["found"]
        assert said["stage"] == ("hang" if "while (" in fault else "run")
        assert what in said["message"]
        said = me.edits(f"{START} {fault}", START)["found"]
        assert said["stage"] == "ok", said["message"]


# ---- once, and back


def once(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return in_project(project, "sandbox", "watch", "mine", *options)


def test_once_and_the_way_back(project_copy: Path) -> None:
    new_kernel(project_copy, "mine")
    source = project_copy / "kernels_cu" / "mine.cu"
    small = ("--once", "--backend", "cpu", "--shape", "1,1,33,40,16", "--causal")
    good = source.read_text()
    done = once(project_copy, *small)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("mine #1  ok")
    wrong = good.replace("l = alpha * l + row_sum", "l = alpha * l + 2 * row_sum")
    source.write_text(wrong)
    done = once(project_copy, *small)
    assert done.returncode == 1
    assert "mine #2  WRONG" in done.stdout
    assert "0.5 times the expected values" in " ".join(done.stdout.split())
    assert "last good, and best #1" in done.stdout

    source.write_text(wrong + "// and more\n")
    listed = once(project_copy, "--history").stdout.splitlines()
    assert [line[:5].strip() for line in listed[::2]] == ["#1", "#2"]
    shown = once(project_copy, "--show", "2").stdout
    assert wrong in shown
    assert "==> kernels_cu/mine.py <==" in shown
    assert "==> kernels_cu/include/score_mod.cuh <==" in shown
    changed = once(project_copy, "--diff", "1", "2").stdout.splitlines()
    assert changed[:2] == ["--- kernels_cu/mine.cu (#1)", "+++ kernels_cu/mine.cu (#2)"]
    assert [line for line in changed[2:] if line.startswith(("-", "+"))] == [
        "-        l = alpha * l + row_sum;",
        "+        l = alpha * l + 2 * row_sum;",
    ]
    assert "+// and more" in once(project_copy, "--diff", "2").stdout
    restored = once(project_copy, "--restore", "1")
    assert restored.stdout == "restored version 1; the replaced files are version 3\n"
    assert source.read_text() == good
    assert "// and more" in once(project_copy, "--show", "3").stdout
    assert once(project_copy, "--restore", "1").stdout == "restored version 1\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--show", "3"), "mine has no version 3: none are stored yet (watch stores one"),
        (("--restore", "1"), "mine has no version 1: none are stored yet (watch stores one"),
        (("7",), "unexpected argument 7: only --diff takes a second version, as in --diff N M"),
        (("--shape", "1,2"), "shape '1,2' must be B,H,S,D"),
    ],
)
@pytest.mark.sampled(2)
def test_usage_errors(project_copy: Path, options: tuple[str, ...], message: str) -> None:
    new_kernel(project_copy, "mine")
    done = once(project_copy, *options)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_without_the_library(project_copy: Path) -> None:
    new_kernel(project_copy, "mine")
    (project_copy / "watchfiles.py").write_text("raise ImportError('none')\n")
    done = once(project_copy, "--backend", "cpu")
    assert done.returncode == 1
    assert 'pip install "attention-sandbox[watch]"' in done.stderr
