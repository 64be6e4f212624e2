"""The mutations of `make mutants` fit the files that they are about."""

from __future__ import annotations

import re
import shlex
import sys

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import mutants
from mutants import Mutation

MUTATIONS = mutants.load()


@pytest.mark.parametrize("file", sorted({mutation.file for mutation in MUTATIONS}))
def test_every_text_is_there_once(file: str) -> None:
    """Whoever edits a file may find a text of it here: then the mutation follows, or is given up."""
    content = (ROOT / file).read_text()
    wrong = [m.text for m in MUTATIONS if m.file == file and (content.count(m.text) != 1 or m.text == m.becomes)]
    assert not wrong, f"not once in {file}: {wrong}"


def test_no_mutation_is_there_twice() -> None:
    assert len(set(MUTATIONS)) == len(MUTATIONS)


@pytest.mark.parametrize("selection", sorted({tests for mutation in MUTATIONS for tests in mutation.tests}))
def test_what_should_notice_exists(selection: str) -> None:
    """The file, and the test functions that are named by whole words of it."""
    path, *rest = shlex.split(selection)
    file, _, node = path.partition("::")
    content = (ROOT / file).read_text()
    named = re.findall(r"test_\w+", f"{node} {' '.join(rest)}")
    assert all(f"def {name}" in content for name in named), selection


def test_each_has_tests_or_a_reason() -> None:
    assert all(bool(m.tests) != bool(m.equivalent) for m in MUTATIONS)


def test_a_survivor_is_one(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three mutations of a small project one is noticed, one is not, and one is said to be void."""
    files = {
        "sandbox/__init__.py": "",  # without it a `sandbox` on PYTHONPATH would come before this one
        "sandbox/two.py": "TWO = 1 + 1\n",
        "tests/test_two.py": "from sandbox.two import TWO\n\ndef test_two():\n    assert TWO == 2\n",
        "tests/test_three.py": "def test_three():\n    assert False\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    names, here = list(files), "tests/test_two.py"
    mutations = [
        Mutation("sandbox/two.py", "1 + 1", "1 + 2", (here,)),
        Mutation("sandbox/two.py", "1 + 1", "3 - 1", (here,)),
        Mutation("sandbox/two.py", "1 + 1", "raise", (here,)),
        Mutation("sandbox/two.py", "1 + 1", "1 + 3", ("tests/test_three.py",)),
    ]
    results = mutants.Results(tmp_path / "rows.jsonl", mutants.digest(names))
    outcomes = dict(mutants.run(mutations, results, 2, names))
    assert [outcomes[mutation] for mutation in mutations] == ["killed", "survived", "killed", "void"]
    again = mutants.Results(tmp_path / "rows.jsonl", mutants.digest(names))
    kept = dict(mutants.run(mutations[:3], again, 1, []))  # nothing is run again: there is nothing to run
    assert [kept[mutation] for mutation in mutations[:3]] == ["killed", "survived", "killed"]
    (tmp_path / "sandbox" / "two.py").write_text("TWO = 2\n")
    assert mutants.digest(names) != results._tree
