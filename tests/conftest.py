"""Fixtures. A test with the fixture `device` runs on the CPU backend, and on a GPU if there is one."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Set before NumPy is imported: with more BLAS threads than free cores, small products are a hundred times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("SANDBOX_KERNELS", None)  # the kernels under test are those of the project

import numpy as np
import pytest
from project import ALL_WIDTHS, QUICK_FOLDERS, SAMPLE, SEED, SELDOM

from sandbox.core import registry
from sandbox.cpu import build, compiler
from sandbox.cpu.launch import CpuFunction
from sandbox.engine.staging import Staged
from sandbox.launch import dlpack, driver
from sandbox.launch.arguments import PackedArguments
from sandbox.launch.dlpack import HOST, Device
from sandbox.toolchain import nvrtc

ROOT = Path(__file__).resolve().parent.parent
GOLD = "-fuse-ld=gold"


def pytest_configure() -> None:
    """Links with GNU gold, in half the time, where it finds the compiler's libraries. Workers inherit the variable."""
    if "SANDBOX_CPU_FLAGS" not in os.environ and shutil.which("ld.gold"):
        link = [*compiler.find().command, "-shared", GOLD, "-x", "c++", os.devnull, "-o", os.devnull]
        if subprocess.run(link, capture_output=True, check=False).returncode == 0:
            os.environ["SANDBOX_CPU_FLAGS"] = GOLD


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for this run, shared by its workers; `$SANDBOX_TEST_CACHE_DIR` to keep it for later runs."""
    base = tmp_path_factory.getbasetemp()
    own = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "sandbox-cache"
    path = Path(os.environ.get("SANDBOX_TEST_CACHE_DIR", own))
    os.environ["SANDBOX_CACHE_DIR"] = str(path)
    return path


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for one test."""
    path = tmp_path / "cache"
    monkeypatch.setenv("SANDBOX_CACHE_DIR", str(path))
    return path


_launched: set[str] = set()  # entry points, by the test that runs


@pytest.fixture(scope="session", autouse=True)
def noting_launches(request: pytest.FixtureRequest) -> Iterator[None]:
    """With a JUnit file, which `make mutants` reads: each launch on the CPU backend adds to `_launched`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.option.xmlpath:
            patch.setattr(CpuFunction, "launcher", noted(CpuFunction.launcher))
            program = build.program
            patch.setattr(build, "program", lambda *args: (_launched.add(args[1]), program(*args))[1])
        yield


def noted(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """CpuFunction.launcher whose launches are added to `_launched`."""

    def noted_launcher(function: CpuFunction, *args: Any, **options: Any) -> Any:
        launch = launcher(function, *args, **options)

        def noted_launch(*args: Any, **options: Any) -> None:
            _launched.add(function.entry)
            launch(*args, **options)

        return noted_launch

    return noted_launcher


@pytest.fixture(autouse=True)
def launches_in_report(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """The property "launches" of the test in the JUnit file."""
    _launched.clear()
    yield
    if _launched:
        record_property("launches", " ".join(sorted(_launched)))


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Resets PyTorch's compiler before each test: it compiles a function at most eight times."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@functools.cache
def why_no_gpu() -> str:
    """The reason why tests cannot use a GPU, or "" if they can."""
    try:
        driver.device()
    except Exception as error:
        return str(error)
    return ""


def pytest_xdist_auto_num_workers() -> int:
    """One more than cores, at most eight: some tests wait for a process or a time limit."""
    return min(8, (os.cpu_count() or 1) + 1)


def pytest_report_header() -> list[str]:
    gpu = [f"tests that need a GPU are deselected: {why_no_gpu()}"] if why_no_gpu() else []
    return [f"SANDBOX_SEED={SEED} SANDBOX_SAMPLE={SAMPLE}", *gpu]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = config.option.keyword or any("[" in argument for argument in config.args)
    selected = [item for item in items if not (why_no_gpu() and item.get_closest_marker("gpu"))]
    if custom := {name for name, kernel in registry.kernels().items() if kernel.custom}:
        selected = [item for item in selected if not has_kernel(item, custom)]
    if SAMPLE != "all" and not named and not any("::" in argument for argument in config.args):
        selected = [item for item in selected if not item.get_closest_marker("complete")]
    if not named and SAMPLE != "all":
        selected = sampled(selected)
    kept = {*selected}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = selected


def has_kernel(item: pytest.Item, names: set[str]) -> bool:
    """Whether an attention test has one of these kernels, of other operations, which `new kernel` created in
    `kernels_cu`: tests/verify/test_operations.py tests them."""
    callspec = getattr(item, "callspec", None)
    params = [getattr(param, "name", param) for param in callspec.params.values()] if callspec else []
    return item.path.name != "test_operations.py" and any(isinstance(p, str) and p in names for p in params)


def sampled(items: list[pytest.Item]) -> list[pytest.Item]:
    """A random sample of the tests that have many parameters, or run kernels of SELDOM, at least one of each function;
    and all other tests."""
    by_function: dict[str, list[tuple[float, float, pytest.Item]]] = {}
    for item in items:
        period = sampling_period(item)
        rank = period * random.Random(f"{SEED} {item.nodeid}").random() if period > 1 else 0.0
        by_function.setdefault(item.nodeid.partition("[")[0], []).append((rank, 1 / period, item))
    drawn: set[pytest.Item] = set()
    for tests in by_function.values():
        count = math.ceil(sum(share for _, share, _ in tests) - 1e-6)
        drawn.update(item for _, _, item in sorted(tests, key=lambda test: test[0])[:count])
    return [item for item in items if item in drawn and (SAMPLE != "quick" or is_quick(item))]


def sampling_period(item: pytest.Item) -> int:
    """One of this many tests like `item` runs: 1 on a GPU."""
    callspec = getattr(item, "callspec", None)
    if not callspec or item.get_closest_marker("gpu"):
        return 1
    marker = item.get_closest_marker("sampled")
    period: int = marker.args[0] if marker else 1
    if marker and period == 1:
        return 1
    complete = ALL_WIDTHS and item.path.name == "test_widths.py"
    if "spill" in item.name or complete or item.path.parent.name not in ("engine", "cpu"):  # or only compiles
        return period
    return period * SELDOM.get(getattr(callspec.params.get("kernel"), "name", ""), 1)


def is_quick(item: pytest.Item) -> bool:
    """Whether `make quick` runs it: unit tests, and one small problem for each kernel."""
    callspec = getattr(item, "callspec", None)
    if item.path.name == "test_cases.py" and item.name.startswith("test_groups["):
        return callspec is not None and not callspec.params["causal"]
    return item.path.parent.name in QUICK_FOLDERS and not item.get_closest_marker("slow")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    """The device of the test: ("cpu", 0), and ("cuda", 0) if there is a GPU."""
    return HOST if request.param == "cpu" else ("cuda", 0)


@pytest.fixture
def run_cuda(tmp_path: Path, device: Device):
    """Compile CUDA source text and launch one of its kernels on `device`, in place, on NumPy arrays and ctypes values.

    run_cuda(text, entry, *args, grid=1, block=32, smem=0, defines={}, cluster=1)

    An argument may also be a function of the addresses of the arrays, by their positions, and of `device`.
    """

    def run(
        text: str, entry: str, *args: Any, grid: Any = 1, block: Any = 32, smem: int = 0, defines: Any = None,
        cluster: int = 1,
    ) -> None:  # fmt: skip
        source = tmp_path / f"{entry}.cu"
        source.write_text(text)
        grid, block = (((n, 1, 1) if isinstance(n, int) else n) for n in (grid, block))
        arrays = {i: Staged(raw_view(a), device) for i, a in enumerate(args) if isinstance(a, np.ndarray)}
        values = [ctypes.c_void_p(arrays[i].pointer) if i in arrays else a for i, a in enumerate(args)]
        addresses = {i: args[i].ctypes.data if device == HOST else arrays[i].pointer for i in arrays}
        values = [a(addresses, device) if callable(a) else a for a in values]
        if device == HOST:
            for i in arrays:
                values[i] = ctypes.c_void_p(addresses[i])
            function: Any = CpuFunction(build.library(source, [entry], defines or {}).path, entry)
        else:
            gpu = driver.device(0)
            for staged in arrays.values():
                staged.send()
            arch = f"sm_{gpu.arch[0]}{gpu.arch[1]}" + ("a" if gpu.arch == (9, 0) else "")
            function = driver.CudaFunction(nvrtc.compile(source, entry, arch, defines).cubin, entry, gpu)
        function.launcher(grid, block, smem, PackedArguments(values), cluster=cluster)(())
        if device != HOST:
            gpu.synchronize(after=entry)
            for staged in arrays.values():
                staged.fetch()

    return run


def raw_view(array: np.ndarray) -> dlpack.ArrayView:
    """A contiguous array of any dtype as a view of float16 elements, for copying its bytes."""
    assert array.flags.c_contiguous
    flat = array.reshape(-1).view(np.uint8)
    if flat.nbytes % 2:
        flat = np.concatenate([flat, np.zeros(1, np.uint8)])
    return dlpack.ArrayView(array.ctypes.data, (flat.nbytes // 2,), (1,), "float16", HOST, array)


@pytest.fixture
def project_copy(tmp_path: Path) -> Path:
    """A copy of the project's packages and tests, to which a test may add files; with their bytecode, so that commands
    do not compile the copy again."""
    copy = tmp_path / "project"
    ignore = shutil.ignore_patterns("*.egg-info")
    for name in ("sandbox", "kernels_cu", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy
