"""Spec of `fwd_decode.cu`."""

from functools import lru_cache

from sandbox.spec import SM_SMEM, Arch, Entry, Kernel, Problem, Tile, cdiv, decode_tiles, unsupported_by_cp_async

SM_BYTES_IN_FLIGHT = 131072  # outstanding loads per SM that saturate memory bandwidth
MAX_SPLITS = 256
MAX_BLOCKS = 65535  # gridDim.z
FEW_SPLITS = 3  # of a row, on average: each group of threads of the combine kernel merges those of one head
MAX_ACCUMULATORS = 32 * 160  # of S and O per warp

# BLOCK_N, WARPS, STAGES, CLUSTER
TILES = ((16, 4, 3, 1), (32, 4, 2, 1), (32, 4, 2, 2))  # the latter two for float8
SMALL_TILES = (  # up to 16 rows
    (16, 4, 2, 1),  # D >= 128 with 100 KB per SM
    (16, 4, 2, 2), (16, 4, 2, 4), (16, 8, 2, 1), (16, 8, 3, 2),
    (32, 4, 3, 1), (32, 8, 2, 1), (32, 2, 3, 1), (16, 4, 5, 1),  # float8; the last one with large D
)  # fmt: skip


def stage_bytes(p: Problem, t: Tile) -> tuple[int, int]:
    """Bytes of a stage, and of O, of a warp."""
    K, V = decode_tiles.row_bytes(p)
    return t.BLOCK_N * (K + V), 4 * t.BLOCK_M * (V // p.key_itemsize)


def early_stages(p: Problem, t: Tile) -> int:
    """EARLY_STAGES: with stream-K, the stages that O does not take. 0 where O takes several and the second buffer of Q
    may cost a block per SM, except for the shape that was timed."""
    stage, O_smem = stage_bytes(p, t)
    O_stages, timed = cdiv(O_smem, stage), t.BLOCK_M == 32 and p.D == p.Dv == 128
    return max(t.STAGES - O_stages, 0) if stream_k(p, t) and (O_stages == 1 or timed) else 0


def macros(p: Problem, t: Tile) -> dict[str, int]:
    """Macros that differ from 0."""
    found = {"TMA": int(decode_tiles.by_tma(p, t)), "EARLY_STAGES": early_stages(p, t)}
    return {name: value for name, value in found.items() if value}


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, twice if the loads of the next split start early; m and l of each warp; each warp's stages of K and V, which O
    reuses; O, m, l from the other blocks of a cluster; barriers of TMA."""
    stage, O_smem = stage_bytes(p, t)
    dsmem = (t.CLUSTER - 1) * t.BLOCK_M * (16 * cdiv(p.Dv // 4, t.CLUSTER) + 8)
    Q = t.BLOCK_M * decode_tiles.row_bytes(p)[0] * p.itemsize // p.key_itemsize * (2 if early_stages(p, t) else 1)
    barriers = 8 * t.WARPS * t.STAGES * decode_tiles.by_tma(p, t)
    return Q + t.WARPS * (8 * t.BLOCK_M + max(t.STAGES * stage, O_smem)) + dsmem + barriers


def by_entry(p: Problem) -> bool:
    """Whether each batch entry has its own blocks (BLOCKS_BY_ENTRY in split_kv.cuh)."""
    return not p.ragged or p.short


def entries(p: Problem) -> int:
    """Batch entries with blocks of their own; 1 if the row tiles of all sequences are counted together."""
    return p.B if by_entry(p) else 1


def queries(p: Problem) -> int:
    """Most queries of a batch entry, or the queries of all sequences."""
    if not by_entry(p):
        return p.rows[0]
    return min(p.Sq, p.short_queries) if p.short else p.Sq


def row_tiles(p: Problem, t: Tile) -> int:
    """Tiles of packed rows (queries times heads of a group) per key/value head."""
    rows = queries(p) * p.group
    if not by_entry(p):
        return rows // t.BLOCK_M + p.B if p.B else 0
    return cdiv(rows, t.BLOCK_M)


def stream_k(p: Problem, t: Tile) -> bool:
    """Whether the device divides the keys of all batch entries among blocks (StreamScheduler in split_kv.cuh)."""
    return p.key_lengths and by_entry(p) and t.CLUSTER == 1


def resident_blocks(p: Problem, t: Tile) -> int:
    """Blocks that run at the same time: as many as saturate memory bandwidth, if they fit into shared memory. Stream-K
    over float8 keys: as many as half of the bytes in flight need, but at least two per SM. More blocks only make more
    partial results (H 32/8, 4096 keys, B 16: 27.0 instead of 28.5 us, B 32: 38.5 instead of 38.9; experiment 028)."""
    fit = max(1, SM_SMEM // (smem_bytes(p, t) + 1024))
    in_flight = t.WARPS * (t.STAGES - 1) * stage_bytes(p, t)[0]
    enough = cdiv(SM_BYTES_IN_FLIGHT, in_flight)
    if stream_k(p, t) and p.float8_keys:
        enough = max(2, cdiv(SM_BYTES_IN_FLIGHT // 2, in_flight))
    return t.BLOCKS * min(fit, enough)


@lru_cache(maxsize=256)  # the preference, and grids, scratch and arguments of a launch depend on it
def splits(p: Problem, t: Tile) -> int:
    """Splits: blocks, or clusters, that share the keys of a row tile; with stream-K those of all batch entries.

    Minimizes the estimated time in rounds (one key tile per warp): waves times the rounds of a split plus 2 of fixed
    cost, plus 1 + 3/8 per split for the combine kernel. A split has at least STAGES - 1 rounds. Stream-K: one wave.
    """
    tiles, rounds = row_tiles(p, t) * p.Hk, cdiv(p.Sk, t.BLOCK_N * t.WARPS * t.CLUSTER)
    limit = max(1, rounds // (t.STAGES - 1))  # per entry
    resident = resident_blocks(p, t)
    if stream_k(p, t):
        return max(1, min(p.B * limit, resident // max(tiles, 1)))
    row_tiles_of_all = tiles * entries(p)

    def cost(n: int) -> int:
        waves = cdiv(row_tiles_of_all * n * t.CLUSTER, resident)
        return waves * (cdiv(rounds, n) + 2) + (n > 1 and 1 + cdiv(3 * n, 8))

    limit = max(1, min(limit, MAX_SPLITS, MAX_BLOCKS // max(entries(p), 1)))
    return min(range(1, limit + 1), key=cost)


def blocks(p: Problem, t: Tile) -> int:
    """gridDim.z: splits of all batch entries, or the blocks that share them."""
    return splits(p, t) * (1 if stream_k(p, t) else entries(p))


def needs_combine(p: Problem, t: Tile) -> bool:
    """Whether a row may have more than one split."""
    return splits(p, t) > 1 and p.Sk > t.BLOCK_N * (1 if stream_k(p, t) else t.WARPS * t.CLUSTER)


def combine_grid(p: Problem, t: Tile) -> tuple[int, int, int]:
    """A block per row (an upper bound for ragged queries), head and entry. Few splits with stream-K: per row, several
    heads, and entry, or block of `fwd_decode` if those are fewer (SplitCombiner in split_epilogue.cuh)."""
    rows = queries(p) if by_entry(p) else p.query_tiles(1)
    if not needs_combine(p, t):
        return 0, p.H, entries(p)
    if stream_k(p, t) and splits(p, t) <= FEW_SPLITS * entries(p):
        return rows, cdiv(p.H, 128 * t.WARPS // p.Dv), min(splits(p, t), entries(p))
    return rows, p.H, entries(p)


def partials(p: Problem, t: Tile) -> tuple[int, int]:
    """Floats of scratch memory: O, m and l of every row and split; none is zeroed."""
    parts = blocks(p, t) + (p.B if stream_k(p, t) else 0)
    return (parts * p.H * queries(p) * (p.Dv + 2) if needs_combine(p, t) else 0), 0


def first_for(p: Problem) -> bool:
    """Problems on which this kernel is faster than fwd_mma and fwd_wgmma, or fwd_wgmma_fp8 (experiment 020): few rows
    and many keys, or up to 256 rows if tiles of 128 queries would leave half of the SMs idle; or few blocks. Of ragged
    queries over pages, those with few rows in every sequence; otherwise it computes the short ones (`short_sequences`
    of fwd_wgmma, experiment 028)."""
    if p.ragged:
        return p.short or (p.page_size > 0 and p.Sq * p.group <= 64)
    rows, max_rows = p.Sq * p.group, 128 if max(p.D, p.Dv) <= 64 and not p.float8_keys else 64
    few_rows, few_tiles = p.Sq <= 32 and rows <= max_rows, p.B * p.H * cdiv(p.Sq, 128) <= 66 and rows <= 256
    few_queries = 0 < 16 * p.Sq <= p.Sk and (few_rows or few_tiles) and not p.has_block_map
    return few_queries or decode_tiles.few_blocks(p)


def supports(p: Problem, arch: Arch | None) -> str | None:
    """cp.async copies 16 bytes of a row at a time; the scale is part of the exponent; rows have 31-bit indices."""
    if reason := unsupported_by_cp_async(p):
        return reason
    if queries(p) * p.group >= 2**31:
        return f"{queries(p) * p.group} packed rows (query rows * H / Hk) are not supported: the limit is 2^31 - 1"
    return None


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """Limits of a tile: whole MMA steps, key tiles within a page, registers of S and O, clusters."""
    width = decode_tiles.row_bytes(p)[1] // p.key_itemsize + t.BLOCK_N
    rules = (
        (t.BLOCK_M in (8, 16, 32), f"BLOCK_M={t.BLOCK_M} must be 8, 16 or 32: columns of m16n8k16"),
        (t.BLOCK_M % t.WARPS == 0, f"WARPS={t.WARPS} must divide BLOCK_M={t.BLOCK_M}: each warp combines as many rows"),
        (t.BLOCK_N % 16 == 0, f"BLOCK_N={t.BLOCK_N} must be a multiple of 16: one m16n8k16 step of P V"),
        (
            t.BLOCK_N == 16
            or decode_tiles.in_pages(p, t.BLOCK_N)
            or (t.BLOCK_N == 32 and decode_tiles.in_pages(p, 16)),
            f"BLOCK_N={t.BLOCK_N} must divide page_size={p.page_size}, or be 16, or 32 in pages of a multiple of 16",
        ),
        (
            t.BLOCK_M * width <= MAX_ACCUMULATORS,
            f"BLOCK_M={t.BLOCK_M} needs {t.BLOCK_M * width // 32} registers for S and O at Dv={p.Dv}: the limit is 160",
        ),
        (
            t.CLUSTER == 1 or arch is None or arch >= (9, 0),
            f"CLUSTER={t.CLUSTER} needs compute capability 9.0 or later, which has distributed shared memory",
        ),
        (
            not decode_tiles.by_tma(p, t) or arch is None or arch >= (9, 0),
            f"tile {t} needs compute capability 9.0 or later, which has TMA",
        ),
        (t.STAGES >= 2, f"STAGES={t.STAGES} must be at least 2: one is read while the others are loaded"),
    )
    return next((reason for holds, reason in rules if not holds), None)


kernel = Kernel(
    name="fwd_decode",
    computes="forward",
    rung=3,
    default=True,
    ragged=True,
    paged=True,
    float8_keys=True,
    invariant_to=("runs", "strides"),
    summary="decoding: packed GQA, split-KV, paged keys; memory-bound",
    dtypes=("float16", "bfloat16", "float8_e4m3", "float8_e5m2"),
    min_arch=(8, 0),
    tiles=(
        *(
            Tile(BLOCK_M=rows, BLOCK_N=keys, WARPS=warps, STAGES=stages, BLOCKS=132, CLUSTER=cluster)
            for rows, tiles in (
                (8, (*TILES, *SMALL_TILES)),
                (16, (*TILES, *SMALL_TILES)),
                (32, (*TILES, (16, 8, 2, 1), (32, 4, 3, 1))),
            )
            for keys, warps, stages, cluster in tiles
        ),
        decode_tiles.BY_TMA,
    ),
    space={
        "BLOCK_M": (8, 16, 32),
        "BLOCK_N": (16, 32),
        "WARPS": (2, 4, 8),
        "STAGES": (2, 3, 4, 5, 6),
        "BLOCKS": (132,),
        "CLUSTER": (1, 2, 4),
    },
    grid=lambda p, t: (row_tiles(p, t) * t.CLUSTER, p.Hk, blocks(p, t)),
    block=lambda t: (32 * t.WARPS, 1, 1),
    smem_bytes=smem_bytes,
    cluster=lambda t: t.CLUSTER,
    supports=supports,
    check_tile=check_tile,
    rank=lambda p, t: decode_tiles.rank(p, t, queries(p), row_tiles(p, t), needs_combine),
    first_for=first_for,
    scratch={"partials": partials},
    numbers={"splits": splits, "entries": lambda p, t: entries(p), "row_tiles": row_tiles},
    args=("Q", "K", "V", "O", "LSE", "partials", "H", "group", "splits", "entries", "score", "K_map", "V_map"),
    unused=lambda p, t: () if decode_tiles.by_tma(p, t) else ("K_map", "V_map"),
    macros_of=macros,
    then=(
        Entry(
            name="fwd_decode_combine",
            programmatic_launch=True,
            grid=combine_grid,
            block=lambda t: (32 * t.WARPS, 1, 1),
            smem_bytes=lambda p, t: 0,
            numbers={"splits": splits, "entries": lambda p, t: entries(p)},
            args=("O", "LSE", "partials", "H", "splits", "entries", "score"),
        ),
    ),
)
