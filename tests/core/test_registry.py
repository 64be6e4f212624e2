"""A kernel is two files in one folder: found, listed, compiled, run, checked and tested with no other edit."""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import sys
import threading
from pathlib import Path

import pytest
from project import ROOT, in_project, new_kernel

import kernels_cu
from sandbox.core import registry
from sandbox.core.errors import SpecError, UnknownKernel
from sandbox.spec import COMPUTATIONS

# ---- discovery


def test_every_spec_in_the_folder_is_found() -> None:
    files = {path.stem for path in (ROOT / "kernels_cu").glob("*.py")} - {"__init__"}
    found = registry.kernels()
    assert {kernel.source.stem for kernel in found.values()} == files
    for name, kernel in found.items():
        assert (kernel.name, kernel.source.is_file(), kernel.source.is_absolute()) == (name, True, True)
        assert kernel.summary
    kinds = [*COMPUTATIONS]
    order = [
        (len(kinds) if kernel.custom else kinds.index(kernel.computes), kernel.rung, name)
        for name, kernel in found.items()
    ]
    assert order == sorted(order)


def test_the_returned_dict_is_a_copy() -> None:
    registry.kernels().clear()
    assert registry.get("fwd_minimal")


def test_an_unknown_kernel_suggests_a_near_name() -> None:
    with pytest.raises(
        UnknownKernel, match=r"kernel 'fwd_minimall' is not known: did you mean fwd_minimal\? the kernels are "
    ):
        registry.get("fwd_minimall")
    with pytest.raises(UnknownKernel) as caught:
        registry.get("zzz")
    assert "did you mean" not in str(caught.value)
    assert "fwd_minimal" in str(caught.value)


def test_files_that_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `.cu` without a spec, a spec without a `.cu`, and a kernel of the working directory; no file."""
    (tmp_path / "here").mkdir()
    for file in ("my.cu", "spec.py", "here/course_01.cu", "here/course_01.py"):
        (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("SANDBOX_KERNELS", str(tmp_path))
    for name, message in (
        ("my", f"kernel 'my' is not known: {tmp_path}/my.cu has no my.py beside it"),
        ("spec", f"{tmp_path}/spec.py has no spec.cu beside it"),
        ("course_01", "course_01.cu is in the working directory: pass course_01.cu to a command, or set SANDBOX_K"),
        ("course_01.py", "course_01.cu is in the working directory: pass course_01.cu"),
        ("my.cu", f"kernel 'my.cu' is not known: {tmp_path}/my.cu has no my.py beside it"),
        (str(tmp_path / "here" / "course_01.cu"), f"command, or set SANDBOX_KERNELS={tmp_path}/here and"),
        ("bwd_wgmma_postproces", "did you mean bwd_wgmma_postprocess? "),
        ("x" * 300, "the kernels are"),
    ):
        with pytest.raises(UnknownKernel) as caught:
            registry.get(name)
        assert message in str(caught.value)


def test_an_unknown_kernel_of_a_computation_lists_only_its_kernels() -> None:
    with pytest.raises(UnknownKernel, match=r"the backward kernels are bwd_minimal, bwd_block2d, [^f]*$"):
        registry.get("zzz", "backward")
    message = r"the kernels of custom operations are append_kv, append_kv_e4m3, append_kv_e5m2$"
    with pytest.raises(UnknownKernel, match=message):
        registry.get("zzz", "operation")


def test_an_entry_that_is_no_kernel_names_its_owner() -> None:
    with pytest.raises(
        UnknownKernel, match=r"bwd_minimal_dq is an entry point of bwd_minimal and cannot run alone: use bwd_mi"
    ):
        registry.get("bwd_minimal_dq")
    assert registry.entry_owner("bwd_minimal_dq") == registry.get("bwd_minimal")


@pytest.mark.slow
def test_two_files_are_a_kernel(project_copy: Path) -> None:
    new_kernel(
        project_copy,
        "fwd_x",
        **{
            '("float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2")': '("float16",)',
            "args=": 'max_D=16, supports=lambda p, arch: None if p.plain else "no options", args=',  # few compiles
        },
    )
    done = in_project(project_copy, "sandbox", "list", "--json")
    assert {row["name"] for row in json.loads(done.stdout)} == {*registry.kernels(), "fwd_x"}

    done = in_project(project_copy, "sandbox", "compile", "fwd_x", "-D", "16", "--json")
    assert {(row["kernel"], row["ok"]) for row in json.loads(done.stdout)} == {("fwd_x", True)}

    done = in_project(project_copy, "sandbox", "run", "fwd_x", "--shape", "1,2,70,16", "--json")
    (row,) = json.loads(done.stdout)
    assert (row["kernel"], row["ok"], done.returncode) == ("fwd_x", True, 0)

    done = in_project(project_copy, "sandbox", "check", "fwd_x", "--json")
    rows = json.loads(done.stdout)
    assert {row["kernel"] for row in rows} == {"fwd_x"}
    assert [row for row in rows if not row["ok"]] == []
    assert len(rows) > 30

    done = in_project(
        project_copy,
        "pytest",
        "tests/engine/test_kernels.py",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "fwd_x",
    )
    assert "test_sweep[cpu-float16-fwd_x]" in done.stdout.replace("fwd_x-float16-cpu", "cpu-float16-fwd_x"), done.stdout
    assert "test_every_tile_compiles_without_spills[fwd_x-sm_90a]" in done.stdout


# ---- specs that are wrong


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty kernels folder in place of the real one."""
    monkeypatch.setattr(kernels_cu, "__path__", [str(tmp_path)])
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    registry.forget()
    yield tmp_path
    monkeypatch.undo()
    registry.forget()


SPEC = (ROOT / "kernels_cu/fwd_minimal.py").read_text()
HEAD, _, FIELDS = SPEC.partition("kernel = ")


def put(folder: Path, name: str, spec: str, source: bool = True) -> None:
    (folder / f"{name}.py").write_text(spec)
    if source:
        (folder / f"{name}.cu").write_text("")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", r"kernels_cu/fwd_x\.py must define `kernel`, a Kernel, or `kernels`, a tuple of Kernels, not None"),
        ("kernel = 3", r"kernels_cu/fwd_x\.py must define `kernel`.*, not 3"),
        ("kernels = (1, 2)", r"kernels_cu/fwd_x\.py must define `kernel`.*, not 1"),
        ("x = 1\nkernel = Kernel(", r"kernels_cu/fwd_x\.py, line 2: SyntaxError: "),
        ("import sandbox.nowhere", r"kernels_cu/fwd_x\.py, line 1: ModuleNotFoundError: .*sandbox\.nowhere"),
        ("import sys\nsys.exit(3)", r"kernels_cu/fwd_x\.py, line 2: SystemExit: 3: exit would end the program"),
        ("\nexit()", r"kernels_cu/fwd_x\.py, line 2: SystemExit: .*: raise an exception instead"),
        ("\n\nkernel = undefined", r"kernels_cu/fwd_x\.py, line 3: NameError: .*undefined"),
        (SPEC.replace("rung=1,", ""), r"kernels_cu/fwd_x\.py, line 5: TypeError: .*'rung'"),
        (SPEC.replace("BLOCK_N=16", "BLOCK_N=0"), r"kernels_cu/fwd_x\.py: tile: BLOCK_N=0 must be an integer >= 1"),
        (SPEC.replace('"forward"', '"both"'), r"kernels_cu/fwd_x\.py: fwd_minimal: computes='both' must be"),
    ],
)
def test_a_wrong_spec_is_named(folder: Path, spec: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    """In one line, by each function that reads the specs; the other kernels remain usable."""
    put(folder, "fwd_x", spec)
    put(folder, "fwd_minimal", SPEC)
    assert list(registry.kernels()) == ["fwd_minimal"]
    assert registry.get("fwd_minimal")
    (record,) = caplog.records
    said = record.getMessage()
    assert "\n" not in said
    assert re.search(message, said)
    for _ in range(2):
        with pytest.raises(SpecError, match=message):
            registry.get("fwd_x")
    with pytest.raises(UnknownKernel, match=rf"the kernels are fwd_minimal; skipped: {message}"):
        registry.get("of another name in that file")


def test_a_spec_that_exits_leaves_standard_input_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`exit` of the module `site` closes it, which ends an interactive session."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("more"))
    put(folder, "fwd_x", "exit()")
    before = builtins.exit
    assert registry.kernels() == {}
    assert sys.stdin.read() == "more"
    assert builtins.exit is before


def test_a_spec_without_its_source(folder: Path) -> None:
    put(folder, "fwd_x", SPEC, source=False)
    assert registry.kernels() == {}
    with pytest.raises(SpecError, match=r"kernels_cu/fwd_x\.py has no fwd_x\.cu beside it"):
        registry.get("fwd_x")


def test_one_name_in_two_specs(folder: Path) -> None:
    """The file that bears the name has it."""
    put(folder, "a_copy", SPEC)
    put(folder, "fwd_minimal", SPEC)
    assert registry.get("fwd_minimal").source == folder / "fwd_minimal.cu"
    both = rf"{folder}/fwd_minimal\.cu and {folder}/a_copy\.cu"
    with pytest.raises(SpecError, match=rf"kernel fwd_minimal is defined twice, in {both}"):
        registry.get("a_copy")


def test_a_broken_spec_stops_no_command(project_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project_copy / "kernels_cu/broken.py").write_text("kernel = Kernel(\n")
    done = in_project(project_copy, "sandbox", "list", "--json")
    assert {row["name"] for row in json.loads(done.stdout)} == set(registry.kernels())
    (line,) = done.stderr.splitlines()
    assert line.startswith("sandbox: a spec is skipped: kernels_cu/broken.py, line 1: SyntaxError: ")
    with monkeypatch.context() as patch:
        patch.setenv("SANDBOX_DEBUG", "1")  # another handler prints the same line
        assert in_project(project_copy, "sandbox", "list", "--json").stderr.splitlines() == [line]
    done = in_project(project_copy, "sandbox", "run", "broken")
    assert done.returncode == 2
    assert "kernels_cu/broken.py, line 1: SyntaxError" in done.stderr


def test_specs_are_dropped_while_no_thread_imports_them(folder: Path) -> None:
    """A module that another thread is importing stays in sys.modules."""
    wait = "import threading, time\nthreading.main_thread().reading.set()\ntime.sleep(0.5)\n"
    put(folder, "fwd_minimal", wait + SPEC)
    reading, found = threading.Event(), []
    threading.main_thread().reading = reading
    thread = threading.Thread(target=lambda: found.append(registry.kernels()))
    thread.start()
    assert reading.wait(60)
    registry.forget()
    thread.join()
    assert list(found[0]) == ["fwd_minimal"]


def test_two_entries_in_one_source(folder: Path) -> None:
    first = FIELDS.strip().rstrip(")")
    second = first.replace("fwd_minimal", "fwd_other").replace("rung=1", "rung=2")
    put(folder, "two", f"{HEAD}kernels = (\n{first}),\n{second}),\n)\n")
    found = registry.kernels()
    assert list(found) == ["fwd_minimal", "fwd_other"]
    assert {kernel.source for kernel in found.values()} == {folder / "two.cu"}


def test_specs_are_read_anew_after_forget(folder: Path) -> None:
    put(folder, "one", SPEC)
    assert registry.get("fwd_minimal").rung == 1
    put(folder, "one", SPEC.replace("rung=1", "rung=7 "))
    assert registry.get("fwd_minimal").rung == 1
    registry.forget()
    assert registry.get("fwd_minimal").rung == 7


def test_specs_are_imported_again_only_after_a_change(folder: Path) -> None:
    """All of them, because one may import from another; also after a change of the time alone, because Python may have
    imported an old .pyc."""
    put(folder, "one", SPEC)
    put(folder, "two", SPEC.replace("fwd_minimal", "fwd_other"))

    def modules() -> list[object]:
        assert list(registry.kernels()) == ["fwd_minimal", "fwd_other"]
        return [sys.modules[f"kernels_cu.{spec}"] for spec in ("one", "two")]

    first = modules()
    registry.forget()
    assert [a is b for a, b in zip(first, modules(), strict=True)] == [True, True]
    os.utime(folder / "two.py", ns=(0, 0))
    registry.forget()
    assert [a is b for a, b in zip(first, modules(), strict=True)] == [False, False]
    (folder / "two.py").unlink()
    registry.forget()
    assert list(registry.kernels()) == ["fwd_minimal"]
