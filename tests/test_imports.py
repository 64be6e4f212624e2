"""Layering: which module may import which, print, exit, or use which library; data classes are immutable."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from project import ROOT

# Lowest layer first: a folder imports only from folders earlier in this list.
ORDER = (
    "core", "reference", "toolchain", "launch", "cpu", "engine", "api", "integrations", "jobs", "verify", "bench",
    "tune", "watch", "disassembly", "profile", "timeline", "pages", "scaffold", "course",
    "cli",
)  # fmt: skip
LOOSE = {"__init__", "__main__", "spec"}  # modules in sandbox/ itself


def modules() -> dict[str, Path]:
    """{dotted name below sandbox: file}."""
    files = sorted((ROOT / "sandbox").rglob("*.py"))
    return {".".join(file.relative_to(ROOT / "sandbox").with_suffix("").parts): file for file in files}


MODULES = modules()
TREES = {name: ast.parse(file.read_text()) for name, file in MODULES.items()}


class _WithoutTypes(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return node.orelse
        return self.generic_visit(node)


FOLDERS = sorted({name.partition(".")[0] for name in MODULES if "." in name})


def top(name: str) -> str:
    return name.partition(".")[0]


@cache
def imports(tree: ast.AST) -> tuple[tuple[int, str, str], ...]:
    """(dots, module, imported name) of every import statement, also inside functions."""
    found: list[tuple[int, str, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += ((0, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found += ((node.level, node.module or "", alias.name) for alias in node.names)
    return tuple(found)


def siblings(name: str, trees: Mapping[str, ast.AST] = TREES) -> set[str]:
    """The modules of this package that `name` imports, dotted; a folder's own name where it imports the folder."""
    home = name.split(".")[:-1]
    found = set()
    for dots, module, imported in imports(trees[name]):
        if dots:
            assert dots <= len(home) + 1, f"{name} imports from outside the package"
            base = home[: len(home) - dots + 1]
        elif top(module) == "sandbox":
            base = []
        else:
            continue
        dotted = ".".join([*base, *filter(None, [module.removeprefix("sandbox").lstrip(".")])])
        inner = f"{dotted}.{imported}".strip(".")
        found.add(inner if inner in MODULES else dotted or "__init__")
    return found


def libraries(tree: ast.AST) -> set[str]:
    """Dotted names of imports from other packages: `from a.b import c` gives a.b.c."""
    return {f"{module}.{imported}".strip(".") for dots, module, imported in imports(tree) if not dots}


@cache
def strings(tree: ast.AST) -> tuple[str, ...]:
    """Every string in the code except docstrings."""
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose)
    return tuple(node.value for node in nodes if isinstance(node.value, str))


def test_every_module_is_in_a_known_folder() -> None:
    assert {name for name in MODULES if "." not in name} == LOOSE
    assert {*FOLDERS} == {*ORDER}


@pytest.mark.parametrize("name", [name for name in MODULES if top(name) in ORDER])
def test_imports_point_one_way(name: str) -> None:
    below = ORDER[: ORDER.index(top(name)) + 1]
    for other in siblings(name):
        assert top(other) in below, f"sandbox/{name} imports {other}, which is not in a lower layer"


@pytest.mark.parametrize("name", [name for name in MODULES if top(name) in ORDER])
def test_a_folder_is_imported_through_its_exports(name: str) -> None:
    for other in siblings(name):
        folder, _, module = other.partition(".")
        if folder != top(name) and module:
            exported = importlib.import_module(f"sandbox.{folder}").__all__
            assert module in exported, f"sandbox/{name} imports {other}, which {folder}/__init__.py does not export"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_a_docstring_and_exports_what_others_use(folder: str) -> None:
    package = importlib.import_module(f"sandbox.{folder}")
    assert package.__doc__
    if folder in ("reference", "integrations", "cli"):  # imported as a whole, or by users only
        return
    used = {other.partition(".")[2] for name in MODULES if top(name) != folder for other in siblings(name)
            if top(other) == folder}  # fmt: skip
    assert set(package.__all__) == used - {""}


def test_modules_do_not_import_each_other_in_a_cycle() -> None:
    """Wherever the import statement stands, except for type checkers."""
    trees = {name: _WithoutTypes().visit(ast.parse(file.read_text())) for name, file in MODULES.items()}
    found = {name: siblings(name, trees) & {*MODULES} - {name} for name in MODULES}
    order = TopologicalSorter(found)
    order.prepare()  # raises CycleError, which names the cycle


def test_the_reference_imports_nothing_else() -> None:
    for name in MODULES:
        if top(name) == "reference":
            assert {top(other) for other in siblings(name)} <= {"reference"}
            outside = {top(library) for library in libraries(TREES[name])}
            assert outside - set(sys.stdlib_module_names) <= {"numpy", "ml_dtypes"}


@pytest.mark.parametrize("file", sorted((ROOT / "kernels_cu").glob("*.py")), ids=lambda file: file.name)
def test_specs_import_the_spec_module_alone(file: Path) -> None:
    for dots, module, _ in imports(ast.parse(file.read_text())):
        assert dots == 0
        known = {*sys.stdlib_module_names, *(["numpy"] if "Operation(" in file.read_text() else [])}  # for references
        assert module == "sandbox.spec" or top(module) in known, f"{file.name} imports {module}"


@pytest.mark.parametrize(
    ("mention", "home"),
    [
        (r"cuda\.bindings\.driver|libcuda", "launch.driver"),
        (r"cuda\.bindings\.nvrtc|libnvrtc", "toolchain.nvrtc"),
        (r"cuda\.core", "-"),
    ],
)
def test_one_module_per_cuda_library(mention: str, home: str) -> None:
    users = {
        name
        for name, tree in TREES.items()
        if any(re.search(mention, text) for text in (*libraries(tree), *strings(tree)))
    }
    assert users == {home} - {"-"}


def test_one_module_for_array_libraries() -> None:
    """`dlpack` handles arrays of other libraries; only benchmarks and PyTorch integration import PyTorch."""
    array_module, on_demand = (
        "launch.dlpack",
        {
            "bench.benchmark",
            "bench.decode",
            "bench.serving",
            "bench.inputs",
            "bench.peers",
            "bench.ragged",
            "bench.reading",
            "bench.timing",
            "api.torch_autograd",
            "bench.operations",
            "api.torch_ops",
            "api.torch_graphs",
            "api.torch_slot",
        },
    )
    for name, tree in TREES.items():
        if name == array_module:
            continue
        imported = {top(library) for library in libraries(tree)}
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert name in on_demand or not (imported | named) & {"torch", "cupy"}, name
        through_sys = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "modules"]
        assert not through_sys or name == "core.registry", f"{name} uses sys.modules"


@pytest.mark.parametrize("name", [name for name in MODULES if top(name) != "cli"])
def test_only_the_command_line_prints_and_exits(name: str) -> None:
    assert not {top(library) for library in libraries(TREES[name])} & {"click"}
    catches = {"SystemExit", "sys.exit"} if name == "core.files" else set()  # exit() in a user's file
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Name) and node.id not in catches:
            assert node.id not in ("print", "exit", "quit", "SystemExit"), f"{name}:{node.lineno} {node.id}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            what = f"{node.value.id}.{node.attr}"
            ends = what in ("sys.exit", "os._exit", "sys.stdout", "sys.stderr")
            assert what in catches or not ends, f"{name}:{node.lineno} {what}"


IMPORTED = {
    "api", "api.attention", "api.dispatch", "api.options",
    "core", "core.block_map", "core.dtypes", "core.errors", "core.interrupts", "core.normalise", "core.options",
    "core.project", "core.score",
    "launch", "launch.array_view", "launch.capsule", "launch.dlpack", "launch.library",
}  # fmt: skip


def test_data_classes_cannot_be_changed() -> None:
    """Several parts, threads and caches share them."""
    classes = [(name, node) for name in TREES for node in ast.walk(TREES[name]) if isinstance(node, ast.ClassDef)]
    made = [(f"{name}.{c.name}", ast.unparse(how)) for name, c in classes for how in c.decorator_list]
    assert [name for name, how in made if "dataclass" in how and "frozen=True" not in how] == []


def test_importing_the_package_is_light() -> None:
    """It imports NumPy, and of the package what a call with a cached plan needs: no compiler, other array library, GPU
    or terminal. No dataclasses either: that module and one class take 1.3 ms, of 4 ms in all."""
    # Excludes modules that Python loads at startup, such as the CUDA wheels' namespace package.
    script = "import sys, numpy; start = {*sys.modules}; import sandbox; print(*sorted({*sys.modules} - start))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    found = done.stdout.split()
    assert {name.removeprefix("sandbox.") for name in found if top(name) == "sandbox"} == {"sandbox", *IMPORTED}
    assert {top(name) for name in found} - {*sys.stdlib_module_names} == {"sandbox", "kernels_cu"}
    assert "dataclasses" not in found


def test_calls_without_compilation_do_not_import_the_compiler() -> None:
    """PyTorch's compiler takes a second to import: a first call with backward and options does not import it."""
    pytest.importorskip("torch")
    script = """
import sys, torch, sandbox
q = torch.zeros(1, 1, 2, 16, requires_grad=True)
for options in ({}, {"window": (1, 0)}):
    sandbox.attention(q, q, q, kernel="fwd_minimal", **options).sum().backward()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=True)


@pytest.mark.parametrize("file", sorted((ROOT / "kernels_cu").glob("*.cu")), ids=lambda file: file.name)
def test_kernels_have_no_ptx_of_their_own(file: Path) -> None:
    """Inline PTX belongs in functions in include/, which have CPU implementations."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", file.read_text(), flags=re.DOTALL)
    assert not re.search(r"\basm\b", code)
