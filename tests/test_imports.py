"""The seams: which module may import, print, exit or touch which library."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Lowest first: a module imports only from lines above its own. Names on one line do not import one another.
ORDER = """
errors
log jsonl picture
spec place
reference
sources
cache
arch
tensor_maps
arguments
dlpack
nvrtc
driver
cpu
findings
tools
compute_sanitizer
registry
history new
disassembly worker
fleet
staging
tuned
choose
run
trial plan
call
torch_op
attention
code
cases
error_map truth
check sanitize
examination
examine
watch
doctor
environment
sampled timing
sampled_gradients
peers
rows
ncu work
profiler
profiler_target
bench
tune
labs
plot
report
tune_report profile_report profile_plot
bench_report watch_report
ladder
code_report
cli
__init__
__main__
"""
RANK = {name: rank for rank, line in enumerate(ORDER.split("\n")) for name in line.split()}
PACKAGES = {"cli", "cpu", "reference"}  # what is inside one may import one another


def modules() -> dict[str, Path]:
    """{dotted name below sandbox: file}."""
    files = sorted((ROOT / "sandbox").rglob("*.py"))
    return {".".join(file.relative_to(ROOT / "sandbox").with_suffix("").parts): file for file in files}


MODULES = modules()
TREES = {name: ast.parse(file.read_text()) for name, file in MODULES.items()}


def top(name: str) -> str:
    return name.partition(".")[0]


def imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(dots, module, imported name) of every import statement, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, node.module or "", alias.name) for alias in node.names)


def siblings(name: str) -> set[str]:
    """The modules of this package that `name` imports, by their first part."""
    depth = name.count(".") + 1  # so many dots lead to sandbox itself
    found = set()
    for dots, module, imported in imports(TREES[name]):
        if dots == depth:
            found.add(top(module) or (imported if imported in RANK else "__init__"))
        elif dots:
            assert dots < depth, f"{name} imports from outside of the package"
        elif top(module) == "sandbox":
            found.add(module.split(".")[1] if "." in module else "__init__")
    return found


def libraries(tree: ast.AST) -> set[str]:
    """Dotted names of what is imported from elsewhere: `from a.b import c` gives a.b.c."""
    return {f"{module}.{imported}".strip(".") for dots, module, imported in imports(tree) if not dots}


def strings(tree: ast.AST) -> Iterator[str]:
    """Every string in the code; docstrings are prose."""
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def test_every_module_has_its_place() -> None:
    assert {top(name) for name in MODULES} <= set(RANK)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name: str) -> None:
    rank = RANK[top(name)]
    for other in siblings(name):
        inside = top(name) in PACKAGES and other == top(name)
        assert inside or RANK[other] < rank, f"sandbox/{name} imports {other}, which is not below it"


def test_the_reference_stands_alone() -> None:
    for name in MODULES:
        if top(name) == "reference":
            assert siblings(name) == set()
            outside = {top(library) for library in libraries(TREES[name])}
            assert outside - set(sys.stdlib_module_names) <= {"numpy", "ml_dtypes"}


@pytest.mark.parametrize("file", sorted((ROOT / "kernels_cu").glob("*.py")), ids=lambda file: file.name)
def test_specs_import_the_spec_module_alone(file: Path) -> None:
    for dots, module, _ in imports(ast.parse(file.read_text())):
        assert dots == 0
        assert module == "sandbox.spec" or top(module) in sys.stdlib_module_names, f"{file.name} imports {module}"


@pytest.mark.parametrize(
    ("mention", "home"),
    [(r"cuda\.bindings\.driver|libcuda", "driver"), (r"cuda\.bindings\.nvrtc|libnvrtc", "nvrtc"), (r"cuda\.core", "-")],
)
def test_one_seam_to_each_library_of_cuda(mention: str, home: str) -> None:
    users = {
        top(name)
        for name, tree in TREES.items()
        if any(re.search(mention, text) for text in (*libraries(tree), *strings(tree)))
    }
    assert users == {home} - {"-"}


def test_one_seam_to_array_libraries() -> None:
    """Whoever is given an array asks `dlpack`; who times PyTorch's own attention, or joins it, needs PyTorch."""
    seam, on_demand = "dlpack", {"bench", "peers", "timing", "torch_op"}
    for name, tree in TREES.items():
        if top(name) == seam:
            continue
        imported = {top(library) for library in libraries(tree)}
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert top(name) in on_demand or not (imported | named) & {"torch", "cupy"}, name
        through_sys = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "modules"]
        assert not through_sys or top(name) == "registry", f"{name} uses sys.modules"


@pytest.mark.parametrize("name", [name for name in MODULES if top(name) != "cli"])
def test_only_the_command_line_prints_and_exits(name: str) -> None:
    assert not {top(library) for library in libraries(TREES[name])} & {"click"}
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Name):
            assert node.id not in ("print", "exit", "quit", "SystemExit"), f"{name}:{node.lineno} {node.id}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            what = f"{node.value.id}.{node.attr}"
            assert what not in ("sys.exit", "os._exit", "sys.stdout", "sys.stderr"), f"{name}:{node.lineno} {what}"


def test_importing_the_package_is_light() -> None:
    """No array library, no GPU, no terminal: those are imported by whoever uses them."""
    # What Python has loaded by itself does not count: the CUDA wheels' namespace package is among it.
    script = "import sys; start = {*sys.modules}; import sandbox; print(*sorted({*sys.modules} - start))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    heavy = ("torch", "cupy", "rich", "click", "triton", "matplotlib", "cuda")
    assert "sandbox.attention" in done.stdout.split()
    assert "sandbox.run" not in done.stdout.split()
    assert [name for name in done.stdout.split() if top(name) in heavy] == []


@pytest.mark.parametrize("file", sorted((ROOT / "kernels_cu").glob("*.cu")), ids=lambda file: file.name)
def test_kernels_have_no_ptx_of_their_own(file: Path) -> None:
    """It belongs behind a verb in include/, whose twin runs on the CPU."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", file.read_text(), flags=re.DOTALL)
    assert not re.search(r"\basm\b", code)
