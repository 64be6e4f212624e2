"""Mutations of Python files, with the operators of cosmic-ray."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from mutation import Change

# Without effect here: `NoOp`; both variable operators need the name of a variable.
_EXCLUDED = ("NoOp", "VariableReplacer", "VariableInserter")
Position = tuple[int, int]  # (line from 1, column from 0)


@dataclass(frozen=True)
class _Site:
    begin: Position
    end: Position


def draw(text: str, sample: random.Random) -> Change | None:
    """A random mutation of a Python text: a random place, then one of the operators that apply there. None if there is
    no place. Annotations are not mutated: they are not evaluated."""
    places: dict[_Site, list[tuple[str, int]]] = {}
    ignored, nodes = list(_annotations(text)), list(ast_nodes(get_ast(text)))
    for name in sorted(plugins.operator_names()):
        if not name.endswith(_EXCLUDED):
            for occurrence, site in enumerate(_sites(name, nodes)):
                if not any(begin <= site.begin and site.end <= end for begin, end in ignored):
                    places.setdefault(site, []).append((name, occurrence))
    while places:
        site = sample.choice(sorted(places, key=lambda site: (site.begin, site.end)))
        name, occurrence = sample.choice(places.pop(site))
        try:
            mutated = mutate_code(text, plugins.get_operator(name)(), occurrence)
        except AttributeError:  # cosmic-ray's ExceptionReplacer: a dotted name in a tuple after `except`
            continue
        if mutated is not None and mutated != text and _parses(mutated):
            return _change(name.rpartition("/")[2], text, mutated)
    return None


def _sites(name: str, nodes: Sequence[Any]) -> Iterator[_Site]:
    """The places of an operator, in the order of its occurrences."""
    operator = plugins.get_operator(name)()
    for node in nodes:
        for begin, end in operator.mutation_positions(node):
            yield _Site(begin, end)


def _annotations(text: str) -> Iterator[tuple[Position, Position]]:
    for node in ast.walk(ast.parse(text)):
        for name in ("annotation", "returns"):
            found = getattr(node, name, None)
            if isinstance(found, ast.expr) and found.end_lineno is not None and found.end_col_offset is not None:
                yield (found.lineno, found.col_offset), (found.end_lineno, found.end_col_offset)


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _change(operator: str, before: str, after: str) -> Change:
    """The smallest difference of two texts."""
    begin = _common(before, after)
    tail = _common(before[begin:][::-1], after[begin:][::-1])
    return Change(operator, begin, before[begin : len(before) - tail], after[begin : len(after) - tail])


def _common(a: str, b: str) -> int:
    """The length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
