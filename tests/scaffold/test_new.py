"""New kernels and experiments, SANDBOX_DEBUG, shell completion, and --json of every command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete
from project import ROOT, in_project

from sandbox.cli import cli
from sandbox.core import registry
from sandbox.core.errors import SpecError, UnknownKernel
from sandbox.scaffold import new

# ---- new


def test_a_new_kernel_works_unchanged(project_copy: Path) -> None:
    done = in_project(project_copy, "sandbox", "new", "kernel", "fwd_mine", "--from", "fwd_minimal", "--json")
    files = [Path(name) for name in json.loads(done.stdout)["files"]]
    assert files == [project_copy / "kernels_cu/fwd_mine.cu", project_copy / "kernels_cu/fwd_mine.py"]
    assert "fwd_minimal" not in "".join(file.read_text() for file in files)
    done = in_project(project_copy, "sandbox", "run", "fwd_mine", "--shape", "1,1,70,16", "--backend", "cpu", "--json")
    (row,) = json.loads(done.stdout)
    assert (row["kernel"], row["ok"]) == ("fwd_mine", True)

    assert "default" not in files[1].read_text()
    before = files[0].read_text()
    again = in_project(project_copy, "sandbox", "new", "kernel", "fwd_mine")
    assert (again.returncode, again.stdout) == (2, "")
    assert f"{files[0]} and {files[1]} already exist: choose another name" in again.stderr
    assert files[0].read_text() == before


@pytest.mark.parametrize("template", new.TEMPLATE_NAMES)
@pytest.mark.sampled(3)
def test_a_template_works_unchanged_in_another_folder(template: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), registry.VARIABLE: str(tmp_path)}
    how = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120}
    command = (sys.executable, "-m", "sandbox")
    made = subprocess.run((*command, "new", "kernel", "mine", "--like", template), check=True, **how)
    assert made.stdout.split() == [str(tmp_path / "mine.cu"), str(tmp_path / "mine.py")]
    texts = [(tmp_path / f"mine{suffix}").read_text() for suffix in (".cu", ".py")]
    assert "$" not in "".join(texts)
    assert len(texts[0].splitlines()) <= 90
    assert f" {template}(" not in texts[0]
    done = subprocess.run((*command, "run", "mine", "--shape", "9,16,24"[: 8 if template == "matmul" else 4],
                           "--backend", "cpu", "--json"), check=True, **how)  # fmt: skip
    (row,) = json.loads(done.stdout)
    assert (row["kernel"], row["ok"]) == ("mine", True)


@pytest.mark.parametrize("source", ["bwd_mma", "fwd_mma"])
def test_a_copy_includes_the_headers_of_its_source(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose names begin with the kernel's name."""
    monkeypatch.setenv(registry.VARIABLE, str(tmp_path))
    texts = [registry.get(source).source.read_text(), new.kernel("mine", source)[0].read_text()]
    own, copied = (re.findall(r'^#include "(.+)"', text, re.MULTILINE) for text in texts)
    assert f"{source}_tiles.cuh" in own
    assert copied == own


def test_a_new_kernel_is_chosen_by_name_only(project_copy: Path) -> None:
    """`attention` and `list --shape` do not choose it until its spec has `default=True`."""
    listing = ("sandbox", "list", "--problem", "1,1,70,16", "--arch", "cpu", "--json")
    before = json.loads(in_project(project_copy, *listing).stdout)
    (chosen,) = [row["kernel"] for row in before if row["computes"] == "forward" and not row["reason"]][:1]
    in_project(project_copy, "sandbox", "new", "kernel", "mine", "--from", chosen)
    spec = project_copy / "kernels_cu/mine.py"
    spec.write_text(re.sub(r"rung=\d+", "rung=99", spec.read_text()))
    script = """
import numpy as np, sandbox
from sandbox.engine import choose
x = np.ones((1, 1, 70, 16), np.float16)
print(choose.choose_kernel(sandbox.Problem(1, 1, 70, 70, 16, dtype="float16"), "forward", None).name)
sandbox.attention(x, x, x, kernel="mine")
"""
    command = (sys.executable, "-c", script)

    def chosen_kernel() -> str:
        done = subprocess.run(command, cwd=project_copy, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.strip()

    assert chosen_kernel() == chosen
    (row,) = [row for row in json.loads(in_project(project_copy, *listing).stdout) if row["kernel"] == "mine"]
    assert row["tile"]
    assert row["reason"].startswith("mine: selected by name only")
    assert "by name" in in_project(project_copy, *listing[:-1]).stdout
    spec.write_text(spec.read_text().replace("rung=99,", "rung=99,\n    default=True,"))
    assert chosen_kernel() == "mine" + chosen.removeprefix("fwd_wgmma")


@pytest.mark.parametrize("name", ["Fwd", "1st", "a-b", "", "../x", "fwd.x"])
def test_invalid_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="must be lower-case letters, digits and _"):
        new.kernel(name)
    with pytest.raises(SpecError, match="must be lower-case letters, digits and _"):
        new.experiment(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["class", "float", "export", "bitand"])
def test_names_that_are_keywords(name: str) -> None:
    with pytest.raises(SpecError, match=f"name '{name}' is a keyword of"):
        new.kernel(name)


def test_a_name_of_an_existing_kernel() -> None:
    with pytest.raises(SpecError, match=r"fwd_mma\.cu and .*fwd_mma\.py already exist"):
        new.kernel("fwd_mma")
    assert registry.get("fwd_mma").source.read_text()


def test_new_experiments_are_numbered(tmp_path: Path) -> None:
    root = tmp_path / "experiments"
    (first,) = {file.parent for file in new.experiment("swizzle", root)}
    assert first == root / "001_swizzle"
    (root / "041_other").mkdir()
    files = new.experiment("tails", root)
    assert [file.relative_to(root).as_posix() for file in files] == ["042_tails/README.md", "042_tails/run.py"]
    assert files[0].read_text().startswith("# 042: ")
    assert "python experiments/042_tails/run.py" in files[1].read_text()
    compile(files[1].read_text(), str(files[1]), "exec")
    with pytest.raises(SpecError, match=r"001_swizzle already exists: choose another name"):
        new.experiment("swizzle", root)


def test_an_experiment_without_a_gpu_reports_the_reason(project_copy: Path, tmp_path: Path) -> None:
    """The folder is created in the kernels' repository, from any working directory."""
    environment = {**os.environ, "PYTHONPATH": str(project_copy), "CUDA_VISIBLE_DEVICES": ""}
    how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 120}
    made = subprocess.run((sys.executable, "-m", "sandbox", "new", "experiment", "idea"), check=True, **how)
    script = project_copy / "experiments/001_idea/run.py"
    assert str(script) in made.stdout.splitlines()
    done = subprocess.run((sys.executable, str(script)), check=False, **how)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert not script.with_name("results.jsonl").exists()


# ---- SANDBOX_DEBUG


def debug_lines(level: str, project: Path, folder: Path) -> list[str]:
    command = (sys.executable, "-m", "sandbox", "run", "fwd_minimal", "--shape", "1,1,40,16", "--backend", "cpu")
    environment = {**os.environ, "SANDBOX_DEBUG": level, "PYTHONPATH": str(project)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stderr.splitlines()


def test_debug_levels(project_copy: Path, tmp_path: Path) -> None:
    """Files are kept in the kernels' repository, from any working directory."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    assert debug_lines("0", project_copy, folder) == []
    lines = {level: debug_lines(level, project_copy, folder) for level in "124"}
    tile = "sandbox: fwd_minimal on B1 H1 S40 D16 float16: tile BLOCK_M=64,BLOCK_N=32, the first of the spec's tiles"
    compiled = "sandbox: fwd_minimal.so: "
    launch = "sandbox: fwd_minimal: grid (1, 1, 1), block (64, 1, 1), 12288 bytes of shared memory"
    score = "sandbox:   score of fwd_minimal = Sq 40, Sk 40, diagonal 0, scale 0.25"
    expected = {"1": (1, 0, 0, 0), "2": (1, 1, 0, 0), "4": (1, 1, 1, 1)}
    for level, shown in lines.items():
        counts = tuple(sum(line.startswith(what) for line in shown) for what in (tile, compiled, launch, score))
        assert counts == expected[level]
    kept = {path.suffix: path for path in (project_copy / ".sandbox/kept").iterdir()}
    assert set(kept) == {".cu", ".ptx", ".cubin"}
    assert list(folder.iterdir()) == []
    assert kept[".cu"].read_text() == registry.get("fwd_minimal").source.read_text()
    assert len(debug_lines("9", project_copy, folder)) == len(lines["4"])


def test_an_unknown_source_lists_the_templates() -> None:
    with pytest.raises(UnknownKernel, match=r"kernel 'zzz' is not known: .*; the templates are .*row_softmax"):
        new.kernel("mine", "zzz")


# ---- every command


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


@pytest.mark.parametrize(("path", "command"), [*commands(cli)], ids=[" ".join(path) for path, _ in commands(cli)])
def test_every_command_has_json_and_help(path: tuple[str, ...], command: click.Command) -> None:
    assert "--json" in {option for parameter in command.params for option in parameter.opts}
    assert command.help


@pytest.mark.parametrize(
    ("words", "completed"),
    [("sandbox ru", {"run"}), ("sandbox sass fwd_mi", {"fwd_minimal"}), ("sandbox run fwd_mma fwd_b", {"fwd_block2d"}),
     ("sandbox new kernel mine --from fwd_mm", {"fwd_mma", "fwd_mma_fp8"}),
     ("sandbox sass fwd_mma --dtype b", {"bfloat16"}),
     ("sandbox watch fwd_mi", {"fwd_minimal"}), ("sandbox sass bwd_minimal_", {"bwd_minimal_dq"}),
     ("sandbox profile bwd_mma_", {"bwd_mma_postprocess"})],
)  # fmt: skip
def test_completion(words: str, completed: set[str]) -> None:
    *before, incomplete = words.split()[1:]
    found = BashComplete(cli, {}, "sandbox", "_SANDBOX_COMPLETE").get_completions(before, incomplete)
    assert {item.value for item in found} == completed


def test_completion_in_a_shell() -> None:
    environment = {**os.environ, "_SANDBOX_COMPLETE": "bash_complete", "COMP_WORDS": "sandbox ru", "COMP_CWORD": "1"}
    done = subprocess.run(
        (sys.executable, "-m", "sandbox"),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "plain,run\n"
