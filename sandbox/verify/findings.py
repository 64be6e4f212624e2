"""Parses the reports of sanitizers: each finding is a sentence, with the lines of the `.cu` and its headers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.score import Score
from ..core.source_line import SourceLine, lines_of
from ..cpu.build import HERE

_PLACE = re.compile(r"(/[^\s:()]+\.(?:cuh?|py)):(\d+)")
_EXPRESSION = re.compile(r"(?:(?<=\s)|^)(?:/\S*/)?(score|mask):(\d+)(?!\d)", re.MULTILINE)  # see core.snippet.header
_BARE = re.compile(r" in ([\w.-]+\.cuh?):(\d+)")  # a file name without its folder
_CPU_BACKEND = str(HERE)  # lines of the CPU backend's headers are left out: they do not help to debug a kernel
_ACCESS = re.compile(r"^ {2}((?:Previous |Atomic |Previous atomic )?(?:read|write)) of size (\d+)", re.IGNORECASE)
_COMPUTE = re.compile(r"^=+ ?")
_NEAR = re.compile(r"^sandbox: (.+)$", re.MULTILINE)  # written by __asan_on_error in cpu/memory_reports.h


@dataclass(frozen=True)
class Finding:
    """One fault of a kernel. `on`: problem and tile, if they are not shown elsewhere."""

    what: str
    places: tuple[SourceLine, ...] = ()  # innermost call first
    on: str = ""


def places(text: str) -> tuple[SourceLine, ...]:
    """All lines of a kernel's files that occur in a text, in order of occurrence."""
    found = (SourceLine(path, int(line)) for path, line in _PLACE.findall(text))
    return tuple(dict.fromkeys(place for place in found if not place.file.startswith(_CPU_BACKEND)))


def resolve_expressions(text: str, score: Score | None) -> tuple[str, str]:
    """(the report, a phrase with the first expression that it names). Places in a Score's expressions, such as
    "score:1", become lines of the file that defines the Score, if the expression is found there. The phrase is appended
    to the sentence of a finding; "" if the report names no expression."""
    lines = {"score": score.score.splitlines(), "mask": score.mask.splitlines()} if score else {}
    said: list[str] = []

    def in_its_file(found: re.Match[str]) -> str:
        name, number = found[1], int(found[2])
        if score is None or not 0 < number <= len(lines[name]):
            return found[0]
        expression = lines[name][number - 1].strip()
        said.append(f", in the Score's {name}: {expression}")
        file = str(Path(score.file).resolve()) if score.file else ""
        at = next((i for i, line in enumerate(lines_of(file), 1) if expression in line), 0) if file else 0
        return f"{file}:{at}" if at else found[0]

    text = _EXPRESSION.sub(in_its_file, text) if score else text
    return text, said[0] if said else ""


def name_buffers(text: str, names: Sequence[str]) -> str:
    """Replaces buffer numbers in a report of cpu/main.cpp's program by `names`."""
    return re.sub(r"\bbuffer (\d+)(?= in block)", lambda m: names[int(m[1])], text)


def parse_host_sanitizer(text: str) -> list[Finding]:
    """Findings in a report of AddressSanitizer, UndefinedBehaviorSanitizer, ThreadSanitizer or the runtime."""
    if "ThreadSanitizer: data race" in text:
        return _distinct(_race(report) for report in text.split("WARNING: ThreadSanitizer: ")[1:])
    if found := re.search(r"^shared memory used while a cp\.async.*$", text, re.MULTILINE):
        return [Finding(found[0], places(_first_stack(text)))]
    if found := re.search(r"AddressSanitizer: ([\w-]+)", text):
        access = re.search(r"\b(READ|WRITE) of size (\d+)", text)
        how = f", {access[1].lower()} of {access[2]} bytes" if access else ""
        what = {"use-after-poison": "beyond the dynamic shared memory", "heap-buffer-overflow": "out of bounds"}
        near = f", {said[1]}" if (said := _NEAR.search(text)) else ""
        return [Finding(f"{what.get(found[1], found[1])}{how}{near}", places(_first_stack(text)))]
    if found := re.search(r"^(\S+?):(\d+):\d+: runtime error: (.*)", text, re.MULTILINE):
        return [Finding(found[3], places(text))]
    # A message of the runtime: the first line, and the lines at which threads wait.
    return [Finding(_PLACE.sub(lambda m: f"{Path(m[1]).name}:{m[2]}", text.partition("\n    at ")[0]), places(text))]


def _first_stack(text: str) -> str:
    """The stack of the access; later stacks show where the memory was allocated."""
    begin = text.find("    #0")
    end = text.find("\n\n", begin)
    return text[begin : end if end > 0 else None]


def _race(report: str) -> Finding:
    """A data race: two accesses, each with its stack."""
    accesses: list[tuple[str, list[str]]] = []
    for line in report.splitlines():
        if found := _ACCESS.match(line):
            accesses.append((f"{found[1].lower()} of {found[2]} bytes", []))
        elif line.lstrip().startswith("#") and accesses:
            accesses[-1][1].append(line)
        elif accesses and accesses[-1][1] and len(accesses) > 1:
            break
    stacks = [places("\n".join(stack)) for _, stack in accesses]
    sides = [f"{how} at {_line(stack)}" if stack else how for (how, _), stack in zip(accesses, stacks, strict=True)]
    merged = tuple(dict.fromkeys(place for stack in stacks for place in stack))
    return Finding(f"data race: {' against '.join(sides) or report.splitlines()[0]}", merged)


def _line(stack: Sequence[SourceLine]) -> SourceLine:
    """The innermost line of a `.cu`, rather than of a header that it calls."""
    return next((place for place in stack if place.file.endswith(".cu")), stack[0])


def parse_compute_sanitizer(text: str, folders: Sequence[Path] = ()) -> list[Finding]:
    """Findings in a report of compute-sanitizer: paragraphs whose first line describes the fault.

    Some releases print file names without folders: these files are searched in `folders`.
    """
    paragraphs: list[list[str]] = []
    for line in _BARE.sub(lambda m: f" in {_whole(m[1], folders)}:{m[2]}", text).splitlines():
        if not line.startswith("========="):
            continue
        said = _COMPUTE.sub("", line)
        if said and not said.startswith(" ") and not re.search(r"SUMMARY|^COMPUTE-SANITIZER|^Target application", said):
            paragraphs.append([said])
        elif said.strip() and paragraphs:
            paragraphs[-1].append(said)
    return _distinct(Finding(_sentence(lines), places("\n".join(lines))) for lines in paragraphs)


def _whole(name: str, folders: Sequence[Path]) -> str:
    return next((str(folder / name) for folder in folders if (folder / name).is_file()), name)


def _sentence(lines: list[str]) -> str:
    """The first line, plus thread and address; paths are shortened to file names."""
    said = [lines[0].removeprefix("Error: ").removeprefix("Warning: ").strip()]
    said += [line.strip() for line in lines[1:] if re.match(r" +(by thread|and |Address )", line)]
    return _PLACE.sub(lambda m: f"{Path(m[1]).name}:{m[2]}", ", ".join(said))


def _distinct(found: Iterator[Finding]) -> list[Finding]:
    """The first finding for each set of lines: many threads report the same one."""
    by_lines: dict[object, Finding] = {}
    for finding in found:
        by_lines.setdefault(finding.places or finding.what, finding)
    return [*by_lines.values()]
