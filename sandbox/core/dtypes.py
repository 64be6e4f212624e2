"""Dtypes of Q, K, V and O, and the descale factors of float8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import SpecError
from .normalise import number

FLOAT8 = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0}  # the largest number of each
OF_16_BITS = ("float16", "bfloat16")
ITEMSIZE = {"float32": 4, **dict.fromkeys(OF_16_BITS, 2), **dict.fromkeys(FLOAT8, 1)}  # bytes per element
FLOAT8_ARCH = (8, 9)  # the first compute capability whose tensor cores multiply float8

Descale = tuple[float | tuple[int, ...], ...]  # of q, k and v: a number, or the shape of a tensor of numbers


def own_name(dtype: str) -> str:
    """This project's name of a dtype: PyTorch's "float8_e4m3fn" is "float8_e4m3" here."""
    return "float8_e4m3" if dtype == "float8_e4m3fn" else dtype


def normalise_dtype(name: str, dtype: str) -> str:
    """`own_name` of a dtype. Raises SpecError with the name of the argument if it is not supported."""
    found = own_name(dtype)
    if found not in ITEMSIZE:
        raise SpecError(f"{name}={dtype!r} is not supported: choose one of {', '.join(ITEMSIZE)}")
    return found


def normalise(dtype: str, kv_dtype: str, v_dtype: str, out_dtype: str) -> dict[str, str]:
    """The four fields of a Problem, "" for a default. Raises SpecError for a combination that no kernel supports."""
    dtype = normalise_dtype("dtype", dtype)
    kv_dtype = _normalise_kv_dtype(dtype, kv_dtype)
    v_dtype, out_dtype = _normalise_v_dtype(kv_dtype or dtype, v_dtype), _normalise_out_dtype(dtype, out_dtype)
    return {"dtype": dtype, "kv_dtype": kv_dtype, "v_dtype": v_dtype, "out_dtype": out_dtype}


def _normalise_kv_dtype(dtype: str, kv_dtype: str) -> str:
    """ "" if k and v have q's dtype, which is `dtype`."""
    if not kv_dtype or (found := normalise_dtype("kv_dtype", kv_dtype)) == dtype:
        return ""
    if dtype not in OF_16_BITS or found not in FLOAT8:
        raise SpecError(
            f"kv_dtype={kv_dtype!r} is not supported with dtype={dtype!r}: k and v may have another dtype than q only "
            "as float8 with q in float16 or bfloat16 (omit kv_dtype)"
        )
    return found


def _normalise_v_dtype(dtype: str, v_dtype: str) -> str:
    """ "" if v has k's dtype, which is `dtype`."""
    if not v_dtype or (found := normalise_dtype("v_dtype", v_dtype)) == dtype:
        return ""
    if dtype not in FLOAT8 or found not in FLOAT8:
        raise SpecError(
            f"v_dtype={v_dtype!r} is not supported with {dtype} keys: v may have another dtype than k only if both are "
            "float8 (omit v_dtype)"
        )
    return found


def default_out_dtype(dtype: str) -> str:
    """The dtype of out for q of this dtype."""
    return "bfloat16" if dtype in FLOAT8 else dtype


def _normalise_out_dtype(dtype: str, out_dtype: str) -> str:
    """ "" if it is the default out dtype."""
    if not out_dtype or out_dtype == default_out_dtype(dtype):
        return ""
    if dtype not in FLOAT8 or out_dtype not in ("float32", *OF_16_BITS):
        choice = "float32, float16 or bfloat16" if dtype in FLOAT8 else f"{dtype}, the dtype of q"
        raise SpecError(f"out_dtype={out_dtype!r} is not supported with dtype={dtype!r}: choose {choice}")
    return out_dtype


def normalise_descale(descale: Any, dtype: str, B: int, H: int, Hk: int) -> Descale:
    """() if all three factors are 1. `dtype`: k's. Raises SpecError if `descale` does not have three elements or k is
    not float8."""
    if not descale:
        return ()
    if dtype not in FLOAT8:
        raise SpecError(
            f"descale={descale!r} is not supported with {dtype}, only with float8: multiply q, k and v by their factors"
        )
    if not isinstance(descale, Sequence) or len(descale) != 3:
        raise SpecError(f"descale={descale!r} must have three elements: the factors of q, k and v")
    found: list[float | tuple[int, ...]] = []
    for name, one, heads in zip("qkv", descale, (H, Hk, Hk), strict=True):
        if not isinstance(one, Sequence):
            found.append(number(f"descale of {name}", one))
            if found[-1] <= 0:  # type: ignore[operator]
                raise SpecError(f"descale of {name} is {one!r}: it must be positive")
            continue
        shape = (*(1,) * (2 - len(one)), *one)
        if len(shape) != 2 or any(n not in (1, most) for n, most in zip(shape, (B, heads), strict=True)):
            raise SpecError(f"descale of {name} has shape {tuple(one)}: it must broadcast to (B, heads) = {(B, heads)}")
        found.append(shape)
    return () if found == [1.0, 1.0, 1.0] else tuple(found)


def described(dtype: str, kv_dtype: str, v_dtype: str, out_dtype: str) -> str:
    """The dtypes as text, such as "float16 kv=float8_e4m3" or "float8_e4m3/float8_e5m2->float32": q's, then kv_dtype,
    v_dtype and out_dtype where they are set."""
    keys = kv_dtype and f" kv={kv_dtype}"
    return f"{dtype}{keys}{v_dtype and '/' + v_dtype}{out_dtype and '->' + out_dtype}"


def described_descale(descale: Descale) -> str:
    return "descale=" + ",".join(f"{n:g}" if isinstance(n, float) else "x".join(map(str, n)) for n in descale)
