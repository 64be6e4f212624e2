"""`make mutants`: the written mutations fit their files, and the operators, the selection of tests and the score."""

from __future__ import annotations

import argparse
import ast
import random
import re
import shlex
import sys
import time
from pathlib import Path

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import cuda_mutations
import mutants
import mutation
import mutation_score
import mutation_tests

from sandbox.core import jsonl

KERNEL = """\
// a comment with a < b and 1 + 1;
#define STAGES 2
static_assert(BLOCK_M % 16 == 0, "a multiple of 16");
__global__ void f(float* x, int n) {
    int stage = 0;
    for (int i = 0; i < n; ++i) {
        mbarrier_wait(full + 8 * stage, phase);
        x[i * stride_s] += 1.0f;
        if (i > 3 && !done) __syncthreads();
        wgmma_wait<1>();
        fence_proxy_async();
        stage = next(stage);
    }
}
"""


def test_written_mutations_fit_their_files() -> None:
    """Each text occurs exactly once in its file; `written` raises ValueError otherwise."""
    found = mutation.written()
    assert len(set(found)) == len(found)
    assert all(each.tests and each.change.before != each.change.after for each in found)


@pytest.mark.parametrize("selection", sorted({tests for each in mutation.written() for tests in each.tests}))
def test_tests_of_written_mutations_exist(selection: str) -> None:
    """The file, and the test functions that are named by whole words of it."""
    path, *rest = shlex.split(selection)
    file, _, node = path.partition("::")
    content = (ROOT / file).read_text()
    named = re.findall(r"test_\w+", f"{node} {' '.join(rest)}")
    assert all(f"def {name}" in content for name in named), selection


def test_operators_of_cuda_text() -> None:
    found = {(change.operator, change.before, change.after) for change in cuda_mutations.changes(KERNEL)}
    assert found >= {
        ("drop barrier", "__syncthreads();", ";"),
        ("drop wait", "mbarrier_wait(full + 8 * stage, phase);", ";"),
        ("drop fence", "fence_proxy_async();", ";"),
        ("drop assignment", "x[i * stride_s] += 1.0f;", ";"),
        ("wait for fewer", "1", "2"),
        ("wrong stage", "stage", "(stage + 1)"),
        ("wrong phase", "phase", "(phase ^ 1)"),
        ("wrong stride", "stride_s", "stride_h"),
        ("off by one", "8", "9"),
        ("off by one", "8", "(8 - 1)"),
        ("comparison", "<", "<="),
        ("arithmetic", "*", "+"),
        ("logic", "&&", "||"),
        ("drop not", "!", ""),
    }
    begin = KERNEL.index("__global__")  # neither comments nor the preprocessor's lines nor assertions
    assert all(change.begin > begin for change in cuda_mutations.changes(KERNEL))
    assert {name for names in cuda_mutations.FAMILIES.values() for name in names} == {*cuda_mutations.OPERATORS}


def test_a_change_fits_its_text() -> None:
    for change in cuda_mutations.changes(KERNEL):
        mutated = change.applied(KERNEL)
        assert mutated != KERNEL
        assert len(mutated) - len(KERNEL) == len(change.after) - len(change.before)
    with pytest.raises(ValueError, match="the text at 0 is"):
        mutation.Change("comparison", 0, "<", "<=").applied(KERNEL)


def test_operators_of_python() -> None:
    pytest.importorskip("cosmic_ray")
    import host_mutations

    text = "def f(x: int | None, n=1) -> int | None:\n    return x + n if x is not None else n\n"
    for seed in range(20):
        change = host_mutations.draw(text, random.Random(seed))
        assert change is not None
        ast.parse(change.applied(text))
        assert "|" not in change.before  # an annotation is not evaluated
        assert change == host_mutations.draw(text, random.Random(seed))


def test_a_dotted_name_in_a_tuple_of_exceptions_is_not_mutated() -> None:
    """cosmic-ray raises AttributeError for it: another place of the text is drawn."""
    pytest.importorskip("cosmic_ray")
    import host_mutations

    text = "try:\n    pass\nexcept (a.b, c):\n    pass\n"
    changes = [host_mutations.draw(text, random.Random(seed)) for seed in range(20)]
    assert {change and change.before for change in changes} == {"c"}


def selection() -> mutation_tests.Selection:
    tests = (
        "tests/engine/test_cases.py::test_x[fwd_mma-large]",
        "tests/engine/test_cases.py::test_x[fwd_mma_fp8-large]",
        "tests/engine/test_cases.py::test_y",
        "tests/core/test_spec.py::test_z",
        "tests/core/test_spec.py::test_slow",
        "tests/verify/test_option_cases.py::test_a",
    )
    seconds = dict(zip(tests, (2.0, 1.0, 1.0, 1.0, 50.0, 0.1), strict=True))
    executed = {"sandbox/core/spec.py": {7: {tests[3], tests[4], tests[5]}, 8: {tests[5]}}}
    return mutation_tests.Selection(tests, seconds, {"fwd_mma": {tests[5]}}, executed)


def at(file: str, line: int) -> mutation.Mutation:
    return mutation.Mutation(file, mutation.Change("comparison", 0, "<", "<="), (line,), "")


def test_tests_of_a_python_file() -> None:
    """Those that executed the line, cheapest first and its folder's first, within a limit."""
    chosen = selection()
    z, slow, a = chosen.tests[3:]
    assert chosen.of(at("sandbox/core/spec.py", 7), 100) == ([z, slow, a], 3)
    assert chosen.of(at("sandbox/core/spec.py", 7), 10) == ([z], 3)
    assert chosen.of(at("sandbox/core/spec.py", 8), 100) == ([a, z, slow], 3)  # then the folder's other tests
    assert chosen.of(at("sandbox/core/spec.py", 1), 100)[1] == 3  # executed by the import
    assert chosen.of(at("sandbox/core/other.py", 7), 100) == ([z, slow], 2)  # no record: those of the folder
    tests = ("tests/core/test_a.py::test_x", "tests/core/test_other_kind.py::test_y")
    named = mutation_tests.Selection(tests).of(at("sandbox/core/other_name.py", 7), 100)
    assert named == ([tests[1], tests[0]], 2)  # first those in files with the module's name


def test_tests_of_a_kernel() -> None:
    chosen = selection()
    assert chosen.of(at("kernels_cu/fwd_mma.cu", 1), 100) == ([chosen.tests[5], chosen.tests[0], chosen.tests[2]], 3)
    assert "fwd_wgmma" in mutation_tests.kernels_of("kernels_cu/include/mask.cuh")
    for file in ("kernels_cu/fwd_minimal.cu", "kernels_cu/fwd_minimal.py"):
        assert mutation_tests.kernels_of(file) == ["fwd_minimal"]


def test_folders_that_import_a_module() -> None:
    assert {"timeline", "bench"} <= {*mutation_tests.importers_of("sandbox/core/picture.py")}
    assert "core" not in mutation_tests.importers_of("sandbox/core/picture.py")


def test_every_file_has_tests() -> None:
    """Also without the records of `make coverage`, and in folders that no other one imports. Not headers, which have
    the tests of the kernels that include them."""
    folders = [path.name for path in (mutation.ROOT / "tests").iterdir() if path.is_dir()]
    chosen = mutation_tests.Selection(tuple(f"tests/{folder}/test_x.py::test_y" for folder in folders))
    names = [name for name in mutants.project_files() if mutants.group_of(name) and not name.endswith(".cuh")]
    files = [name for name in names if (ROOT / name).read_text()]
    assert {"sandbox/__init__.py", "kernels_cu/fwd_mma.py"} <= {*files}
    assert [file for file in files if not chosen.of(at(file, 1), 100)[1]] == []


def test_names_in_the_junit_file(tmp_path: Path) -> None:
    tests = ("tests/a/test_b.py::TestC::test_d[x::y.py-1]", "tests/a/test_b.py::test_e")
    launches = '<properties><property name="launches" value="one two"/></properties>'
    case = 'classname="tests.a.test_b.TestC" name="test_d[x::y.py-1]" time="2.5"'
    cases = f"<testcase {case}>{launches}</testcase>"
    (tmp_path / "tests.xml").write_text(f"<testsuites>{cases}</testsuites>")
    found = mutation_tests.recorded_tests(tmp_path / "tests.xml", tests)
    assert found == ({tests[0]: 2.5}, {"one": {tests[0]}, "two": {tests[0]}})


def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another project, without records of `make coverage`."""
    for module in (mutants, mutation_tests):
        monkeypatch.setattr(module, "ROOT", folder)
    for name in ("DATA", "TIMES"):
        monkeypatch.setattr(mutation_tests, name, folder / "none")


def test_a_survivor_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the mutations of a small project one is noticed, one is not, and one has only a test that always fails."""
    files = {
        "sandbox/__init__.py": "",  # without it a `sandbox` on PYTHONPATH would come before this one
        "sandbox/core/two.py": "TWO = 1 + 1\n",
        "sandbox/core/__init__.py": "",
        "sandbox/jobs/__init__.py": "THREE = 1 + 2\n",
        "tests/core/test_two.py": "from sandbox.core.two import TWO\n\ndef test_two():\n    assert TWO == 2\n",
        "tests/jobs/test_three.py": "def test_three():\n    assert False\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    in_folder(tmp_path, monkeypatch)
    options = argparse.Namespace(tier="test", seconds=10.0, jobs=2, seed=0, written=False)
    examiner = mutants.Examiner(tmp_path / "copies", list(files), options)
    change = mutation.Change("arithmetic", 6, "1 + 1", "1 + 2")
    wanted = [
        mutation.of("sandbox/core/two.py", files["sandbox/core/two.py"], each)
        for each in (change, mutation.Change("arithmetic", 6, "1 + 1", "3 - 1"))
    ]
    wanted.append(
        mutation.of("sandbox/jobs/__init__.py", "THREE = 1 + 2\n", mutation.Change("arithmetic", 8, "1", "2"))
    )
    rows = {row["after"]: row for row in mutants.results(examiner, "host", wanted, list(files), options)}
    assert {after: row["outcome"] for after, row in rows.items()} == {
        "1 + 2": "noticed",
        "3 - 1": "survived",
        "2": "survived",
    }
    assert rows["1 + 2"]["test"] == "tests/core/test_two.py::test_two"
    assert mutants.does_not_compile("CompileError: x.cu:3: error: 'y' was not declared")
    assert not mutants.does_not_compile("CompileError: x.cu:3: error: static assertion failed")


def test_the_score_counts_by_folder() -> None:
    row = {
        "group": "host", "seed": 1, "file": "sandbox/core/two.py", "begin": 6, "operator": "arithmetic", "before": "+",
        "after": "-", "context": "1 + 1", "tier": "test", "outcome": "survived",
    }  # fmt: skip
    noticed = [{**row, "tier": "all", "outcome": "noticed"}, {**row, "begin": 9, "outcome": "noticed"}]
    rows = [row, *noticed, {**row, "begin": 1, "equivalent": "both are 2"}]
    assert "| sandbox/core | 2 | 1 | 2 | 1 |" in mutation_score.text(rows).splitlines()
    assert "both are 2" in mutation_score.text(rows)


def test_parameters_that_a_mutation_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tests are left out: that they do not exist is no detection. A module that cannot be imported is one."""
    files = {
        "sandbox/__init__.py": "",
        "sandbox/core/__init__.py": "NAMES = 'a', 'b'\n",
        "tests/core/test_names.py": (
            "import pytest\nfrom sandbox.core import NAMES\n\n"
            "@pytest.mark.parametrize('name', NAMES)\ndef test_name(name):\n    assert name\n\n"
            "def test_other():\n    assert NAMES\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    in_folder(tmp_path, monkeypatch)
    options = argparse.Namespace(tier="test", seconds=10.0, jobs=1, seed=0, written=False)
    examiner = mutants.Examiner(tmp_path / "copies", list(files), options)
    changes = (mutation.Change("names", 8, "'a'", "'c'"), mutation.Change("names", 0, "NAMES", "OTHER"))
    parameter, module = (mutation.of("sandbox/core/__init__.py", "NAMES = 'a', 'b'\n", each) for each in changes)
    row = examiner.row(parameter)
    assert (row["outcome"], row["tests"]) == ("survived", "3 of 3")
    row = examiner.row(module)
    assert (row["outcome"], row["test"]) == ("noticed", "tests/core/test_names.py cannot be imported")


def test_a_mutation_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is noticed after a time that follows from the recorded ones, and leaves no process."""
    source = "def count(n):\n    while n > 0:\n        n -= 1\n"
    counting = "import os, sandbox.core; open('pid', 'w').write(str(os.getpid())); sandbox.core.count(3)"
    files = {
        "pyproject.toml": '[tool.pytest.ini_options]\ntimeout_method = "thread"\n',
        "sandbox/__init__.py": "",
        "sandbox/core/__init__.py": source,
        "tests/core/test_count.py": (
            "import subprocess\nimport sys\n\n"
            f"def test_count():\n    subprocess.run([sys.executable, '-c', {counting!r}], check=True)\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    in_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(mutation_tests, "LEAST_TIMEOUT", 5.0)
    options = argparse.Namespace(tier="test", seconds=10.0, jobs=1, seed=0, written=False)
    examiner = mutants.Examiner(tmp_path / "copies", list(files), options)
    examiner._selection.seconds["tests/core/test_count.py::test_count"] = 0.1
    change = mutation.Change("arithmetic", source.index("-="), "-=", "+=")
    row = examiner.row(mutation.of("sandbox/core/__init__.py", source, change))
    assert (row["outcome"], row["test"]) == ("noticed", "a test did not end")
    assert row["seconds"] < 60
    command = Path("/proc") / (tmp_path / "copies/0/project/pid").read_text() / "cmdline"
    deadline = time.monotonic() + 20
    while command.exists() and command.read_bytes():  # empty: it ended, and its parent did not ask
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_timeouts_of_mutations() -> None:
    selection = mutation_tests.Selection((), {"a": 1.0, "b": 30.0})
    assert selection.timeout(["a"]) == 120
    assert selection.timeout(["a", "b"]) == 600
    assert selection.timeout(["a", "c"]) is None


def test_the_table_is_generated() -> None:
    assert mutation_score.TABLE.read_text() == mutation_score.text(jsonl.read(mutation_score.ROWS))
