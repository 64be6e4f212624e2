"""The code page: source and machine code side by side, for one or two versions of a kernel."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.source_line import SourceLine, lines_of
from ..disassembly.listing import Code
from ..toolchain.disassembly import Instruction, kind, opcode_class
from .render import render
from .tables import Table

_KINDS = {"tensor cores": "tensor", "shared memory": "shared", "global memory": "global", "local memory": "local",
          "synchronisation": "sync"}  # fmt: skip
_OWN = (".cu", ".cuh")  # shown completely; of other headers, only lines with code
_LANGUAGES = {"sass": "machine code", "ptx": "PTX"}
_POINTS = 1000  # maximum number of points of a curve


@dataclass(frozen=True)
class _Row:
    """A line of the source pane. `change`: "add" or "remove" if only one version has it."""

    id: int
    number: str
    text: str
    change: str = ""
    figure: str = ""
    heat: str = ""


@dataclass(frozen=True)
class _File:
    name: str
    rows: Sequence[_Row]
    summary: str
    open: bool


def page(
    codes: Sequence[Code], samples: Mapping[int, int] | None = None, tables: Sequence[Table] = (),
    about: Sequence[str] = (),
) -> str:  # fmt: skip
    """The page of one compiled entry point, or of two versions of it, the newer last. Returns HTML.

    `samples`: {address: number of profile samples} of the last version. The heat of a line is its number of samples, or
    of instructions without `samples`. Raises ToolchainMissing without jinja2.
    """
    after = codes[-1]
    ids, texts = _lines(codes)
    weights = [_weights(code, samples if code is after else None, code.source) for code in codes]
    first, sides = 0, []
    for number, code in enumerate(codes):
        rows = list(_instructions(code, ids[number], samples if code is after else None))
        sides.append({"label": code.label, "heading": _heading(code, codes), "rows": rows, "first": first,
                      "summary": f"{code.resources.registers} registers, {len(rows)} instructions"})  # fmt: skip
        first += len(rows)
    most = max((i.live or 0 for code in codes for i in code.instructions), default=0)
    what = "samples" if samples else "instructions"
    return render(
        "code.html", title=f"{after.kernel}: {_LANGUAGES[after.language]} for {after.arch}",
        about=[*about, f"{after.problem.variant}, {after.tile}" if not about else ""], tables=tables, sides=sides,
        files=list(_files(codes, ids, texts, weights, bool(samples))), most_live=most,
        heat_title=f"{what} per line" + (", before → after" if len(codes) > 1 else ""),
        curves=[_curve(code, most) for code in codes] if most else [],
    )  # fmt: skip


def _heading(code: Code, codes: Sequence[Code]) -> str:
    return code.language.upper() if len(codes) == 1 else f"{code.language.upper()}, {code.label}"


# ---- lines: equal lines of two versions share an id

_Ids = dict[tuple[str, int], int]  # {(file name, line): id} of one side


def _called(code: Code, codes: Sequence[Code], path: str) -> str:
    """A file's name on the page. The `.cu` of both versions has the name of the last."""
    name = Path(path).name
    return codes[-1].source if name == code.source else name


def _texts(code: Code, codes: Sequence[Code]) -> dict[str, dict[int, str]]:
    """{file name: {line: text}} of the source lines with instructions of `code`, the `.cu` first."""
    found: dict[str, dict[int, str]] = {codes[-1].source: {}}
    for at in dict.fromkeys(at for i in code.instructions for at in i.where):
        name = _called(code, codes, at.file)
        lines = lines_of(at.file)
        if name.endswith(_OWN) and lines:
            if not found.get(name):
                found[name] = dict(enumerate(lines, 1))
        else:
            found.setdefault(name, {})[at.line] = lines[at.line - 1] if at.line <= len(lines) else ""
    return found


def _lines(codes: Sequence[Code]) -> tuple[list[_Ids], list[dict[str, dict[int, str]]]]:
    texts = [_texts(code, codes) for code in codes]
    ids: list[_Ids] = [{} for _ in codes]
    count = 0
    for name in dict.fromkeys(name for side in texts for name in side):
        numbers = [sorted(side.get(name, {})) for side in texts]
        for pair in _aligned([[side.get(name, {})[n] for n in ns] for side, ns in zip(texts, numbers, strict=True)]):
            for side, ns, index in zip(ids, numbers, pair, strict=True):
                if index is not None:
                    side[name, ns[index]] = count
            count += 1
    return ids, texts


def _aligned(sides: Sequence[Sequence[str]]) -> Iterator[tuple[int | None, ...]]:
    """Indices into each version; None if it lacks the line."""
    if len(sides) == 1:
        yield from ((n,) for n in range(len(sides[0])))
        return
    before, after = sides
    for same, i0, i1, j0, j1 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if same == "equal":
            yield from zip(range(i0, i1), range(j0, j1), strict=True)
        else:
            yield from ((i, None) for i in range(i0, i1))
            yield from ((None, j) for j in range(j0, j1))


def _files(
    codes: Sequence[Code], ids: Sequence[_Ids], texts: Sequence[Mapping[str, Mapping[int, str]]],
    weights: Sequence[Mapping[tuple[str, int], int]], sampled: bool,
) -> Iterator[_File]:  # fmt: skip
    most = max(weights[-1].values(), default=0) or 1
    whole = sum(weights[-1].values()) or 1
    inlined = Counter(name for i in codes[-1].instructions for name in {Path(at.file).name for at in i.where})
    for name in dict.fromkeys(name for side in texts for name in side):
        merged: dict[int, list[int | None]] = {}  # id: the line on each side
        for number, side in enumerate(ids):
            for (file, line), identity in side.items():
                if file == name:
                    merged.setdefault(identity, [None] * len(codes))[number] = line
        rows, total = [], 0
        for identity in sorted(merged):
            places = merged[identity]
            counts = [by.get((name, line), 0) if line else 0 for by, line in zip(weights, places, strict=True)]
            total += counts[-1]
            last = places[-1]
            text = texts[-1][name][last] if last else texts[0][name][places[0] or 0]
            change = "" if None not in places else "remove" if last is None else "add"
            figure = f"{counts[-1] / whole:.1%}" if sampled and counts[-1] else "" if sampled else _figure(counts)
            heat = f"{(counts[-1] / most) ** 0.5:.2f}" if counts[-1] else ""
            rows.append(_Row(identity, str(last or places[0]), text, change, figure, heat))
        summary = (
            f"{total} {'samples' if sampled else 'instructions'}" if total else f"{inlined[name]} instructions inlined"
        )
        yield _File(name, rows, summary, name == codes[-1].source)


def _figure(counts: Sequence[int]) -> str:
    if len({*counts}) == 1:
        return str(counts[0] or "")
    return " → ".join(map(str, counts)) if len(counts) > 1 else str(counts[0])


def _weights(code: Code, samples: Mapping[int, int] | None, source: str) -> dict[tuple[str, int], int]:
    """{(file, line): instructions or samples}. An instruction counts for its line in the `.cu`."""
    found: Counter[tuple[str, int]] = Counter()
    for i in code.instructions:
        weight = samples.get(i.address, 0) if samples is not None else 1
        if i.line and weight:
            found[Path(i.line.file).name, i.line.line] += weight
    return {(source if name == code.source else name, line): n for (name, line), n in found.items()}


# ---- instructions


def _instructions(code: Code, ids: _Ids, samples: Mapping[int, int] | None) -> Iterator[dict[str, Any]]:
    most = max(samples.values(), default=1) if samples else 1
    names = {name for name, _ in ids}
    whole = sum(samples.values()) or 1 if samples else 1
    for i in code.instructions:
        count = samples.get(i.address, 0) if samples else 0
        yield {
            "address": f"{i.address:x}" if code.language == "sass" else str(i.address),
            "text": i.text,
            "live": "" if i.live is None else i.live,
            "kind": _KINDS.get(kind(opcode_class(i)), ""),
            "lines": " ".join(str(n) for n in dict.fromkeys(_ids_of(i, code, ids, names))),
            "figure": f"{count / whole:.1%}" if count else "",
            "heat": f"{(count / most) ** 0.5:.2f}" if count else "",
        }


def _ids_of(i: Instruction, code: Code, ids: _Ids, names: set[str]) -> Iterator[int]:
    """The ids of its line in the `.cu` and then of its other source lines."""
    for at in [*([i.line] if i.line else []), *i.where]:
        if (found := ids.get((_name(at, code, names), at.line))) is not None:
            yield found


def _name(at: SourceLine, code: Code, names: set[str]) -> str:
    name = Path(at.file).name
    return name if name in names else next(iter(n for n in names if n.endswith(".cu")), name)


def _curve(code: Code, most: int) -> str:
    """Points of the curve of live registers: the maximum of each section of the code."""
    live = [i.live or 0 for i in code.instructions]
    section = -(-len(live) // _POINTS) or 1
    peaks = [max(live[n : n + section]) for n in range(0, len(live), section)]
    last = max(1, len(peaks) - 1)
    return " ".join(f"{1000 * n / last:.1f},{58 - 56 * peak / most:.1f}" for n, peak in enumerate(peaks))
