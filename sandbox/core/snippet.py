"""The CUDA header with the expressions of a Score, which kernels and the reference's host program include."""

from __future__ import annotations

import hashlib
import re

from .score import VARIABLES, Score

HEADER = "score_snippet.cuh"
_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "int32": "int", "bool": "bool"}
# A number with a point or an exponent and no suffix, not part of a name or of another number.
_DOUBLE = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])")


def digest(score: Score) -> int:
    """A hash of the snippet: 48 bits, never 0."""
    return int.from_bytes(hashlib.sha256(header(score).encode()).digest()[:6], "big") | 1


def single(text: str) -> str:
    """An expression with its literals in single precision: 0.5 -> 0.5f."""
    return _DOUBLE.sub(r"\1f", text)


def column_of(line: str, column: int) -> int:
    """The column in `line` for a column of `single(line)`, which has inserted "f" suffixes. Both count from 0."""
    added = sum(literal.end() + n < column for n, literal in enumerate(_DOUBLE.finditer(line)))
    return min(column - added, len(line))


def header(score: Score) -> str:
    """`struct Snippet`, as include/score.cuh uses it. #line directives make compilers report errors in files called
    "score" and "mask", or "score-end" and "mask-end" if an expression ends too early (see core/score_errors.py)."""
    members = "".join(
        f"    SnippetTensor<{_TYPES[like.dtype]}, {len(like.shape)}> {name};\n" for name, like in score.structure[2]
    )
    names = {like.dtype for _, like in score.structure[2]}
    includes = [f"#include <cuda_{short}.h>" for dtype, short in _HEADERS.items() if dtype in names]
    return "\n".join(
        (
            *includes,
            "namespace expression {",
            "struct Snippet {",
            f"    static constexpr bool HAS_SCORE_MOD = {str(score.changes).lower()};",
            f"    static constexpr bool HAS_MASK_MOD = {str(score.hides).lower()};",
            members or "    int snippet;  // an empty member would have a size, too\n",
            "    template <class X>",
            f"    __device__ __forceinline__ X new_score({_of('const X x')}) const {{",
            "        return X(",
            '#line 1 "score"',
            single(score.score),
            '#line 1 "score-end"',
            "        );",
            "    }",
            f"    __device__ __forceinline__ bool new_mask({_of()}) const {{",
            "        return bool(",
            '#line 1 "mask"',
            single(score.mask),
            '#line 1 "mask-end"',
            "        );",
            "    }",
            "};",
            "}  // namespace expression",
            "using expression::Snippet;",
            "",
        )
    )


def _of(*more: str) -> str:
    """The parameters that an expression may name: const, so that one that assigns does not compile."""
    return ", ".join((*more, *(f"const int {name}" for name in VARIABLES[1:])))


_HEADERS = {"float16": "fp16", "bfloat16": "bf16"}
