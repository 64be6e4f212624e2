"""Operations and bytes of entry points against numbers computed by hand."""

from __future__ import annotations

import pytest

from sandbox.core import registry
from sandbox.profile.work import Work, work_of
from sandbox.spec import Problem, Tile

P = Problem(1, 2, 8, 8, 16, Hk=1, dtype="float16")
TILE = Tile(BLOCK_M=4, BLOCK_N=4)
Q, K, ROW, SUMS = 2 * 8 * 16 * 2, 8 * 16 * 2, 4 * 2 * 8, 4 * 2 * 8 * 16  # bytes of Q, K, LSE, a dQ in fp32
FORWARD = 4 * 2 * 8 * 8 * 16  # operations


def work(name: str, tile: Tile = TILE) -> Work:
    return work_of(registry.entry_owner(name).entry(name), P, tile)


def test_a_forward() -> None:
    w = work("fwd_minimal")
    assert w.flops == FORWARD
    assert (w.least.read, w.least.written) == ({"Q": Q, "K": K, "V": K}, {"O": Q, "LSE": ROW})
    assert w.model.read == {"Q": Q, "K": 2 * 2 * K, "V": 2 * 2 * K}  # two query tiles of each of two heads


@pytest.mark.parametrize("kernel", ["bwd_minimal", "bwd_block2d"])
def test_a_backward_in_two_passes(kernel: str) -> None:
    """S, dP, dV and dK by key tile; S and dP again, and dQ, by query tile."""
    dkv, dq = work(kernel), work(f"{kernel}_dq")
    assert (dkv.flops, dq.flops) == (FORWARD * 2, FORWARD * 3 // 2)
    assert dkv.least.written == {"dK": K, "dV": K}
    assert dkv.model.read["Q"] == 2 * Q
    assert dq.model.written == dq.least.written == {"dQ": Q}
    assert dq.model.read["LSE"] == dq.least.read["LSE"] == ROW


def test_a_backward_with_dq_accum() -> None:
    """Each of two key tiles adds to dQ_accum for every query; the postprocess kernel converts it."""
    w = work("bwd_mma")
    assert w.flops == P.flops_of("backward")
    assert w.model.written["dQ_accum"] == 2 * SUMS
    assert w.least.written == {"dK": K, "dV": K, "dQ_accum": SUMS}
    assert set(w.model.read) == set(w.least.read) == {"Q", "K", "V", "dO", "LSE", "delta"}
    converted = work("bwd_mma_postprocess")
    assert (converted.flops, converted.model.read, converted.model.written) == (0, {"dQ_accum": SUMS}, {"dQ": Q})


def test_entry_points_that_prepare_others() -> None:
    for name in ("fwd_wgmma_clear", "bwd_wgmma_scheduler"):
        kernel = registry.entry_owner(name)
        w = work_of(kernel.entry(name), P, kernel.tiles[1])
        assert (w.flops, w.model.read, w.model) == (0, {}, w.least)
        assert w.model.total > 0 < Q


def test_split_kv_packed() -> None:
    """Four query heads of a group in one tile: keys are read once; the partial results of two splits are combined."""
    p, tile = (
        Problem(1, 4, 1, 128, 16, Hk=1, dtype="float16"),
        Tile(BLOCK_M=16, BLOCK_N=16, WARPS=1, STAGES=2, BLOCKS=1, CLUSTER=1),
    )
    kernel = registry.get("fwd_decode")
    splits, q, k = kernel.numbers["splits"](p, tile), 4 * 16 * 2, 128 * 16 * 2
    assert splits > 1
    parts = {"partials": 4 * 4 * splits * (16 + 2)}
    w, merge = (work_of(entry, p, tile) for entry in kernel.entries)
    assert (w.model.read, w.model.written) == ({"Q": splits * q, "K": k, "V": k}, parts)
    assert (w.least.read, w.flops) == ({"Q": q, "K": k, "V": k}, 4 * 4 * 128 * 16)
    assert (merge.flops, merge.model.read, merge.model.written) == (0, parts, {"O": q, "LSE": 4 * 4})
    alone = work_of(kernel, p, Tile(**{**tile, "WARPS": 8}))
    assert alone.model.written == {"O": q, "LSE": 4 * 4}


def test_split_kv_with_key_lengths_packed() -> None:
    """Stream-K: the blocks share all batch entries, each of which may begin in a block that also has others."""
    kernel = registry.get("fwd_decode")
    p = Problem(2, 4, 1, 128, 16, Hk=2, dtype="float16", key_lengths=True)
    tile = Tile(BLOCK_M=16, BLOCK_N=16, WARPS=1, STAGES=2, BLOCKS=3, CLUSTER=1)
    w, merge = (work_of(entry, p, tile) for entry in kernel.entries)
    most = kernel.grid(p, tile)[2] + p.B
    parts = {"partials": most * 4 * (16 + 2) * 4}
    assert parts["partials"] == 4 * kernel.scratch["partials"](p, tile)[0]
    assert (w.model.read["Q"], w.model.read["K"]) == ((most - 1) * 4 * 16 * 2, 2 * 2 * 128 * 16 * 2)
    assert (w.model.written, merge.model.read) == (parts, parts)


def test_packed_rows_alone() -> None:
    """32 packed rows per key/value head are two tiles of 16. Each tile reads the keys once; no combine kernel."""
    kernel = registry.get("fwd_decode_wgmma")
    p = Problem(2, 16, 4, 128, 16, Hk=2, dtype="float16", causal="bottom-right")
    w = work_of(kernel, p, next(t for t in kernel.tiles if t.BLOCK_M == 16))
    q, k = 2 * 16 * 4 * 16 * 2, 2 * 2 * 128 * 16 * 2
    assert (w.model.read, w.model.written) == ({"Q": q, "K": 2 * k, "V": 2 * k}, {"O": q, "LSE": 4 * 2 * 16 * 4})
    assert w.least.read == {"Q": q, "K": k, "V": k}


@pytest.mark.parametrize("name", list(registry.kernels()))
def test_every_entry_has_its_work(name: str) -> None:
    kernel = registry.get(name)
    p = kernel.adapted(Problem(1, 2, 8, 64, 64, Hk=1, dtype=kernel.dtypes[0]))
    for entry in kernel.entries:
        w = work_of(entry, p, kernel.tiles[0])
        assert w.model.total > 0


def test_delta() -> None:
    w = work("bwd_preprocess", tile=Tile())
    assert (w.flops, w.model.read, w.model.written) == (0, {"dO": Q, "O": Q}, {"delta": ROW})
