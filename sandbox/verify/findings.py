"""What sanitizers say, read: each finding a sentence and the lines of the `.cu` and its headers that it names."""

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
_BARE = re.compile(r" in ([\w.-]+\.cuh?):(\d+)")  # a file without its folder
_TWINS = str(HERE)  # CPU versions of headers: their lines say nothing to somebody who wrote a kernel
_ACCESS = re.compile(r"^ {2}((?:Previous |Atomic |Previous atomic )?(?:read|write)) of size (\d+)", re.IGNORECASE)
_COMPUTE = re.compile(r"^=+ ?")
_NEAR = re.compile(r"^sandbox: (.+)$", re.MULTILINE)  # of __asan_on_error, in cpu/runtime.cpp


@dataclass(frozen=True)
class Finding:
    """One thing that a kernel does and may not do; `on` which problem and tile, where that is not said beside it."""

    what: str
    places: tuple[SourceLine, ...] = ()  # innermost call first
    on: str = ""


def places(text: str) -> tuple[SourceLine, ...]:
    """Every line of a kernel's own files that a text names, in its order."""
    found = (SourceLine(path, int(line)) for path, line in _PLACE.findall(text))
    return tuple(dict.fromkeys(place for place in found if not place.file.startswith(_TWINS)))


def resolve_expressions(text: str, score: Score | None) -> tuple[str, str]:
    """A report in which the lines of a Score's expressions are those of the file that defines it, where they are found
    there; and the first expression that it names, for the finding's sentence: "" if it names none."""
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
    """A report in which buffers, which the program of cpu/main.cpp knows by their numbers, have these names."""
    return re.sub(r"\bbuffer (\d+)(?= in block)", lambda m: names[int(m[1])], text)


def parse_host_sanitizer(text: str) -> list[Finding]:
    """The findings in what AddressSanitizer, UndefinedBehaviorSanitizer, ThreadSanitizer or the runtime wrote."""
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
    # the runtime's own words: the first line, and who waits where
    return [Finding(_PLACE.sub(lambda m: f"{Path(m[1]).name}:{m[2]}", text.partition("\n    at ")[0]), places(text))]


def _first_stack(text: str) -> str:
    """Where it happened; the stacks that follow say where the memory came from."""
    begin = text.find("    #0")
    end = text.find("\n\n", begin)
    return text[begin : end if end > 0 else None]


def _race(report: str) -> Finding:
    """Two accesses, each with its stack."""
    accesses: list[tuple[str, list[str]]] = []
    for line in report.splitlines():
        if found := _ACCESS.match(line):
            accesses.append((f"{found[1].lower()} of {found[2]} bytes", []))
        elif line.lstrip().startswith("#") and accesses:
            accesses[-1][1].append(line)
        elif accesses and accesses[-1][1] and len(accesses) > 1:
            break
    stacks = [places("\n".join(stack)) for _, stack in accesses]
    told = [f"{how} at {_line(stack)}" if stack else how for (how, _), stack in zip(accesses, stacks, strict=True)]
    merged = tuple(dict.fromkeys(place for stack in stacks for place in stack))
    return Finding(f"data race: {' against '.join(told) or report.splitlines()[0]}", merged)


def _line(stack: Sequence[SourceLine]) -> SourceLine:
    """The innermost line of a `.cu`: a header's counts for the line that calls it."""
    return next((place for place in stack if place.file.endswith(".cu")), stack[0])


def parse_compute_sanitizer(text: str, folders: Sequence[Path] = ()) -> list[Finding]:
    """The findings in what one tool of compute-sanitizer wrote: paragraphs whose first line says what is wrong.

    Some of its releases name a file without its folder: it is then looked for in `folders`.
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
    """The first line; which thread, the first time; paths shortened to names."""
    said = [lines[0].removeprefix("Error: ").removeprefix("Warning: ").strip()]
    said += [line.strip() for line in lines[1:] if re.match(r" +(by thread|and |Address )", line)]
    return _PLACE.sub(lambda m: f"{Path(m[1]).name}:{m[2]}", ", ".join(said))


def _distinct(found: Iterator[Finding]) -> list[Finding]:
    """One for each set of lines: the threads that meet there are many."""
    return list({(f.places or f.what): f for f in reversed(list(found))}.values())[::-1]
