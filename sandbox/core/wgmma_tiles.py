"""Which tiles of fwd_wgmma were timed on an H200 with which options, and which of them is the fastest: the spec's
preferences, from experiments/008_hopper, 014_scores, 024_latent, 026_sampled_shapes and 028_serving."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from .estimates import wgmma_us
from .kernel import HOPPER_SMS
from .normalise import cdiv
from .problem import Problem
from .tile import Tile


def most_keys(p: Problem) -> int:
    """Largest BLOCK_N that was timed with options that read memory for each score; 256 without them."""
    width, reads = max(p.D, p.Dv), {*p.reads_elements}
    if p.bias_tiles and not p.has_block_map:  # TMA loads it; with a map, too, but larger tiles were not timed
        reads.discard("bias")
    if not reads:
        return 256
    if reads <= {"mask", "score"} and not (p.score and p.score.changes):
        return 128 if width <= 128 else 64
    return 96 if width <= 64 else 80 if width <= 128 else 48


@lru_cache(maxsize=64)  # called for every tile, and `replace` validates the new problem
def pure(p: Problem) -> bool:
    """Whether Dv is D and no score option is used, except a sink, which only the last step of a row reads; the batch
    may be ragged or paged."""
    if p.page_size:  # key_lengths belongs to pages
        p = replace(p, lengths=(), page_size=0, pages=0, key_lengths=False)
    if p.sink:
        p = replace(p, sink=False)
    return p.plain or bool(p.ragged and replace(p, ragged=(), lengths=()).plain)


def uses_all_registers(p: Problem) -> bool:
    """Whether a tile may need all registers, although scores that are modified or masked need some, too: without
    options; with softcap, ALiBi, dropout or a window where larger tiles were faster (experiments/014_scores).
    key_lengths, Dv other than D and most pairs of options are treated alike, and were not timed."""
    width = max(p.D, p.Dv)
    if pure(p):
        return True
    if most_keys(p) < 256 or p.bias or p.ragged or p.score or width > 128:
        return False
    return width <= 64 or bool(p.softcap) or (bool(p.causal) and p.Sq >= 4096)


def rank(p: Problem, t: Tile) -> int:
    """Sort key of tiles: tiles that were timed with the options first, and of these the fastest one. If `best` was not
    timed, the first of `tiles` that was. STAGES does not count: of tiles with equal BLOCK_M and BLOCK_N, the first one
    in `tiles` that fits is used."""
    return 2 * (not was_timed(p, t, uses_all_registers(p))) + (best(p) != (t.BLOCK_M, t.BLOCK_N))


def was_timed(p: Problem, t: Tile, all_registers: bool) -> bool:
    """Whether a tile of this size is preferred with such options: it, or one with similar options, was timed
    (experiments/008_hopper, 014_scores). Not a limit: a tile that was not timed may be faster."""
    consumers, keys = t.BLOCK_M // 64, most_keys(p)
    # Registers of O, S and P per thread.
    words = cdiv(p.Dv, 16) * 8 + t.BLOCK_N // 2 + t.BLOCK_N // 4
    if words > {3: 128, 4: 80}.get(consumers, 200) - (0 if all_registers else 16):
        return False
    if consumers < 3:
        return keys >= t.BLOCK_N
    return keys == 256 and (all_registers or (consumers == 3 and not p.dropout and not p.ragged))


# Tiles of which the estimates choose one for small problems, up to these head dimensions.
SMALL: dict[int, tuple[tuple[int, int], ...]] = {
    64: ((256, 64), (192, 128), (192, 80), (128, 128), (128, 64), (128, 48)),
    128: ((192, 80), (128, 128), (128, 64), (128, 48)),
}


def us_of(p: Problem, size: tuple[int, int]) -> float:
    """Estimated time of fwd_wgmma in µs with tiles of this BLOCK_M and BLOCK_N."""
    return wgmma_us(p, Tile(BLOCK_M=size[0], BLOCK_N=size[1], BLOCKS=HOPPER_SMS))


def fastest(p: Problem, sizes: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The fastest one by the estimates."""
    return min(sizes, key=lambda size: us_of(p, size))


def best_of_small(p: Problem) -> tuple[int, int] | None:
    """The fastest tile where the last key tile, or the only wave of work tiles, takes much of the time: 128 x 48 for
    one key tile, and above D = 128 if it pads a tenth fewer keys; otherwise by the estimates. None for other problems.
    Timed up to 512 queries in one wave (experiment 026); with more, a smaller tile still makes the wave shorter."""
    if not pure(p) or p.ragged or p.page_size or (p.causal and p.Sq > p.Sk):
        return None  # the last: work tiles with and without keys, of which the estimates know the mean
    width, one_wave = max(p.D, p.Dv), p.batches * p.H * cdiv(p.Sq, 128) <= HOPPER_SMS
    fewer_keys = width > 128 and p.Sk < 512 and 10 * 48 * cdiv(p.Sk, 48) < 9 * 64 * cdiv(p.Sk, 64)
    if p.Sk <= 48 or fewer_keys:
        return 128, 48
    if width <= 128 and (one_wave or (p.Sk < 512 and p.Sq < 2048)):
        return fastest(p, SMALL[64 if width <= 64 else 128])
    return None


@lru_cache(maxsize=64)  # called for every tile, and compares estimates
def best(p: Problem) -> tuple[int, int]:
    """BLOCK_M and BLOCK_N of the fastest tile."""
    width, simple, narrow = max(p.D, p.Dv), pure(p), p.window[0] is not None and 4 * p.window[0] <= p.Sq >= 1024
    short = p.Sq < (4096 if p.causal and not p.softcap else 2048)
    if p.has_block_map:  # masks usually have blocks of powers of two
        return 128, 32 if width > 128 else 128 if most_keys(p) >= 128 else 64
    # With pages: BLOCK_N a power of two, for large boxes, each in one page (experiments/028_serving).
    if p.page_size and width > 64:
        return (128, 64) if width > 128 else (192, 64) if simple and p.Sq >= 1152 else (128, 128)
    if p.ragged and not simple:
        return 128, 64 if width > 128 else 128
    if p.Dv <= 128 < p.D <= 192 and most_keys(p) >= 128 and not p.bias_tiles:
        return 128, 128  # experiment 024
    if tile := best_of_small(p):
        return tile
    if width > 128:
        few_keys = short or p.bias_tiles or (width > 192 and (simple or p.options == {"window"}))
        return 128, 64 if few_keys else 80
    if p.bias_tiles:
        return 128 if short else 192, 64
    if simple and 2 * p.Sq <= p.Sk and not p.ragged:  # all rows see about the same number of keys: fill the waves
        return fastest(p, ((128, 128), (192, 128), (256, 64)) if width <= 64 else ((128, 128), (192, 80)))
    if width <= 64:
        return (256, 64) if uses_all_registers(p) and four_consumers(p) and not pads_less(p) else (192, 128)
    if width <= 96 and simple and p.Sq >= 2048:
        return 192, 96
    # BLOCK_M=192 from 2048 rows on, or if the waves are fewer; above D = 96 also from 1152 rows on if every consumer of
    # the last tile has rows.
    if simple:
        short = p.Sq < 2048 and (p.Sq < 1152 or width <= 96 or -p.Sq % 192 >= 64) and not fewer_waves(p)
    if short and not narrow:
        return 128, 128
    return 192, 80 if p.window[0] is None else 64


def pads_less(p: Problem) -> bool:
    """Up to D = 64: whether 192 x 128 is faster than 256 x 64 because there are at least a tenth fewer rows with those
    that the last tile lacks (experiment 026: up to 1.16 times as fast; with 0.94 of the rows it is not)."""
    rows = {BLOCK_M: p.query_tiles(BLOCK_M) * BLOCK_M for BLOCK_M in (192, 256)}
    return pure(p) and not (p.ragged or p.page_size) and p.Sq > 256 and 10 * rows[192] <= 9 * rows[256]


def fewer_waves(p: Problem) -> bool:
    """D from 72 to 128, short sequences: whether 192 x 80 is faster than 128 x 128, mostly because its tiles fill the
    waves, by the estimates (experiment 026: up to 1.36 times as fast). With a causal mask and up to 512 queries it was
    not timed or is slower."""
    if p.ragged or (p.causal and p.Sq <= 512):
        return False
    return us_of(p, (192, 80)) < 0.95 * us_of(p, (128, 128))


def four_consumers(p: Problem) -> bool:
    """Up to D = 64: whether 256 x 64 is preferred to 192 x 128 (unless `pads_less`), because four consumers hide more
    of the prologue and epilogue. Always with softcap, ALiBi, or a causal mask that has neither window nor dropout;
    otherwise if there are fewer than 4096 queries, or a query sees fewer than 4096 keys. Ragged batches, and pages
    without options: up to 1024 queries or keys, with a causal mask 4096."""
    if p.ragged or (p.page_size and pure(p)):
        return min(p.Sq, p.Sk) <= (4096 if p.causal else 1024)
    left, right = p.bounds
    keys = min(p.Sk, p.Sk if left is None or right is None else left + right + 1)
    unbounded = p.causal and left is None and not p.dropout
    return bool(p.softcap or p.alibi or unbounded) or min(p.Sq, keys) < 4096
