"""A problem's shape as text, as on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import SpecError
from .normalise import lengths_of, sizes_of
from .options import ARRAYS


def fields_of(shape: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Problem, from the arguments of `Problem.from_shape`. Raises SpecError for invalid text."""
    semantics = dict(given)
    parts = [part.strip() for part in shape.split(",")]
    heads = parts[1].split("/") if len(parts) > 1 else []
    widths = parts[-1].split("/")
    numbers = [*parts[:1], *heads, *parts[2:-1], *widths]
    if (
        len(parts) not in (4, 5) or len(heads) not in (1, 2) or len(widths) not in (1, 2)
        or not all(n.isdecimal() for n in numbers)
    ):  # fmt: skip
        raise SpecError(f"shape {shape!r} must be B,H,S,D or B,H,Sq,Sk,D, such as 1,12,1024,64 or 1,8/2,1024,64")
    if not int(heads[0]):
        raise SpecError(f"shape {shape!r}: H=0: a problem has at least one query head")
    lengths = [int(n) for n in parts[2:-1]]
    Hk, Dv = int(heads[-1]), int(widths[-1])
    if len(heads) == 2 and not Hk:
        raise SpecError(f"shape {shape!r}: Hk=0 key/value heads serve no query head")
    if len(widths) == 2 and not Dv:
        raise SpecError(f"shape {shape!r}: Dv=0: v must be at least 1 wide")
    sizes = {"B": int(parts[0]), "H": int(heads[0]), "Sq": lengths[0], "Sk": lengths[-1], "D": int(widths[0])}
    if isinstance(semantics.get("lengths"), str):
        semantics["lengths"] = lengths_of(semantics["lengths"])
    if pairs := semantics.get("lengths"):
        sizes |= {"B": len(pairs), "Sq": max(q for q, _ in pairs), "Sk": max(k for _, k in pairs)}
    for name, array in ARRAYS.items():
        if semantics.get(name) is True and array.shape_is_field:
            semantics[name] = array.shapes((sizes["B"], sizes["H"], sizes["Sq"], sizes["Sk"]))[0]
        elif isinstance(semantics.get(name), str):
            semantics[name] = sizes_of(name, semantics[name], {**sizes, "S": sizes["Sk"]})
    return {**sizes, "Hk": Hk, "Dv": Dv, **semantics}
