"""Rejects expressions of a Score that compile, but compute something else than their author means."""

from __future__ import annotations

import re
from functools import lru_cache

from .errors import SpecError

# Strings and characters, numbers, comments, template arguments of a call, as in static_cast<int>(x), words, operators.
_TOKEN = (
    r"""("|')(?:\\.|(?!\1).)*\1|"""
    r"\d[\w.']*|//|/\*|[A-Za-z_]\w*\s*<[\s\w:]*>(?=\s*\()|\w+|"
    r"<<=|>>=|<=>|->|<<|>>|&&|\|\||[-+*/%&|^<>=!]=|[-+*/%&|^<>=?:,;()\[\]{}]"
)  # fmt: skip
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_COMPARISONS = frozenset(("<", "<=", ">", ">=", "==", "!=", "not_eq"))
# Operators that bind less tightly than comparisons: on either side of one there may be a comparison.
_LOOSER = frozenset(("&&", "||", "&", "|", "^", "and", "or", "bitand", "bitor", "xor", "?", ":", ","))


@lru_cache(maxsize=256)
def check(name: str, text: str) -> None:
    """Raises SpecError for comments, unbalanced brackets, assignments and chains of comparisons in the expression
    `name`. In one with braces, a lambda's statements may assign and compare."""
    opened: list[str] = []
    compared = [""]  # for each open bracket: a comparison, or "not", that the next comparison would apply to
    statements = "{" in text
    for found in re.finditer(_TOKEN, text):
        token = found[0]
        if token in ("//", "/*"):
            raise _error(name, text, f"contains {token}, which begins a comment in C++: leave comments out; / of "
                         "integers rounds toward zero")  # fmt: skip
        if token in _CLOSING:
            opened.append(token)
            compared.append("")
        elif token in _CLOSING.values():
            if not opened or _CLOSING[opened.pop()] != token:
                raise _error(name, text, f"has a {token} that closes nothing")
            compared.pop()
        elif statements:
            continue
        elif token in _LOOSER:
            compared[-1] = ""
        elif token == "not":
            compared[-1] = compared[-1] or token
        elif token in _COMPARISONS:
            if compared[-1] == "not":
                raise _error(name, text, f"negates only the left side of {token}: put the comparison in parentheses")
            if compared[-1]:
                raise _error(name, text, f"chains comparisons: C++ compares the result of one, true or false, by the "
                             f"other: join them with &&, as in a {compared[-1]} b && b {token} c")  # fmt: skip
            compared[-1] = token
        elif token.endswith("="):
            other = "write == to compare, or " if token == "=" else "write "
            raise _error(name, text, f"contains the assignment {token}: {other}only the new value, without x {token}")
    if opened:
        raise _error(name, text, f"has a {opened[-1]} that is not closed")


def _error(name: str, text: str, mistake: str) -> SpecError:
    return SpecError(f"Score: {name}={text!r} {mistake}")
