"""Mutations of CUDA C++ text, with general operators for arithmetic, control flow, and synchronization.

The text is not parsed: the operators are regular expressions, and a mutation that does not compile is drawn again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from mutation import Change

# Not mutated: comments, strings, lines of the preprocessor, assertions about the tile, and statements that only affect
# the compiler's or the GPU's schedule.
_IGNORED = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | ^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*
    | \bstatic_assert\([^;]*; | \btemplate\ *<[^;{}]*?>(?=\s*\n)
    | \b(?:warpgroup_fence_operand|setmaxnreg\w*|griddepcontrol_\w+|prefetch\w*|TIMELINE)(?:<[^;()]*>)?\([^;]*;""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_BEGIN = r"(?:(?<=[;{}\n])|(?<=\)\ ))[ \t]*"  # of a statement
_LVALUE = r"\*?[A-Za-z_][\w.]*(?:->\w+|\.\w+|\[[^;=\]]*\])*"
_STRIDES = {"stride_b": "stride_h", "stride_h": "stride_s", "stride_s": "stride_h", "stride_d": "stride_s"}
_NAMES = {"min": "max", "max": "min", "fminf": "fmaxf", "fmaxf": "fminf", "true": "false", "false": "true",
          "BLOCK_M": "BLOCK_N", "BLOCK_N": "BLOCK_M", "threadIdx": "blockIdx", "continue": "break"}  # fmt: skip
_COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_COMPUTED = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "&": "|", "|": "&", "^": "|", "<<": ">>", ">>": "<<"}


def _call(name: str) -> str:
    """A statement that is a call of a function whose name contains `name`."""
    return rf"{_BEGIN}(?P<it>[\w.:]*(?:{name})\w*(?:<[^;(){{}}]*>)?\([^;{{}}]*\);)"


def _value(name: str) -> str:
    """A use of a variable whose name contains `name`."""
    return rf"(?<![\w.>:])(?<!int )(?<!bool )(?P<it>\w*{name}\w*)\b(?!\s*(?:[(<{{:\[]|=[^=]|[-+*/%^|&]=))"


def _of(table: dict[str, str]) -> Callable[[str], tuple[str, ...]]:
    return lambda it: (table[it],)


def _alternatives(table: dict[str, str]) -> str:
    return "|".join(re.escape(text) for text in sorted(table, key=len, reverse=True))


# operator: (expression whose group `it` is replaced, function that returns the replacements)
OPERATORS: dict[str, tuple[re.Pattern[str], Callable[[str], tuple[str, ...]]]] = {
    name: (re.compile(expression, re.MULTILINE), becomes)
    for name, (expression, becomes) in {
        "drop barrier": (_call("sync|barrier|arrive"), lambda it: (";",)),
        "drop wait": (_call("wait|acquire"), lambda it: (";",)),
        "drop fence": (_call("fence|commit|release"), lambda it: (";",)),
        "drop call": (_call(r"\b(?!return|if|for|while|switch|else)[a-z]"), lambda it: (";",)),
        "drop assignment": (rf"{_BEGIN}(?P<it>{_LVALUE} [-+*/|&^%]?= [^;{{}}]*;)", lambda it: (";",)),
        "wait for fewer": (r"wait\w*<(?P<it>\d+)>", lambda it: (str(int(it) + 1),)),
        "wrong stage": (_value("stage"), lambda it: (f"({it} + 1)",)),
        "wrong phase": (_value("(?:phase|parity)"), lambda it: (f"({it} ^ 1)",)),
        "wrong stride": (r"\b(?P<it>stride_[bhsd])\b", _of(_STRIDES)),
        "off by one": (r"(?<![\w.])(?P<it>\d+)(?![\w.])", lambda it: (str(int(it) + 1), f"({it} - 1)")),
        "other constant": (r"(?<![\w.])(?P<it>\d+\.\d*)(?=f\b)", lambda it: (str(float(it) + 1.0),)),
        "comparison": (rf"(?<= )(?P<it>{_alternatives(_COMPARED)})(?= )", _of(_COMPARED)),
        "arithmetic": (rf"(?<= )(?P<it>{_alternatives(_COMPUTED)})(?= )", _of(_COMPUTED)),
        "update": (r"(?<= )(?P<it>[-+*/]=)(?= )", lambda it: ("=", "-=" if it == "+=" else "+=")),
        "logic": (r"(?P<it>&&|\|\|)", lambda it: ("||" if it == "&&" else "&&",)),
        "drop not": (r"(?P<it>!)(?=[\w(:])", lambda it: ("",)),
        "other name": (rf"\b(?P<it>{_alternatives(_NAMES)})\b", _of(_NAMES)),
    }.items()
}

# A draw takes each of these equally often: most places are numbers and arithmetic.
FAMILIES = {
    "synchronization": ("drop barrier", "drop wait", "drop fence", "wait for fewer", "wrong stage", "wrong phase"),
    "control": ("comparison", "logic", "drop not"),
    "arithmetic": ("off by one", "other constant", "arithmetic", "update", "wrong stride", "other name"),
    "statements": ("drop call", "drop assignment"),
}


def code_of(text: str) -> str:
    """The text with spaces for what is not mutated, of the same length."""
    return _IGNORED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def changes(text: str) -> Iterator[Change]:
    """All mutations of a text."""
    code = code_of(text)
    for operator, (expression, becomes) in OPERATORS.items():
        for found in expression.finditer(code):
            begin, end = found.span("it")
            for after in becomes(found["it"]):
                yield Change(operator, begin, text[begin:end], after)


def draw(text: str, sample: random.Random) -> Change | None:
    """A random mutation: a random family of operators, a random place, then one of those at this place. None if there
    is no place."""
    family = sample.choice(sorted(FAMILIES))
    places: dict[tuple[int, int], list[Change]] = {}
    for change in changes(text):
        if change.operator in FAMILIES[family]:
            places.setdefault((change.begin, len(change.before)), []).append(change)
    return sample.choice(places[sample.choice(sorted(places))]) if places else None
