"""The tile configuration of a kernel: named numbers such as BLOCK_M."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .errors import SpecError
from .normalise import integer


class Tile(Mapping[str, int]):
    """The named numbers that define a kernel's tiles, e.g. `Tile(BLOCK_M=64, BLOCK_N=32)`; read as `tile.BLOCK_M`.

    Immutable and hashable. Each number reaches the `.cu` as a macro of its name.
    """

    __slots__ = ("_hash", "_numbers")
    _numbers: dict[str, int]
    _hash: int

    def __init__(self, **numbers: int):
        for name, value in numbers.items():
            if not name.isupper() or not name.isidentifier():
                raise SpecError(f"tile: {name!r} must be an upper-case identifier: it becomes a macro")
            numbers[name] = integer(f"tile: {name}", value, 1)
        object.__setattr__(self, "_numbers", numbers)
        object.__setattr__(self, "_hash", hash(tuple(sorted(numbers.items()))))

    @classmethod
    def parse(cls, text: str) -> Tile:
        """`"BLOCK_M=64,BLOCK_N=32"` -> Tile. Raises SpecError naming the part it cannot read."""
        numbers: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.replace(" ", ",").split(","))):
            name, equals, value = part.partition("=")
            if not equals or not value.strip().isdecimal():
                raise SpecError(f"tile: {part!r} is not NAME=number, as in BLOCK_M=64,BLOCK_N=32")
            if name.strip() in numbers:
                raise SpecError(f"tile: {name.strip()} is set twice in {text!r}")
            numbers[name.strip()] = int(value)
        return cls(**numbers)

    def __getattr__(self, name: str) -> int:
        try:
            return self._numbers[name]
        except KeyError:
            raise AttributeError(f"tile has no {name}: it has {', '.join(self._numbers)}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a tile is immutable: make a new one to change {name}")

    def __getitem__(self, name: str) -> int:
        return self._numbers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:
        return _tile, (self._numbers,)

    def __repr__(self) -> str:
        return f"Tile({self})"

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self._numbers.items())


def _tile(numbers: dict[str, int]) -> Tile:
    return Tile(**numbers)
