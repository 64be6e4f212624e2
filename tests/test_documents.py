"""The documentation: links resolve, commands exist, and generated tables match their stored rows."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import click
import numpy as np
import pytest
from project import ROOT, run_script
from test_imports import ORDER

from sandbox.cli import cli
from sandbox.spec import Problem
from sandbox.verify.check import Result
from sandbox.verify.report import results_table

MOST_LINES = 150  # of the README
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/**/README.md")])
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}


def anchors(text: str) -> set[str]:
    """The anchors of a page: its headings, converted as GitHub does."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_length_of_the_readme() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", TEXTS)
def test_links_resolve(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), f"{name} links to {target}"
        assert not anchor or anchor in anchors(file.read_text()), f"{name} links to {target}"


def test_every_page_is_linked_from_the_readme() -> None:
    """Directly or through other pages."""
    seen, left = set(), {ROOT / "README.md"}
    while left:
        page = left.pop()
        seen.add(page)
        found = {
            (page.parent / target.partition("#")[0]) for target in re.findall(r"\]\(([^)\s:]+)\)", page.read_text())
        }
        files = {(path / "README.md" if path.is_dir() else path).resolve() for path in found}
        left |= {file for file in files if file.suffix == ".md" and file.exists()} - seen
    assert {page.resolve() for page in PAGES} <= seen


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(command, its options) of every `python -m sandbox …` in a page; "sass|ptx" counts as both."""
    found = []
    for line in re.findall(r"python -m sandbox ([a-z][^\n`#]*)", text):
        names, _, rest = line.partition("   ")[0].replace("[", " ").replace("]", " ").partition(" ")
        options = re.findall(r"(?<!\S)--?[a-zA-Z][\w-]*", rest)
        found += [(name, options) for name in names.split("|")]
    return found


@pytest.mark.parametrize("name", [name for name in TEXTS if commands(TEXTS[name])])
def test_commands_exist(name: str) -> None:
    for command, options in commands(TEXTS[name]):
        assert command in cli.commands, f"{name}: {command}"
        group = getattr(cli.commands[command], "commands", {})  # such as `new kernel` and `new experiment`
        params = [p for each in (cli.commands[command], *group.values()) for p in each.params]
        known = {option for p in params if not getattr(p, "hidden", False) for option in p.opts}
        assert {*options} <= known, f"{name}: {command} {options}"


def test_the_readme_names_every_command() -> None:
    assert {command for command, _ in commands(TEXTS["README.md"])} >= {*cli.commands}


def test_every_command_takes_json() -> None:
    groups = [(f"{name} {sub}", of) for name, group in cli.commands.items() for sub, of in subcommands(group).items()]
    for name, command in [*cli.commands.items(), *groups]:
        assert subcommands(command) or any("--json" in p.opts for p in command.params), name


def subcommands(command: click.Command) -> dict[str, click.Command]:
    return command.commands if isinstance(command, click.Group) else {}


def test_exit_statuses_are_the_same_on_every_page() -> None:
    found = [status for text in TEXTS.values() for status in re.findall(r"Exit status: ([^.]*)\.", text)]
    assert len(found) == 2
    assert len({" ".join(words.split()) for words in found}) == 1


def test_the_samples_of_run_have_its_columns() -> None:
    """The sample of a GPU and that of a laptop."""
    result = Result("k", "c", Problem(1, 1, 1, 1, 8), "cpu", ok=True)
    columns = [str(column.header) for column in results_table([result], 200).columns]
    shown = re.findall(r"^kernel +case.*$", TEXTS["README.md"], re.MULTILINE)
    assert [line.split() for line in shown] == [" ".join(columns).split()] * 2


def test_stated_length_of_a_file() -> None:
    (name, lines) = re.findall(r"\[`(\w+\.cu)`\]\(\S+\) is (\d+) lines", TEXTS["README.md"])[0]
    assert len((ROOT / "kernels_cu" / name).read_text().splitlines()) == int(lines)


def test_every_command_with_a_problem_takes_shape() -> None:
    for name, command in cli.commands.items():
        names = {option for p in command.params if not getattr(p, "hidden", False) for option in p.opts}
        assert ("--shape" in names) == ("--causal" in names) == ("--dtype" in names), name


def test_the_table_of_folders() -> None:
    """One row per folder, in import order."""
    listed = re.findall(r"^\| `(\w+)/` \|", TEXTS["CONTRIBUTING.md"], re.MULTILINE)
    assert listed == [*ORDER]


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "VOCABULARY.md"])
def test_files_that_are_named_exist(name: str) -> None:
    for path in re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|cuh|cu|md))`", TEXTS[name]):
        if "NAME" not in path and "NNN" not in path:
            found = [base / path for base in (ROOT, ROOT / "sandbox", ROOT / "kernels_cu")]
            assert any(file.exists() for file in found), f"{name} names {path}"


# ---- tables


def scripts() -> dict[str, set[str]]:
    """{script that writes a table: pages with such a table}."""
    found: dict[str, set[str]] = {}
    for name, text in TEXTS.items():
        for script in re.findall(r"<!-- .*: written by (\S+) table -->", text):
            found.setdefault(script, set()).add(name)
    return found


def write(script: Path, command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a script in a copy of its experiment that has the rows but no figures."""
    others = shutil.ignore_patterns("*.md", "*.png")
    shutil.copytree((ROOT / script).parent, folder / script.parent, ignore=others, dirs_exist_ok=True)
    monkeypatch.chdir(folder)
    assert not run_script(script, command)


def blocks(figure: Path) -> np.ndarray:
    """Grey levels of a figure, averaged over blocks of 10 × 10 pixels."""
    image = pytest.importorskip("PIL.Image")
    with image.open(figure) as opened:
        width, height = opened.size
        small = opened.convert("L").resize((width // 10, height // 10), image.Resampling.BOX)
    return np.asarray(small, float)


def assert_same_figures(folder: Path, experiment: Path) -> int:
    """Compares figures that a script wrote with those of the repository, up to text rendering. Returns their number."""
    written = sorted((folder / experiment).glob("*.png"))
    for figure in written:
        found, expected = blocks(figure), blocks(ROOT / experiment / figure.name)
        assert found.shape == expected.shape, figure.name
        assert abs(found - expected).max() < 64, figure.name
    return len(written)


@pytest.mark.parametrize("script", scripts())
def test_generated_tables_and_figures(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each table and figure is equal to the output of its script for the stored rows."""
    pytest.importorskip("matplotlib")
    for name, text in TEXTS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        emptied = re.sub(
            rf"(: written by {re.escape(script)} table -->\n).*?(<!-- end of)", r"\1\2", text, flags=re.DOTALL
        )
        assert (emptied != text) == (name in scripts()[script])
        (tmp_path / name).write_text(emptied)
    write(Path(script), "table", tmp_path, monkeypatch)
    for name, text in TEXTS.items():
        assert (tmp_path / name).read_text() == text, name
    assert_same_figures(tmp_path, Path(script).parent)


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("010_autograd_parity", "plot"),
        ("011_train_gpt", "plot"),
        ("018_timeline", "--draw"),
        ("019_context_parallel", "plot"),
    ],
)
def test_figures_are_what_their_script_draws(
    script: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of experiments without generated tables."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    folder = Path("experiments") / script
    write(folder / "run.py", command, tmp_path, monkeypatch)
    assert assert_same_figures(tmp_path, folder) == len([*(ROOT / folder).glob("*.png")])


# ---- Python


def test_the_python_example_runs() -> None:
    torch = pytest.importorskip("torch")
    make = np.random.default_rng(0).standard_normal
    q, k, v, dout = (torch.tensor(make((1, 2, 70, 128)), dtype=torch.float16) for _ in range(4))
    q.requires_grad_()
    found = re.search(r"```python\n(.*?)```", TEXTS["README.md"], re.DOTALL)
    assert found
    lines, reference = found[1].strip().rsplit("\n", 1)
    there = {"q": q, "k": k, "v": v, "dout": dout}
    exec(lines, there)
    assert q.grad.shape == there["dq"].shape == q.shape
    there |= {name: x.detach().numpy() for name, x in (("q", q), ("k", k), ("v", v))}
    exec(reference, there)
    full, _ = there["sandbox"].attention_forward(there["q"], there["k"], there["v"], causal=True)
    assert np.abs(full - there["ref"]).max() < 1e-2
