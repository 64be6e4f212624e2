"""Spec of `fwd_latent_wgmma.cu`."""

from sandbox.spec import BLOCK_SMEM, Arch, Entry, Kernel, Problem, Tile, cdiv, unsupported_by_wgmma

MAX_SPLITS = 256
MAX_BLOCKS = 65535  # gridDim.z
OPTIONS = {"window", "sink", "key_lengths", "page_size"}


def slabs(p: Problem) -> tuple[int, int]:
    """Slabs of 64 columns: of V, an even number, and of K."""
    V = 2 * cdiv(p.Dv, 128)
    return V, max(V, cdiv(p.D, 64))


def smem_bytes(p: Problem, t: Tile) -> int:
    """Stages of half a V; stages of the rest of K; P twice, the slabs of Q that are not in registers (Q_SLABS are),
    factors, m and l; mbarriers. CLUSTER=2: also P, factors, m and l of the other block, and votes."""
    slab, rest_stages, (V, K) = 8192, 2, slabs(p)
    tiles = t.STAGES * (V // 2) + rest_stages * (K - V) + 2 * t.CLUSTER + K - min(K, t.Q_SLABS)
    barriers = 16 * (t.STAGES + rest_stages + 3 + t.CLUSTER)
    return tiles * slab + 16 * t.BLOCK_M * t.CLUSTER + 64 * (t.CLUSTER - 1) + barriers


def row_tiles(p: Problem, t: Tile) -> int:
    """Tiles of packed rows (queries times heads of a group) per key/value head."""
    return cdiv(p.Sq * p.group, t.BLOCK_M)


def dynamic_splits(p: Problem) -> bool:
    """Whether the device assigns blocks to batch entries by their key_lengths (SplitScheduler in split_kv.cuh)."""
    return p.key_lengths


def splits_of_entry(p: Problem, t: Tile) -> int:
    """Blocks that share the keys of a row tile, if all batch entries have Sk keys.

    Minimizes the estimated time in rounds, one key tile of a block (1.3 us): waves times the rounds of a split plus 3
    of fixed cost, plus 2 for the combine kernel and the time to write and read the partial results at 4 TB/s.
    """
    tiles, rounds = row_tiles(p, t) * p.Hk, cdiv(p.Sk, t.BLOCK_N)

    def cost(n: int) -> float:
        combine = 2 + p.B * p.H * p.Sq * n * p.Dv * 8 / 5.2e6 if n > 1 else 0
        return cdiv(tiles * p.B * n, t.BLOCKS) * (cdiv(rounds, n) + 3) + combine

    return min(range(1, max(1, min(rounds, MAX_SPLITS, MAX_BLOCKS // max(p.B, 1) - 1)) + 1), key=cost)


def splits(p: Problem, t: Tile) -> int:
    """`splits_of_entry`; with key_lengths the number of blocks for all entries among which their keys are divided, or
    0: one block per entry, which needs neither a scheduler nor the combine kernel."""
    n = splits_of_entry(p, t)
    return n if not dynamic_splits(p) else n * p.B if n > 1 else 0


def blocks(p: Problem, t: Tile) -> int:
    """gridDim.z: splits of all batch entries; an upper bound with dynamic splits."""
    n = splits(p, t)
    return n + p.B if dynamic_splits(p) else n * p.B


def needs_combine(p: Problem, t: Tile) -> bool:
    """Whether a row may have more than one split."""
    return splits(p, t) > 1 and p.Sk > t.BLOCK_N


def partials(p: Problem, t: Tile) -> tuple[int, int]:
    """Floats of scratch memory: O, m and l of every row and split; none is zeroed."""
    return (blocks(p, t) * p.H * p.Sq * (p.Dv + 2) if needs_combine(p, t) else 0), 0


def supports(p: Problem, arch: Arch | None) -> str | None:
    """The requirements of tensor maps and wgmma; a grid that can be launched; no options but those in OPTIONS."""
    if others := p.options - OPTIONS:
        found = f"{' and '.join(sorted(others))} {'are' if len(others) > 1 else 'is'}"
        return f"{found} not supported with latent attention: only causal, window, sink, key_lengths and pages are"
    if p.B > MAX_BLOCKS:
        return f"B={p.B} is not supported: the limit is {MAX_BLOCKS} (split the batch)"
    if p.Sq * p.group >= 2**31:
        return f"Sq * H / Hk = {p.Sq * p.group} is not supported: the limit is 2^31 - 1 packed rows"
    return unsupported_by_wgmma(p, arch)


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """Limits of a tile: one wgmma accumulator of S, key tiles within a page."""
    rules = (
        (
            p.page_size % t.BLOCK_N == 0,
            f"page_size={p.page_size} must be a multiple of BLOCK_N={t.BLOCK_N}: a key tile must not cross pages",
        ),
        (t.BLOCK_M == 64, f"BLOCK_M={t.BLOCK_M} must be 64: packed rows are M of wgmma"),
        (t.BLOCK_N == 64, f"BLOCK_N={t.BLOCK_N} must be 64: keys are N of wgmma, and registers limit them"),
        (
            t.Q_SLABS <= 6 or not {"window", "key_lengths"} <= p.options,
            f"Q_SLABS={t.Q_SLABS} spills with a window and key_lengths: use 6",
        ),
        (t.STAGES in (4, 5), f"STAGES={t.STAGES} must be 4 or 5: a key tile and a half, or two, are loaded ahead"),
        (
            t.CLUSTER == 1 or (t.CLUSTER == 2 and row_tiles(p, t) % 2 == 0),
            (
                f"CLUSTER={t.CLUSTER} must be 1, or 2 with an even number of row tiles (here {row_tiles(p, t)}): its "
                "blocks share keys"
            ),
        ),
        (
            t.CLUSTER == 1
            or (t.STAGES == 5 and 8192 * (t.STAGES * slabs(p)[0] // 2 + 2) >= t.BLOCK_M * (2 * p.D + 16)),
            (
                f"CLUSTER=2 is not supported with STAGES={t.STAGES} and {p.widths}: it needs STAGES=5, and 64 rows of "
                "Q must fit where V and P will be"
            ),
        ),
        (
            smem_bytes(p, t) <= BLOCK_SMEM,
            (
                f"tile {t} needs {smem_bytes(p, t)} bytes of shared memory at {p.widths}: the limit of a block is "
                f"{BLOCK_SMEM} (use more Q_SLABS)"
            ),
        ),
    )
    return next((reason for holds, reason in rules if not holds), None)


LEAST_TILES_OF_PAIR = 48  # key tiles of a block, from which CLUSTER=2 is faster (experiment 024)


def rank(p: Problem, t: Tile) -> int:
    """Sort key of tiles: CLUSTER=2 first if the blocks have many key tiles."""
    many = cdiv(cdiv(p.Sk, t.BLOCK_N), splits_of_entry(p, t)) >= LEAST_TILES_OF_PAIR
    return -t.CLUSTER if many else t.CLUSTER


kernel = Kernel(
    name="fwd_latent_wgmma",
    test_share=3,
    computes="forward",
    rung=4,
    default=True,
    paged=True,
    invariant_to=("runs", "strides"),
    summary="latent attention (MLA): v is a view of k; two warpgroups own the halves of O, a third one computes S",
    dtypes=("float16", "bfloat16"),
    max_D=576,
    max_Dv=512,  # O is half of the register file
    latent=True,
    min_arch=(9, 0),
    arch_suffix="a",
    tiles=(
        Tile(BLOCK_M=64, BLOCK_N=64, STAGES=5, Q_SLABS=6, BLOCKS=132, CLUSTER=1),
        Tile(BLOCK_M=64, BLOCK_N=64, STAGES=5, Q_SLABS=7, BLOCKS=132, CLUSTER=2),
    ),
    grid=lambda p, t: (row_tiles(p, t), p.Hk, blocks(p, t)),
    block=lambda t: (384, 1, 1),
    cluster=lambda t: t.CLUSTER,
    rank=rank,
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    preference=-1,  # for D <= 256 only by name: other kernels support it, too
    scratch={"partials": partials},
    numbers={"splits": splits, "row_tiles": row_tiles},
    args=("Q", "K", "V", "O", "LSE", "K_map", "partials", "H", "group", "splits", "score"),
    then=(
        Entry(
            name="fwd_latent_wgmma_combine",
            programmatic_launch=True,
            grid=lambda p, t: (p.Sq if needs_combine(p, t) else 0, p.H, p.B),
            block=lambda t: (256, 1, 1),
            numbers={"splits": splits},
            args=("O", "LSE", "partials", "H", "splits", "score"),
        ),
    ),
)
