"""The IO model against the loads and stores of the tiled loops, and against hand-computed numbers."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.reference import flash, flash2_backward, flash_backward, hbm_bytes, paper_block_sizes, visible

ITEMSIZE = 2


def counted(algorithm, q, k, v, **options):
    """Bytes that `algorithm` reads and writes, by tensor: every load and store is intercepted.

    One-dimensional tensors (l, m, LSE) are fp32 and count together as "stats".
    """
    read, written = Counter(), Counter()
    true_load, true_store = flash.load, flash.store

    def tally(counter, x, tile):
        if x.ndim == 1:
            counter["stats"] += 4 * tile.size
        else:
            owners = [name for name, y in (("Q", q), ("K", k), ("V", v)) if np.shares_memory(x, y)]
            counter[owners[0] if owners else "O"] += ITEMSIZE * tile.size

    def load(x, *args):
        tile = true_load(x, *args)
        tally(read, x, tile)
        return tile

    def store(x, row, tile):
        true_store(x, row, tile)
        tally(written, x, tile)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "load", load)
        patch.setattr(flash, "store", store)
        getattr(flash, algorithm)(q, k, v, **options)
    return read, written


def folded(terms):
    """The model's terms under the counter's names. Counter equality treats missing terms as 0."""
    total = Counter()
    for name, n in terms.items():
        total["stats" if name in ("l", "m", "LSE") else name] += n
    return total


@settings(deadline=None, max_examples=150)
@given(
    algorithm=st.sampled_from(["flash1", "flash2"]),
    heads=st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(1, 2)),
    lengths=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    tile=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    causal=st.sampled_from([False, True, "top-left"]),
)
def test_the_model_equals_the_loops(algorithm, heads, lengths, tile, causal):
    (B, Hk, group), (Sq, Sk), D = heads, lengths, 2
    q, k, v = np.ones((B, Hk * group, Sq, D)), np.ones((B, Hk, Sk, D)), np.ones((B, Hk, Sk, D))
    options = {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "causal": causal}
    read, written = counted(algorithm, q, k, v, **options)
    model = hbm_bytes(algorithm, B=B, H=Hk * group, Hk=Hk, Sq=Sq, Sk=Sk, D=D, itemsize=ITEMSIZE, **options)
    assert read == folded(model.read)
    assert written == folded(model.written)
    assert model.total == sum(read.values()) + sum(written.values())

    # flash2 visits the tiles that hold a visible pair and no others; flash1 visits all. Loops and model share the
    # function that ends the range, so this count takes the mask itself.
    seen = visible(Sq, Sk, causal)
    if algorithm == "flash2":
        corners = ((m0, n0) for m0 in range(0, Sq, tile[0]) for n0 in range(0, Sk, tile[1]))
        needed = [n0 for m0, n0 in corners if seen[m0 : m0 + tile[0], n0 : n0 + tile[1]].any()]
        key_rows = sum(min(n0 + tile[1], Sk) - n0 for n0 in needed)
        assert model.read["K"] == model.read["V"] == B * Hk * group * key_rows * D * ITEMSIZE


@settings(deadline=None, max_examples=60)
@given(
    heads=st.tuples(st.integers(0, 2), st.integers(1, 2)),
    lengths=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    tile=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    causal=st.sampled_from([False, True, "top-left"]),
)
def test_the_model_equals_the_loops_of_the_backward(heads, lengths, tile, causal):
    """dK and dV are 0 on chip at first (Algorithm 2, line 7); loads of these zeros do not count. dQ is fp32."""
    (B, H), (Sq, Sk), D = heads, lengths, 2
    q, k, v = np.ones((B, H, Sq, D)), np.ones((B, H, Sk, D)), np.ones((B, H, Sk, D))
    dout, out, lse = np.ones(q.shape), np.ones(q.shape), np.ones(q.shape[:3])
    options = {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "causal": causal}
    given_ = {"Q": q, "K": k, "V": v, "dO": dout, "LSE": lse}
    loaded, stored = Counter(), Counter()
    true_load, true_store = flash_backward.load, flash_backward.store

    def load(x, *args):
        part = true_load(x, *args)
        name = next((name for name, y in given_.items() if np.shares_memory(x, y)), "delta" if x.ndim == 1 else "made")
        loaded[name] += part.size
        return part

    def store(x, row, part):
        true_store(x, row, part)
        stored["all"] += part.size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_backward, "load", load)
        patch.setattr(flash_backward, "store", store)
        flash2_backward(dout, q, k, v, out, lse, **options)
    model = hbm_bytes("flash2_backward", B=B, H=H, Hk=H, Sq=Sq, Sk=Sk, D=D, itemsize=ITEMSIZE, **options)
    widths = {"Q": ITEMSIZE, "K": ITEMSIZE, "V": ITEMSIZE, "dO": ITEMSIZE, "LSE": 4, "delta": 4}
    assert {name: model.read[name] for name in widths} == {name: n * loaded[name] for name, n in widths.items()}
    begun = B * H * Sk * D * 2
    assert model.read["dQ"] == model.written["dQ"] == 4 * (loaded["made"] - begun)
    assert model.written["dK"] + model.written["dV"] == ITEMSIZE * begun
    assert stored["all"] == begun + model.written["dQ"] // 4


SHAPE = {"B": 1, "H": 1, "Hk": 1, "Sq": 5, "Sk": 6, "D": 8, "itemsize": 2}


def test_standard_by_hand():
    model = hbm_bytes("standard", **SHAPE, BLOCK_M=2, BLOCK_N=4)
    # Q, O: 5 · 8 · 2 B = 80 B. K, V: 6 · 8 · 2 B = 96 B. S, P: 5 · 6 · 2 B = 60 B, each written once and read once.
    assert model.read == {"Q": 80, "K": 96, "V": 96, "S": 60, "P": 60}
    assert model.written == {"S": 60, "P": 60, "O": 80}
    assert model.total == 592
    assert model == hbm_bytes("standard", **SHAPE, BLOCK_M=1, BLOCK_N=1, causal=True)  # neither tile nor mask matters


def test_flash1_by_hand():
    model = hbm_bytes("flash1", **SHAPE, BLOCK_M=2, BLOCK_N=4)
    # Two key tiles (4 + 2 keys): Q and O pass twice, l and m (5 · 4 B = 20 B) too; the start writes O, l, m once more.
    assert model.read == {"K": 96, "V": 96, "Q": 160, "O": 160, "l": 40, "m": 40}
    assert model.written == {"O": 240, "l": 60, "m": 60}


def test_flash2_by_hand():
    model = hbm_bytes("flash2", **SHAPE, BLOCK_M=2, BLOCK_N=4)
    # Three query tiles (2 + 2 + 1 rows), each passing over all 6 keys: 3 · 96 B.
    assert model.read == {"Q": 80, "K": 288, "V": 288}
    assert model.written == {"O": 80, "LSE": 20}
    # Bottom-right, row i sees keys 0 … i + 1: the tiles end at keys 3, 5 and 6 of 6, so they load 4, 6 and 6 keys.
    causal = hbm_bytes("flash2", **SHAPE, BLOCK_M=2, BLOCK_N=4, causal=True)
    assert causal.read == {"Q": 80, "K": 256, "V": 256}
    # Top-left, row i sees keys 0 … i: tiles of 4 + 1 rows end at keys 4 and 5, for the last tile has one actual row.
    ragged = hbm_bytes("flash2", **SHAPE, BLOCK_M=4, BLOCK_N=1, causal="top-left")
    assert ragged.read == {"Q": 80, "K": 9 * 16, "V": 9 * 16}


def test_a_backward_of_two_kernels_by_hand():
    # Key tiles of 4 + 2 keys, each passing over all 5 queries: Q, dO 2 · 80 B, LSE, delta 2 · 20 B.
    dkv = hbm_bytes("flash2_dkv", **SHAPE, BLOCK_M=2, BLOCK_N=4)
    assert dkv.read == {"K": 96, "V": 96, "Q": 160, "dO": 160, "LSE": 40, "delta": 40}
    assert dkv.written == {"dK": 96, "dV": 96}
    # Bottom-right, key j is seen by queries j - 1 … 4: the tile of keys 4 and 5 begins at query 3, in the tile of 2.
    causal = hbm_bytes("flash2_dkv", **SHAPE, BLOCK_M=2, BLOCK_N=4, causal=True)
    assert causal.read == {"K": 96, "V": 96, "Q": (5 + 3) * 16, "dO": (5 + 3) * 16, "LSE": 32, "delta": 32}
    dq = hbm_bytes("flash2_dq", **SHAPE, BLOCK_M=2, BLOCK_N=4)
    assert dq.read == {"Q": 80, "dO": 80, "LSE": 20, "delta": 20, "K": 288, "V": 288}  # as the forward walks
    assert dq.written == {"dQ": 80}


def test_heads_and_batches_multiply():
    one = hbm_bytes("flash2", **SHAPE, BLOCK_M=2, BLOCK_N=4)
    many = hbm_bytes("flash2", **SHAPE | {"B": 3, "H": 4, "Hk": 2}, BLOCK_M=2, BLOCK_N=4)
    assert many.total == 12 * one.total  # a shared key head is loaded by each query head


def test_flash_moves_less_than_standard_at_the_papers_size():
    # The paper's argument: N = 1024, d = 64, fp16, 100 KiB of on-chip memory.
    BLOCK_M, BLOCK_N = paper_block_sizes(100 * 1024, 64, 2)
    shape = {"B": 1, "H": 1, "Hk": 1, "Sq": 1024, "Sk": 1024, "D": 64, "itemsize": 2}
    total = {a: hbm_bytes(a, **shape, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N).total for a in ("standard", "flash1", "flash2")}
    assert total["flash1"] < total["standard"] / 2
    assert total["flash2"] < total["standard"] / 1.5


@pytest.mark.parametrize(
    ("smem_bytes", "D", "itemsize", "tile"),
    [
        (100 * 1024, 64, 2, (64, 200)),  # M = 51200, 51200 / 256 = 200; B_r is capped by d
        (100 * 1024, 128, 2, (100, 100)),  # 51200 / 512 = 100 < d
        (48 * 1024, 128, 4, (24, 24)),  # M = 12288, 12288 / 512 = 24
        (1000, 16, 4, (4, 4)),  # M = 250, 250 / 64 = 3.9: the ceiling
        (4, 64, 4, (1, 1)),  # one element still makes a row
    ],
)
def test_paper_block_sizes_by_hand(smem_bytes, D, itemsize, tile):
    assert paper_block_sizes(smem_bytes, D, itemsize) == tile


def test_errors_name_the_value():
    with pytest.raises(ValueError, match=r"'flash3'.*'standard', 'flash1', 'flash2'"):
        hbm_bytes("flash3", **SHAPE, BLOCK_M=2, BLOCK_N=4)
    with pytest.raises(ValueError, match="BLOCK_N=0"):
        hbm_bytes("flash2", **SHAPE, BLOCK_M=2, BLOCK_N=0)
    with pytest.raises(ValueError, match=r"H=3.*Hk=2"):
        hbm_bytes("flash2", **SHAPE | {"H": 3, "Hk": 2}, BLOCK_M=2, BLOCK_N=4)
    with pytest.raises(ValueError, match="smem_bytes=1 "):
        paper_block_sizes(1, 64, 2)
