"""Shared helpers of tests: sampling, and commands and kernels in a copy of the project (`project_copy`)."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import io
import os
import random
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sandbox.core import registry
from sandbox.core.options import BY_NAME
from sandbox.launch import driver
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Kernel, Problem
from sandbox.verify.scores import OPTIONS

# Seed for sampling where there are too many combinations. It is fixed, so that results are reproducible;
# SANDBOX_SEED=N selects another sample.
SEED = int(os.environ.get("SANDBOX_SEED", "20261121"))
# "sampled" for `make test`; "quick" for `make quick`; "all" for `make test-all`, which samples nothing.
SAMPLE = os.environ.get("SANDBOX_SAMPLE", "sampled")
# The folders whose tests are unit tests, except those with the marker `slow`.
QUICK_FOLDERS = ("core", "reference", "launch", "bench", "profile", "jobs")
# SANDBOX_WIDTHS=all: tests/engine/test_widths.py runs every pair of head dimensions on the CPU backend.
ALL_WIDTHS = os.environ.get("SANDBOX_WIDTHS") == "all"
# SANDBOX_MAGNITUDES=all: tests/engine/test_magnitudes.py tries as much on the CPU backend as on a GPU.
ALL_MAGNITUDES = os.environ.get("SANDBOX_MAGNITUDES") == "all"
# {kernel: n}: the CPU backend runs a random sample of one in n of its tests, unless `-k` is used; a GPU runs all.
SELDOM = {kernel.name: kernel.test_share for kernel in registry.kernels().values() if kernel.test_share > 1}
ROOT = Path(__file__).resolve().parent.parent
# Prefix of a command that receives SIGINT: restores its handler, because an ignored SIGINT (after a shell's `&`) is
# inherited.
INTERRUPTIBLE = (
    sys.executable,
    "-c",
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
)


def dtype_of(kernel: Kernel) -> str:
    """The dtype of single test cases: float16 if supported, which has the smallest range."""
    return "float16" if "float16" in kernel.dtypes else kernel.dtypes[0]


def skip_without_wgmma(kernel: Kernel, problem: Problem, device: Device) -> None:
    """Skips a test of a kernel with wgmma on a GPU that has none. problem: one that the kernel supports."""
    if kernel.why_unsupported(problem, None if device == HOST else driver.device(device[1]).arch):
        pytest.skip("wgmma requires compute capability 9.0")


def takes_causal(kernel: Kernel) -> bool:
    """Whether the kernel supports a causal mask; false if it supports only latent attention."""
    problem = Problem(1, 1, 8, 8, 64, dtype=kernel.dtypes[0], causal="bottom-right")
    return not kernel.latent and not kernel.why_unsupported(problem)


def in_project(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """`python -m …` with the packages of the copy, and tables of full width."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def run_script(script: Path, *arguments: str) -> object:
    """The exit status of a script that runs in this process, which has imported its libraries already."""
    own = {path.stem for path in script.parent.glob("*.py")}  # other folders have modules of the same name
    others = {name: sys.modules.pop(name) for name in own & {*sys.modules}}
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        patch.setattr(sys, "argv", [str(script), *arguments])
        patch.setattr(sys, "path", [str(script.parent.resolve()), str(ROOT), *sys.path])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            return end.code
        finally:
            registry.forget()  # kernels that it added
            for name in own & {*sys.modules}:
                del sys.modules[name]
            sys.modules.update(others)
    return None


def new_kernel(project: Path, name: str, **edits: str) -> None:
    """A copy of fwd_minimal with another name and edits of its spec: its sweep is fast."""
    folder = project / "kernels_cu"
    for suffix in (".cu", ".py"):
        text = (ROOT / "kernels_cu" / f"fwd_minimal{suffix}").read_text().replace("fwd_minimal", name)
        for old, new in (edits if suffix == ".py" else {}).items():
            assert old in text
            text = text.replace(old, new)
        (folder / f"{name}{suffix}").write_text(text)


def kernel_copy(kernel: Kernel, folder: Path, file: str, change: Callable[[str], str]) -> Path:
    """The source of a kernel, copied to `folder` with all headers. `change` is applied to the text of `file`: the
    source or a header."""
    source = folder / kernel.source.name
    shutil.copytree(ROOT / "kernels_cu" / "include", folder / "include")
    shutil.copy(kernel.source, source)
    changed = source if file == source.name else folder / "include" / file
    before = changed.read_text()
    changed.write_text(change(before))
    assert changed.read_text() != before
    return source


def leave_process_group() -> None:
    """Destroys a gloo process group. PyTorch (2.13) joins its threads while holding the GIL, which they may need to
    end: give them time first."""
    import torch

    time.sleep(0.2)
    torch.distributed.destroy_process_group()


# Lengths at and beside those at which specs choose another tile, and head dimensions (D, Dv).
LENGTHS = (0, 1, 2, 16, 63, 64, 65, 127, 128, 129, 192, 256, 511, 512, 513, 576, 1023, 1024, 1025, 1088, 1151, 1152,
           2047, 2048, 2049, 4095, 4096, 4097, 8192, 16384, 65536)  # fmt: skip
WIDTHS = (*((D, D) for D in (7, 8, 16, 32, 40, 64, 72, 80, 96, 128, 129, 160, 192, 256)), (128, 64), (192, 128),
          (64, 128), (576, 512), (576, 128))  # fmt: skip
BATCHES = ((1, 1, 1), (1, 8, 8), (1, 32, 8), (2, 128, 1), (4, 16, 2), (8, 6, 3), (16, 32, 32))  # B, H, Hk

# Options in stored texts. A new one is not added, so that these texts do not change with it: its row of the table has
# the cases that test it.
STORED_OPTIONS = ("window", "softcap", "dropout", "ragged", "key_lengths", "page_size", "alibi", "bias", "mask", "sink",
                  "kv_dtype", "descale", "block_map", "score")  # fmt: skip
STORED_CASES = sorted({"Dv", "score", *(case for name in STORED_OPTIONS for case in BY_NAME[name].cases)})


def has_stored_options(problem: Problem) -> bool:
    """Whether all options of a problem are in stored texts."""
    return problem.options <= {*STORED_OPTIONS}


def drawn_problem(draw: random.Random, dtypes: Sequence[str]) -> Problem:
    """A random problem, half of them without options; supported or not."""
    (B, H, Hk), (D, Dv) = draw.choice(BATCHES), draw.choice(WIDTHS)
    Sq, Sk = draw.choice(LENGTHS), draw.choice(LENGTHS)
    fields: dict[str, Any] = {
        "dtype": draw.choice(dtypes),
        "causal": draw.choice((False, "bottom-right", "top-left")),
    }
    layout = draw.choice(("dense", "dense", "ragged", "paged"))
    if layout == "ragged":
        problem = Problem(B, H, 0, 0, D, Hk=Hk, Dv=Dv, ragged=(B * max(Sq, 1), B * max(Sk, 1)), **fields)
    else:
        problem = Problem(B, H, Sq, draw.choice((Sq, Sk)), D, Hk=Hk, Dv=Dv, **fields)
    if layout == "paged":
        size = draw.choice((1, 16, 48, 64, 256))
        problem = dataclasses.replace(problem, Sk=problem.Sk // size * size, page_size=size, key_lengths=True)
    for option in draw.sample(STORED_CASES, draw.choice((0, 0, 1, 2))):
        problem = dataclasses.replace(problem, **OPTIONS[option](problem))
    return problem


STORED = ROOT / "tests" / "stored"


def is_stored(name: str) -> bool:
    """Whether `check_stored` has this text, or writes it: a new kernel has none at first."""
    return (STORED / name).is_file() or bool(os.environ.get("SANDBOX_STORE"))


def check_stored(name: str, lines: Iterable[str]) -> None:
    """Compares a text with the file `name` of `tests/stored`, and shows the lines that differ. SANDBOX_STORE=1 writes
    the file instead: its diff then shows what a change affects."""
    path, text = STORED / name, "".join(f"{line}\n" for line in lines)
    if os.environ.get("SANDBOX_STORE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = path.read_text().splitlines() if path.is_file() else []
    changed = [*difflib.unified_diff(before, text.splitlines(), "stored", "now", n=0, lineterm="")]
    assert not changed, "\n".join([*changed[:40], "SANDBOX_STORE=1 pytest … stores the new text"])


def digest(lines: Iterable[str]) -> str:
    """For a text of which only some lines are stored: a line that differs if any of its lines does."""
    every = [*lines]
    text = "\n".join(every)
    return f"{len(every)} in all: {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def printed(width: int, *renderables: Any) -> list[str]:
    """The lines that a terminal of `width` columns shows."""
    from rich.console import Console

    console = Console(width=width, file=io.StringIO(), record=True, highlight=False)
    for each in renderables:
        console.print(each)
    return [line.rstrip() for line in console.export_text().splitlines()]


def drawn(draw: Callable[[], object]) -> list[str]:
    """What a function draws with sandbox.core.picture, as text: texts, ticks, limits that were set, and every line,
    area and image with its numbers and colours. Nothing is written."""
    from sandbox.core import picture

    figures: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(picture, "save", lambda figure, prefix: figures.append(figure) or [])
        draw()
    return [line for figure in figures for line in _figure_lines(figure)]


def _figure_lines(figure: Any) -> Iterator[str]:
    yield f"figure {numbers(figure.get_size_inches())}, {figure.dpi} dpi: {figure.get_suptitle()!r}"
    for legend in figure.legends:
        yield f"legend {[text.get_text() for text in legend.get_texts()]} {legend._ncols} {legend._loc}"
    for axes in figure.axes:
        yield f"axes {axes.get_subplotspec()}: {axes.get_title('left')!r}, {axes.get_xlabel()!r}, {axes.get_ylabel()!r}"
        for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
            limits = "" if getattr(axes, f"get_autoscale{name}_on")() else numbers(axis.get_view_interval())
            yield f"  {name} {axis.get_scale()} {limits} {_fixed_ticks(axis)}"
        for line in axes.lines:
            style = (_label(line), line.get_color(), line.get_marker(), line.get_markerfacecolor())
            sizes = (line.get_linestyle(), line.get_linewidth(), line.get_markersize(), line.get_zorder())
            yield f"  line {style} {sizes}: {numbers(line.get_xdata())}; {numbers(line.get_ydata())}"
        for area in axes.collections:
            corners = [[numbers(c) for c in sorted(set(map(tuple, p.vertices)))] for p in area.get_paths()]
            style = (_label(area), numbers(area.get_facecolor().ravel()), area.get_zorder())
            yield f"  area {style} {numbers(area.get_offsets().ravel())} {corners}"
        for image in axes.images:
            yield f"  image {numbers(image.get_clim())} {image.origin}: {numbers(image.get_array().filled(-1).ravel())}"
        for text in axes.texts:
            look = (text.get_color(), text.get_fontsize(), text.get_weight(), text.get_ha(), text.get_va())
            yield f"  text {numbers(text.get_position())} {text.get_text()!r} {look}"


def _label(artist: Any) -> str:
    return "" if artist.get_label().startswith("_") else artist.get_label()


def _fixed_ticks(axis: Any) -> str:
    """The ticks that were set: others depend on matplotlib's version."""
    from matplotlib.ticker import FixedLocator

    if not isinstance(axis.get_major_locator(), FixedLocator):
        return ""
    return f"{numbers(axis.get_ticklocs())} {[text.get_text() for text in axis.get_ticklabels()]}"


def numbers(values: Iterable[Any]) -> str:
    return " ".join(f"{float(value):.5g}" for value in values)
