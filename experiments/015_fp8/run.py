"""The error of float8 attention with several inputs, scales, and a rotation of q and k. See README.md.

python experiments/015_fp8/run.py            no GPU; two minutes; appends rows to results.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import sandbox
from sandbox.core import jsonl
from sandbox.reference import attention, naive

HERE = Path(__file__).resolve().parent
Array = NDArray[Any]
B, H, S = 2, 4, 1024
DTYPES = {"float8_e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "float8_e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


def normal(rng: np.random.Generator, D: int) -> Array:
    return rng.standard_normal((B, H, S, D), np.float32)


def outliers(rng: np.random.Generator, D: int) -> Array:
    """FlashAttention-3, section 4.3: one number in a thousand is ten times as large."""
    wide = 10 * rng.standard_normal((B, H, S, D), np.float32) * (rng.random((B, H, S, D)) < 0.001)
    return rng.standard_normal((B, H, S, D), np.float32) + wide


def channels(rng: np.random.Generator, D: int) -> Array:
    """As in language models: a few columns are twenty times as large as the others, different ones in each head."""
    x = rng.standard_normal((B, H, S, D), np.float32)
    for h in range(H):
        x[:, h, :, rng.choice(D, max(1, D // 64), replace=False)] *= 20
    return x


INPUTS: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "normal": normal, "outliers": outliers, "channels": channels
}  # fmt: skip


def quantise(x: Array, dtype: str, per_head: bool) -> tuple[Array, Array]:
    """x in `dtype` and its descale factor: the maximum of the tensor, or of a head, becomes that of the dtype."""
    kind, most = DTYPES[dtype]
    top = abs(x).max(axis=(2, 3) if per_head else None, keepdims=True).reshape((B, H) if per_head else (1, 1))
    descale = (top / most).astype(np.float32)
    return (x / descale[..., None, None]).astype(kind), np.ascontiguousarray(np.broadcast_to(descale, (B, H)))


def measure() -> Iterator[dict[str, Any]]:
    """One row per combination. The error of O is relative to the RMS of the float64 O of the unrounded inputs."""
    for D in (64,):
        for inputs, make in INPUTS.items():
            rng = np.random.default_rng(15)
            q, k, v = make(rng, D), make(rng, D), normal(rng, D)
            expected, _ = attention(q, k, v)
            size = float(np.sqrt((expected**2).mean()))

            def row(out: Array, **fields: Any) -> dict[str, Any]:
                off = np.asarray(out, np.float64) - expected  # noqa: B023
                error = float(np.sqrt((off**2).mean())) / size  # noqa: B023
                return {"D": D, "inputs": inputs, **fields, "rms": error, "most": float(abs(off).max()) / size}  # noqa: B023

            yield row(naive(q, k, v, dtype="bfloat16"), dtype="bfloat16", scales="", rotated=False, by="naive")
            for dtype in DTYPES:
                for scales in ("tensor", "head"):
                    for rotated in (False, True):
                        own = sandbox.rotate(q, k) if rotated else (q, k)
                        (Q, dq), (K, dk), (V, dv) = (quantise(x, dtype, scales == "head") for x in (*own, v))
                        how = {"dtype": dtype, "scales": scales, "rotated": rotated}
                        out = naive(Q, K, V, dtype=dtype, descale=(dq, dk, dv))
                        yield row(out, **how, by="naive")
                        if inputs == "outliers" and scales == "tensor":
                            out = sandbox.attention(Q, K, V, descale=(dq, dk, dv))
                            yield row(out, **how, by="kernel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results.jsonl", help="append rows to this file")
    out = parser.parse_args().out
    for row in measure():
        jsonl.append(out, row)
        how = f"{row['dtype']} {row['scales']} {'rotated' if row['rotated'] else ''} {row['by']}"
        print(f"D{row['D']:<4} {row['inputs']:9} {how:40} rms {row['rms']:.2%}  largest {row['most']:.2%}", flush=True)


if __name__ == "__main__":
    main()
