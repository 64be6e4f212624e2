"""Compiler errors in the expressions of a Score, by line and column of the expression."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import CompileError
from .score import FUNCTIONS, VARIABLES, Score
from .snippet import HEADER, column_of

# File names that the header of core/snippet.py sets. g++ and clang report a column, NVRTC shows a caret.
_EXPRESSION = r"(?P<name>score|mask)(?P<after>-end)?"
_HOST = re.compile(rf"^(?:\S*/)?{_EXPRESSION}:(?P<line>\d+):(?P<column>\d+): (?:fatal )?error: (?P<text>.*)")
_HOST_FROM = re.compile(rf"^(?:\S*/)?{_EXPRESSION}:(?P<line>\d+):(?P<column>\d+): +required from")
_NVRTC = re.compile(rf"^{_EXPRESSION}\((?P<line>\d+)\): (?:catastrophic )?error(?: #\S+)?: (?P<text>.*)")
_NVRTC_FROM = re.compile(rf" at line (?P<line>\d+) of {_EXPRESSION}")
_ELSEWHERE = re.compile(
    r"^(?P<file>[^\s:(]\S*?)(?::\d+:\d+|\(\d+\)): (?:fatal |catastrophic )?error(?: #\S+)?: (?P<text>.*)"
)
# g++'s first error for an unknown function in a template. The second one, "not declared", has another column.
_UNDECLARED = re.compile(r"there are no arguments to (\S+) that depend on a template parameter.*")
_DUAL = "Dual"  # the type of x with its derivative (include/dual.cuh)
_TYPES = (
    (re.compile(r"(?:const )?SnippetTensor<[^>]*>"), "tensor without an index"),
    (re.compile(rf"\b{_DUAL}\b"), "score value x"),
)


@dataclass(frozen=True)
class Mistake:
    """An error in the expression `name`, "score" or "mask". `line` and `column` count from 0; `column` is None if the
    compiler does not report it."""

    name: str
    line: int
    column: int | None
    text: str


def explain(error: CompileError, score: Score) -> str:
    """A message for the compiler's errors in the expressions of `score`: each with its line and a caret. "" if some
    error is elsewhere."""
    found = mistakes(error.log, score)
    if not found:
        return ""
    compiler = str(error).partition(" refused ")[0].split("/")[-1]
    file = f" (in {score.file})" if score.file else ""
    messages = "\n".join(f"{_without_types(m.text)}{_excerpt(m, score)}" for m in found)
    hints = "\n".join(_allowed(name, score) for name in dict.fromkeys(m.name for m in found))
    return (
        f"Score: {' '.join(str(score).split())}{file} does not compile: {messages}\n{hints}\n(reported by {compiler})"
    )


def _without_types(text: str) -> str:
    """A compiler's message, with terms of expressions instead of the kernels' C++ types."""
    for pattern, term in _TYPES:
        text = pattern.sub(term, text)
    return text


def _allowed(name: str, score: Score) -> str:
    """What an expression may use."""
    tensors = (f"{tensor}({', '.join(['index'] * len(array.shape))})" for tensor, array in score.tensors.items())
    names = [*VARIABLES[name == "mask" :], *tensors]  # a mask has no x
    indices = " (index: an integer expression without x)" if score.tensors else ""
    functions = ", ".join(FUNCTIONS)
    return f"{name} may use {', '.join(names)}{indices}, and call {functions}; where(condition, a, b) replaces ?:"


def _excerpt(mistake: Mistake, score: Score) -> str:
    lines = getattr(score, mistake.name).splitlines()
    many = f", line {mistake.line + 1}" if len(lines) > 1 else ""
    shown = f"\n  {mistake.name}{many}: "
    line = lines[mistake.line].replace("\t", " ")
    caret = "" if mistake.column is None else f"\n{' ' * (len(shown) - 1 + mistake.column)}^"
    return f"{shown}{line}{caret}"


def mistakes(log: str, score: Score) -> list[Mistake]:
    """The errors in a compiler's log, one per line and column, if all are in the expressions of `score`; else []."""
    found: dict[tuple[str, int, int | None], Mistake] = {}
    for mistake in _read(log.splitlines(), score):
        if mistake is None:
            return []
        if any((m.name, m.line, m.text) == (mistake.name, mistake.line, mistake.text) for m in found.values()):
            continue
        place = mistake.name, mistake.line, mistake.column
        # Of two messages for one place, the one without the type Dual, which no expression mentions.
        if place not in found or (_DUAL in found[place].text and _DUAL not in mistake.text):
            found[place] = mistake
    return sorted(found.values(), key=lambda m: (m.name == "mask", m.line, m.column or 0))


def _read(lines: list[str], score: Score) -> Iterator[Mistake | None]:
    """Each error in the log as a Mistake; None for an error outside the expressions."""
    caller: re.Match[str] | None = None  # the line of an expression that instantiates the template with the error
    for number, line in enumerate(lines):
        if at := _HOST.match(line):
            yield _mistake(at, at["text"], score, int(at["column"]) - 1)
        elif at := _HOST_FROM.match(line):
            caller = at
            continue
        elif at := _NVRTC.match(line):
            yield _mistake(at, at["text"], score, _shown_column(lines[number + 1 :]))
        elif (other := _ELSEWHERE.match(line)) and not other["file"].endswith(HEADER):
            text = other["text"].removeprefix("static assertion failed: ")
            text = re.sub(r'^static assertion failed with "(.*)"$', r"\1", text)
            if not caller:
                caller = next(filter(None, map(_NVRTC_FROM.search, _block(lines[number + 1 :]))), None)
            column = int(caller["column"]) - 1 if caller and caller.re is _HOST_FROM else None
            yield _mistake(caller, text, score, column) if caller else None
        else:
            continue
        caller = None


def _mistake(at: re.Match[str], text: str, score: Score, column: int | None) -> Mistake:
    lines = getattr(score, at["name"]).splitlines()
    number, text = int(at["line"]) - 1, _UNDECLARED.sub(r"\1 was not declared in this scope", text)
    if at["after"] or number >= len(lines):  # the expression ends too early
        return Mistake(at["name"], len(lines) - 1, None if column is None else len(lines[-1]), text)
    return Mistake(at["name"], number, None if column is None else column_of(lines[number], column), text)


def _block(lines: list[str]) -> list[str]:
    """The lines of one error of NVRTC: up to an empty line."""
    return lines[: lines.index("")] if "" in lines else lines


def _shown_column(lines: list[str]) -> int | None:
    """NVRTC repeats the line, indented by two, with a caret below it."""
    caret = next((line for line in _block(lines) if line.strip() == "^"), None)
    return None if caret is None else max(0, len(caret) - 3)
