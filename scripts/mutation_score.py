"""The stored results of sampled mutations as a table: how many are noticed, by folder."""

from __future__ import annotations

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
        "Random mutations of Python files and kernels, and how many the tests notice. For each mutation the tests that",
        "execute its line, or launch its kernel, run, the cheapest first, for at most 40 s or 120 s. The second column",
        "also counts a mutation that these missed and others noticed, of `make test` or `make test-all`. A test that",
        "was written because of a survivor does not change its row, and later samples have another seed. Written from",
        "`scripts/mutation_score.jsonl` with `make mutants ARGS=--table`.",
        "",
        "| folder | mutations | noticed by tests of `make test` | with more tests | equivalent, not counted |",
        "| --- | --- | --- | --- | --- |",
        *(_line(folder, its_rows) for folder, its_rows in by_folder.items()),
        *(
            _line(f"**{group}, seed {seed}**", [r for r in every if (r["group"], r["seed"]) == (group, seed)])
            for group, seed in samples
        ),
        _line("**all**", every),
        "",
        "## Not noticed",
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
    before, after = (" ".join(row[name].split()) or "nothing" for name in ("before", "after"))
    return f"`{row['file']}`, {row['operator']}, `{before}` → `{after}` in `{row['context']}`"


def write() -> None:
    TABLE.write_text(text(jsonl.read(ROWS)))
