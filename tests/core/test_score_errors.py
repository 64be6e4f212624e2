"""Compiler errors in the expressions of a Score: the line and column of the expression, from the logs of compilers."""

from __future__ import annotations

import pytest

from sandbox.core.errors import CompileError, without_options
from sandbox.core.score import Score, TensorLike
from sandbox.core.score_errors import Mistake, explain, mistakes

SCORE = Score("x + slop(h)\n  - 0.5 * y", "j <= k")
UNDECLARED = "'{}' was not declared in this scope"
SLOP, Y, K = (Mistake(name, line, column, UNDECLARED.format(word)) for name, line, column, word in
              (("score", 0, 4, "slop"), ("score", 1, 10, "y"), ("mask", 0, 5, "k")))  # fmt: skip
OF_HOST = {
    "one": ("score:1:5: error: 'slop' was not declared in this scope", [SLOP]),
    # Literals get a suffix: 0.5 is 0.5f, so the column is one less.
    "after a literal": ("/tmp/score:2:12: fatal error: 'y' was not declared in this scope\n", [Y]),
    "in the order of the expressions": (
        (
            "In file included from k.cu:1:\n"
            "mask:1:6: error: 'k' was not declared in this scope\n    1 | j <= k\n"
            "score:2:12: error: 'y' was not declared in this scope\n"
            "score:1:5: error: 'slop' was not declared in this scope\n"
        ),
        [SLOP, Y, K],
    ),
    "one text of a line is reported once": (
        "mask:1:6: error: 'k' was not declared in this scope\nmask:1:2: error: 'k' was not declared in this scope\n",
        [K],
    ),
    "in other words": (
        (
            "score:1:5: error: there are no arguments to 'slop' that depend on a template parameter, so a declaration "
            "must be available [-fpermissive]"
        ),
        [SLOP],
    ),
    "without the type of x with its derivative": (
        "score:1:5: error: no match for Dual\nscore:1:5: error: no match\nscore:1:5: error: again Dual",
        [Mistake("score", 0, 4, "no match")],
    ),
    "an end that is missing": (
        "score-end:1:9: error: expected primary-expression before ')' token\nmask-end:1:1: error: expected ')'",
        [
            Mistake("score", 1, 11, "expected primary-expression before ')' token"),
            Mistake("mask", 0, 6, "expected ')'"),
        ],
    ),
    "a line beyond the last": ("mask:2:1: error: expected ')'", [Mistake("mask", 0, 6, "expected ')'")]),
    "in a header, for an expression": (
        "mask:1:3:   required from here\n/p/include/dual.cuh:7:5: error: static assertion failed: compare x, please\n",
        [Mistake("mask", 0, 2, "compare x, please")],
    ),
    "in a header, for another error": (
        "mask:1:3:   required from here\n/p/include/dual.cuh:7:5: error: no\n/p/include/dual.cuh:8:5: error: no\n",
        [],
    ),
    "elsewhere": ("score:1:5: error: no\n/p/k.cu:3:4: error: no\n", []),
    "in the generated header": (
        "/p/score_snippet.cuh:9:4: error: no\nmask:1:6: error: 'k' was not declared in this scope\n",
        [K],
    ),
    "a warning": ("mask:1:6: warning: 'k' is strange\n", []),
}
OF_NVRTC = {
    "with a caret": (
        (
            'score(1): error: identifier "slop" is undefined\n  x + slop(h)\n      ^\n\n'
            'mask(1): catastrophic error #20: identifier "k" is undefined\n  j <= k\n       ^\n\n2 errors detected\n'
        ),
        [
            Mistake("score", 0, 4, 'identifier "slop" is undefined'),
            Mistake("mask", 0, 5, 'identifier "k" is undefined'),
        ],
    ),
    "without a caret": ("mask(1): error: no\n\n      ^\n", [Mistake("mask", 0, None, "no")]),
    "a caret at the beginning": ("mask(1): error: no\n^", [Mistake("mask", 0, 0, "no")]),
    "an end that is missing": (
        "mask-end(1): error: expected a )\n  );\n  ^\n",
        [Mistake("mask", 0, 6, "expected a )")],
    ),
    "in a header, for an expression": (
        (
            '/p/dual.cuh(7): error: static assertion failed with "compare x, please"\n  static_assert(no)\n  ^\n'
            '          detected during instantiation of "f" at line 2 of score\n\n'
        ),
        [Mistake("score", 1, None, "compare x, please")],
    ),
    "in a header, and another error in an expression": (
        "/p/dual.cuh(7): error: no\n\nk(3): note: at line 2 of score\n",
        [],
    ),
}


@pytest.mark.parametrize(
    ("log", "found"),
    [*OF_HOST.values(), *OF_NVRTC.values()],
    ids=[*(f"g++: {n}" for n in OF_HOST), *(f"NVRTC: {n}" for n in OF_NVRTC)],
)
def test_where_mistakes_are(log: str, found: list[Mistake]) -> None:
    assert mistakes(log, SCORE) == found


def failed(log: str) -> CompileError:
    return CompileError(f"/usr/bin/g++ refused /p/k.cu\n\n{log}", source="/p/k.cu", options=(), log=log)


def test_an_explanation() -> None:
    """What an expression may use, for each that has a mistake."""
    assert explain(failed("score:1:5: error: 'slop' was not declared in this scope"), Score("x + slop(h)")) == (
        "Score: x + slop(h) does not compile: 'slop' was not declared in this scope\n"
        "  score: x + slop(h)\n"
        "             ^\n"
        "score may use x, b, h, i, j, Sq, Sk, and call exp, log, tanh, abs, min, max, where; where(condition, a, b) "
        "replaces ?:\n"
        "(reported by g++)"
    )
    tensors = {"t": TensorLike((1, 2), "float32")}
    score = Score("x\n\t+ t", "j <= k", tensors, file="/p/mine.py")
    log = (
        "score:2:4: error: no match for operator+ (Dual<float>, const SnippetTensor<float, 2>)\n"
        "mask:1:6: error: 'k' was not declared in this scope\nmask-end(1): error: no\n"
    )
    assert explain(failed(log), score) == (
        "Score: x + t; mask j <= k (in /p/mine.py) does not compile: no match for operator+ (score value x<float>, "
        "tensor without an index)\n"
        "  score, line 2:  + t\n"
        "                    ^\n"
        "no\n"
        "  mask: j <= k\n"
        "'k' was not declared in this scope\n"
        "  mask: j <= k\n"
        "             ^\n"
        "score may use x, b, h, i, j, Sq, Sk, t(index, index) (index: an integer expression without x), and call exp, "
        "log, tanh, abs, min, max, where; where(condition, a, b) replaces ?:\n"
        "mask may use b, h, i, j, Sq, Sk, t(index, index) (index: an integer expression without x), and call exp, log, "
        "tanh, abs, min, max, where; where(condition, a, b) replaces ?:\n"
        "(reported by g++)"
    )
    assert explain(failed("/p/k.cu:3:4: error: no"), score) == ""


def test_a_message_without_the_options_of_the_compiler() -> None:
    assert without_options("refused k.cu\n\nno\n\noptions: -O2\n\noptions: -O3") == "refused k.cu\n\nno"
    assert without_options("refused k.cu") == "refused k.cu"
