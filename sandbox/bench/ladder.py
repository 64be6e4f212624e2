"""Ladder tables for README.md and docs/, generated from stored rows and written between two markers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from ..core import registry
from ..core.errors import SpecError
from .report import ratios, times

Row = Mapping[str, Any]
_PEERS = {"sdpa-flash": "FlashAttention-2", "sdpa-cudnn": "cuDNN"}  # in PyTorch
_PACKAGES = {"fa2": "FlashAttention-2, its package", "fa3": "FlashAttention-3", "fa4": "FlashAttention-4"}


def label(peer: str) -> str:
    """A peer's name for people."""
    return {**_PEERS, **_PACKAGES}.get(peer, peer)


def newest_run(rows: Sequence[Row]) -> list[Row]:
    """The rows with the commit, device and CUDA version of the last row: only these are comparable."""
    of = {name: rows[-1].get(name) for name in ("commit", "device", "cuda")} if rows else {}
    return [row for row in rows if all(row.get(name) == value for name, value in of.items())]


def ladder_markdown(rows: Sequence[Row], against: str) -> str:
    """A line per contender with times: geometric means of TFLOP/s for each head dimension, and the speed relative to
    `against`."""
    speed = {(r["contender"], r["D"], r["Sq"], r["causal"]): r["tflops"] for r in rows if r["ok"]}
    kernels, every = registry.kernels(), dict.fromkeys(name for name, *_ in speed)
    contenders = sorted(every, key=lambda name: kernels[name].rung if name in kernels else len(kernels))
    relative, problems = ratios(rows, against), len({key[1:] for key in speed})
    widths = sorted({r["D"] for r in rows})
    last = f"relative to {_PEERS.get(against, against)}"
    lines = [
        f"| rung | kernel | idea | {' | '.join(f'D = {D}' for D in widths)} | {last} |",
        f"| --- | --- | --- |{' --- |' * len(widths)} --- |",
    ]
    for name in contenders:
        points = {D: {key[2:]: t for key, t in speed.items() if key[:2] == (name, D)} for D in widths}
        means = [f"{geometric_mean(points[D].values()):.3g}" if points[D] else "–" for D in widths]
        beside = [times(relative[name][D][0]) if D in relative.get(name, ()) else "–" for D in widths]
        kernel, timed = kernels.get(name), sum(map(len, points.values()))
        whose = "its authors' package" if name in _PACKAGES else "PyTorch's kernel"
        rung, idea = (str(kernel.rung), kernel.summary) if kernel else ("", whose)
        shown = f"`{name}`" if kernel else label(name)
        shown += f" ({timed} of {problems} problems)" if timed < problems else ""
        lines.append(f"| {rung} | {shown} | {idea} | {' | '.join(means)} | {' / '.join(beside)} |")
    r = rows[-1]
    grid = f"{problems} problems in total (16k tokens, hidden size 2048, S 512 … 16k, with and without causal mask)"
    tops = sorted(row["ceiling_tflops"] for row in rows)
    reached = " … ".join(dict.fromkeys(f"{top:.0f}" for top in (tops[0], tops[-1])))  # the range over all rows
    ceiling = f"a matrix product reaches {reached} in the same run"
    where = f"{r['device']}, CUDA {r['cuda']}"
    said = f"TFLOP/s of the {r['computes']}, {r['dtype']}, geometric means for each D, {grid}; {where}; {ceiling}."
    return "\n".join([*lines, "", said]) + "\n"


def project_of(script: Path) -> Path:
    """The folder of the project, which has docs/, that a script belongs to. Raises SpecError if there is none."""
    for folder in script.resolve().parents:
        if (folder / "docs").is_dir():
            return folder
    raise SpecError(f"{script} is not in a project: none of its folders contains docs/")


def write_table(path: Path, name: str, script: Path, text: str) -> None:
    """Writes `text` between two markers of a file, which name the table and the script that writes it, by its path in
    the project.

    Raises SpecError if the markers are missing.
    """
    shown = script.resolve().relative_to(project_of(script)).as_posix()
    begin = f"<!-- {name}: written by {shown} table -->\n"
    end = f"<!-- end of {name} -->"
    before, found, rest = path.read_text().partition(begin)
    _, closing, after = rest.partition(end)
    if not found or not closing:
        raise SpecError(f"{path} has no markers for the table: it must contain {begin.strip()} and {end}")
    path.write_text(before + begin + text + end + after)
