"""The stored results of sampled mutations as a table: how many the tests kill, by folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mutation import ROOT

from sandbox.core import jsonl

ROWS = Path(__file__).with_name("mutation_score.jsonl")
TABLE = ROOT / "docs" / "mutation-score.md"
Row = dict[str, Any]


def counted(rows: Iterable[Row]) -> list[Row]:
    """One row for each mutation, with its result in each tier: `test`, and `all`, which includes it."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in ("file", "begin", "operator", "before", "after", "seed"))
        one = found.setdefault(key, {**row, "noticed": set(), "equivalent": ""})
        one["equivalent"] = one["equivalent"] or row.get("equivalent", "")
        if row["outcome"] == "noticed":
            one["noticed"] |= {row["tier"], "all"}
    return list(found.values())


def folder_of(row: Row) -> str:
    """`sandbox/verify`, `kernels_cu` and so on."""
    parent = Path(row["file"]).parent.parts
    return "/".join(parent[:2])


def text(rows: Iterable[Row]) -> str:
    """The page."""
    every = counted(rows)
    by_folder: dict[str, list[Row]] = {}
    for row in sorted(every, key=lambda row: (row["group"], folder_of(row))):
        by_folder.setdefault(folder_of(row), []).append(row)
    samples = sorted({(row["group"], row["seed"]) for row in every})
    lines = [
        "# Mutation score",
        "",
        "Random mutations of Python files (host) and kernels, and how many the tests kill. Each mutation is tested by",
        "the tests that execute its line or launch its kernel, the cheapest first, until their recorded times without",
        "a mutation add up to 40 s in some runs, to 120 s in others (not recorded). The column “killed” counts",
        "the mutations that these tests kill, the next column also those that only other tests of `make test` or",
        "`make test-all` kill. Each seed is one random sample, drawn after the tests existed; tests that are written",
        "later do not change its numbers. `sandbox` is `sandbox/__init__.py`. Written from",
        "`scripts/mutation_score.jsonl` with `make mutants ARGS=--table`.",
        "",
        "| folder | mutations | killed | killed with more tests | equivalent, not counted |",
        "| --- | --- | --- | --- | --- |",
        *(_line(folder, its_rows) for folder, its_rows in by_folder.items()),
        *(
            _line(f"**{group}, seed {seed}**", [r for r in every if (r["group"], r["seed"]) == (group, seed)])
            for group, seed in samples
        ),
        _line("**all**", every),
        "",
        "## Survived",
        "",
        *(f"- {_described(row)}" for row in every if not row["equivalent"] and not row["noticed"]),
        "",
        "## Equivalent",
        "",
        *(f"- {_described(row)}: {row['equivalent']}" for row in every if row["equivalent"]),
    ]
    return "\n".join(lines) + "\n"


def _line(name: str, rows: list[Row]) -> str:
    real = [row for row in rows if not row["equivalent"]]
    test, complete = (sum(tier in row["noticed"] for row in real) for tier in ("test", "all"))
    return f"| {name} | {len(real)} | {test} | {complete} | {len(rows) - len(real)} |"


def _described(row: Row) -> str:
    place = f" in `{row['context']}`" if row["context"] else ""  # none if the change begins with a line break
    return f"`{row['file']}`, {row['operator']}, {_change(row)}{place}"


def _change(row: Row) -> str:
    """What the mutation changes. The row has the characters that differ; a part of a word is shown as the word."""
    before, after = (" ".join(row[name].split()) for name in ("before", "after"))
    if not before or not after:
        return f"`{after}` inserted" if after else f"`{before}` removed"
    found = re.search(rf"(\w*){re.escape(before)}(\w*)", row["context"]) if before[0].isalpha() else None
    start, end = found.groups() if found else ("", "")
    return f"`{start}{before}{end}` → `{start}{after}{end}`"


def write() -> None:
    TABLE.write_text(text(jsonl.read(ROWS)))
