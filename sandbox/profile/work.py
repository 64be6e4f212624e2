"""Operations and memory traffic of a launch of one entry point: the minimum, and the IO model's.

Derived from the tensors in the entry point's `args`: one with dK loops over the queries of each key tile, one with only
dQ over the keys of each query tile, and one with dQ and dQ_accum converts the accumulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..core import registry
from ..core.dtypes import ITEMSIZE
from ..core.kernel import Entry
from ..core.operation import Operation
from ..core.problem import Problem
from ..core.tile import Tile
from ..reference import HbmBytes, hbm_bytes

FP32 = 4  # bytes


@dataclass(frozen=True)
class Work:
    """Operations by the usual convention; `least`: every tensor once; `model`: what the loops load and store."""

    flops: int
    least: HbmBytes
    model: HbmBytes
    declared: bool = False  # the bytes are those that the spec of an operation declares


def work_of(entry: Entry, problem: Problem, tile: Tile) -> Work:
    """The work of one launch. Without BLOCK_M or BLOCK_N in the tile, a tile spans all rows."""
    p, names = problem, set(entry.args)
    if "row_tiles" in entry.numbers or ("splits" in entry.numbers and "Q_map" not in names):
        return _packed(entry, p, tile)
    if "delta" in names and "LSE" not in names:
        least = _once(p, read=("dO", "O"), written=("delta",))
        return Work(0, least, least)
    if not names & {"Q", "dQ", "LSE", "block_map"}:  # clears or computes a few numbers for other entry points
        few = HbmBytes(
            {}, {name: FP32 * many(p, tile) for name, many in entry.numbers.items()} or {entry.args[0]: FP32}
        )
        return Work(0, few, few)
    if {"dQ", "dQ_accum"} <= names:
        least = _once(p, read=("dQ_accum",), written=("dQ",))
        return Work(0, least, least)
    if "dK" in names:
        sums = names & {"dQ", "dQ_accum"}
        algorithm, products = ("flash2_backward", 5) if sums else ("flash2_dkv", 4)
    else:
        algorithm, products = ("flash2_dq", 3) if "dQ" in names else ("flash2", 2)
    model = hbm_bytes(
        algorithm, B=p.B, H=p.H, Hk=p.Hk, Sq=p.Sq, Sk=p.Sk, D=p.D, itemsize=p.itemsize, causal=p.causal,
        BLOCK_M=tile.get("BLOCK_M", p.Sq or 1), BLOCK_N=tile.get("BLOCK_N", 1),
    )  # fmt: skip
    if "dQ_accum" in names:  # reductions in L2: the sums are written but not read
        read, written = dict(model.read), dict(model.written)
        del read["dQ"]
        written["dQ_accum"] = written.pop("dQ")
        model = HbmBytes(read, written)
    least = _once(p, read=tuple(name for name in model.read if name not in model.written), written=tuple(model.written))
    return Work(p.flops * products // 2, least, model)


def _packed(entry: Entry, p: Problem, tile: Tile) -> Work:
    """The work of a forward with packed GQA rows: each of the `row_tiles` tiles of a key/value head reads all keys of
    that head once. With split-KV, the blocks of a grid of `splits` each read Q and write partial results, the scratch
    "partials", for the combine kernel."""
    owner = registry.entry_owner(entry.name)
    rows, keys = p.batches * p.H * p.rows[0], p.B * p.Hk * p.Sk * p.key_itemsize
    floats = owner.scratch["partials"](p, tile)[0] if "partials" in owner.scratch else 0
    parts = {"partials": FP32 * floats} if floats else {}
    results = {"O": rows * p.Dv * ITEMSIZE[p.dtype_of("O")], "LSE": FP32 * rows}
    if "Q" not in entry.args or "row_tiles" not in entry.numbers:  # the combine kernel
        combined = HbmBytes(parts, results)
        return Work(0, combined, combined)
    tiles = entry.numbers["row_tiles"](p, tile)
    q, k, v = rows * p.D * p.itemsize, keys * p.D, 0 if p.latent else keys * p.Dv
    # Blocks that read a row of Q: an upper bound if they are assigned on the device. With stream-K, a grid of `splits`
    # blocks shares all batch entries, and every entry but the first may begin in a block of others.
    blocks = math.prod(entry.grid(p, tile)) // max(tiles * p.Hk, 1) if "splits" in entry.numbers else p.batches
    if "entries" in entry.numbers and p.key_lengths and blocks == entry.numbers["splits"](p, tile):
        blocks += entry.numbers["entries"](p, tile) - 1
    written = parts or results
    model = HbmBytes({"Q": blocks * q // max(p.batches, 1), "K": tiles * k, "V": tiles * v}, written)
    return Work(p.flops, HbmBytes({"Q": q, "K": k, "V": v}, written), model)


def work_of_operation(operation: Operation, entry: Entry, problem: Any) -> Work:
    """The work of one launch of an operation's entry, as its spec declares it: every tensor in its `args` once."""
    read = {n: t.nbytes(problem) for n, t in operation.inputs.items()}
    written = {n: t.nbytes(problem) for n, t in operation.outputs.items()}
    named = {name.removesuffix("_map") for name in entry.args}
    declared = HbmBytes({n: b for n, b in read.items() if n in named}, {n: b for n, b in written.items() if n in named})
    return Work(operation.flops_of(problem), declared, declared, declared=True)


def _once(p: Problem, read: tuple[str, ...], written: tuple[str, ...]) -> HbmBytes:
    return HbmBytes({name: _nbytes(name, p) for name in read}, {name: _nbytes(name, p) for name in written})


def _nbytes(name: str, p: Problem) -> int:
    rows = p.B * p.H * p.Sq
    if name in ("LSE", "delta"):
        return 4 * rows
    if name in ("K", "V", "dK", "dV"):
        return p.B * p.Hk * p.Sk * p.D * p.key_itemsize
    return rows * p.D * (4 if name == "dQ_accum" else ITEMSIZE[p.dtype_of(name)])
