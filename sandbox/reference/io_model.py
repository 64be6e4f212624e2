"""Bytes that the algorithms move to and from HBM: the loads and stores of `flash` and `flash_backward`.

Caches are not modelled: a tile that is loaded twice counts twice, and each query head loads its keys and values
separately, also with grouped heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .semantics import Causal, causal_offset, check_tile, key_end, query_start

FP32 = 4  # bytes of one l, m, LSE or delta, and of an element of dQ_accum


@dataclass(frozen=True)
class HbmBytes:
    """Bytes read and written, by tensor."""

    read: Mapping[str, int]
    written: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes read plus bytes written."""
        return sum(self.read.values()) + sum(self.written.values())


def paper_block_sizes(smem_bytes: int, D: int, itemsize: int) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N) by the paper's rule for on-chip memory of `smem_bytes` and elements of `itemsize` bytes.

    M = smem_bytes // itemsize elements, BLOCK_N = B_c = ceil(M / 4D), BLOCK_M = B_r = min(B_c, D): the tiles of Q, K,
    V and O each use a quarter of the memory. The ceiling may exceed it by a row of each; S, P, l and m are not
    counted. Raises ValueError unless all three are positive and one element fits.

    Source: FlashAttention (Dao et al. 2022), Algorithm 1, line 1.
    """
    if D < 1 or itemsize < 1 or smem_bytes < itemsize:
        raise ValueError(f"smem_bytes={smem_bytes} must be at least itemsize={itemsize}, and both and D={D} positive")
    M = smem_bytes // itemsize
    BLOCK_N = -(-M // (4 * D))
    return min(BLOCK_N, D), BLOCK_N


def hbm_bytes(
    algorithm: str,
    *,
    B: int,
    H: int,
    Hk: int,
    Sq: int,
    Sk: int,
    D: int,
    itemsize: int,
    BLOCK_M: int,
    BLOCK_N: int,
    causal: Causal = False,
) -> HbmBytes:
    """HBM bytes of one forward call by "standard", "flash1" or "flash2", or of one backward call by "flash2_backward".

    "flash2_dkv" and "flash2_dq" are the two kernels of a backward without accumulation in memory: key tiles outside for
    dK and dV, query tiles outside for dQ. Tensors have `itemsize` bytes per element; l, m, LSE, delta and the dQ of
    "flash2_backward" four. The computation of delta is not included. "standard" ignores the tile. Partial
    tiles count their actual rows.
    Raises ValueError for an unknown algorithm or `causal`, a tile size below 1, or H % Hk ≠ 0.

    Source: FlashAttention (Dao et al. 2022), Theorem 2 and its proof, with exact terms in place of Θ; the backward:
    FlashAttention-2 (Dao 2023), Algorithm 2.
    """
    counts = {
        "standard": _standard, "flash1": _flash1, "flash2": _flash2,
        "flash2_backward": _flash2_backward, "flash2_dkv": _flash2_dkv, "flash2_dq": _flash2_dq,
    }  # fmt: skip
    if algorithm not in counts:
        raise ValueError(f"algorithm={algorithm!r} must be one of {', '.join(map(repr, counts))}")
    check_tile(BLOCK_M, BLOCK_N)
    if Hk < 1 or H % Hk:
        raise ValueError(f"H={H} query heads must be a multiple of Hk={Hk} key/value heads")
    offset = causal_offset(Sq, Sk, causal)
    head = counts[algorithm](Sq, Sk, D, itemsize, BLOCK_M, BLOCK_N, offset)
    return HbmBytes(
        read={name: B * H * n for name, n in head.read.items()},
        written={name: B * H * n for name, n in head.written.items()},
    )


def _standard(Sq: int, Sk: int, D: int, itemsize: int, BLOCK_M: int, BLOCK_N: int, offset: int) -> HbmBytes:
    """FlashAttention, Algorithm 0: three kernels that exchange S and P through HBM; causal saves nothing."""
    q, k, s = Sq * D * itemsize, Sk * D * itemsize, Sq * Sk * itemsize
    return HbmBytes(
        read={"Q": q, "K": k, "S": s, "P": s, "V": k},  # S = QKᵀ reads Q, K; softmax reads S; O = PV reads P, V
        written={"S": s, "P": s, "O": q},
    )


def _flash1(Sq: int, Sk: int, D: int, itemsize: int, BLOCK_M: int, BLOCK_N: int, offset: int) -> HbmBytes:
    """Each key tile loops over all query rows: Q, O, l, m are read and O, l, m written once per key tile."""
    q, k, row = Sq * D * itemsize, Sk * D * itemsize, Sq * FP32
    key_tiles = -(-Sk // BLOCK_N)
    return HbmBytes(
        read={"K": k, "V": k, "Q": key_tiles * q, "O": key_tiles * q, "l": key_tiles * row, "m": key_tiles * row},
        written={  # one more than reads: line 2 initialises O = 0, l = 0, m = −inf
            "O": (key_tiles + 1) * q,
            "l": (key_tiles + 1) * row,
            "m": (key_tiles + 1) * row,
        },
    )


def _flash2(Sq: int, Sk: int, D: int, itemsize: int, BLOCK_M: int, BLOCK_N: int, offset: int) -> HbmBytes:
    """Each query tile loops over the key tiles up to its diagonal: Q is read and O, LSE are written once."""
    q, k = Sq * D * itemsize, _visited_keys(Sq, Sk, BLOCK_M, BLOCK_N, offset) * D * itemsize
    return HbmBytes(read={"Q": q, "K": k, "V": k}, written={"O": q, "LSE": Sq * FP32})


def _flash2_dq(Sq: int, Sk: int, D: int, itemsize: int, BLOCK_M: int, BLOCK_N: int, offset: int) -> HbmBytes:
    """The same loop; dO, LSE and delta are read with Q, dQ is written once."""
    q, k = Sq * D * itemsize, _visited_keys(Sq, Sk, BLOCK_M, BLOCK_N, offset) * D * itemsize
    row = Sq * FP32
    return HbmBytes(read={"Q": q, "dO": q, "LSE": row, "delta": row, "K": k, "V": k}, written={"dQ": q})


def _visited_keys(Sq: int, Sk: int, BLOCK_M: int, BLOCK_N: int, offset: int) -> int:
    ends = (key_end(m0, BLOCK_M, Sq, Sk, offset) for m0 in range(0, Sq, BLOCK_M))
    return sum(min(-(-end // BLOCK_N) * BLOCK_N, Sk) for end in ends)


def _flash2_dkv(Sq: int, Sk: int, D: int, itemsize: int, BLOCK_M: int, BLOCK_N: int, offset: int) -> HbmBytes:
    """Each key tile loops over the queries from its diagonal on: K, V are read, and dK, dV (initially 0, on chip)
    written once."""
    rows, k = _visited_queries(Sq, Sk, BLOCK_M, BLOCK_N, offset), Sk * D * itemsize
    q, row = rows * D * itemsize, rows * FP32
    return HbmBytes(read={"K": k, "V": k, "Q": q, "dO": q, "LSE": row, "delta": row}, written={"dK": k, "dV": k})


def _flash2_backward(Sq: int, Sk: int, D: int, itemsize: int, BLOCK_M: int, BLOCK_N: int, offset: int) -> HbmBytes:
    """The same loop, in which dQ is read, added to and written back."""
    dkv = _flash2_dkv(Sq, Sk, D, itemsize, BLOCK_M, BLOCK_N, offset)
    sums = _visited_queries(Sq, Sk, BLOCK_M, BLOCK_N, offset) * D * FP32
    return HbmBytes(read={**dkv.read, "dQ": sums}, written={**dkv.written, "dQ": sums})


def _visited_queries(Sq: int, Sk: int, BLOCK_M: int, BLOCK_N: int, offset: int) -> int:
    return sum(Sq - query_start(n0, BLOCK_M, Sq, offset) for n0 in range(0, Sk, BLOCK_N))
