"""What a kernel is asked: shapes, dtype and semantics of one attention call."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import SpecError
from .integers import integer

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes an element
Causal = Literal[False, "bottom-right", "top-left"]


def normalise_causal(causal: bool | str) -> Causal:
    """`causal=` as people write it -> the alignment it names. True is "bottom-right"."""
    if causal is False or causal is None:
        return False
    if causal is True or causal == "bottom-right":
        return "bottom-right"
    if causal == "top-left":
        return "top-left"
    raise SpecError(f'causal={causal!r} is not known: choose False, True (= "bottom-right") or "top-left"')


@dataclass(frozen=True)
class Problem:
    """Shapes, dtype and semantics of one attention call.

    q, o: (B, H, Sq, D); k, v: (B, Hk, Sk, D); query head h reads key/value head h // (H / Hk).
    `scale` None means 1/sqrt(D). `alignment`: bytes, at most 16, that the address of every row of q, k and v, and in
    a backward of do and o, is a multiple of. `mappable`: their strides are such as a tensor map takes, positive, or 0
    in B or H. Raises SpecError naming the value that makes no sense.
    """

    B: int
    H: int
    Sq: int
    Sk: int
    D: int
    Hk: int = 0  # 0: as many as H
    dtype: str = "float32"
    causal: Causal = False
    scale: float = field(default=None)  # type: ignore[assignment]  # None: 1/sqrt(D)
    alignment: int = 16
    mappable: bool = True

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name, least in (("B", 0), ("H", 0), ("Sq", 0), ("Sk", 0), ("Hk", 0), ("D", 1)):
            set_(self, name, integer(name, getattr(self, name), least))
        if self.dtype not in ITEMSIZE:
            raise SpecError(f"dtype={self.dtype!r} is not supported: choose one of {', '.join(ITEMSIZE)}")
        if self.Hk == 0:
            set_(self, "Hk", self.H)
        if self.H and self.H % self.Hk:
            raise SpecError(f"H={self.H} query heads are not a multiple of Hk={self.Hk} key/value heads")
        set_(self, "causal", normalise_causal(self.causal))
        try:
            set_(self, "scale", 1.0 / math.sqrt(self.D) if self.scale is None else float(self.scale))
        except (TypeError, ValueError):
            raise SpecError(f"scale={self.scale!r} must be a number") from None
        if not math.isfinite(self.scale):
            raise SpecError(f"scale={self.scale!r} must be finite")

    @classmethod
    def from_shape(cls, shape: str, **semantics: Any) -> Problem:
        """`"B,H,S,D"` or `"B,H,Sq,Sk,D"`, H also as H/Hk, and the other fields by name."""
        parts = [part.strip() for part in shape.split(",")]
        heads = parts[1].split("/") if len(parts) > 1 else []
        numbers = [*parts[:1], *heads, *parts[2:]]
        if len(parts) not in (4, 5) or len(heads) not in (1, 2) or not all(n.isdecimal() for n in numbers):
            raise SpecError(f"shape {shape!r} must be B,H,S,D or B,H,Sq,Sk,D, such as 1,12,1024,64 or 1,8/2,1024,64")
        lengths = [int(n) for n in parts[2:-1]]
        Hk = int(heads[-1])
        if len(heads) == 2 and not Hk:
            raise SpecError(f"shape {shape!r}: Hk=0 key/value heads serve no query head")
        return cls(int(parts[0]), int(heads[0]), lengths[0], lengths[-1], int(parts[-1]), Hk=Hk, **semantics)

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return ITEMSIZE[self.dtype]

    @property
    def diagonal(self) -> int:
        """Query i sees keys j <= i + diagonal (when causal)."""
        return self.Sk - self.Sq if self.causal == "bottom-right" else 0

    @property
    def visible_pairs(self) -> int:
        """How many (query, key) pairs one head has to score."""
        if not self.causal:
            return self.Sq * self.Sk
        return sum(min(max(i + self.diagonal + 1, 0), self.Sk) for i in range(self.Sq))

    @property
    def flops(self) -> int:
        """Forward floating-point operations by the field's rule: 4·B·H·Sq·Sk·D, half of it for causal."""
        full = 4 * self.B * self.H * self.Sq * self.Sk * self.D
        return full // 2 if self.causal else full

    def flops_of(self, computes: str) -> int:
        """`flops`, or 2.5 times as many for a "backward": five matrix products instead of two."""
        return {"forward": self.flops, "backward": self.flops * 5 // 2}.get(computes, 0)

    @property
    def variant(self) -> str:
        """What of it the compiler sees: head width, dtype, mask."""
        mask = {False: "", "bottom-right": " causal", "top-left": " causal-top-left"}[self.causal]
        return f"D{self.D} {self.dtype}{mask}"

    def __str__(self) -> str:
        heads = f"H{self.H}" if self.Hk == self.H else f"H{self.H}/{self.Hk}"
        lengths = f"S{self.Sq}" if self.Sq == self.Sk else f"S{self.Sq}x{self.Sk}"
        return f"B{self.B} {heads} {lengths} {self.variant}"
