"""Spec of `fwd_latent_wgmma.cu`."""

from sandbox.spec import Arch, Entry, Kernel, Problem, Tile, cdiv, unsupported_by_wgmma

MAX_BLOCKS = 65535  # gridDim.z
OPTIONS = {"window", "sink", "key_lengths", "page_size"}


def slabs(p: Problem) -> tuple[int, int]:
    """Slabs of 64 columns: of V, an even number, and of K."""
    V = 2 * cdiv(p.Dv, 128)
    return V, max(V, cdiv(p.D, 64))


def smem_bytes(p: Problem, t: Tile) -> int:
    """Stages of half a V; stages of the rest of K; P twice, Q, factors, m and l; cursors and schedulers; mbarriers."""
    slab, rest_stages, (V, K) = 8192, 2, slabs(p)
    tiles = t.STAGES * (V // 2) + rest_stages * (K - V) + 2 + K - min(K, t.Q_SLABS)
    return tiles * slab + 24 * t.BLOCK_M + 32 + 12 * 32 + 16 * (t.STAGES + rest_stages + 3)


def row_tiles(p: Problem, t: Tile) -> int:
    """Tiles of packed rows (queries times heads of a group) per key/value head."""
    return cdiv(p.Sq * p.group, t.BLOCK_M)


def parts(p: Problem, t: Tile) -> int:
    """Parts into which the key tiles of all batch entries are divided, per row tile and key/value head: blocks.

    Minimizes the estimated time in rounds, one key tile of a block (1.5 us): waves times the rounds of a part plus 3 of
    fixed cost and 2 per segment, plus 3 for the combine kernel and the time to write and read the partial results at 4
    TB/s. With key_lengths, as if all entries had Sk keys.
    """
    tiles, rounds = row_tiles(p, t) * p.Hk, max(cdiv(p.Sk, t.BLOCK_N), 1)
    if t.FILL == 2:
        return max(t.BLOCKS // tiles, 1)

    def cost(n: int) -> float:
        each = cdiv(p.B * rounds, n)
        partial_rows = p.H * p.Sq * (n + p.B) if shares_entries(p, n, rounds) else 0
        combine = 3 + partial_rows * p.Dv * 8 / 6e6 if partial_rows else 0
        return cdiv(tiles * n, t.BLOCKS) * (each + 3 + 2 * cdiv(each, rounds)) + combine

    most = max(min(p.B * rounds, 2 * t.BLOCKS, MAX_BLOCKS), 1)
    return min((n for n in {*range(1, most + 1), min(p.B, MAX_BLOCKS)} if n > 0), key=cost, default=1)


def shares_entries(p: Problem, n: int, rounds: int) -> bool:
    """Whether an entry of `rounds` key tiles is in several of n parts."""
    return cdiv(p.B * rounds, n) % rounds != 0 if n > 0 else False


def needs_combine(p: Problem, t: Tile) -> bool:
    """Whether an entry may be in several parts. Any division is possible with key_lengths."""
    n, rounds = parts(p, t), max(cdiv(p.Sk, t.BLOCK_N), 1)
    return n > 1 and rounds > 1 and (p.key_lengths or p.bounds != (None, None) or shares_entries(p, n, rounds))


def rank(p: Problem, t: Tile) -> int:
    """Two buffers of S first if the tensor cores are the limit: more rows than a tile, keys that are not split
    (experiment 024)."""
    compute_bound = p.Sq * p.group > t.BLOCK_M and parts(p, t) <= 2 * p.B
    return (t.S_BUFFERS == 2) != compute_bound


def partials(p: Problem, t: Tile) -> tuple[int, int]:
    """Floats of scratch memory: O, m and l of every row and split; none is zeroed."""
    return ((parts(p, t) + p.B) * p.H * p.Sq * (p.Dv + 2) if needs_combine(p, t) else 0), 0


def combine_grid(p: Problem, t: Tile) -> tuple[int, int, int]:
    """One warp per row; if the rows are few, a block per row and 128 columns, whose warps share the splits."""
    rows = p.H * p.Sq if needs_combine(p, t) else 0
    if rows * p.B <= 8 * t.BLOCKS and p.Dv > 128:
        return rows, cdiv(p.Dv, 128), p.B
    return cdiv(rows, 8), 1, p.B


def supports(p: Problem, arch: Arch | None) -> str | None:
    """The requirements of tensor maps and wgmma; options that read elements need more registers."""
    if others := p.options - OPTIONS:
        return f"{', '.join(sorted(others))} not supported: {', '.join(sorted(OPTIONS))} are"
    if p.Sq * p.group >= 2**31:
        return f"Sq * H / Hk = {p.Sq * p.group} is not supported: the limit is 2^31 - 1 packed rows"
    return unsupported_by_wgmma(p, arch, "copies of the first columns of k as v")


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """Limits of a tile: one wgmma accumulator of S, key tiles within a page."""
    rules = (
        (t.BLOCK_M == 64, f"BLOCK_M={t.BLOCK_M} must be 64: packed rows are M of wgmma"),
        (t.BLOCK_N == 64, f"BLOCK_N={t.BLOCK_N} must be 64: keys are N of wgmma, and registers limit them"),
        (
            t.S_BUFFERS == 1 or not p.key_lengths or p.bounds == (None, None),
            f"S_BUFFERS={t.S_BUFFERS} spills with key_lengths and a causal mask or a window: use 1",
        ),
        (
            t.Q_SLABS <= 6 or not {"window", "key_lengths"} <= p.options,
            f"Q_SLABS={t.Q_SLABS} spills with a window and key_lengths: use 6",
        ),
        (row_tiles(p, t) % t.CLUSTER == 0, f"CLUSTER={t.CLUSTER} does not divide {row_tiles(p, t)} row tiles"),
        (t.STAGES in (4, 5), f"STAGES={t.STAGES} must be 4 or 5: a key tile and a half, or two, are loaded ahead"),
        (
            p.page_size % t.BLOCK_N == 0,
            f"page_size={p.page_size} is not supported: BLOCK_N={t.BLOCK_N} keys must not cross pages",
        ),
    )
    return next((reason for holds, reason in rules if not holds), None)


kernel = Kernel(
    name="fwd_latent_wgmma",
    test_share=3,
    computes="forward",
    rung=4,
    default=True,
    paged=True,
    summary="latent attention (MLA): v is a view of k; two warpgroups own the halves of O, a third one computes S",
    dtypes=("float16", "bfloat16"),
    max_D=576,
    max_Dv=512,  # O is half of the register file
    latent=True,
    min_arch=(9, 0),
    arch_suffix="a",
    tiles=(
        Tile(BLOCK_M=64, BLOCK_N=64, STAGES=5, Q_SLABS=5, EARLY_STEPS=4, S_BUFFERS=2, CLUSTER=1, FILL=1, BLOCKS=132),
        Tile(BLOCK_M=64, BLOCK_N=64, STAGES=5, Q_SLABS=6, EARLY_STEPS=4, S_BUFFERS=1, CLUSTER=1, FILL=1, BLOCKS=132),
    ),
    grid=lambda p, t: (row_tiles(p, t), p.Hk if p.B else 0, parts(p, t)),
    block=lambda t: (384, 1, 1),
    cluster=lambda t: t.CLUSTER,
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    rank=rank,
    preference=-1,  # for D <= 256 only by name: other kernels support it, too
    scratch={"partials": partials},
    numbers={"entries": lambda p, t: p.B, "parts": parts},
    args=("Q", "K", "V", "O", "LSE", "K_map", "partials", "H", "group", "entries", "score"),
    then=(
        Entry(
            name="fwd_latent_wgmma_combine",
            programmatic_launch=True,
            grid=combine_grid,
            block=lambda t: (256, 1, 1),
            numbers={"parts": parts},
            args=("O", "LSE", "partials", "H", "group", "parts", "score"),
        ),
    ),
)
