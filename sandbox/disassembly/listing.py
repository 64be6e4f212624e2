"""Machine code or PTX of a kernel or of another version of it, and the differences between two versions."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import registry
from ..core.errors import UnknownKernel, UnsupportedProblem
from ..core.files import names_of
from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.source_line import SourceLine, lines_of
from ..core.tile import Tile
from ..engine import pipeline
from ..engine.choose import choose_tile
from ..toolchain import arch as architectures
from ..toolchain import cache, disassembly, sources
from ..toolchain.disassembly import Instruction
from ..toolchain.nvrtc import Resources
from ..watch.history import History, as_bytes

LANGUAGES = ("sass", "ptx")


@dataclass(frozen=True)
class Code:
    """A compiled entry point of a kernel in one of LANGUAGES. `label` distinguishes versions: a tile, a revision."""

    label: str
    kernel: str
    language: str
    arch: str
    problem: Problem
    tile: Tile
    resources: Resources
    instructions: tuple[Instruction, ...]
    source: str = ""  # name of the .cu

    @property
    def counts(self) -> dict[str, int]:
        """{opcode class: count}."""
        return disassembly.counts(self.instructions)

    @property
    def live_peaks(self) -> dict[SourceLine, int]:
        """{source line: maximum of live registers over its instructions}, highest first; {} if unknown."""
        peaks: dict[SourceLine, int] = {}
        for i in self.instructions:
            if i.live is not None and i.line:
                peaks[i.line] = max(i.live, peaks.get(i.line, 0))
        return dict(sorted(peaks.items(), key=lambda item: -item[1]))


def translate(
    kernel: Kernel, language: str, problem: Problem, arch: str | None = None, tile: Tile | None = None,
    label: str = "", entry: str = "",
) -> Code:  # fmt: skip
    """Compile `kernel` and disassemble one of its entry points. Defaults: the first entry point, and `target_of`.

    Raises what `sandbox.compile` raises; ToolchainMissing without nvdisasm.
    """
    target = pipeline.target_of(kernel, arch)
    chosen = choose_tile(kernel, problem, architectures.parse(target), tile)
    name = entry or kernel.name
    compiled = pipeline.compile_entry(kernel, name, problem, chosen, target)
    others = {e.name for e in kernel.entries if e.name != name}
    whole = disassembly.sass(compiled.cubin) if language == "sass" else disassembly.ptx(compiled.ptx)
    instructions = tuple(i for i in whole if i.function not in others)
    label = label or str(chosen)
    about = (label, name, language, target, problem, chosen, compiled.resources)
    return Code(*about, instructions, kernel.source.name)


def version(kernel: Kernel, reference: str) -> Kernel:
    """Another version of a kernel. `reference` is a `.cu` file, whose entry points may have other names, a git revision
    of this project, or "history:3", version 3 in the history of `watch`. The last two have their own headers and spec.

    Raises UnsupportedProblem, UnknownKernel, HistoryError.
    """
    if reference.endswith(".cu"):
        return _renamed(dataclasses.replace(kernel, source=Path(reference).resolve()))
    past, _, number = reference.partition(":")
    if past == "history" and number.isdecimal():
        return _in_history(kernel, int(number))
    return _at_revision(kernel, reference)


def _renamed(kernel: Kernel) -> Kernel:
    """The kernel with the entry-point names of its file, if they differ, as in a renamed copy."""
    there = sources.entry_points(kernel.source) if kernel.source.is_file() else []
    if kernel.name in there or len(there) != len(kernel.entries):
        return kernel
    name = min(there, key=len)
    then = (dataclasses.replace(e, name=name + e.name.removeprefix(kernel.name)) for e in kernel.then)
    return dataclasses.replace(kernel, name=name, then=tuple(then))


def _in_history(kernel: Kernel, number: int) -> Kernel:
    texts = History(kernel).get(number).texts

    def write(folder: Path) -> None:
        for path, text in texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(as_bytes(text))

    return _unpacked(kernel, cache.make_key(texts=texts), write, f"version {number} in the history")


def _at_revision(kernel: Kernel, revision: str) -> Kernel:
    root = registry.root(kernel)
    commit = _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").decode().strip()
    if not commit:
        raise UnsupportedProblem(
            f"{revision!r} is not a tile (BLOCK_M=64,…), a .cu file, history:N, or a git revision of {root}"
        )

    def write(folder: Path) -> None:
        with tarfile.open(fileobj=io.BytesIO(_git(root, "archive", commit, _folder(kernel)))) as tar:
            tar.extractall(folder, filter="data")

    return _unpacked(kernel, commit, write, f"revision {revision}")


def _folder(kernel: Kernel) -> str:
    """The folder of a kernel's `.cu` and spec below its root."""
    return "." if registry.root(kernel) == kernel.source.parent else registry.FOLDER.name


def _unpacked(kernel: Kernel, key: str, write: Callable[[Path], None], called: str) -> Kernel:
    """The kernel according to the spec in the files that `write` creates in the folder of `key` (40 hex digits)."""
    folder = (
        cache.directory() / f"revision-{key}"
    )  # a permanent path, because it is part of the cubin and of cache keys
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as staging:
            write(Path(staging) / "revision")
            Path(staging, "revision").rename(folder)
    spec = folder / _folder(kernel) / f"{kernel.source.stem}.py"
    found = names_of(spec) if spec.is_file() else {}
    for old in (*found.get("kernels", ()), found.get("kernel")):
        if isinstance(old, Kernel) and old.name == kernel.name:
            return dataclasses.replace(old, source=spec.with_suffix(".cu"))
    raise UnknownKernel(f"{kernel.name} is not in {called}")


def _git(root: Path, *arguments: str) -> bytes:
    done = subprocess.run(("git", "-C", str(root), *arguments), capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else b""


# ---- two versions


@dataclass(frozen=True)
class LineChange:
    """The instructions of a source line in two versions, as {opcode class: count}; empty for a version without the
    line."""

    file: str
    line: int  # line number after the change, or before it if the line was removed
    text: str
    before: Mapping[str, int]
    after: Mapping[str, int]


def changed_classes(before: Code, after: Code) -> dict[str, tuple[int, int]]:
    """{opcode class: (count before, count after)} for counts that differ, largest change first."""
    old, new = before.counts, after.counts
    pairs = {name: (old.get(name, 0), new.get(name, 0)) for name in {**old, **new}}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return dict(sorted(differing.items(), key=lambda item: -abs(item[1][1] - item[1][0])))


def changed_lines(before: Code, after: Code) -> list[LineChange]:
    """The source lines whose instructions differ in class or number, sorted by file and line.

    Lines are matched by their text, so that lines added above have no effect. The `.cu` and the entry point of both
    versions get the names of the second.
    """
    old, new = _by_line(before, after), _by_line(after, after)
    changes = []
    for key in {**new, **old}:
        (line, then), (line_now, now) = (side.get(key, (0, Counter[str]())) for side in (old, new))
        if then != now:
            changes.append(LineChange(key[0], line_now or line, key[1], then, now))
    return sorted(changes, key=lambda change: (change.file, change.line))


def _by_line(code: Code, named: Code) -> dict[tuple[str, str, int], tuple[int, Counter[str]]]:
    """{(file name, text, index among equal lines): (line, opcode classes)}, with the names of `named`."""
    found: dict[tuple[str, str, int], tuple[int, Counter[str]]] = {}
    for i in code.instructions:
        if i.line:
            text = i.line.text()
            nth = sum(line.strip() == text for line in lines_of(i.line.file)[: i.line.line])
            file = Path(i.line.file).name
            key = named.source if file == code.source else file, text.replace(code.kernel, named.kernel), nth
            _, classes = found.setdefault(key, (i.line.line, Counter()))
            classes[disassembly.opcode_class(i)] += 1
    return found


# ---- for programs


def as_json(code: Code) -> dict[str, Any]:
    """The complete listing as JSON types."""
    peaks = [{"file": at.file, "line": at.line, "live": live} for at, live in code.live_peaks.items()]
    return {
        **{name: getattr(code, name) for name in ("kernel", "language", "arch", "problem", "tile", "label")},
        "resources": code.resources,
        "counts": code.counts,
        "kinds": disassembly.by_kind(code.counts),
        "live_peaks": peaks,
        "instructions": [*_instructions(code)],
    }


def _instructions(code: Code) -> Iterator[dict[str, Any]]:
    for i in code.instructions:
        at = i.line
        where = {"file": at.file if at else None, "line": at.line if at else None}
        yield {"function": i.function, "address": i.address, "text": i.text, "live": i.live, **where}


def changes_as_json(before: Code, after: Code) -> dict[str, Any]:
    """Both versions without their instructions, and the differences."""
    sides = {
        name: {**as_json(code), "instructions": len(code.instructions)}
        for name, code in (("before", before), ("after", after))
    }
    return {**sides, "classes": changed_classes(before, after), "lines": changed_lines(before, after)}
